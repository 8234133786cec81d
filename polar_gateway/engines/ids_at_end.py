"""A stream whose ids come behind everything else, told so that nobody acts before they are there."""

from collections.abc import AsyncIterator

from builders.records import Floats, Ids
from polar_gateway.dialects.turn import BlockEnd, BlockStart, TurnEvent
from polar_gateway.engines.base import EngineReply
from polar_gateway.engines.streams import AnswerStream


class IdsAtEnd:
    """An `EngineStream` in which the end of the first tool call, from which on a harness may act,
    and all that follows it wait until the ids have come."""

    def __init__(self, stream: AnswerStream) -> None:
        self._stream = stream
        self._in_call = False
        self._withheld: list[TurnEvent] | None = None

    def __aiter__(self) -> AsyncIterator[list[TurnEvent]]:
        return self

    async def __anext__(self) -> list[TurnEvent]:
        while True:
            try:
                events = await anext(self._stream)
            except StopAsyncIteration:
                if not self._withheld:
                    raise
                events, self._withheld = self._withheld, []
                return events
            shown = self._show(events)
            if shown:
                return shown

    def _show(self, events: list[TurnEvent]) -> list[TurnEvent]:
        if self._withheld is not None:
            self._withheld += events
            return []
        for number, event in enumerate(events):
            if isinstance(event, BlockStart):
                self._in_call = event.kind == "call"
            elif isinstance(event, BlockEnd) and self._in_call and self.prompt_ids is None:
                self._withheld = events[number:]
                return events[:number]
        return events

    @property
    def prompt_ids(self) -> Ids | None:
        return self._stream.prompt_ids

    @property
    def prompt_tokens(self) -> int:
        return self._stream.prompt_tokens

    @property
    def sampled_tokens(self) -> int:
        return self._stream.sampled_tokens

    def sampled_so_far(self) -> tuple[Ids, Floats]:
        return self._stream.sampled_so_far()

    @property
    def reply(self) -> EngineReply:
        return self._stream.reply

    async def aclose(self) -> None:
        await self._stream.aclose()
