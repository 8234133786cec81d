"""The control listener as a server, a person and an intruder see it."""

import shutil
from pathlib import Path

import httpx2
import pytest

from polar_gateway.testing.engine import ScriptedEngine
from tests.polar_gateway.gateway import call, gateway, script

SLOW = script("Then." + call("sleep 30"), "Never.")


async def test_every_route_but_health_needs_the_token(tmp_path: Path) -> None:
    async with gateway(tmp_path) as node, httpx2.AsyncClient() as stranger:
        base = node.address.control_url
        assert (await stranger.get(f"{base}/health")).status_code == 200
        for method, path in [
            ("GET", "/sessions"),
            ("POST", "/sessions"),
            ("GET", "/sessions/s1"),
            ("DELETE", "/sessions/s1"),
            ("GET", "/sessions/s1/completions"),
            ("GET", "/nowhere"),
        ]:
            for headers in ({}, {"authorization": "Bearer wrong"}, {"x-polar-control-token": "x"}):
                refused = await stranger.request(method, base + path, headers=headers)
                assert refused.status_code == 401, (method, path)
                assert refused.headers["content-type"] == "application/problem+json"


async def test_health_names_no_session(tmp_path: Path) -> None:
    async with gateway(tmp_path, SLOW) as node:
        await node.dispatch("secret-id")
        assert "secret-id" not in (await node.http.get(f"{node.address.control_url}/health")).text


async def test_health_tells_strangers_nothing_of_the_hosts_behind_the_node(
    tmp_path: Path,
) -> None:
    async with gateway(tmp_path) as node, httpx2.AsyncClient() as stranger:
        base = node.address.control_url
        await node.engine.die()
        update = {"policy_version": "1"}
        assert (
            await node.http.post(f"{base}/admin/inference/update", json=update)
        ).status_code == 502
        port = node.engine.url.rpartition(":")[2]
        status = (await node.http.get(f"{base}/admin/inference/status")).json()
        assert port in status["backends"][0]["failure"]
        health = await stranger.get(f"{base}/health")
        assert health.json()["backends"][0]["version_in_doubt"]
        assert port not in health.text


async def test_the_same_attempt_twice_is_taken_once(tmp_path: Path) -> None:
    async with gateway(tmp_path) as node:
        first, second = await node.dispatch(), await node.dispatch()
        assert (first.status_code, second.status_code) == (200, 200)
        await node.result()
        assert (await node.dispatch()).status_code == 200
        assert await node.stage() == "ended"
    assert len(node.raw) == 1


async def test_another_attempt_of_a_live_session_is_refused(tmp_path: Path) -> None:
    async with gateway(tmp_path, SLOW) as node:
        await node.dispatch()
        refused = await node.dispatch(attempt_id="att-other")
    assert refused.status_code == 409
    assert "another attempt" in refused.json()["detail"]


async def test_a_session_that_is_live_without_a_harness_is_not_dispatched_over(
    tmp_path: Path,
) -> None:
    async with gateway(tmp_path) as node:
        control = node.address.control_url
        await node.http.post(f"{control}/sessions", json={"session_id": "s1"})
        assert (await node.dispatch()).status_code == 409
        await node.http.delete(f"{control}/sessions/s1")
        assert (await node.run()).status == "COMPLETED"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"agent": {"harness": "nobody"}}, "agent.harness"),
        ({"builder": {"strategy": "nothing"}}, "builder"),
        ({"evaluator": {"strategy": "nobody"}}, "evaluator"),
        ({"attempt_id": "../up"}, "attempt_id"),
        ({"session_id": "../up"}, "session_id"),
        ({"callback_url": "http://a..b/"}, "callback_url"),
        ({"runtime": {"backend": "local", "gpu": 1}}, "gpu"),
    ],
)
async def test_a_dispatch_that_cannot_work_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    async with gateway(tmp_path) as node:
        document = {**node.document(), **changes}
        refused = await node.http.post(f"{node.address.control_url}/sessions", json=document)
        listed = await node.http.get(f"{node.address.control_url}/sessions")
    assert refused.status_code == 422
    assert said in refused.json()["detail"]
    assert listed.json() == {"sessions": []}


