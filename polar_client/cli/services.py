"""The commands that serve: up, server, gateway."""

import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    import anyio.abc

    from polar_gateway.app import NodeAddress
    from polar_gateway.config import GatewayConfig, NodeConfig
    from polar_server.app import ServerAddress
    from polar_server.config import RolloutConfig

UP_HEARTBEAT_SECONDS = 1.0
"""Beside its server a node's reports cost next to nothing, and people watch."""

config_option = click.option(
    "-c",
    "--config",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    envvar="POLAR_TOPOLOGY",
    help="Topology file (YAML); variables POLAR_ROLLOUT__... and POLAR_GATEWAY__... override it.",
)
data_dir_option = click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False, resolve_path=True),
    help="Folder for all that is kept: database, results, journals, artifacts, token.",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Say where it listens as one JSON object."
)
verbose_option = click.option("-v", "--verbose", is_flag=True, help="Log in detail.")


@click.command()
@config_option
@click.option("--engine-url", help="The inference server [http://127.0.0.1:8000].")
@click.option("--host", help="Address to listen on [127.0.0.1].")
@click.option("--port", type=click.IntRange(0, 65535), help="The server's port, 0 for a free one [8080].")
@click.option("--run-workers", type=click.IntRange(1), help="How many harnesses may run at once [2].")
@click.option(
    "--allow-unisolated",
    is_flag=True,
    help="Permit the runtime `local`, which runs harnesses on this machine and isolates nothing.",
)
@data_dir_option
@json_option
@verbose_option
def up(
    config: Path | None,
    engine_url: str | None,
    host: str | None,
    port: int | None,
    run_workers: int | None,
    allow_unisolated: bool,
    data_dir: Path | None,
    as_json: bool,
    verbose: bool,
) -> None:
    """Serve everything in one process: a server and one gateway node.

    Everything is kept in --data-dir, where the next `polar up` finds it again; without one, in a new
    temporary folder.
    """
    import tempfile

    import anyio
    from msgspec.structs import replace

    from polar_gateway.config import NodeConfig
    from polar_server.config import ConfigError, check_open_submit, load_topology

    topology = load_topology(config)
    rollout, gateway = topology.rollout, topology.gateway
    if len(gateway.nodes) > 1:
        raise ConfigError(
            f"{config} has {len(gateway.nodes)} nodes and `polar up` serves one; use `polar server`"
            " and `polar gateway`"
        )
    node = gateway.nodes[0] if gateway.nodes else NodeConfig(id="local", port=0)
    if config is None:
        gateway = replace(gateway, heartbeat_interval_seconds=UP_HEARTBEAT_SECONDS)
        data_dir = data_dir or Path(tempfile.mkdtemp(prefix="polar-"))
    if data_dir is not None:
        rollout = replace(rollout, data_dir=data_dir / "server")
        node = replace(node, data_dir=data_dir / "node")
    if host is not None:
        rollout, node = replace(rollout, host=host), replace(node, host=host)
    if port is not None:
        rollout = replace(rollout, port=port)
    if engine_url is not None:
        node = replace(node, inference=replace(node.inference, base_url=engine_url))
    if run_workers is not None:
        node = replace(node, max_run_workers=run_workers)
    if allow_unisolated:
        node = replace(node, allow_unisolated=True)
    check_open_submit(rollout, [node])
    _log(verbose)
    anyio.run(_up, rollout, gateway, node, as_json, backend_options={"use_uvloop": True})


@click.command()
@config_option
@data_dir_option
@json_option
@verbose_option
def server(config: Path | None, data_dir: Path | None, as_json: bool, verbose: bool) -> None:
    """Serve the rollout server alone; nodes join it with `polar gateway`."""
    import anyio
    from msgspec.structs import replace

    from polar_server.config import load_topology

    rollout = load_topology(config).rollout
    if data_dir is not None:
        rollout = replace(rollout, data_dir=data_dir)
    _log(verbose)
    anyio.run(_server_alone, rollout, as_json, backend_options={"use_uvloop": True})


@click.command()
@config_option
@click.option(
    "--node-id", envvar="POLAR_GATEWAY_NODE_ID", help="Which node of the file this is, if it has several."
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File that holds the server's token; POLAR_TOKEN and POLAR_TOKEN_FILE work too.",
)
@data_dir_option
@json_option
@verbose_option
def gateway(
    config: Path | None,
    node_id: str | None,
    token_file: Path | None,
    data_dir: Path | None,
    as_json: bool,
    verbose: bool,
) -> None:
    """Serve one gateway node, which registers itself with its server."""
    import anyio
    from msgspec.structs import replace

    from polar_client.client import find_token
    from polar_server.config import ConfigError, load_topology

    topology = load_topology(config)
    node = _choose(topology.gateway, node_id)
    if data_dir is not None:
        node = replace(node, data_dir=data_dir)
    token = find_token(token_file)
    if token is None and topology.rollout.token_path.exists():
        token = find_token(topology.rollout.token_path)
    if token is None:
        raise ConfigError(
            "a node needs its server's token: --token-file, POLAR_TOKEN_FILE, POLAR_TOKEN or"
            " rollout.token_file in the configuration"
        )
    server_url = topology.gateway.rollout_server_url or topology.rollout.reachable_url
    _log(verbose)
    anyio.run(
        _gateway_alone, topology.gateway, node, server_url, token, as_json, backend_options={"use_uvloop": True}
    )


