"""What a task, a session and an attempt can be on the server, and how they may move.

These tables are the only place that knows; anything else is a bug of ours and raises. Where a
session is *on its node* is the node's business and only shown here (`wire_status`).

A session goes back from PLACED to QUEUED when its attempt is refused, lost or failed for the
infrastructure's reasons. A session that ended because its node was lost may end once more, when
that node's report comes before the task closes.
"""

from enum import Enum, StrEnum, auto

import msgspec


class TaskState(StrEnum):
    RUNNING = "running"
    CANCELLING = "cancelling"
    """Cancelled; some sessions have not ended yet."""
    COMPLETED = "completed"
    """Every session has ended, however."""
    CANCELLED = "cancelled"


class SessionState(StrEnum):
    QUEUED = "queued"
    """Waits for a node; costs nothing."""
    PLACED = "placed"
    """A node has it, or is being asked to take it."""
    ENDED = "ended"


class AttemptState(StrEnum):
    DISPATCHING = "dispatching"
    """Recorded; the node may or may not have heard of it."""
    ACCEPTED = "accepted"
    """The node said that it took it."""
    REPORTED = "reported"
    """Its result became the session's."""
    FAILED = "failed"
    """The infrastructure failed it; its result was not taken."""
    REFUSED = "refused"
    """The node did not take it."""
    LOST = "lost"
    """Its node fell silent, or came back without it."""
    CANCELLED = "cancelled"


class CallbackState(StrEnum):
    PENDING = "pending"
    DELIVERED = "delivered"
    DEAD = "dead"
    """Given up; kept for inspection."""


TASK_TRANSITIONS: dict[TaskState, frozenset[TaskState]] = {
    TaskState.RUNNING: frozenset({TaskState.CANCELLING, TaskState.COMPLETED}),
    TaskState.CANCELLING: frozenset({TaskState.CANCELLED}),
    TaskState.COMPLETED: frozenset(),
    TaskState.CANCELLED: frozenset(),
}

SESSION_TRANSITIONS: dict[SessionState, frozenset[SessionState]] = {
    SessionState.QUEUED: frozenset({SessionState.PLACED, SessionState.ENDED}),
    SessionState.PLACED: frozenset({SessionState.QUEUED, SessionState.ENDED}),
    SessionState.ENDED: frozenset({SessionState.ENDED}),
}

LIVE_TASK = frozenset({TaskState.RUNNING, TaskState.CANCELLING})
LIVE_ATTEMPT = frozenset({AttemptState.DISPATCHING, AttemptState.ACCEPTED})
GIVEN_UP_ATTEMPT = frozenset({AttemptState.REFUSED, AttemptState.LOST})
"""Given up by the server; when the node has it all the same, it names it in its heartbeats."""


class IllegalTransitionError(Exception):
    """Something was asked to move in a way that its table does not know."""

    def __init__(self, what: str, old: StrEnum, new: StrEnum) -> None:
        super().__init__(f"{what} cannot move from {old} to {new}")


def advance_task(task_id: str, old: TaskState, new: TaskState) -> TaskState:
    if new not in TASK_TRANSITIONS[old]:
        raise IllegalTransitionError(f"task {task_id}", old, new)
    return new


def advance_session(session_id: str, old: SessionState, new: SessionState) -> SessionState:
    if new not in SESSION_TRANSITIONS[old]:
        raise IllegalTransitionError(f"session {session_id}", old, new)
    return new


def closed(state: TaskState) -> TaskState:
    """What a live task becomes when its last session has ended."""
    return TaskState.CANCELLED if state is TaskState.CANCELLING else TaskState.COMPLETED


class Ruling(Enum):
    """What becomes of a reported result."""

    TAKE = auto()
    """It is the session's result."""
    TRY_AGAIN = auto()
    """The infrastructure failed and an attempt is left: the session goes back to the queue."""
    CANCEL = auto()
    """It came too late: the session was cancelled, and cancellation wins."""
    IGNORE = auto()
    """A repetition, or of an attempt that is no longer current."""


class Report(msgspec.Struct, kw_only=True, frozen=True):
    """What a ruling looks at: a reported result, and the session that it is for."""

    attempt_id: str
    """As reported; empty for nodes that know no attempts."""
    infra: bool
    cancelled: bool
    """The node says that it was told to cancel."""
    ended_well: bool
    """COMPLETED or TIMEOUT: the node had not heard of a cancellation."""
    session: SessionState
    current_attempt_id: str | None
    attempt: AttemptState | None
    """The current attempt's."""
    reported_by_node: bool
    """The session's end so far was reported by a node, and not concluded from its silence."""
    cancelling: bool
    task: TaskState
    failed_attempts: int
    max_attempts: int


def rule(report: Report) -> Ruling:
    """The one place that decides whether a result counts.

    The newest attempt's result counts, also late, until another attempt was placed or the task
    closed, and once.
    """
    if report.task not in LIVE_TASK or report.attempt is None:
        return Ruling.IGNORE
    if report.attempt_id and report.attempt_id != report.current_attempt_id:
        return Ruling.IGNORE
    if report.session is SessionState.ENDED and report.reported_by_node:
        return Ruling.IGNORE
    live = report.attempt in LIVE_ATTEMPT
    if report.attempt in (AttemptState.FAILED, AttemptState.REPORTED, AttemptState.CANCELLED):
        return Ruling.IGNORE
    if report.cancelled and not live and not report.cancelling:
        return Ruling.IGNORE  # the attempt was given up, and nobody cancelled the session
    if not live and report.infra:  # it was counted as failed already; its data may still be the best
        return Ruling.TAKE if report.session is SessionState.ENDED else Ruling.IGNORE
    if report.cancelling:
        return Ruling.CANCEL if report.ended_well else Ruling.TAKE
    if report.infra and report.failed_attempts + 1 < report.max_attempts:
        return Ruling.TRY_AGAIN
    return Ruling.TAKE


WIRE_STAGES = {
    "queued": "REGISTERED",
    "init": "INITIALIZING",
    "ready": "READY",
    "running": "RUNNING",
    "postrun_queued": "POST_RUN",
    "building": "BUILDING",
    "evaluating": "EVALUATING",
    "delivering": "POST_RUN",
}
"""A live session's public status by the stage that its node names."""


def wire_status(outcome: str | None, stage: str | None) -> str:
    """The public status of a session: how it ended, else where its node says it is."""
    return outcome or WIRE_STAGES.get(stage or "queued", "REGISTERED")
