from pathlib import Path

import pytest

from polar_server import dispatch
from polar_server.dispatch import Answer, judge
from tests.polar_server.world import (
    NodeThatFindsItUnfit,
    NodeThatIsSlowToCancel,
    NodeThatNeverAnswers,
    NodeThatRefuses,
    NodeThatTimesOutOnce,
    node,
    polar,
    result,
    task,
    until,
)


@pytest.mark.parametrize(
    ("status", "body", "answer"),
    [
        (200, b"", Answer.TAKEN),
        (202, b"{}", Answer.TAKEN),
        (409, b'{"attempt_id": "att-1"}', Answer.TAKEN),
        (409, b'{"attempt_id": "att-0"}', Answer.SET_ASIDE),
        (409, b'{"detail": "live"}', Answer.SET_ASIDE),
        (409, b"not json", Answer.SET_ASIDE),
        (302, b"", Answer.SET_ASIDE),
        (401, b"", Answer.SET_ASIDE),
        (429, b"", Answer.SET_ASIDE),
        (503, b"", Answer.SET_ASIDE),
        (400, b"", Answer.UNFIT),
        (422, b'{"detail": 7}', Answer.UNFIT),
    ],
)
def test_what_an_answer_means(status: int, body: bytes, answer: Answer):
    assert judge(status, body, "att-1") is answer


async def test_a_node_that_refuses_is_set_aside_and_the_session_goes_elsewhere(tmp_path: Path):
    async with (
        polar(tmp_path) as server,
        node(server, "refuses", NodeThatRefuses, places=100) as refusing,
        node(server, "works") as working,
    ):
        await server.submit(task())
        (taken,) = await working.has(1)
        assert refusing.calls == 1
        await server.submit(task("another"))
        await working.has(2)
        assert refusing.calls == 1
        await server.report(result(taken))
        assert (await server.ended())["sessions"][0]["node_id"] == "works"


async def test_refusals_cost_no_attempts(tmp_path: Path):
    async with polar(tmp_path, retry=1) as server, node(server, kind=NodeThatRefuses) as refusing:
        await server.submit(task())
        await until(lambda: refusing.calls >= 2)  # tried again once its second aside is over
        status = await server.status()
        assert status["status"] == "running"
        assert len(status["sessions"]) == 1


async def test_a_dispatch_that_timed_out_is_repeated_with_the_same_attempt(tmp_path: Path):
    async with (
        polar(tmp_path, dispatch_timeout_seconds=1.0) as server,
        node(server, kind=NodeThatTimesOutOnce) as slow,
        node(server, "idle", places=3) as idle,
    ):
        await server.submit(task())
        await until(lambda: slow.calls == 2)
        await server.report(result(slow.taken[0]))
        assert (await server.ended())["sessions"][0]["attempt_id"] == slow.taken[0].attempt_id
        assert idle.calls == 0


async def test_a_node_that_never_answers_loses_the_session_to_another(tmp_path: Path):
    async with (
        polar(tmp_path, dispatch_timeout_seconds=0.05) as server,
        node(server, "mute", NodeThatNeverAnswers, places=100) as mute,
        node(server, "works") as working,
    ):
        await server.submit(task())
        await working.has(1)
        assert mute.calls == 3  # once, and twice again with the same attempt


async def test_a_node_that_is_gone_loses_the_session_to_another(tmp_path: Path):
    async with polar(tmp_path) as server:
        async with node(server, "gone", places=100):
            pass
        async with node(server, "works") as working:
            await server.submit(task())
            await working.has(1)


async def test_a_session_that_no_node_can_run_ends_with_what_the_node_said(tmp_path: Path):
    async with polar(tmp_path) as server, node(server, kind=NodeThatFindsItUnfit) as unfit:
        await server.submit(task())
        status = await server.ended()
        assert unfit.calls == 2
        (session,) = status["sessions"]
        assert session["status"] == "ERROR"
        assert session["failure"]["boundary"] == "delivery"
        assert session["failure"]["detail"] == "no such harness here"
        assert status["results"][0]["error"] == "node node-a did not take the session: 422"


async def test_a_node_that_finds_one_session_unfit_is_not_set_aside_for_others(tmp_path: Path):
    async with (
        polar(tmp_path) as server,
        node(server, "unfit", NodeThatFindsItUnfit, places=100) as unfit,
        node(server, "works") as working,
    ):
        await server.submit(task())
        await working.has(1)
        await server.submit(task("another"))
        await working.has(2)
        assert unfit.calls == 2


async def test_cancelling_while_a_node_refuses_ends_the_session(tmp_path: Path):
    async with (
        polar(tmp_path, dispatch_timeout_seconds=0.2) as server,
        node(server, kind=NodeThatNeverAnswers) as mute,
    ):
        await server.submit(task())
        await until(lambda: mute.calls == 1)
        await server.http.delete("/rollout/task/fix-it")
        status = await server.ended()
        assert status["sessions"][0]["failure"]["boundary"] == "cancelled"


async def test_a_cancellation_is_repeated_until_the_node_hears_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(dispatch, "CANCEL_RETRY_SECONDS", 0.01)
    async with polar(tmp_path) as server, node(server, kind=NodeThatIsSlowToCancel) as slow:
        await server.submit(task())
        (taken,) = await slow.has(1)
        await server.http.delete("/rollout/task/fix-it")
        await until(lambda: len(slow.cancelled) == 2)
        await server.report(result(taken, status="ERROR", error="session cancelled"))
        assert (await server.ended())["status"] == "cancelled"
        assert slow.cancelled == [taken.session_id] * 2
