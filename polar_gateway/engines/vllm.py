"""vLLM through /v1/chat/completions: token ids captured, prompts sent as messages or as ids.

vLLM reports the prompt's ids once and the sampled ids beside the text (`return_token_ids`); the
stop token is among them. Only what is read is decoded. `include_reasoning` is never sent: false
removes ids and log probabilities from the answer.

A prompt of ids goes into `kv_transfer_params`, which is how a decoding server is handed what another
one has tokenized: the ids go to the model as they are, the messages are not even rendered, and the
answer is parsed as any other. The other route (`token_route="generate"`) asks three endpoints one
after the other, of which the second says which weights sampled which token.
"""

from collections.abc import Iterable
from typing import Any

from builders.records import LogprobKind, TokenNode
from polar_gateway.dialects.turn import Block, Call, ModelRequest
from polar_gateway.engines.answers import Piece, blocks_of, whole_reply
from polar_gateway.engines.base import (
    EngineError,
    EngineProbe,
    EngineReply,
    PauseMode,
    Rendering,
    Renders,
    TokenRoute,
)
from polar_gateway.engines.chat import ChatEngine, prompt_alone
from polar_gateway.engines.id_cache import spelling
from polar_gateway.engines.rendering import JsonRendering
from polar_gateway.engines.resuming import cut_at, gone_on_with
from polar_gateway.engines.vllm_answers import chat_pieces, whole_answer
from polar_gateway.engines.vllm_api import VllmApi
from polar_gateway.engines.vllm_probe import VllmProbe


class Vllm(ChatEngine):
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
        super().__init__(self.api)
        self.token_route = token_route
        # What the probe finds out; until then nothing is taken for granted but streams.
        self._renders: Renders = "none"
        self._logprob_kind: LogprobKind = "unknown"

    async def probe(self) -> EngineProbe:
        """Raises EngineError for what may pass: a server that is not there yet, or busy."""
        found = await VllmProbe(self, self.api, self.name).report()
        self.stream_ids = found.stream_ids or not found.token_ids
        self._renders = found.renders
        self._logprob_kind = found.logprob_kind
        return found

    async def complete(
        self, request: ModelRequest, request_id: str, after: TokenNode | None = None
    ) -> EngineReply:
        ask = self.generated if self.token_route == "generate" else self.chatted
        return await self.with_room(ask, request, request_id, after)

    def streams(self) -> bool:
        return self.token_route != "generate" and self.stream_ids

    async def body(
        self, request: ModelRequest, sent: bytes | None = None, *, stream: bool = False
    ) -> dict[str, Any]:
        return await self.api.body(request, sent, stream=stream)

    def read_whole(self, data: bytes) -> Piece:
        return whole_answer(data)

    def read_event(self, data: bytes) -> Iterable[Piece]:
        return chat_pieces(data)

    def logprob_kind(self, request: ModelRequest) -> LogprobKind:
        return self._logprob_kind

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
        prompt, sent = self.prompt(request, request_id, after)
        rendered = await self.api.rendered(await self.api.body(request, sent))
        answer = whole_answer(await self.api.generate(rendered, request_id))
        reply = whole_reply(answer, prompt, self._logprob_kind)
        return reply, bytes(rendered["token_ids"])

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
        async def sampled(
            rest: ModelRequest, request_id: str, after: TokenNode | None
        ) -> EngineReply:
            return (await self._sampled(rest, request_id, after))[0]

        async def ask(rest: ModelRequest) -> EngineReply:
            return await self.with_room(sampled, rest, request_id, None)

        reply = await gone_on_with(request, partial, ask, self.api.detokenize)
        return await self._parsed(request, reply, spelling(partial.prompt_ids))

    async def count_too_long(self, request: ModelRequest) -> int:
        return (await self.api.tokenize(request)).count

    async def count_tokens(self, request: ModelRequest) -> int:
        """Exact: as the server renders the request where it tells, else as it counts the prompt of
        an answer of one token. What is too long to be asked is counted by /tokenize, which renders
        neither tools nor earlier reasoning quite as a call would."""
        if request.prompt_ids is not None:
            return len(request.prompt_ids)
        counted = prompt_alone(request)
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
        return await self.rendered(prompt_alone(request), closed=closed)

    async def rendered(self, request: ModelRequest, *, closed: bool = False) -> JsonRendering:
        """The prompt's ids as the chat endpoint itself would have them."""
        body = await self.api.body(request)
        if closed:
            body["add_generation_prompt"] = False
        return JsonRendering(await self.api.rendered_ids(body))

    async def pause(self, mode: PauseMode) -> None:
        await self.api.order(f"/pause?mode={mode}")

    async def unpause(self) -> None:
        await self.api.order("/resume")

    async def weight_version(self) -> str | None:
        return await self.api.weight_version()

    async def update(self, policy_version: str, weights_path: str | None) -> None:
        if weights_path is not None:
            loading = {"weights_path": weights_path}
            await self.api.order("/collective_rpc", method="reload_weights", kwargs=loading)
        # Answers that stand still go on with what the new weights make of their context.
        await self.api.order("/reset_prefix_cache?reset_running_requests=true")
        await self.api.order("/update_weight_version", new_version=policy_version)
