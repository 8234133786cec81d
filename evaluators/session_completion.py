"""Reward that the harness finished by itself, whatever it did: a smoke test, not a task's goal."""

from typing import ClassVar

import msgspec

from evaluators.base import Evaluation, EvaluationContext


class SessionCompletionConfig(
    msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True
):
    success_reward: float = 1.0
    failure_reward: float = 0.0


class SessionCompletion:
    """`success_reward` when the harness completed, `failure_reward` otherwise."""

    name: ClassVar[str] = "session_completion"
    needs_workspace: ClassVar[bool] = False
    Config: ClassVar[type[msgspec.Struct]] = SessionCompletionConfig

    def __init__(self, config: SessionCompletionConfig) -> None:
        self.config = config
        self.seconds_needed = 10.0

    async def evaluate(self, context: EvaluationContext) -> Evaluation:
        config = self.config
        return Evaluation(
            outcome_reward=config.success_reward
            if context.harness_completed
            else config.failure_reward,
            report={"harness_completed": context.harness_completed},
        )
