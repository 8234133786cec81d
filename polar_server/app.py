"""The rollout server as an application, and as a process serves it."""

import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
import anyio
import anyio.to_thread
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware

from polar_gateway.results import ResultStore
from polar_server.api import ROUTES, Service
from polar_server.auth import TokenGate, load_or_make_token
from polar_server.config import RolloutConfig, check_open_submit
from polar_server.dispatch import Dispatcher
from polar_server.nodes import Progress
from polar_server.outbox import Outbox
from polar_server.problems import EXCEPTION_HANDLERS
from polar_server.scheduler import Scheduler
from polar_server.store.engine import open_database
from polar_server.store.queries import Store

GRACE_SECONDS = 5
"""How long requests may take to finish once the server stops."""


class ServerAddress(msgspec.Struct, kw_only=True, frozen=True):
    """Where a started server is reached, and with what."""

    url: str
    token_file: Path


def create_app(config: RolloutConfig) -> Starlette:
    """The server as an ASGI application; its lifespan opens the store and runs the loops.

    `config.port` must be the real one, since nodes are told to report there. Raises TokenFileError,
    and ConfigError where submit must not be open.
    """
    check_open_submit(config)
    token = load_or_make_token(config.token_path)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with _running(config, token) as service:
            app.state.service = service
            yield

    return Starlette(
        routes=ROUTES,
        lifespan=lifespan,
        middleware=[Middleware(TokenGate, token=token, open_submit=config.open_submit)],
        exception_handlers=dict(EXCEPTION_HANDLERS),
    )


@asynccontextmanager
async def _running(config: RolloutConfig, token: str) -> AsyncIterator[Service]:
    """The server's parts, with its loops running; what is due from before a restart starts now."""
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(open_database(config.sqlalchemy_url))
        results = await anyio.to_thread.run_sync(_open_results, config.results_path)
        http = await stack.enter_async_context(_http_client())
        store = Store(database, max_attempts=config.retry.max_attempts)
        progress = Progress()
        outbox = Outbox(
            store,
            results,
            http,
            timeout_seconds=config.callback_timeout_seconds,
            retry_seconds=config.callback_retry_seconds,
            give_up_seconds=config.callback_give_up_seconds,
        )
        dispatcher = Dispatcher(
            store,
            http,
            token=token,
            callback_url=f"{config.reachable_url}/callbacks/session_result",
            timeout_seconds=config.dispatch_timeout_seconds,
        )
        scheduler = Scheduler(
            store,
            dispatcher,
            progress,
            cancel_grace_seconds=config.callback_grace_seconds,
            sessions_may_have_ended=outbox.wake,
        )
        loops = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(loops.cancel_scope.cancel)
        loops.start_soon(scheduler.run, name="scheduler")
        loops.start_soon(outbox.run, name="outbox")
        yield Service(
            store=store, results=results, progress=progress, scheduler=scheduler, outbox=outbox
        )


def _open_results(root: Path) -> ResultStore:
    results = ResultStore(root)
    results.sweep()
    return results


@asynccontextmanager
async def _http_client() -> AsyncIterator[aiohttp.ClientSession]:
    # Nodes' places and the outbox bound what is open at once; a mute node must not hold up others.
    connector = aiohttp.TCPConnector(limit=0)
    client = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
    try:
        yield client
    finally:
        with anyio.CancelScope(shield=True):
            await client.close()


class _Server(uvicorn.Server):
    """Says when it listens; leaves signals to the process's entry point, which may run more."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = anyio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    config: RolloutConfig, *, started: Callable[[ServerAddress], None] | None = None
) -> None:
    """Serve until cancelled, then finish the requests that are being answered.

    Raises OSError when the port is taken, TokenFileError, ConfigError, and SchemaError for the
    database of another version.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.create_server((config.host, config.port), family=family) as listener:
        # Passed on to its connections; asyncio does so only if their socket says it is TCP.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        config = msgspec.structs.replace(config, port=listener.getsockname()[1])
        app = create_app(config)
        server = _Server(
            uvicorn.Config(
                app,
                lifespan="off",  # ours, so that its failure is this coroutine's
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=GRACE_SECONDS,
            )
        )
        async with app.router.lifespan_context(app), anyio.create_task_group() as group:
            group.start_soon(_serve, server, listener)
            try:
                await server.listening.wait()
                if started is not None:
                    started(ServerAddress(url=config.reachable_url, token_file=config.token_path))
                await anyio.sleep_forever()
            finally:
                server.should_exit = True


async def _serve(server: _Server, listener: socket.socket) -> None:
    with anyio.CancelScope(shield=True):  # it ends by `should_exit`, once requests are answered
        await server.serve([listener])
