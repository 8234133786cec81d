"""A context window that is too small for the task: who compacts, and who ends.

The window is the engine's and is told to the CLIs that can be told. Tool output fills it. What a
CLI asks in order to compact has no tools or says TEXT ONLY, by which the script knows it.
"""

from pathlib import Path
from typing import Any

import pytest

from polar_gateway.testing.script import Rule, Step
from tests.live.driver import CLIS, Ran, assert_completed, assert_recorded, live, rule, turn

pytestmark = pytest.mark.clis

COMPACTION = r"Respond with TEXT ONLY|\A(?!.*The functions you may call)"
SUMMARY = Step(
    say="<analysis>It fits again.</analysis>\n<summary><state_snapshot>BEANS IN SHORT: beans.txt has"
    " its first row; the second is to do.</state_snapshot></summary>"
)


Outputs = list[str]
"""The commands of one turn, by what they print."""


def digits(tokens: int) -> str:
    return f"seq -s ' ' 100000 200000 | head -c {tokens}"


def words(tokens: int) -> str:
    """Of these a token has as many characters as CLIs suppose that count by themselves."""
    return f"yes 'the rows of beans stand in the sun' | head -c {tokens * 8 // 3}"


async def planted(folder: Path, harness: str, window: int, *turns: Outputs, **changes: Any) -> Ran:
    """Run a task whose turns print so much, with a row to write first and one after a compaction."""
    (head, *rest), *others = turns
    first = [f"echo one > beans.txt; {head}", *rest]
    second = "grep -q two beans.txt || echo two >> beans.txt"
    return await live(
        folder,
        harness,
        rule(COMPACTION, SUMMARY),
        Rule(
            match="BEANS IN SHORT",
            steps=[turn(harness, second), turn(harness, say="Planted.")],
            count="grep -q two",
        ),
        rule("Plant beans", *[turn(harness, *outputs) for outputs in [first, *others]]),
        instruction="Plant beans.",
        max_model_len=window,
        **changes,
    )


def assert_compacted(ran: Ran) -> None:
    assert_completed(ran)
    assert (ran.workdir / "beans.txt").read_text() == "one\ntwo\n"
    assert "compaction" in {one.kind for one in ran.completions}
    assert_recorded(ran)
    assert_all_trained(ran)


def assert_all_trained(ran: Ran) -> None:
    assert ran.result.trajectory is not None
    assert sum(sum(trace.loss_mask) for trace in ran.result.trajectory.traces) == sum(
        len(call.token_ids) for call in ran.sampled
    )


BY_ERROR: dict[str, tuple[int, *tuple[Outputs, ...]]] = {
    "claude_code": (64_000, [digits(9_000)], [digits(28_000), digits(20_000)]),
    "pi": (40_000, [digits(9_000)], [digits(9_000)], [digits(24_000)]),
    "pi_old": (40_000, [digits(9_000)], [digits(9_000)], [digits(24_000)]),
    "qwen_code": (64_000, [digits(100)], [digits(28_000), digits(28_000)]),
    "opencode": (36_000, [digits(4_000)], [digits(28_000)]),
}
"""Window and outputs that overflow it at one stroke, with something before them to drop."""


@pytest.mark.parametrize("harness", BY_ERROR)
async def test_an_overflow_makes_it_compact_and_go_on(tmp_path: Path, harness: str) -> None:
    window, *turns = BY_ERROR[harness]
    ran = await planted(tmp_path, harness, window, *turns)
    assert 400 in {call.status for call in ran.calls}
    assert_compacted(ran)


BY_ITSELF: dict[str, tuple[int, *tuple[Outputs, ...]]] = {
    "codex": (22_000, [digits(30_000)], [digits(100)]),
    "claude_code": (40_000, [digits(4_000)], [digits(4_000)]),
    "pi": (60_000, [words(15_000)], [words(15_000)], [words(15_000)], [digits(100)]),
    "qwen_code": (64_000, [digits(15_000)], [digits(15_000)]),
    "opencode": (40_000, [digits(9_000)], [digits(14_000)], [digits(100)]),
}
"""pi_old waits for the overflow, and Gemini CLI never compacts in a run like this."""


@pytest.mark.parametrize("harness", BY_ITSELF)
async def test_a_cli_that_knows_its_window_compacts_before_it_is_full(
    tmp_path: Path, harness: str
) -> None:
    window, *turns = BY_ITSELF[harness]
    ran = await planted(tmp_path, harness, window, *turns)
    assert {call.status for call in ran.calls} == {200}
    assert_compacted(ran)


ENDS: dict[str, dict[str, Any]] = {
    "codex": {"window": 20_000, "agent": {"settings": {"compact_at_tokens": 1_000_000}}},
    "gemini_cli": {"window": 32_000},
}
"""Who never compacts on the error: Codex, which was told to compact too late, and Gemini CLI, which
cannot be told its window."""


@pytest.mark.parametrize("harness", ENDS)
async def test_an_overflow_ends_the_session_as_one_and_keeps_its_tokens(
    tmp_path: Path, harness: str
) -> None:
    changes = dict(ENDS[harness])
    window = changes.pop("window")
    ran = await planted(tmp_path, harness, window, [digits(100)], [digits(28_000)] * 3, **changes)
    assert ran.result.status == "ERROR"
    assert ran.result.failure is not None
    assert (ran.result.failure.boundary, ran.result.failure.code) == ("harness", "context_overflow")
    assert [call.status for call in ran.calls] == [200, 200, 400]
    assert len(ran.completions) == 2
    assert_recorded(ran)
    assert_all_trained(ran)


def test_every_cli_has_its_place_here() -> None:
    assert BY_ERROR.keys() | ENDS.keys() == CLIS.keys()
