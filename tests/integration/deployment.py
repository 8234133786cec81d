"""A server and gateways as processes of their own, which can be killed, and a trainer that listens."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from polar_client.client import RolloutClient
from polar_gateway.testing.engine import ScriptedEngine
from polar_gateway.testing.serve import serve

POLAR = Path(sys.executable).parent / "polar"
MINI_AGENT = Path(__file__).parent.parent / "mini_agent.py"


class Trainer:
    """A receiver that answers with the statuses it is given, then with 200; keeps what came."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.tries: list[tuple[str, bytes, int]] = []
        """webhook-id, body, and what was answered."""
        self.app = Starlette(routes=[Route("/callback/task_result", self._take, methods=["POST"])])

    async def _take(self, request: Request) -> Response:
        status = self.statuses.pop(0) if self.statuses else 200
        self.tries.append((request.headers["webhook-id"], await request.body(), status))
        return Response(status_code=status)

    @property
    def accepted(self) -> list[bytes]:
        return [body for _, body, status in self.tries if status == 200]


class Service:
    """One `polar` command as a process."""

    def __init__(self, command: list[str], env: dict[str, str], log: Path) -> None:
        self._command = command
        self._env = env
        self._log = log
        self._process: anyio.abc.Process | None = None

    async def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = await anyio.open_process(
                [str(POLAR), *self._command, "--json"],
                stdin=subprocess.DEVNULL,
                stderr=log,
                env={**os.environ, **self._env},
            )
        assert self._process.stdout is not None
        with anyio.fail_after(30):
            await self._process.stdout.receive()  # it says where it listens once it does

    async def kill(self) -> None:
        """As the machine would: no goodbye."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> int:
        """Ask it to end; returns its exit status."""
        return await self._end(signal.SIGTERM)

    async def _end(self, sent: int) -> int:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.send_signal(sent)
        with anyio.fail_after(60, shield=True):
            status = await self._process.wait()
            await self._process.aclose()
        return status


class Deployment:
    """Everything of one small cluster on loopback."""

    def __init__(self, engine: ScriptedEngine, folder: Path, trainer_url: str) -> None:
        self.engine = engine
        self.folder = folder
        self.trainer_url = trainer_url
        self.server: Service
        self.gateways: dict[str, Service] = {}
        self.url = ""

    def task(self, task_id: str = "t1", **changes: Any) -> dict[str, Any]:
        return {
            "task_id": task_id,
            "instruction": "Write hello.txt.",
            "num_samples": 2,
            "timeout_seconds": 60,
            "agent": {
                "harness": "shell",
                "custom_shell": {"command": f"{sys.executable} {MINI_AGENT}"},
            },
            "runtime": {"backend": "local"},
            "builder": {"strategy": "prefix_merging"},
            "evaluator": {"strategy": "session_completion"},
            "callback_url": f"{self.trainer_url}/callback/task_result",
            "metadata": {"group_id": "g1", "policy_version": "7", "rollout_step": 3},
            **changes,
        }

    def client(self) -> RolloutClient:
        return RolloutClient(self.url, token=(self.folder / "server" / "token").read_text().strip())


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@asynccontextmanager
async def deployment(
    folder: Path, engine: ScriptedEngine, trainer: Trainer, *, nodes: tuple[str, ...] = ("n1",)
) -> AsyncIterator[Deployment]:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(engine)
        trainer_url = await stack.enter_async_context(serve(trainer.app))
        whole = Deployment(engine, folder, trainer_url)
        port = _free_port()
        whole.url = f"http://127.0.0.1:{port}"
        topology = folder / "topology.yaml"
        topology.write_text(
            yaml.safe_dump(
                {
                    "rollout": {"port": port, "data_dir": str(folder / "server")},
                    "gateway": {
                        "heartbeat_interval_seconds": 0.5,
                        "nodes": [
                            {
                                "id": node,
                                "port": 0,
                                "inference": {"engine": "vllm", "base_url": engine.url},
                                "data_dir": str(folder / node),
                                "allow_unisolated": True,
                            }
                            for node in nodes
                        ],
                    },
                }
            )
        )
        common = ["-c", str(topology)]
        whole.server = Service(["server", *common], {}, folder / "server.log")
        await whole.server.start()
        stack.push_async_callback(whole.server.stop)
        for node in nodes:
            gateway = Service(["gateway", *common, "--node-id", node], {}, folder / f"{node}.log")
            await gateway.start()
            stack.push_async_callback(gateway.stop)
            whole.gateways[node] = gateway
        yield whole
