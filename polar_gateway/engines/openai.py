"""A plain OpenAI-compatible server: chat completions and nothing beside them.

It serves harnesses. Ids are read where vLLM puts them, since that is what other servers took over;
one that sends none can be probed and talked to, and not be trained on.
"""

from collections.abc import Iterable
from typing import Any

from builders.records import LogprobKind
from polar_gateway.dialects.turn import ErrorKind, ModelRequest
from polar_gateway.engines.answers import Piece
from polar_gateway.engines.base import (
    EngineError,
    EngineProbe,
    EngineReply,
    PauseMode,
    Rendering,
    TokenRoute,
)
from polar_gateway.engines.chat import ChatEngine, prompt_alone
from polar_gateway.engines.chat_api import ChatApi
from polar_gateway.engines.chat_body import chat_body
from polar_gateway.engines.openai_probe import OpenAIProbe
from polar_gateway.engines.vllm_answers import chat_pieces, whole_answer

BEYOND_OPENAI = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Parameters that the provider's own API has not, and strict servers refuse, at the values at which
they do nothing."""


class OpenAI(ChatEngine):
    """One server. `model` is its name for the weights; empty takes the first it lists."""

    name = "openai"

    def __init__(
        self,
        base_url: str,
        *,
        model: str = "",
        api_key: str | None = None,
        token_route: TokenRoute = "chat",
    ) -> None:
        """`token_route` is for engines that take prompts as ids, by whichever route."""
        self.api = ChatApi(base_url, api_key, model)
        super().__init__(self.api)
        self.asks_for_ids = True
        """Whether it is sent the field that asks for them, which strict servers refuse."""
        self.asks_for_logprobs = True

    async def probe(self) -> EngineProbe:
        """Raises EngineError for what may pass: a server that is not there yet, or busy."""
        found = await OpenAIProbe(self, self.api, self.name).report()
        self.stream_ids = found.stream_ids or not found.token_ids
        return found

    async def body(
        self, request: ModelRequest, sent: bytes | None = None, *, stream: bool = False
    ) -> dict[str, Any]:
        body = chat_body(request, await self.api.served(), stream=stream)
        for field, nothing in BEYOND_OPENAI.items():
            if body.get(field) == nothing:
                del body[field]
        if self.asks_for_ids:
            body["return_token_ids"] = True
        if not self.asks_for_logprobs:
            del body["logprobs"], body["top_logprobs"]
        return body

    def read_whole(self, data: bytes) -> Piece:
        return whole_answer(data)

    def read_event(self, data: bytes) -> Iterable[Piece]:
        return chat_pieces(data)

    def logprob_kind(self, request: ModelRequest) -> LogprobKind:
        return "unknown"

    async def count_tokens(self, request: ModelRequest) -> int:
        """As the server counts the prompt of an answer of one token."""
        return (await self.chatted(prompt_alone(request))).usage.prompt_tokens

    async def resume(
        self, request: ModelRequest, request_id: str, partial: EngineReply
    ) -> EngineReply:
        raise _unable("go on with an answer")

    async def render(self, request: ModelRequest, *, closed: bool = False) -> Rendering:
        raise _unable("tell how it renders messages")

    async def pause(self, mode: PauseMode) -> None:
        raise _unable("pause")

    async def unpause(self) -> None:
        raise _unable("resume")

    async def weight_version(self) -> str | None:
        raise _unable("name its weights")

    async def update(self, policy_version: str, weights_path: str | None) -> None:
        raise _unable("change its weights")


def _unable(what: str) -> EngineError:
    said = f"a plain OpenAI-compatible engine cannot {what}"
    return EngineError(ErrorKind(status=500, code="internal", message=said), infra=True)
