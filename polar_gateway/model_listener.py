"""Serves the proxy to harnesses: on a port of the host, and on any socket it is handed.

uvicorn's HTTP protocol without uvicorn's server, because sockets come and go while it runs (one in
each container's network namespace) and all of them share one application, loop and shutdown.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self

import anyio
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from polar_gateway import dialects
from polar_gateway.dialects import chat
from polar_gateway.request_body import headers_too_large

logger = logging.getLogger(__name__)

BACKLOG = 1024
IDLE_SECONDS = 600
"""How long an idle connection is kept: longer than agents pause between calls, so that none of
them meets a connection that was closed while it wrote."""

STALL_SECONDS = 60.0
"""For which a client may leave its answer unread, beyond what the system buffers (megabytes, as a
rule), before it is taken for gone."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with three gaps closed: it keeps a header of any length for whoever
    connects, waits without end for a client that does not read its answer, and does not notice
    that one left which had sent its next request already."""

    def __init__(self, *, max_header_bytes: int, stall_seconds: float, **options: Any) -> None:
        super().__init__(**options)
        self._max_header_bytes = max_header_bytes
        self._stall_seconds = stall_seconds
        self._stalled: asyncio.TimerHandle | None = None
        """Runs while more is written than the client reads."""

    _head_bytes = 0
    """Bytes received since a message began or a piece of its body came."""
    _answering: RequestResponseCycle | None = None
    """The request before the latest one, if its answer was not through when that one came."""

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > self._max_header_bytes and not self.transport.is_closing():
            logger.warning("a connection sent %d bytes of headers", self._head_bytes)
            cycle: RequestResponseCycle | None = self.cycle
            if cycle is None or cycle.response_complete:
                self.transport.write(self._too_large())
            self.transport.close()

    def _too_large(self) -> bytes:
        """The answer to a request whose headers do not end, in the dialect that its line is in."""
        route = dialects.route("POST", self.url.partition(b"?")[0].decode("latin-1"), {}, {})
        dialect = chat if route is None else route.dialect
        kind = headers_too_large(self._max_header_bytes)
        body = dialect.error_body(kind)
        status = HTTPStatus(dialect.error_status(kind))
        return (
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%b" % (status.value, status.phrase.encode(), len(body), body)
        )

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self._stall_seconds, self._give_up)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _give_up(self) -> None:
        logger.warning("a client has not read its answer for %g s", self._stall_seconds)
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.resume_writing()
        super().connection_lost(exc)
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()

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

    def __init__(
        self,
        app: Any,
        host: str,
        port: int,
        *,
        max_header_bytes: int = 64 << 10,
        shutdown_seconds: float = 5.0,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        self._host = host
        self._stall_seconds = stall_seconds
        self._shutdown_seconds = shutdown_seconds
        self._max_header_bytes = max_header_bytes
        self._state = ServerState()
        self._config = uvicorn.Config(
            app,
            http=HttpToolsProtocol,
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
        # Passed on to its connections, for which asyncio does so only if their socket says it is
        # TCP; else a second part of an answer waits until the client has acknowledged the first.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
            BoundedHttpProtocol,
            max_header_bytes=self._max_header_bytes,
            stall_seconds=self._stall_seconds,
            config=self._config,
            server_state=self._state,
            app_state={},
        )
        loop = asyncio.get_running_loop()
        server = await loop.create_server(protocol, sock=listening, backlog=BACKLOG)
        self._servers.add(server)
        return server
