"""What a vLLM server can do, found out by asking it: one report of short calls.

What is not told is tried. A token that nothing else is allowed beside shows whether log
probabilities are the model's own, and whether the engine stops at it; a turn in the template's own
words shows what the parsers make of it; ids that no template would render show whether they are
taken as they are.
"""

import json
from typing import TYPE_CHECKING, Any

import msgspec

from builders.ids import common_end
from builders.records import Ids
from polar_gateway.dialects.turn import Block, Call, ModelRequest, Reasoning, Text, Usage
from polar_gateway.engines.base import EngineError, EngineReply, TokenRoute
from polar_gateway.engines.id_cache import decoded_ids, spelling
from polar_gateway.engines.probing import ENDS, SAID, TOOL_NAME, Probe
from polar_gateway.engines.vllm_api import DERENDER, GENERATE

if TYPE_CHECKING:
    from polar_gateway.engines.vllm import Vllm

THOUGHT, SPOKEN, WORDS = "The word is yes.", "Fine.", {"word": "yes"}

CERTAIN = -1e-6
"""Log probabilities above are those of a token that was the only one allowed."""

MALFORMED = '{"word": '
"""Arguments as a model may spell them, and as a harness echoes them."""


class VllmProbe(Probe):
    engine: "Vllm"
    kind = "as a vLLM would"
    remedy = "; vLLM 0.10 or newer is needed"

    async def run(self) -> None:
        found = self.found
        found.version = await self.engine.api.version()
        if not await self.serves_model():
            return
        reply = await self.short_answer()
        if found.tool_parser is None:
            found.tool_parser = True  # else it would have refused to choose among tools
        trusted = self.trusts(reply)
        if trusted:
            await self.streams(reply)
        await self._renders(reply)
        await self._ends_of_turns()
        if trusted:
            await self._logprobs(reply)
            await self._token_routes(reply)
            await self._parsers()
            await self._malformed_arguments()
        await self._controls()

    async def _renders(self, reply: EngineReply) -> None:
        """Whether it tells a prompt's ids without sampling, and tells them right."""
        found, request = self.found, self.request()
        if await self._try_render(request) == reply.prompt_ids and reply.prompt_ids:
            found.renders = "full"
            return
        try:
            await self.engine.api.tokenize(request)
        except EngineError:
            found.notes.append("it tells nothing of how it renders messages")
        else:
            found.renders = "suffix"
            found.notes.append(
                "it renders only messages without earlier reasoning, so that what a request adds "
                "is told by a frame of dummy messages; --enable-scale-out makes it render all"
            )

    async def _try_render(self, request: ModelRequest, *, closed: bool = False) -> Ids | None:
        try:
            return (await self.engine.rendered(request, closed=closed)).ids
        except EngineError:
            return None

    async def _ends_of_turns(self) -> None:
        """The id that the template puts behind an answer, then others at which it stops."""
        found, closing = self.found, await self._closing_ids()
        tried = dict.fromkeys([*closing, *[i for text in ENDS for i in await self._single(text)]])
        stops = [i for i in tried if await self._stops_at(i)]
        first = next((i for i in closing if i in stops), closing[0] if closing else None)
        found.end_of_turn_ids = [
            *([] if first is None else [first]),
            *(i for i in stops if i != first),
        ]
        if first is None:
            found.notes.append("it does not tell with which id its template closes a turn")
        try:
            found.end_of_turn_texts = [
                await self.engine.api.detokenize([i]) for i in found.end_of_turn_ids
            ]
        except EngineError:
            found.notes.append("it does not tell the text of its end-of-turn ids")

    async def _closing_ids(self) -> list[int]:
        """Those with which two renderings end that differ in their answer alone; none where the
        server renders none."""
        renderings = []
        for answer in ("yes", "no"):
            messages = [SAID, {"role": "assistant", "content": answer}]
            request = ModelRequest(model=self.found.model, messages=messages)
            try:
                tokenized = await self.engine.api.tokenize(request, closed=True)
            except EngineError:
                return []
            renderings.append(decoded_ids(bytes(tokenized.tokens)))
        yes, no = renderings
        return yes[len(yes) - common_end(yes, no) :].tolist()

    async def _single(self, text: str) -> list[int]:
        """The id of a text that is one token."""
        try:
            ids = await self.engine.api.ids_of(text)
        except EngineError:
            return []
        return ids if len(ids) == 1 else []

    async def _forced(self, token: int, max_tokens: int) -> EngineReply | None:
        """An answer of which only this token may be part; None if it was not held to it."""
        allowed = {"allowed_token_ids": [token]}
        try:
            reply = await self.engine.chatted(
                self.request(tools=None, max_tokens=max_tokens, sampling=allowed)
            )
        except EngineError as error:
            if error.again:
                raise
            return None
        return reply if set(reply.sampled_ids) == {token} else None

    async def _stops_at(self, token: int) -> bool:
        reply = await self._forced(token, 2)
        return reply is not None and len(reply.sampled_ids) == 1 and reply.finish_reason == "stop"

    async def _logprobs(self, reply: EngineReply) -> None:
        forced = await self._forced(reply.prompt_ids[0], 1)
        found = self.found
        if forced is None or forced.logprobs is None:
            found.notes.append("whether its log probabilities are the model's own is not known")
        elif forced.logprobs[0] > CERTAIN:
            found.logprob_kind = "processed"
        else:
            found.logprob_kind = "raw"
            found.notes.append(
                "its log probabilities are the model's own, which are not those of calls with "
                "another temperature than 1, top-p, top-k, penalties or bias; with "
                "--logprobs-mode processed_logprobs they are"
            )

    async def _token_routes(self, reply: EngineReply) -> None:
        """Whether a prompt that no template would render is read as it was sent."""
        found, engine = self.found, self.engine
        prompt = reply.prompt_ids + reply.sampled_ids
        request = self.request(prompt_ids=prompt, max_tokens=1)
        routes: dict[TokenRoute, Any] = {"chat": engine.chatted, "generate": engine.generated}
        for route, ask in routes.items():
            if route == "generate" and not await self.has(GENERATE, DERENDER):
                continue
            try:
                echoed: EngineReply = await ask(request, "polar-probe-3")
            except EngineError as error:
                if error.again:
                    raise
                found.notes.append(f"token route {route}: {error}")
                continue
            if echoed.prompt_ids != prompt:
                found.notes.append(f"token route {route}: it did not read the ids that were sent")
                continue
            found.token_routes.append(route)
            if echoed.versions:
                found.weight_versions, found.weight_version = True, echoed.versions[-1].version
        found.token_routes.sort(key=lambda route: route != engine.token_route)
        if engine.token_route == "generate" and "generate" not in found.token_routes:
            found.problems.append(
                "token_route is 'generate', which it cannot be asked by; --enable-scale-out is needed"
            )
        found.resumes = "generate" in found.token_routes
        if not found.token_routes:
            found.notes.append("it takes no prompts as ids, so it is asked with messages")
        if not found.resumes:
            found.notes.append(
                "an aborted answer cannot be gone on with; --enable-scale-out makes that possible"
            )

    async def _parsers(self) -> None:
        """What its parsers make of a turn in the template's own words."""
        turn = await self._own_words()
        if turn is None or not self.found.resumes:
            return
        prompt, ids = turn
        try:
            spelled = await self.engine.api.detokenize(ids.tolist())
            blocks = await self._parsed(prompt, ids)
        except EngineError as error:
            if error.again:
                raise
            self.found.notes.append(f"what its parsers do is not known: {error}")
            return
        self._judge_parsers(spelled, blocks)

    async def _parsed(self, prompt: Ids, ids: Ids) -> list[Block]:
        reply = EngineReply(
            prompt_ids=prompt,
            sampled_ids=ids,
            logprobs=None,
            blocks=[],
            finish_reason="length",
            usage=Usage(),
        )
        return await self.engine.parsed(self.request(), reply, spelling(prompt))

    def _judge_parsers(self, spelled: str, blocks: list[Block]) -> None:
        """`spelled` is the text of the turn of which they made the blocks."""
        found = self.found
        if THOUGHT in spelled:
            thought = "".join(block.text for block in blocks if isinstance(block, Reasoning))
            text = "".join(block.text for block in blocks if isinstance(block, Text))
            found.reasoning_parser = THOUGHT in thought and THOUGHT not in text
            if not found.reasoning_parser:
                found.notes.append(
                    "reasoning as its chat template writes it comes as text; --reasoning-parser "
                    "tells them apart"
                )
        if self._offers_tools and TOOL_NAME in spelled:
            found.tool_parser = any(
                block.name == TOOL_NAME and _words(block.arguments) == WORDS
                for block in blocks
                if isinstance(block, Call)
            )
            if not found.tool_parser:
                found.notes.append(
                    "calls as its chat template writes them come as text: another "
                    "--tool-call-parser is needed for harnesses that use tools"
                )

    async def _own_words(self) -> tuple[Ids, Ids] | None:
        """A prompt, and an answer with all that there is as the template renders it behind it."""
        answer = {"role": "assistant", "content": SPOKEN, "reasoning_content": THOUGHT}
        if self._offers_tools:
            answer["tool_calls"] = [_call(json.dumps(WORDS))]  # type: ignore[assignment]
        prompt = await self._try_render(self.request())
        whole = await self._try_render(self.request(messages=[SAID, answer]), closed=True)
        if prompt is None or whole is None or whole[: len(prompt)] != prompt:
            return None
        ids = whole[len(prompt) :]
        for end in self.found.end_of_turn_ids[:1]:
            if end in ids:
                ids = ids[: ids.index(end)]
        return (prompt, ids) if ids else None

    async def _malformed_arguments(self) -> None:
        """Whether it still answers when a harness echoes a call that the model garbled."""
        if not self._offers_tools:
            return
        messages = [
            SAID,
            {"role": "assistant", "content": "", "tool_calls": [_call(MALFORMED)]},
            {"role": "tool", "tool_call_id": "call_1", "content": "What?"},
        ]
        try:
            await self.engine.chatted(self.request(messages=messages, max_tokens=1))
        except EngineError as error:  # of any kind: templates that choke on them make a server fail
            self.found.notes.append(
                f"it refuses conversations with malformed tool arguments in messages mode: {error}"
            )

    async def _controls(self) -> None:
        found = self.found
        if await self.has("/pause", "/resume"):
            found.controls += ["pause", "abort"]
        if await self.has("/collective_rpc", "/reset_prefix_cache", "/update_weight_version"):
            found.controls.append("update")
            found.weight_version = found.weight_version or await self.engine.api.weight_version()
        if not found.controls:
            found.notes.append(
                "it takes no orders to pause or to change its weights; VLLM_SERVER_DEV_MODE=1 "
                "makes it take them"
            )
            return
        try:
            found.kv_connector = await self.engine.api.kv_connector()
        except EngineError as error:
            found.notes.append(f"whether it has a KV connector is not known: {error}")


def _call(arguments: str) -> dict[str, Any]:
    return {
        "id": "call_1",
        "type": "function",
        "function": {"name": TOOL_NAME, "arguments": arguments},
    }


def _words(arguments: str) -> Any:
    try:
        return msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return None
