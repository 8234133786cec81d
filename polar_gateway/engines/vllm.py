"""vLLM through /v1/chat/completions: canonical rendering, token ids captured.

vLLM reports the prompt's ids once and the sampled ids beside the text (`return_token_ids`); the
stop token is among them. Only what is read is decoded. `include_reasoning` is never sent: false
removes ids and log probabilities from the answer.
"""

import logging
import math
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import aiohttp
import msgspec

from builders.records import Floats, Ids, TokenNode
from polar_gateway.dialects.turn import (
    Block,
    BlockDelta,
    BlockEnd,
    BlockStart,
    Call,
    ErrorKind,
    ModelRequest,
    Reasoning,
    Text,
    TurnEvent,
    Usage,
)
from polar_gateway.engines.base import EngineError, EngineProbe, EngineReply, EngineStream
from polar_gateway.engines.id_cache import IdCache
from polar_gateway.engines.refusals import (
    aborted,
    broke_off,
    error_of,
    is_uncounted,
    overflow,
    room_of,
    unreachable,
    unreadable,
)
from polar_gateway.engines.whole import WholeAsStream

logger = logging.getLogger(__name__)

MISSING_LOGPROB = -9999.0
"""How vLLM writes minus infinity."""
NOT_A_TURN = frozenset({"abort", "error"})
"""Finish reasons of answers that the engine gave up."""
LOST_IN_STREAMS = frozenset(
    {
        "prompt_ids_missing",
        "ids_missing",
        "ids_usage_mismatch",
        "logprobs_missing",
        "logprobs_misaligned",
    }
)
"""Findings of streamed answers that whole answers of the same engine need not have."""
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

_T = TypeVar("_T")
_Answered = TypeVar("_Answered", EngineReply, "VllmStream")


# What is decoded holds no cycles; hidden from the garbage collector, hundreds of entries a call
# do not make it run.


class _Logprob(msgspec.Struct, gc=False):
    logprob: float | None = None


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Logprob] | None = None


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct, gc=False):
    index: int = 0
    id: str | None = None
    function: _Function = msgspec.field(default_factory=_Function)


