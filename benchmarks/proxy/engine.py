"""A server that answers like vLLM from bytes made beforehand.

`python -m benchmarks.proxy.engine SECONDS CONVERSATION:COUNT...`: how long it takes for a whole
answer, and the number of turns of each conversation. The first text of a streamed answer is the
time of its sending. It renders, and takes prompts as ids: only the right ones.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from benchmarks.proxy.conversation import SIZES, Turn, marked, turns
from benchmarks.proxy.process import serve_until_told
from benchmarks.tokens import session45

TOKEN_SECONDS = 0.010
CONVERSATIONS: dict[str, Callable[[int], list[Turn]]] = {
    **{size.name: partial(turns, size) for size in SIZES},
    session45.NAME: session45.turns,
}
_FIRST_TEXT = re.compile(rb'"delta":\{"content":"[^"]+"')

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Engine:
    """Counts calls; `GET /calls` says how many there were."""

    def __init__(self, seconds: float, turns_of: dict[str, list[Turn]]) -> None:
        self._seconds = seconds
        self._turns = turns_of
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
        conversation, number = marked(body)
        turn = self._turns[conversation][number]
        if scope["path"].endswith("/render"):
            closed = b'"add_generation_prompt":false' in body
            ids = turn.closed_ids if closed else turn.prompt_ids
            await self._respond(send, b'{"request_id":"bench","token_ids":%b}' % ids)
            return
        if b'"kv_transfer_params"' in body and turn.prompt_ids not in body:
            await self._respond(send, b'{"error":{"message":"other ids"}}', status=400)
            return
        self.calls += 1
        if b'"stream":true' in body:
            await self._stream(send, turn.events)
        else:
            if self._seconds:
                await asyncio.sleep(self._seconds)
            await self._respond(send, turn.answer)

    async def _respond(self, send: Send, data: bytes, status: int = 200) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
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
    seconds, *counted = arguments
    counts = dict(conversation.split(":") for conversation in counted)
    turns_of = {name: CONVERSATIONS[name](int(count)) for name, count in counts.items()}
    yield Engine(float(seconds), turns_of)


if __name__ == "__main__":
    serve_until_told(opened)
