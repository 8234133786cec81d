"""vLLM through /v1/chat/completions: canonical rendering, token ids captured.

vLLM reports the prompt's ids once and the sampled ids beside the text (`return_token_ids`); the
stop token is among them. Only what is read is decoded. `include_reasoning` is never sent: false
removes ids and log probabilities from the answer.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from builders.records import TokenNode
from polar_gateway.dialects.turn import ErrorKind, ModelRequest
from polar_gateway.engines.answers import Assembly, whole_reply
from polar_gateway.engines.base import EngineError, EngineProbe, EngineReply, EngineStream
from polar_gateway.engines.chat_body import chat_body
from polar_gateway.engines.http_client import HttpClient
from polar_gateway.engines.id_cache import IdCache, PromptReader
from polar_gateway.engines.refusals import is_uncounted, overflow, room_of
from polar_gateway.engines.streams import AnswerStream
from polar_gateway.engines.tokens import LOST_IN_STREAMS
from polar_gateway.engines.vllm_answers import chat_answer, chat_pieces
from polar_gateway.engines.whole import WholeAsStream

logger = logging.getLogger(__name__)

PROBE_TOKENS = 8
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "say",
        "description": "Say a word.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
"""What parsers do to a stream they do only where tools are offered."""

_Answered = TypeVar("_Answered", EngineReply, "AnswerStream")


class _Models(msgspec.Struct):
    class Model(msgspec.Struct):
        id: str
        max_model_len: int | None = None

    data: list[Model] = []


class _Tokenized(msgspec.Struct):
    count: int
    tokens: list[int] = []


class _Rendered(msgspec.Struct):
    token_ids: list[int]


class _Version(msgspec.Struct):
    version: str = ""


_encoder = msgspec.json.Encoder()


class Vllm:
    """One vLLM server. `model` is its name for the weights; empty takes the first it lists."""

    name = "vllm"

    def __init__(self, base_url: str, *, model: str = "", api_key: str | None = None) -> None:
        self._http = HttpClient(base_url, api_key)
        self.base_url = self._http.base_url
        self.model = model
        self._cache = IdCache()
        self._renders = False
        """Whether the server renders chat requests for whoever asks; the probe finds out."""
        self.stream_ids = True
        """Whether streams are asked for: not where they lack what whole answers have."""
        self._whole_ids = False
        """Whether a whole answer came with all of its token data."""

    async def complete(
        self, request: ModelRequest, request_id: str, after: TokenNode | None = None
    ) -> EngineReply:
        prompt = PromptReader(self._cache, request_id, after)
        return await self._with_room(self._complete, request, request_id, prompt)

    async def stream(
        self, request: ModelRequest, request_id: str, after: TokenNode | None = None
    ) -> EngineStream:
        """Asks for a whole answer where streams are known to lack ids."""
        if not self.stream_ids:
            return WholeAsStream(await self.complete(request, request_id, after))
        prompt = PromptReader(self._cache, request_id, after)
        return await self._with_room(self._stream, request, request_id, prompt)

    async def _with_room(
        self,
        ask: "Callable[[ModelRequest, str, PromptReader], Awaitable[_Answered]]",
        request: ModelRequest,
        request_id: str,
        prompt: PromptReader,
    ) -> "_Answered":
        """What `ask` answers, asked again for less output where there is no room for as much."""
        try:
            return await ask(request, request_id, prompt)
        except EngineError as error:
            fitting = await self._fitted(request, error)
        answered = await ask(fitting, request_id, prompt)
        answered.notes = [_less_output(request, fitting)]
        return answered

    async def _complete(
        self, request: ModelRequest, request_id: str, prompt: PromptReader
    ) -> EngineReply:
        body = await self._body(request, stream=False)
        data = await self._http.post_raw("/v1/chat/completions", body, request_id)
        reply = whole_reply(chat_answer(data), prompt)
        if not reply.findings:
            self._whole_ids = True
        return reply

    async def _stream(
        self, request: ModelRequest, request_id: str, prompt: PromptReader
    ) -> "AnswerStream":
        body = await self._body(request, stream=True)
        response = await self._http.open("/v1/chat/completions", body, request_id)
        stream = AnswerStream(response, Assembly(prompt), chat_pieces, self._check_stream)
        await stream.begin()
        return stream

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
        try:
            prompt = len(await self._tokenize(request, add_generation_prompt=True))
        except EngineError:
            return error
        return overflow(error, prompt)

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

    async def count_tokens(self, request: ModelRequest) -> int:
        """Exact: as the server renders the request where it tells, else as it counts the prompt of
        an answer of one token. What is too long to be asked is counted by /tokenize, which renders
        neither tools nor earlier reasoning quite as a call would."""
        counted = ModelRequest(
            model=request.model,
            messages=request.messages,
            tools=request.tools,
            tool_choice=request.tool_choice,
            template_kwargs=request.template_kwargs,
            max_tokens=1,
        )
        try:
            if self._renders:
                return len(await self._render(counted))
            reply = await self._complete(counted, "", PromptReader(IdCache(), "", None))
        except EngineError as error:
            if error.kind.code != "context_overflow":
                raise
            return len(await self._tokenize(request, add_generation_prompt=True))
        return reply.usage.prompt_tokens

    async def probe(self) -> EngineProbe:
        """Ask what the server is and whether it says ids; problems come back as sentences.

        Raises EngineError for what may pass: a server that is not there yet, or busy.
        """
        found = EngineProbe(engine=self.name, model=self.model)
        try:
            await self._probe(found)
        except EngineError as error:
            if error.again:
                raise
            found.problems.append(f"it does not answer as a vLLM would: {error}")
        return found

    async def _probe(self, found: EngineProbe) -> None:
        version = await self._http.get("/version", msgspec.json.Decoder(_Version))
        found.version = version.version
        listing = await self._models()
        served = {model.id: model.max_model_len for model in listing.data}
        if not served:
            found.problems.append("it serves no model")
            return
        found.model = self.model = self.model or listing.data[0].id
        if self.model not in served:
            found.problems.append(
                f"it does not serve {self.model!r} but {', '.join(sorted(served))}"
            )
            return
        found.max_model_len = served[self.model]
        await self._probe_tokens(found)

    async def _probe_tokens(self, found: EngineProbe) -> None:
        said: dict[str, Any] = {"role": "user", "content": "Say yes."}
        request = ModelRequest(
            model=self.model, messages=[said], tools=[PROBE_TOOL], max_tokens=PROBE_TOKENS
        )
        try:
            reply = await self.complete(request, "polar-probe")
        except EngineError as error:
            if error.kind.code != "invalid_request":
                raise
            found.notes.append(f"it refuses calls that offer tools: {error}")
            request = msgspec.structs.replace(request, tools=None)
            reply = await self.complete(request, "polar-probe")
        found.token_ids = not {"ids_missing", "prompt_ids_missing"} & set(reply.findings)
        if reply.findings:
            found.problems.append(
                f"a short answer of {self.model!r} came without trustworthy tokens "
                f"({', '.join(reply.findings)}); vLLM 0.10 or newer is needed"
            )
        else:
            await self._probe_stream(found, request, reply)
        self._renders = await self._can_render(request, reply)
        found.end_of_turn_ids = await self._end_of_turn(said)

    async def _probe_stream(
        self, found: EngineProbe, request: ModelRequest, whole: EngineReply
    ) -> None:
        """Whether a streamed answer has what the whole one had."""
        try:
            stream = await self._stream(
                request, "polar-probe-stream", PromptReader(IdCache(), "", None)
            )
            try:
                async for _ in stream:
                    pass
            finally:
                await stream.aclose()
        except EngineError as error:
            if error.again:
                raise
            lost = str(error)
        else:
            streamed = stream.reply
            lost = ", ".join(streamed.findings)
            if not lost and streamed.prompt_ids != whole.prompt_ids:
                lost = "the prompt's ids are others than those of a whole answer"
        found.stream_ids = self.stream_ids = not lost
        if lost:
            found.notes.append(f"streamed answers are asked for whole, since streams fail: {lost}")

    async def _can_render(self, request: ModelRequest, reply: EngineReply) -> bool:
        """Whether the server tells a prompt's ids without sampling, and tells them right."""
        try:
            return await self._render(request) == reply.prompt_ids.tolist()
        except EngineError:
            return False

    async def _end_of_turn(self, said: dict[str, Any]) -> list[int]:
        """The id that the template puts behind a finished answer: the first of those with which
        two renderings end that differ in their answer alone. Empty where the server renders none.
        """
        renderings = []
        for answer in ("yes", "no"):
            messages = [said, {"role": "assistant", "content": answer}]
            request = ModelRequest(model=self.model, messages=messages)
            try:
                renderings.append(await self._tokenize(request, add_generation_prompt=False))
            except EngineError:
                return []
        return common_suffix(*renderings)[:1]

    async def _render(self, request: ModelRequest) -> list[int]:
        """The prompt's ids as the chat endpoint itself would have them."""
        body = await self._body(request, stream=False)
        answer = await self._http.post(
            "/v1/chat/completions/render", body, msgspec.json.Decoder(_Rendered)
        )
        return answer.token_ids

    async def _tokenize(self, request: ModelRequest, **options: bool) -> list[int]:
        """The prompt's ids nearly: earlier reasoning is not rendered, tools may be otherwise."""
        body = {"model": await self._served(), "messages": request.messages, **options}
        if request.tools:
            body["tools"] = [as_rendered(tool) for tool in request.tools]
        if request.template_kwargs:
            body["chat_template_kwargs"] = request.template_kwargs
        encoded = _encoder.encode(body)
        answer = await self._http.post("/tokenize", encoded, msgspec.json.Decoder(_Tokenized))
        return answer.tokens

    async def _models(self) -> _Models:
        return await self._http.get("/v1/models", msgspec.json.Decoder(_Models))

    async def _served(self) -> str:
        if not self.model:
            listing = await self._models()
            if not listing.data:
                raise EngineError(
                    ErrorKind(status=503, code="overloaded", message="the engine serves no model"),
                    infra=True,
                    again=True,
                )
            self.model = listing.data[0].id
        return self.model

    async def _body(self, request: ModelRequest, *, stream: bool) -> bytes:
        body = chat_body(request, await self._served(), stream=stream)
        body["return_token_ids"] = True
        return _encoder.encode(body)

    async def aclose(self) -> None:
        await self._http.aclose()


def common_suffix(a: list[int], b: list[int]) -> list[int]:
    length = 0
    while length < min(len(a), len(b)) and a[-1 - length] == b[-1 - length]:
        length += 1
    return a[len(a) - length :]


def _less_output(asked: ModelRequest, sent: ModelRequest) -> str:
    return f"max_tokens: {sent.max_tokens} instead of {asked.max_tokens}, which is the room left"


def as_rendered(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as the chat endpoint hands it to the template; /tokenize hands it on as it comes."""
    given = tool["function"]
    function = {field: given.get(field) for field in ("name", "description", "parameters")}
    if given.get("strict") is not None:
        function["strict"] = given["strict"]
    return {"type": "function", "function": function}
