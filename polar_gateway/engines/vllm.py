"""vLLM through /v1/chat/completions: token ids captured, prompts sent as messages or as ids.

vLLM reports the prompt's ids once and the sampled ids beside the text (`return_token_ids`); the
stop token is among them. Only what is read is decoded. `include_reasoning` is never sent: false
removes ids and log probabilities from the answer.

A prompt of ids goes into `kv_transfer_params`, which is how a decoding server is handed what another
one has tokenized: the ids go to the model as they are, the messages are not even rendered, and the
answer is parsed as any other. The other route (`token_route="generate"`) asks three endpoints one
after the other, of which the second says which weights sampled which token.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from builders.records import Floats, Ids, LogprobKind, TokenNode, VersionSpan
from polar_gateway.dialects.turn import Block, Call, ModelRequest, Usage
from polar_gateway.engines.answers import Assembly, blocks_of, whole_reply
from polar_gateway.engines.base import (
    EngineError,
    EngineProbe,
    EngineReply,
    EngineStream,
    PauseMode,
    Rendering,
    Renders,
    TokenRoute,
)
from polar_gateway.engines.id_cache import IdCache, PromptReader, spelling
from polar_gateway.engines.refusals import (
    broke_off,
    is_uncounted,
    overflow,
    room_of,
    unresumable,
)
from polar_gateway.engines.rendering import JsonRendering
from polar_gateway.engines.streams import AnswerStream
from polar_gateway.engines.tokens import LOST_IN_STREAMS
from polar_gateway.engines.vllm_answers import chat_pieces, whole_answer
from polar_gateway.engines.vllm_api import CHAT, VllmApi
from polar_gateway.engines.vllm_probe import probe
from polar_gateway.engines.whole import WholeAsStream

logger = logging.getLogger(__name__)

_Answered = TypeVar("_Answered", EngineReply, AnswerStream)

_encode = msgspec.json.Encoder().encode


class Vllm:
    """One vLLM server. `model` is its name for the weights; empty takes the first it lists."""

    name = "vllm"

    def __init__(
        self,
        base_url: str,
        *,
        model: str = "",
        api_key: str | None = None,
        token_route: TokenRoute = "chat",
    ) -> None:
        self.api = VllmApi(base_url, api_key, model)
        self.base_url = self.api.http.base_url
        self.token_route = token_route
        self._cache = IdCache()
        # What the probe finds out; until then nothing is taken for granted but streams.
        self.stream_ids = True
        """Whether streams are asked for: not where they lack what whole answers have."""
        self._renders: Renders = "none"
        self._logprob_kind: LogprobKind = "unknown"
        self._whole_ids = False
        """Whether a whole answer came with all of its token data."""

    @property
    def model(self) -> str:
        return self.api.model

    async def probe(self) -> EngineProbe:
        """Raises EngineError for what may pass: a server that is not there yet, or busy."""
        found = await probe(self)
        self.stream_ids = found.stream_ids or not found.token_ids
        self._renders = found.renders
        self._logprob_kind = found.logprob_kind
        return found

    async def complete(
        self, request: ModelRequest, request_id: str, after: TokenNode | None = None
    ) -> EngineReply:
        ask = self.generated if self.token_route == "generate" else self.chatted
        return await self._with_room(ask, request, request_id, after)

    async def stream(
        self, request: ModelRequest, request_id: str, after: TokenNode | None = None
    ) -> EngineStream:
        """Asks for a whole answer where streams are known to lack ids, and on the generate route."""
        if self.token_route == "generate" or not self.stream_ids:
            return WholeAsStream(await self.complete(request, request_id, after))
        return await self._with_room(self.streamed, request, request_id, after)

    async def _with_room(
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
        """A whole answer of the chat endpoint."""
        prompt, sent = self._prompt(request, request_id, after)
        body = _encode(await self.api.body(request, sent))
        answer = whole_answer(await self.api.http.post_raw(CHAT, body, request_id))
        reply = whole_reply(answer, prompt, self._logprob_kind)
        if not reply.findings:
            self._whole_ids = True
        return reply

    async def streamed(
        self, request: ModelRequest, request_id: str = "", after: TokenNode | None = None
    ) -> AnswerStream:
        """A streamed answer of the chat endpoint."""
        prompt, sent = self._prompt(request, request_id, after)
        body = _encode(await self.api.body(request, sent, stream=True))
        response = await self.api.http.open(CHAT, body, request_id)
        assembly = Assembly(prompt, self._logprob_kind)
        stream = AnswerStream(response, assembly, chat_pieces, self._check_stream)
        await stream.begin()
        return stream

    async def generated(
        self, request: ModelRequest, request_id: str = "", after: TokenNode | None = None
    ) -> EngineReply:
        """A whole answer that says which weights sampled it: rendered, sampled, and parsed."""
        reply, prompt = await self._sampled(request, request_id, after)
        return await self._parsed(request, reply, prompt)

    async def _sampled(
        self, request: ModelRequest, request_id: str, after: TokenNode | None
    ) -> tuple[EngineReply, bytes]:
        """An answer as tokens alone, and the JSON array of its prompt's ids."""
        prompt, sent = self._prompt(request, request_id, after)
        rendered = await self.api.rendered(await self.api.body(request, sent))
        answer = whole_answer(await self.api.generate(rendered, request_id))
        reply = whole_reply(answer, prompt, self._logprob_kind)
        return reply, bytes(rendered["token_ids"])

    def _prompt(
        self, request: ModelRequest, request_id: str, after: TokenNode | None
    ) -> tuple[PromptReader, bytes | None]:
        """What reads the echo of the prompt, and how the prompt is spelled if it is sent as ids."""
        ids = request.prompt_ids
        if ids is None:
            return PromptReader(self._cache, request_id, after), None
        sent = spelling(ids)
        return PromptReader(self._cache, request_id, after, ids, sent), sent

    async def _parsed(
        self, request: ModelRequest, reply: EngineReply, prompt: bytes
    ) -> EngineReply:
        """The reply with what the parsers make of its tokens."""
        reply.blocks = await self.parsed(request, reply, prompt)
        if reply.finish_reason == "stop" and any(isinstance(b, Call) for b in reply.blocks):
            reply.finish_reason = "tool_calls"  # as the chat endpoint has it
        return reply

    async def parsed(self, request: ModelRequest, reply: EngineReply, prompt: bytes) -> list[Block]:
        """`prompt` is the JSON array of its ids."""
        shown = reply.sampled_ids.tolist()
        if reply.finish_reason == "stop" and not isinstance(reply.stop_reason, str):
            shown = shown[:-1]  # the end of the turn, which is no text
        if not shown:
            return []
        body = await self.api.body(request, prompt)
        del body["kv_transfer_params"]
        said = await self.api.derender(body, prompt, shown, reply.finish_reason)
        blocks = blocks_of(whole_answer(said).message)
        return cut_at(blocks, reply.stop_reason) if isinstance(reply.stop_reason, str) else blocks

    async def resume(
        self, request: ModelRequest, request_id: str, partial: EngineReply
    ) -> EngineReply:
        if partial.findings or not may_resume(request):
            raise unresumable()
        left = None if request.max_tokens is None else request.max_tokens - len(partial.sampled_ids)
        if left is not None and left < 1:
            reply = msgspec.structs.replace(partial, finish_reason="length")
        else:
            context = partial.prompt_ids + partial.sampled_ids
            rest = rest_of(request, partial, context, left)
            try:
                added, _ = await self._sampled(rest, request_id, None)
            except EngineError as error:
                if error.partial is not None:
                    error.partial = joined(partial, error.partial)
                raise
            if added.prompt_ids != context:
                raise broke_off("it did not go on with the tokens that it was sent")
            reply = joined(partial, added)
        return await self._parsed(request, reply, spelling(partial.prompt_ids))

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
            tokenized = await self.api.tokenize(request)
        except EngineError:
            return error
        return overflow(error, tokenized.count)

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
        if request.prompt_ids is not None:
            return len(request.prompt_ids)
        counted = _prompt_alone(request)
        try:
            if self._renders == "full":
                return len((await self.rendered(counted)).ids)
            reply = await self.chatted(counted)
        except EngineError as error:
            if error.kind.code != "context_overflow":
                raise
            return (await self.api.tokenize(request)).count
        return reply.usage.prompt_tokens

    async def render(self, request: ModelRequest, *, closed: bool = False) -> Rendering:
        if self._renders == "suffix":
            return JsonRendering(bytes((await self.api.tokenize(request, closed=closed)).tokens))
        return await self.rendered(_prompt_alone(request), closed=closed)

    async def rendered(self, request: ModelRequest, *, closed: bool = False) -> JsonRendering:
        """The prompt's ids as the chat endpoint itself would have them."""
        body = await self.api.body(request)
        if closed:
            body["add_generation_prompt"] = False
        return JsonRendering(bytes((await self.api.rendered(body))["token_ids"]))

    async def pause(self, mode: PauseMode) -> None:
        await self.api.order(f"/pause?mode={mode}")

    async def unpause(self) -> None:
        await self.api.order("/resume")

    async def update(self, policy_version: str, weights_path: str | None) -> None:
        if weights_path is not None:
            loading = {"weights_path": weights_path}
            await self.api.order("/collective_rpc", method="reload_weights", kwargs=loading)
        # Answers that stand still go on with what the new weights make of their context.
        await self.api.order("/reset_prefix_cache?reset_running_requests=true")
        await self.api.order("/update_weight_version", new_version=policy_version)

    async def aclose(self) -> None:
        await self.api.http.aclose()


