"""Deliveries against a real HTTP server that fails in telling ways."""

from collections.abc import Callable
from pathlib import Path

import anyio
import httpx2
import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from harness_adapters.base import AgentSpec
from polar_gateway.protocol import (
    GatewayNodeInfo,
    NodeHeartbeatRequest,
    NodeRegistrationRequest,
    SessionDispatchRequest,
    SessionResult,
)
from polar_gateway.reporter import Outbox, keep_registered
from polar_gateway.testing.serve import serve


def dispatch(url: str, attempt: str = "att-1") -> SessionDispatchRequest:
    return SessionDispatchRequest(
        session_id="s1",
        task_id="t1",
        attempt_id=attempt,
        instruction="x",
        agent=AgentSpec(harness="codex"),
        callback_url=f"{url}/callbacks/session_result",
    )


RESULT = SessionResult(session_id="s1", task_id="t1", status="COMPLETED", attempt_id="att-1")


class ServerThatAnswers:
    """Answers each delivery with the next status, then with 200; keeps what came."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.bodies: list[bytes] = []
        self.app = Starlette(
            routes=[Route("/callbacks/session_result", self._take, methods=["POST"])]
        )

    async def _take(self, request: Request) -> Response:
        self.bodies.append(await request.body())
        return Response(status_code=self.statuses.pop(0) if self.statuses else 200)


async def deliver_until_empty(outbox: Outbox) -> None:
    async with httpx2.AsyncClient() as client, anyio.create_task_group() as group:
        group.start_soon(outbox.deliver, client)
        await outbox.drained()
        group.cancel_scope.cancel()


async def test_a_result_is_sent_again_until_it_is_acknowledged(tmp_path: Path) -> None:
    server = ServerThatAnswers(500, 503)
    async with serve(server.app) as url:
        outbox = Outbox(tmp_path)
        await outbox.put(dispatch(url), RESULT)
        await deliver_until_empty(outbox)
    assert len(server.bodies) == 3
    assert set(server.bodies) == {msgspec.json.encode(RESULT)}


async def test_a_result_survives_the_process_that_wrote_it(tmp_path: Path) -> None:
    server = ServerThatAnswers()
    async with serve(server.app) as url:
        await Outbox(tmp_path).put(dispatch(url), RESULT)
        await deliver_until_empty(Outbox(tmp_path))
    assert msgspec.json.decode(server.bodies[0], type=SessionResult) == RESULT


async def test_one_result_that_is_refused_does_not_hold_up_the_others(tmp_path: Path) -> None:
    server = ServerThatAnswers()
    async with serve(server.app) as url, httpx2.AsyncClient() as client:
        outbox = Outbox(tmp_path)
        await outbox.put(dispatch("http://127.0.0.1:9", attempt="att-0"), RESULT)
        await outbox.put(dispatch(url), RESULT)
        async with anyio.create_task_group() as group:
            group.start_soon(outbox.deliver, client)
            with anyio.fail_after(10):
                while [path.name for path in tmp_path.glob("*.json")] != ["att-0.json"]:
                    await anyio.sleep(0.01)
            group.cancel_scope.cancel()
    assert len(server.bodies) == 1


async def test_what_is_not_acknowledged_is_named_until_it_is(tmp_path: Path) -> None:
    server = ServerThatAnswers(500)
    async with serve(server.app) as url:
        await Outbox(tmp_path).put(dispatch(url), RESULT)
        after_a_restart = Outbox(tmp_path)
        assert after_a_restart.waiting == {"att-1": "s1"}
        await deliver_until_empty(after_a_restart)
        assert after_a_restart.waiting == {}


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_what_is_refused_for_good_is_put_aside_and_not_sent_again(
    tmp_path: Path, status: int
) -> None:
    server = ServerThatAnswers(status)
    async with serve(server.app) as url:
        outbox = Outbox(tmp_path)
        await outbox.put(dispatch(url), RESULT)
        await deliver_until_empty(outbox)
    assert outbox.waiting == {}
    assert [path.name for path in tmp_path.iterdir()] == ["att-1.undeliverable"]
    assert len(server.bodies) == 1


async def test_a_damaged_file_and_a_url_that_is_none_end_nothing(tmp_path: Path) -> None:
    (tmp_path / "att-0.json").write_bytes(b"")
    server = ServerThatAnswers()
    async with serve(server.app) as url:
        outbox = Outbox(tmp_path)
        await outbox.put(dispatch("http://a:port", attempt="att-2"), RESULT)
        await outbox.put(dispatch(url, attempt="att-3"), RESULT)
        await deliver_until_empty(outbox)
    assert len(server.bodies) == 1
    assert {path.name for path in tmp_path.iterdir()} == {
        "att-0.undeliverable",
        "att-2.undeliverable",
    }


async def test_a_session_without_a_callback_leaves_nothing_behind(tmp_path: Path) -> None:
    alone = dispatch("x")
    alone.callback_url = None
    await Outbox(tmp_path).put(alone, RESULT)
    assert not list(tmp_path.glob("*.json"))


class ServerThatForgets:
    """Knows a node only between its registration and the next time it forgets."""

    def __init__(self) -> None:
        self.known = False
        self.calls: list[str] = []
        self.app = Starlette(
            routes=[
                Route("/nodes/register", self._register, methods=["POST"]),
                Route("/nodes/n1/heartbeat", self._beat, methods=["POST"]),
            ]
        )

    async def _register(self, request: Request) -> Response:
        self.calls.append("register")
        self.known = True
        return self._info(["stale-1"])

    async def _beat(self, request: Request) -> Response:
        self.calls.append("beat")
        return self._info([]) if self.known else Response(status_code=404)

    def _info(self, stale: list[str]) -> Response:
        info = GatewayNodeInfo(node_id="n1", gateway_url="http://x", stale_attempts=stale)
        return Response(msgspec.json.encode(info))


async def test_a_node_registers_anew_when_the_server_has_forgotten_it() -> None:
    server = ServerThatForgets()
    stale: list[str] = []
    async with (
        serve(server.app) as url,
        httpx2.AsyncClient() as client,
        anyio.create_task_group() as group,
    ):
        group.start_soon(
            keep_registered,
            client,
            url,
            NodeRegistrationRequest(
                node_id="n1", gateway_url="http://x", heartbeat_interval_seconds=0.02
            ),
            NodeHeartbeatRequest,
            stale.extend,
            anyio.Event,
        )
        await until(lambda: server.calls.count("beat") > 1)
        server.known = False
        await until(lambda: len(stale) == 2)
        group.cancel_scope.cancel()
    assert server.calls.count("register") == 2
    assert stale == ["stale-1", "stale-1"]


async def until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not holds():
            await anyio.sleep(0.01)
