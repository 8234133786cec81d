"""Errors as answers: RFC 9457 problem documents, and the one table from exception to status."""

import http
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from polar_server.errors import RefusalError
from polar_server.protocol import Problem


def problem_response(problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    return Response(
        msgspec.json.encode(problem),
        status_code=problem.status,
        headers=headers,
        media_type="application/problem+json",
    )


async def _refused(_request: Request, error: Exception) -> Response:
    return problem_response(cast("RefusalError", error).problem)


async def _http(_request: Request, error: Exception) -> Response:
    refused = cast("HTTPException", error)
    title = http.HTTPStatus(refused.status_code).phrase
    detail = refused.detail if refused.detail != title else ""
    return problem_response(
        Problem(title=title, status=refused.status_code, detail=detail), refused.headers
    )


async def _gone(_request: Request, _error: Exception) -> Response:
    # The caller closed the connection in the middle of its body; nobody reads this.
    return Response(status_code=400)


async def _broken(request: Request, error: Exception) -> Response:
    # Starlette raises it again after the answer is sent, and uvicorn logs it with its traceback.
    return problem_response(
        Problem(
            title="Internal error",
            status=500,
            detail=f"{request.method} {request.url.path} broke: {type(error).__name__}",
        )
    )


Handler = Callable[[Request, Exception], Awaitable[Response]]

EXCEPTION_HANDLERS: dict[type[Exception], Handler] = {
    RefusalError: _refused,
    HTTPException: _http,
    ClientDisconnect: _gone,
    Exception: _broken,
}
