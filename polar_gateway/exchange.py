"""The harness's end of one HTTP exchange on the model listener."""

import time
from asyncio import sleep
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import anyio

from polar_gateway.dialects.turn import Dialect, ErrorKind
from polar_gateway.request_body import RefusedError, invalid, too_large

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

JSON = "application/json"


class Intake:
    """How much of their unfinished request bodies the sessions have sent, each bounded."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: Counter[str] = Counter()

    @contextmanager
    def of(self, session_id: str) -> Iterator[Callable[[int], None]]:
        """Yields what to call with the size of each piece; raises RefusedError past the limit."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            taken += size
            self._held[session_id] += size
            if self._held[session_id] > self._limit:
                message = f"this session is sending more than {self._limit} bytes at once"
                raise RefusedError(
                    ErrorKind(status=429, code="rate_limit", message=message, retry_after=1)
                )

        try:
            yield take
        finally:
            self._held[session_id] -= taken
            if not self._held[session_id]:
                del self._held[session_id]


class Exchange:
    """One request of a harness and our answer; nothing more is written once the harness is gone."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._writing = anyio.Lock(fast_acquire=True)
        """Held while something is written: who waits for a slow reader is not overtaken."""
        self._ending = False
        self.headers: list[tuple[bytes, bytes]] = []
        """What the answer shall carry besides its type and length."""
        self.gone = False
        self.started = False
        self.last_write = 0.0
        """On the monotonic clock."""

    def identify(self, dialect: Dialect, request_id: str) -> None:
        """Name the request in the answer's headers, as its provider does."""
        self.headers.append((dialect.request_id_header.encode(), request_id.encode()))

    async def body(self, limit: int, take: Callable[[int], None]) -> bytes:
        """The whole request body; `take` hears of its pieces. Raises RefusedError past `limit`."""
        message = await self._receive()
        whole: bytes = message.get("body", b"")
        if message.get("more_body"):
            parts, size = [whole], len(whole)
            take(size)
            while message.get("more_body"):
                message = await self._receive()
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                take(len(parts[-1]))
                if size > limit:
                    break
            whole = b"".join(parts)
        if message["type"] == "http.disconnect":
            raise RefusedError(invalid("the request ended in the middle of its body"))
        if len(whole) > limit:
            raise RefusedError(too_large(f"is larger than {limit} bytes"))
        return whole

    async def wait_gone(self) -> None:
        """Return when the harness has closed its connection, which it is heard to do only here."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True

    async def answer(self, status: int, body: bytes) -> bool:
        """Send a whole answer; False when the harness was gone before it was written, or has had
        its answer.

        Where `write` has sent the headers of a 200 already, an answer with another status can only
        be told by breaking off, which every HTTP client takes for a failure of the network.
        """
        if self._ending:
            return False
        self._ending = True
        async with self._writing:
            if not self.started:
                length = (b"content-length", b"%d" % len(body))
                await self._start(status, JSON, [length])
            elif status != 200:
                return False
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
            return await self._finish()

    async def refuse(self, dialect: Dialect, kind: ErrorKind) -> None:
        """Answer with an error in the dialect's shape."""
        if kind.retry_after is not None:
            self.headers.append((b"retry-after", b"%d" % kind.retry_after))
        await self.answer(dialect.error_status(kind), dialect.error_body(kind))

    async def write(self, data: bytes, content_type: str) -> bool:
        """Send a piece of an answer that comes bit by bit, headers first; False when the harness
        was gone before, or the answer ended."""
        async with self._writing:
            if self.gone or self._ending:
                return False
            self.last_write = time.monotonic()
            if not self.started:
                await self._start(200, content_type, [(b"cache-control", b"no-cache")])
            if data:
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
            return not self.gone

    async def end(self) -> bool:
        """End an answer that came bit by bit; False when the harness was gone before its end."""
        if self._ending:
            return False
        self._ending = True
        async with self._writing:
            return await self._finish()

    async def _start(self, status: int, content_type: str, more: list[tuple[bytes, bytes]]) -> None:
        headers = [(b"content-type", content_type.encode()), *more, *self.headers]
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _finish(self) -> bool:
        if not self.gone:
            # The server drops what is written to a lost connection without a word. One turn of
            # the loop lets `wait_gone` say so first.
            await sleep(0)
        delivered = not self.gone
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        return delivered