class _Message(msgspec.Struct, gc=False):
    """A whole message or a delta; the two have the same fields."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct, gc=False):
    message: _Message = msgspec.field(default_factory=_Message)
    delta: _Message = msgspec.field(default_factory=_Message)
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _CompletionDetails(msgspec.Struct, gc=False):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None


class _Answer(msgspec.Struct):
    """A whole answer or one chunk of a stream."""

    model: str = ""
    choices: list[_Choice] = []
    usage: _Usage | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    error: msgspec.Raw = msgspec.Raw()


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


_answers = msgspec.json.Decoder(_Answer)
_encoder = msgspec.json.Encoder()


class Vllm:
    """One vLLM server. `model` is its name for the weights; empty takes the first it lists."""

    name = "vllm"

    def __init__(self, base_url: str, *, model: str = "", api_key: str | None = None) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.model = model
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._client: aiohttp.ClientSession | None = None
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
        prompt = PromptReader(self._cache, request_id, after and after.completion_id)
        return await self._with_room(self._complete, request, request_id, prompt)

    async def stream(
        self, request: ModelRequest, request_id: str, after: TokenNode | None = None
    ) -> EngineStream:
        """Asks for a whole answer where streams are known to lack ids."""
        if not self.stream_ids:
            return WholeAsStream(await self.complete(request, request_id, after))
        prompt = PromptReader(self._cache, request_id, after and after.completion_id)
        return await self._with_room(self._stream, request, request_id, prompt)

    async def _with_room(
        self,
        ask: "Callable[[ModelRequest, str, PromptReader], Awaitable[_Answered]]",
        request: ModelRequest,
        request_id: str,
        prompt: "PromptReader",
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
        self, request: ModelRequest, request_id: str, prompt: "PromptReader"
    ) -> EngineReply:
        body = await self._body(request, stream=False)
        answer = await self._post("/v1/chat/completions", body, _answers, request_id)
        reply = read_answer(answer, prompt)
        if not reply.findings:
            self._whole_ids = True
        return reply

    async def _stream(
        self, request: ModelRequest, request_id: str, prompt: "PromptReader"
    ) -> "VllmStream":
        body = await self._body(request, stream=True)
        response = await self._open("/v1/chat/completions", body, request_id)
        stream = VllmStream(response, prompt, self._check_stream)
        try:
            await stream.begin()
        except BaseException:
            response.close()
            raise
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
        version = await self._get("/version", msgspec.json.Decoder(_Version))
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
        answer = await self._post(
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
        answer = await self._post("/tokenize", encoded, msgspec.json.Decoder(_Tokenized))
        return answer.tokens

    async def _models(self) -> _Models:
        return await self._get("/v1/models", msgspec.json.Decoder(_Models))

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
        return _encoder.encode(chat_body(request, await self._served(), stream=stream))

    async def _get(self, path: str, decoder: "msgspec.json.Decoder[_T]") -> _T:
        try:
            async with self._session().get(self.base_url + path, headers=self._headers) as response:
                data = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise unreachable(error) from error
        if response.status != 200:
            raise error_of(response.status, data)
        return _decoded(decoder, data)

    async def _post(
        self, path: str, body: bytes, decoder: "msgspec.json.Decoder[_T]", request_id: str = ""
    ) -> _T:
        response = await self._open(path, body, request_id)
        try:
            data = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise unreachable(error) from error
        finally:
            response.release()
        return _decoded(decoder, data)

    async def _open(self, path: str, body: bytes, request_id: str) -> aiohttp.ClientResponse:
        """Send a request and return its answer, status 200, body unread."""
        headers = {**self._headers, "x-request-id": request_id} if request_id else self._headers
        url = self.base_url + path
        try:
            try:
                response = await self._session().post(url, data=body, headers=headers)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                if isinstance(error, aiohttp.ClientConnectorError):
                    raise
                # Mostly a connection that was kept alive and that the engine has closed meanwhile:
                # a new one is no second sample, as nothing of an answer has come.
                response = await self._session().post(url, data=body, headers=headers)
            if response.status == 200:
                return response
            async with response:
                data = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise unreachable(error) from error
        raise error_of(response.status, data, response.headers.get("retry-after", ""))

    def _session(self) -> aiohttp.ClientSession:
        if self._client is None:
            self._client = aiohttp.ClientSession(
                # As many calls as there are sessions: what limits them is the engine's queue.
                connector=aiohttp.TCPConnector(limit=0),
                # A generation takes as long as it takes; the session's deadline bounds it.
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                skip_auto_headers=("accept-encoding", "user-agent"),
                read_bufsize=1 << 20,
            )
        return self._client

    async def aclose(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None


class VllmStream:
    """One streamed generation; see `EngineStream`."""

    def __init__(
        self,
        response: aiohttp.ClientResponse,
        prompt: "PromptReader",
        check: Callable[[list[str]], None],
    ) -> None:
        self.notes: list[str] = []
        self._response = response
        self._check = check
        """Told the findings of the whole."""
        self._rest = b""
        self._first: list[TurnEvent] = []
        self._assembly = Assembly(prompt)
        self._ended = False
        self._handed_on = 0

    async def begin(self) -> None:
        """Wait for the first event of the generation."""
        while not self._first and not self._ended:
            self._first = await self._read()

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
        *lines, self._rest = (self._rest + data).split(b"\n") if self._rest else data.split(b"\n")
        events: list[TurnEvent] = []
        for line in lines:
            if not line.startswith(b"data:"):
                continue  # an empty line or a keep-alive comment
            payload = line[5:].strip()
            if payload == b"[DONE]":
                self._ended = True
                events += self._assembly.finish()
                self._check(self._assembly.reply().findings)
                break
            events += self._assembly.add(_decoded(_answers, payload))
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
            self._response.close()  # a closed connection is how vLLM is told to stop


def common_suffix(a: list[int], b: list[int]) -> list[int]:
    length = 0
    while length < min(len(a), len(b)) and a[-1 - length] == b[-1 - length]:
        length += 1
    return a[len(a) - length :]


class PromptReader:
    """The prompt's ids of one call, as the engine says them once in its answer."""

    def __init__(self, cache: IdCache, completion_id: str, after: str | None) -> None:
        self.ids: Ids | None = None
        self._text = b""
        self._cache = cache
        self._completion_id = completion_id
        self._after = after

    def read(self, raw: msgspec.Raw) -> None:
        """`raw` is empty or null where the engine does not say them."""
        text = bytes(raw)
        if text and text != b"null":
            try:
                self.ids = self._cache.decode(text, self._after)
            except msgspec.DecodeError as error:
                raise unreadable(error, text) from error
            self._text = text

    def remember(self, sampled: Ids) -> None:
        """Let the next turn's prompt be read as what it adds to this one and its answer."""
        if self.ids is not None:
            self._cache.remember(self._completion_id, self._text, self.ids, sampled)


