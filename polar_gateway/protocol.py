"""The documents that a gateway reads and writes.

Documents that people write forbid unknown fields; documents that machines exchange tolerate them
and give every field but the ids a default, so that old and new versions talk.
"""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec

from builders.base import StrategySpec
from builders.records import Trajectory
from evaluators.base import EvaluatorSpec
from harness_adapters.base import AgentSpec
from polar_gateway.errors import Failure

ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$(?!\n)"  # Python's $ also matches before a last \n
Id = Annotated[str, msgspec.Meta(pattern=ID_PATTERN)]
"""A task, session, attempt or node id: starts alphanumeric, then alphanumerics and . _ -, 128 at most."""

SESSION_DIR = "/polar/session"
"""Where a session's files live inside a runtime that has a file system of its own."""


def can_be_called(url: str) -> bool:
    """Whether an HTTP request can be sent there at all: a scheme, a host that is a name, a port."""
    try:
        parts = urlsplit(url)
        (parts.hostname or "").encode("idna")  # empty and overlong labels
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def valid_id(value: str) -> bool:
    return re.match(ID_PATTERN, value) is not None


def check_env(env: Mapping[str, str]) -> None:
    """Raise ValueError for what no process can have in its environment."""
    for name, value in env.items():
        if not name or "=" in name or "\0" in name:
            raise ValueError(f"env has the impossible name {name!r}")
        if "\0" in value:
            raise ValueError(f"env {name} holds a NUL")


class PrepareAction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One step before the agent runs: upload a file or folder of the gateway's host, or a command."""

    type: Literal["upload_file", "upload_dir", "exec"]
    source: str | None = None
    target: str | None = None
    command: str | None = None
    cwd: str | None = None
    env: dict[str, str] | None = None
    max_attempts: Annotated[int, msgspec.Meta(ge=1, le=10)] = 1
    retry_backoff_seconds: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0

    def __post_init__(self) -> None:
        check_env(self.env or {})
        if self.type == "exec":
            if not self.command:
                raise ValueError("a prepare action of type exec needs a command")
            if self.source is not None or self.target is not None:
                raise ValueError("a prepare action of type exec takes no source or target")
        else:
            if not self.source or not self.target:
                raise ValueError(f"a prepare action of type {self.type} needs source and target")
            if self.command is not None or self.cwd is not None or self.env is not None:
                raise ValueError(
                    f"a prepare action of type {self.type} takes no command, cwd or env"
                )
            if self.max_attempts != 1 or self.retry_backoff_seconds:
                raise ValueError("only a prepare action of type exec may be attempted again")


