"""What a plain OpenAI-compatible server can do, found out by asking it."""

from typing import TYPE_CHECKING, Any

from polar_gateway.dialects.turn import ModelRequest
from polar_gateway.engines.base import EngineError, EngineReply
from polar_gateway.engines.probing import Probe

if TYPE_CHECKING:
    from polar_gateway.engines.openai import OpenAI


class OpenAIProbe(Probe):
    engine: "OpenAI"
    kind = "chat completions"
    remedy = (
        ": harnesses can be served by it, but what they do cannot be trained on; if it is a vLLM or "
        "an SGLang, it has to be configured as that engine"
    )

    async def run(self) -> None:
        if not await self.serves_model():
            return
        reply = await self.short_answer()
        if self.trusts(reply):
            await self.streams(reply)
        self.found.notes.append(
            "a plain OpenAI-compatible server tells nothing of how it renders messages, takes no "
            "prompts as ids, and takes no orders to pause or to change its weights"
        )

    def request(self, **fields: Any) -> ModelRequest:
        return super().request(tools=None, **fields)

    async def short_answer(self) -> EngineReply:
        """Asked for with less where the server refuses to be asked for so much."""
        engine, found = self.engine, self.found
        while True:
            try:
                return await engine.chatted(self.request(), "polar-probe")
            except EngineError as error:
                if error.kind.code != "invalid_request" or not engine.asks_for_logprobs:
                    raise
                if engine.asks_for_ids:
                    engine.asks_for_ids = False
                    found.notes.append(f"it refuses to be asked for token ids: {error}")
                else:
                    engine.asks_for_logprobs = False
                    found.notes.append(f"it refuses to be asked for log probabilities: {error}")
