from pathlib import Path

import msgspec
import pytest

from polar_gateway.protocol import NodeOffers, SessionResult
from polar_server import api
from polar_server.protocol import TaskStatus
from tests.polar_server.world import NodeThatForgot, infra_failure, node, polar, result, task


async def test_a_task_becomes_sessions_and_their_results_come_back(tmp_path: Path):
    async with polar(tmp_path) as server, node(server) as gateway:
        answer = await server.submit(task(num_samples=3, metadata={"group_id": "g"}))
        assert (answer.status_code, answer.json()) == (200, {"task_id": "fix-it", "status": "running"})
        dispatches = await gateway.has(3)
        assert gateway.tokens == {f"Bearer {server.token}"}
        assert len({d.session_id for d in dispatches}) == len({d.attempt_id for d in dispatches}) == 3
        assert all(d.callback_url == f"{server.url}/callbacks/session_result" for d in dispatches)
        for dispatch in reversed(dispatches):
            acknowledged = await server.report(result(dispatch))
            assert (acknowledged.status_code, acknowledged.json()) == (200, {"status": "accepted"})
        status = await server.ended()
    ids = [session["session_id"] for session in status["sessions"]]
    assert status["status"] == "completed"
    assert (status["total_sessions"], status["completed_sessions"]) == (3, 3)
    assert [r["session_id"] for r in status["results"]] == ids
    assert [r["metadata"] for r in status["results"]] == [{"group_id": "g"}] * 3
    assert {s["status"] for s in status["sessions"]} == {"COMPLETED"}
    assert {s["reward"] for s in status["sessions"]} == {1.0}
    assert status["sessions"][0]["verdict"]["tokens"] == "all"
    assert [Path(p) for p in status["result_paths"]] == [
        tmp_path / "results" / "task_fix-it" / f"ses_{session_id}.json" for session_id in ids
    ]


async def test_results_are_handed_out_byte_for_byte(tmp_path: Path):
    async with polar(tmp_path) as server, node(server) as gateway:
        await server.submit(task())
        (dispatch,) = await gateway.has(1)
        odd = msgspec.json.encode(result(dispatch, reward=1e-05)).replace(b'"status"', b'  "status" ', 1)
        await server.http.post("/callbacks/session_result", content=odd)
        body = (await server.http.get("/rollout/task/fix-it")).content
    assert odd in body
    decoded = msgspec.json.decode(body, type=TaskStatus)
    assert msgspec.json.decode(decoded.results[0], type=SessionResult).reward == 1e-05


async def test_results_grow_in_the_order_in_which_sessions_end(tmp_path: Path):
    async with polar(tmp_path) as server, node(server) as gateway:
        await server.submit(task(num_samples=3))
        first, second, third = await gateway.has(3)
        await server.report(result(third))
        await server.report(result(first))
        status = await server.status()
        assert [r["session_id"] for r in status["results"]] == [third.session_id, first.session_id]
        assert status["completed_sessions"] == 2
        await server.report(result(second))
        status = await server.ended()
        assert [r["session_id"] for r in status["results"]] == [s["session_id"] for s in status["sessions"]]


@pytest.mark.parametrize(
    ("query", "shown"),
    [("", 1), ("?include=results", 1), ("?include=results,sessions", 1), ("?include=summary", 0), ("?include=", 0)],
)
async def test_include_leaves_results_out(tmp_path: Path, query: str, shown: int):
    async with polar(tmp_path) as server, node(server) as gateway:
        await server.submit(task())
        await server.report(result((await gateway.has(1))[0]))
        status = await server.status(query=query)
        assert len(status["results"]) == shown
        assert status["sessions"][0]["completion_count"] == 3


async def test_an_unknown_task_is_not_found(tmp_path: Path):
    async with polar(tmp_path) as server:
        for method in ("GET", "DELETE"):
            for task_id in ("nobody", "..%2f..", "%0a"):
                answer = await server.http.request(method, f"/rollout/task/{task_id}")
                assert answer.status_code == 404
                assert answer.headers["content-type"] == "application/problem+json"


async def test_a_refused_submit_says_which_field(tmp_path: Path):
    async with polar(tmp_path) as server:
        answer = await server.submit(task(agent={"harness": "codex", "foo": 1}))
        assert answer.status_code == 422
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["field"] == "agent.foo"
        answer = await server.http.post("/rollout/task/submit", content=b"{not json")
        assert (answer.status_code, answer.json()["title"]) == (400, "Malformed document")
        answer = await server.http.put("/rollout/task/submit")
        assert (answer.status_code, answer.json()["title"]) == (405, "Method Not Allowed")


