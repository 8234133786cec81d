"""What every server with a chat-completions route is asked beside it: which models it serves."""

import msgspec

from polar_gateway.dialects.turn import ErrorKind
from polar_gateway.engines.base import EngineError
from polar_gateway.engines.http_client import HttpClient

CHAT = "/v1/chat/completions"


class Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[Model] = []


class ChatApi:
    """Raises EngineError where the server refuses or does not answer."""

    def __init__(self, base_url: str, api_key: str | None, model: str) -> None:
        self.http = HttpClient(base_url, api_key)
        self.model = model
        """Its name for the weights; empty until it is known."""

    async def models(self) -> list[Model]:
        return (await self.http.get("/v1/models", msgspec.json.Decoder(_Models))).data

    async def served(self) -> str:
        if not self.model:
            listed = await self.models()
            if not listed:
                raise EngineError(
                    ErrorKind(status=503, code="overloaded", message="the engine serves no model"),
                    infra=True,
                    again=True,
                )
            self.model = listed[0].id
        return self.model
