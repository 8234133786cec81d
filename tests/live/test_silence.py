"""An engine that needs 150 s for its first token, and one that pauses after each: all CLIs wait."""

from pathlib import Path

import anyio
import pytest

from polar_gateway.config import ModelCallConfig
from polar_gateway.testing.engine import Fault
from tests.live.driver import (
    CLIS,
    Ran,
    assert_completed,
    assert_extends,
    assert_recorded,
    assert_sampled_once,
    live,
    rule,
    turn,
)

SILENCE = 150.0

pytestmark = pytest.mark.clis


@pytest.mark.timeout(SILENCE + 150)
async def test_all_clis_wait_through_150_silent_seconds(tmp_path: Path) -> None:
    ended: dict[str, Ran] = {}

    async def wait(harness: str) -> None:
        ended[harness] = await live(
            tmp_path / harness,
            harness,
            rule(
                "Plant beans",
                turn(harness, "echo one > beans.txt"),
                turn(harness, say="Planted."),
            ),
            instruction="Plant beans.",
            faults=[Fault(skip=1, delay=SILENCE)],
            within=SILENCE + 110,
        )

    async with anyio.create_task_group() as group:
        for harness in CLIS:
            group.start_soon(wait, harness)
    for harness, ran in ended.items():
        assert_completed(ran)
        assert len(ran.wire.requests) == len(ran.calls) == 2, (harness, ran.how)
        assert [one.delivered for one in ran.completions] == [True, True]
        assert ran.completions[1].ended_at - ran.completions[1].started_at > SILENCE
        assert_recorded(ran)
        assert_sampled_once(ran)


@pytest.mark.parametrize("harness", CLIS)
async def test_signs_of_life_between_all_tokens_change_nothing(
    tmp_path: Path, harness: str
) -> None:
    """Within thinking, text and a call's arguments."""
    ran = await live(
        tmp_path,
        harness,
        rule(
            "Plant beans",
            turn(harness, "echo one > beans.txt", think="Now.", say="I plant."),
            turn(harness, say="Planted."),
            tokens="canonical",
        ),
        instruction="Plant beans.",
        model_calls=ModelCallConfig(header_delay_seconds=0.05, keep_alive_seconds=0.05),
        token_delay=0.15,
    )
    assert_completed(ran)
    assert (ran.workdir / "beans.txt").read_text() == "one\n"
    assert len(ran.wire.requests) == 2, ran.how
    assert ran.wire.events > 2 * sum(len(call.token_ids) for call in ran.calls)
    first, second = ran.calls
    assert_extends(second, first)
    assert_recorded(ran)