async def test_a_submit_beyond_the_limit_is_refused(tmp_path: Path):
    async with polar(tmp_path) as server:
        answer = await server.http.post(
            "/rollout/task/submit", content=b" " * (api.MAX_SUBMIT_BYTES + 1)
        )
        assert (answer.status_code, answer.json()["status"]) == (413, 413)

        async def endless():
            for _ in range(17):
                yield b" " * (1 << 20)

        answer = await server.http.post("/rollout/task/submit", content=endless())
        assert answer.status_code == 413


async def test_submitting_a_live_task_again_returns_it_and_another_body_conflicts(tmp_path: Path):
    async with polar(tmp_path) as server, node(server) as gateway:
        assert (await server.submit(task())).status_code == 200
        again = await server.submit(task(num_samples=1, timeout_seconds=600.0))
        assert (again.status_code, again.json()["status"]) == (200, "running")
        other = await server.submit(task(instruction="Something else."))
        assert other.status_code == 409
        assert other.json()["detail"] == "task fix-it is running with another body"
        await gateway.has(1)
        assert (await server.status())["total_sessions"] == 1


async def test_a_finished_id_starts_a_new_run_that_replaces_the_record(tmp_path: Path):
    async with polar(tmp_path) as server, node(server) as gateway:
        await server.submit(task())
        (old,) = await gateway.has(1)
        await server.report(result(old))
        await server.ended()
        answer = await server.submit(task())
        assert answer.json()["status"] == "running"
        _, new = await gateway.has(2)
        assert new.session_id != old.session_id
        await server.report(result(old, reward=0.0))  # of the run that was replaced
        assert (await server.status())["completed_sessions"] == 0
        await server.report(result(new, reward=0.5))
        assert [s["reward"] for s in (await server.ended())["sessions"]] == [0.5]


async def test_an_idempotency_key_makes_a_finished_submit_return_the_old_result(tmp_path: Path):
    key = {"Idempotency-Key": "k1"}
    async with polar(tmp_path) as server, node(server) as gateway:
        await server.submit(task(), **key)
        await server.report(result((await gateway.has(1))[0]))
        await server.ended()
        again = await server.submit(task(), **key)
        assert (again.status_code, again.json()["status"]) == (200, "completed")
        assert len((await server.status())["results"]) == 1
        reused = await server.submit(task(instruction="Other."), **key)
        assert reused.status_code == 422
        another = await server.submit(task(), **{"Idempotency-Key": "k2"})
        assert another.json()["status"] == "running"
        await gateway.has(2)


async def test_a_result_counts_once(tmp_path: Path):
    async with polar(tmp_path) as server, node(server) as gateway:
        await server.submit(task(num_samples=2))
        first, second = await gateway.has(2)
        await server.report(result(first, reward=1.0))
        repeated = await server.report(result(first, reward=0.0))
        assert repeated.json() == {"status": "accepted"}
        stale = await server.report(result(second, attempt_id="att-of-yesterday", reward=0.0))
        assert stale.json() == {"status": "accepted"}
        status = await server.status()
        assert status["completed_sessions"] == 1
        assert status["results"][0]["reward"] == 1.0
        assert [s["reward"] for s in status["sessions"]] == [1.0, None]


async def test_a_result_without_an_attempt_is_the_current_ones(tmp_path: Path):
    async with polar(tmp_path) as server, node(server) as gateway:
        await server.submit(task())
        (dispatch,) = await gateway.has(1)
        await server.report({k: v for k, v in result(dispatch).items() if k != "attempt_id"})
        assert (await server.ended())["sessions"][0]["reward"] == 1.0


async def test_a_result_of_an_unknown_session_is_acknowledged_and_kept(tmp_path: Path):
    async with polar(tmp_path) as server:
        document = {"session_id": "ses-from-elsewhere", "task_id": "t", "status": "COMPLETED"}
        answer = await server.report(document)
        assert (answer.status_code, answer.json()) == (200, {"status": "accepted"})
    kept = tmp_path / "results" / "unclaimed" / "ses_ses-from-elsewhere.json"
    assert msgspec.json.decode(kept.read_bytes()) == document


@pytest.mark.parametrize(
    "fields",
    [{"session_id": "../../x"}, {"session_id": ""}, {"status": "RUNNING"}, {"status": None}, {"reward": "1"}],
)
async def test_a_result_that_is_none_is_refused(tmp_path: Path, fields: dict[str, object]):
    async with polar(tmp_path) as server:
        document = {"session_id": "s", "task_id": "t", "status": "COMPLETED", **fields}
        answer = await server.report(document)
        assert answer.status_code == 422
        assert answer.json()["field"] in fields
    assert not list((tmp_path / "results").rglob("*.json"))


