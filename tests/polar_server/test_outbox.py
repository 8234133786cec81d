import socket
import sqlite3
from contextlib import closing
from pathlib import Path

import anyio
import anyio.abc
import msgspec
import pytest

from polar_gateway.protocol import SessionResult
from polar_server.outbox import pause_seconds
from polar_server.protocol import TaskResult
from tests.polar_server.world import (
    NodeThatReports,
    infra_failure,
    node,
    polar,
    result,
    rewrite,
    task,
    trainer,
    until,
)


def callbacks(folder: Path) -> list[tuple[str, str | None]]:
    """Status and last error of every callback that the server on `folder` recorded."""
    with closing(sqlite3.connect(folder / "polar.db")) as database:
        return database.execute("SELECT status, last_error FROM outbox").fetchall()


def test_the_pause_doubles_up_to_five_minutes():
    assert [pause_seconds(tries, 0.5) for tries in (1, 2, 3, 10, 11, 1000)] == [0.5, 1, 2, 256, 300, 300]


async def test_the_trainer_gets_the_results_in_sample_order(tmp_path: Path):
    async with polar(tmp_path) as server, node(server) as gateway, trainer() as receiver:
        await server.submit(task(num_samples=3, callback_url=receiver.url))
        for dispatch in reversed(await gateway.has(3)):
            await server.report(result(dispatch))
        await until(lambda: receiver.bodies)
        (body,) = receiver.bodies
        order = [session["session_id"] for session in (await server.status())["sessions"]]
        assert [one["session_id"] for one in body["results"]] == order
        assert (body["task_id"], body["status"]) == ("fix-it", "completed")
        assert len(body["result_paths"]) == 3
        decoded = msgspec.json.decode(msgspec.json.encode(body), type=TaskResult)
        assert len(decoded.results) == 3


async def test_a_receiver_that_fails_twice_gets_it_once_more_under_the_same_id(tmp_path: Path):
    async with (
        polar(tmp_path) as server,
        node(server, kind=NodeThatReports),
        trainer(500, 500) as receiver,
    ):
        await server.submit(task(callback_url=receiver.url))
        await until(lambda: callbacks(tmp_path) == [("delivered", None)])
        assert len(receiver.ids) == 3
        assert len(set(receiver.ids)) == 1
        assert len(receiver.bodies) == 1


async def test_redirects_are_not_followed(tmp_path: Path):
    async with (
        polar(tmp_path) as server,
        node(server, kind=NodeThatReports),
        trainer(302, 307) as receiver,
    ):
        await server.submit(task(callback_url=receiver.url))
        await until(lambda: receiver.bodies)
        assert len(receiver.ids) == 3


async def test_a_receiver_that_says_gone_is_left_alone(tmp_path: Path):
    async with (
        polar(tmp_path) as server,
        node(server, kind=NodeThatReports),
        trainer(410) as receiver,
    ):
        await server.submit(task(callback_url=receiver.url))
        await until(lambda: callbacks(tmp_path) == [("dead", "the receiver answered 410")])
        assert len(receiver.ids) == 1


async def test_a_callback_is_given_up_in_the_end(tmp_path: Path):
    async with (
        polar(tmp_path, callback_give_up_seconds=1.0) as server,
        node(server, kind=NodeThatReports),
        trainer(*[500] * 100) as receiver,
    ):
        await server.submit(task(callback_url=receiver.url))
        await until(lambda: callbacks(tmp_path) == [("dead", "the receiver answered 500")])
        tried = len(receiver.ids)
        await anyio.sleep(0.1)
        assert len(receiver.ids) == tried >= 2


async def test_one_dead_receiver_does_not_hold_up_another(tmp_path: Path):
    async with polar(tmp_path) as server, node(server, kind=NodeThatReports), trainer() as receiver:
        await server.submit(task("dead", callback_url="http://127.0.0.1:9/x"))
        await server.ended("dead")
        await server.submit(task("alive", callback_url=receiver.url))
        await until(lambda: receiver.bodies)