async def test_what_is_not_json_is_a_bad_request(tmp_path: Path) -> None:
    async with gateway(tmp_path) as node:
        refused = await node.http.post(f"{node.address.control_url}/sessions", content=b"{")
    assert refused.status_code == 400


async def test_a_session_without_a_harness_is_its_own_key_and_shows_its_calls(
    tmp_path: Path,
) -> None:
    async with gateway(tmp_path) as node:
        control = node.address.control_url
        made = await node.http.post(f"{control}/sessions", json={"task_id": "t1"})
        session_id = made.json()["session_id"]
        answer = await node.http.post(
            f"{node.address.model_url}/v1/chat/completions",
            headers={"authorization": f"Bearer {session_id}"},
            json={"model": "mine", "messages": [{"role": "user", "content": "hi"}]},
        )
        assert answer.json()["model"] == "mine"
        (shown,) = (await node.http.get(f"{control}/sessions/{session_id}/completions")).json()
        assert shown["sampled_ids"] == node.engine.calls[-1].token_ids
        assert shown["prompt_ids"] == node.engine.calls[-1].prompt_token_ids
        dropped = await node.http.delete(f"{control}/sessions/{session_id}")
        assert dropped.json() == {"session_id": session_id, "deleted": True, "messages_deleted": 1}
        assert (await node.http.delete(f"{control}/sessions/{session_id}")).status_code == 404


# ---- the backends ----


async def test_the_admin_routes_need_the_token(tmp_path: Path) -> None:
    async with gateway(tmp_path) as node, httpx2.AsyncClient() as stranger:
        base = node.address.control_url + "/admin/inference"
        for method, path in [
            ("GET", "/status"),
            ("POST", "/pause"),
            ("POST", "/resume"),
            ("POST", "/update"),
            ("GET", "/backends"),
            ("POST", "/backends"),
            ("DELETE", "/backends/backend-1"),
            ("POST", "/backends/backend-1/drain"),
        ]:
            refused = await stranger.request(method, base + path)
            assert refused.status_code == 401, (method, path)


async def test_generations_are_paused_and_resumed(tmp_path: Path) -> None:
    async with gateway(tmp_path) as node:
        base = node.address.control_url + "/admin/inference"
        before = (await node.http.get(f"{base}/status")).json()
        assert before["base_url"] == node.engine.url
        assert (before["paused"], before["inflight"], before["engine"]) == (False, 0, "vllm")
        paused = await node.http.post(f"{base}/pause?timeout_seconds=5")
        assert (paused.status_code, paused.json()["paused"]) == (200, True)
        calls = node.engine.total_calls
        await node.dispatch()
        await node.until_stage("running")
        assert (await node.http.get(f"{node.address.control_url}/health")).json()["backends"][0][
            "paused"
        ]
        assert node.engine.total_calls == calls
        resumed = await node.http.post(f"{base}/resume")
        assert (resumed.status_code, resumed.json()["paused"]) == (200, False)
        assert (await node.result()).status == "COMPLETED"


async def test_a_pause_that_does_not_end_in_time_is_a_504_and_stays(tmp_path: Path) -> None:
    async with gateway(tmp_path) as node:
        base = node.address.control_url + "/admin/inference"
        node.engine.hold(after=2)
        await node.dispatch()

        async def sampling() -> bool:
            status = (await node.http.get(f"{base}/status")).json()
            return bool(status["inflight"])

        await node.until(sampling)
        refused = await node.http.post(f"{base}/pause?timeout_seconds=0.01")
        assert refused.status_code == 504
        assert "no more are admitted until resume" in refused.json()["detail"]
        assert (await node.http.get(f"{base}/status")).json()["paused"]
        aborted = await node.http.post(f"{base}/pause?timeout_seconds=30&mode=abort")
        assert (aborted.status_code, aborted.json()["inflight"]) == (200, 0)
        node.engine.release()
        await node.http.post(f"{base}/resume")
        assert (await node.result()).status == "COMPLETED"


