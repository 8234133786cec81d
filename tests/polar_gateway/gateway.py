"""A whole gateway on loopback, for tests: scripted engine behind it, a receiver of results before it."""

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from polar_gateway import app
from polar_gateway.config import InferenceConfig, ModelCallConfig, NodeConfig
from polar_gateway.protocol import SessionResult
from polar_gateway.testing.engine import Call, ScriptedEngine
from polar_gateway.testing.script import Rule, Script
from polar_gateway.testing.serve import serve

MINI_AGENT = Path(__file__).parent.parent / "mini_agent.py"
TOKEN = "test-token"
IMPATIENT = ModelCallConfig(engine_patience_seconds=1.0)
"""An engine that fails for longer is heard of."""


def call(command: str) -> str:
    """A tool call of the mini agent as the model spells it."""
    arguments = msgspec.json.encode({"name": "sh", "arguments": {"command": command}}).decode()
    return f"<tool_call>\n{arguments}\n</tool_call>"


def script(*steps: str) -> Script:
    return Script(
        rules=[Rule(match="mini agent", steps=[f"<think>\nHm.\n</think>\n\n{s}" for s in steps])]
    )


THREE_TURNS = script(
    "I look." + call("ls"), "I write." + call("echo hello > hello.txt"), "All done."
)


def turns(engine: ScriptedEngine) -> list[Call]:
    """The calls of sessions, without those of the start-up probe."""
    return [call for call in engine.calls if "-msg_" in call.request_id]


class Gateway:
    """The node under test and what it reported."""

    def __init__(self, engine: Any, results_url: str) -> None:
        self.engine = engine
        self.results: dict[str, SessionResult] = {}
        self.raw: list[bytes] = []
        self.address: app.NodeAddress
        self._results_url = results_url
        self.shut_down: Callable[[], None]
        """What a signal does to a gateway's process."""
        self.down = anyio.Event()
        self._changed = anyio.Event()
        self.http = httpx2.AsyncClient(headers={"authorization": f"Bearer {TOKEN}"}, timeout=30)

    async def take(self, request: Request) -> Response:
        body = await request.body()
        self.raw.append(body)
        result = msgspec.json.decode(body, type=SessionResult)
        self.results[result.session_id] = result
        self._changed.set()
        self._changed = anyio.Event()
        return Response(b'{"status":"accepted"}')

    def document(self, session_id: str = "s1", **changes: Any) -> dict[str, Any]:
        return {
            "session_id": session_id,
            "task_id": "t1",
            "attempt_id": f"att-{session_id}",
            "instruction": "Write hello.txt.",
            "agent": {
                "harness": "shell",
                "custom_shell": {"command": f"{sys.executable} {MINI_AGENT}"},
            },
            "runtime": {"backend": "local"},
            "builder": {"strategy": "prefix_merging"},
            "evaluator": {"strategy": "session_completion"},
            "callback_url": self._results_url,
            **changes,
        }

    async def dispatch(self, session_id: str = "s1", **changes: Any) -> httpx2.Response:
        return await self.http.post(
            f"{self.address.control_url}/sessions", json=self.document(session_id, **changes)
        )

    async def result(self, session_id: str = "s1", within: float = 60) -> SessionResult:
        with anyio.fail_after(within):
            while session_id not in self.results:
                await self._changed.wait()
        return self.results[session_id]

    async def run(
        self, session_id: str = "s1", within: float = 60, **changes: Any
    ) -> SessionResult:
        response = await self.dispatch(session_id, **changes)
        assert response.status_code == 200, response.text
        return await self.result(session_id, within)

    async def stage(self, session_id: str = "s1") -> str | None:
        response = await self.http.get(f"{self.address.control_url}/sessions/{session_id}")
        return response.json().get("stage")

    async def until(self, holds: Callable[[], Awaitable[bool]]) -> None:
        with anyio.fail_after(60):
            while not await holds():
                await anyio.sleep(0.02)

    async def until_stage(self, stage: str, session_id: str = "s1") -> None:
        async def there() -> bool:
            return await self.stage(session_id) == stage

        await self.until(there)


@asynccontextmanager
async def gateway(
    data_dir: Path,
    engine_script: Script = THREE_TURNS,
    *,
    engine: Any = None,
    inference: dict[str, Any] | None = None,
    **config: Any,
) -> AsyncIterator[Gateway]:
    """`engine` is whatever has a `url` while it is open; a scripted engine unless told otherwise.
    `inference` and `config` are fields of the node's configuration."""
    async with engine or ScriptedEngine(engine_script) as behind:
        receiver = Gateway(behind, "")
        results = Starlette(routes=[Route("/results", receiver.take, methods=["POST"])])
        async with serve(results) as url, receiver.http, anyio.create_task_group() as group:
            receiver._results_url = f"{url}/results"
            up = anyio.Event()
            life = anyio.CancelScope()

            def started(address: app.NodeAddress) -> None:
                receiver.address = address
                up.set()

            async def run() -> None:
                with life:
                    await serve_node()
                receiver.down.set()

            async def serve_node() -> None:
                await app.serve(
                    NodeConfig(
                        id="n1",
                        port=0,
                        inference=InferenceConfig(base_url=behind.url, **inference or {}),
                        **{"allow_unisolated": True, "model_calls": IMPATIENT, **config},
                    ),
                    data_dir=data_dir,
                    server_url=None,
                    token=TOKEN,
                    started=started,
                )

            receiver.shut_down = life.cancel
            group.start_soon(run)
            with anyio.fail_after(30):
                await up.wait()
            try:
                yield receiver
            finally:
                group.cancel_scope.cancel()
