import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
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


async def counts(
    scope: Message,
    receive: Callable[[], Awaitable[Message]],
    send: Callable[[Message], Awaitable[None]],
) -> None:
    size, more = 0, True
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"%d" % size})


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


ENDLESS = {
    "a line": b"GET /",
    "a header": b"GET / HTTP/1.1\r\nhost: x\r\nx-a: ",
    "a trailer": b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx-a: ",
}


@pytest.mark.parametrize("what", ENDLESS)
async def test_a_connection_whose_headers_have_no_end_is_closed(what: str) -> None:
    async with ModelListener(says_hello, "127.0.0.1", 0) as listener:
        _, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(ENDLESS[what])
        pieces = 0
        while pieces < 100 and not writer.transport.is_closing():
            writer.write(b"a" * (1 << 16))
            await asyncio.sleep(0.005)
            pieces += 1
        assert pieces < 100
        writer.transport.abort()
        assert await get(f"http://127.0.0.1:{listener.port}/") == "hello"


@pytest.mark.parametrize(
    ("path", "shape"),
    [("/v1/messages?beta=true", b'{"type":"error"'), ("/v1/responses", b'{"error"')],
)
async def test_headers_without_an_end_are_answered_in_the_dialect(path: str, shape: bytes) -> None:
    async with ModelListener(says_hello, "127.0.0.1", 0, max_header_bytes=1000) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\nx-a: " % path.encode() + b"a" * 2000)
        said = await reader.read()
        assert said.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 413 "))
        head, _, body = said.partition(b"\r\n\r\n")
        assert body.startswith(shape)
        assert b"content-length: %d\r\n" % len(body) in head + b"\r\n"
        assert b"the headers are larger than 1000 bytes" in body
        writer.close()


async def test_a_body_is_no_header_however_it_is_cut() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield b"x" * 1000

    async with (
        ModelListener(counts, "127.0.0.1", 0) as listener,
        aiohttp.ClientSession() as client,
    ):
        url = f"http://127.0.0.1:{listener.port}/"
        headers = {"x-long": "a" * 30_000}
        for body in (pieces(), b"x" * 200_000, b"x" * 200_000):
            async with client.post(url, data=body, headers=headers) as response:
                assert await response.text() == "200000"


async def test_one_request_may_come_before_the_answer_to_the_one_before_it() -> None:
    ask = b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n"
    async with ModelListener(says_hello, "127.0.0.1", 0) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(ask + ask)
        said = b""
        while said.count(b"hello") < 2:
            said += await reader.read(1000)
        writer.write(ask + ask + ask)
        assert b"hello" not in await reader.read()
        writer.close()


async def test_a_client_that_reads_nothing_of_its_answer_is_taken_for_gone() -> None:
    ended = anyio.Event()

    async def says_much(
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        much = {"type": "http.response.body", "body": b"x" * (64 << 20), "more_body": True}
        await send(much)
        await send({"type": "http.response.body", "body": b"the end"})
        ended.set()

    async with ModelListener(says_much, "127.0.0.1", 0, stall_seconds=1.0) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.sleep(0.2)
        assert not ended.is_set(), "it waits for its client"
        with anyio.fail_after(5):
            await ended.wait()
            assert b"the end" not in (await reader.read())[-20:]
        writer.close()
        # Who reads slowly is waited for.
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        await asyncio.sleep(0.2)
        with anyio.fail_after(5):
            assert b"the end" in (await reader.read())[-20:]
        writer.close()
