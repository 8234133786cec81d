"""What a running SGLang server can do, found out by asking it: one report of short calls."""

from typing import TYPE_CHECKING, Any

from polar_gateway.dialects.turn import ModelRequest
from polar_gateway.engines.base import EngineError, EngineProbe, EngineReply
from polar_gateway.engines.vllm_probe import ENDS, SAID, TOKENS, TOOL, common_suffix

if TYPE_CHECKING:
    from polar_gateway.engines.sglang import Sglang

HOT = 4.0
"""A temperature at which the likeliest token is clearly less likely than at 1."""
FORCED = 100.0
"""A bias against which no other token comes up."""
SAME = 1e-3
"""Log probabilities that differ by less are one, read twice."""


async def probe(engine: "Sglang") -> EngineProbe:
    """Problems come back as sentences. Raises EngineError for what may pass."""
    found = EngineProbe(engine=engine.name, model=engine.model)
    try:
        await _Probe(engine, found).run()
    except EngineError as error:
        if error.again:
            raise
        found.problems.append(f"it does not answer as an SGLang would: {error}")
    return found


class _Probe:
    def __init__(self, engine: "Sglang", found: EngineProbe) -> None:
        self._engine = engine
        self._found = found
        self._offers_tools = True

    async def run(self) -> None:
        found, engine = self._found, self._engine
        info = engine.info = await engine.api.server_info()
        found.version = info.version
        found.reasoning_parser = info.reasoning_parser is not None
        found.tool_parser = info.tool_call_parser is not None
        found.kv_connector = False  # what moves caches has fields of its own
        if not await self._serves_model():
            return
        reply = await self._short_answer()
        found.token_ids = not {"ids_missing", "prompt_ids_missing"} & set(reply.findings)
        if reply.findings:
            found.problems.append(
                f"a short answer of {found.model!r} came without trustworthy tokens "
                f"({', '.join(reply.findings)}); it must know the fields return_token_ids and "
                "return_meta_info of chat completions, as newer versions do"
            )
        else:
            await self._streams(reply)
            await self._renders(reply)
            await self._ends_of_turns()
            await self._logprobs()
            await self._token_route(reply)
            if reply.versions:
                found.weight_versions, found.weight_version = True, reply.versions[-1].version
            await self._resumes()
        await self._controls()
        self._remark()

    async def _serves_model(self) -> bool:
        found = self._found
        served = {model.id: model.max_model_len for model in await self._engine.api.models()}
        if not served:
            found.problems.append("it serves no model")
            return False
        found.model = self._engine.api.model = self._engine.model or next(iter(served))
        if found.model not in served:
            names = ", ".join(sorted(served))
            found.problems.append(f"it does not serve {found.model!r} but {names}")
            return False
        found.max_model_len = served[found.model]
        return True

    def _request(self, **fields: Any) -> ModelRequest:
        tools = [TOOL] if self._offers_tools else None
        return ModelRequest(
            **{
                "model": self._found.model,
                "messages": [SAID],
                "tools": tools,
                "max_tokens": TOKENS,
                **fields,
            }
        )

    async def _short_answer(self) -> EngineReply:
        try:
            return await self._engine.chatted(self._request(), "polar-probe")
        except EngineError as error:
            if error.kind.code != "invalid_request":
                raise
            self._found.notes.append(f"it refuses calls that offer tools: {error}")
            self._offers_tools = self._found.tool_parser = False
            return await self._engine.chatted(self._request(), "polar-probe")

    async def _streams(self, whole: EngineReply) -> None:
        """Whether a streamed answer has what the whole one had."""
        found, engine = self._found, self._engine
        try:
            stream = await engine.streamed(self._request(), "polar-probe-stream")
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
        found.stream_ids = not lost
        if lost:
            found.notes.append(f"streamed answers are asked for whole, since streams fail: {lost}")

    async def _renders(self, reply: EngineReply) -> None:
        """Whether it tells a prompt's ids without sampling, tells them right, and also where the
        beginning of the answer is left out."""
        found, engine = self._found, self._engine
        try:
            rendered = await engine.render(self._request())
            closed = await engine.render(self._request(), closed=True)
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
        found = self._found
        closing: list[int] = []
        if found.renders == "full":
            renderings = []
            for answer in ("yes", "no"):
                messages = [SAID, {"role": "assistant", "content": answer}]
                closed = await self._engine.render(self._request(messages=messages), closed=True)
                renderings.append(closed.ids.tolist())
            closing = common_suffix(*renderings)[:1]
        tried = dict.fromkeys([*closing, *[i for text in ENDS for i in await self._single(text)]])
        others = [i for i in tried if i not in closing and await self._stops_at(i)]
        found.end_of_turn_ids = closing + others
        if not closing:
            found.notes.append("it does not tell with which id its template closes a turn")
        found.end_of_turn_texts = [
            await self._engine.api.detokenize([i]) for i in found.end_of_turn_ids
        ]

    async def _single(self, text: str) -> list[int]:
        """The id of a text that is one token."""
        try:
            ids = await self._engine.api.ids_of(text)
        except EngineError as error:
            if error.again:
                raise
            return []
        return ids if len(ids) == 1 else []

    async def _stops_at(self, token: int) -> bool:
        bias = {"temperature": 0.0, "logit_bias": {str(token): FORCED}}
        reply = await self._engine.chatted(
            self._request(tools=None, max_tokens=2, sampling=bias), "polar-probe-end"
        )
        return reply.finish_reason == "stop" and reply.sampled_ids.tolist() == [token]

    async def _logprobs(self) -> None:
        """Whether the likeliest first token is less likely where the temperature is higher."""
        found, engine = self._found, self._engine
        likeliest = []
        for temperature in (1.0, HOT):
            request = self._request(max_tokens=1, sampling={"temperature": temperature})
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
            echoed = await self._engine.chatted(
                self._request(prompt_ids=prompt, max_tokens=1), "polar-probe-ids"
            )
        except EngineError as error:
            if error.again:
                raise
            self._found.notes.append(f"it takes no prompts as ids: {error}")
            return
        if echoed.prompt_ids == prompt:
            self._found.token_routes.append("chat")
        else:
            self._found.notes.append(
                "it does not read prompts as ids (input_ids), so it is asked with messages"
            )

    async def _resumes(self) -> None:
        """Whether its parsers make of an answer's ids what they made of the answer."""
        found, engine = self._found, self._engine
        if not found.token_routes:
            return
        reply = await engine.chatted(self._request(), "polar-probe-parsed")
        try:
            found.resumes = await engine.parsed(self._request(), reply) == reply.blocks
        except EngineError as error:
            if error.again:
                raise
        if not found.resumes:
            found.notes.append(
                "an aborted answer cannot be gone on with: /separate_reasoning and "
                "/parse_function_call read answers otherwise than chat completions do"
            )

    async def _controls(self) -> None:
        found = self._found
        if await self._has("/pause_generation", "/continue_generation"):
            found.controls += ["pause", "abort"]
        if await self._has("/update_weights_from_disk", "/update_weight_version"):
            found.controls.append("update")
        if not found.controls:
            found.notes.append("it takes no orders to pause or to change its weights")

    async def _has(self, *paths: str) -> bool:
        return all([await self._engine.api.http.has(path) for path in paths])

    def _remark(self) -> None:
        found = self._found
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
