"""The control listener: dispatch, look at and cancel the sessions of a node; its backends.

Every route but health needs the node's token. Handlers decode, call one function, encode.
"""

import hmac
from collections.abc import Awaitable, Callable
from http import HTTPStatus

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from polar_gateway.backend import WeightUpdate
from polar_gateway.backends import BackendRefusedError
from polar_gateway.config import BackendConfig
from polar_gateway.engines.base import PauseMode
from polar_gateway.node import DispatchRefusedError, Node
from polar_gateway.protocol import SessionCreateRequest, SessionDispatchRequest

DEFAULT_PAUSE_TIMEOUT = 300.0
"""Seconds for which a pause waits for what is in flight, unless it says otherwise."""
MAX_BODY = 64 * 1024 * 1024
OPEN_PATHS = frozenset({"/health", "/healthz"})


class Problem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """RFC 9457 problem details."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str = ""


def problem(status: int, detail: str) -> Response:
    return Response(
        msgspec.json.encode(Problem(title=HTTPStatus(status).phrase, status=status, detail=detail)),
        status,
        media_type="application/problem+json",
    )


def reply(document: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(document), status, media_type="application/json")


class RequireToken:
    """Refuse every request without the node's token, but for health."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._allowed(scope):
            await self._app(scope, receive, send)
            return
        refusal = problem(401, "this route needs the node's token: Authorization: Bearer ...")
        refusal.headers["www-authenticate"] = "Bearer"
        await refusal(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        headers = dict(scope["headers"])
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        given = given or headers.get(b"x-polar-control-token", b"")
        return hmac.compare_digest(given, self._token)


def control_app(node: Node, token: str) -> Starlette:
    """The control API of a node."""

    async def health(request: Request) -> Response:
        return reply(node.health())

    async def create(request: Request) -> Response:
        body = await request.body()
        if len(body) > MAX_BODY:
            return problem(413, f"a dispatch may hold {MAX_BODY} bytes")
        looks_like = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        if "agent" in looks_like:
            return reply(node.dispatch(msgspec.json.decode(body, type=SessionDispatchRequest)))
        created = msgspec.json.decode(body, type=SessionCreateRequest)
        return reply(node.create_proxy_session(created))

    async def list_sessions(request: Request) -> Response:
        wanted = request.query_params
        limit = int(wanted.get("limit", "200"))
        shown = [
            status
            for status in node.session_statuses()
            if wanted.get("status") in (None, status.status)
            and wanted.get("task_id") in (None, status.task_id)
        ]
        return reply({"sessions": shown[:limit]})

    async def one(request: Request) -> Response:
        status = node.session_status(request.path_params["session_id"])
        return reply(status) if status else problem(404, "no such session here")

    async def completions(request: Request) -> Response:
        shown = node.completions(request.path_params["session_id"])
        return problem(404, "no such session here") if shown is None else reply(shown)

    async def delete(request: Request) -> Response:
        session_id = request.path_params["session_id"]
        dropped = node.cancel(session_id)
        if dropped is None:
            return problem(404, "no such session here")
        return reply({"session_id": session_id, "deleted": True, "messages_deleted": dropped})

    async def inference_status(request: Request) -> Response:
        backends = node.backends
        return reply(
            {
                "paused": all(each.pause_mode is not None for each in backends),
                "inflight": sum(each.in_flight for each in backends),
                "base_url": backends.first.base_url,
                "engine": backends.first.probe.engine,
                "backends": [each.status() for each in backends],
            }
        )

    async def pause(request: Request) -> Response:
        wanted = request.query_params
        mode = msgspec.convert(wanted.get("mode", "wait"), type=PauseMode)
        seconds = float(wanted.get("timeout_seconds", DEFAULT_PAUSE_TIMEOUT))
        await node.backends.pause(mode, timeout=seconds, name=wanted.get("backend"))
        return await inference_status(request)

    async def resume(request: Request) -> Response:
        await node.backends.resume(request.query_params.get("backend"))
        return await inference_status(request)

    async def update(request: Request) -> Response:
        await node.backends.update(msgspec.json.decode(await request.body(), type=WeightUpdate))
        return await inference_status(request)

    async def list_backends(request: Request) -> Response:
        return reply({"backends": [each.report() for each in node.backends]})

    async def add_backend(request: Request) -> Response:
        config = msgspec.json.decode(await request.body(), type=BackendConfig)
        return reply((await node.backends.add(config)).report())

    async def drain_backend(request: Request) -> Response:
        return reply(node.backends.drain(request.path_params["name"]).report())

    async def remove_backend(request: Request) -> Response:
        removed = await node.backends.remove(request.path_params["name"])
        return reply({"name": removed.name, "removed": True, "inflight": removed.in_flight})

    def guarded(
        handler: Callable[[Request], Awaitable[Response]],
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                return await handler(request)
            except msgspec.ValidationError as error:
                return problem(422, str(error))
            except (msgspec.DecodeError, ValueError) as error:
                return problem(400, str(error))
            except (DispatchRefusedError, BackendRefusedError) as error:
                return problem(error.status, str(error))

        return answer

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/healthz", health),
            Route("/sessions", guarded(create), methods=["POST"]),
            Route("/sessions", guarded(list_sessions)),
            Route("/sessions/{session_id}", guarded(one)),
            Route("/sessions/{session_id}", guarded(delete), methods=["DELETE"]),
            Route("/sessions/{session_id}/completions", guarded(completions)),
            Route("/admin/inference/status", inference_status),
            Route("/admin/inference/pause", guarded(pause), methods=["POST"]),
            Route("/admin/inference/resume", guarded(resume), methods=["POST"]),
            Route("/admin/inference/update", guarded(update), methods=["POST"]),
            Route("/admin/inference/backends", list_backends),
            Route("/admin/inference/backends", guarded(add_backend), methods=["POST"]),
            Route("/admin/inference/backends/{name}", guarded(remove_backend), methods=["DELETE"]),
            Route(
                "/admin/inference/backends/{name}/drain", guarded(drain_backend), methods=["POST"]
            ),
        ],
        middleware=[Middleware(RequireToken, token=token)],
    )