class Assembly:
    """What the chunks of a stream add up to, and the turn events that each of them means."""

    def __init__(self, prompt: PromptReader) -> None:
        self.prompt = prompt
        self._ids: Ids = array("i")
        self._has_ids = False
        self._logprobs: list[float | None] = []
        self._seen = 0
        self._model = ""
        self._usage: _Usage | None = None
        self._finished = False
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None
        self._blocks: list[Block] = []
        self._parts: list[str] = []
        self._call: int | None = None
        """Index of the open tool call."""
        self._reasoning_tokens = 0
        self._reply: EngineReply | None = None
        self.told_tokens = 0
        """How many tokens had come when the latest event was made of them."""

    def add(self, chunk: _Answer) -> list[TurnEvent]:
        if chunk.error:
            raise error_of(None, b'{"error":' + bytes(chunk.error) + b"}")
        if chunk.prompt_token_ids:
            self.prompt.read(chunk.prompt_token_ids)
        if chunk.model:
            self._model = chunk.model
        if chunk.usage is not None:
            self._usage = chunk.usage
        events: list[TurnEvent] = []
        for choice in chunk.choices:
            if choice.token_ids is not None:
                self._has_ids = True
                self._ids.extend(choice.token_ids)
            if choice.logprobs is not None and choice.logprobs.content:
                self._logprobs += [entry.logprob for entry in choice.logprobs.content]
            delta = choice.delta
            if thought := delta.reasoning or delta.reasoning_content:
                self._reasoning_tokens += len(choice.token_ids or ())
                self._more(Reasoning, "reasoning", thought, events)
            if delta.content:
                self._more(Text, "text", delta.content, events)
            for call in delta.tool_calls or ():
                self._more_call(call, events)
            if choice.finish_reason is not None:
                self._finish_reason = choice.finish_reason
                self._stop_reason = choice.stop_reason
        if events:
            self.told_tokens = len(self._ids)
        return events

    def finish(self) -> list[TurnEvent]:
        """The stream is over: the last block ends. Raises when the answer is not a turn."""
        if self._finish_reason is None:
            raise broke_off("the stream ended without a finish reason")
        if self._finish_reason in NOT_A_TURN:
            raise aborted()
        self._finished = True
        events: list[TurnEvent] = []
        self._end_block(events, cut=self._finish_reason == "length")
        self.told_tokens = len(self._ids)
        return events

    def unseen(self) -> tuple[Ids, Floats]:
        since, self._seen = self._seen, len(self._ids)
        logprobs = [math.nan if value is None else value for value in self._logprobs[since:]]
        return self._ids[since:], array("f", logprobs)

    def reply(self) -> EngineReply:
        """What there is so far; all of it once `finish` was called."""
        if self._reply is None:
            self._reply = self._made()
        return self._reply

    def _made(self) -> EngineReply:
        self._end_block([])
        tokens = checked_tokens(
            self.prompt.ids, self._ids if self._has_ids else None, self._logprobs, self._usage
        )
        self.prompt.remember(tokens.sampled_ids)
        return EngineReply(
            prompt_ids=tokens.prompt_ids,
            sampled_ids=tokens.sampled_ids,
            logprobs=tokens.logprobs,
            blocks=self._blocks,
            finish_reason=self._finish_reason if self._finished else None,
            stop_reason=self._stop_reason if self._finished else None,
            usage=_usage(self._usage, tokens, self._reasoning_tokens),
            model=self._model,
            findings=tokens.findings,
        )

    def _more(
        self, block: type[Reasoning] | type[Text], kind: Any, text: str, events: list[TurnEvent]
    ) -> None:
        if not self._parts or not isinstance(self._blocks[-1], block):
            self._end_block(events)
            self._blocks.append(block(text=""))
            events.append(BlockStart(kind=kind))
        self._parts.append(text)
        events.append(BlockDelta(text=text))

    def _more_call(self, call: _ToolCall, events: list[TurnEvent]) -> None:
        if call.index != self._call:
            if not call.function.name:
                # More of a call that text has ended: what was handed on of it cannot be taken back.
                raise broke_off(f"tool call {call.index} goes on after its end")
            self._end_block(events)
            self._call = call.index
            block = Call(id=call.id or "", name=call.function.name or "", arguments="")
            self._blocks.append(block)
            self._parts.append("")
            events.append(BlockStart(kind="call", id=block.id, name=block.name))
        if call.function.arguments:
            self._parts.append(call.function.arguments)
            events.append(BlockDelta(text=call.function.arguments))

    def _end_block(self, events: list[TurnEvent], *, cut: bool = False) -> None:
        if not self._parts:
            return
        block = self._blocks[-1]
        if isinstance(block, Call):
            block.arguments = "".join(self._parts)
        else:
            block.text = "".join(self._parts)
        self._parts = []
        self._call = None
        events.append(BlockEnd(cut=cut))


