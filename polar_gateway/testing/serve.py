"""Serve an ASGI application on a loopback port for as long as a block runs."""

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anyio
import anyio.abc
import uvicorn


class _Server(uvicorn.Server):
    """Says when it listens and leaves signals to whoever runs the loop."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = anyio.Event()
        self.ended = anyio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Service:
    """An application at an address that it keeps while it is down."""

    def __init__(self, app: Any, address: tuple[str, int], tasks: anyio.abc.TaskGroup) -> None:
        self._app = app
        self._address = address
        self._tasks = tasks
        self._server: _Server | None = None

    @property
    def url(self) -> str:
        host, port = self._address
        return f"http://{host}:{port}"

    async def start(self) -> None:
        """Answer; returns once it does."""
        host, port = self._address
        listener = socket.create_server((host, port), backlog=1024)
        # Passed on to its connections, for which asyncio does so only if their socket says it is
        # TCP; else an answer in two parts waits for the client to acknowledge the first.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._address = (host, listener.getsockname()[1])
        config = uvicorn.Config(
            self._app,
            lifespan="off",
            log_level="error",
            access_log=False,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._tasks.start_soon(_run, self._server, listener)
        await self._server.listening.wait()

    def stop(self) -> None:
        """Take no more requests and end; open ones get a second."""
        if self._server is not None:
            self._server.should_exit = True

    async def die(self) -> None:
        """End at once, in the middle of every answer; returns once the port is closed."""
        if self._server is not None:
            for listener in self._server.servers:
                listener.close()
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            self.stop()
            await self._server.ended.wait()
            self._server = None

    def cut(self, client: tuple[str, int]) -> None:
        """Close the connection of the client at this address, whatever it is told."""
        assert self._server is not None
        for connection in self._server.server_state.connections:
            if connection.transport.get_extra_info("peername") == client:
                connection.transport.abort()


@asynccontextmanager
async def service(app: Any, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[Service]:
    """A running service, which ends with the block."""
    async with anyio.create_task_group() as tasks:
        running = Service(app, (host, port), tasks)
        await running.start()
        try:
            yield running
        finally:
            running.stop()


@asynccontextmanager
async def serve(app: Any, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Yield the URL of `app`, which answers until the block ends; open requests then get a second."""
    async with service(app, host=host, port=port) as running:
        yield running.url


async def _run(server: _Server, listener: socket.socket) -> None:
    with anyio.CancelScope(shield=True):  # it ends by `stop`, and so closes what it opened
        await server.serve([listener])
        server.ended.set()
