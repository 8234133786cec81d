"""A session from dispatch to result: one coroutine, top to bottom.

INIT -> READY -> RUNNING, then POSTRUN whatever happened before. Slots are limiters, not queues of
workers; a READY place is reserved before INIT begins, so that a full buffer delays starts instead
of parking workers on runtimes nobody counted. A failure becomes data where it is caught, the way a
session ended is decided in `_result` alone, and its runtimes are stopped under a shield, always.
"""

import logging
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

import evaluators
from builders.records import CompletionSession, Trajectory
from evaluators.base import Evaluation, EvaluatorSpec
from harness_adapters.base import HarnessAdapter, HarnessEnd, LaunchPlan
from polar_gateway import lifecycle, stages
from polar_gateway.config import NodeConfig
from polar_gateway.engines.base import EngineProbe
from polar_gateway.errors import BoundaryError, Failure, boundary
from polar_gateway.lifecycle import Outcome, Stage
from polar_gateway.model_listener import ModelListener
from polar_gateway.protocol import (
    Artifact,
    Finding,
    RuntimeSpec,
    SessionDispatchRequest,
    SessionResult,
    Verdict,
    agent_timeout,
)
from polar_gateway.runtimes.base import PackMount, Runtime, RuntimeRequest
from polar_gateway.runtimes.trees import remove_tree
from polar_gateway.sessions import Session
from polar_gateway.verdicts import masked, nothing_trainable, verdict

logger = logging.getLogger(__name__)

KILL_SECONDS = 30.0
"""How long killing a process tree, or removing a runtime, may take before it is given up."""

MAX_LISTED_ARTIFACTS = 256


class Slots:
    """How many sessions may be in each stage at once."""

    def __init__(self, config: NodeConfig) -> None:
        self.init = anyio.CapacityLimiter(config.max_init_workers)
        self.ready = anyio.CapacityLimiter(config.max_ready_sessions)
        self.running = anyio.CapacityLimiter(config.max_run_workers)
        self.postrun = anyio.CapacityLimiter(config.max_postrun_workers)


class NodeParts(msgspec.Struct, kw_only=True):
    """What a session uses of its node."""

    node_id: str
    config: NodeConfig
    probe: EngineProbe
    adapters: dict[str, HarnessAdapter]
    packs: dict[str, Path]
    """Installed harness packs by name."""
    runtimes: dict[str, type[Runtime]]
    listener: ModelListener
    slots: Slots
    deliver: Callable[[SessionDispatchRequest, SessionResult], Awaitable[None]]
    """Takes the result over; when it returns, the result survives a crash of the node."""


class Place(msgspec.Struct, kw_only=True, frozen=True):
    """An open runtime and the session's folders in it."""

    runtime: Runtime
    where: stages.Paths


