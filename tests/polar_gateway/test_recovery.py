"""What a node reports of an earlier life of it, with a gateway that is really killed."""

import os
import signal
import sys
from pathlib import Path

import anyio
import httpx2
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from builders.base import StrategySpec
from harness_adapters.base import AgentSpec
from polar_gateway import recovery
from polar_gateway.protocol import SessionDispatchRequest, SessionResult
from polar_gateway.testing.engine import ScriptedEngine
from polar_gateway.testing.serve import serve
from tests.polar_gateway.capture.test_session import capture_in, reply, start, user
from tests.polar_gateway.gateway import TOKEN, Gateway, call, gateway, script

NODE = """
import sys, pathlib, anyio, functools
from polar_gateway import app
from polar_gateway.config import InferenceConfig, NodeConfig
anyio.run(functools.partial(
    app.serve,
    NodeConfig(id="n1", port=0, allow_unisolated=True, inference=InferenceConfig(base_url=sys.argv[1])),
    data_dir=pathlib.Path(sys.argv[2]), server_url=None, token=sys.argv[3],
    started=lambda address: print(address.control_url, flush=True),
))
"""


async def test_a_killed_gateway_reports_what_its_journal_holds(tmp_path: Path) -> None:
    taken: list[SessionResult] = []

    async def take(request: Request) -> Response:
        taken.append(msgspec.json.decode(await request.body(), type=SessionResult))
        return Response()

    results = Starlette(routes=[Route("/results", take, methods=["POST"])])
    slow = script("First." + call("true"), "Then." + call(f"touch {tmp_path}/second-turn; sleep 5"), "Never.")
    async with ScriptedEngine(slow) as engine, serve(results) as url:
        command = [sys.executable, "-c", NODE, engine.url, str(tmp_path), TOKEN]
        async with await anyio.open_process(command, stderr=None) as process:
            assert process.stdout is not None
            control = (await process.stdout.receive()).decode().strip()
            document = Gateway(engine, f"{url}/results").document()
            headers = {"authorization": f"Bearer {TOKEN}"}
            async with httpx2.AsyncClient(headers=headers) as http:
                await http.post(f"{control}/sessions", json=document)
                with anyio.fail_after(30):
                    while not (tmp_path / "second-turn").exists():
                        await anyio.sleep(0.02)
            os.kill(process.pid, signal.SIGKILL)
        async with gateway(tmp_path, engine=ScriptedEngine(slow)):
            with anyio.fail_after(30):
                while not taken:
                    await anyio.sleep(0.02)
    (result,) = taken
    assert result.status == "ERROR"
    assert result.failure is not None
    assert (result.failure.boundary, result.failure.infra) == ("lost_node", True)
    assert result.completion_count == 2
    assert result.trajectory is not None
    assert any(any(trace.loss_mask) for trace in result.trajectory.traces)
    assert result.verdict is not None
    assert (result.verdict.reward, result.verdict.tokens) == ("infra", "prefix")


def test_what_stands_before_the_damage_in_a_journal_is_reported(tmp_path: Path) -> None:
    dispatch = SessionDispatchRequest(
        session_id="s1",
        task_id="t1",
        instruction="x",
        agent=AgentSpec(harness="codex"),
        builder=StrategySpec(strategy="prefix_merging"),
    )
    folder = tmp_path / "att-1"
    recovery.accept(folder, dispatch)
    capture = capture_in(folder)
    capture.journal_path.rename(folder / recovery.JOURNAL)
    for text in "ab":
        start(capture, [user(text)]).close(reply([1], [3, 4]), {})
    capture.close()
    data = bytearray((folder / recovery.JOURNAL).read_bytes())
    data[-20] ^= 1
    (folder / recovery.JOURNAL).write_bytes(data)
    result = recovery.result_of(folder, dispatch, "n1", "the node was killed")
    assert result.failure is not None
    assert (result.failure.boundary, result.failure.infra) == ("lost_node", True)
    assert result.completion_count == 1
    assert result.trajectory is not None
    assert [trace.loss_mask for trace in result.trajectory.traces] == [[1, 1]]
    assert result.verdict is not None
    codes = {finding.code for finding in result.verdict.findings}
    assert {"cut_off", "journal_damaged", "call_unfinished"} <= codes


def test_an_attempt_is_unfinished_until_it_is_marked(tmp_path: Path) -> None:
    dispatch = SessionDispatchRequest(
        session_id="s1", task_id="t1", instruction="x", agent=AgentSpec(harness="codex")
    )
    recovery.accept(tmp_path / "att-1", dispatch)
    assert [found.session_id for _, found in recovery.unfinished(tmp_path)] == ["s1"]
    recovery.mark_ended(tmp_path / "att-1")
    assert recovery.unfinished(tmp_path) == []


def test_a_document_that_was_cut_short_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "att-1").mkdir()
    (tmp_path / "att-1" / recovery.DISPATCH).write_text('{"session_id": "s1", "ta')
    assert recovery.unfinished(tmp_path) == []
