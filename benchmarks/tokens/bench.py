"""Drives sessions of 45 turns through the gateway, and reads what they left in it and on disk.

The sessions go on side by side, turn by turn, so that a turn's cost can be told; the decode-only
proxy, which reads each request and each reply once and does nothing with it, goes the same way.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import aiohttp
import anyio

from benchmarks.proxy.gateway import journal
from benchmarks.proxy.process import OTHER_CORE, Server, pin
from benchmarks.proxy.servers import PATHS, Servers, call, servers
from benchmarks.report import BrokenBenchError, Line, progress
from benchmarks.tokens import session45
from builders.base import StrategySpec
from builders.records import Mode
from harness_adapters.base import AgentSpec
from polar_gateway import recovery, stages
from polar_gateway.capture.reading import read_session
from polar_gateway.garbage import collect_rarely
from polar_gateway.protocol import SessionDispatchRequest

MODES: tuple[Mode, ...] = ("messages", "tokens")
AT_ONCE = 8
WARM_SESSIONS = AT_ONCE
"""Whole ones, before anything is read: what a process has once and for all is there then."""
TIMED_SESSIONS = 12
LIVE_SESSIONS = 50
"""Where memory is asked for; they are timed as well."""
BUILDS = 15
RECOVERED_SESSIONS, RECOVERED_TURNS = 1_000, 10
LEAST_SECONDS = 0.000_2
"""By which two servers' costs of a turn can be told apart."""
EARLY, LATE = slice(5, 10), slice(session45.TURNS - 5, session45.TURNS)


def run(wanted: Callable[[str], bool]) -> Iterator[Line]:
    pin(OTHER_CORE)
    for mode in MODES:
        yield from _mode(mode, wanted)
    if wanted("tokens/recover"):
        yield _recovered()


def _mode(mode: Mode, wanted: Callable[[str], bool]) -> Iterator[Line]:
    """The lines of one way to ask the engine."""
    suffix = "" if mode == "messages" else f"/{mode}"

    def is_wanted(*names: str) -> bool:
        return any(wanted(f"tokens/{name}{suffix}") for name in names)

    live = LIVE_SESSIONS if is_wanted("memory45") else 0
    timed = TIMED_SESSIONS if is_wanted("growth", "session45") else 0
    if not live and not timed and not is_wanted("journal45", "build45"):
        return
    count = WARM_SESSIONS + max(live, timed)
    turns = {session45.NAME: session45.TURNS}
    with servers(turns, count, floor=["decode"], gateway=[mode]) as running:
        driven = [(running.gateway, max(live, timed)), (running.floor, timed)]
        for server, _ in driven:
            _driven([(server, range(WARM_SESSIONS))])
        before = running.gateway.process.memory_info().rss
        ours, decoding = _driven(
            [(each, range(WARM_SESSIONS, WARM_SESSIONS + sessions)) for each, sessions in driven]
        )
        grown = running.gateway.process.memory_info().rss - before
        _check(running, range(count), (count + WARM_SESSIONS + timed) * session45.TURNS, mode)
        first = journal(running.folder, 0)
        figures = [
            Line(bench="journal45", value=first.stat().st_size / 1e6, unit="MB", bound=1.0),
        ]
        if live:
            figures.append(Line(bench="memory45", value=grown / live / 1e6, unit="MB", bound=0.8))
        if timed:
            figures += _compared(ours, decoding)
        if is_wanted("build45"):
            figures.append(Line(bench="build45", value=_built(first), unit="ms", bound=50))
        for line in figures:
            if is_wanted(line.bench):
                line.bench = f"tokens/{line.bench}{suffix}"
                line.value = round(line.value, 3)
                yield line


def _compared(ours: list[float], decoding: list[float]) -> list[Line]:
    """Growth of what the gateway costs more than the decode-only proxy, and all that both cost.

    That one decodes every id; where the gateway does with less, it costs less, and grows by 0.
    """
    more = [mine - least for mine, least in zip(ours, decoding, strict=True)]
    early, late = sum(more[EARLY]) / 5, sum(more[LATE]) / 5
    progress(
        f"a turn costs {early * 1000:.2f} ms more than decoding, at last {late * 1000:.2f} ms; "
        f"the session {sum(ours) * 1000:.0f} ms, decoding alone {sum(decoding) * 1000:.0f} ms"
    )
    growth = _ratio(max(late, 0.0), max(early, LEAST_SECONDS))
    whole = _ratio(sum(ours), sum(decoding))
    return [
        Line(bench="growth", value=late * 1000, unit="ms", ratio=growth, bound=1.5),
        Line(bench="session45", value=sum(ours) * 1000, unit="ms", ratio=whole, bound=2.5),
    ]


