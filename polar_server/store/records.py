"""Rows as the rest of the server sees them."""

from typing import Literal

import msgspec

from polar_gateway.errors import Failure
from polar_gateway.protocol import Verdict
from polar_server.lifecycle import AttemptState, SessionState, TaskState
from polar_server.protocol import TaskRequest


class Task(msgspec.Struct, kw_only=True, frozen=True):
    """One run of a task id."""

    run: int
    task_id: str
    status: TaskState
    request: bytes
    created_at: float
    updated_at: float

    @property
    def document(self) -> TaskRequest:
        return msgspec.json.decode(self.request, type=TaskRequest)


class Session(msgspec.Struct, kw_only=True, frozen=True):
    session_id: str
    sample: int
    status: SessionState
    cancelling: bool
    attempt_id: str | None
    node_id: str | None
    outcome: str | None
    result_key: str | None
    reward: float | None
    error: str | None
    failure: Failure | None
    verdict: Verdict | None
    completion_count: int
    ended_at: float | None


class Outgoing(msgspec.Struct, kw_only=True, frozen=True):
    """An attempt that its node is to be told of: to take it, or to cancel it."""

    attempt_id: str
    session_id: str
    node_id: str
    gateway_url: str
    status: AttemptState
    request: bytes
    """The TaskRequest."""


class Plan(msgspec.Struct, kw_only=True, frozen=True):
    """What a step of the scheduler decided."""

    outgoing: list[Outgoing]
    given_up: int
    """How many attempts were ended because they will not be heard of again."""
    due_at: float | None
    """Wall clock at which something changes although nobody says a word."""


class Callback(msgspec.Struct, kw_only=True, frozen=True):
    """A TaskResult that its trainer has not acknowledged."""

    callback_id: str
    run: int
    url: str
    tries: int
    next_at: float
    created_at: float


class ReportedFailure(msgspec.Struct, kw_only=True):
    boundary: str
    message: str = ""
    infra: bool = False


class ReportedFinding(msgspec.Struct, kw_only=True):
    code: str = ""
    level: str = "warning"
    message: str = ""
    count: int = 1
    numbers: dict[str, float] = {}


class ReportedVerdict(msgspec.Struct, kw_only=True):
    reward: str = "ungraded"
    tokens: str = "none"
    findings: list[ReportedFinding] = []


class ReportedResult(msgspec.Struct, kw_only=True):
    """What the server reads of a SessionResult; the trajectory is skipped undecoded.

    Its node may be newer and know boundaries, levels and verdicts that this server does not.
    """

    session_id: str
    attempt_id: str = ""
    status: Literal["COMPLETED", "TIMEOUT", "ERROR"]
    reward: float | None = None
    error: str | None = None
    failure: ReportedFailure | None = None
    verdict: ReportedVerdict | None = None
    completion_count: int = 0


class TaskSummary(msgspec.Struct, kw_only=True):
    """A line of the task list. Trajectories are never read here, so nothing is said of traces."""

    task_id: str
    status: str
    harness: str
    model: str | None
    num_samples: int
    completed_sessions: int
    errored_sessions: int
    mean_reward: float | None
    mean_completions: float | None
    created_at: float
    updated_at: float
    mean_traces: float | None = None
    source: str = "live"
