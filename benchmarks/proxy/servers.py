"""An engine, and the two that are compared before it: the floor and the gateway."""

import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp
import anyio

from benchmarks.proxy.gateway import key
from benchmarks.proxy.process import MEASURED_CORE, OTHER_CORE, Server, started
from benchmarks.report import BrokenBenchError

PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages"}
_SENT = re.compile(rb"@(\d+\.\d{6})@")
"""When the engine sent the first text of a streamed answer, on the clock that all processes share."""


class Servers(NamedTuple):
    engine: Server
    floor: Server
    gateway: Server
    folder: Path
    """Of the gateway's journals."""

    def engine_calls(self) -> int:
        async def ask() -> int:
            async with (
                aiohttp.ClientSession() as client,
                client.get(self.engine.url + "/calls") as response,
            ):
                return int(await response.text())

        return anyio.run(ask)


@contextmanager
def servers(
    turns: Mapping[str, int],
    sessions: int,
    *,
    seconds: float = 0.0,
    floor: Sequence[str] = (),
    gateway: Sequence[str] = (),
) -> Iterator[Servers]:
    """An engine with so many turns of each conversation that takes so long for an answer, and the
    others with these options."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        counts = [f"{conversation}:{count}" for conversation, count in turns.items()]
        engine = stack.enter_context(
            started("benchmarks.proxy.engine", OTHER_CORE, seconds, *counts)
        )
        moving = stack.enter_context(
            started("benchmarks.proxy.floor", MEASURED_CORE, engine.url, *floor)
        )
        ours = stack.enter_context(
            started(
                "benchmarks.proxy.gateway", MEASURED_CORE, engine.url, folder, sessions, *gateway
            )
        )
        yield Servers(engine, moving, ours, folder)


class Heard(NamedTuple):
    """What the client noticed of one call, in seconds."""

    took: float
    first_event: float | None
    """From the engine's sending of the first text to its arrival; None for a whole answer."""


async def call(client: aiohttp.ClientSession, url: str, number: int, body: bytes) -> Heard:
    """One call of that session. Raises BrokenBenchError when it is not answered."""
    headers = {"authorization": f"Bearer {key(number)}", "content-type": "application/json"}
    began = time.monotonic()
    first_event: float | None = None
    async with client.post(url, data=body, headers=headers) as response:
        if response.status != 200:
            said = (await response.text())[:300]
            raise BrokenBenchError(f"{url} answered {response.status}: {said}")
        async for piece in response.content.iter_any():
            if first_event is None and (sent := _SENT.search(piece)):
                first_event = time.monotonic() - float(sent[1])
    return Heard(time.monotonic() - began, first_event)
