"""The documents that trainers and people exchange with the rollout server."""

from typing import Annotated, Any

import msgspec

from builders.base import StrategySpec
from evaluators.base import EvaluatorSpec
from harness_adapters.base import AgentSpec
from polar_gateway.errors import Failure
from polar_gateway.protocol import Id, Prompting, RuntimeSpec, Sampling, Verdict, agent_timeout


class TaskRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A task: one instruction, run `num_samples` times."""

    task_id: Id
    instruction: str
    num_samples: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    timeout_seconds: Annotated[float, msgspec.Meta(gt=0)] = 600.0
    """Bounds the harness's run alone; waiting and INIT are not charged."""
    runtime: RuntimeSpec | None = None
    agent: AgentSpec
    builder: StrategySpec = msgspec.field(
        default_factory=lambda: StrategySpec(strategy="per_request")
    )
    evaluator: EvaluatorSpec | None = None
    callback_url: str | None = None
    metadata: dict[str, Any] = {}
    dispatch_priority: Annotated[int, msgspec.Meta(ge=0, le=100)] = 0
    early_stop_min_usable_sessions: Annotated[int, msgspec.Meta(ge=1)] | None = None
    sampling: Sampling | None = None
    prompting: Prompting | None = None
    init_timeout_seconds: Annotated[float, msgspec.Meta(gt=0)] = 600.0
    postrun_timeout_seconds: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """None: what the evaluator declares it needs, plus 300 s."""

    def __post_init__(self) -> None:
        agent_timeout(self.metadata)
        if (
            self.early_stop_min_usable_sessions is not None
            and self.early_stop_min_usable_sessions > self.num_samples
        ):
            raise ValueError("early_stop_min_usable_sessions must not exceed num_samples")


class TaskSubmitted(msgspec.Struct, kw_only=True):
    task_id: str
    status: str = "running"


class SessionView(msgspec.Struct, kw_only=True):
    """One session of a task without its trajectory."""

    session_id: str
    status: str
    stage: str | None = None
    """Set while the session is live."""
    node_id: str | None = None
    attempt_id: str = ""
    deadline_at: float | None = None
    """Wall clock at which the current stage is cut off."""
    completion_count: int = 0
    reward: float | None = None
    error: str | None = None
    verdict: Verdict | None = None
    failure: Failure | None = None


class TaskStatus(msgspec.Struct, kw_only=True):
    """A task while it runs and after. `results` grows as sessions end and is in sample order at
    the end; results are spliced in undecoded."""

    task_id: str
    status: str
    """running, completed, failed, cancelled."""
    total_sessions: int
    completed_sessions: int
    results: list[msgspec.Raw] = []
    result_paths: list[str] = []
    sessions: list[SessionView] = []


class TaskResult(msgspec.Struct, kw_only=True):
    """The callback's body. `results` are SessionResults in sample order."""

    task_id: str
    status: str
    results: list[msgspec.Raw] = []
    result_paths: list[str] = []


class Problem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """RFC 9457 problem details; `field` is the path of what is wrong in the document."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str = ""
    field: str | None = None