async def test_failed_and_cancelled_tasks_are_told_too(tmp_path: Path):
    async with polar(tmp_path, retry=1) as server, trainer() as receiver:
        await server.submit(task("cancelled", num_samples=2, callback_url=receiver.url))
        await server.http.delete("/rollout/task/cancelled")
        await until(lambda: receiver.bodies)
        async with node(server) as gateway:
            await server.submit(task("failed", callback_url=receiver.url))
            await server.report(infra_failure((await gateway.has(1))[0]))
            await until(lambda: len(receiver.bodies) == 2)
    cancelled, failed = receiver.bodies
    assert (cancelled["status"], failed["status"]) == ("cancelled", "completed")
    results = [msgspec.convert(one, SessionResult) for one in cancelled["results"]]
    assert [one.status for one in results] == ["ERROR", "ERROR"]
    assert {one.failure.boundary for one in results if one.failure} == {"cancelled"}
    assert failed["results"][0]["failure"]["boundary"] == "runtime"


async def test_a_receiver_that_stops_reading_is_a_failed_try(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as stalled:
        url = f"http://127.0.0.1:{stalled.getsockname()[1]}/"
        async with polar(tmp_path, callback_timeout_seconds=0.3) as server, node(server) as gateway:
            await server.submit(task(callback_url=url))
            (dispatch,) = await gateway.has(1)
            await server.report(result(dispatch, padding="x" * 20_000_000))
            silent = ("pending", "the receiver was silent for 0.3 s")
            await until(lambda: callbacks(tmp_path) == [silent])


async def test_a_receiver_that_reads_slowly_but_steadily_gets_it_all(tmp_path: Path):
    read = 0

    async def take(stream: anyio.abc.SocketStream) -> None:
        nonlocal read
        async with stream:
            while read < 8_000_000:
                read += len(await stream.receive(1 << 20))
                await anyio.sleep(0.02)
            await stream.send(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        anyio.create_task_group() as group,
        polar(tmp_path, callback_timeout_seconds=0.5) as server,
        node(server) as gateway,
    ):
        group.start_soon(listener.serve, take)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        await server.submit(task(callback_url=f"http://127.0.0.1:{port}/"))
        await server.report(result((await gateway.has(1))[0], padding="x" * 8_000_000))
        began = anyio.current_time()
        await until(lambda: callbacks(tmp_path) == [("delivered", None)])
        assert anyio.current_time() - began > 0.5
        group.cancel_scope.cancel()


@pytest.mark.parametrize("url", ["http://a..b/", "http://.example.com/", "http://a:port/"])
async def test_a_url_from_before_urls_were_checked_is_a_failed_try(tmp_path: Path, url: str):
    async with polar(tmp_path) as server, node(server) as gateway:
        await server.submit(task(callback_url="http://localhost:9/"))
        await gateway.has(1)
        await rewrite(tmp_path, "UPDATE tasks SET callback_url = ?", url)
        await server.report(result(gateway.taken[0]))
        await until(lambda: callbacks(tmp_path)[0][1] is not None)
        assert callbacks(tmp_path)[0][0] == "pending"
        assert (await server.http.get("/health")).status_code == 200


async def test_a_task_that_can_no_longer_be_read_is_a_failed_try(tmp_path: Path):
    async with polar(tmp_path) as server, trainer() as receiver:
        await server.submit(task(callback_url=receiver.url))
        await rewrite(tmp_path, "UPDATE tasks SET request = ?", b"{}")
        await server.http.delete("/rollout/task/fix-it")
        await until(lambda: "ValidationError" in (callbacks(tmp_path)[0][1] or ""))
        assert (await server.http.get("/health")).status_code == 200


async def test_a_run_that_was_replaced_before_it_was_told_is_told_all_the_same(tmp_path: Path):
    async with polar(tmp_path) as server, node(server) as gateway, trainer(500, 500, 500) as receiver:
        await server.submit(task(callback_url=receiver.url))
        await server.report(result((await gateway.has(1))[0], reward=0.25))
        await server.ended()
        await server.submit(task(callback_url=receiver.url))
        await server.report(result((await gateway.has(2))[1], reward=0.75))
        await until(lambda: len(receiver.bodies) == 2)
        assert len(set(receiver.ids)) == 2
        rewards = {one["results"][0]["reward"] for one in receiver.bodies}
        assert rewards == {0.25, 0.75}
