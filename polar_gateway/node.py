"""One node: its engine, its listeners, its live sessions, and the loops that report them."""

import logging
import secrets
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import httpx2
import msgspec

import builders
import evaluators
import harness_adapters
from builders.records import Completion
from harness_adapters import npm
from harness_adapters.base import HarnessAdapter
from polar_gateway import recovery, runtimes
from polar_gateway.backends import BackendRefusedError, Backends, open_backends
from polar_gateway.capture.answers import AnswerCache
from polar_gateway.capture.journal import CaptureError, Syncer
from polar_gateway.capture.session import SessionCapture
from polar_gateway.config import NodeConfig
from polar_gateway.lifecycle import Stage
from polar_gateway.model_listener import ModelListener
from polar_gateway.pipeline import NodeParts, SessionRun, Slots
from polar_gateway.prompts import Prompter
from polar_gateway.protocol import (
    NodeHeartbeatRequest,
    NodeOffers,
    NodeRegistrationRequest,
    NodeStageMetrics,
    SessionCreateRequest,
    SessionDispatchRequest,
    SessionDispatchResponse,
    SessionProgress,
    SessionStatusResponse,
    can_be_called,
    valid_id,
)
from polar_gateway.proxy import Proxy
from polar_gateway.reporter import Outbox, keep_registered
from polar_gateway.runtimes.base import Runtime
from polar_gateway.sessions import Session, Sessions, new_key

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 60.0
DRAIN_SECONDS = 5.0
"""How long a closing node tries to deliver; what is left waits for its next start."""
ENDED_REMEMBERED = 1024
"""How many ended sessions still answer GET /sessions/{id}."""


class NodeStartError(Exception):
    """The node cannot serve; the message says why, in words for an operator."""


