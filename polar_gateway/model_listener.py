"""Serves the proxy to harnesses: on a port of the host, and on any socket it is handed.

uvicorn's HTTP protocol without uvicorn's server, because sockets come and go while it runs (one in
each container's network namespace) and all of them share one application, loop and shutdown.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Self

import anyio
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

logger = logging.getLogger(__name__)

BACKLOG = 1024
IDLE_SECONDS = 600
"""How long an idle connection is kept: longer than agents pause between calls, so that none of
them meets a connection that was closed while it wrote."""

MAX_HEAD_BYTES = 64 << 10
"""Of what is no body: a request's line and headers, or what stands between the pieces of a chunked
body and behind them. Agents send a few kilobytes."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with two gaps closed: it keeps a header of any length for whoever
    connects, and does not notice that a client left which had sent its next request already."""

    _head_bytes = 0
    """Bytes received since a message began or a piece of its body came."""
    _answering: RequestResponseCycle | None = None
    """The request before the latest one, if its answer was not through when that one came."""

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            logger.warning("a connection sent %d bytes of headers", self._head_bytes)
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        before = self.cycle
        super().on_headers_complete()
        if len(self.pipeline) > 1:
            self.transport.close()
        elif self.pipeline:
            self._answering = before
            # uvicorn has stopped reading, and what is not read does not say that its client left.
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        super().on_message_complete()


class ModelListener:
    """Serve an ASGI application from `async with` to its end; port 0 takes a free one.

    Answers on their way have `shutdown_seconds` to be finished in.
    """

    def __init__(self, app: Any, host: str, port: int, *, shutdown_seconds: float = 5.0) -> None:
        self._host = host
        self._shutdown_seconds = shutdown_seconds
        self._state = ServerState()
        self._config = uvicorn.Config(
            app,
            http=BoundedHttpProtocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            proxy_headers=False,
            access_log=False,
            log_config=None,
            timeout_keep_alive=IDLE_SECONDS,
        )
        self._servers: set[asyncio.Server] = set()
        self.port = port

    async def __aenter__(self) -> Self:
        """Raises OSError when the port is taken."""
        self._config.load()
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listening = socket.create_server((self._host, self.port), family=family, backlog=BACKLOG)
        self.port = listening.getsockname()[1]
        await self._serve(listening)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for server in self._servers:
            server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if tasks := list(self._state.tasks):
            with anyio.CancelScope(shield=True):
                _, late = await asyncio.wait(tasks, timeout=self._shutdown_seconds)
            for task in late:
                task.cancel()
        for connection in list(self._state.connections):
            connection.transport.abort()

    async def add_socket(self, listening: socket.socket) -> Callable[[], None]:
        """Answer on a socket that listens already, until the returned function is called.

        The socket stays the caller's to close; connections that it brought live on.
        """
        server = await self._serve(listening.dup())

        def remove() -> None:
            self._servers.discard(server)
            server.close()

        return remove

    async def _serve(self, listening: socket.socket) -> asyncio.Server:
        listening.setblocking(False)
        protocol = partial(
            BoundedHttpProtocol, config=self._config, server_state=self._state, app_state={}
        )
        loop = asyncio.get_running_loop()
        server = await loop.create_server(protocol, sock=listening, backlog=BACKLOG)
        self._servers.add(server)
        return server