async def test_a_failure_of_a_boundary_this_version_does_not_know_is_kept_as_text(tmp_path: Path):
    async with polar(tmp_path) as server, node(server) as gateway:
        await server.submit(task())
        (dispatch,) = await gateway.has(1)
        failure = {"boundary": "quantum", "message": "decohered"}
        await server.report(result(dispatch, status="ERROR", failure=failure))
        (session,) = (await server.ended())["sessions"]
        assert session["failure"]["message"] == "quantum: decohered"


async def test_live_sessions_show_where_their_node_says_they_are(tmp_path: Path):
    async with polar(tmp_path) as server, node(server, places=4) as gateway:
        await server.submit(task(num_samples=5))
        dispatch = (await gateway.has(4))[0]
        beat = {
            "session_id": dispatch.session_id,
            "attempt_id": dispatch.attempt_id,
            "stage": "running",
            "deadline_at": 4e9,
            "completion_count": 2,
        }
        assert (await gateway.beat(beat)).json()["stale_attempts"] == []
        sessions = (await server.status())["sessions"]
        running = next(s for s in sessions if s["session_id"] == dispatch.session_id)
        assert (running["status"], running["stage"], running["completion_count"]) == ("RUNNING", "running", 2)
        assert (running["deadline_at"], running["node_id"]) == (4e9, "node-a")
        waiting = next(s for s in sessions if s["attempt_id"] == "")
        assert (waiting["status"], waiting["stage"], waiting["node_id"]) == ("REGISTERED", "queued", None)
        overview = (await server.http.get("/rollout/status")).json()
        assert overview["tasks"] == {"fix-it": "running"}
        assert overview["pipeline"] == {"pending_sessions": 1}
        assert [n["node_id"] for n in overview["nodes"]["nodes"]] == ["node-a"]


async def test_a_heartbeat_is_told_which_attempts_are_no_longer_current(tmp_path: Path):
    async with polar(tmp_path) as server, node(server) as gateway:
        await server.submit(task(num_samples=2))
        done, live = await gateway.has(2)
        await server.report(result(done))
        stages = [
            {"session_id": "s", "attempt_id": attempt_id, "stage": "running"}
            for attempt_id in (done.attempt_id, live.attempt_id, "att-unheard-of", "")
        ]
        answer = (await gateway.beat(*stages)).json()
        assert sorted(answer["stale_attempts"]) == sorted([done.attempt_id, "att-unheard-of"])


async def test_nodes_register_beat_drain_and_are_listed(tmp_path: Path):
    async with polar(tmp_path) as server:
        assert (await server.http.post("/nodes/nobody/heartbeat", json={})).status_code == 404
        assert (await server.http.get("/nodes/nobody")).status_code == 404
        assert (await server.http.delete("/nodes/nobody")).status_code == 404
        assert (await server.http.get("/health")).json() == {"status": "ok", "nodes": 0}
        bad = await server.http.post("/nodes/register", json={"node_id": "a/b", "gateway_url": "x"})
        assert (bad.status_code, bad.json()["field"]) == (422, "node_id")
        async with node(server, offers=NodeOffers(harnesses=["codex"])) as gateway:
            beat = await server.http.post(
                f"/nodes/{gateway.node_id}/heartbeat", json={"metrics": {"run_inflight": 2}}
            )
            assert beat.json()["metrics"]["run_inflight"] == 2
            assert (await server.http.post("/nodes/node-a/heartbeat")).status_code == 200
            (listed,) = (await server.http.get("/nodes")).json()["nodes"]
            assert listed["offers"]["harnesses"] == ["codex"]
            assert listed["healthy"]
            drained = await server.http.delete("/nodes/node-a")
            assert drained.json()["draining"]
            await server.submit(task())
            assert (await server.http.get("/nodes/node-a")).json()["draining"]
            assert (await server.status())["sessions"][0]["node_id"] is None
            await gateway.register()  # a restarted node wants to be used
            await gateway.has(1)


