"""SGLang through its chat route and the routes of its native API beside it.

Ids are asked for by fields of SGLang's own, other ones for whole answers than for streams, and come
back in other places than vLLM's. A stream tells its ids behind everything else, so from the end of
its first tool call on all of it waits for them. Prompts of ids go to the chat route, too
(`input_ids`), whose parsers then read the answer. Whole answers say which weights sampled them,
streams do not: `token_route="generate"`, which asks for that, makes every answer come whole.
"""

from collections.abc import Iterable
from typing import Any
from uuid import uuid4

from builders.records import LogprobKind, TokenNode
from polar_gateway.dialects.turn import Block, Call, ModelRequest, Reasoning, Text
from polar_gateway.engines.answers import Piece
from polar_gateway.engines.base import (
    EngineProbe,
    EngineReply,
    EngineStream,
    PauseMode,
    Rendering,
    TokenRoute,
)
from polar_gateway.engines.chat import ChatEngine, prompt_alone
from polar_gateway.engines.ids_at_end import IdsAtEnd
from polar_gateway.engines.rendering import JsonRendering
from polar_gateway.engines.resuming import gone_on_with
from polar_gateway.engines.sglang_answers import stream_pieces, whole_answer
from polar_gateway.engines.sglang_api import ServerInfo, SglangApi
from polar_gateway.engines.sglang_probe import SglangProbe
from polar_gateway.engines.streams import AnswerStream

NEUTRAL = {"top_p": (1, 1.0), "top_k": (-1, 0), "min_p": (0, 0.0)}
"""What cuts a distribution off, and the values that do not."""
PAUSES: dict[PauseMode, str] = {"wait": "retract", "keep": "retract", "abort": "abort"}
"""Answers that are retracted go on after a pause with what the weights then make of their context;
those that SGLang lets stand still would keep what the old ones made of it. It cannot wait by itself:
that all is finished is for the caller to see to."""


class Sglang(ChatEngine):
    """One SGLang server. `model` is its name for the weights; empty takes the first it lists."""

    name = "sglang"

    def __init__(
        self,
        base_url: str,
        *,
        model: str = "",
        api_key: str | None = None,
        token_route: TokenRoute = "chat",
    ) -> None:
        self.api = SglangApi(base_url, api_key, model)
        super().__init__(self.api)
        self.token_route = token_route
        # What the probe finds out.
        self.info = ServerInfo()
        self._renders = False
        self._logprob_kind: LogprobKind = "unknown"

    async def probe(self) -> EngineProbe:
        """Raises EngineError for what may pass: a server that is not there yet, or busy."""
        found = await SglangProbe(self, self.api, self.name).report()
        self.stream_ids = found.stream_ids or not found.token_ids
        self._renders = found.renders == "full"
        self._logprob_kind = found.logprob_kind
        return found

    async def stream(
        self, request: ModelRequest, request_id: str, after: TokenNode | None = None
    ) -> EngineStream:
        stream = await super().stream(request, request_id, after)
        return IdsAtEnd(stream) if isinstance(stream, AnswerStream) else stream

    def streams(self) -> bool:
        return self.token_route != "generate" and self.stream_ids

    async def body(
        self, request: ModelRequest, sent: bytes | None = None, *, stream: bool = False
    ) -> dict[str, Any]:
        body = await self.api.body(request, sent, stream=stream)
        if self.info.enable_return_routed_experts and not stream:
            body["return_routed_experts"] = True
        return body

    def read_whole(self, data: bytes) -> Piece:
        return whole_answer(data)

    def read_event(self, data: bytes) -> Iterable[Piece]:
        return stream_pieces(data)

    def logprob_kind(self, request: ModelRequest) -> LogprobKind:
        """They are taken after the temperature, and before anything is cut off."""
        given = request.sampling
        cut = any(given.get(name) not in (None, *neutral) for name, neutral in NEUTRAL.items())
        return "unknown" if cut and self._logprob_kind == "processed" else self._logprob_kind

    async def count_tokens(self, request: ModelRequest) -> int:
        """As the server renders the request where it tells, else as it counts the prompt of an
        answer of one token."""
        if request.prompt_ids is not None:
            return len(request.prompt_ids)
        if self._renders:
            return len((await self.render(request)).ids)
        return (await self.chatted(prompt_alone(request))).usage.prompt_tokens

    async def render(self, request: ModelRequest, *, closed: bool = False) -> Rendering:
        return JsonRendering(await self.api.tokenize(request, closed=closed))

    async def resume(
        self, request: ModelRequest, request_id: str, partial: EngineReply
    ) -> EngineReply:
        async def ask(rest: ModelRequest) -> EngineReply:
            return await self.complete(rest, request_id)

        reply = await gone_on_with(request, partial, ask, self.api.detokenize)
        reply.blocks = await self.parsed(request, reply)
        if reply.finish_reason in ("stop", "tool_calls"):
            called = any(isinstance(block, Call) for block in reply.blocks)
            reply.finish_reason = "tool_calls" if called else "stop"
        return reply

    async def parsed(self, request: ModelRequest, reply: EngineReply) -> list[Block]:
        """What the server's parsers make of an answer's tokens."""
        blocks: list[Block] = []
        text = await self._text(reply)
        if self.info.reasoning_parser is not None:
            separated = await self.api.separate_reasoning(text, self.info.reasoning_parser)
            text = separated.text or ""
            if separated.reasoning_text:
                blocks.append(Reasoning(text=separated.reasoning_text))
        calls: list[Block] = []
        if request.tools and request.tool_choice != "none" and self.info.tool_call_parser:
            found = await self.api.parse_calls(text, request.tools, self.info.tool_call_parser)
            text = found.normal_text
            calls = [
                Call(id=f"call_{uuid4().hex[:24]}", name=call.name or "", arguments=call.parameters)
                for call in found.calls
            ]
        if text:
            blocks.append(Text(text=text))
        return blocks + calls

    async def _text(self, reply: EngineReply) -> str:
        """Without what ended it."""
        ids, stop = reply.sampled_ids.tolist(), reply.stop_reason
        if isinstance(stop, int) and ids and ids[-1] == stop:
            del ids[-1]
        text = await self.api.detokenize(ids) if ids else ""
        return text.rpartition(stop)[0] if isinstance(stop, str) and stop in text else text

    async def pause(self, mode: PauseMode) -> None:
        await self.api.order("/pause_generation", mode=PAUSES[mode])

    async def unpause(self) -> None:
        await self.api.order("/continue_generation")

    async def weight_version(self) -> str | None:
        return await self.api.weight_version()

    async def update(self, policy_version: str, weights_path: str | None) -> None:
        """Nothing in flight is aborted, which is what SGLang does if it is not told otherwise."""
        if weights_path is None:
            named = {"new_version": policy_version, "abort_all_requests": False}
            await self.api.order("/update_weight_version", **named)
            await self.api.flush_cache()
        else:
            await self.api.order(
                "/update_weights_from_disk",
                model_path=weights_path,
                weight_version=policy_version,
                abort_all_requests=False,
                flush_cache=True,
            )
