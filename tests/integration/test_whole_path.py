"""Trainer to trainer through real processes: submit, place, run, capture, build, grade, deliver."""

from collections.abc import Callable
from pathlib import Path

import anyio
import msgspec
import pytest

from polar_client.client import session_results
from polar_gateway.protocol import SessionResult
from polar_gateway.testing.engine import ScriptedEngine
from polar_server.protocol import TaskResult, TaskStatus
from tests.integration.deployment import Deployment, Trainer, deployment
from tests.polar_gateway.gateway import THREE_TURNS, call, script, turns

SLOW = script("I wait." + call("sleep 3"), "All done.")


async def until(holds: Callable[[], bool], seconds: float = 40) -> None:
    with anyio.fail_after(seconds):
        while not holds():
            await anyio.sleep(0.02)


async def submit(whole: Deployment, **changes: object) -> None:
    async with whole.client() as client:
        await client.submit(whole.task(**changes))


async def wait(whole: Deployment, task_id: str = "t1") -> TaskStatus:
    async with whole.client() as client:
        with anyio.fail_after(60):
            return await client.wait(task_id)


def all_good(results: list[SessionResult]) -> None:
    assert [(r.status, r.error, r.reward) for r in results] == [("COMPLETED", None, 1.0)] * 2
    for result in results:
        assert result.trajectory is not None
        (trace,) = result.trajectory.traces
        assert trace.reward == 1.0
        assert len(trace.response_ids) == len(trace.loss_mask) == len(trace.response_logprobs or [])
        for echoed in (result.metadata, trace.metadata, result.trajectory.metadata):
            assert (echoed["group_id"], echoed["policy_version"]) == ("g1", "7")


async def test_polling_and_callback_tell_the_same_results(tmp_path: Path) -> None:
    trainer = Trainer()
    async with deployment(tmp_path, ScriptedEngine(THREE_TURNS), trainer) as whole:
        await submit(whole)
        polled = await wait(whole)
        await until(lambda: bool(trainer.accepted))
    assert polled.status == "completed"
    assert (polled.total_sessions, polled.completed_sessions) == (2, 2)
    called_back = msgspec.json.decode(trainer.accepted[0], type=TaskResult)
    assert called_back.task_id == "t1"
    assert called_back.status == "completed"
    assert [bytes(raw) for raw in called_back.results] == [bytes(raw) for raw in polled.results]
    all_good(session_results(polled.results))


async def test_a_trainer_that_answers_500_twice_gets_each_result_once(tmp_path: Path) -> None:
    trainer = Trainer(500, 500)
    async with deployment(tmp_path, ScriptedEngine(THREE_TURNS), trainer) as whole:
        await submit(whole)
        await until(lambda: bool(trainer.accepted))
        await anyio.sleep(1)
    assert [status for _, _, status in trainer.tries] == [500, 500, 200]
    assert len({(webhook_id, body) for webhook_id, body, _ in trainer.tries}) == 1


async def test_a_server_killed_between_two_tries_of_a_callback_makes_the_next_after_its_restart(
    tmp_path: Path,
) -> None:
    trainer = Trainer(500, 500)
    async with deployment(tmp_path, ScriptedEngine(THREE_TURNS), trainer) as whole:
        await submit(whole)
        await until(lambda: len(trainer.tries) == 1)
        await whole.server.kill()
        await whole.server.start()
        await until(lambda: bool(trainer.accepted))
        await anyio.sleep(1)
    assert len(trainer.accepted) == 1
    assert len({(webhook_id, body) for webhook_id, body, _ in trainer.tries}) == 1
    all_good(session_results(msgspec.json.decode(trainer.accepted[0], type=TaskResult).results))


@pytest.mark.timeout(180)
async def test_a_server_killed_in_mid_task_loses_nothing(tmp_path: Path) -> None:
    trainer = Trainer()
    async with deployment(tmp_path, ScriptedEngine(SLOW), trainer) as whole:
        await submit(whole)
        await until(lambda: len(turns(whole.engine)) >= 2)  # a turn of each session
        await whole.server.kill()
        await anyio.sleep(4)  # both sessions end while nobody is there to be told
        await whole.server.start()
        polled = await wait(whole)
        await until(lambda: bool(trainer.accepted))
        calls = turns(whole.engine)
    all_good(session_results(polled.results))
    assert len(calls) == 4, "no session was run twice"
    assert len(trainer.accepted) == 1


@pytest.mark.timeout(180)
async def test_the_sessions_of_a_killed_node_are_run_again_on_another(tmp_path: Path) -> None:
    trainer = Trainer()
    async with deployment(tmp_path, ScriptedEngine(SLOW), trainer, nodes=("n1", "n2")) as whole:
        await submit(whole)
        await until(lambda: len(turns(whole.engine)) >= 2)  # a turn of each session
        await whole.gateways["n1"].kill()
        polled = await wait(whole)
        await until(lambda: bool(trainer.accepted))
    results = session_results(polled.results)
    all_good(results)
    assert {result.node_id for result in results} == {"n2"}


@pytest.mark.timeout(180)
async def test_a_node_that_is_stopped_reports_what_it_has_and_the_session_moves_on(
    tmp_path: Path,
) -> None:
    trainer = Trainer()
    async with deployment(tmp_path, ScriptedEngine(SLOW), trainer, nodes=("n1", "n2")) as whole:
        await submit(whole)
        await until(lambda: len(turns(whole.engine)) >= 2)
        assert await whole.gateways["n1"].stop() == 0
        polled = await wait(whole)
    all_good(session_results(polled.results))


async def test_cancelling_a_task_ends_its_sessions_and_tells_the_trainer(tmp_path: Path) -> None:
    trainer = Trainer()
    slow = script("I wait." + call("sleep 600"), "Never.")
    async with deployment(tmp_path, ScriptedEngine(slow), trainer) as whole:
        await submit(whole, num_samples=3)
        await until(lambda: len(turns(whole.engine)) >= 2)
        async with whole.client() as client:
            await client.cancel("t1")
        ended = await wait(whole)
        await until(lambda: bool(trainer.accepted))
    assert ended.status == "cancelled"
    assert [view.status for view in ended.sessions] == ["ERROR"] * 3
