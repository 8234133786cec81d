import socket
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import httpx2
import pytest

from polar_server.app import ServerAddress, serve
from polar_server.auth import TokenFileError
from polar_server.store.engine import SchemaError
from tests.polar_server.world import (
    NodeThatTimesOutOnce,
    Polar,
    config,
    node,
    polar,
    result,
    task,
    trainer,
    until,
)

SERVER = """
import sys
from functools import partial
from pathlib import Path
import anyio
from polar_server.app import serve
from polar_server.config import RolloutConfig
config = RolloutConfig(port=0, data_dir=Path(sys.argv[1]), callback_retry_seconds=0.02)
anyio.run(partial(serve, config, started=lambda address: print(address.url, flush=True)))
"""


@asynccontextmanager
async def process(folder: Path) -> AsyncIterator[Polar]:
    """A server in a process of its own, which ends by kill -9."""
    command = [sys.executable, "-c", SERVER, str(folder)]
    async with await anyio.open_process(command, stderr=None) as running:
        assert running.stdout is not None
        with anyio.fail_after(30):
            url = (await running.stdout.receive()).decode().strip()
        server = Polar(ServerAddress(url=url, token_file=folder / "token"))
        async with server.http:
            try:
                yield server
            finally:
                running.kill()


async def test_a_port_that_is_taken_is_an_error(tmp_path: Path):
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(OSError, match="in use"),
    ):
        await serve(config(tmp_path, port=taken.getsockname()[1]))


async def test_a_database_of_another_version_is_refused(tmp_path: Path):
    async with polar(tmp_path):
        pass
    with sqlite3.connect(tmp_path / "polar.db") as database:
        database.execute("UPDATE schema_version SET version = 99")
    database.close()
    with pytest.raises(SchemaError, match="has schema version 99; this server reads version 1"):
        await serve(config(tmp_path))


async def test_a_token_that_others_can_read_stops_the_start(tmp_path: Path):
    (tmp_path / "token").write_text("secret")
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(TokenFileError):
        await serve(config(tmp_path))


async def test_stopping_is_prompt_and_finishes_what_is_being_answered(tmp_path: Path):
    answers: list[httpx2.Response] = []
    async with polar(tmp_path) as server, anyio.create_task_group() as group:

        async def slow_body() -> AsyncIterator[bytes]:
            yield b'{"session_id": "s", "task_id": "t", '
            sent.set()
            await anyio.sleep(0.2)
            yield b'"status": "ERROR"}'

        async def report() -> None:
            async with httpx2.AsyncClient(headers=server.http.headers) as http:
                url = f"{server.url}/callbacks/session_result"
                answers.append(await http.post(url, content=slow_body()))

        sent = anyio.Event()
        group.start_soon(report)
        await sent.wait()
        group.start_soon(until, lambda: answers)
    assert [answer.status_code for answer in answers] == [200]


async def test_a_restart_in_mid_task_loses_nothing(tmp_path: Path):
    async with trainer() as receiver:
        async with polar(tmp_path) as server, node(server, places=3) as gateway:
            await server.submit(task(num_samples=5, callback_url=receiver.url))
            first = (await gateway.has(3))[0]
            await server.report(result(first, reward=0.25))
            dispatches = list(await gateway.has(4))
        async with polar(tmp_path) as server:
            status = await server.status()
            assert (status["status"], status["completed_sessions"]) == ("running", 1)
            assert (await server.http.get("/nodes/node-a")).json()["healthy"]
            async with node(server, places=3) as gateway:
                for dispatch in dispatches[1:]:
                    await server.report(result(dispatch, reward=0.5))
                await server.report(result((await gateway.has(1))[0], reward=0.75))
                status = await server.ended()
        await until(lambda: receiver.bodies)
    assert [session["reward"] for session in status["sessions"]] == [0.25, 0.5, 0.5, 0.5, 0.75]
    assert len(receiver.bodies[0]["results"]) == 5


async def test_a_dispatch_cut_off_by_a_restart_is_repeated_with_the_same_attempt(tmp_path: Path):
    async with polar(tmp_path) as first, node(first, kind=NodeThatTimesOutOnce) as gateway:
        await first.submit(task())
        await until(lambda: gateway.calls == 1)
        await first.http.aclose()
        async with anyio.create_task_group() as group:
            # The second server stands beside the first as it would after a crash of the first.
            async with polar(tmp_path) as second:
                await until(lambda: gateway.calls == 2)
                assert len(gateway.taken) == 1
                await second.report(result(gateway.taken[0]))
                assert (await second.ended())["sessions"][0]["reward"] == 1.0
            group.cancel_scope.cancel()


async def test_a_server_killed_between_two_tries_delivers_its_callback_under_the_same_id(
    tmp_path: Path,
):
    async with trainer(*[500] * 1000) as receiver:
        async with process(tmp_path) as server, node(server) as gateway:
            await server.submit(task(callback_url=receiver.url))
            await server.report(result((await gateway.has(1))[0]))
            await until(lambda: receiver.ids)
        receiver.statuses.clear()
        async with process(tmp_path):
            await until(lambda: receiver.bodies)
    assert len(set(receiver.ids)) == 1
    assert len(receiver.bodies) == 1
    assert receiver.bodies[0]["results"][0]["reward"] == 1.0


async def test_a_server_killed_in_mid_task_goes_on_where_it_was(tmp_path: Path):
    async with trainer() as receiver:
        async with process(tmp_path) as server, node(server, places=3) as gateway:
            await server.submit(task(num_samples=5, callback_url=receiver.url))
            await server.report(result((await gateway.has(3))[0]))
            dispatches = list(await gateway.has(4))
        async with process(tmp_path) as server, node(server, places=3) as gateway:
            await server.report(result(dispatches[0], reward=0.0))  # its node never heard the answer
            for dispatch in dispatches[1:]:
                await server.report(result(dispatch))
            await server.report(result((await gateway.has(1))[0]))
            await until(lambda: receiver.bodies)
            status = await server.ended()
    assert {session["reward"] for session in status["sessions"]} == {1.0}
    assert len({one["session_id"] for one in receiver.bodies[0]["results"]}) == 5
    assert not list((tmp_path / "results" / "incoming").iterdir())
