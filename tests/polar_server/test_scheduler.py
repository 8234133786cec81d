from pathlib import Path

import anyio

from polar_gateway.protocol import NodeOffers
from tests.polar_server.world import (
    NodeThatReports,
    infra_failure,
    node,
    polar,
    result,
    task,
    until,
)


async def test_sessions_wait_for_a_node_and_for_places(tmp_path: Path):
    async with polar(tmp_path) as server:
        await server.submit(task(num_samples=5))
        async with node(server, places=3) as gateway:
            first = (await gateway.has(3))[0]
            await anyio.sleep(0.1)
            assert len(gateway.taken) == 3
            await server.report(result(first))
            await gateway.has(4)


async def test_sessions_spread_over_nodes(tmp_path: Path):
    async with polar(tmp_path) as server, node(server, "a") as one, node(server, "b") as other:
        await server.submit(task(num_samples=6))
        await one.has(3)
        await other.has(3)


async def test_a_session_goes_to_a_node_that_offers_what_it_names(tmp_path: Path):
    pi_only = NodeOffers(harnesses=["pi"])
    async with (
        polar(tmp_path) as server,
        node(server, "pi", offers=pi_only, places=100) as wrong,
        node(server, "any", offers=NodeOffers(harnesses=["codex"])) as right,
    ):
        await server.submit(task(num_samples=2))
        await right.has(2)
        assert wrong.calls == 0


async def test_a_small_task_does_not_wait_behind_a_large_one(tmp_path: Path):
    async with polar(tmp_path) as server, node(server, places=3) as gateway:
        await server.submit(task("large", num_samples=20))
        await gateway.has(3)
        await server.submit(task("small", num_samples=1))
        await server.report(result(gateway.taken[0]))
        assert (await gateway.has(4))[3].task_id == "small"


async def test_a_higher_priority_goes_first(tmp_path: Path):
    async with polar(tmp_path) as server, node(server, places=3) as gateway:
        await server.submit(task("low", num_samples=6))
        await gateway.has(3)
        await server.submit(task("high", num_samples=2, dispatch_priority=50))
        for dispatch in gateway.taken[:2]:
            await server.report(result(dispatch))
        assert [d.task_id for d in (await gateway.has(5))[3:]] == ["high", "high"]


async def test_many_sessions_run_through_a_node_that_reports_at_once(tmp_path: Path):
    async with polar(tmp_path) as server, node(server, kind=NodeThatReports, places=4) as gateway:
        for number in range(6):
            await server.submit(task(f"task-{number}", num_samples=5))
        for number in range(6):
            status = await server.ended(f"task-{number}")
            assert {s["status"] for s in status["sessions"]} == {"COMPLETED"}
        assert len({d.session_id for d in await gateway.has(30)}) == 30


async def test_an_infrastructure_failure_is_tried_again_elsewhere(tmp_path: Path):
    async with (
        polar(tmp_path) as server,
        node(server, "bad", places=100) as bad,
        node(server, "good") as good,
    ):
        await server.submit(task())
        (failed,) = await bad.has(1)
        await server.report(infra_failure(failed))
        (again,) = await good.has(1)
        assert again.session_id == failed.session_id
        assert again.attempt_id != failed.attempt_id
        await server.report(infra_failure(failed))  # repeated: not a second failure
        await server.report(result(failed))  # of an attempt that is over
        await server.report(result(again, reward=0.25))
        status = await server.ended()
        assert [s["reward"] for s in status["sessions"]] == [0.25]


async def test_at_the_limit_an_infrastructure_failure_is_the_result(tmp_path: Path):
    async with polar(tmp_path) as server, node(server) as gateway:
        await server.submit(task())
        await server.report(infra_failure((await gateway.has(1))[0]))
        await server.report(infra_failure((await gateway.has(2))[1]))
        status = await server.ended()
        assert status["sessions"][0]["failure"]["boundary"] == "runtime"
        assert len(gateway.taken) == 2