def _prompt_alone(request: ModelRequest) -> ModelRequest:
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


# ---- going on with an answer ----


def may_resume(request: ModelRequest) -> bool:
    """Not where a grammar holds: it would begin anew in the middle of what it has to end."""
    return (
        request.response_format is None
        and "structured_outputs" not in request.sampling
        and request.tool_choice in (None, "auto", "none")
    )


def rest_of(
    request: ModelRequest, partial: EngineReply, context: Ids, left: int | None
) -> ModelRequest:
    """What asks for the rest of an answer, `left` tokens at most."""
    sampling = dict(request.sampling)
    if isinstance(least := sampling.get("min_tokens"), int):
        sampling["min_tokens"] = max(0, least - len(partial.sampled_ids))
    return msgspec.structs.replace(request, prompt_ids=context, max_tokens=left, sampling=sampling)


def joined(partial: EngineReply, rest: EngineReply) -> EngineReply:
    """Both as one answer, whose blocks are yet to be found out."""
    known = len(partial.sampled_ids)
    logprobs: Floats | None = None
    if partial.logprobs is not None and rest.logprobs is not None:
        logprobs = partial.logprobs + rest.logprobs
    return EngineReply(
        prompt_ids=partial.prompt_ids,
        sampled_ids=partial.sampled_ids + rest.sampled_ids,
        logprobs=logprobs,
        blocks=[],
        finish_reason=rest.finish_reason,
        stop_reason=rest.stop_reason,
        usage=Usage(
            prompt_tokens=partial.usage.prompt_tokens,
            completion_tokens=partial.usage.completion_tokens + rest.usage.completion_tokens,
            cached_tokens=partial.usage.cached_tokens,
        ),
        model=rest.model,
        logprob_kind=partial.logprob_kind,
        versions=[
            *partial.versions,
            *(
                VersionSpan(version=span.version, start=known + span.start, end=known + span.end)
                for span in rest.versions
            ),
        ],
        # Routing is told of the whole context, prompt included; the rest only of what it sampled.
        tensors=[tensor for tensor in rest.tensors if tensor.name == "routed_experts"],
        findings=rest.findings,
        notes=[*partial.notes, f"resumed: aborted after {known} tokens"],
    )


def cut_at(blocks: list[Block], stop: str) -> list[Block]:
    """Blocks whose tokens reach beyond the stop string that ended them, without it."""
    if not blocks:
        return blocks
    *others, last = blocks
    if isinstance(last, Call):
        return blocks  # its arguments were parsed, so the string is none of their text
    text, found, _ = last.text.rpartition(stop)
    if not found:
        return blocks
    return [*others, msgspec.structs.replace(last, text=text)] if text else others
