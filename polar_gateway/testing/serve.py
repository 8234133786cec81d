"""Serve an ASGI application on a loopback port for as long as a block runs."""

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anyio
import uvicorn


class _Server(uvicorn.Server):
    """Says when it listens and leaves signals to whoever runs the loop."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = anyio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serve(app: Any, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Yield the URL of `app`, which answers until the block ends; open requests then get a second."""
    listener = socket.create_server((host, port), backlog=1024)
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_level="error",
        access_log=False,
        timeout_graceful_shutdown=1,
    )
    server = _Server(config)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_run, server, listener)
        await server.listening.wait()
        try:
            yield f"http://{host}:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True


async def _run(server: _Server, listener: socket.socket) -> None:
    with anyio.CancelScope(shield=True):  # it ends by `should_exit`, and so closes what it opened
        await server.serve([listener])
