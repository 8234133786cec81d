"""The least that a proxy can do: move bytes. `python -m benchmarks.proxy.floor ENGINE_URL [decode]`.

With `decode` it also reads what it moves, once: the JSON of each request and each whole reply.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from benchmarks.proxy.process import serve_until_told


@asynccontextmanager
async def opened(arguments: list[str]) -> AsyncIterator[Starlette]:
    url = f"{arguments[0]}/v1/chat/completions"
    read = msgspec.json.decode if "decode" in arguments else bytes
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def forward(request: Request) -> Response:
            body = await request.body()
            read(body)
            headers = {"content-type": "application/json"}
            answer = await client.post(url, data=body, headers=headers)
            kind = answer.headers["content-type"]
            if kind.startswith("text/event-stream"):
                return StreamingResponse(answer.content.iter_any(), media_type=kind)
            reply = await answer.read()
            read(reply)
            return Response(reply, media_type=kind)

        yield Starlette(routes=[Route("/{path:path}", forward, methods=["POST"])])


if __name__ == "__main__":
    serve_until_told(opened)
