"""A gateway as a process serves it: the node and its control listener."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import msgspec
import uvicorn

from polar_gateway.api import control_app
from polar_gateway.config import NodeConfig
from polar_gateway.node import Node, open_node


class NodeAddress(msgspec.Struct, kw_only=True, frozen=True):
    """Where a started node is reached."""

    node_id: str
    control_url: str
    model_url: str
    runtimes: list[str]
    harnesses: list[str]
    engine: str


class ControlServer(uvicorn.Server):
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
    config: NodeConfig,
    *,
    data_dir: Path,
    server_url: str | None,
    token: str,
    heartbeat_interval: float = 30.0,
    patience: float = 120.0,
    started: Callable[[NodeAddress], None] | None = None,
) -> None:
    """Serve a node until cancelled; then its sessions end as lost with it and are reported.

    `token` guards the control listener and opens the server's node routes. Raises NodeStartError
    when the engine does not answer or cannot be trained on, OSError when a port is taken.
    """
    async with open_node(
        config,
        data_dir=data_dir,
        server_url=server_url,
        token=token,
        heartbeat_interval=heartbeat_interval,
        patience=patience,
    ) as (node, report):
        listening = _listen(config)
        public_url = config.public_url or _url(config.host, listening.getsockname()[1])
        server = ControlServer(
            uvicorn.Config(
                control_app(node, token),
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=5,
            )
        )
        async with anyio.create_task_group() as group:
            group.start_soon(server.serve, [listening])
            try:
                await server.listening.wait()
                report(public_url)
                if started is not None:
                    started(_address(node, public_url))
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await node.close()
                server.should_exit = True


def _listen(config: NodeConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((config.host, config.port))
    return listening


def _url(host: str, port: int) -> str:
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def _address(node: Node, public_url: str) -> NodeAddress:
    parts = node.parts
    return NodeAddress(
        node_id=parts.node_id,
        control_url=public_url,
        model_url=_url(parts.config.model_host, parts.listener.port),
        runtimes=sorted(parts.runtimes),
        harnesses=sorted(parts.adapters),
        engine=parts.probe.model,
    )