class DispatchRefusedError(Exception):
    """A dispatch that this node does not take."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Node:
    """The live state of a gateway node; built by `open_node`."""

    def __init__(
        self,
        parts: NodeParts,
        backends: Backends,
        sessions: Sessions,
        undelivered: Mapping[str, str],
        data_dir: Path,
        tasks: anyio.abc.TaskGroup,
    ) -> None:
        self.parts = parts
        self.backends = backends
        self.closing = False
        self._answers = AnswerCache()
        self._syncer = Syncer() if parts.config.journal.fsync else None
        self._changed = anyio.Event()
        self._sessions = sessions
        self._undelivered = undelivered
        self._attempts_dir = data_dir / "attempts"
        self._attempts_dir.mkdir(parents=True, exist_ok=True)
        self._tasks = tasks
        self._runs: dict[str, SessionRun] = {}
        self._ended: dict[str, SessionStatusResponse] = {}

    def dispatch(self, dispatch: SessionDispatchRequest) -> SessionDispatchResponse:
        """Take an attempt on; taking the same attempt again is the same as once.

        Raises DispatchRefusedError when the node is closing, offers not what it takes, or runs
        another attempt of the session.
        """
        session_id = dispatch.session_id
        attempt_id = dispatch.attempt_id = dispatch.attempt_id or f"att-{secrets.token_hex(16)}"
        if not valid_id(attempt_id):
            raise DispatchRefusedError(422, f"attempt_id {attempt_id!r} is not an id")
        live = self._runs.get(session_id)
        if live is not None and live.dispatch.attempt_id != attempt_id:
            raise DispatchRefusedError(409, f"session {session_id} is live here in another attempt")
        if live is None and self._sessions.get(session_id) is not None:
            raise DispatchRefusedError(409, f"session {session_id} is live here without a harness")
        folder = self._attempts_dir / attempt_id
        if live is None and not recovery.was_accepted(folder):
            self._start(dispatch, folder)
        return SessionDispatchResponse(
            session_id=session_id,
            task_id=dispatch.task_id,
            status=live.session.status if live is not None else "REGISTERED",
            node_id=self.parts.node_id,
        )

    def _start(self, dispatch: SessionDispatchRequest, folder: Path) -> None:
        if self.closing:
            raise DispatchRefusedError(503, f"node {self.parts.node_id} is shutting down")
        self._check(dispatch)
        try:
            run = self._new_run(dispatch, folder)
        except (OSError, CaptureError) as error:
            # Nothing may stay that would make the repeated dispatch look like one that was taken.
            shutil.rmtree(folder, ignore_errors=True)
            raise DispatchRefusedError(
                507, f"node {self.parts.node_id} cannot keep the session's files: {error}"
            ) from error
        self._sessions.add(run.session)
        self._runs[dispatch.session_id] = run
        self._tasks.start_soon(self._run, run, folder, name=f"session {dispatch.session_id}")

    def _new_run(self, dispatch: SessionDispatchRequest, folder: Path) -> SessionRun:
        recovery.accept(folder, dispatch)
        session = Session(
            session_id=dispatch.session_id,
            task_id=dispatch.task_id,
            attempt_id=dispatch.attempt_id,
            key=new_key(),
            capture=self._capture(dispatch.session_id, dispatch.task_id, folder, dispatch.metadata),
            sampling=dispatch.sampling,
            prompter=Prompter(self.parts.config.inference, dispatch.prompting),
            policy_version=_policy_version(dispatch.metadata),
        )
        return SessionRun(self.parts, session, dispatch, folder)

    def _capture(
        self, session_id: str, task_id: str | None, folder: Path, metadata: dict[str, Any]
    ) -> SessionCapture:
        return SessionCapture(
            session_id=session_id,
            task_id=task_id,
            journal_path=folder / recovery.JOURNAL,
            metadata=metadata,
            policy_version=_policy_version(metadata),
            end_of_turn_ids=self.parts.probe.end_of_turn_ids,
            end_of_turn_texts=self.parts.probe.end_of_turn_texts,
            answers=self._answers,
            syncer=self._syncer,
        )

    def _check(self, dispatch: SessionDispatchRequest) -> None:
        """Refuse what would fail anyway, before anything is held for it."""
        harness = dispatch.agent.harness
        if harness not in self.parts.adapters:
            raise DispatchRefusedError(
                422, f"agent.harness {harness!r} is not offered by this node"
            )
        if dispatch.callback_url is not None and not can_be_called(dispatch.callback_url):
            raise DispatchRefusedError(
                422, f"callback_url {dispatch.callback_url!r} is no HTTP URL"
            )
        try:
            harness_adapters.check_settings(dispatch.agent)
            builders.make(dispatch.builder)
            if dispatch.evaluator is not None:
                evaluators.make(dispatch.evaluator)
        except ValueError as error:
            raise DispatchRefusedError(422, str(error)) from error

    async def _run(self, run: SessionRun, folder: Path) -> None:
        session = run.session
        try:
            await self._run_guarded(run, folder)
        finally:
            session.capture.close()
            self._sessions.remove(session)
            del self._runs[session.session_id]
            self._remember(self._status(session))
            self._change()

    async def _run_guarded(self, run: SessionRun, folder: Path) -> None:
        """A bug of ours, or a full disk, costs its own session and no other.

        What cannot even be reported stays unmarked, and is reported by the node's next start.
        """
        session, node_id = run.session, self.parts.node_id
        try:
            await run.run()
            recovery.mark_ended(folder)
        except Exception as error:
            logger.exception("session %s broke its node's own code", session.session_id)
            session.seal()
            reason = f"internal error of node {node_id}: {type(error).__name__}: {error}"
            try:
                result = recovery.result_of(folder, run.dispatch, node_id, reason)
                await self.parts.deliver(run.dispatch, result)
                recovery.mark_ended(folder)
            except Exception:
                logger.exception("session %s could not be reported", session.session_id)

    def _remember(self, status: SessionStatusResponse) -> None:
        """Ended sessions still answer; their traces lie with the server."""
        if status.result is not None:
            status.result = msgspec.structs.replace(status.result, trajectory=None)
        self._ended[status.session_id] = status
        while len(self._ended) > ENDED_REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def _change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    def changed(self) -> anyio.Event:
        """Set at the next change that the server should hear of before its period is over."""
        return self._changed

    def create_proxy_session(self, request: SessionCreateRequest) -> SessionStatusResponse:
        """A session without runtime or harness, for callers that run their own; its key is its id."""
        session_id = request.session_id or f"sk-polar-{secrets.token_hex(16)}"
        if self._sessions.get(session_id) is not None:
            raise DispatchRefusedError(409, f"session {session_id} is live already")
        folder = self._attempts_dir / f"proxy-{secrets.token_hex(8)}"
        folder.mkdir()
        session = Session(
            session_id=session_id,
            task_id=request.task_id,
            attempt_id="",
            key=session_id,
            capture=self._capture(session_id, request.task_id, folder, {}),
            prompter=Prompter(self.parts.config.inference),
        )
        self._sessions.add(session)
        return self._status(session)

    def cancel(self, session_id: str) -> int | None:
        """Cancel or drop a session; returns how many model calls it had, None if it is unknown."""
        run = self._runs.get(session_id)
        if run is not None:
            run.cancel()
            return run.session.capture.completion_count
        session = self._sessions.get(session_id)
        if session is None:
            return None
        session.seal()
        self._sessions.remove(session)
        session.capture.close()
        return session.capture.completion_count

    def cancel_attempts(self, attempt_ids: list[str]) -> None:
        """Cancel the attempts that the server says are no longer current."""
        for run in list(self._runs.values()):
            if run.dispatch.attempt_id in attempt_ids:
                run.cancel()

    def session_statuses(self) -> list[SessionStatusResponse]:
        return [self._status(session) for session in self._sessions]

    def session_status(self, session_id: str) -> SessionStatusResponse | None:
        session = self._sessions.get(session_id)
        return self._status(session) if session is not None else self._ended.get(session_id)

    def _status(self, session: Session) -> SessionStatusResponse:
        return SessionStatusResponse(
            session_id=session.session_id,
            task_id=session.task_id,
            created_at=session.created_at,
            completion_count=session.capture.completion_count,
            status=session.status,
            stage=session.stage,
            deadline_at=session.deadline_at,
            result=session.result,
        )

    def completions(self, session_id: str) -> list[dict[str, Any]] | None:
        """The captured calls of a live session, whole, for people who look."""
        session = self._sessions.get(session_id)
        if session is None:
            return None
        captured = session.capture.completion_session(self.parts.probe.end_of_turn_ids)
        return [_shown(completion) for completion in captured.completions]

    def metrics(self) -> NodeStageMetrics:
        stages = [run.session.stage for run in self._runs.values()]
        return NodeStageMetrics(
            init_queue_depth=stages.count(Stage.QUEUED),
            init_inflight=stages.count(Stage.INIT),
            ready_depth=stages.count(Stage.READY),
            run_inflight=stages.count(Stage.RUNNING),
            postrun_queue_depth=stages.count(Stage.POSTRUN_QUEUED),
            postrun_inflight=stages.count(Stage.BUILDING) + stages.count(Stage.EVALUATING),
        )

    def heartbeat(self) -> NodeHeartbeatRequest:
        return NodeHeartbeatRequest(
            metrics=self.metrics(),
            sessions=[
                SessionProgress(
                    session_id=run.session.session_id,
                    attempt_id=run.dispatch.attempt_id,
                    stage=run.session.stage,
                    deadline_at=run.session.deadline_at,
                    completion_count=run.session.capture.completion_count,
                )
                for run in self._runs.values()
            ]
            + [
                SessionProgress(session_id=session_id, attempt_id=attempt_id, stage="delivering")
                for attempt_id, session_id in self._undelivered.items()
            ],
        )

    def health(self) -> dict[str, Any]:
        """Liveness and load; names no session, since names are none of an anonymous caller's business."""
        return {
            "status": "closing" if self.closing else "ok",
            "node_id": self.parts.node_id,
            "engine": self.parts.probe,
            "backends": [backend.health() for backend in self.backends],
            "metrics": self.metrics(),
            "model_port": self.parts.listener.port,
        }

    async def close(self) -> None:
        """End every session as lost with its node, and wait until their results are safe."""
        self.closing = True
        for run in list(self._runs.values()):
            run.abandon(f"node {self.parts.node_id} was shut down")
        with anyio.move_on_after(SHUTDOWN_SECONDS):
            while self._runs:
                await self._changed.wait()


