"""What happens in each stage of a session: open the place, run the harness, build and grade.

Every function does one stage for one session and raises BoundaryError when its boundary breaks;
the order, the slots and the endings are the pipeline's.
"""

import math
import shlex
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO

import anyio
import anyio.to_thread
import msgspec

import builders
import evaluators
from builders.base import StrategySpec
from builders.check import check
from builders.records import CompletionSession, Trajectory
from evaluators.base import Evaluation, EvaluationContext, ExecResult
from evaluators.broadcast import apply
from harness_adapters.base import AgentSpec, HarnessAdapter, HarnessEnd, LaunchContext, LaunchPlan
from polar_gateway.errors import BoundaryError, boundary
from polar_gateway.protocol import (
    SESSION_DIR,
    PrepareAction,
    RuntimeSpec,
    SessionDispatchRequest,
)
from polar_gateway.runtimes.base import Runtime

PACKS_DIR = "/polar/packs"
"""Where harness packs are mounted inside a runtime."""

HIDDEN = "[session key]"
"""What stands for the session's key in anything that is reported."""

OUTPUT_TAIL = 256 * 1024
"""Bytes of each output stream of the harness by which its end is judged."""

LOG_LIMIT = 64 * 1024 * 1024
"""Bytes of each output stream of the harness that are kept on disk."""


class OutputLog:
    """Writes the head of a stream to a file and remembers its tail, each up to a limit in bytes."""

    def __init__(self, file: BinaryIO, *, limit: int = LOG_LIMIT, tail: int = OUTPUT_TAIL) -> None:
        self._file = file
        self._room = limit
        self._tail_limit = tail
        self._chunks: deque[bytes] = deque()
        self._size = 0

    def write(self, chunk: bytes) -> None:
        if self._room > 0:
            self._file.write(chunk[: self._room])
            self._room -= min(self._room, len(chunk))
        self._chunks.append(chunk)
        self._size += len(chunk)
        while self._size - len(self._chunks[0]) >= self._tail_limit:
            self._size -= len(self._chunks.popleft())

    @property
    def tail(self) -> bytes:
        return b"".join(self._chunks)[-self._tail_limit :]


class Paths(msgspec.Struct, frozen=True, kw_only=True):
    """A session's folders as its runtime sees them."""

    session: str
    home: str
    artifacts: str
    logs: str
    agent_logs: str
    instruction: str
    workdir: str


def paths(runtime: Runtime, spec: RuntimeSpec) -> Paths:
    root = runtime.session_dir
    return Paths(
        session=root,
        home=f"{root}/home",
        artifacts=f"{root}/artifacts",
        logs=f"{root}/logs",
        agent_logs=f"{root}/logs/agent",
        instruction=f"{root}/instruction.md",
        workdir=runtime.inside(spec.workdir or f"{SESSION_DIR}/workspace"),
    )


def session_env(
    dispatch: SessionDispatchRequest, spec: RuntimeSpec, where: Paths, model_url: str, key: str
) -> dict[str, str]:
    """The variables of every prepare and agent command; `runtime.env` is laid over them."""
    return {
        "ANTHROPIC_BASE_URL": model_url,
        "ANTHROPIC_API_KEY": key,
        "OPENAI_BASE_URL": f"{model_url}/v1",
        "OPENAI_API_KEY": key,
        "GOOGLE_API_URL": model_url,
        "GOOGLE_API_KEY": key,
        **grading_env(dispatch, spec, where),
    }


def grading_env(
    dispatch: SessionDispatchRequest, spec: RuntimeSpec, where: Paths
) -> dict[str, str]:
    """The same without the model endpoint and its key, which are none of an evaluator's business."""
    return {
        "SESSION_ID": dispatch.session_id,
        "TASK_ID": dispatch.task_id,
        "SESSION_DIR": where.session,
        "ARTIFACTS_DIR": where.artifacts,
        "LOGS_DIR": where.logs,
        "AGENT_LOG_DIR": where.agent_logs,
        "HOME": where.home,
        **spec.env,
    }


