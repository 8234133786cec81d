import pytest

from polar_gateway.errors import Failure
from polar_gateway.lifecycle import (
    TRANSITIONS,
    IllegalTransitionError,
    Outcome,
    Stage,
    advance,
    ending,
    wire_status,
)

FAILED = Failure(boundary="harness", message="it crashed")


def test_every_stage_reaches_the_end() -> None:
    for stage in Stage:
        seen, frontier = {stage}, [stage]
        while frontier:
            for following in TRANSITIONS[frontier.pop()] - seen:
                seen.add(following)
                frontier.append(following)
        assert Stage.ENDED in seen


def test_nothing_leads_back_to_an_earlier_stage() -> None:
    order = list(Stage)
    for stage, following in TRANSITIONS.items():
        assert all(order.index(stage) < order.index(later) for later in following)


def test_an_illegal_move_names_the_session_and_both_stages() -> None:
    with pytest.raises(IllegalTransitionError, match=r"s1 cannot move from running to init"):
        advance("s1", Stage.RUNNING, Stage.INIT)


@pytest.mark.parametrize(
    ("cancelled", "timed_out", "failure", "outcome"),
    [
        (False, False, None, Outcome.COMPLETED),
        (False, True, None, Outcome.TIMEOUT),
        (False, True, FAILED, Outcome.ERROR),
        (False, False, FAILED, Outcome.ERROR),
        (True, True, FAILED, Outcome.CANCELLED),
    ],
)
def test_how_a_session_ended_is_decided_by_rank(
    cancelled: bool, timed_out: bool, failure: Failure | None, outcome: Outcome
) -> None:
    assert ending(cancelled=cancelled, timed_out=timed_out, failure=failure) is outcome


def test_the_wire_knows_a_status_for_every_stage_and_outcome() -> None:
    live = {wire_status(stage, None) for stage in Stage if stage is not Stage.ENDED}
    ended = {wire_status(Stage.ENDED, outcome) for outcome in Outcome}
    assert live == {
        "REGISTERED",
        "INITIALIZING",
        "READY",
        "RUNNING",
        "POST_RUN",
        "BUILDING",
        "EVALUATING",
    }
    assert ended == {"COMPLETED", "TIMEOUT", "ERROR"}
