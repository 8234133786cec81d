"""An endpoint that samples, as a bare ASGI application, which can cut its connection off."""

import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, Protocol

import anyio
import msgspec
from starlette.requests import Request

from polar_gateway.testing.calls import Call, Fault
from polar_gateway.testing.chat_request import ApiError
from polar_gateway.testing.server import Answer, ScriptedServer

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Told(Protocol):
    """An answer in the documents of a protocol."""

    answer: Answer
    streamed: bool

    async def document(self) -> dict[str, Any]: ...

    def events(self) -> AsyncIterator[bytes]:
        """The data of each server-sent event."""
        ...


Begin = Callable[[Call, bytes, Fault], Awaitable[Told]]
"""Takes a call on: its request's body and what shall go wrong with it. Raises ApiError."""


class SamplingEndpoint:
    """`prefix` begins the ids of its requests."""

    def __init__(self, server: ScriptedServer, begin: Begin, prefix: str) -> None:
        self._server = server
        self._begin = begin
        self._prefix = prefix

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        raw = await request.body()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_cancel_when_gone, receive, tasks.cancel_scope)
            await self._answer(request, raw, send)
            tasks.cancel_scope.cancel()

    async def _answer(self, request: Request, raw: bytes, send: Send) -> None:
        server, fault = self._server, self._server.next_fault(raw)
        name = request.headers.get("x-request-id") or secrets.token_hex(8)
        call = Call(
            request_id=f"{self._prefix}{name}", path=request.url.path, received_at=time.time()
        )
        server.total_calls += 1
        server.calls.append(call)
        if fault.hang_up:
            await anyio.sleep(fault.delay)
            server.hang_up(tuple(request.scope["client"]))
            await anyio.sleep_forever()  # until it is noticed that the client is gone
        try:
            told = await self._begin(call, raw, fault)
        except ApiError as error:
            call.status, call.finished = error.status, True
            await _start(send, error.status, b"application/json", fault.headers)
            await _finish(send, msgspec.json.encode(error.document))
            return
        with server.telling(told.answer):
            await _tell(told, send)
        call.finished = not told.answer.cut_off


async def spoil(server: ScriptedServer, fault: Fault) -> None:
    """Raises ApiError where the fault is a status."""
    if fault.status is not None:
        await anyio.sleep(fault.delay)
        await server.allowed(0)
        raise ApiError(fault.status, fault.message, "ScriptedFault")


async def _tell(told: Told, send: Send) -> None:
    """An answer that is cut off stays unfinished, whereupon its connection is closed."""
    if told.streamed:
        await _start(send, 200, b"text/event-stream; charset=utf-8")
        async for event in told.events():
            data = b"data: " + event + b"\n\n"
            await send({"type": "http.response.body", "body": data, "more_body": True})
        last = b""
    else:
        last = msgspec.json.encode(await told.document())
        await _start(send, 200, b"application/json")
    if not told.answer.cut_off:
        await _finish(send, last)


async def _cancel_when_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _start(send: Send, status: int, kind: bytes, more: dict[str, str] | None = None) -> None:
    headers = [(b"content-type", kind)]
    headers += [(name.encode(), value.encode()) for name, value in (more or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _finish(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body})