def _policy_version(metadata: Mapping[str, Any]) -> str | None:
    version = metadata.get("policy_version")
    return None if version is None else str(version)


def _shown(completion: Completion) -> dict[str, Any]:
    return {
        "completion_id": completion.completion_id,
        "timestamp": completion.started_at,
        "dialect": completion.dialect,
        "messages": completion.messages,
        "tools": completion.tools,
        "response": completion.response_message,
        "finish_reason": completion.finish_reason,
        "prompt_ids": completion.prompt_ids.tolist(),
        "sampled_ids": completion.sampled_ids.tolist(),
        "logprobs": None if completion.logprobs is None else completion.logprobs.tolist(),
        "sampling": completion.sampling,
        "delivered": completion.delivered,
        "usage": completion.usage,
        "backend": completion.backend,
        "policy_version": completion.policy_version,
        "versions": completion.versions,
        "findings": completion.findings,
    }


async def offered_runtimes(config: NodeConfig) -> dict[str, type[Runtime]]:
    """The runtimes that work on this host, by name."""
    offered = {}
    for name, runtime in runtimes.load_runtimes()[0].items():
        if not runtime.isolated and not config.allow_unisolated:
            continue
        missing = await runtime.unavailable()
        if missing is None:
            offered[name] = runtime
        else:
            logger.info("the runtime %s is not offered: %s", name, missing)
    return offered


def _registration(parts: NodeParts, public_url: str, interval: float) -> NodeRegistrationRequest:
    config = parts.config
    return NodeRegistrationRequest(
        node_id=parts.node_id,
        gateway_url=public_url,
        max_init_workers=config.max_init_workers,
        max_run_workers=config.max_run_workers,
        max_postrun_workers=config.max_postrun_workers,
        max_ready_sessions=config.max_ready_sessions,
        heartbeat_interval_seconds=interval,
        offers=NodeOffers(
            harnesses=sorted(parts.adapters),
            runtimes=sorted(parts.runtimes),
            builders=sorted(builders.BUILDERS),
            evaluators=sorted(evaluators.EVALUATORS),
        ),
    )