async def test_cancelling_ends_waiting_sessions_at_once_and_live_ones_with_their_report(tmp_path: Path):
    async with polar(tmp_path) as server, node(server, places=3) as gateway:
        await server.submit(task(num_samples=4))
        reports, finishes, gone = await gateway.has(3)
        answer = (await server.http.delete("/rollout/task/fix-it")).json()
        assert (answer["status"], answer["completed_sessions"]) == ("cancelling", 1)
        conflict = await server.submit(task(num_samples=4))
        assert conflict.status_code == 409
        failure = {"boundary": "cancelled", "message": "session cancelled"}
        await server.report(result(reports, status="ERROR", failure=failure, completion_count=9))
        await server.report(result(finishes))  # finished before it heard; cancellation wins
        await server.report(result(gone, status="ERROR", failure={"boundary": "runtime", "infra": True}))
        status = await server.ended()
        assert status["status"] == "cancelled"
        by_id = {s["session_id"]: s for s in status["sessions"]}
        assert {s["status"] for s in status["sessions"]} == {"ERROR"}
        assert by_id[reports.session_id]["completion_count"] == 9
        assert by_id[finishes.session_id]["error"] == "session cancelled"
        assert by_id[finishes.session_id]["failure"]["boundary"] == "cancelled"
        assert [r.get("error") for r in status["results"]].count("session cancelled") == 2
        again = await server.http.delete("/rollout/task/fix-it")
        assert (again.status_code, again.json()["status"]) == (200, "cancelled")


async def test_cancelling_a_session_that_its_node_forgot_ends_it(tmp_path: Path):
    async with polar(tmp_path) as server, node(server, kind=NodeThatForgot) as gateway:
        await server.submit(task())
        (dispatch,) = await gateway.has(1)
        await server.http.delete("/rollout/task/fix-it")
        status = await server.ended()
        assert gateway.cancelled == [dispatch.session_id]
        assert status["results"][0]["failure"]["boundary"] == "cancelled"
        assert status["results"][0]["attempt_id"] == dispatch.attempt_id


async def test_a_cancelled_session_that_is_never_reported_ends_after_the_grace(tmp_path: Path):
    async with polar(tmp_path, callback_grace_seconds=0.2) as server, node(server) as gateway:
        await server.submit(task())
        await gateway.has(1)
        await server.http.delete("/rollout/task/fix-it")
        status = await server.ended()
        assert status["sessions"][0]["failure"]["boundary"] == "cancelled"
        assert len(gateway.cancelled) == 1


async def test_tasks_are_listed_newest_first_with_filters(tmp_path: Path):
    async with polar(tmp_path, retry=1) as server, node(server) as gateway:
        await server.submit(task("one", num_samples=2, agent={"harness": "codex", "model_name": "m"}))
        graded, broken = await gateway.has(2)
        await server.report(result(graded, reward=0.5, completion_count=4))
        await server.report(infra_failure(broken))
        await server.ended("one")
        await server.submit(task("two", agent={"harness": "pi"}))

        async def listed(query: str = "") -> list[str]:
            answer = await server.http.get(f"/tasks{query}")
            return [one["task_id"] for one in answer.json()["tasks"]]

        assert await listed() == ["two", "one"]
        assert await listed("?status=completed") == ["one"]
        assert await listed("?harness=pi") == ["two"]
        assert await listed("?since=4e9") == []
        assert await listed("?limit=1") == ["two"]
        for bad in ("?limit=0", "?limit=x", "?since=yesterday"):
            assert (await server.http.get(f"/tasks{bad}")).status_code == 422
        one = (await server.http.get("/tasks?status=completed")).json()["tasks"][0]
        assert (one["num_samples"], one["completed_sessions"], one["errored_sessions"]) == (2, 2, 1)
        assert (one["model"], one["harness"], one["source"]) == ("m", "codex", "live")
        assert (one["mean_reward"], one["mean_completions"]) == (0.5, 3.5)


async def test_a_result_in_words_of_a_newer_node_is_taken(tmp_path: Path):
    async with polar(tmp_path) as server, node(server) as gateway:
        await server.submit(task(num_samples=2))
        first, second = await gateway.has(2)
        findings = [{"code": "new", "level": "info", "message": "m", "numbers": {"share": 0.5}}]
        newer = {"reward": "graded", "tokens": "all", "findings": findings, "more": 1}
        assert (await server.report(result(first, verdict=newer))).status_code == 200
        unknown = {"reward": "half", "tokens": "some"}
        assert (await server.report(result(second, verdict=unknown))).status_code == 200
        status = await server.ended()
    verdicts = [session["verdict"] for session in status["sessions"]]
    assert verdicts[0]["findings"] == [{**findings[0], "level": "warning", "count": 1}]
    assert (verdicts[1]["reward"], verdicts[1]["tokens"]) == ("ungraded", "none")
    assert status["results"][0]["verdict"] == newer


@pytest.mark.parametrize("url", ["", "node-a:8081", "http://a..b", "http://a:port"])
async def test_a_node_that_cannot_be_called_is_not_registered(tmp_path: Path, url: str):
    async with polar(tmp_path) as server:
        answer = await server.http.post("/nodes/register", json={"node_id": "a", "gateway_url": url})
        assert (answer.status_code, answer.json()["field"]) == (422, "gateway_url")
        assert (await server.http.get("/nodes")).json() == {"nodes": []}
