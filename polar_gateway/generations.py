"""Answers on their way, and all who wait for them.

A harness that lost its connection, or its patience, asks again. It is then given the answer that is
being sampled for it, or was, and not a second sample: one turn of a conversation is sampled once.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence

import anyio
import msgspec

from polar_gateway.capture.session import CHAIN_HEADERS, OpenCall
from polar_gateway.dialects.turn import (
    BlockDelta,
    BlockEnd,
    BlockStart,
    Dialect,
    ErrorKind,
    ModelRequest,
    Turn,
    TurnEnd,
    TurnEvent,
)
from polar_gateway.engines.base import EngineStream
from polar_gateway.engines.whole import events_of
from polar_gateway.exchange import JSON, Exchange

MAX_UNCLAIMED = 64
"""Answers that nobody received and that may still be asked for, of one session."""

RETRY_MARK = "x-stainless-retry-count"
"""In which the SDKs of Anthropic and OpenAI say how often they have asked already."""

SIGN_OF_LIFE = b" "
"""Of a whole answer: JSON may begin with any number of spaces."""


class Asked(msgspec.Struct, kw_only=True, frozen=True):
    """What makes two calls the same call, apart from how the answer shall be brought."""

    dialect: str
    chain: Mapping[str, str]
    request: ModelRequest


def asked(dialect: str, headers: Mapping[str, str], request: ModelRequest) -> Asked:
    chain = {name: headers[name] for name in CHAIN_HEADERS if name in headers}
    return Asked(dialect=dialect, chain=chain, request=request)


def is_marked(headers: Mapping[str, str]) -> bool:
    """Whether a request says that it was made before."""
    return headers.get(RETRY_MARK, "0") not in ("", "0")


def same_call(one: Asked, other: Asked, *, ended_by_length: bool = False) -> bool:
    """Whether the two would be asked of the engine alike, for the same conversation.

    `stream` and what belongs to it do not count. The output limit counts where it has shaped the
    answer that is there: a harness that asks again with a higher one wants another.
    """
    a, b = one.request, other.request
    return (
        one.dialect == other.dialect
        and one.chain == other.chain
        and a.model == b.model
        and a.kind == b.kind
        and (not ended_by_length or a.max_tokens == b.max_tokens)
        and len(a.messages) == len(b.messages)
        and a.messages[-1:] == b.messages[-1:]
        and a.sampling == b.sampling
        and a.tool_choice == b.tool_choice
        and a.parallel_tool_calls == b.parallel_tool_calls
        and a.response_format == b.response_format
        and a.template_kwargs == b.template_kwargs
        and a.tools == b.tools
        and a.messages == b.messages
    )


class Listener:
    """A harness that waits for an answer, streamed or whole, in its dialect."""

    def __init__(
        self,
        exchange: Exchange,
        dialect: Dialect,
        request: ModelRequest,
        completion_id: str,
        created: int,
    ) -> None:
        self.exchange = exchange
        self._dialect = dialect
        self._request = request
        self._streamer = None
        if request.stream:
            self._streamer = dialect.streamer(request, completion_id, created)
        self._opened = False
        exchange.headers.append((dialect.request_id_header.encode(), completion_id.encode()))

    def _opening(self, prompt_tokens: int) -> bytes:
        """What a streamed answer begins with; empty from the second time on."""
        if self._opened or self._streamer is None:
            return b""
        self._opened = True
        return self._streamer.open(prompt_tokens)

    async def hear(self, events: Sequence[TurnEvent], prompt_tokens: int) -> None:
        if self._streamer is None or self.exchange.gone:
            return
        data = self._opening(prompt_tokens)
        for event in events:
            data += self._streamer.event(event)
        await self.exchange.write(data, self._streamer.content_type)

    async def show_life(self) -> None:
        if self._streamer is None:
            await self.exchange.write(SIGN_OF_LIFE, JSON)
        else:
            data = self._opening(0) or self._streamer.keep_alive()
            await self.exchange.write(data, self._streamer.content_type)

    async def conclude(self, turn: Turn) -> bool:
        """Say the end of the turn; False when the harness was gone before it was written."""
        if self._streamer is None:
            return await self.exchange.answer(200, self._dialect.answer(self._request, turn))
        await self.hear([TurnEnd(turn=turn)], turn.usage.prompt_tokens)
        return await self.exchange.end()

    async def refuse(self, kind: ErrorKind) -> None:
        """Say why there is no answer: with a status, or inside the stream where one has begun."""
        if self._streamer is None or not self.exchange.started:
            await self.exchange.refuse(self._dialect, kind)
        else:
            await self.exchange.write(self._streamer.error(kind), self._streamer.content_type)
            await self.exchange.end()


class _Told:
    """A block as far as it was handed on."""

    __slots__ = ("end", "parts", "start")

    def __init__(self, start: BlockStart) -> None:
        self.start = start
        self.parts: list[str] = []
        self.end: BlockEnd | None = None


class Generation:
    """One answer on its way; ends with a turn or with a refusal."""

    def __init__(self, asked: Asked, record: OpenCall) -> None:
        self.asked = asked
        self.record = record
        self.created = int(time.time())
        self.scope = anyio.CancelScope()
        """Of the task that samples it."""
        self.ended = anyio.Event()
        self.turn: Turn | None = None
        self.refusal: ErrorKind | None = None
        self.delivered = False
        self.listeners: list[Listener] = []
        self._told: list[_Told] = []
        self._prompt_tokens = 0

    @property
    def attended(self) -> bool:
        return any(not listener.exchange.gone for listener in self.listeners)

    async def join(self, listener: Listener) -> None:
        """Let one more hear it, from the beginning."""
        so_far = [event for told in self._told for event in _events(told)]
        self.listeners.append(listener)
        if so_far:
            await listener.hear(so_far, self._prompt_tokens)

    async def hand_on(self, events: Sequence[TurnEvent], stream: EngineStream) -> None:
        """Let all hear what the engine has said, all of whose tokens are counted as delivered."""
        self._prompt_tokens = stream.prompt_tokens
        for event in events:
            match event:
                case BlockDelta(text=text):
                    self._told[-1].parts.append(text)
                case BlockStart():
                    self._told.append(_Told(event))
                case BlockEnd():
                    self._told[-1].end = event
        for listener in list(self.listeners):
            await listener.hear(events, self._prompt_tokens)
            if not listener.exchange.gone:
                self.record.delivered_tokens = stream.sampled_tokens

    async def conclude(self, turn: Turn) -> None:
        """Give all of them the turn, whose record is durable by now."""
        self.turn = turn
        for listener in list(self.listeners):
            await self._give(listener, turn)

    async def replay(self, listener: Listener) -> None:
        """Give the finished turn to one who has asked for it again."""
        assert self.turn is not None
        await self._give(listener, self.turn)

    async def _give(self, listener: Listener, turn: Turn) -> None:
        if not self._told:
            events = events_of(turn.blocks, cut=turn.finish_reason == "length")
            await listener.hear(events, turn.usage.prompt_tokens)
        elif listener not in self.listeners:
            await self.join(listener)
        self.delivered = await listener.conclude(turn) or self.delivered

    async def refuse(self, kind: ErrorKind) -> None:
        self.refusal = kind
        for listener in list(self.listeners):
            await listener.refuse(kind)


def _events(told: _Told) -> list[TurnEvent]:
    middle: list[TurnEvent] = [BlockDelta(text="".join(told.parts))] if told.parts else []
    return [told.start, *middle, *([told.end] if told.end is not None else [])]


class Generations:
    """A session's answers on their way, and those that nobody received."""

    def __init__(self) -> None:
        self._live: list[Generation] = []
        self._unclaimed: deque[Generation] = deque(maxlen=MAX_UNCLAIMED)

    def add(self, generation: Generation) -> None:
        self._live.append(generation)

    def end(self, generation: Generation) -> None:
        """It is over. An answer that nobody received is kept for who asks again."""
        self._live.remove(generation)
        generation.ended.set()
        self.put_back(generation)

    def put_back(self, generation: Generation) -> None:
        if generation.turn is not None and not generation.delivered:
            self._unclaimed.append(generation)

    def live_twin(self, call: Asked) -> Generation | None:
        """The latest generation in flight for the same call; one that nobody hears comes first."""
        twins = [each for each in reversed(self._live) if same_call(each.asked, call)]
        return min(twins, key=lambda each: each.attended, default=None)

    def take_unclaimed(self, call: Asked) -> Generation | None:
        """The latest finished answer to the same call that nobody received; it is taken out."""
        for generation in reversed(self._unclaimed):
            turn = generation.turn
            by_length = turn is not None and turn.finish_reason == "length"
            if same_call(generation.asked, call, ended_by_length=by_length):
                self._unclaimed.remove(generation)
                return generation
        return None
