"""The routes: decode, call one function, encode."""

import time
from dataclasses import dataclass
from typing import Any

import anyio.to_thread
import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from polar_gateway.protocol import (
    NodeHeartbeatRequest,
    NodeRegistrationRequest,
    SessionResultAck,
    valid_id,
)
from polar_gateway.results import Part, ResultStore, splice
from polar_server import documents, errors, nodes, tasks
from polar_server.nodes import Progress
from polar_server.outbox import Outbox
from polar_server.protocol import TaskSubmitted
from polar_server.scheduler import Scheduler
from polar_server.store.queries import Store, Taken
from polar_server.store.records import ReportedResult

MAX_SUBMIT_BYTES = 16 << 20
MAX_RESULT_BYTES = 512 << 20
MAX_NODE_BYTES = 4 << 20
MAX_LISTED_TASKS = 1000


@dataclass(frozen=True)
class Service:
    """The running server, as its routes see it."""

    store: Store
    results: ResultStore
    progress: Progress
    scheduler: Scheduler
    outbox: Outbox

    @property
    def listening_since(self) -> float:
        return self.scheduler.listening_since

    def wake(self) -> None:
        """Something was decided that the loops act on."""
        self.scheduler.wake()
        self.outbox.wake()


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def submit(request: Request) -> Response:
    service = _service(request)
    body = await _body(request, MAX_SUBMIT_BYTES)
    now = time.time()
    live = [
        node.registration.offers
        for node in (await service.store.nodes()).values()
        if nodes.healthy(node, now, service.listening_since)
    ]
    task = tasks.check_task(body, live)
    state = await service.store.submit(
        task, idempotency_key=request.headers.get("idempotency-key"), now=now
    )
    service.wake()
    return _reply(TaskSubmitted(task_id=task.request.task_id, status=state))


async def task_status(request: Request) -> Response:
    include = request.query_params.get("include")
    with_results = include is None or "results" in include.split(",")
    return await _task_status(request, with_results=with_results)


async def cancel_task(request: Request) -> Response:
    service = _service(request)
    if not await service.store.cancel_task(_task_id(request), time.time()):
        raise _no_task(request)
    service.wake()
    return await _task_status(request, with_results=True)


async def _task_status(request: Request, *, with_results: bool) -> Response:
    service = _service(request)
    found = await service.store.task(_task_id(request))
    if found is None:
        raise _no_task(request)
    task, sessions = found
    return _spliced(
        documents.task_status(
            task, sessions, service.progress, service.results, with_results=with_results
        )
    )


async def rollout_status(request: Request) -> Response:
    service = _service(request)
    return _reply(
        {
            "tasks": await service.store.task_states(),
            "pipeline": {"pending_sessions": await service.store.queued_sessions()},
            "nodes": {"nodes": await _node_infos(service)},
        }
    )


async def list_tasks(request: Request) -> Response:
    wanted = request.query_params
    try:
        since = float(wanted["since"]) if "since" in wanted else None
        limit = int(wanted.get("limit", "200"))
    except ValueError as error:
        raise errors.invalid(f"since and limit are numbers: {error}", None) from error
    if not 1 <= limit <= MAX_LISTED_TASKS:
        raise errors.invalid(f"limit must be between 1 and {MAX_LISTED_TASKS}", "limit")
    listed = await _service(request).store.task_list(
        status=wanted.get("status"), harness=wanted.get("harness"), since=since, limit=limit
    )
    return _reply({"tasks": listed})


async def register(request: Request) -> Response:
    service = _service(request)
    registration: NodeRegistrationRequest = tasks.decode(
        await _body(request, MAX_NODE_BYTES), NodeRegistrationRequest
    )
    tasks.check_url("gateway_url", registration.gateway_url)
    now = time.time()
    service.progress.registered(registration.node_id)
    node = await service.store.register(registration, now)
    service.scheduler.wake()
    return _reply(nodes.info(node, now, service.listening_since))


