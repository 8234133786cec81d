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

from benchmarks.proxy.conversation import END_OF_TURN, LINE_BREAK, SIZES, Turn, marked, turns
from benchmarks.proxy.process import serve_until_told
from benchmarks.tokens import session45

TOKEN_SECONDS = 0.010
CONVERSATIONS: dict[str, Callable[[int], list[Turn]]] = {
    **{size.name: partial(turns, size) for size in SIZES},
    session45.NAME: session45.turns,
}
_IDS = b'"prompt_token_ids":'
_FIRST_TEXT = re.compile(rb'"delta":\{"content":"[^"]+"')

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Engine:
    """Counts calls; `GET /calls` says how many there were."""

    def __init__(self, seconds: float, turns_of: dict[str, list[Turn]]) -> None:
        self._seconds = seconds
        self._turns = turns_of
        self._turn_of = {turn.prompt_ids: turn for each in turns_of.values() for turn in each}
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
        turn = self._turn(body)
        if scope["path"].endswith("/render"):
            ids = _rendered(body, turn)
            await self._respond(send, b'{"request_id":"bench","token_ids":%b}' % ids)
            return
        if turn is None:
            await self._respond(send, b'{"error":{"message":"no turn"}}', status=400)
            return
        self.calls += 1
        if b'"stream":true' in body:
            await self._stream(send, turn.events)
        else:
            if self._seconds:
                await asyncio.sleep(self._seconds)
            await self._respond(send, turn.answer)

    def _turn(self, body: bytes) -> Turn | None:
        """The turn that is asked for, by the ids of its prompt or by the mark in its messages."""
        if (at := body.rfind(_IDS)) >= 0:
            return self._turn_of.get(body[at + len(_IDS) : body.index(b"]", at) + 1])
        found = marked(body)
        return None if found is None else self._turns[found[0]][found[1]]

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


def _rendered(body: bytes, turn: Turn | None) -> bytes:
    """A conversation's ids; of one that is none of those here, such as the gateway's own with which
    it finds out how answers are closed, some that differ in an answer's word."""
    if turn is None:
        word = 7 if b"this" in body else 8
        return b"[1,%d,%d,%d]" % (word, END_OF_TURN, LINE_BREAK)
    return turn.closed_ids if b'"add_generation_prompt":false' in body else turn.prompt_ids


@asynccontextmanager
async def opened(arguments: list[str]) -> AsyncIterator[Engine]:
    seconds, *counted = arguments
    counts = dict(conversation.split(":") for conversation in counted)
    turns_of = {name: CONVERSATIONS[name](int(count)) for name, count in counts.items()}
    yield Engine(float(seconds), turns_of)


if __name__ == "__main__":
    serve_until_told(opened)
