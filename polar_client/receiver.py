"""A callback receiver: the smallest thing that a trainer needs to be told instead of to ask.

    async with CallbackReceiver() as receiver:
        await client.submit({..., "callback_url": receiver.url})
        async for result in receiver:
            ...

The server delivers until it is acknowledged, so the same result may arrive twice; each run of a
task is handed on once.
"""

import hashlib
import math
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from types import TracebackType

import anyio
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from polar_server.protocol import TaskResult

ROUTE = "/callback/task_result"
REMEMBERED = 100_000
"""How many deliveries are remembered; a repetition comes within hours, not after as many tasks."""


class CallbackReceiver:
    """Listens while it is open; iterate over it for the results. `port` 0 takes a free one."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._host, self._port = host, port
        self._seen: dict[tuple[str, str], None] = {}
        self._send, self._results = anyio.create_memory_object_stream[TaskResult](math.inf)
        self.app = Starlette(routes=[Route(ROUTE, self._take, methods=["POST"])])
        """The ASGI application alone, for those who run a server already."""
        self.url = ""
        """What to submit as `callback_url`; set while the receiver is open."""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "CallbackReceiver":
        listener = socket.create_server((self._host, self._port))
        # Passed on to its connections; asyncio does so only if their socket says it is TCP.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.url = f"http://{self._host}:{listener.getsockname()[1]}{ROUTE}"
        server = _Server(
            uvicorn.Config(self.app, log_level="warning", lifespan="off", timeout_graceful_shutdown=2)
        )
        self._stack.push_async_callback(self._send.aclose)
        tasks = await self._stack.enter_async_context(anyio.create_task_group())
        tasks.start_soon(_serve, server, listener)
        self._stack.callback(setattr, server, "should_exit", True)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()
        self._results.close()

    def __aiter__(self) -> "CallbackReceiver":
        return self

    async def __anext__(self) -> TaskResult:
        return await self._results.__anext__()

    async def _take(self, request: Request) -> JSONResponse:
        body = await request.body()
        try:
            result = msgspec.json.decode(body, type=TaskResult)
        except msgspec.MsgspecError as error:
            return JSONResponse({"status": "refused", "detail": str(error)}, status_code=400)
        delivery = request.headers.get("webhook-id") or hashlib.sha256(body).hexdigest()
        key = (result.task_id, delivery)
        if key in self._seen:
            return JSONResponse({"status": "known"})
        self._seen[key] = None
        if len(self._seen) > REMEMBERED:
            del self._seen[next(iter(self._seen))]
        self._send.send_nowait(result)
        return JSONResponse({"status": "accepted"})


async def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
    with anyio.CancelScope(shield=True):  # it ends by `should_exit`, and so closes what it opened
        await server.serve([listener])


class _Server(uvicorn.Server):
    """Leaves the process's signals to whoever opened the receiver."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
