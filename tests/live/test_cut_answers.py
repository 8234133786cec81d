"""Answers that end by the output limit: in their text, and inside a call's arguments.

The limit is the task's own (`sampling.max_tokens`), so that asking for more, as some CLIs do, ends
by length again.
"""

from pathlib import Path
from typing import NamedTuple

import pytest

from polar_gateway.testing.script import Step
from tests.live.driver import CLIS, Ran, assert_recorded, live, rule, turn

pytestmark = pytest.mark.clis

LIMIT = 150
LONG = " ".join(f"word{number}" for number in range(200))


class End(NamedTuple):
    """What a CLI makes of it."""

    calls: int
    """In all, the first of which was answered whole."""
    error: str | None = None
    """What the session's error says; None: the CLI is content."""


IN_TEXT = {
    "codex": End(2, "reason: max_output_tokens"),
    "claude_code": End(5, "response exceeded the 16384 output token maximum"),
    "pi": End(2),
    "pi_old": End(2),
    "gemini_cli": End(2),
    "qwen_code": End(2),
    "opencode": End(2),
}
"""Claude Code lets it go on three times before it gives up."""

IN_CALL = {
    "codex": End(2, "reason: max_output_tokens"),
    "claude_code": End(3),
    "pi": End(3),
    "pi_old": End(3),
    "gemini_cli": End(5),
    "qwen_code": End(3),
    "opencode": End(3),
}
"""Most tell the model that its call was broken, pi_old and Qwen Code mend it and run it. Gemini CLI
hears of no call, since one without its arguments cannot be told in its API; it asks for the turn
three times more, and each is a sample of its own."""


def assert_ended(ran: Ran, wanted: End) -> None:
    assert (ran.result.status, len(ran.calls)) == (
        "ERROR" if wanted.error else "COMPLETED",
        wanted.calls,
    ), ran.how
    assert (wanted.error or "") in (ran.result.error or "")
    assert all(one.delivered for one in ran.completions)
    assert_recorded(ran)


@pytest.mark.parametrize("harness", CLIS)
async def test_a_text_that_ends_by_length_is_recorded_as_such_and_the_cli_ends_as_it_would(
    tmp_path: Path, harness: str
) -> None:
    ran = await live(
        tmp_path,
        harness,
        rule(
            "Plant beans",
            turn(harness, "echo one > beans.txt"),
            Step(think="A long story.", say=f"I tell: {LONG}"),
            tokens="canonical",
        ),
        instruction="Plant beans.",
        sampling={"max_tokens": LIMIT},
    )
    assert_ended(ran, IN_TEXT[harness])
    assert (ran.workdir / "beans.txt").read_text() == "one\n"
    first, *cut = ran.completions
    assert first.finish_reason == "tool_calls"
    assert {(one.finish_reason, len(one.sampled_ids)) for one in cut} == {("length", LIMIT)}


@pytest.mark.parametrize("harness", CLIS)
async def test_a_call_that_ends_by_length_is_recorded_as_such_and_the_cli_goes_on_as_it_would(
    tmp_path: Path, harness: str
) -> None:
    ran = await live(
        tmp_path,
        harness,
        rule(
            "Plant beans",
            turn(harness, "echo one > beans.txt"),
            turn(harness, f"echo {LONG}"),
            turn(harness, say="Planted."),
            tokens="canonical",
        ),
        instruction="Plant beans.",
        sampling={"max_tokens": LIMIT},
    )
    assert_ended(ran, IN_CALL[harness])
    assert {(one.finish_reason, len(one.sampled_ids)) for one in ran.completions[1:2]} == {
        ("length", LIMIT)
    }
