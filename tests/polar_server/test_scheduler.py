from pathlib import Path
from typing import Any

import anyio
from starlette.responses import Response

from polar_gateway.protocol import NodeOffers, SessionDispatchRequest
from tests.polar_server.world import (
    FakeNode,
    NodeThatNeverAnswers,
    NodeThatReports,
    Polar,
    infra_failure,
    node,
    polar,
    result,
    rewrite,
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
        node(server, "dies", places=100, heartbeat_interval_seconds=0.6) as dying,
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
        node(server, heartbeat_interval_seconds=0.6) as gateway,
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
        node(server, places=3, heartbeat_interval_seconds=0.6) as gateway,
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
            "code": "",
        }
        await server.report(result(first))
        status = await server.status()
        assert (status["completed_sessions"], status["status"]) == (3, "running")
        assert [s["reward"] for s in status["sessions"] if s["session_id"] == first.session_id] == [1.0]


async def test_a_restarted_node_that_does_not_find_its_session_again_loses_it(tmp_path: Path):
    async with (
        polar(tmp_path) as server,
        node(server, heartbeat_interval_seconds=1.0) as gateway,
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
        await gateway.register(heartbeat_interval_seconds=1.0)  # crashed and came back with one
        await until(lambda: len(gateway.taken) >= 3)
        assert gateway.taken[2].session_id == gateway.taken[0].session_id
        assert len(gateway.taken) == 3
        group.cancel_scope.cancel()


def named(dispatch: SessionDispatchRequest) -> dict[str, Any]:
    """How a heartbeat names a session."""
    return {"session_id": dispatch.session_id, "attempt_id": dispatch.attempt_id, "stage": "running"}


class NodeThatTakesAndNeverSays(NodeThatNeverAnswers):
    async def answer(self, dispatch: SessionDispatchRequest) -> Response:
        self.taken.append(dispatch)
        return await super().answer(dispatch)


async def waits(server: Polar) -> None:
    """Until a session is back in the queue."""
    with anyio.fail_after(10):
        while not (await server.http.get("/rollout/status")).json()["pipeline"]["pending_sessions"]:
            await anyio.sleep(0.01)


CANCELLED = {"boundary": "cancelled", "message": "session cancelled", "infra": False}


async def test_an_attempt_that_was_taken_without_a_word_is_given_back_to_the_node_that_names_it(
    tmp_path: Path,
):
    async with (
        polar(tmp_path, dispatch_timeout_seconds=0.05) as server,
        node(server, kind=NodeThatTakesAndNeverSays) as mute,
    ):
        await server.submit(task())
        await until(lambda: mute.calls == 3)
        await waits(server)
        heard = await mute.beat(named(mute.taken[0]))
        assert heard.json()["stale_attempts"] == []
        await server.report(result(mute.taken[0]))
        session = (await server.ended())["sessions"][0]
        assert (session["reward"], session["attempt_id"]) == (1.0, mute.taken[0].attempt_id)


async def test_a_given_up_attempt_that_its_node_cancelled_does_not_end_the_session(tmp_path: Path):
    async with (
        polar(tmp_path, dispatch_timeout_seconds=0.05) as server,
        node(server, "mute", NodeThatTakesAndNeverSays, places=100) as mute,
    ):
        await server.submit(task())
        await until(lambda: mute.calls == 3)
        await waits(server)
        late = result(mute.taken[0], status="ERROR", reward=None, failure=CANCELLED)
        await server.report(late)
        async with node(server, "works") as working:
            await server.report(result((await working.has(1))[0]))
            assert (await server.ended())["sessions"][0]["reward"] == 1.0


async def test_a_lost_attempt_that_is_heard_of_again_costs_no_attempt(tmp_path: Path):
    async with polar(tmp_path) as server, node(server, heartbeat_interval_seconds=0.6) as gateway:
        await server.submit(task())
        (back,) = await gateway.has(1)
        await waits(server)
        async with anyio.create_task_group() as group:
            group.start_soon(keep_naming, gateway)
            await anyio.sleep(0.1)
            await server.report(infra_failure(back))  # the first: another attempt is left
            (_, again) = await gateway.has(2)
            await server.report(result(again))
            await server.ended()
            group.cancel_scope.cancel()


async def keep_naming(gateway: FakeNode) -> None:
    while True:
        await gateway.beat(*map(named, gateway.taken))
        await anyio.sleep(0.05)


async def test_a_node_that_no_longer_has_a_session_loses_it_and_no_other(tmp_path: Path):
    async with (
        polar(tmp_path) as server,
        node(server, places=3, heartbeat_interval_seconds=1.0) as gateway,
        anyio.create_task_group() as group,
    ):

        async def beat() -> None:
            while True:
                await gateway.beat(*map(named, gateway.taken[1:]))
                await anyio.sleep(0.05)

        group.start_soon(beat)
        await server.submit(task(num_samples=2))
        await until(lambda: len(gateway.taken) == 3)
        await anyio.sleep(0.5)
        assert [d.session_id for d in gateway.taken[2:]] == [gateway.taken[0].session_id]
        group.cancel_scope.cancel()


async def test_a_session_that_cannot_be_dispatched_ends_and_holds_up_nobody(tmp_path: Path):
    async with polar(tmp_path) as server:
        await server.submit(task("broken"))
        await rewrite(tmp_path, "UPDATE tasks SET request = ?", b"{}")
        await server.submit(task("whole"))
        async with node(server, kind=NodeThatReports):
            await server.ended("whole")
            with anyio.fail_after(10):
                while (status := await server.status("broken", "?include=sessions"))["status"] == "running":
                    await anyio.sleep(0.01)
        assert "could not be dispatched" in status["sessions"][0]["error"]


async def test_a_task_stops_early_once_it_has_the_usable_sessions_that_it_asked_for(tmp_path: Path):
    async with polar(tmp_path) as server, node(server, places=3) as gateway:
        await server.submit(task(num_samples=5, early_stop_min_usable_sessions=2))
        first, unusable, third = await gateway.has(3)
        await server.report(result(first))
        await server.report(result(unusable, verdict={"reward": "ungraded", "tokens": "all"}))
        fourth = (await gateway.has(5))[3]
        assert not gateway.cancelled
        await server.report(result(third))
        await until(lambda: len(gateway.cancelled) == 2)
        for cancelled in (fourth, gateway.taken[4]):
            await server.report(result(cancelled, status="ERROR", reward=None, failure=CANCELLED))
        status = await server.ended()
    assert status["status"] == "completed"
    outcomes = sorted((s["status"], s["error"]) for s in status["sessions"] if s["error"])
    enough = "session cancelled: 2 usable sessions of its task are enough"
    assert outcomes == [("ERROR", enough)] * 2


async def test_what_still_waits_when_a_task_stops_early_never_starts(tmp_path: Path):
    async with polar(tmp_path) as server, node(server, places=3) as gateway:
        await server.submit(task(num_samples=9, early_stop_min_usable_sessions=1))
        done, well, badly = await gateway.has(3)
        await server.report(result(done))
        await server.report(result(well))
        await server.report(result(badly, status="ERROR", failure=CANCELLED))
        status = await server.ended()
        assert (status["status"], gateway.calls) == ("completed", 3)
        assert sum(s["reward"] is not None for s in status["sessions"]) >= 1
