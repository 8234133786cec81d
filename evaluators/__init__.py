"""Evaluators: the strategies that turn a trajectory and a workspace into rewards."""

from builders import plugins
from builders.base import SpecError, convert_config
from evaluators.base import Evaluator, EvaluatorSpec
from evaluators.session_completion import SessionCompletion
from evaluators.test_on_output import TestOnOutput

EVALUATORS: dict[str, type[Evaluator]] = {
    "session_completion": SessionCompletion,
    "test_on_output": TestOnOutput,
}


def load_evaluators() -> tuple[dict[str, type[Evaluator]], list[str]]:
    """Add installed plug-ins (entry points `polar.evaluators`) to EVALUATORS; called at start.

    Returns EVALUATORS and a sentence for each plug-in that was left out.
    """
    return EVALUATORS, plugins.load("polar.evaluators", EVALUATORS, "evaluate")


def make(spec: EvaluatorSpec) -> Evaluator:
    """The evaluator that `spec` names, its settings checked; raises SpecError (a ValueError)."""
    if spec.strategy not in EVALUATORS:
        raise SpecError(
            "evaluator.strategy", f"{spec.strategy!r} is none of {', '.join(sorted(EVALUATORS))}"
        )
    evaluator = EVALUATORS[spec.strategy]
    return evaluator(convert_config(spec.config, evaluator.Config, "evaluator.config"))
