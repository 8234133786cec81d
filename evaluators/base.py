"""What an evaluator is: a trajectory and a workspace in, rewards out."""

from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import msgspec

from builders.base import StrategySpec
from builders.records import Trajectory


class EvaluatorSpec(StrategySpec, kw_only=True, forbid_unknown_fields=True):
    """Names an evaluator. `refresh_runtime` asks for a fresh runtime instead of the agent's."""

    env: dict[str, str] = {}
    refresh_runtime: bool = False


class ExecResult(msgspec.Struct, kw_only=True):
    """Outcome of a command; `return_code` is -1 when it ran past its time limit."""

    stdout: str = ""
    stderr: str = ""
    return_code: int


class Workspace(Protocol):
    """The slice of a runtime that an evaluator sees."""

    async def exec(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout: float | None = None,
    ) -> ExecResult: ...

    async def upload(self, source: Path, target: str) -> None: ...

    async def download(self, source: str, target: Path) -> None: ...


class EvaluationContext(msgspec.Struct, kw_only=True):
    """Everything an evaluator may look at."""

    session_id: str
    task_id: str
    trajectory: Trajectory
    workspace: Workspace | None
    """None when the session has no live runtime."""
    harness_completed: bool
    harness_output: str = ""
    """The tail of the harness's stdout."""
    metadata: dict[str, Any] = {}
    env: dict[str, str] = {}
    artifacts_dir: Path
    """A host folder for reports and logs; kept with the session's artifacts."""
    seconds_left: float = 300.0


class Evaluation(msgspec.Struct, kw_only=True):
    """Rewards and how they came about. `None` is no reward, which is not 0.0."""

    outcome_reward: float | None = None
    trace_rewards: list[float | None] | None = None
    validity: Literal["graded", "ungraded", "infra"] = "graded"
    components: dict[str, float] = {}
    report: dict[str, Any] = {}


class Evaluator(Protocol):
    """A reward strategy (paper §3.5): what the agent did is a reward, what broke is an exception."""

    name: ClassVar[str]
    Config: ClassVar[type[msgspec.Struct]]
    needs_workspace: ClassVar[bool]

    seconds_needed: float
    """The budget that it declares for POSTRUN, under its settings, when the task names none."""

    def __init__(self, config: Any) -> None: ...

    async def evaluate(self, context: EvaluationContext) -> Evaluation:
        """Raises when it could not judge, for reasons that are not the agent's.

        Whatever it raises is an infrastructure failure: the session has no reward, which is not
        0.0, and may be attempted again. Tests that fail, are missing or never end are judged.
        What it blocks on, or reads at length, it leaves to a thread: the loop is everyone's.
        """
        ...