def loaded_adapters(packs: Mapping[str, Path]) -> dict[str, HarnessAdapter]:
    """The adapters that can work here; what plug-ins of any kind are broken is logged."""
    adapters, problems = harness_adapters.load_adapters()
    for problem in [
        *problems,
        *builders.load_builders()[1],
        *evaluators.load_evaluators()[1],
        *runtimes.load_runtimes()[1],
    ]:
        logger.warning("%s", problem)
    return {
        name: adapter
        for name, adapter in adapters.items()
        if adapter.pack is None or adapter.pack in packs
    }


async def recover(attempts: Path, outbox: Outbox, node_id: str) -> None:
    """Report the sessions that an earlier life of this node left unfinished, and clear up."""
    for folder, dispatch in recovery.unfinished(attempts):
        reason = f"node {node_id} was killed while it ran session {dispatch.session_id}"
        try:
            await outbox.put(dispatch, recovery.result_of(folder, dispatch, node_id, reason))
            recovery.mark_ended(folder)
        except OSError:
            logger.exception("session %s could not be reported", dispatch.session_id)
    await anyio.to_thread.run_sync(recovery.sweep, attempts)


class Reports(msgspec.Struct, kw_only=True):
    """Where and how often a node reports."""

    server_url: str | None
    token: str
    heartbeat_interval: float


Running = tuple[Node, Callable[[str], None]]
"""A node, and what starts its reports once its public URL is known."""


@asynccontextmanager
async def open_node(
    config: NodeConfig, *, data_dir: Path, reports: Reports, patience: float = 120.0
) -> AsyncIterator[Running]:
    """A running node, without its control listener.

    When the block ends, however it does, the node's sessions end as lost with it and are reported.
    Raises NodeStartError.
    """
    sessions = Sessions()
    outbox = Outbox(data_dir / "outbox")
    async with AsyncExitStack() as stack:
        try:
            backends = await stack.enter_async_context(
                open_backends(config.inference, model=config.model_served, patience=patience)
            )
        except BackendRefusedError as error:
            raise NodeStartError(str(error)) from error
        proxy = Proxy(sessions=sessions, backends=backends, config=config.model_calls)
        packs = {
            pack.name: pack.path for pack in npm.installed(config.pack_dir or npm.default_cache())
        }
        offered = await offered_runtimes(config)
        for runtime in offered.values():
            await runtime.reap_orphans(config.id)
        await recover(data_dir / "attempts", outbox, config.id)
        parts = NodeParts(
            node_id=config.id,
            config=config,
            probe=backends.first.probe,
            adapters=loaded_adapters(packs),
            packs=packs,
            runtimes=offered,
            listener=ModelListener(
                proxy,
                config.model_host,
                config.model_port,
                max_header_bytes=config.model_calls.max_header_bytes,
            ),
            slots=Slots(config),
            deliver=outbox.put,
        )
        closed = anyio.Event()
        async with anyio.create_task_group() as group:
            running: Running = await group.start(
                _live, parts, backends, sessions, outbox, data_dir, reports, closed
            )
            try:
                yield running
            finally:
                with anyio.CancelScope(shield=True):
                    await running[0].close()
                closed.set()


async def _live(
    parts: NodeParts,
    backends: Backends,
    sessions: Sessions,
    outbox: Outbox,
    data_dir: Path,
    reports: Reports,
    closed: anyio.Event,
    *,
    task_status: anyio.abc.TaskStatus[Running],
) -> None:
    """Everything that must outlive a cancellation of the node's owner until `closed` is set: the
    sessions, which first have to end, and the loops that report how they did."""
    headers = {"authorization": f"Bearer {reports.token}", "content-type": "application/json"}
    with anyio.CancelScope(shield=True):
        async with (
            parts.listener,
            httpx2.AsyncClient(headers=headers, timeout=30.0) as client,
            anyio.create_task_group() as loops,
        ):
            async with anyio.create_task_group() as tasks:
                node = Node(parts, backends, sessions, outbox.waiting, data_dir, tasks)
                loops.start_soon(backends.watch)

                def report(public_url: str) -> None:
                    loops.start_soon(outbox.deliver, client)
                    if reports.server_url is not None:
                        loops.start_soon(
                            keep_registered,
                            client,
                            reports.server_url,
                            _registration(parts, public_url, reports.heartbeat_interval),
                            node.heartbeat,
                            node.cancel_attempts,
                            node.changed,
                        )

                task_status.started((node, report))
                await closed.wait()
                tasks.cancel_scope.cancel()
            with anyio.move_on_after(DRAIN_SECONDS):
                await outbox.drained()
            loops.cancel_scope.cancel()
