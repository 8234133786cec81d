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
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

logger = logging.getLogger(__name__)

BACKLOG = 1024
IDLE_SECONDS = 600
"""How long an idle connection is kept: longer than agents pause between calls, so that none of
them meets a connection that was closed while it wrote."""


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
            HttpToolsProtocol, config=self._config, server_state=self._state, app_state={}
        )
        loop = asyncio.get_running_loop()
        server = await loop.create_server(protocol, sock=listening, backlog=BACKLOG)
        self._servers.add(server)
        return server
