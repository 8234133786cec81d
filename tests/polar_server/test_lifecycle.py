import pytest
from msgspec.structs import replace

from polar_server import lifecycle
from polar_server.lifecycle import (
    SESSION_TRANSITIONS,
    TASK_TRANSITIONS,
    AttemptState,
    IllegalTransitionError,
    Report,
    Ruling,
    SessionState,
    TaskState,
)

REPORT = Report(
    attempt_id="att-1",
    infra=False,
    cancelled=False,
    ended_well=True,
    session=SessionState.PLACED,
    current_attempt_id="att-1",
    attempt=AttemptState.ACCEPTED,
    reported_by_node=False,
    cancelling=False,
    task=TaskState.RUNNING,
    failed_attempts=0,
    max_attempts=2,
)
LOST = {"session": SessionState.QUEUED, "attempt": AttemptState.LOST, "failed_attempts": 1}
GIVEN_UP = {"session": SessionState.ENDED, "attempt": AttemptState.LOST, "failed_attempts": 2}


@pytest.mark.parametrize("old", TaskState)
@pytest.mark.parametrize("new", TaskState)
def test_a_task_moves_only_along_its_table(old: TaskState, new: TaskState):
    if new in TASK_TRANSITIONS[old]:
        assert lifecycle.advance_task("t", old, new) is new
    else:
        with pytest.raises(IllegalTransitionError, match=f"task t cannot move from {old} to {new}"):
            lifecycle.advance_task("t", old, new)


@pytest.mark.parametrize("old", SessionState)
@pytest.mark.parametrize("new", SessionState)
def test_a_session_moves_only_along_its_table(old: SessionState, new: SessionState):
    if new in SESSION_TRANSITIONS[old]:
        assert lifecycle.advance_session("s", old, new) is new
    else:
        with pytest.raises(IllegalTransitionError, match=f"session s cannot move from {old}"):
            lifecycle.advance_session("s", old, new)


def test_every_live_task_can_close():
    for state in lifecycle.LIVE_TASK:
        lifecycle.advance_task("t", state, lifecycle.closed(state))


@pytest.mark.parametrize(
    ("fields", "ruling"),
    [
        pytest.param({}, Ruling.TAKE, id="the current attempt's result"),
        pytest.param({"attempt": AttemptState.DISPATCHING}, Ruling.TAKE, id="before the node's yes came"),
        pytest.param({"attempt_id": ""}, Ruling.TAKE, id="from a node that knows no attempts"),
        pytest.param({"attempt_id": "att-0"}, Ruling.IGNORE, id="of an earlier attempt"),
        pytest.param({"attempt": None}, Ruling.IGNORE, id="of a session that was never placed"),
        pytest.param(
            {"session": SessionState.ENDED, "attempt": AttemptState.REPORTED, "reported_by_node": True},
            Ruling.IGNORE,
            id="a second time",
        ),
        pytest.param({"ended_well": False}, Ruling.TAKE, id="the agent's own failure"),
        pytest.param({"infra": True, "ended_well": False}, Ruling.TRY_AGAIN, id="infrastructure"),
        pytest.param(
            {"infra": True, "ended_well": False, "failed_attempts": 1},
            Ruling.TAKE,
            id="infrastructure, at the limit",
        ),
        pytest.param(
            {"infra": True, "session": SessionState.QUEUED, "attempt": AttemptState.FAILED},
            Ruling.IGNORE,
            id="infrastructure, a second time",
        ),
        pytest.param(LOST, Ruling.TAKE, id="late, before another attempt was placed"),
        pytest.param({**LOST, "infra": True}, Ruling.IGNORE, id="late and useless: it is tried again"),
        pytest.param(GIVEN_UP, Ruling.TAKE, id="late, from a lost node, before the task closed"),
        pytest.param({**GIVEN_UP, "infra": True}, Ruling.TAKE, id="a crashed node's, no attempt left"),
        pytest.param({**GIVEN_UP, "task": TaskState.COMPLETED}, Ruling.IGNORE, id="after the task closed"),
        pytest.param(
            {**LOST, "attempt": AttemptState.REFUSED, "ended_well": False, "cancelled": True},
            Ruling.IGNORE,
            id="cancelled by its node, after it was given up, of a session that nobody cancelled",
        ),
        pytest.param(
            {**GIVEN_UP, "ended_well": False, "cancelled": True},
            Ruling.IGNORE,
            id="cancelled by its node, after it was lost and no attempt left",
        ),
        pytest.param(
            {"ended_well": False, "cancelled": True}, Ruling.TAKE, id="cancelled at its node, by its people"
        ),
        pytest.param({"cancelling": True}, Ruling.CANCEL, id="cancelled while it finished"),
        pytest.param(
            {"cancelling": True, "ended_well": False}, Ruling.TAKE, id="the cancelled session's report"
        ),
        pytest.param(
            {"cancelling": True, "ended_well": False, "infra": True},
            Ruling.TAKE,
            id="a cancelled session is not tried again",
        ),
    ],
)
def test_whether_a_result_counts(fields: dict[str, object], ruling: Ruling):
    assert lifecycle.rule(replace(REPORT, **fields)) is ruling


@pytest.mark.parametrize(
    ("outcome", "stage", "status"),
    [
        (None, None, "REGISTERED"),
        (None, "queued", "REGISTERED"),
        (None, "running", "RUNNING"),
        (None, "postrun_queued", "POST_RUN"),
        (None, "a stage of a newer node", "REGISTERED"),
        ("TIMEOUT", "running", "TIMEOUT"),
    ],
)
def test_the_public_status_of_a_session(outcome: str | None, stage: str | None, status: str):
    assert lifecycle.wire_status(outcome, stage) == status