def _ratio(value: float, least: float) -> float:
    return round(value / least, 2)


def _built(path: Path) -> float:
    """CPU milliseconds from a journal to the checked trajectory of its session."""
    collect_rarely()
    took = []
    for _ in range(BUILDS):
        began = time.process_time()
        trajectory = stages.build(_dispatch("built"), read_session(path))
        took.append((time.process_time() - began) * 1000)
        if sum(trajectory.traces[-1].loss_mask) != session45.TURNS * session45.SAMPLED:
            raise BrokenBenchError("the session is not one trace of all its turns")
    return statistics.median(took)


def _recovered() -> Line:
    """How fast a node reads what its sessions left when it was killed in the middle of a call."""
    collect_rarely()
    with tempfile.TemporaryDirectory() as name:
        attempts = Path(name)
        with servers({session45.NAME: RECOVERED_TURNS}, 1) as running:
            _driven([(running.gateway, range(1))], RECOVERED_TURNS)
            written = journal(running.folder, 0)
            for number in range(RECOVERED_SESSIONS):
                folder = attempts / f"{number:04d}"
                recovery.accept(folder, _dispatch(f"s{number}"))
                shutil.copy(written, folder / recovery.JOURNAL)
                # The last record is half-written.
                with (folder / recovery.JOURNAL).open("r+b") as cut:
                    cut.truncate(written.stat().st_size - 100)
        began = time.process_time()
        for folder, dispatch in recovery.unfinished(attempts):
            result = recovery.result_of(folder, dispatch, "bench", "the node was killed")
            if result.completion_count != RECOVERED_TURNS - 1 or result.trajectory is None:
                raise BrokenBenchError(f"{folder} holds {result.completion_count} completions")
        took = time.process_time() - began
    return Line(
        bench="tokens/recover", value=round(RECOVERED_SESSIONS / took, 1), unit="sessions/s"
    )


def _dispatch(session_id: str) -> SessionDispatchRequest:
    return SessionDispatchRequest(
        session_id=session_id,
        task_id="bench",
        instruction="",
        agent=AgentSpec(harness="codex"),
        builder=StrategySpec(strategy="prefix_merging"),
    )


def _driven(
    servers: Sequence[tuple[Server, range]], turns: int = session45.TURNS
) -> list[list[float]]:
    """What each server's sessions cost: CPU seconds a session, turn by turn. The servers take turns,
    so that what else the machine does is the same for all."""
    return anyio.run(_drive, servers, turns)


async def _drive(servers: Sequence[tuple[Server, range]], turns: int) -> list[list[float]]:
    spent: list[list[float]] = [[] for _ in servers]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as client:
        for turn in session45.turns(turns):
            body = turn.requests["chat/plain"]
            for (server, numbers), seconds in zip(servers, spent, strict=True):
                before = server.cpu_seconds()
                await _ask_all(client, server.url + PATHS["chat"], numbers, body)
                seconds.append((server.cpu_seconds() - before) / max(len(numbers), 1))
    return spent


async def _ask_all(client: aiohttp.ClientSession, url: str, numbers: range, body: bytes) -> None:
    waiting = iter(numbers)

    async def work() -> None:
        for number in waiting:
            await call(client, url, number, body)

    async with anyio.create_task_group() as group:
        for _ in range(AT_ONCE):
            group.start_soon(work)


def _check(running: Servers, numbers: range, calls: int, mode: Mode) -> None:
    """The figures count only if every call was made once and is in the journals as it was said."""
    made = running.engine_calls()
    if made != calls:
        raise BrokenBenchError(f"{calls} calls by the client, {made} to the engine")
    for number in numbers:
        completions = read_session(journal(running.folder, number)).completions
        if any(completion.mode != mode for completion in completions[1:]):
            raise BrokenBenchError(f"session {number} was not asked with {mode}")
        last = completions[-1]
        context = last.prompt_length + len(last.sampled_ids)
        if len(completions) != session45.TURNS or abs(context - session45.TOKENS) > 100:
            raise BrokenBenchError(
                f"session {number} has {len(completions)} completions and {context} tokens"
            )
    progress(f"{calls} calls in {len(numbers)} sessions")