def _choose(gateway: "GatewayConfig", node_id: str | None) -> "NodeConfig":
    """The node that this process shall be. Raises ConfigError."""
    from polar_gateway.config import NodeConfig
    from polar_server.config import ConfigError

    known = {node.id: node for node in gateway.nodes} or {"": NodeConfig()}
    if node_id is None:
        if len(known) > 1:
            raise ConfigError(f"the configuration has several nodes; --node-id must be one of {', '.join(known)}")
        return next(iter(known.values()))
    if node_id not in known:
        raise ConfigError(f"the configuration has no node {node_id!r}; it has {', '.join(known) or 'none'}")
    return known[node_id]


async def _up(
    rollout: "RolloutConfig", gateway: "GatewayConfig", node: "NodeConfig", as_json: bool
) -> None:
    import anyio

    async with anyio.create_task_group() as services:
        async with _until_signalled():
            server: ServerAddress = await services.start(_serve_server, rollout)
            token = server.token_file.read_text().strip()
            # The node goes first when it ends, so that the server still hears how its sessions ended.
            async with anyio.create_task_group() as nodes:
                address: NodeAddress = await nodes.start(_serve_node, gateway, node, server.url, token)
                _announce_up(server, address, as_json)
                await anyio.sleep_forever()
        services.cancel_scope.cancel()


async def _server_alone(rollout: "RolloutConfig", as_json: bool) -> None:
    import anyio

    async with _until_signalled(), anyio.create_task_group() as services:
        address: ServerAddress = await services.start(_serve_server, rollout)
        _announce(
            as_json,
            {"url": address.url, "token_file": str(address.token_file)},
            f"polar server is ready at {address.url}, token in {address.token_file}",
        )
        await anyio.sleep_forever()


async def _gateway_alone(
    gateway: "GatewayConfig", node: "NodeConfig", server_url: str, token: str, as_json: bool
) -> None:
    import anyio

    async with _until_signalled(), anyio.create_task_group() as services:
        address: NodeAddress = await services.start(_serve_node, gateway, node, server_url, token)
        _announce(
            as_json,
            _node_said(address),
            f"polar node {address.node_id} is ready at {address.control_url} and reports to {server_url}",
        )
        await anyio.sleep_forever()


async def _serve_server(
    rollout: "RolloutConfig", *, task_status: "anyio.abc.TaskStatus[ServerAddress]"
) -> None:
    from polar_server.app import serve

    await serve(rollout, started=task_status.started)


async def _serve_node(
    gateway: "GatewayConfig",
    node: "NodeConfig",
    server_url: str,
    token: str,
    *,
    task_status: "anyio.abc.TaskStatus[NodeAddress]",
) -> None:
    from polar_gateway.app import serve
    from polar_gateway.garbage import collect_rarely, give_large_blocks_back
    from polar_server.config import state_dir

    collect_rarely()
    give_large_blocks_back()
    await serve(
        node,
        data_dir=node.data_dir or state_dir() / "nodes" / node.id,
        server_url=server_url,
        token=token,
        heartbeat_interval=gateway.heartbeat_interval_seconds,
        started=task_status.started,
    )


@asynccontextmanager
async def _until_signalled() -> AsyncIterator[None]:
    """Cancel the block at SIGINT or SIGTERM; it ends in its own time, or at once at a second signal."""
    import anyio

    async def watch(scope: anyio.CancelScope) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for _ in signals:
                if scope.cancel_called:
                    os._exit(130)
                click.echo("polar: stopping; once more to stop at once", err=True)
                scope.cancel()

    async with anyio.create_task_group() as watcher:
        with anyio.CancelScope() as scope:
            watcher.start_soon(watch, scope)
            yield
        watcher.cancel_scope.cancel()


def _announce_up(server: "ServerAddress", node: "NodeAddress", as_json: bool) -> None:
    facts = {"url": server.url, "token_file": str(server.token_file), **_node_said(node)}
    _announce(
        as_json,
        facts,
        "\n".join(
            (
                "polar is ready",
                f"  server      {server.url}",
                f"  token file  {server.token_file}",
                f"  node        {node.node_id}, control {node.control_url}, models {node.model_url}",
                f"  model       {node.engine}",
                f"  runtimes    {', '.join(node.runtimes) or 'none'}",
                f"  harnesses   {', '.join(node.harnesses)}",
                "",
                f"  export POLAR_URL={server.url} POLAR_TOKEN_FILE={server.token_file}",
                "  polar submit TASK.json --wait",
            )
        ),
    )


def _node_said(node: "NodeAddress") -> dict[str, object]:
    return {
        "node_id": node.node_id,
        "control_url": node.control_url,
        "model_url": node.model_url,
        "model": node.engine,
        "runtimes": node.runtimes,
        "harnesses": node.harnesses,
    }


def _announce(as_json: bool, facts: dict[str, object], said: str) -> None:
    import msgspec

    click.echo(msgspec.json.encode(facts) if as_json else said)


def _log(verbose: bool) -> None:
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for package in ("polar_server", "polar_gateway", "harness_adapters", "builders", "evaluators"):
        logging.getLogger(package).setLevel(logging.DEBUG if verbose else logging.INFO)
