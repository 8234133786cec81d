"""Each CLI keeps what was said as it was said over 45 turns with tools."""

from pathlib import Path

import pytest

from tests.live.driver import (
    CLIS,
    assert_completed,
    assert_extends,
    assert_one_chain,
    assert_recorded,
    assert_sampled_once,
    live,
    rule,
    turn,
)

pytestmark = [pytest.mark.clis, pytest.mark.timeout(240)]

TURNS = 45


@pytest.mark.parametrize("harness", CLIS)
async def test_each_of_45_prompts_begins_with_the_one_before_and_its_answer(
    tmp_path: Path, harness: str
) -> None:
    rows = [turn(harness, f"echo {n} >> rows.txt", think=f"Row {n}.") for n in range(TURNS)]
    ran = await live(
        tmp_path,
        harness,
        rule("45 rows", *rows, turn(harness, say="All rows are sown."), tokens="canonical"),
        instruction="Sow 45 rows, one at a time.",
        within=200,
    )
    assert_completed(ran)
    assert (ran.workdir / "rows.txt").read_text().split() == [str(n) for n in range(TURNS)]
    assert len(ran.calls) == TURNS + 1
    for before, after in zip(ran.calls, ran.calls[1:], strict=False):
        assert_extends(after, before)
    assert_recorded(ran)
    assert_sampled_once(ran)
    trace = assert_one_chain(ran)
    assert trace.prompt_ids == ran.calls[0].prompt_token_ids
