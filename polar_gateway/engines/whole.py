"""A whole answer in the form of a streamed one, for engines that lose ids in streams."""

import math
from array import array
from collections.abc import AsyncIterator, Sequence

from builders.records import Floats, Ids
from polar_gateway.dialects.turn import (
    Block,
    BlockDelta,
    BlockEnd,
    BlockStart,
    Call,
    Text,
    TurnEvent,
)
from polar_gateway.engines.base import EngineReply


def events_of(blocks: Sequence[Block], *, cut: bool) -> list[TurnEvent]:
    """Finished blocks as the events of a stream, each in one piece; `cut` says that the output
    limit ended the last one."""
    events: list[TurnEvent] = []
    for block in blocks:
        if isinstance(block, Call):
            events.append(BlockStart(kind="call", id=block.id, name=block.name))
            text = block.arguments
        else:
            events.append(BlockStart(kind="text" if isinstance(block, Text) else "reasoning"))
            text = block.text
        if text:
            events.append(BlockDelta(text=text))
        events.append(BlockEnd(cut=cut and block is blocks[-1]))
    return events


class WholeAsStream:
    """A finished reply as an `EngineStream` of one batch."""

    def __init__(self, reply: EngineReply) -> None:
        self.reply = reply
        self._told = False
        self._seen = False

    def __aiter__(self) -> AsyncIterator[list[TurnEvent]]:
        return self

    async def __anext__(self) -> list[TurnEvent]:
        if self._told:
            raise StopAsyncIteration
        self._told = True
        return events_of(self.reply.blocks, cut=self.reply.finish_reason == "length")

    @property
    def prompt_ids(self) -> Ids | None:
        return self.reply.prompt_ids

    @property
    def prompt_tokens(self) -> int:
        return self.reply.usage.prompt_tokens

    @property
    def sampled_tokens(self) -> int:
        return len(self.reply.sampled_ids) if self._told else 0

    def sampled_so_far(self) -> tuple[Ids, Floats]:
        if self._seen:
            return array("i"), array("f")
        self._seen = True
        ids, logprobs = self.reply.sampled_ids, self.reply.logprobs
        return ids, array("f", [math.nan] * len(ids)) if logprobs is None else logprobs

    async def aclose(self) -> None:
        """There is nothing to end."""