async def test_a_failed_agent_is_not_tried_again(tmp_path: Path):
    async with polar(tmp_path) as server, node(server) as gateway:
        await server.submit(task(num_samples=2))
        crashed, slow = await gateway.has(2)
        failure = {"boundary": "harness", "message": "exit 1", "infra": False}
        await server.report(result(crashed, status="ERROR", failure=failure))
        await server.report(result(slow, status="TIMEOUT"))
        status = await server.ended()
        assert sorted(s["status"] for s in status["sessions"]) == ["ERROR", "TIMEOUT"]
        assert gateway.calls == 2


async def test_a_lost_nodes_sessions_are_tried_again_elsewhere(tmp_path: Path):
    async with (
        polar(tmp_path) as server,
        node(server, "dies", places=100, heartbeat_interval_seconds=0.2) as dying,
        node(server, "lives") as living,
    ):
        await server.submit(task())
        (lost,) = await dying.has(1)
        (again,) = await living.has(1)
        assert again.session_id == lost.session_id
        assert not (await server.http.get("/nodes/dies")).json()["healthy"]
        back = await dying.beat({"session_id": "x", "attempt_id": lost.attempt_id, "stage": "running"})
        assert back.json()["stale_attempts"] == [lost.attempt_id]
        await server.report(result(lost, reward=0.0))  # another attempt was placed: too late
        await server.report(result(again, reward=0.75))
        assert [s["reward"] for s in (await server.ended())["sessions"]] == [0.75]


async def test_a_late_result_of_a_lost_attempt_counts_while_no_other_was_placed(tmp_path: Path):
    async with (
        polar(tmp_path) as server,
        node(server, heartbeat_interval_seconds=0.2) as gateway,
    ):
        await server.submit(task())
        (lost,) = await gateway.has(1)
        with anyio.fail_after(10):
            while (await server.http.get("/rollout/status")).json()["pipeline"]["pending_sessions"] == 0:
                await anyio.sleep(0.01)
        await server.report(result(lost))
        assert (await server.ended())["sessions"][0]["reward"] == 1.0


async def test_at_the_limit_a_lost_session_ends_and_a_late_result_still_replaces_that(tmp_path: Path):
    async with (
        polar(tmp_path, retry=1) as server,
        node(server, places=3, heartbeat_interval_seconds=0.2) as gateway,
    ):
        await server.submit(task(num_samples=4))  # the fourth keeps the task open
        first = (await gateway.has(3))[0]
        with anyio.fail_after(10):
            while (await server.status())["completed_sessions"] < 3:
                await anyio.sleep(0.01)
        sessions = (await server.status())["sessions"]
        assert sessions[0]["failure"] == {
            "boundary": "lost_node",
            "message": "node node-a was lost with the session",
            "infra": True,
            "detail": "",
        }
        await server.report(result(first))
        status = await server.status()
        assert (status["completed_sessions"], status["status"]) == (3, "running")
        assert [s["reward"] for s in status["sessions"] if s["session_id"] == first.session_id] == [1.0]


async def test_a_restarted_node_that_does_not_find_its_session_again_loses_it(tmp_path: Path):
    async with (
        polar(tmp_path) as server,
        node(server, heartbeat_interval_seconds=0.2) as gateway,
        anyio.create_task_group() as group,
    ):

        async def beat() -> None:
            while True:
                reported = [
                    {"session_id": d.session_id, "attempt_id": d.attempt_id, "stage": "running"}
                    for d in gateway.taken[1:]
                ]
                await gateway.beat(*reported)
                await anyio.sleep(0.05)

        group.start_soon(beat)
        await server.submit(task(num_samples=2))
        await gateway.has(2)
        await gateway.register(heartbeat_interval_seconds=0.2)  # crashed and came back with one
        await until(lambda: len(gateway.taken) >= 3)
        assert gateway.taken[2].session_id == gateway.taken[0].session_id
        assert len(gateway.taken) == 3
        group.cancel_scope.cancel()