class SessionRun:
    """One attempt of one session on this node. `folder` is its own, and kept."""

    def __init__(
        self, node: NodeParts, session: Session, dispatch: SessionDispatchRequest, folder: Path
    ) -> None:
        self.session = session
        self.dispatch = dispatch
        self.cancelled = False
        self._node = node
        self._spec = dispatch.runtime or node.config.default_runtime or RuntimeSpec()
        self._adapter = node.adapters[dispatch.agent.harness or ""]
        self._folder = folder
        self._artifacts = folder / "artifacts"
        self._artifacts.mkdir(parents=True, exist_ok=True)
        self._findings: list[Finding] = []
        self._stopped_by: Failure | None = None
        self._live_scope = anyio.CancelScope()
        self._grading_scope = anyio.CancelScope()
        self._runtimes: list[Runtime] = []
        self._agent_place: Place | None = None
        self._plan: LaunchPlan | None = None
        self._harness_run: stages.HarnessRun | None = None
        self._accepted = time.monotonic()

    def cancel(self) -> None:
        """End the session as cancelled, whichever stage it is in; idempotent."""
        self.cancelled = True
        self._stop()

    def abandon(self, reason: str) -> None:
        """End the session because its node goes; worth another attempt elsewhere."""
        self._stopped_by = Failure(boundary="lost_node", message=reason, infra=True)
        self._stop()

    def _stop(self) -> None:
        self.session.seal()
        self._live_scope.cancel()
        self._grading_scope.cancel()

    async def run(self) -> None:
        """The whole session; its ending is data, never an exception."""
        async with AsyncExitStack() as teardown:
            failure = await self._until_harness_end(teardown)
            self.session.seal()
            await self._stop_harness()
            failure = self._stopped_by or failure or self._failure_of_the_run()
            self.session.advance(Stage.POSTRUN_QUEUED)
            self.session.deadline_at = None
            async with self._node.slots.postrun:
                started = time.monotonic()
                result = await self._postrun(teardown, failure)
                result.timing.postrun = stages.now_ms(started)
        result.timing.e2e = stages.now_ms(self._accepted)
        with anyio.CancelScope(shield=True):
            await self._node.deliver(self.dispatch, result)
        self.session.capture.close()
        self.session.outcome = self._outcome(result)
        self.session.result = result
        self.session.advance(Stage.ENDED)
        logger.info(
            "session %s ended %s, reward %s, %d model calls",
            result.session_id,
            result.status,
            result.reward,
            result.completion_count,
        )

    # INIT, READY, RUNNING

    async def _until_harness_end(self, teardown: AsyncExitStack) -> Failure | None:
        slots, session = self._node.slots, self.session
        try:
            with self._live_scope:
                async with AsyncExitStack() as buffered:
                    await buffered.enter_async_context(slots.ready)
                    async with slots.init:
                        session.timing.register_to_init_queue = stages.now_ms(self._accepted)
                        session.advance(Stage.INIT)
                        started = time.monotonic()
                        place, plan = await self._init(teardown)
                        session.timing.init = stages.now_ms(started)
                    session.advance(Stage.READY)
                    session.deadline_at = None
                    started = time.monotonic()
                    async with slots.running:
                        await buffered.aclose()
                        session.timing.ready_queue = stages.now_ms(started)
                        session.advance(Stage.RUNNING)
                        started = time.monotonic()
                        await self._running(place, plan)
                        session.timing.run = stages.now_ms(started)
        except BoundaryError as error:
            return error.failure
        return None

    async def _init(self, teardown: AsyncExitStack) -> tuple[Place, LaunchPlan]:
        seconds = self.dispatch.init_timeout_seconds
        self.session.deadline_at = time.time() + seconds
        try:
            with anyio.fail_after(seconds):
                place = await self._open_runtime(teardown, purpose="agent")
                self._agent_place = place
                await stages.make_folders(place.runtime, place.where)
                await stages.prepare(
                    place.runtime,
                    self._spec.prepare,
                    place.where,
                    self._agent_env(place),
                    self._node.config.upload_roots,
                    secret=self.session.key,
                )
                plan = self._plan = stages.launch_plan(
                    self._adapter,
                    self.dispatch,
                    place.runtime,
                    place.where,
                    key=self.session.key,
                    model_name=self._node.probe.model,
                    context_length=self._node.probe.max_model_len,
                )
                await stages.write_plan(place.runtime, plan, self.dispatch.instruction, place.where)
        except TimeoutError as error:
            raise BoundaryError("runtime", f"INIT took longer than {seconds:g} s") from error
        return place, plan

    def _agent_env(self, place: Place) -> dict[str, str]:
        return stages.session_env(
            self.dispatch, self._spec, place.where, place.runtime.model_url, self.session.key
        )

    async def _open_runtime(self, teardown: AsyncExitStack, *, purpose: str) -> Place:
        spec = self._spec
        backend = self._node.runtimes.get(spec.backend)
        if backend is None:
            offered = ", ".join(sorted(self._node.runtimes)) or "none"
            raise BoundaryError(
                "runtime",
                f"node {self._node.node_id} has no runtime {spec.backend!r}; it offers {offered}",
            )
        scratch = self._folder / f"runtime-{purpose}"
        scratch.mkdir()
        teardown.push_async_callback(self._remove_scratch, scratch)
        serves_model = purpose == "agent"
        runtime = backend(
            RuntimeRequest(
                session_id=self.dispatch.session_id,
                attempt_id=self.dispatch.attempt_id,
                owner=self._node.node_id,
                spec=spec,
                mounts=self._mounts() if serves_model else (),
                mount_roots=tuple(self._node.config.mount_roots),
                scratch_dir=scratch,
                model_port=self._node.listener.port if serves_model else None,
                serve_socket=self._node.listener.add_socket if serves_model else None,
                purpose=purpose,
            )
        )
        teardown.push_async_callback(self._stop_runtime, runtime)
        with boundary("runtime", f"the runtime {spec.backend} did not start"):
            await runtime.start()
        self._runtimes.append(runtime)
        if not runtime.isolated:
            self._findings.append(
                Finding(code="unisolated", message=f"the runtime {spec.backend} isolates nothing")
            )
        return Place(runtime=runtime, where=stages.paths(runtime, spec))

    def _mounts(self) -> tuple[PackMount, ...]:
        name = self._adapter.pack
        if name is None:
            return ()
        if name not in self._node.packs:
            raise BoundaryError(
                "harness",
                f"the harness pack {name} is not installed on node {self._node.node_id}; "
                f"run: polar harness install {name}",
                infra=True,
            )
        return (PackMount(source=self._node.packs[name], target=f"{stages.PACKS_DIR}/{name}"),)

    async def _running(self, place: Place, plan: LaunchPlan) -> None:
        seconds = self.dispatch.remaining_timeout_seconds
        lower = agent_timeout(self.dispatch.metadata)
        if lower is not None:
            seconds = min(seconds, lower)
        self.session.deadline_at = time.time() + seconds
        self._harness_run = await stages.run_harness(
            place.runtime,
            self._adapter,
            plan,
            self.dispatch.instruction,
            place.where,
            self._agent_env(place),
            timeout=seconds,
            artifacts_dir=self._artifacts,
            secret=self.session.key,
        )

    # After the harness

    async def _stop_harness(self) -> None:
        """Nothing of the agent may run while its work is built and graded."""
        if self._agent_place is None:
            return
        with anyio.move_on_after(KILL_SECONDS, shield=True) as scope:
            try:
                await self._agent_place.runtime.cancel()
            except Exception as error:
                logger.exception("session %s: processes were not stopped", self.session.session_id)
                self._findings.append(
                    Finding(
                        code="processes_not_stopped", message=str(error) or type(error).__name__
                    )
                )
        if scope.cancelled_caught:
            self._findings.append(
                Finding(code="processes_not_stopped", message=f"not within {KILL_SECONDS:g} s")
            )

    async def _remove_scratch(self, scratch: Path) -> None:
        try:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(remove_tree, scratch)
        except OSError as error:
            logger.warning("session %s left files behind: %s", self.session.session_id, error)

    async def _stop_runtime(self, runtime: Runtime) -> None:
        with anyio.move_on_after(KILL_SECONDS, shield=True) as scope:
            try:
                await runtime.stop()
            except Exception:
                logger.exception("session %s: its runtime was not removed", self.session.session_id)
        if scope.cancelled_caught:
            logger.error(
                "session %s: its runtime was not removed within %g s",
                self.session.session_id,
                KILL_SECONDS,
            )

    def _failure_of_the_run(self) -> Failure | None:
        """A failed model call outranks the harness's exit: the harness only saw an HTTP error.

        Where the engine failed, a harness that went on and completed has got over it. A request
        that had to be refused, or a record that could not be kept, fails the session however its
        harness ended, and so does a context that overflowed where nothing was said after it.
        """
        run, failed_call = self._harness_run, self.session.engine_failure
        if self.session.refused is not None:
            return self.session.refused
        if failed_call is not None and failed_call.code == "context_overflow":
            return failed_call
        if run is None or (run.end is not None and run.end.outcome == "completed"):
            return None
        if failed_call is not None:
            return failed_call
        if run.end is None:
            return None
        return Failure(
            boundary="harness",
            message=f"{self._adapter.name} failed: {run.end.reason or 'no reason given'}",
            detail=(run.stderr_tail or run.stdout_tail)[-8192:],
        )

    async def _postrun(self, teardown: AsyncExitStack, failure: Failure | None) -> SessionResult:
        """Build always, grade where that means something; what fails here joins what went before."""
        session = self.session
        budget = stages.postrun_seconds(self.dispatch)
        session.deadline_at = time.time() + budget
        session.advance(Stage.BUILDING)
        started = time.monotonic()
        completions = session.capture.completion_session(self._node.probe.end_of_turn_ids)
        trajectory: Trajectory | None = None
        evaluation = Evaluation(validity="ungraded")
        try:
            trajectory = await anyio.to_thread.run_sync(stages.build, self.dispatch, completions)
            session.timing.build = stages.now_ms(started)
            failure = failure or nothing_trainable(
                self._verdict(completions, trajectory, failure=None, graded=False)
            )
            await self._keep_native_logs()
            session.advance(Stage.EVALUATING)
            started = time.monotonic()
            evaluation = await self._evaluate(teardown, trajectory, failure, budget)
            trajectory = stages.reward(self.dispatch, trajectory, evaluation)
            session.timing.eval = stages.now_ms(started)
        except BoundaryError as error:
            failure = failure or error.failure
        artifacts = await anyio.to_thread.run_sync(_artifacts, self._folder)
        return self._result(
            completions, trajectory, evaluation, self._stopped_by or failure, artifacts
        )

    async def _keep_native_logs(self) -> None:
        if self._agent_place is None or self._plan is None:
            return
        with anyio.move_on_after(KILL_SECONDS, shield=True):
            for note in await stages.keep_native_logs(
                self._agent_place.runtime, self._plan, self._artifacts
            ):
                self._findings.append(Finding(code="native_log_lost", message=note))

    async def _evaluate(
        self,
        teardown: AsyncExitStack,
        trajectory: Trajectory,
        failure: Failure | None,
        budget: float,
    ) -> Evaluation:
        """Grade an agent that ended, failed or ran out of time; not one whose infrastructure broke."""
        ungraded = Evaluation(validity="ungraded")
        spec, place, run = self.dispatch.evaluator, self._agent_place, self._harness_run
        stopped = self.cancelled or self._stopped_by is not None
        if spec is None or place is None or run is None or stopped:
            return ungraded
        if failure is not None and failure.infra:
            return ungraded
        evaluation = ungraded
        deadline = self._grading_scope.deadline = anyio.current_time() + budget
        with self._grading_scope:
            if evaluators.make(spec).needs_workspace:
                place = await self._grading_place(teardown, spec, place)
            evaluation = await stages.evaluate(
                self.dispatch,
                trajectory,
                place.runtime,
                place.where,
                stages.grading_env(self.dispatch, self._spec, place.where),
                run,
                seconds_left=deadline - anyio.current_time(),
                artifacts_dir=self._artifacts,
            )
        if self._grading_scope.cancelled_caught and anyio.current_time() >= deadline:
            raise BoundaryError("evaluator", f"grading took longer than {budget:g} s")
        if failure is not None and stages.positive(evaluation):
            self._findings.append(
                Finding(
                    code="reward_withheld",
                    message="a session that failed is not rewarded; what the evaluator gave is in its report",
                )
            )
            evaluation = stages.withheld(evaluation)
        return evaluation

    async def _grading_place(
        self, teardown: AsyncExitStack, spec: EvaluatorSpec, agent: Place
    ) -> Place:
        """The agent's own runtime, or one that it never touched with its workdir moved there."""
        if not spec.refresh_runtime:
            self._findings.append(Finding(code="graded_in_agent_runtime"))
            return agent
        fresh = await self._open_runtime(teardown, purpose="eval")
        await stages.make_folders(fresh.runtime, fresh.where)
        actions = self._spec.prepare if self._spec.eval_prepare is None else self._spec.eval_prepare
        env = stages.grading_env(self.dispatch, self._spec, fresh.where)
        await stages.prepare(
            fresh.runtime,
            actions,
            fresh.where,
            env,
            self._node.config.upload_roots,
            secret=self.session.key,
        )
        await stages.move_workdir(
            agent.runtime, agent.where, fresh.runtime, fresh.where, self._folder
        )
        return fresh

    # The ending

    def _result(
        self,
        completions: CompletionSession,
        trajectory: Trajectory | None,
        evaluation: Evaluation,
        failure: Failure | None,
        artifacts: list[Artifact],
    ) -> SessionResult:
        if self.cancelled:
            failure = Failure(boundary="cancelled", message="session cancelled")
        said = self._verdict(
            completions, trajectory, failure=failure, graded=evaluation.validity == "graded"
        )
        failure = failure or nothing_trainable(said)
        timed_out = self._harness_run is not None and self._harness_run.timed_out
        outcome = lifecycle.ending(cancelled=self.cancelled, timed_out=timed_out, failure=failure)
        status = lifecycle.wire_status(Stage.ENDED, outcome)
        error = failure.message if failure else None
        if trajectory is not None:
            trajectory = masked(trajectory, said)
            trajectory.status = status
            trajectory.error = error
        return SessionResult(
            session_id=self.dispatch.session_id,
            task_id=self.dispatch.task_id,
            attempt_id=self.dispatch.attempt_id,
            status=status,
            trajectory=trajectory,
            timing=self.session.timing,
            node_id=self._node.node_id,
            error=error,
            metadata={**self.dispatch.metadata, "agent_result": self._agent_result()},
            reward=evaluation.outcome_reward,
            verdict=said,
            failure=failure,
            artifacts=artifacts,
            completion_count=len(completions.completions),
        )

    def _verdict(
        self,
        completions: CompletionSession,
        trajectory: Trajectory | None,
        *,
        failure: Failure | None,
        graded: bool,
    ) -> Verdict:
        notes = [
            *self._findings,
            *(
                Finding(code="runtime", message=note)
                for runtime in self._runtimes
                for note in runtime.notes
            ),
        ]
        run = self._harness_run
        if run is not None and run.end is not None and run.end.outcome == "failed":
            notes.append(_crash(run.end))
        return verdict(
            completions,
            trajectory,
            failure=failure,
            graded=graded,
            notes=notes,
            strict=stages.strict(self.dispatch),
        )

    def _agent_result(self) -> dict[str, object]:
        run = self._harness_run
        if run is None:
            return {
                "status": "failed",
                "return_code": None,
                "error": "the harness did not run to an end",
            }
        if run.end is None:
            return {"status": "timeout", "return_code": -1, "error": "the time limit was reached"}
        return {
            "status": run.end.outcome,
            "return_code": run.end.return_code,
            "error": run.end.reason or None,
        }

    def _outcome(self, result: SessionResult) -> Outcome:
        timed_out = result.status == "TIMEOUT"
        return lifecycle.ending(
            cancelled=self.cancelled, timed_out=timed_out, failure=result.failure
        )


def _crash(end: HarnessEnd) -> Finding:
    code = end.return_code
    numbers: dict[str, float] = {} if code is None else {"return_code": code}
    return Finding(code="harness_crash", message=end.reason, numbers=numbers)


def _artifacts(folder: Path) -> list[Artifact]:
    """The files that are kept. An agent may have made their names and folders: links are not
    followed, the walk does not recurse, and names that are no text are escaped."""
    found: list[Artifact] = []
    folders = [folder / "artifacts"]
    files = list(folder.glob("*.journal"))
    while folders and len(files) < MAX_LISTED_ARTIFACTS:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                elif entry.is_file(follow_symlinks=False):
                    files.append(Path(entry.path))
    for file in sorted(files)[:MAX_LISTED_ARTIFACTS]:
        path = str(file).encode("utf-8", "backslashreplace").decode()
        name = path.removeprefix(f"{folder}/")
        found.append(Artifact(name=name, path=path, bytes=file.lstat().st_size))
    return found
