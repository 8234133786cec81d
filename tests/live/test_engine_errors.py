"""An engine that fails: for a moment, for longer than the gateway waits, and in mid-answer."""

from pathlib import Path
from typing import NamedTuple

import pytest

from polar_gateway.config import ModelCallConfig
from polar_gateway.testing.engine import Fault
from tests.live.driver import (
    CLIS,
    Ran,
    assert_completed,
    assert_recorded,
    assert_sampled_once,
    live,
    planting,
    planting_slowly,
)

pytestmark = pytest.mark.clis


def assert_done(ran: Ran, requests: int) -> None:
    assert_completed(ran)
    assert (ran.workdir / "beans.txt").read_text() == "one\ntwo\n"
    assert len(ran.wire.requests) == requests, ran.how
    assert [one.delivered for one in ran.completions] == [True] * 3
    assert_recorded(ran)
    assert_sampled_once(ran)


@pytest.mark.parametrize("harness", CLIS)
async def test_two_500s_are_not_heard_by_the_harness(tmp_path: Path, harness: str) -> None:
    ran = await live(
        tmp_path,
        harness,
        planting(harness),
        instruction="Plant beans.",
        faults=[Fault(match="Plant beans", skip=1, times=2, status=500)],
    )
    assert [call.status for call in ran.calls] == [200, 500, 500, 200, 200]
    assert_done(ran, requests=3)


@pytest.mark.parametrize("harness", CLIS)
async def test_errors_that_last_are_told_in_the_form_in_which_the_harness_backs_off(
    tmp_path: Path, harness: str
) -> None:
    ran = await live(
        tmp_path,
        harness,
        planting(harness),
        instruction="Plant beans.",
        faults=[
            Fault(match="Plant beans", skip=1, status=503),
            Fault(match="Plant beans", status=500),
        ],
        model_calls=ModelCallConfig(engine_patience_seconds=0),
    )
    assert [call.status for call in ran.calls] == [200, 503, 500, 200, 200]
    assert_done(ran, requests=5)


class Break(NamedTuple):
    """What a CLI makes of an answer whose engine dies when half of its text is out."""

    again: bool
    """It asks for the same turn again, and this time gets it; otherwise it keeps what it got."""
    asks: str = ""
    """What it adds to the prompt then."""


BREAKS = {
    "codex": Break(again=False),
    "claude_code": Break(again=False, asks="cut off mid-stream"),
    "pi": Break(again=True),
    "pi_old": Break(again=True),
    "gemini_cli": Break(again=True),
    "qwen_code": Break(again=False, asks="<previous_response_suffix>"),
    "opencode": Break(again=True),
}


@pytest.mark.parametrize("harness", CLIS)
async def test_an_engine_that_dies_in_mid_answer_is_told_inside_the_stream(
    tmp_path: Path, harness: str
) -> None:
    ran = await live(
        tmp_path,
        harness,
        *planting_slowly(harness),
        instruction="Plant beans.",
        faults=[Fault(skip=1, disconnect_after=25)],
        token_delay=0.02,
    )
    wanted = BREAKS[harness]
    assert_completed(ran)
    assert len(ran.calls) == len(ran.wire.requests) == (4 if wanted.again else 3), ran.how
    broken, after = ran.completions[1:3]
    assert (broken.delivered, broken.finish_reason) == (False, None)
    assert broken.findings == ["engine_broke_off"]
    assert broken.delivered_tokens == len(broken.sampled_ids) == 25
    assert after.delivered
    assert (after.prompt_ids == broken.prompt_ids) == wanted.again
    assert wanted.asks in ran.calls[2].prompt
    assert (ran.workdir / "beans.txt").read_text() == ("one\ntwo\n" if wanted.again else "one\n")
    assert_recorded(ran)
