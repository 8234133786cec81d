"""Stands between a gateway and its engine, passes every byte on, and remembers what both said."""

import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, NamedTuple, Self

import anyio
import httpx2
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from polar_gateway.testing.serve import serve


class Exchange(NamedTuple):
    """One chat completion: what was asked and the ids that the engine named in its answer."""

    request: dict[str, Any]
    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]


class Recorder:
    def __init__(self, engine_url: str) -> None:
        self.url = ""
        self.turns: list[Exchange] = []
        """What harnesses asked, without the gateway's own start-up questions."""
        self._stack = AsyncExitStack()
        self._http = httpx2.AsyncClient(base_url=engine_url, timeout=120)
        self._app = Starlette(
            routes=[Route("/{path:path}", self._forward, methods=["GET", "POST"])]
        )

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._http)
        self.url = await self._stack.enter_async_context(serve(self._app))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    async def _forward(self, request: Request) -> Response:
        body = await request.body()
        asked = self._http.build_request(
            request.method,
            request.url.path,
            content=body,
            headers={"content-type": "application/json"},
        )
        answer = await self._http.send(asked, stream=True)

        async def passed_on() -> AsyncIterator[bytes]:
            said = bytearray()
            try:
                async for chunk in answer.aiter_raw():
                    said += chunk
                    yield chunk
            finally:  # the gateway may hang up as soon as it has heard the last word
                asked_by = request.headers.get("x-request-id", "")
                if asked_by.startswith("msg_") and answer.status_code == 200:
                    self.turns.append(_exchange(msgspec.json.decode(body), said.decode()))
                with anyio.CancelScope(shield=True):
                    await answer.aclose()

        return StreamingResponse(
            passed_on(), answer.status_code, media_type=answer.headers["content-type"]
        )


def _exchange(request: dict[str, Any], said: str) -> Exchange:
    if not request.get("stream"):
        document = msgspec.json.decode(said)
        choice = document["choices"][0]
        entries = choice["logprobs"]["content"]
        return Exchange(
            request,
            document["prompt_token_ids"],
            choice["token_ids"],
            [entry["logprob"] for entry in entries],
        )
    events = [
        msgspec.json.decode(data) for data in re.findall(r"^data: ({.*)$", said, re.MULTILINE)
    ]
    choices = [choice for event in events for choice in event["choices"]]
    return Exchange(
        request,
        next(e["prompt_token_ids"] for e in events if e.get("prompt_token_ids")),
        [token for choice in choices for token in choice.get("token_ids") or []],
        [
            entry["logprob"]
            for choice in choices
            for entry in (choice.get("logprobs") or {}).get("content") or []
        ],
    )
