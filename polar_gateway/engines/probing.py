"""What the probes of all engines have in common: short calls, of which one report is made."""

from abc import ABC, abstractmethod
from typing import Any

from polar_gateway.dialects.turn import ModelRequest
from polar_gateway.engines.base import EngineError, EngineProbe, EngineReply
from polar_gateway.engines.chat import ChatEngine
from polar_gateway.engines.chat_api import ChatApi

TOKENS = 8
"""Of a short answer."""
SAID = {"role": "user", "content": "Say yes."}
TOOL_NAME = "say"
TOOL = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "Say a word.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
"""What parsers do to a stream they do only where tools are offered."""

ENDS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "</s>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
)
"""At which models of the common families stop; where one is a single token, it is tried."""


class Probe(ABC):
    """What is found out about one server; `found` is the report as far as it has come."""

    kind: str
    """What the server should be, in words."""
    remedy: str
    """What is to be said where its answers cannot be trained on, after what they lack."""

    def __init__(self, engine: ChatEngine, api: ChatApi, name: str) -> None:
        self.engine = engine
        self.found = EngineProbe(engine=name, model=engine.model)
        self._chat = api
        self._offers_tools = True

    async def report(self) -> EngineProbe:
        """Problems come back as sentences. Raises EngineError for what may pass."""
        try:
            await self.run()
        except EngineError as error:
            if error.again:
                raise
            self.found.problems.append(f"it does not answer {self.kind}: {error}")
        return self.found

    @abstractmethod
    async def run(self) -> None:
        """Find out all that there is."""

    async def serves_model(self) -> bool:
        """Whether it has the model that is wanted, which is the first one where none is named."""
        found = self.found
        served = {model.id: model.max_model_len for model in await self._chat.models()}
        if not served:
            found.problems.append("it serves no model")
            return False
        found.model = self._chat.model = self._chat.model or next(iter(served))
        if found.model not in served:
            names = ", ".join(sorted(served))
            found.problems.append(f"it does not serve {found.model!r} but {names}")
            return False
        found.max_model_len = served[found.model]
        return True

    def request(self, **fields: Any) -> ModelRequest:
        """A short question, with a tool where the server does not refuse those."""
        tools = [TOOL] if self._offers_tools else None
        common = {"model": self.found.model, "messages": [SAID], "tools": tools}
        return ModelRequest(**{**common, "max_tokens": TOKENS, **fields})

    async def short_answer(self) -> EngineReply:
        """Asked for without tools where they are refused, which is noted."""
        try:
            return await self.engine.chatted(self.request(), "polar-probe")
        except EngineError as error:
            if error.kind.code != "invalid_request":
                raise
            self.found.notes.append(f"it refuses calls that offer tools: {error}")
            self._offers_tools = self.found.tool_parser = False
            return await self.engine.chatted(self.request(), "polar-probe")

    def trusts(self, reply: EngineReply) -> bool:
        """Whether the short answer came with all that training needs."""
        self.found.token_ids = not {"ids_missing", "prompt_ids_missing"} & set(reply.findings)
        if reply.findings:
            self.found.problems.append(
                f"a short answer of {self.found.model!r} came without trustworthy tokens "
                f"({', '.join(reply.findings)}){self.remedy}"
            )
        return not reply.findings

    async def streams(self, whole: EngineReply) -> None:
        """Whether a streamed answer has what the whole one had."""
        found = self.found
        try:
            stream = await self.engine.streamed(self.request(), "polar-probe-stream")
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

    async def has(self, *paths: str) -> bool:
        """Whether there are all of these endpoints."""
        return all([await self._chat.http.has(path) for path in paths])