class RuntimeSpec(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The isolation that a session runs in."""

    backend: str = "docker"
    image: str | None = None
    prepare: list[PrepareAction] = []
    eval_prepare: list[PrepareAction] | None = None
    """For a fresh evaluation runtime; None replays `prepare`."""
    env: dict[str, str] = {}
    network: str | None = "host"
    workdir: str | None = None
    cpus: Annotated[int, msgspec.Meta(ge=1)] | None = None
    memory_mb: Annotated[int, msgspec.Meta(ge=4)] | None = None
    storage_mb: Annotated[int, msgspec.Meta(ge=1)] | None = None
    gpus: Annotated[int, msgspec.Meta(ge=0)] = 0
    allow_internet: bool = True
    import_path: str | None = None
    kwargs: dict[str, Any] = {}

    def __post_init__(self) -> None:
        check_env(self.env)


class Sampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sampling parameters that override the harness's own; unset keeps what the harness asked."""

    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: int | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None


class Prompting(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the engine is asked, in place of what the node's configuration says; unset keeps that."""

    prompts: Literal["auto", "messages", "tokens"] | None = None
    history: Literal["template", "keep"] | None = None


class SessionDispatchRequest(msgspec.Struct, kw_only=True):
    """What the server sends a node for one attempt of one session."""

    session_id: Id
    task_id: Id
    attempt_id: str = ""
    instruction: str
    remaining_timeout_seconds: float = 600.0
    """Bounds RUNNING; waiting and INIT are not charged."""
    runtime: RuntimeSpec | None = None
    agent: AgentSpec
    builder: StrategySpec = msgspec.field(
        default_factory=lambda: StrategySpec(strategy="per_request")
    )
    evaluator: EvaluatorSpec | None = None
    callback_url: str | None = None
    """Where the node reports the result; the server's /callbacks/session_result."""
    metadata: dict[str, Any] = {}
    sampling: Sampling | None = None
    prompting: Prompting | None = None
    dispatch_priority: int = 0
    init_timeout_seconds: float = 600.0
    postrun_timeout_seconds: float | None = None


class SessionDispatchResponse(msgspec.Struct, kw_only=True):
    session_id: str
    task_id: str
    status: str
    node_id: str


class SessionCreateRequest(msgspec.Struct, kw_only=True):
    """Creates a proxy-only session: no runtime, no harness of ours; its key is its id."""

    task_id: Id | None = None
    session_id: Id | None = None


class SessionTiming(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Milliseconds spent in each stage."""

    register_to_init_queue: float | None = None
    init: float | None = None
    ready_queue: float | None = None
    run: float | None = None
    postrun: float | None = None
    build: float | None = None
    eval: float | None = None
    e2e: float | None = None


FindingLevel = Literal["note", "warning", "fatal"]
RewardVerdict = Literal["graded", "ungraded", "infra"]
TokenVerdict = Literal["all", "prefix", "none"]


class Finding(msgspec.Struct, kw_only=True, frozen=True):
    """One reason why a session may not be what it seems."""

    code: str
    level: FindingLevel = "warning"
    message: str = ""
    count: int = 1
    numbers: dict[str, float] = {}
    """What the finding was judged by: {"share": 0.12, "tokens": 345}."""


class Verdict(msgspec.Struct, kw_only=True):
    """Whether a session may be trained on: is the reward meant, and are the tokens true?"""

    reward: RewardVerdict = "ungraded"
    tokens: TokenVerdict = "none"
    findings: list[Finding] = []


class Artifact(msgspec.Struct, kw_only=True):
    """A file kept past the session, on the node that ran it."""

    name: str
    path: str
    bytes: int = 0


class SessionResult(msgspec.Struct, kw_only=True):
    """How a session ended, and its trajectory."""

    session_id: str
    task_id: str
    status: str
    """COMPLETED, TIMEOUT or ERROR."""
    trajectory: Trajectory | None = None
    timing: SessionTiming = msgspec.field(default_factory=SessionTiming)
    node_id: str | None = None
    error: str | None = None
    metadata: dict[str, Any] = {}
    attempt_id: str = ""
    reward: float | None = None
    verdict: Verdict | None = None
    failure: Failure | None = None
    artifacts: list[Artifact] = []
    completion_count: int = 0


class SessionStatusResponse(msgspec.Struct, kw_only=True):
    """One live or just ended session as its node sees it."""

    session_id: str
    task_id: str | None = None
    created_at: float = 0.0
    completion_count: int = 0
    status: str = "REGISTERED"
    stage: str | None = None
    deadline_at: float | None = None
    result: SessionResult | None = None


class NodeStageMetrics(msgspec.Struct, kw_only=True):
    """How many sessions are in each stage of a node."""

    init_queue_depth: int = 0
    init_inflight: int = 0
    ready_depth: int = 0
    run_inflight: int = 0
    postrun_queue_depth: int = 0
    postrun_inflight: int = 0


class NodeOffers(msgspec.Struct, kw_only=True):
    """What a node can do; the server refuses at submit what no live node offers."""

    harnesses: list[str] = []
    runtimes: list[str] = []
    builders: list[str] = []
    evaluators: list[str] = []


class NodeRegistrationRequest(msgspec.Struct, kw_only=True):
    """A gateway announcing itself; repeated registration under the same id replaces the old one."""

    node_id: Id
    gateway_url: str
    max_init_workers: int = 4
    max_run_workers: int = 2
    max_postrun_workers: int = 4
    max_ready_sessions: int = 4
    heartbeat_interval_seconds: float = 30.0
    offers: NodeOffers = msgspec.field(default_factory=NodeOffers)


class SessionProgress(msgspec.Struct, kw_only=True):
    """Where a session of the node is, for the server's status page."""

    session_id: str
    attempt_id: str = ""
    stage: str
    deadline_at: float | None = None
    completion_count: int = 0


class NodeHeartbeatRequest(msgspec.Struct, kw_only=True):
    metrics: NodeStageMetrics = msgspec.field(default_factory=NodeStageMetrics)
    sessions: list[SessionProgress] = []


class GatewayNodeInfo(msgspec.Struct, kw_only=True):
    """A node as the server sees it, and the answer to its registration and heartbeats."""

    node_id: str
    gateway_url: str
    max_init_workers: int = 4
    max_run_workers: int = 2
    max_postrun_workers: int = 4
    max_ready_sessions: int = 4
    heartbeat_interval_seconds: float = 30.0
    offers: NodeOffers = msgspec.field(default_factory=NodeOffers)
    metrics: NodeStageMetrics = msgspec.field(default_factory=NodeStageMetrics)
    dispatch_reservations: int = 0
    healthy: bool = True
    draining: bool = False
    last_heartbeat: float = 0.0
    stale_attempts: list[str] = []
    """Attempts of the node that are no longer current; the node cancels them."""


class SessionResultAck(msgspec.Struct, kw_only=True):
    status: str = "accepted"


def agent_timeout(metadata: dict[str, Any]) -> float | None:
    """`metadata.agent_timeout`: seconds, positive and finite, that may lower a task's own bound.

    Raises ValueError naming the field when it is anything else.
    """
    value = metadata.get("agent_timeout")
    if value is None:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or value <= 0
    ):
        raise ValueError(
            f"metadata.agent_timeout must be a positive, finite number of seconds, not {value!r}"
        )
    return float(value)
