"""A gateway as a process serves it: the node and its control listener."""

from collections.abc import Callable
from pathlib import Path

import anyio
import msgspec

from polar_gateway.api import control_app
from polar_gateway.config import NodeConfig
from polar_gateway.model_listener import ModelListener
from polar_gateway.node import Node, Reports, open_node


class NodeAddress(msgspec.Struct, kw_only=True, frozen=True):
    """Where a started node is reached."""

    node_id: str
    control_url: str
    model_url: str
    runtimes: list[str]
    harnesses: list[str]
    engine: str


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
    reports = Reports(server_url=server_url, token=token, heartbeat_interval=heartbeat_interval)
    async with (
        open_node(config, data_dir=data_dir, reports=reports, patience=patience) as (node, report),
        ModelListener(control_app(node, token), config.host, config.port) as control,
    ):
        public_url = config.public_url or _url(config.host, control.port)
        report(public_url)
        if started is not None:
            started(_address(node, public_url))
        await anyio.sleep_forever()


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
