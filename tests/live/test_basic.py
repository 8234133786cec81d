"""Each CLI writes a file in three turns."""

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
async def test_a_task_of_three_turns_is_done_and_is_one_chain(tmp_path: Path, harness: str) -> None:
    ran = await live(
        tmp_path,
        harness,
        rule(
            "Plant beans",
            turn(harness, "echo one > beans.txt", think="A file first."),
            turn(harness, "echo two >> beans.txt", say="Now the second row."),
            turn(harness, say="Planted."),
        ),
        instruction="Plant beans: write beans.txt.",
    )
    assert_completed(ran)
    assert (ran.workdir / "beans.txt").read_text() == "one\ntwo\n"
    assert len(ran.completions) == len(ran.calls) == len(ran.wire.requests) == 3
    assert all(one.delivered and one.kind == "turn" for one in ran.completions)
    assert_recorded(ran)
    assert_sampled_once(ran)
    assert_one_chain(ran)
