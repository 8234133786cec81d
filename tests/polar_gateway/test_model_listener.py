import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import aiohttp
import anyio
import pytest

from polar_gateway.model_listener import ModelListener

Message = MutableMapping[str, Any]


async def says_hello(
    scope: Message,
    receive: Callable[[], Awaitable[Message]],
    send: Callable[[Message], Awaitable[None]],
) -> None:
    if scope["path"] == "/slow":
        await anyio.sleep(0.2)
    if scope["path"] == "/forever":
        await anyio.sleep_forever()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


async def get(url: str) -> str:
    async with aiohttp.ClientSession() as client, client.get(url) as response:
        return await response.text()


async def test_it_answers_on_a_free_port_until_it_ends() -> None:
    async with ModelListener(says_hello, "127.0.0.1", 0) as listener:
        assert listener.port > 0
        assert await get(f"http://127.0.0.1:{listener.port}/") == "hello"
    with pytest.raises(aiohttp.ClientConnectionError):
        await get(f"http://127.0.0.1:{listener.port}/")


async def test_a_taken_port_is_an_os_error() -> None:
    async with ModelListener(says_hello, "127.0.0.1", 0) as listener:
        with pytest.raises(OSError, match="in use"):
            await ModelListener(says_hello, "127.0.0.1", listener.port).__aenter__()


async def test_sockets_come_and_go_beside_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as extra:
        async with ModelListener(says_hello, "127.0.0.1", 0) as listener:
            port = extra.getsockname()[1]
            remove = await listener.add_socket(extra)
            assert await get(f"http://127.0.0.1:{port}/") == "hello"
            remove()
            remove()
            assert await get(f"http://127.0.0.1:{listener.port}/") == "hello"
            again = await listener.add_socket(extra)
            assert await get(f"http://127.0.0.1:{port}/") == "hello"
            again()
            assert extra.fileno() >= 0


async def test_a_unix_socket_is_served_like_any_other(tmp_path: Any) -> None:
    path = str(tmp_path / "model.sock")
    with socket.socket(socket.AF_UNIX) as extra:
        extra.bind(path)
        extra.listen()
        async with ModelListener(says_hello, "127.0.0.1", 0) as listener:
            await listener.add_socket(extra)
            connector = aiohttp.UnixConnector(path)
            async with (
                aiohttp.ClientSession(connector=connector) as client,
                client.get("http://model/") as response,
            ):
                assert await response.text() == "hello"


async def test_an_answer_on_its_way_is_finished_before_the_end() -> None:
    said: list[str] = []

    async def ask(url: str) -> None:
        said.append(await get(url))

    async with (
        anyio.create_task_group() as group,
        ModelListener(says_hello, "127.0.0.1", 0) as listener,
    ):
        group.start_soon(ask, f"http://127.0.0.1:{listener.port}/slow")
        await asyncio.sleep(0.1)
    assert said == ["hello"]


async def test_an_answer_that_never_comes_does_not_hold_up_the_end() -> None:
    async def ask(url: str) -> None:
        with pytest.raises(aiohttp.ClientError):
            await get(url)

    began = time.monotonic()
    async with (
        anyio.create_task_group() as group,
        ModelListener(says_hello, "127.0.0.1", 0, shutdown_seconds=0.1) as listener,
    ):
        group.start_soon(ask, f"http://127.0.0.1:{listener.port}/forever")
        await asyncio.sleep(0.1)
    assert time.monotonic() - began < 3
