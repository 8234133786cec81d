import time

import anyio
import anyio.abc
import pytest
from sqlalchemy.exc import OperationalError

from polar_server import loops
from polar_server.loops import Loop
from tests.polar_server.world import until


class Recorder(Loop):
    """Does `work` for every name in `todo`, as seen at the beginning of a step."""

    def __init__(self, *todo: str, due_in: float | None = None) -> None:
        super().__init__()
        self.todo = list(todo)
        self.due_in = due_in
        self.steps = 0
        self.done: list[str] = []
        self.look_again = False

    async def step(self, group: anyio.abc.TaskGroup) -> float | None:
        self.steps += 1
        for name in self.todo:
            self.start(group, name, self.work, name)
        return None if self.due_in is None else time.time() + self.due_in

    async def work(self, name: str) -> bool:
        await anyio.sleep(0.02)
        self.done.append(name)
        return self.look_again


class LoopWhoseStoreFailsOnce(Recorder):
    async def step(self, group: anyio.abc.TaskGroup) -> float | None:
        if not self.steps:
            self.steps = 1
            raise OperationalError("SELECT", {}, Exception("disk I/O error"))
        return await super().step(group)

    async def work(self, name: str) -> bool:
        if not self.done:
            self.done.append("failed")
            raise OperationalError("UPDATE", {}, Exception("database is locked"))
        return await super().work(name)


class LoopThatCannotDoOne(Recorder):
    async def work(self, name: str) -> bool:
        if name == "impossible":
            raise KeyError(name)
        return await super().work(name)


async def test_a_loop_steps_when_woken_and_when_due():
    loop = Recorder(due_in=0.02)
    async with anyio.create_task_group() as group:
        group.start_soon(loop.run)
        await until(lambda: loop.steps >= 3)
        loop.due_in = None
        await anyio.sleep(0.05)
        steps = loop.steps
        await anyio.sleep(0.05)
        assert loop.steps == steps
        loop.wake()
        await until(lambda: loop.steps == steps + 1)
        group.cancel_scope.cancel()


async def test_what_is_being_done_is_not_started_again():
    loop = Recorder("a", "b")
    async with anyio.create_task_group() as group:
        group.start_soon(loop.run)
        await until(lambda: loop.steps == 1)
        loop.wake()
        await until(lambda: len(loop.done) == 2)
        assert sorted(loop.done) == ["a", "b"]
        assert loop.steps == 2
        group.cancel_scope.cancel()


async def test_work_that_asks_for_it_is_followed_by_another_look():
    loop = Recorder("a")
    loop.look_again = True
    async with anyio.create_task_group() as group:
        group.start_soon(loop.run)
        await until(lambda: len(loop.done) >= 3)
        group.cancel_scope.cancel()


async def test_a_store_that_fails_for_a_moment_costs_a_pause(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loops, "TROUBLE_SECONDS", 0.01)
    loop = LoopWhoseStoreFailsOnce("a")
    async with anyio.create_task_group() as group:
        group.start_soon(loop.run)
        await until(lambda: loop.done == ["failed", "a"])
        group.cancel_scope.cancel()


async def test_one_item_that_cannot_be_done_is_logged_and_ends_neither_the_loop_nor_the_others(
    caplog: pytest.LogCaptureFixture,
):
    loop = LoopThatCannotDoOne("impossible", "a")
    async with anyio.create_task_group() as group:
        group.start_soon(loop.run)
        await until(lambda: loop.done == ["a"])
        group.cancel_scope.cancel()
    assert "impossible failed" in caplog.text
