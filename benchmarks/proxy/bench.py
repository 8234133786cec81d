"""Drives the same calls through the gateway and through the floor, and compares their CPU time."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import aiohttp
import anyio

from benchmarks.proxy.conversation import LARGE, SIZES, SMALL, Size, turns
from benchmarks.proxy.gateway import journal, key
from benchmarks.proxy.process import MEASURED_CORE, OTHER_CORE, Server, pin, started
from benchmarks.report import BrokenBenchError, Line, progress
from polar_gateway.capture.session import read_session

AT_ONCE = 8
TURNS = {SMALL.name: 5, LARGE.name: 3}
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages"}


class Case(NamedTuple):
    """One line of the report."""

    dialect: str
    size: Size
    mode: str
    sessions: int
    """As many as make the CPU time large against its resolution and the run short."""

    @property
    def name(self) -> str:
        return f"proxy/{self.dialect}/{self.size.name}/{self.mode}"

    @property
    def calls(self) -> int:
        return self.sessions * TURNS[self.size.name]


SESSIONS = {"small/plain": 160, "small/stream": 8, "large/plain": 80, "large/stream": 8}
CASES = [
    Case(dialect, size, mode, SESSIONS[f"{size.name}/{mode}"])
    for dialect in PATHS
    for size in SIZES
    for mode in ("plain", "stream")
]


def run(wanted: Callable[[str], bool]) -> Iterator[Line]:
    cases = [case for case in CASES if wanted(case.name)]
    if not cases:
        return
    pin(OTHER_CORE)
    # One more session for each case, whose first turn warms the path up.
    sessions = sum(case.sessions + 1 for case in cases)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        counts = [TURNS[size.name] for size in SIZES]
        engine = stack.enter_context(started("benchmarks.proxy.engine", OTHER_CORE, *counts))
        floor = stack.enter_context(started("benchmarks.proxy.floor", MEASURED_CORE, engine.url))
        gateway = stack.enter_context(
            started("benchmarks.proxy.gateway", MEASURED_CORE, engine.url, folder, sessions)
        )
        first = 0
        for case in cases:
            began = time.monotonic()
            numbers = range(first, first + case.sessions + 1)
            least = _cost(case, floor, numbers)
            before = _engine_calls(engine)
            cost = _cost(case, gateway, numbers)
            _check(case, numbers, folder, _engine_calls(engine) - before)
            first = numbers.stop
            progress(
                f"{case.name}: {cost * 1000:.2f} ms, at least {least * 1000:.2f} ms "
                f"({time.monotonic() - began:.0f} s)"
            )
            yield Line(
                bench=case.name,
                value=round(cost * 1000, 3),
                unit="ms",
                ratio=round(cost / least, 2),
            )


def _cost(case: Case, server: Server, numbers: range) -> float:
    """CPU seconds of `server` for each call of the case; the first session's is not counted."""
    anyio.run(_drive, case, server.url, numbers[:1], 1)
    before = server.cpu_seconds()
    anyio.run(_drive, case, server.url, numbers[1:], TURNS[case.size.name])
    return (server.cpu_seconds() - before) / case.calls


async def _drive(case: Case, url: str, numbers: range, count: int) -> None:
    """Run `count` turns of the sessions, some at once; within each, one after the other."""
    waiting = iter(numbers)
    async with aiohttp.ClientSession() as client, anyio.create_task_group() as group:

        async def work() -> None:
            for number in waiting:
                await _session(case, client, url, number, count)

        for _ in range(AT_ONCE):
            group.start_soon(work)


async def _session(
    case: Case, client: aiohttp.ClientSession, url: str, number: int, count: int
) -> None:
    headers = {"authorization": f"Bearer {key(number)}", "content-type": "application/json"}
    for turn in turns(case.size, TURNS[case.size.name])[:count]:
        body = turn.requests[f"{case.dialect}/{case.mode}"]
        async with client.post(url + PATHS[case.dialect], data=body, headers=headers) as response:
            if response.status != 200:
                said = (await response.text())[:300]
                raise BrokenBenchError(f"{case.name} was answered {response.status}: {said}")
            async for _ in response.content.iter_any():
                pass


def _engine_calls(engine: Server) -> int:
    async def ask() -> int:
        async with aiohttp.ClientSession() as client, client.get(engine.url + "/calls") as response:
            return int(await response.text())

    return anyio.run(ask)


def _check(case: Case, numbers: range, folder: Path, engine_calls: int) -> None:
    """The figure counts only if every call was made once, journalled, and extends its session."""
    calls = case.calls + 1
    completions = [
        completion
        for number in numbers
        for completion in read_session(journal(folder, number)).completions
    ]
    if not calls == engine_calls == len(completions):
        raise BrokenBenchError(
            f"{case.name}: {calls} calls by the client, {engine_calls} to the engine, "
            f"{len(completions)} in the journals"
        )
    for completion in completions:
        sampled = completion.logprobs is not None and len(completion.logprobs)
        if sampled != case.size.sampled_tokens or completion.findings or not completion.delivered:
            raise BrokenBenchError(f"{case.name}: {completion.completion_id} is not whole")
        parent = completion.parent
        if parent is not None and completion.shared != parent.prompt_length + sampled:
            raise BrokenBenchError(
                f"{case.name}: {completion.completion_id} does not extend its session"
            )
