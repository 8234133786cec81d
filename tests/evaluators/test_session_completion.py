from pathlib import Path

import evaluators
from evaluators.base import EvaluatorSpec
from tests.evaluators.workspace import context


async def test_a_completed_harness_earns_the_reward(tmp_path: Path) -> None:
    evaluator = evaluators.make(EvaluatorSpec(strategy="session_completion"))
    assert (await evaluator.evaluate(context(tmp_path))).outcome_reward == 1.0
    failed = await evaluator.evaluate(context(tmp_path, harness_completed=False))
    assert failed.outcome_reward == 0.0
    assert failed.report == {"harness_completed": False}


async def test_both_rewards_can_be_set(tmp_path: Path) -> None:
    spec = EvaluatorSpec(
        strategy="session_completion", config={"success_reward": 2, "failure_reward": -1}
    )
    evaluator = evaluators.make(spec)
    assert (await evaluator.evaluate(context(tmp_path))).outcome_reward == 2.0
    failed = await evaluator.evaluate(context(tmp_path, harness_completed=False))
    assert failed.outcome_reward == -1.0


def test_it_needs_no_workspace() -> None:
    assert not evaluators.EVALUATORS["session_completion"].needs_workspace
