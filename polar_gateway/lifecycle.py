"""Where a live session is, and how it may move: the one table that knows.

A session moves along `TRANSITIONS`; anything else is a bug of ours and raises. Every path ends in
ENDED, and the way it ended is its `Outcome`, chosen in one place (`ending`). WIRE statuses are a
rendering of both (`wire_status`).
"""

from enum import StrEnum

from polar_gateway.errors import Failure


class Stage(StrEnum):
    """Where a live session is."""

    QUEUED = "queued"
    """Accepted, waiting for a READY place and an INIT worker; costs nothing."""
    INIT = "init"
    """The runtime opens, prepare actions run, the adapter's files are written."""
    READY = "ready"
    """Prepared, waiting for a RUNNING slot in a place reserved before INIT began."""
    RUNNING = "running"
    """The harness runs; the only stage that is charged to the agent."""
    POSTRUN_QUEUED = "postrun_queued"
    """Sealed and stopped, waiting for a POSTRUN worker."""
    BUILDING = "building"
    """Completions become traces."""
    EVALUATING = "evaluating"
    """Traces are graded."""
    ENDED = "ended"
    """The result is written and everything is torn down."""


class Outcome(StrEnum):
    """How a session ended."""

    COMPLETED = "completed"
    TIMEOUT = "timeout"
    ERROR = "error"
    CANCELLED = "cancelled"


TRANSITIONS: dict[Stage, frozenset[Stage]] = {
    Stage.QUEUED: frozenset({Stage.INIT, Stage.POSTRUN_QUEUED, Stage.ENDED}),
    Stage.INIT: frozenset({Stage.READY, Stage.POSTRUN_QUEUED, Stage.ENDED}),
    Stage.READY: frozenset({Stage.RUNNING, Stage.POSTRUN_QUEUED, Stage.ENDED}),
    Stage.RUNNING: frozenset({Stage.POSTRUN_QUEUED, Stage.ENDED}),
    Stage.POSTRUN_QUEUED: frozenset({Stage.BUILDING, Stage.ENDED}),
    Stage.BUILDING: frozenset({Stage.EVALUATING, Stage.ENDED}),
    Stage.EVALUATING: frozenset({Stage.ENDED}),
    Stage.ENDED: frozenset(),
}

_WIRE_STAGE = {
    Stage.QUEUED: "REGISTERED",
    Stage.INIT: "INITIALIZING",
    Stage.READY: "READY",
    Stage.RUNNING: "RUNNING",
    Stage.POSTRUN_QUEUED: "POST_RUN",
    Stage.BUILDING: "BUILDING",
    Stage.EVALUATING: "EVALUATING",
}
_WIRE_OUTCOME = {
    Outcome.COMPLETED: "COMPLETED",
    Outcome.TIMEOUT: "TIMEOUT",
    Outcome.ERROR: "ERROR",
    Outcome.CANCELLED: "ERROR",
}


class IllegalTransitionError(Exception):
    """A session was asked to move in a way that the table does not know."""

    def __init__(self, session_id: str, old: Stage, new: Stage) -> None:
        super().__init__(f"session {session_id} cannot move from {old} to {new}")


def advance(session_id: str, old: Stage, new: Stage) -> Stage:
    """Return `new`, or raise IllegalTransitionError."""
    if new not in TRANSITIONS[old]:
        raise IllegalTransitionError(session_id, old, new)
    return new


def ending(*, cancelled: bool, timed_out: bool, failure: Failure | None) -> Outcome:
    """The one place that decides how a session ended; cancellation outranks everything."""
    if cancelled:
        return Outcome.CANCELLED
    if failure is not None:
        return Outcome.ERROR
    if timed_out:
        return Outcome.TIMEOUT
    return Outcome.COMPLETED


def wire_status(stage: Stage, outcome: Outcome | None) -> str:
    """The public status: a stage's name while live, COMPLETED, TIMEOUT or ERROR at the end."""
    if stage is Stage.ENDED:
        return _WIRE_OUTCOME[outcome or Outcome.ERROR]
    return _WIRE_STAGE[stage]
