"""An engine that needs 150 s for its first token: every CLI still waits, and gets its answer."""

from pathlib import Path

import anyio
import pytest

from polar_gateway.testing.engine import Fault
from tests.live.driver import CLIS, Ran, assert_recorded, assert_sampled_once, live, rule, turn

SILENCE = 150.0

pytestmark = [pytest.mark.clis, pytest.mark.timeout(SILENCE + 150)]


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
        assert (ran.result.status, ran.result.error) == ("COMPLETED", None), (harness, ran.how)
        assert len(ran.wire.requests) == len(ran.calls) == 2, (harness, ran.how)
        assert [one.delivered for one in ran.completions] == [True, True]
        assert ran.completions[1].ended_at - ran.completions[1].started_at > SILENCE
        assert_recorded(ran)
        assert_sampled_once(ran)