@pytest.mark.parametrize(
    ("query", "status"), [("mode=stop", 422), ("timeout_seconds=soon", 400), ("backend=x", 404)]
)
async def test_a_pause_that_means_nothing_is_refused(
    tmp_path: Path, query: str, status: int
) -> None:
    async with gateway(tmp_path) as node:
        refused = await node.http.post(f"{node.address.control_url}/admin/inference/pause?{query}")
        assert refused.status_code == status


async def test_a_trainer_names_the_weights_and_traces_say_so(tmp_path: Path) -> None:
    async with gateway(tmp_path) as node:
        update = {"policy_version": "step-7", "weights_path": "/weights"}
        done = await node.http.post(
            f"{node.address.control_url}/admin/inference/update", json=update
        )
        assert done.json()["backends"][0]["policy_version"] == "step-7"
        wrong = await node.http.post(
            f"{node.address.control_url}/admin/inference/update", json={"version": "step-8"}
        )
        assert wrong.status_code == 422
        result = await node.run(metadata={"policy_version": "3"})
    assert result.trajectory is not None
    spans = [span for trace in result.trajectory.traces for span in trace.metadata["spans"]]
    assert {span["policy_version"] for span in spans} == {"step-7"}


async def test_backends_come_and_go(tmp_path: Path) -> None:
    async with gateway(tmp_path) as node, ScriptedEngine() as more:
        base = node.address.control_url + "/admin/inference/backends"
        added = await node.http.post(base, json={"base_url": more.url, "name": "more"})
        assert (added.status_code, added.json()["probe"]["token_ids"]) == (200, True)
        again = await node.http.post(base, json={"base_url": more.url, "name": "more"})
        assert again.status_code == 409
        listed = (await node.http.get(base)).json()["backends"]
        assert [each["name"] for each in listed] == ["backend-1", "more"]
        drained = await node.http.post(f"{base}/backend-1/drain")
        assert drained.json()["draining"]
        last = await node.http.delete(f"{base}/more")
        assert last.status_code == 409
        gone = await node.http.delete(f"{base}/backend-1")
        assert gone.json() == {"name": "backend-1", "removed": True, "inflight": 0}
        result = await node.run()
        assert result.status == "COMPLETED" or result.failure is not None
        assert more.total_calls > 0


async def test_every_ending_of_a_session_gives_its_backend_back(tmp_path: Path) -> None:
    async with gateway(tmp_path, SLOW, max_run_workers=8) as node:
        base = node.address.control_url

        async def held() -> int:
            status = (await node.http.get(f"{base}/admin/inference/status")).json()
            sessions: int = status["backends"][0]["sessions"]
            return sessions

        async def holds() -> bool:
            return await held() == 1

        await node.dispatch("cancelled")
        await node.until(holds)
        await node.http.delete(f"{base}/sessions/cancelled")
        await node.result("cancelled")
        assert await held() == 0

        await node.dispatch("late", remaining_timeout_seconds=0.5)
        assert (await node.result("late")).status == "TIMEOUT"
        assert await held() == 0

        await node.dispatch("broken")
        await node.until(holds)
        shutil.rmtree(tmp_path / "attempts" / "att-broken" / "artifacts")
        await node.http.delete(f"{base}/sessions/broken")
        assert "internal error" in ((await node.result("broken")).error or "")
        assert await held() == 0

        made = await node.http.post(f"{base}/sessions", json={})
        session_id = made.json()["session_id"]
        await node.http.post(
            f"{node.address.model_url}/v1/chat/completions",
            headers={"authorization": f"Bearer {session_id}"},
            json={"model": "mine", "messages": [{"role": "user", "content": "hi"}]},
        )
        assert await held() == 1
        await node.http.delete(f"{base}/sessions/{session_id}")
        assert await held() == 0
