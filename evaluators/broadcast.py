"""From an evaluation to rewards on traces."""

import math

import msgspec

from builders.records import Trajectory
from evaluators.base import Evaluation


def apply(trajectory: Trajectory, evaluation: Evaluation, *, strategy: str) -> Trajectory:
    """The trajectory with rewards on its traces and the evaluation in its metadata.

    Per-trace rewards are taken as they are, otherwise the outcome goes to every trace. Raises
    ValueError when their number is not that of the traces, when a reward is not finite, or when
    there is one although nothing was graded.
    """
    traces, rewards = trajectory.traces, evaluation.trace_rewards
    if rewards is not None and len(rewards) != len(traces):
        raise ValueError(
            f"evaluator {strategy} gave {len(rewards)} trace rewards for {len(traces)} traces"
        )
    given = [
        reward for reward in [evaluation.outcome_reward, *(rewards or [])] if reward is not None
    ]
    if not all(math.isfinite(reward) for reward in given):
        raise ValueError(f"evaluator {strategy} gave a reward that is not finite: {given}")
    if given and evaluation.validity != "graded":
        raise ValueError(
            f"evaluator {strategy} says {evaluation.validity} and gave rewards: {given}"
        )
    if rewards is None:
        rewards = [evaluation.outcome_reward] * len(traces)
    return msgspec.structs.replace(
        trajectory,
        traces=[
            msgspec.structs.replace(trace, reward=reward)
            for trace, reward in zip(traces, rewards, strict=True)
        ],
        metadata={
            **trajectory.metadata,
            "evaluation": {"strategy": strategy, **msgspec.structs.asdict(evaluation)},
        },
    )