async def make_folders(runtime: Runtime, where: Paths) -> None:
    folders = (where.home, where.artifacts, where.logs, where.agent_logs, where.workdir)
    with boundary("runtime", "the session's folders could not be made"):
        result = await runtime.exec(
            "mkdir -p -- " + " ".join(shlex.quote(folder) for folder in folders),
            cwd="/",
            timeout=60,
        )
    if result.return_code != 0:
        raise BoundaryError(
            "runtime",
            f"the session's folders could not be made (exit {result.return_code})",
            detail=result.stderr or result.stdout,
        )


async def prepare(
    runtime: Runtime,
    actions: list[PrepareAction],
    where: Paths,
    env: dict[str, str],
    upload_roots: list[Path],
    *,
    secret: str,
) -> None:
    """Run the prepare actions in order; the first that fails ends the session.

    `secret` is blotted out of what is reported of their output.
    """
    for number, action in enumerate(actions):
        what = f"prepare[{number}] ({action.type})"
        if action.type == "exec":
            await _prepare_exec(runtime, action, what, where, env, secret)
            continue
        if action.source is None or action.target is None:
            raise BoundaryError("prepare", f"{what} needs source and target", infra=False)
        source = _allowed_upload(Path(action.source), upload_roots, what)
        with boundary("prepare", what):
            await runtime.upload(source, runtime.inside(action.target))


async def _prepare_exec(
    runtime: Runtime,
    action: PrepareAction,
    what: str,
    where: Paths,
    env: dict[str, str],
    secret: str,
) -> None:
    result = ExecResult(return_code=0)
    for attempt in range(action.max_attempts):
        if attempt:
            await anyio.sleep(action.retry_backoff_seconds)
        with boundary("prepare", what):
            result = await runtime.exec(
                action.command or "",
                cwd=runtime.inside(action.cwd) if action.cwd else where.workdir,
                env={**env, **(action.env or {})},
            )
        if result.return_code == 0:
            return
    raise BoundaryError(
        "prepare",
        f"{what} failed with exit code {result.return_code}",
        detail=(result.stderr or result.stdout).replace(secret, HIDDEN),
        infra=False,
    )


def _allowed_upload(source: Path, roots: list[Path], what: str) -> Path:
    """`source` with its links resolved, if it lies below one of `roots`."""
    real = source.resolve()
    if not any(real.is_relative_to(root.resolve()) for root in roots):
        raise BoundaryError(
            "prepare",
            f"{what}: {source} is not below any of this node's upload_roots",
            infra=False,
        )
    if not real.exists():
        raise BoundaryError("prepare", f"{what}: {source} does not exist on this node", infra=False)
    return real


async def write_plan(runtime: Runtime, plan: LaunchPlan, instruction: str, where: Paths) -> None:
    with boundary("runtime", "the harness's files could not be written"):
        await runtime.write(where.instruction, instruction.encode(), 0o644)
        for path, text in plan.files.items():
            await runtime.write(path, text.encode())


def agent_inside(agent: AgentSpec, runtime: Runtime) -> AgentSpec:
    """The document with its paths as the inside of the runtime knows them."""
    shell = agent.custom_shell
    if shell is not None and shell.cwd:
        shell = msgspec.structs.replace(shell, cwd=runtime.inside(shell.cwd))
    skills = runtime.inside(agent.skills_path) if agent.skills_path else None
    return msgspec.structs.replace(agent, custom_shell=shell, skills_path=skills)


