"""Drives sessions of 45 turns through the gateway, and reads what they left in it and on disk.

The sessions go on side by side, turn by turn, so that a turn's cost can be told; the decode-only
proxy, which reads each request and each reply once and does nothing with it, goes the same way.
"""

from collections.abc import Callable, Iterator

import aiohttp
import anyio

from benchmarks.proxy.gateway import journal
from benchmarks.proxy.process import OTHER_CORE, Server, pin
from benchmarks.proxy.servers import PATHS, Servers, call, servers
from benchmarks.report import BrokenBenchError, Line, progress
from benchmarks.tokens import session45
from polar_gateway.capture.session import read_session

AT_ONCE = 8
WARM_SESSIONS = 3
"""Whole ones, before memory is read: what every process has once and for all is there then."""
LIVE_SESSIONS = 50


def run(wanted: Callable[[str], bool]) -> Iterator[Line]:
    pin(OTHER_CORE)
    names = ("tokens/memory45", "tokens/journal45")
    if any(map(wanted, names)):
        live = LIVE_SESSIONS if wanted("tokens/memory45") else 0
        with servers({session45.NAME: session45.TURNS}, WARM_SESSIONS + live) as running:
            for line in _kept(running, live):
                if wanted(line.bench):
                    yield line


def _kept(running: Servers, live: int) -> Iterator[Line]:
    """What sessions leave in the gateway's memory and on disk while they live."""
    gateway = running.gateway
    _driven(gateway, range(WARM_SESSIONS))
    before = gateway.process.memory_info().rss
    _driven(gateway, range(WARM_SESSIONS, WARM_SESSIONS + live))
    _check(running, range(WARM_SESSIONS + live))
    if live:
        grown = (gateway.process.memory_info().rss - before) / live
        yield Line(bench="tokens/memory45", value=round(grown / 1e6, 3), unit="MB", bound=0.8)
    size = journal(running.folder, 0).stat().st_size
    yield Line(bench="tokens/journal45", value=round(size / 1e6, 3), unit="MB", bound=1.0)


def _driven(server: Server, numbers: range) -> list[float]:
    """The server's CPU seconds for each turn of these sessions."""
    return anyio.run(_drive, server, numbers)


async def _drive(server: Server, numbers: range) -> list[float]:
    spent = []
    url = server.url + PATHS["chat"]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as client:
        for turn in session45.turns():
            before = server.cpu_seconds()
            waiting = iter(numbers)
            body = turn.requests["chat/plain"]

            async def work(waiting: Iterator[int], body: bytes) -> None:
                for number in waiting:
                    await call(client, url, number, body)

            async with anyio.create_task_group() as group:
                for _ in range(AT_ONCE):
                    group.start_soon(work, waiting, body)
            spent.append(server.cpu_seconds() - before)
    return spent


def _check(running: Servers, numbers: range) -> None:
    """The figures count only if every call was made once and is in the journals as it was said."""
    calls = running.engine_calls()
    if calls != len(numbers) * session45.TURNS:
        raise BrokenBenchError(f"{len(numbers)} sessions made {calls} calls to the engine")
    for number in numbers:
        completions = read_session(journal(running.folder, number)).completions
        last = completions[-1]
        context = last.prompt_length + len(last.sampled_ids)
        if len(completions) != session45.TURNS or abs(context - session45.TOKENS) > 100:
            raise BrokenBenchError(
                f"session {number} has {len(completions)} completions and {context} tokens"
            )
    progress(f"{calls} calls in {len(numbers)} sessions")
