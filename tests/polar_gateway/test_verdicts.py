from array import array
from typing import Any

import pytest

from builders.eligible import DISQUALIFYING
from builders.records import Completion, CompletionSession, Trace, Trajectory
from polar_gateway.errors import Failure
from polar_gateway.protocol import Finding
from polar_gateway.verdicts import verdict


def completion(**changes: Any) -> Completion:
    given: dict[str, Any] = {
        "completion_id": "msg_1",
        "index": 0,
        "tail": array("i", [1, 2]),
        "sampled_ids": array("i", [3]),
        "logprobs": array("f", [-0.5]),
        "messages_tail": [],
        "response_message": {"role": "assistant", "content": "x"},
        "finish_reason": "stop",
    }
    return Completion(**{**given, **changes})


def trajectory(mask: int = 1, **metadata: Any) -> Trajectory:
    trace = Trace(prompt_ids=[1, 2], response_ids=[3], loss_mask=[mask], response_logprobs=[-0.5])
    return Trajectory(traces=[trace], metadata=metadata)


def codes(findings: list[Finding]) -> set[str]:
    return {finding.code for finding in findings}


def test_a_clean_graded_session_may_be_trained_on_whole() -> None:
    session = CompletionSession(session_id="s", completions=[completion()])
    said = verdict(session, trajectory(), failure=None, graded=True, notes=[])
    assert (said.reward, said.tokens, said.findings) == ("graded", "all", [])


def test_a_session_without_calls_has_nothing_to_train_on() -> None:
    said = verdict(
        CompletionSession(session_id="s"), Trajectory(), failure=None, graded=True, notes=[]
    )
    assert said.tokens == "none"
    assert "no_completions" in codes(said.findings)


@pytest.mark.parametrize("finding", sorted(DISQUALIFYING))
def test_a_call_whose_tokens_are_not_true_leaves_only_a_prefix(finding: str) -> None:
    session = CompletionSession(
        session_id="s", completions=[completion(), completion(findings=[finding])]
    )
    said = verdict(session, trajectory(), failure=None, graded=True, notes=[])
    assert said.tokens == "prefix"
    assert finding in codes(said.findings)


def test_ids_that_the_engine_itself_counts_otherwise_are_not_true() -> None:
    session = CompletionSession(
        session_id="s", completions=[completion(findings=["ids_usage_mismatch"])]
    )
    said = verdict(session, Trajectory(), failure=None, graded=True, notes=[])
    assert [(f.code, f.level) for f in said.findings] == [("ids_usage_mismatch", "fatal")]


def test_a_trajectory_without_a_trainable_token_says_so() -> None:
    session = CompletionSession(session_id="s", completions=[completion()])
    assert (
        verdict(session, trajectory(mask=0), failure=None, graded=True, notes=[]).tokens == "none"
    )


def test_a_reward_lost_to_infrastructure_is_not_a_missing_evaluator() -> None:
    session = CompletionSession(session_id="s", completions=[completion()])
    broken = Failure(boundary="runtime", message="gone", infra=True)
    assert verdict(session, trajectory(), failure=broken, graded=False, notes=[]).reward == "infra"
    assert verdict(session, trajectory(), failure=None, graded=False, notes=[]).reward == "ungraded"


def test_undelivered_answers_and_what_was_left_out_are_counted() -> None:
    session = CompletionSession(session_id="s", completions=[completion(delivered=False)])
    stats = {"left_out": {"undelivered": {"completions": 1, "tokens": 7}}}
    said = verdict(
        session,
        trajectory(reconstruction_stats=stats),
        failure=None,
        graded=True,
        notes=[Finding(code="unisolated")],
    )
    counts = {finding.code: finding.count for finding in said.findings}
    assert counts == {"undelivered": 1, "left_out_undelivered": 7, "unisolated": 1}
