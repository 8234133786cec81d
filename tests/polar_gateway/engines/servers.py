"""Loopback servers that stand for a vLLM in a certain condition; each is an ASGI application."""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import anyio

RECORDINGS = Path(__file__).with_name("recordings")
"""Answers of vLLM 0.32 on a tiny random model."""

PAUSE = b""
"""In place of a piece of a stream: time for what was sent to arrive on its own."""

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def recording(name: str) -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads((RECORDINGS / f"{name}.json").read_text())
    return recorded


def sse(events: list[Any]) -> bytes:
    """Recorded events as they were on the wire."""
    return b"".join(
        f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
        for event in events
    )


class Answers:
    """Gives one answer after the other, the last one for ever; keeps what it was asked.

    An answer is a status with a body, or a list of pieces of a stream, each sent on its own.
    """

    def __init__(self, *answers: tuple[int, Any] | list[bytes]) -> None:
        self._answers = list(answers)
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []

    @classmethod
    def recorded(cls, name: str) -> "Answers":
        known = recording(name)
        if "events" in known:
            return cls([sse(known["events"])])
        return cls((known["status"], known["response"]))

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.paths.append(scope["path"])
        self.headers.append({k.decode(): v.decode() for k, v in scope["headers"]})
        self.requests.append(json.loads(body or b"{}"))
        answer = self._answers[0] if len(self._answers) == 1 else self._answers.pop(0)
        if isinstance(answer, list):
            await respond(send, 200, *answer, kind=b"text/event-stream")
        else:
            status, document = answer
            data = document if isinstance(document, bytes) else json.dumps(document).encode()
            await respond(send, status, data)


async def respond(
    send: Send, status: int, *pieces: bytes, kind: bytes = b"application/json"
) -> None:
    await send(
        {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]}
    )
    for piece in pieces:
        if piece == PAUSE:
            await anyio.sleep(0.05)
            continue
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


class Instead:
    """Another server, but for some of its paths, which are answered with what `changes` has.

    A change is a status with a body, or makes the answer out of the request and the one that the
    other server gave.
    """

    def __init__(self, app: Any, changes: dict[str, Any]) -> None:
        self._app = app
        self._changes = changes

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        change = self._changes.get(scope.get("path", ""))
        if change is None or (callable(change) and scope["method"] == "GET"):
            await self._app(scope, receive, send)
        elif isinstance(change, tuple):
            await Answers(change)(scope, receive, send)
        else:
            await self._changed(change, scope, receive, send)

    async def _changed(
        self, change: Any, scope: MutableMapping[str, Any], receive: Receive, send: Send
    ) -> None:
        asked, given = b"", b""

        async def listen() -> MutableMapping[str, Any]:
            nonlocal asked
            message = await receive()
            asked += message.get("body", b"")
            return message

        async def keep(message: MutableMapping[str, Any]) -> None:
            nonlocal given
            given += message.get("body", b"")

        await self._app(scope, listen, keep)
        request = json.loads(asked)
        if request.get("stream"):
            await respond(send, 200, given, kind=b"text/event-stream")
        else:
            await respond(send, 200, json.dumps(change(request, json.loads(given))).encode())