async def heartbeat(request: Request) -> Response:
    service = _service(request)
    node_id = _node_id(request)
    body = await _body(request, MAX_NODE_BYTES)
    beat: NodeHeartbeatRequest = tasks.decode(body or b"{}", NodeHeartbeatRequest)
    now = time.time()
    known = await service.store.heartbeat(
        node_id, beat.metrics, [session.attempt_id for session in beat.sessions], now
    )
    if known is None:
        raise errors.not_found(f"node {node_id} is not registered")
    node, stale = known
    service.progress.heard(node_id, beat.sessions)
    service.scheduler.wake()
    return _reply(nodes.info(node, now, service.listening_since, stale))


async def list_nodes(request: Request) -> Response:
    return _reply({"nodes": await _node_infos(_service(request))})


async def one_node(request: Request) -> Response:
    service = _service(request)
    node = (await service.store.nodes()).get(_node_id(request))
    if node is None:
        raise errors.not_found(f"node {_node_id(request)} is not registered")
    return _reply(nodes.info(node, time.time(), service.listening_since))


async def drain_node(request: Request) -> Response:
    service = _service(request)
    node = await service.store.drain(_node_id(request))
    if node is None:
        raise errors.not_found(f"node {_node_id(request)} is not registered")
    return _reply(nodes.info(node, time.time(), service.listening_since))


async def session_result(request: Request) -> Response:
    """Take a result: its bytes are on disk and its row is committed before the answer.

    Whatever is not taken is acknowledged too, so that its node forgets it: a repetition, an attempt
    that is no longer current. A result of an unknown session (a node that was pointed at another
    server, a database that was replaced) is kept below `unclaimed`.
    """
    service = _service(request)
    body = await _body(request, MAX_RESULT_BYTES)
    result: ReportedResult = tasks.decode(body, ReportedResult)
    if not valid_id(result.session_id):
        raise errors.invalid(f"{result.session_id!r} is not an id", "session_id")
    staged = await anyio.to_thread.run_sync(service.results.stage, body)

    async def publish(key: str) -> None:
        await anyio.to_thread.run_sync(service.results.publish, staged, key)

    async def publish_result(task_id: str) -> str:
        key = service.results.key(task_id, result.session_id)
        await publish(key)
        return key

    try:
        taken = await service.store.take_result(result, publish_result, time.time())
        if taken is Taken.UNKNOWN:
            await publish(service.results.unclaimed_key(result.session_id))
    finally:
        service.results.discard(staged)
    service.wake()
    return _reply(SessionResultAck())


async def health(request: Request) -> Response:
    return _reply({"status": "ok", "nodes": len(await _service(request).store.nodes())})


ROUTES = [
    Route("/health", health),
    Route("/healthz", health),
    Route("/rollout/task/submit", submit, methods=["POST"]),
    Route("/rollout/task/{task_id}", task_status),
    Route("/rollout/task/{task_id}", cancel_task, methods=["DELETE"]),
    Route("/rollout/status", rollout_status),
    Route("/tasks", list_tasks),
    Route("/nodes", list_nodes),
    Route("/nodes/register", register, methods=["POST"]),
    Route("/nodes/{node_id}", one_node),
    Route("/nodes/{node_id}", drain_node, methods=["DELETE"]),
    Route("/nodes/{node_id}/heartbeat", heartbeat, methods=["POST"]),
    Route("/callbacks/session_result", session_result, methods=["POST"]),
]


async def _body(request: Request, limit: int) -> bytearray:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise errors.too_large(limit)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise errors.too_large(limit)
    return body


def _reply(document: Any) -> Response:
    return Response(msgspec.json.encode(document), media_type="application/json")


def _spliced(parts: list[Part]) -> Response:
    return StreamingResponse(splice(parts), media_type="application/json")


def _task_id(request: Request) -> str:
    return tasks.check_id("task", request.path_params["task_id"])


def _node_id(request: Request) -> str:
    return tasks.check_id("node", request.path_params["node_id"])


def _no_task(request: Request) -> errors.RefusalError:
    return errors.not_found(f"task {_task_id(request)} is not known")


async def _node_infos(service: Service) -> list[Any]:
    now = time.time()
    known = await service.store.nodes()
    return [nodes.info(node, now, service.listening_since) for node in known.values()]
