"""A streamed answer as it arrives: server-sent events in, turn events out."""

from collections.abc import AsyncIterator, Callable, Iterable

import aiohttp

from builders.records import Floats, Ids
from polar_gateway.dialects.turn import TurnEvent
from polar_gateway.engines.answers import Assembly, Piece
from polar_gateway.engines.base import EngineReply
from polar_gateway.engines.refusals import broke_off, unreachable


class AnswerStream:
    """One streamed generation of an engine that speaks chat completions; see `EngineStream`."""

    def __init__(
        self,
        response: aiohttp.ClientResponse,
        assembly: Assembly,
        read: Callable[[bytes], Iterable[Piece]],
        check: Callable[[list[str]], None],
    ) -> None:
        self.notes: list[str] = []
        self._response = response
        self._read_event = read
        """What an event's data says; raises EngineError."""
        self._check = check
        """Told the findings of the whole."""
        self._unended: list[bytes] = []
        """The parts of a line whose end has not come: the first one holds all of a prompt's ids."""
        self._first: list[TurnEvent] = []
        self._assembly = assembly
        self._ended = False
        self._handed_on = 0

    async def begin(self) -> None:
        """Wait for the first event of the generation; closes the connection if none comes."""
        try:
            while not self._first and not self._ended:
                self._first = await self._read()
        except BaseException:
            self._response.close()
            raise

    def __aiter__(self) -> AsyncIterator[list[TurnEvent]]:
        return self

    async def __anext__(self) -> list[TurnEvent]:
        events, self._first = self._first, []
        while not events and not self._ended:
            events = await self._read()
        self._handed_on = self._assembly.told_tokens
        if not events:
            raise StopAsyncIteration
        return events

    async def _read(self) -> list[TurnEvent]:
        try:
            data = await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise unreachable(error) from error
        if not data:
            raise broke_off("the connection ended in the middle of an answer")
        self._unended.append(data)
        events: list[TurnEvent] = []
        if b"\n" not in data:
            return events
        *lines, rest = b"".join(self._unended).split(b"\n")
        self._unended = [rest] if rest else []
        for line in lines:
            if not line.startswith(b"data:"):
                continue  # an empty line or a keep-alive comment
            payload = line[5:].strip()
            if payload == b"[DONE]":
                self._ended = True
                events += self._assembly.finish()
                self._check(self._assembly.reply().findings)
                break
            for piece in self._read_event(payload):
                events += self._assembly.add(piece)
        return events

    @property
    def prompt_ids(self) -> Ids | None:
        return self._assembly.prompt.ids

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids or ())

    @property
    def sampled_tokens(self) -> int:
        return self._handed_on

    def sampled_so_far(self) -> tuple[Ids, Floats]:
        return self._assembly.unseen()

    @property
    def reply(self) -> EngineReply:
        reply = self._assembly.reply()
        reply.notes = self.notes
        return reply

    async def aclose(self) -> None:
        if self._ended:
            self._response.release()
        else:
            self._response.close()  # a closed connection is how an engine is told to stop
