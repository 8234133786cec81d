"""What all engines that are asked through a chat-completions route have in common.

An engine of a kind says what its requests ask for and where its answers hold the token data; this
asks, asks again for less output where there is no room for as much, and gives up streams that lose
what whole answers have.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import msgspec

from builders.records import LogprobKind, TokenNode
from polar_gateway.dialects.turn import ModelRequest
from polar_gateway.engines.answers import Assembly, Piece, whole_reply
from polar_gateway.engines.base import EngineError, EngineReply, EngineStream
from polar_gateway.engines.chat_api import CHAT, ChatApi
from polar_gateway.engines.id_cache import IdCache, PromptReader
from polar_gateway.engines.refusals import is_uncounted, overflow, room_of
from polar_gateway.engines.streams import AnswerStream
from polar_gateway.engines.tokens import LOST_IN_STREAMS
from polar_gateway.engines.whole import WholeAsStream

logger = logging.getLogger(__name__)

_Answered = TypeVar("_Answered", EngineReply, AnswerStream)

_encode = msgspec.json.Encoder().encode


class ChatEngine(ABC):
    """One server."""

    def __init__(self, api: ChatApi) -> None:
        self._chat = api
        self.base_url = api.http.base_url
        self._cache = IdCache()
        self.stream_ids = True
        """Whether streams are asked for: not where they lack what whole answers have."""
        self._whole_ids = False
        """Whether a whole answer came with all of its token data."""

    @property
    def model(self) -> str:
        return self._chat.model

    @abstractmethod
    async def body(
        self, request: ModelRequest, sent: bytes | None = None, *, stream: bool = False
    ) -> dict[str, Any]:
        """`sent` is the JSON array of the ids that the prompt is sent as, if it is."""

    @abstractmethod
    def read_whole(self, data: bytes) -> Piece:
        """Raises EngineError when it is no answer."""

    @abstractmethod
    def read_event(self, data: bytes) -> Iterable[Piece]:
        """Raises EngineError for one that says what went wrong."""

    @abstractmethod
    def logprob_kind(self, request: ModelRequest) -> LogprobKind: ...

    @abstractmethod
    async def count_tokens(self, request: ModelRequest) -> int: ...

    async def count_too_long(self, request: ModelRequest) -> int:
        """How long a prompt is that the engine has refused. Raises EngineError."""
        return await self.count_tokens(request)

    def streams(self) -> bool:
        return self.stream_ids

    async def complete(
        self, request: ModelRequest, request_id: str, after: TokenNode | None = None
    ) -> EngineReply:
        return await self.with_room(self.chatted, request, request_id, after)

    async def stream(
        self, request: ModelRequest, request_id: str, after: TokenNode | None = None
    ) -> EngineStream:
        """Asks for a whole answer where streams have less than those."""
        if not self.streams():
            return WholeAsStream(await self.complete(request, request_id, after))
        return await self.with_room(self.streamed, request, request_id, after)

    async def with_room(
        self,
        ask: "Callable[[ModelRequest, str, TokenNode | None], Awaitable[_Answered]]",
        request: ModelRequest,
        request_id: str,
        after: TokenNode | None,
    ) -> "_Answered":
        """What `ask` answers, asked again for less output where there is no room for as much."""
        try:
            return await ask(request, request_id, after)
        except EngineError as error:
            fitting = await self._fitted(request, error)
        answered = await ask(fitting, request_id, after)
        answered.notes = [_less_output(request, fitting)]
        return answered

    async def chatted(
        self, request: ModelRequest, request_id: str = "", after: TokenNode | None = None
    ) -> EngineReply:
        """A whole answer of the chat route."""
        prompt, sent = self.prompt(request, request_id, after)
        body = _encode(await self.body(request, sent))
        answer = self.read_whole(await self._chat.http.post_raw(CHAT, body, request_id))
        reply = whole_reply(answer, prompt, self.logprob_kind(request))
        if not reply.findings:
            self._whole_ids = True
        return reply

    async def streamed(
        self, request: ModelRequest, request_id: str = "", after: TokenNode | None = None
    ) -> AnswerStream:
        """A streamed answer of the chat route."""
        prompt, sent = self.prompt(request, request_id, after)
        body = _encode(await self.body(request, sent, stream=True))
        response = await self._chat.http.open(CHAT, body, request_id)
        assembly = Assembly(prompt, self.logprob_kind(request))
        stream = AnswerStream(response, assembly, self.read_event, self._check_stream)
        await stream.begin()
        return stream

    def prompt(
        self, request: ModelRequest, request_id: str, after: TokenNode | None
    ) -> tuple[PromptReader, bytes | None]:
        """What reads the echo of the prompt, and how the prompt is spelled if it is sent as ids."""
        ids = request.prompt_ids
        if ids is None:
            return PromptReader(self._cache, request_id, after), None
        reader = PromptReader(self._cache, request_id, after, ids, request.rendering)
        return reader, reader.sent_text

    async def _fitted(self, request: ModelRequest, error: EngineError) -> ModelRequest:
        """The request with as much output as there is room for, if asking for more was all that
        the engine refused. Raises the error otherwise."""
        room = room_of(error.kind.message)
        if room is None or request.max_tokens is None:
            if is_uncounted(error):
                raise await self._counted(request, error) from error
            raise error
        prompt = room.prompt
        if prompt is None:
            prompt = await self.count_tokens(request)
        if prompt >= room.limit:
            raise overflow(error, prompt) from error
        return msgspec.structs.replace(request, max_tokens=room.limit - prompt)

    async def _counted(self, request: ModelRequest, error: EngineError) -> EngineError:
        """An overflow with the number of tokens that there are: agents drop as many as are too
        many, and with a number that only exceeds the limit by one that would be too few."""
        if request.prompt_ids is not None:
            return overflow(error, len(request.prompt_ids))
        try:
            return overflow(error, await self.count_too_long(request))
        except EngineError:
            return error

    def _check_stream(self, findings: list[str]) -> None:
        """Ask for no more streams once one lacked what whole answers have."""
        lost = sorted(LOST_IN_STREAMS.intersection(findings))
        if lost and self._whole_ids and self.stream_ids:
            self.stream_ids = False
            logger.warning(
                "the engine at %s loses token data in streams (%s): its answers are asked for "
                "whole from now on",
                self.base_url,
                ", ".join(lost),
            )

    async def aclose(self) -> None:
        await self._chat.http.aclose()


def prompt_alone(request: ModelRequest) -> ModelRequest:
    """The same prompt, with nothing else that the engine might refuse."""
    return ModelRequest(
        model=request.model,
        messages=request.messages,
        tools=request.tools,
        tool_choice=request.tool_choice,
        template_kwargs=request.template_kwargs,
        max_tokens=1,
    )


def _less_output(asked: ModelRequest, sent: ModelRequest) -> str:
    return f"max_tokens: {sent.max_tokens} instead of {asked.max_tokens}, which is the room left"
