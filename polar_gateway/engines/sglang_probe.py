"""What a running SGLang server can do, found out by asking it: one report of short calls."""

from typing import TYPE_CHECKING

from builders.ids import common_end
from polar_gateway.engines.base import EngineError, EngineReply
from polar_gateway.engines.probing import ENDS, SAID, Probe

if TYPE_CHECKING:
    from polar_gateway.engines.sglang import Sglang

HOT = 4.0
"""A temperature at which the likeliest token is clearly less likely than at 1."""
FORCED = 100.0
"""A bias against which no other token comes up."""
SAME = 1e-3
"""Log probabilities that differ by less are one, read twice."""


class SglangProbe(Probe):
    engine: "Sglang"
    kind = "as an SGLang would"
    remedy = (
        "; it must know the fields return_token_ids and return_meta_info of chat completions, as "
        "newer versions do"
    )

    async def run(self) -> None:
        found, engine = self.found, self.engine
        info = engine.info = await engine.api.server_info()
        found.version = info.version
        found.reasoning_parser = info.reasoning_parser is not None
        found.tool_parser = info.tool_call_parser is not None
        found.kv_connector = False  # what moves caches has fields of its own
        if not await self.serves_model():
            return
        reply = await self.short_answer()
        if self.trusts(reply):
            await self.streams(reply)
            await self._renders(reply)
            await self._ends_of_turns()
            await self._logprobs()
            await self._token_route(reply)
            if reply.versions:
                found.weight_versions, found.weight_version = True, reply.versions[-1].version
            await self._resumes()
        await self._controls()
        self._remark()

    async def _renders(self, reply: EngineReply) -> None:
        """Whether it tells a prompt's ids without sampling, tells them right, and also where the
        beginning of the answer is left out."""
        found, engine = self.found, self.engine
        try:
            rendered = await engine.render(self.request())
            closed = await engine.render(self.request(), closed=True)
            full = bool(reply.prompt_ids) and rendered.ids == reply.prompt_ids
            full = full and rendered.after(closed) is not None
        except EngineError:
            full = False
        if full:
            found.renders = "full"
        else:
            found.notes.append(
                "it tells nothing of how it renders messages, so it is asked with messages; newer "
                "versions tell it under /tokenize"
            )

    async def _ends_of_turns(self) -> None:
        """The id that the template puts behind an answer, then others at which it stops."""
        found = self.found
        closing: list[int] = []
        if found.renders == "full":
            renderings = []
            for answer in ("yes", "no"):
                messages = [SAID, {"role": "assistant", "content": answer}]
                closed = await self.engine.render(self.request(messages=messages), closed=True)
                renderings.append(closed.ids)
            yes, no = renderings
            closing = yes[len(yes) - common_end(yes, no) :][:1].tolist()
        tried = dict.fromkeys([*closing, *[i for text in ENDS for i in await self._single(text)]])
        others = [i for i in tried if i not in closing and await self._stops_at(i)]
        found.end_of_turn_ids = closing + others
        if not closing:
            found.notes.append("it does not tell with which id its template closes a turn")
        found.end_of_turn_texts = [
            await self.engine.api.detokenize([i]) for i in found.end_of_turn_ids
        ]

    async def _single(self, text: str) -> list[int]:
        """The id of a text that is one token."""
        try:
            ids = await self.engine.api.ids_of(text)
        except EngineError as error:
            if error.again:
                raise
            return []
        return ids if len(ids) == 1 else []

    async def _stops_at(self, token: int) -> bool:
        bias = {"temperature": 0.0, "logit_bias": {str(token): FORCED}}
        reply = await self.engine.chatted(
            self.request(tools=None, max_tokens=2, sampling=bias), "polar-probe-end"
        )
        return reply.finish_reason == "stop" and reply.sampled_ids.tolist() == [token]

    async def _logprobs(self) -> None:
        """Whether the likeliest first token is less likely where the temperature is higher."""
        found, engine = self.found, self.engine
        likeliest = []
        for temperature in (1.0, HOT):
            request = self.request(max_tokens=1, sampling={"temperature": temperature})
            likeliest.append(await engine.api.likeliest(request))
        cool, hot = likeliest
        if cool is None or hot is None:
            found.notes.append("whether its log probabilities know the temperature is not known")
            return
        if abs(cool - hot) > SAME:
            found.logprob_kind = "processed"
            found.notes.append(
                "its log probabilities are taken after the temperature, and before top-p, top-k and "
                "min-p: those of calls that set these are not those of what was sampled from"
            )
        else:
            found.logprob_kind = "raw"
            found.notes.append(
                "its log probabilities are the model's own, which are not those of calls with "
                "another temperature than 1; without SGLANG_RETURN_ORIGINAL_LOGPROB they are"
            )

    async def _token_route(self, reply: EngineReply) -> None:
        """Whether a prompt that no template would render is read as it was sent."""
        prompt = reply.prompt_ids + reply.sampled_ids
        try:
            echoed = await self.engine.chatted(
                self.request(prompt_ids=prompt, max_tokens=1), "polar-probe-ids"
            )
        except EngineError as error:
            if error.again:
                raise
            self.found.notes.append(f"it takes no prompts as ids: {error}")
            return
        if echoed.prompt_ids == prompt:
            self.found.token_routes.append("chat")
        else:
            self.found.notes.append(
                "it does not read prompts as ids (input_ids), so it is asked with messages"
            )

    async def _resumes(self) -> None:
        """Whether its parsers make of an answer's ids what they made of the answer."""
        found, engine = self.found, self.engine
        if not found.token_routes:
            return
        reply = await engine.chatted(self.request(), "polar-probe-parsed")
        try:
            found.resumes = await engine.parsed(self.request(), reply) == reply.blocks
        except EngineError as error:
            if error.again:
                raise
        if not found.resumes:
            found.notes.append(
                "an aborted answer cannot be gone on with: /separate_reasoning and "
                "/parse_function_call read answers otherwise than chat completions do"
            )

    async def _controls(self) -> None:
        found = self.found
        if await self.has("/pause_generation", "/continue_generation"):
            found.controls += ["pause", "abort"]
        if await self.has("/update_weights_from_disk", "/update_weight_version"):
            found.controls.append("update")
        if not found.controls:
            found.notes.append("it takes no orders to pause or to change its weights")

    def _remark(self) -> None:
        found = self.found
        if found.stream_ids:
            found.notes.append(
                "streams tell ids at their end: of an answer that a harness left half-way, nothing "
                "can be trained, and tool calls wait for the end of the answer"
            )
        if not found.weight_versions:
            found.notes.append(
                "it does not say which weights sampled which token of an answer, so that one that "
                "saw an update has no exact versions"
            )
        if not found.reasoning_parser:
            found.notes.append("reasoning comes as text; --reasoning-parser tells them apart")
        if not found.tool_parser:
            found.notes.append(
                "tool calls come as text; --tool-call-parser is needed for harnesses that use tools"
            )