def launch_plan(
    adapter: HarnessAdapter,
    dispatch: SessionDispatchRequest,
    runtime: Runtime,
    where: Paths,
    *,
    key: str,
    model_name: str,
    context_length: int | None,
) -> LaunchPlan:
    context_length = context_length or 131072
    agent = agent_inside(dispatch.agent, runtime)
    with boundary("harness", f"the adapter {adapter.name} could not plan the run"):
        return adapter.plan(
            agent,
            LaunchContext(
                session_id=dispatch.session_id,
                instruction=dispatch.instruction,
                model_name=dispatch.agent.model_name or model_name,
                model_url=runtime.model_url,
                api_key=key,
                session_dir=where.session,
                home_dir=where.home,
                log_dir=where.agent_logs,
                instruction_path=where.instruction,
                workdir=where.workdir,
                pack_dir=runtime.inside(f"{PACKS_DIR}/{adapter.pack}") if adapter.pack else None,
                context_length=context_length,
                max_output_tokens=min(16384, max(1024, context_length // 4)),
            ),
        )


class HarnessRun(msgspec.Struct, kw_only=True):
    """How the run of the harness went."""

    timed_out: bool
    end: HarnessEnd | None
    """None when it timed out."""
    stdout_tail: str = ""
    stderr_tail: str = ""


async def run_harness(
    runtime: Runtime,
    adapter: HarnessAdapter,
    plan: LaunchPlan,
    instruction: str,
    where: Paths,
    env: dict[str, str],
    *,
    timeout: float,
    artifacts_dir: Path,
    secret: str,
) -> HarnessRun:
    """Run the plan's command to its end or its time limit; output goes to the artifacts as it comes.

    `secret` is blotted out of what is reported of that output.
    """
    with (
        (artifacts_dir / "agent.stdout.log").open("wb") as out_file,
        (artifacts_dir / "agent.stderr.log").open("wb") as err_file,
    ):
        out, err = OutputLog(out_file), OutputLog(err_file)
        with boundary("runtime", f"the command of {adapter.name} could not be run"):
            result = await runtime.exec(
                plan.command,
                cwd=plan.cwd or where.workdir,
                env={**env, **plan.env},
                stdin=instruction.encode(),
                timeout=timeout,
                on_stdout=out.write,
                on_stderr=err.write,
            )
    stdout, stderr = (t.replace(secret.encode(), HIDDEN.encode()) for t in (out.tail, err.tail))
    if result.return_code == -1:
        end = None
    else:
        with boundary("harness", f"the adapter {adapter.name} could not judge the harness's end"):
            end = adapter.ended(result.return_code, stdout, stderr)
    return HarnessRun(
        timed_out=end is None,
        end=end,
        stdout_tail=stdout.decode("utf-8", "replace"),
        stderr_tail=stderr.decode("utf-8", "replace"),
    )


async def keep_native_logs(runtime: Runtime, plan: LaunchPlan, artifacts_dir: Path) -> list[str]:
    """Download the harness's own logs; a missing or unreadable one is a note, not a failure."""
    notes = []
    for number, source in enumerate(plan.native_logs):
        target = artifacts_dir / "native" / f"{number}-{Path(source).name.lstrip('.') or 'log'}"
        target.parent.mkdir(exist_ok=True)
        try:
            await runtime.download(source, target)
        except Exception as error:
            # The run is over: a lost log must not cost its tokens.
            notes.append(f"native log {source} was not kept: {error}")
    return notes


async def move_workdir(
    agent: Runtime, agent_where: Paths, fresh: Runtime, fresh_where: Paths, scratch: Path
) -> None:
    """Replace the fresh runtime's workdir by the agent's, links as they are; never unpacked here."""
    with (
        boundary("evaluator", "the agent's workdir could not be moved to the fresh runtime"),
        tempfile.TemporaryFile(dir=scratch) as file,
    ):
        await agent.export(agent_where.workdir, file)
        await fresh.import_(fresh_where.workdir, file)


def build(dispatch: SessionDispatchRequest, session: CompletionSession) -> Trajectory:
    return built(dispatch.builder.strategy, dispatch.builder.config, session)


def built(strategy: str, config: dict[str, Any], session: CompletionSession) -> Trajectory:
    """Build and check; a trajectory that breaks an invariant is never handed on."""
    with boundary("builder", f"builder {strategy}"):
        builder = builders.make(StrategySpec(strategy=strategy, config=config))
        trajectory = builder.build(session)
        violations = check(session, trajectory, builder.options)
    if violations:
        raise BoundaryError(
            "builder",
            f"builder {strategy} broke {len(violations)} invariant(s): {violations[0]}",
            detail="\n".join(map(str, violations)),
        )
    return trajectory


def strict(dispatch: SessionDispatchRequest) -> tuple[str, ...]:
    """The findings that the task has count as fatal; none where its builder cannot be made, which
    builds nothing either."""
    try:
        with boundary("builder", f"builder {dispatch.builder.strategy}"):
            return builders.make(dispatch.builder).options.strict
    except BoundaryError:
        return ()


def postrun_seconds(dispatch: SessionDispatchRequest) -> float:
    """POSTRUN's budget: the task's own, or what the evaluator declares it needs plus 300 s."""
    if dispatch.postrun_timeout_seconds is not None:
        return dispatch.postrun_timeout_seconds
    if dispatch.evaluator is None:
        return 300.0
    return evaluators.make(dispatch.evaluator).seconds_needed + 300.0


async def evaluate(
    dispatch: SessionDispatchRequest,
    trajectory: Trajectory,
    runtime: Runtime,
    where: Paths,
    env: dict[str, str],
    run: HarnessRun,
    *,
    seconds_left: float,
    artifacts_dir: Path,
) -> Evaluation:
    """Run the task's evaluator; whatever it raises is an infrastructure failure, never a reward."""
    spec = dispatch.evaluator
    if spec is None:
        return Evaluation(validity="ungraded")
    with boundary("evaluator", f"evaluator {spec.strategy}"):
        evaluation = await evaluators.make(spec).evaluate(
            EvaluationContext(
                session_id=dispatch.session_id,
                task_id=dispatch.task_id,
                trajectory=trajectory,
                workspace=WorkspaceOf(runtime, where, env),
                harness_completed=run.end is not None and run.end.outcome == "completed",
                harness_output=run.stdout_tail,
                metadata=dispatch.metadata,
                env=spec.env,
                artifacts_dir=artifacts_dir,
                seconds_left=max(0.0, seconds_left),
            )
        )
        given = [evaluation.outcome_reward, *(evaluation.trace_rewards or [])]
        if any(reward is not None and not math.isfinite(reward) for reward in given):
            raise ValueError(f"a reward is not a finite number: {given}")
        return evaluation


def positive(evaluation: Evaluation) -> bool:
    given = [evaluation.outcome_reward, *(evaluation.trace_rewards or [])]
    return any(reward is not None and reward > 0 for reward in given)


def withheld(evaluation: Evaluation) -> Evaluation:
    """The evaluation with every positive reward lowered to 0.0; what was given is in the report."""
    rewards = evaluation.trace_rewards
    return msgspec.structs.replace(
        evaluation,
        outcome_reward=_lowered(evaluation.outcome_reward),
        trace_rewards=None if rewards is None else [_lowered(reward) for reward in rewards],
        report={
            **evaluation.report,
            "withheld": {"outcome_reward": evaluation.outcome_reward, "trace_rewards": rewards},
        },
    )


def _lowered(reward: float | None) -> float | None:
    return None if reward is None else min(reward, 0.0)


def reward(
    dispatch: SessionDispatchRequest, trajectory: Trajectory, evaluation: Evaluation
) -> Trajectory:
    """The trajectory with the evaluation's rewards on its traces."""
    strategy = dispatch.evaluator.strategy if dispatch.evaluator else ""
    with boundary("evaluator", f"the rewards of evaluator {strategy}"):
        return apply(trajectory, evaluation, strategy=strategy)


class WorkspaceOf:
    """The slice of a runtime that an evaluator sees: its own folders and variables as defaults."""

    def __init__(self, runtime: Runtime, where: Paths, env: dict[str, str]) -> None:
        self._runtime = runtime
        self._where = where
        self._env = env

    async def exec(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout: float | None = None,
    ) -> ExecResult:
        return await self._runtime.exec(
            command,
            cwd=self._runtime.inside(cwd) if cwd else self._where.workdir,
            env={**self._env, **(env or {})},
            timeout=timeout,
        )

    async def upload(self, source: Path, target: str) -> None:
        await self._runtime.upload(source, self._runtime.inside(target))

    async def download(self, source: str, target: Path) -> None:
        await self._runtime.download(self._runtime.inside(source), target)


def now_ms(since: float) -> float:
    """Milliseconds since `since`, a `time.monotonic()`."""
    return round((time.monotonic() - since) * 1000, 3)
