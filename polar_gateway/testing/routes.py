"""Routes whose handlers return documents and raise refusals."""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from polar_gateway.testing.chat_request import ApiError, refused
from polar_gateway.testing.server import ScriptedServer

Handler = Callable[[Request], Awaitable[Any]]


def get(path: str, handler: Handler, *, there: Callable[[], bool] = lambda: True) -> Route:
    """`there` says whether the server has the route at all."""
    return _route("GET", path, handler, there)


def post(path: str, handler: Handler, *, there: Callable[[], bool] = lambda: True) -> Route:
    return _route("POST", path, handler, there)


def _route(method: str, path: str, handler: Handler, there: Callable[[], bool]) -> Route:
    async def answer(request: Request) -> Response:
        if not there():
            return response({"detail": "Not Found"}, 404)
        if request.method != method:
            return response({"detail": "Method Not Allowed"}, 405)
        try:
            return response(await handler(request))
        except ApiError as error:
            return response(error.document, error.status)

    return Route(path, answer, methods=["GET", "POST"])


def response(document: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(document), status, media_type="application/json")


def scripted_routes(server: ScriptedServer) -> list[Route]:
    """Where tests in other processes look at a server and spoil its calls."""

    async def calls(_: Request) -> dict[str, Any]:
        return {"total": server.total_calls, "calls": list(server.calls)}

    async def faults(request: Request) -> dict[str, Any]:
        try:
            return {"faults": server.set_faults(await request.body())}
        except msgspec.DecodeError as error:
            raise refused(str(error)) from error

    async def healthy(_: Request) -> Response:
        return Response()

    return [
        get("/scripted/calls", calls),
        post("/scripted/faults", faults),
        Route("/health", healthy),
    ]
