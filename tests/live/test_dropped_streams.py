"""The connection of a harness breaks in mid-answer; the engine goes on, and no turn is sampled twice.

What a CLI does then depends on what it has got: one whose first block was not complete asks again,
and is given the very answer that was on its way. Some keep a complete block, or the half of a
text, and ask for what would follow, which is another prompt and so another sample.
"""

from pathlib import Path

import pytest

from tests.live.driver import (
    CLIS,
    Ran,
    assert_completed,
    assert_recorded,
    assert_sampled_once,
    live,
    planting_slowly,
)
from tests.live.wire import Cut

pytestmark = pytest.mark.clis

CHAT_TEXT = b'"delta":{"content":"'
TEXT = {
    "codex": b"response.output_text.delta",
    "claude_code": b'"text_delta"',
    "pi": CHAT_TEXT,
    "pi_old": CHAT_TEXT,
    "gemini_cli": b'"text":"',
    "qwen_code": CHAT_TEXT,
    "opencode": CHAT_TEXT,
}
"""What a piece of text looks like on each one's wire."""

FAILS = {"gemini_cli"}
"""Who ends with an error when a stream is cut, as it does against its provider."""

KEEPS = {
    "codex": "",
    "claude_code": "cut off mid-stream",
    "qwen_code": "<previous_response_suffix>",
}
"""Who keeps what it has got, and by which words it asks for the rest: Codex by none, its next
request ends with the reasoning that was complete."""


async def dropped(folder: Path, harness: str, cut: Cut) -> Ran:
    ran = await live(
        folder,
        harness,
        *planting_slowly(harness),
        instruction="Plant beans.",
        cuts=(cut,),
        token_delay=0.03,
    )
    assert ran.wire.cuts == [cut], ran.how
    assert_recorded(ran)
    assert_sampled_once(ran)
    return ran


def assert_given_again(ran: Ran) -> None:
    """The harness asked four times, the engine thrice, and every answer has arrived."""
    assert_completed(ran)
    assert (ran.workdir / "beans.txt").read_text() == "one\ntwo\n"
    assert (len(ran.wire.requests), len(ran.calls)) == (4, 3), ran.how
    assert [one.delivered for one in ran.completions] == [True] * 3


def assert_failed(ran: Ran) -> None:
    assert ran.result.status == "ERROR"
    assert ran.result.failure is not None
    assert ran.result.failure.boundary == "harness"
    assert len(ran.wire.requests) == len(ran.calls) == 2, ran.how
    assert [one.delivered for one in ran.completions] == [True, False]


@pytest.mark.parametrize("harness", CLIS)
async def test_a_stream_cut_at_its_beginning_is_asked_for_again_and_not_sampled_again(
    tmp_path: Path, harness: str
) -> None:
    ran = await dropped(tmp_path, harness, Cut(stream=2, mark=b"\n\n", nth=3))
    if harness in FAILS:
        assert_failed(ran)
    else:
        assert_given_again(ran)


@pytest.mark.parametrize("harness", CLIS)
async def test_a_stream_cut_in_its_text_is_asked_for_again_or_gone_on_from(
    tmp_path: Path, harness: str
) -> None:
    ran = await dropped(tmp_path, harness, Cut(stream=2, mark=TEXT[harness], nth=8))
    if harness not in FAILS and harness not in KEEPS:
        assert_given_again(ran)
        return
    if harness in FAILS:
        assert_failed(ran)
    else:
        assert_completed(ran)
        assert len(ran.wire.requests) == len(ran.calls) == 3, ran.how
        assert KEEPS[harness] in ran.calls[2].prompt
        assert [one.delivered for one in ran.completions] == [True, False, True]
    got = ran.completions[1].delivered_tokens
    assert got is not None
    assert 0 < got < len(ran.calls[1].token_ids)
