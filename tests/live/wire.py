"""Stands between harnesses and a gateway's model listener, and cuts a connection when told to."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import anyio
import anyio.abc

GATEWAY_HOST = "127.0.0.2"
"""Where the model listener is then: harnesses are told its port, on 127.0.0.1."""

HEAD = re.compile(rb"^(?:GET|HEAD|POST) (\S+) HTTP/1\.1\r\n", re.MULTILINE)


class Cut(NamedTuple):
    """Where to break an answer off: behind the `nth` `mark` of the `stream`-th streamed one."""

    stream: int
    mark: bytes
    nth: int = 1


class Wire:
    """Passes all on, both ways."""

    def __init__(self, port: int, cuts: tuple[Cut, ...]) -> None:
        self.port = port
        self.requests: list[str] = []
        """Method and path of what harnesses asked for, in order."""
        self.events = 0
        """How many came back in streamed answers."""
        self.cuts: list[Cut] = []
        """Those that were made."""
        self._wanted = list(cuts)
        self._streams = 0

    async def _carry(self, harness: anyio.abc.SocketStream) -> None:
        async with (
            harness,
            await anyio.connect_tcp(GATEWAY_HOST, self.port) as gateway,
            anyio.create_task_group() as both,
        ):
            both.start_soon(self._up, harness, gateway)
            await self._down(gateway, harness)
            both.cancel_scope.cancel()

    async def _up(self, harness: anyio.abc.ByteStream, gateway: anyio.abc.SocketStream) -> None:
        try:
            async for data in harness:
                self.requests += [path.decode() for path in HEAD.findall(data)]
                await gateway.send(data)
            await gateway.send_eof()
        except (anyio.BrokenResourceError, OSError):
            pass  # whoever closed it does not want to hear

    async def _down(self, gateway: anyio.abc.ByteStream, harness: anyio.abc.ByteStream) -> None:
        number, said = 0, b""
        try:
            async for data in gateway:
                if b"text/event-stream" in data:
                    self._streams += 1
                    number, said = self._streams, b""
                self.events += data.count(b"\n\n")
                said += data
                cut = next((cut for cut in self._wanted if cut.stream == number), None)
                places = list(re.finditer(re.escape(cut.mark), said)) if cut else []
                if cut is not None and len(places) >= cut.nth:
                    end = places[cut.nth - 1].end() - (len(said) - len(data))
                    await harness.send(data[: max(end, 0)])
                    self._wanted.remove(cut)
                    self.cuts.append(cut)
                    return
                await harness.send(data)
        except (anyio.BrokenResourceError, OSError):
            pass


@asynccontextmanager
async def wire(cuts: tuple[Cut, ...] = ()) -> AsyncIterator[Wire]:
    """On a free port, which the model listener must take on GATEWAY_HOST."""
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
    async with listener, anyio.create_task_group() as group:
        between = Wire(listener.extra(anyio.abc.SocketAttribute.local_port), cuts)
        group.start_soon(listener.serve, between._carry)
        yield between
        group.cancel_scope.cancel()
