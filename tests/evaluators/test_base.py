import pytest

import evaluators
from builders.base import SpecError
from evaluators.base import EvaluatorSpec


def test_an_unknown_strategy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        SpecError, match=r"evaluator\.strategy: 'magic' is none of session_completion, test_on"
    ):
        evaluators.make(EvaluatorSpec(strategy="magic"))


def test_a_wrong_setting_is_refused_with_its_path() -> None:
    spec = EvaluatorSpec(strategy="session_completion", config={"success_reward": "much"})
    with pytest.raises(SpecError, match=r"^evaluator\.config\.success_reward: Expected `float`"):
        evaluators.make(spec)
