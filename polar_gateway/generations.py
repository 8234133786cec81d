"""Answers on their way, and all who wait for them.

A harness that lost its connection, or its patience, asks again. It is then given the answer that is
being sampled for it, or was, and not a second sample: one turn of a conversation is sampled once.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from hashlib import blake2b

import anyio
import msgspec

from polar_gateway.capture.session import CHAIN_HEADERS, OpenCall
from polar_gateway.dialects.turn import (
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

_encoder = msgspec.json.Encoder(order="deterministic")

SIGN_OF_LIFE = b" "
"""Of a whole answer: JSON may begin with any number of spaces."""


class Asked:
    """What makes two calls the same call, apart from how the answer shall be brought."""

    def __init__(self, dialect: str, headers: Mapping[str, str], request: ModelRequest) -> None:
        self.request = request
        self._dialect = dialect
        self._chain = {name: headers[name] for name in CHAIN_HEADERS if name in headers}

    @cached_property
    def digest(self) -> bytes:
        """Equal for calls that would be asked of the engine alike, for the same conversation;
        the output limit left out. Kept, as it costs as much as the request is long."""
        request = self.request
        return blake2b(
            _encoder.encode(
                (
                    self._dialect,
                    self._chain,
                    request.model,
                    request.kind,
                    request.sampling,
                    request.tool_choice,
                    request.parallel_tool_calls,
                    request.response_format,
                    request.template_kwargs,
                    sorted(request.answers.items()),
                    request.tools,
                    request.messages,
                )
            )
        ).digest()


def is_marked(headers: Mapping[str, str]) -> bool:
    """Whether a request says that it was made before."""
    return headers.get(RETRY_MARK, "0") not in ("", "0")


def same_call(one: Asked, other: Asked, *, cut: bool = False) -> bool:
    """Whether the two would be asked of the engine alike, for the same conversation.

    `stream` and what belongs to it do not count. The output limit counts where it has shaped the
    answer that is there, having `cut` it: a harness that asks again with a higher one wants another.
    """
    a, b = one.request, other.request
    return (
        (not cut or a.max_tokens == b.max_tokens)
        and len(a.messages) == len(b.messages)
        and a.messages[-1:] == b.messages[-1:]
        and one.digest == other.digest
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
        exchange.identify(dialect, completion_id)

    def _opening(self, prompt_tokens: int) -> bytes:
        """What a streamed answer begins with; empty from the second time on."""
        if self._opened or self._streamer is None:
            return b""
        self._opened = True
        return self._streamer.open(prompt_tokens)

    async def hear(self, events: Sequence[TurnEvent], prompt_tokens: int) -> bool:
        """Pass on what was said; False where the harness did not get it: it was gone, or waits for
        the whole."""
        if self._streamer is None or self.exchange.gone:
            return False
        data = self._opening(prompt_tokens)
        for event in events:
            data += self._streamer.event(event)
        return await self.exchange.write(data, self._streamer.content_type)

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


class Generation:
    """One answer on its way; ends with a turn or with a refusal.

    Who asked first is told by the task that samples. Who joins tells itself, at its own pace, from
    what is kept of the answer, and so cannot hold up the others.
    """

    def __init__(self, asked: Asked, record: OpenCall) -> None:
        self.asked = asked
        self.record = record
        self.created = int(time.time())
        self.scope = anyio.CancelScope()
        """Of the task that samples it."""
        self.turn: Turn | None = None
        """Once its record is durable."""
        self.refusal: ErrorKind | None = None
        self.delivered = False
        self._listeners: list[Listener] = []
        self._left_at = 0.0
        """When the latest of them went, on the monotonic clock."""
        self._said: list[TurnEvent] = []
        self._prompt_tokens = 0
        self._tokens = 0
        """Of which what was said is made."""
        self._news: anyio.Event | None = None
        """What those wait for who have heard all that was said."""

    @property
    def attended(self) -> bool:
        return any(not listener.exchange.gone for listener in self._listeners)

    @property
    def cut(self) -> bool:
        """Whether the output limit ended it."""
        return self.turn is not None and self.turn.finish_reason == "length"

    @property
    def may_be_joined(self) -> bool:
        """Whether who joins will be told a turn, which nobody has received before."""
        if self.refusal is not None or self.delivered:
            return False
        return self.turn is not None or not self.scope.cancel_called

    def listener(self, exchange: Exchange, dialect: Dialect, request: ModelRequest) -> Listener:
        """One more harness that waits for it, until it is gone."""
        listener = Listener(exchange, dialect, request, self.record.completion_id, self.created)
        self._listeners.append(listener)
        return listener

    def left(self) -> None:
        """One of those who listened has gone."""
        self._left_at = time.monotonic()

    def grace(self, seconds: float) -> float:
        """For how much longer it is kept for a harness that may come back."""
        return self._left_at + seconds - time.monotonic()

    async def say(
        self, events: Sequence[TurnEvent], stream: EngineStream, listener: Listener
    ) -> None:
        """Let all hear what the engine has said, `listener` by the time this returns."""
        self._said += events
        self._prompt_tokens = stream.prompt_tokens
        self._tokens = stream.sampled_tokens
        self._tell_news()
        await self._hear(listener, events)

    @property
    def said(self) -> Sequence[TurnEvent]:
        """All that was told so far, in order."""
        return self._said

    async def conclude(
        self, turn: Turn, listener: Listener, unsaid: Sequence[TurnEvent] | None = None
    ) -> None:
        """Give all of them the turn, whose record is durable by now. `unsaid` are its events that
        were not told yet; None: all of them, or none if any was."""
        if not self._said:
            unsaid = events_of(turn.blocks, cut=turn.finish_reason == "length")
            self._prompt_tokens = turn.usage.prompt_tokens
        if unsaid:
            self._said += unsaid
            self._tokens = turn.usage.completion_tokens
        self._tell_news()
        if unsaid:
            await self._hear(listener, unsaid)
        await self._conclude(listener, turn)

    def refuse(self, kind: ErrorKind) -> None:
        """There will be no turn."""
        self.refusal = kind
        self._tell_news()

    async def follow(self, listener: Listener) -> bool:
        """Tell one who has joined all that was said and will be; whether it got the whole turn.
        Returns False at once when there will be none."""
        heard = 0
        while self.refusal is None:
            if news := self._said[heard:]:
                heard += len(news)
                await self._hear(listener, news)
            elif self.turn is not None:
                return await self._conclude(listener, self.turn)
            else:
                self._news = self._news or anyio.Event()
                await self._news.wait()
        return False

    async def _hear(self, listener: Listener, events: Sequence[TurnEvent]) -> None:
        tokens, told = self._tokens, len(self._said)
        if await listener.hear(events, self._prompt_tokens):
            self.record.heard(tokens, self._said, told)

    async def _conclude(self, listener: Listener, turn: Turn) -> bool:
        delivered = await listener.conclude(turn)
        self.delivered = self.delivered or delivered
        return delivered

    def _tell_news(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = None


class Generations:
    """A session's answers on their way, and those that nobody received."""

    def __init__(self) -> None:
        self._live: list[Generation] = []
        self._unclaimed: deque[Generation] = deque(maxlen=MAX_UNCLAIMED)

    @contextmanager
    def living(self, generation: Generation) -> Iterator[None]:
        """While it is sampled and told. An answer that nobody received is kept for who asks again."""
        self._live.append(generation)
        try:
            yield
        finally:
            self._live.remove(generation)
            if generation.turn is not None and generation.may_be_joined:
                self._unclaimed.append(generation)

    def undelivered(self) -> list[Generation]:
        """Those whose turn is recorded and was not received yet."""
        return [
            each for each in self._live if each.record.counts_as_delivered and not each.delivered
        ]

    def claim(self, generation: Generation) -> bool:
        """It was received after all; whether it had been kept for that."""
        if generation not in self._unclaimed:
            return False
        self._unclaimed.remove(generation)
        return True

    def close(self) -> None:
        """Nobody can ask again: nothing more is kept."""
        self._unclaimed = deque(maxlen=0)

    def twin(self, call: Asked) -> Generation | None:
        """The latest answer to the same call, on its way or not received; one that nobody listens
        to comes first."""
        candidates = [
            each
            for each in (*reversed(self._live), *reversed(self._unclaimed))
            if each.may_be_joined
        ]
        candidates.sort(key=lambda each: each.attended)
        for each in candidates:
            if same_call(each.asked, call, cut=each.cut):
                return each
        return None
