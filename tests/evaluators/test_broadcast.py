import msgspec
import pytest

from builders.records import Trace, Trajectory
from evaluators.base import Evaluation
from evaluators.broadcast import apply


def trajectory() -> Trajectory:
    traces = [Trace(prompt_ids=[1], response_ids=[2], loss_mask=[1]) for _ in range(3)]
    return Trajectory(traces=traces, metadata={"builder": "per_request"})


def test_the_outcome_goes_to_every_trace() -> None:
    before = trajectory()
    after = apply(before, Evaluation(outcome_reward=0.5, report={"why": "so"}), strategy="mine")
    assert [trace.reward for trace in after.traces] == [0.5, 0.5, 0.5]
    assert after.metadata["builder"] == "per_request"
    assert after.metadata["evaluation"] == {
        "strategy": "mine",
        "outcome_reward": 0.5,
        "trace_rewards": None,
        "validity": "graded",
        "components": {},
        "report": {"why": "so"},
    }
    assert before == trajectory()


def test_rewards_of_their_own_outrank_the_outcome() -> None:
    evaluation = Evaluation(outcome_reward=1.0, trace_rewards=[0.0, None, 1.0])
    after = apply(trajectory(), evaluation, strategy="mine")
    assert [trace.reward for trace in after.traces] == [0.0, None, 1.0]
    assert after.metadata["evaluation"]["outcome_reward"] == 1.0


def test_no_reward_is_not_zero() -> None:
    after = apply(trajectory(), Evaluation(validity="ungraded"), strategy="mine")
    assert [trace.reward for trace in after.traces] == [None, None, None]


def test_the_number_of_trace_rewards_must_be_that_of_the_traces() -> None:
    with pytest.raises(ValueError, match="evaluator mine gave 2 trace rewards for 3 traces"):
        apply(trajectory(), Evaluation(trace_rewards=[1.0, 1.0]), strategy="mine")


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_must_be_finite(reward: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        apply(trajectory(), Evaluation(outcome_reward=reward), strategy="mine")
    with pytest.raises(ValueError, match="not finite"):
        apply(trajectory(), Evaluation(trace_rewards=[1.0, None, reward]), strategy="mine")


def test_what_was_not_graded_has_no_reward() -> None:
    with pytest.raises(ValueError, match="says infra and gave rewards"):
        apply(trajectory(), Evaluation(outcome_reward=0.0, validity="infra"), strategy="mine")


def test_the_result_can_be_sent() -> None:
    after = apply(trajectory(), Evaluation(outcome_reward=1.0), strategy="mine")
    assert msgspec.json.decode(msgspec.json.encode(after), type=Trajectory) == after
