"""Drives the same calls through the gateway and through the floor, and compares what they cost."""

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import aiohttp
import anyio

from benchmarks.proxy.conversation import LARGE, SIZES, SMALL, Size, turns
from benchmarks.proxy.gateway import journal
from benchmarks.proxy.process import OTHER_CORE, Server, pin
from benchmarks.proxy.servers import PATHS, Heard, Servers, call, servers
from benchmarks.report import BrokenBenchError, Line, progress
from polar_gateway.capture.reading import read_session

TURNS = {SMALL.name: 5, LARGE.name: 3}
CROWD = "proxy/sessions350"
CROWD_SECONDS = 1.0
"""How long the engine takes for each of the crowd's calls."""
SPREAD_SECONDS = 1.0
"""Over which those that are timed begin, one after the other."""


class Case(NamedTuple):
    """Sessions of one dialect, size and mode."""

    dialect: str
    size: Size
    mode: str
    """plain, stream; or tokens: plain, where the engine is sent recorded ids from the second turn on"""
    sessions: int
    """As many as make the CPU time large against its resolution and the run short."""
    at_once: int = 8

    @property
    def name(self) -> str:
        return f"proxy/{self.dialect}/{self.size.name}/{self.mode}"

    @property
    def request(self) -> str:
        """The key of its requests in a turn."""
        return f"{self.dialect}/{'stream' if self.mode == 'stream' else 'plain'}"

    @property
    def calls(self) -> int:
        return self.sessions * TURNS[self.size.name]


SESSIONS = {
    "small/plain": 160,
    "small/stream": 8,
    "small/tokens": 80,
    "large/plain": 80,
    "large/stream": 8,
    "large/tokens": 40,
}
TOKENS_BOUND = 12.0
CASES = [
    Case(dialect, size, mode, SESSIONS[f"{size.name}/{mode}"])
    for dialect in PATHS
    for size in SIZES
    for mode in ("plain", "stream", "tokens")
]
CROWD_CASE = Case("chat", SMALL, "plain", 350, at_once=350)


class Measured(NamedTuple):
    cpu_seconds: float
    """Of the server, for each call."""
    heard: list[Heard]


def run(wanted: Callable[[str], bool]) -> Iterator[Line]:
    """A case gives a line of its CPU time, and a streamed one another of its first event."""
    pin(OTHER_CORE)
    for way in ("messages", "tokens"):
        cases = [
            case
            for case in CASES
            if wanted(case.name) and (case.mode == "tokens") == (way == "tokens")
        ]
        if not cases:
            continue
        with servers(TURNS, sum(case.sessions + 1 for case in cases), gateway=[way]) as running:
            first = 0
            for case in cases:
                yield from _compared(case, first, running)
                first += case.sessions + 1
    if wanted(CROWD):
        with servers(TURNS, CROWD_CASE.sessions + 1, seconds=CROWD_SECONDS) as running:
            yield from _crowd(running)


def _compared(case: Case, first: int, running: Servers) -> Iterator[Line]:
    began = time.monotonic()
    floor, ours = _both(case, first, running)
    progress(
        f"{case.name}: {ours.cpu_seconds * 1000:.2f} ms, at least "
        f"{floor.cpu_seconds * 1000:.2f} ms ({time.monotonic() - began:.0f} s)"
    )
    yield Line(
        bench=case.name,
        value=round(ours.cpu_seconds * 1000, 3),
        unit="ms",
        ratio=round(ours.cpu_seconds / floor.cpu_seconds, 2),
        bound=TOKENS_BOUND if case.mode == "tokens" else None,
    )
    if case.mode == "stream":
        ms = [
            statistics.median(heard.first_event or 0.0 for heard in measured.heard) * 1000
            for measured in (ours, floor)
        ]
        yield Line(
            bench=f"{case.name}/first_event",
            value=round(ms[0], 3),
            unit="ms",
            ratio=round(ms[0] / ms[1], 2),
        )


def _crowd(running: Servers) -> Iterator[Line]:
    """How much later than through the floor the crowd is answered."""
    floor, ours = _both(CROWD_CASE, 0, running)
    for name, part in (("median", 50), ("p99", 99)):
        late, least = (
            statistics.quantiles((heard.took for heard in measured.heard), n=100)[part - 1]
            for measured in (ours, floor)
        )
        progress(f"{CROWD}/{name}: {late * 1000:.1f} ms, at least {least * 1000:.1f} ms")
        yield Line(bench=f"{CROWD}/{name}", value=round((late - least) * 1000, 2), unit="ms more")


def _both(case: Case, first: int, running: Servers) -> tuple[Measured, Measured]:
    """The floor and the gateway, the latter's records checked."""
    numbers = range(first, first + case.sessions + 1)
    floor = _measured(case, running.floor, numbers)
    before = running.engine_calls()
    ours = _measured(case, running.gateway, numbers)
    _check(case, numbers, running.folder, running.engine_calls() - before)
    return floor, ours


def _measured(case: Case, server: Server, numbers: range) -> Measured:
    """The first session's only turn warms the path up and is not counted."""
    anyio.run(_drive, case, server.url, numbers[:1], 1)
    before = server.cpu_seconds()
    heard = anyio.run(_drive, case, server.url, numbers[1:], TURNS[case.size.name])
    return Measured((server.cpu_seconds() - before) / case.calls, heard)


async def _drive(case: Case, url: str, numbers: range, count: int) -> list[Heard]:
    """Run `count` turns of the sessions, some at once; within each, one after the other."""
    waiting = iter(numbers)
    heard: list[Heard] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(connector=connector) as client,
        anyio.create_task_group() as group,
    ):

        async def work(number_at_once: int) -> None:
            if case.mode == "stream" or case is CROWD_CASE:
                # Agents do not all ask in the same millisecond.
                await anyio.sleep(SPREAD_SECONDS * number_at_once / case.at_once)
            for number in waiting:
                await _session(case, client, url, number, count, heard)

        for number_at_once in range(case.at_once):
            group.start_soon(work, number_at_once)
    return heard


async def _session(
    case: Case,
    client: aiohttp.ClientSession,
    url: str,
    number: int,
    count: int,
    heard: list[Heard],
) -> None:
    for turn in turns(case.size, TURNS[case.size.name])[:count]:
        body = turn.requests[case.request]
        heard.append(await call(client, url + PATHS[case.dialect], number, body))


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
        if parent is not None and (completion.mode == "tokens") != (case.mode == "tokens"):
            raise BrokenBenchError(f"{case.name}: the engine was asked with {completion.mode}")
