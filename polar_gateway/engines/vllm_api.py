"""The endpoints of a vLLM server that the gateway asks, one method each."""

from collections.abc import Sequence
from typing import Any

import msgspec

from polar_gateway.dialects.turn import ErrorKind, ModelRequest
from polar_gateway.engines.base import EngineError
from polar_gateway.engines.chat_api import CHAT, ChatApi
from polar_gateway.engines.chat_body import chat_body
from polar_gateway.engines.http_client import decoded

RENDER = f"{CHAT}/render"
DERENDER = f"{CHAT}/derender"
GENERATE = "/inference/v1/generate"

_encode = msgspec.json.Encoder().encode


class _Version(msgspec.Struct):
    version: str = ""


class _WeightInfo(msgspec.Struct):
    weight_version: str | None = None


class Tokenized(msgspec.Struct):
    count: int
    tokens: msgspec.Raw
    """A JSON array."""


class _Detokenized(msgspec.Struct):
    prompt: str


class _Success(msgspec.Struct):
    success: bool = True


class _Connector(msgspec.Struct):
    kv_connector: str | None = None


class _Config(msgspec.Struct):
    kv_transfer_config: _Connector | None = None


class _ServerInfo(msgspec.Struct):
    vllm_config: _Config


_Rendered = dict[str, msgspec.Raw]

_IDS = b'"token_ids":['


class VllmApi(ChatApi):
    """Raises EngineError where the server refuses or does not answer."""

    async def version(self) -> str:
        return (await self.http.get("/version", msgspec.json.Decoder(_Version))).version

    async def body(
        self, request: ModelRequest, prompt: bytes | None = None, *, stream: bool = False
    ) -> dict[str, Any]:
        """A chat request; `prompt` is the JSON array of the ids that it is sent as, if any."""
        body = chat_body(request, await self.served(), stream=stream)
        body["return_token_ids"] = True
        if prompt is not None:
            body["messages"] = outline(request.messages)
            body["kv_transfer_params"] = {"prompt_token_ids": msgspec.Raw(prompt)}
        return body

    async def rendered(self, body: dict[str, Any]) -> _Rendered:
        """A chat request as one to `generate`; its prompt is in `token_ids`."""
        return _rendered(await self.http.post_raw(RENDER, _encode(body)))

    async def rendered_ids(self, body: dict[str, Any]) -> bytes:
        """The JSON array of the ids that a chat request is rendered as."""
        answer = await self.http.post_raw(RENDER, _encode(body))
        return _ids_unread(answer) or bytes(_rendered(answer)["token_ids"])

    async def generate(self, rendered: _Rendered, request_id: str) -> bytes:
        asked: dict[str, Any] = {**rendered, "return_token_ids": True}
        if request_id:
            asked["request_id"] = request_id
        return await self.http.post_raw(GENERATE, _encode(asked), request_id)

    async def derender(
        self, body: dict[str, Any], prompt: bytes, sampled: Sequence[int], finish_reason: str | None
    ) -> bytes:
        """What the parsers of the chat endpoint make of sampled tokens, as its answer."""
        ids = msgspec.Raw(prompt)
        # The template arguments are in the chat request: with others, parsers take reasoning for
        # text and text for reasoning.
        asked = {
            "model": body["model"],
            "chat_request": body,
            "prompt_token_ids": ids,
            "generate_response": {
                "request_id": "derender",
                "prompt_token_ids": ids,
                "choices": [{"index": 0, "token_ids": sampled, "finish_reason": finish_reason}],
            },
        }
        return await self.http.post_raw(DERENDER, _encode(asked))

    async def tokenize(self, request: ModelRequest, *, closed: bool = False) -> Tokenized:
        """The prompt's ids nearly: earlier reasoning is not rendered, tools may be
        rendered otherwise."""
        body: dict[str, Any] = {
            "model": await self.served(),
            "messages": request.messages,
            "add_generation_prompt": not closed,
        }
        if request.tools:
            body["tools"] = [as_rendered(tool) for tool in request.tools]
        if request.template_kwargs:
            body["chat_template_kwargs"] = request.template_kwargs
        return await self._tokenize(body)

    async def ids_of(self, text: str) -> list[int]:
        body = {"model": await self.served(), "prompt": text, "add_special_tokens": False}
        return msgspec.json.decode((await self._tokenize(body)).tokens, type=list[int])

    async def _tokenize(self, body: dict[str, Any]) -> Tokenized:
        return await self.http.post("/tokenize", _encode(body), msgspec.json.Decoder(Tokenized))

    async def detokenize(self, ids: Sequence[int]) -> str:
        body = _encode({"model": await self.served(), "tokens": ids})
        return (
            await self.http.post("/detokenize", body, msgspec.json.Decoder(_Detokenized))
        ).prompt

    async def kv_connector(self) -> bool:
        """Only servers in development mode tell."""
        path = "/server_info?config_format=json"
        info = await self.http.get(path, msgspec.json.Decoder(_ServerInfo))
        moved = info.vllm_config.kv_transfer_config
        return moved is not None and moved.kv_connector is not None

    async def weight_version(self) -> str | None:
        info = await self.http.get("/weight_info", msgspec.json.Decoder(_WeightInfo))
        return info.weight_version

    async def order(self, path: str, **said: Any) -> None:
        """One of the orders that are there in development mode; answers when it is carried out."""
        answer = await self.http.post_raw(path, _encode(said))
        done = msgspec.json.decode(answer, type=_Success) if answer else _Success()
        if not done.success:
            kind = ErrorKind(status=500, code="internal", message=f"the engine did not {path}")
            raise EngineError(kind, infra=True, again=True)


def outline(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the server still needs of messages that it is sent the ids of: how many tools had been
    called, which some parsers number calls by. With media in them they are left as they are, so
    that the server refuses to read the ids instead of the media."""
    calls = 0
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and any(part.get("type") != "text" for part in content):
            return messages
        calls += len(message.get("tool_calls") or ())
    outlined: list[dict[str, Any]] = [{"role": "user", "content": ""}]
    if calls:
        call = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        outlined.append({"role": "assistant", "content": "", "tool_calls": [call] * calls})
    return outlined


def as_rendered(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as the chat endpoint hands it to the template; /tokenize hands it on as it comes."""
    given = tool["function"]
    function = {field: given.get(field) for field in ("name", "description", "parameters")}
    if given.get("strict") is not None:
        function["strict"] = given["strict"]
    return {"type": "function", "function": function}


def _rendered(answer: bytes) -> _Rendered:
    rendered = decoded(msgspec.json.Decoder(_Rendered), answer)
    if "token_ids" not in rendered:
        kind = ErrorKind(status=500, code="internal", message="the engine rendered no ids")
        raise EngineError(kind, infra=True)
    return rendered


def _ids_unread(answer: bytes) -> bytes | None:
    """The array of ids as it stands in the answer: to find it costs less than to read past it, and
    it is as long as the conversation. None where it is not surely the answer's own field."""
    key = answer.find(_IDS)
    end = answer.find(b"]", key)
    if key < 0 or end < 0 or answer.count(b"{", 0, key) != 1:
        return None
    return answer[key + len(_IDS) - 1 : end + 1]
