"""Each CLI runs the two calls of one turn and answers both in the next."""

import re
from pathlib import Path

import pytest

from tests.live.driver import (
    CLIS,
    assert_completed,
    assert_one_chain,
    assert_recorded,
    assert_sampled_once,
    live,
    rule,
    turn,
)

pytestmark = pytest.mark.clis


@pytest.mark.parametrize("harness", CLIS)
async def test_two_calls_of_one_turn_are_both_run_and_answered_in_their_order(
    tmp_path: Path, harness: str
) -> None:
    ran = await live(
        tmp_path,
        harness,
        rule(
            "two rows",
            turn(
                harness,
                "echo left > left.txt; echo LEFT-ROW",
                "echo right > right.txt; echo RIGHT-ROW",
            ),
            turn(harness, say="Both are sown."),
        ),
        instruction="Sow two rows at once.",
    )
    assert_completed(ran)
    assert (ran.workdir / "left.txt").read_text() == "left\n"
    assert (ran.workdir / "right.txt").read_text() == "right\n"
    first, second = ran.calls
    assert first.message is not None
    assert len(first.message["tool_calls"]) == 2
    told = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", second.prompt, re.DOTALL)
    assert [("LEFT-ROW" in text, "RIGHT-ROW" in text) for text in told] == [
        (True, False),
        (False, True),
    ]
    assert_recorded(ran)
    assert_sampled_once(ran)
    assert_one_chain(ran)