def chat_body(request: ModelRequest, model: str, *, stream: bool) -> dict[str, Any]:
    """The request as vLLM takes it; only what the harness or the task set is set."""
    body: dict[str, Any] = {
        **request.sampling,
        "model": model,
        "messages": request.messages,
        "stream": stream,
        "logprobs": True,
        "top_logprobs": 0,
        "return_token_ids": True,
    }
    if request.tools:  # an empty list is refused, and a choice without tools too
        body["tools"] = request.tools
        if request.tool_choice is not None:
            body["tool_choice"] = request.tool_choice
        if request.parallel_tool_calls is not None:
            body["parallel_tool_calls"] = request.parallel_tool_calls
    if request.max_tokens is not None:
        body["max_tokens"] = request.max_tokens
    if request.response_format is not None:
        body["response_format"] = request.response_format
    if request.template_kwargs:
        body["chat_template_kwargs"] = request.template_kwargs
    if stream:
        body["stream_options"] = {"include_usage": True}
    return body


def _less_output(asked: ModelRequest, sent: ModelRequest) -> str:
    return f"max_tokens: {sent.max_tokens} instead of {asked.max_tokens}, which is the room left"


def as_rendered(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as the chat endpoint hands it to the template; /tokenize hands it on as it comes."""
    given = tool["function"]
    function = {field: given.get(field) for field in ("name", "description", "parameters")}
    if given.get("strict") is not None:
        function["strict"] = given["strict"]
    return {"type": "function", "function": function}


def read_answer(answer: _Answer, prompt: PromptReader) -> EngineReply:
    """A whole answer as a reply. Raises EngineError when it is not a turn."""
    if answer.error:
        raise error_of(None, b'{"error":' + bytes(answer.error) + b"}")
    if not answer.choices:
        raise broke_off("the answer has no choices")
    choice = answer.choices[0]
    if choice.finish_reason in NOT_A_TURN:
        raise aborted()
    if choice.finish_reason is None:
        raise broke_off("the answer has no finish reason")
    entries = choice.logprobs.content if choice.logprobs is not None else None
    prompt.read(answer.prompt_token_ids)
    tokens = checked_tokens(
        prompt.ids,
        choice.token_ids,
        [entry.logprob for entry in entries or ()],
        answer.usage,
    )
    prompt.remember(tokens.sampled_ids)
    return EngineReply(
        prompt_ids=tokens.prompt_ids,
        sampled_ids=tokens.sampled_ids,
        logprobs=tokens.logprobs,
        blocks=_blocks(choice.message),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        usage=_usage(answer.usage, tokens, 0),
        model=answer.model,
        findings=tokens.findings,
    )


def _blocks(message: _Message) -> list[Block]:
    blocks: list[Block] = []
    if thought := message.reasoning or message.reasoning_content:
        blocks.append(Reasoning(text=thought))
    if message.content:
        blocks.append(Text(text=message.content))
    blocks += [
        Call(
            id=call.id or "",
            name=call.function.name or "",
            arguments=call.function.arguments or "",
        )
        for call in message.tool_calls or ()
    ]
    return blocks


class Tokens(NamedTuple):
    """Token data as far as it can be trusted; `findings` says what cannot."""

    prompt_ids: Ids
    sampled_ids: Ids
    logprobs: Floats | None
    findings: list[str]


def checked_tokens(
    prompt_ids: Ids | None,
    sampled_ids: list[int] | Ids | None,
    logprobs: list[float | None],
    usage: _Usage | None,
) -> Tokens:
    """Check what the engine reported against itself. Nothing is repaired or made up."""
    findings: list[str] = []
    if prompt_ids is None:
        findings.append("prompt_ids_missing")
    if sampled_ids is None:
        findings.append("ids_missing")
    elif usage is not None and len(sampled_ids) != usage.completion_tokens:
        findings.append("ids_usage_mismatch")
    prompt = array("i") if prompt_ids is None else prompt_ids
    sampled = array("i", sampled_ids or ())
    values: Floats | None = None
    if sampled and not logprobs:
        findings.append("logprobs_missing")
    elif len(logprobs) != len(sampled):
        findings.append("logprobs_misaligned")
    elif not all(value is not None and MISSING_LOGPROB < value <= 0.0 for value in logprobs):
        findings.append("logprobs_invalid")
    else:
        values = array("f", [value for value in logprobs if value is not None])
    return Tokens(prompt, sampled, values, findings)


def _usage(usage: _Usage | None, tokens: Tokens, reasoning_tokens: int) -> Usage:
    """`reasoning_tokens` are those that came with reasoning, for engines that do not say it."""
    if usage is None:
        return Usage(
            prompt_tokens=len(tokens.prompt_ids),
            completion_tokens=len(tokens.sampled_ids),
            reasoning_tokens=reasoning_tokens,
        )
    prompt, completion = usage.prompt_tokens_details, usage.completion_tokens_details
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens or 0,
        cached_tokens=(prompt.cached_tokens if prompt else None) or 0,
        reasoning_tokens=(
            reasoning_tokens
            if completion is None or completion.reasoning_tokens is None
            else completion.reasoning_tokens
        ),
    )


def _decoded(decoder: "msgspec.json.Decoder[_T]", data: bytes) -> _T:
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        raise unreadable(error, data) from error
