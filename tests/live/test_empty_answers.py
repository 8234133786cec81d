"""Answers without a word: what some CLIs ask again for is another sample, never the same one again."""

from pathlib import Path
from typing import NamedTuple

import pytest

from polar_gateway.testing.script import Step
from tests.live.driver import CLIS, assert_completed, assert_recorded, live, rule, turn

pytestmark = pytest.mark.clis

NUDGES = "had no visible output|returned an empty response"


class Asks(NamedTuple):
    """How often a CLI asks for the turn that was empty."""

    times: int = 1
    nudges: bool = False
    """It says what was wrong, and is content with the answer to that."""


AFTER_A_TOOL = {
    "codex": Asks(),
    "claude_code": Asks(2, nudges=True),
    "pi": Asks(),
    "pi_old": Asks(),
    "gemini_cli": Asks(),
    "qwen_code": Asks(5),
    "opencode": Asks(),
}


@pytest.mark.parametrize("harness", CLIS)
async def test_an_answer_without_a_word_is_a_turn_like_any_other(
    tmp_path: Path, harness: str
) -> None:
    ran = await live(
        tmp_path,
        harness,
        rule(["Plant beans", NUDGES], Step(say="Planted.")),
        rule("Plant beans", turn(harness, "echo one > beans.txt"), ""),
        instruction="Plant beans.",
    )
    wanted = AFTER_A_TOOL[harness]
    assert_completed(ran)
    empty = ran.calls[1:-1] if wanted.nudges else ran.calls[1:]
    assert len(ran.calls) == len(ran.wire.requests) == 1 + wanted.times, ran.how
    assert {len(call.token_ids) for call in empty} == {1}
    assert all(one.delivered for one in ran.completions)
    assert_recorded(ran)
    assert ran.result.trajectory is not None
    assert sum(sum(trace.loss_mask) for trace in ran.result.trajectory.traces) == sum(
        len(call.token_ids) for call in ran.calls
    )


async def test_gemini_cli_asks_three_times_more_for_a_first_answer_without_a_word(
    tmp_path: Path,
) -> None:
    ran = await live(tmp_path, "gemini_cli", rule("Plant beans", ""), instruction="Plant beans.")
    assert ran.result.status == "COMPLETED"
    assert len(ran.calls) == 4
    assert all("returned an empty response" in call.prompt for call in ran.calls[1:])
    assert all(one.delivered for one in ran.completions)
    assert_recorded(ran)
