"""A server that answers like vLLM from bytes made beforehand.

`python -m benchmarks.proxy.engine SECONDS COUNT...`: how long it takes for a whole answer, and the
number of turns of each size. The first text of a streamed answer is the time of its sending.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.proxy.conversation import SIZES, Turn, turn_number, turns
from benchmarks.proxy.process import serve_until_told

TOKEN_SECONDS = 0.010
_FIRST_TEXT = re.compile(rb'"delta":\{"content":"[^"]+"')

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Engine:
    """Counts calls; `GET /calls` says how many there were."""

    def __init__(self, seconds: float, turns_of: dict[str, int]) -> None:
        self._seconds = seconds
        self._turns: dict[str, list[Turn]] = {
            size.name: turns(size, turns_of[size.name]) for size in SIZES
        }
        self.calls = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["method"] == "GET":
            await self._respond(send, b"%d" % self.calls)
            return
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.calls += 1
        size = "small" if len(body) < 40_000 else "large"
        turn = self._turns[size][turn_number(body)]
        if b'"stream":true' in body:
            await self._stream(send, turn.events)
        else:
            if self._seconds:
                await asyncio.sleep(self._seconds)
            await self._respond(send, turn.answer)

    async def _respond(self, send: Send, data: bytes) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    async def _stream(self, send: Send, events: list[bytes]) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        due = time.monotonic()
        for number, event in enumerate(events):
            await asyncio.sleep(due - time.monotonic())
            if number == 1:
                sent = b'"delta":{"content":"@%.6f@"' % time.monotonic()
                event = _FIRST_TEXT.sub(sent, event)
            await send({"type": "http.response.body", "body": event, "more_body": True})
            due += TOKEN_SECONDS
        await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def opened(arguments: list[str]) -> AsyncIterator[Engine]:
    seconds, *counts = arguments
    turns_of = {size.name: int(count) for size, count in zip(SIZES, counts, strict=True)}
    yield Engine(float(seconds), turns_of)


if __name__ == "__main__":
    serve_until_told(opened)
