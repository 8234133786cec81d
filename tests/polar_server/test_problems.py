import logging
import socket
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route

from polar_server.problems import EXCEPTION_HANDLERS
from tests.polar_server.world import polar


async def test_a_bug_is_a_problem_that_names_the_route_and_no_secret():
    async def broken(request: Request) -> None:
        raise KeyError("what only the log may say")

    app = Starlette(routes=[Route("/broken", broken)], exception_handlers=dict(EXCEPTION_HANDLERS))
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as http:
        answer = await http.get("/broken")
    assert answer.status_code == 500
    assert answer.json() == {
        "title": "Internal error",
        "status": 500,
        "detail": "GET /broken broke: KeyError",
    }


async def test_a_caller_that_goes_in_the_middle_of_its_body_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    async with polar(tmp_path) as server:
        address = urlsplit(server.url)
        head = (
            f"POST /callbacks/session_result HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n"
            f"authorization: Bearer {server.token}\r\n\r\n{{"
        )
        with socket.create_connection((address.hostname or "", address.port or 0)) as connection:
            connection.sendall(head.encode())
            await anyio.sleep(0.05)
        await anyio.sleep(0.05)
        assert (await server.http.get("/health")).status_code == 200
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not list((tmp_path / "results").rglob("*.json"))
