"""The control listener as a server, a person and an intruder see it."""

from pathlib import Path

import httpx2
import pytest

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
