"""The endpoints of an SGLang server that the gateway asks, one method each."""

from collections.abc import Sequence
from typing import Any

import msgspec

from polar_gateway.dialects.turn import ErrorKind, ModelRequest
from polar_gateway.engines.base import EngineError
from polar_gateway.engines.chat_api import CHAT, ChatApi
from polar_gateway.engines.chat_body import chat_body

_encode = msgspec.json.Encoder().encode


class ServerInfo(msgspec.Struct):
    version: str = ""
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    enable_return_routed_experts: bool = False


class _ModelInfo(msgspec.Struct):
    weight_version: str | None = None


class Separated(msgspec.Struct):
    reasoning_text: str | None = None
    text: str | None = None


class ParsedCall(msgspec.Struct):
    name: str | None
    parameters: str


class ParsedCalls(msgspec.Struct):
    normal_text: str
    calls: list[ParsedCall]


class _Tokens(msgspec.Struct):
    tokens: msgspec.Raw


class _Text(msgspec.Struct):
    text: str


class _Done(msgspec.Struct):
    success: bool = True
    message: str = ""


class _Top(msgspec.Struct):
    logprob: float


class _Position(msgspec.Struct):
    top_logprobs: list[_Top] = []


class _Logprobs(msgspec.Struct):
    content: list[_Position] = []


class _Choice(msgspec.Struct):
    logprobs: _Logprobs | None = None


class _Choices(msgspec.Struct):
    choices: list[_Choice] = []


class SglangApi(ChatApi):
    """Raises EngineError where the server refuses or does not answer."""

    async def server_info(self) -> ServerInfo:
        """Under its older name where the server does not know the newer one."""
        decoder = msgspec.json.Decoder(ServerInfo)
        try:
            return await self.http.get("/server_info", decoder)
        except EngineError as error:
            if error.again:
                raise
            return await self.http.get("/get_server_info", decoder)

    async def body(
        self, request: ModelRequest, sent: bytes | None = None, *, stream: bool = False
    ) -> dict[str, Any]:
        """A chat request; `sent` is the JSON array of the ids that the prompt is sent as, if any.
        Whole answers and streams are asked for ids by fields of their own, each refusing the
        other's."""
        body = chat_body(request, await self.served(), stream=stream)
        if sent is not None:
            body["input_ids"] = msgspec.Raw(sent)
        if stream:
            body["return_input_ids_in_sglext"] = True
            body["return_output_ids_in_sglext"] = True
        else:
            body["return_prompt_token_ids"] = True
            body["return_token_ids"] = True
            body["return_meta_info"] = True
        return body

    async def tokenize(self, request: ModelRequest, *, closed: bool) -> bytes:
        """The JSON array of the prompt's ids; `closed` without the beginning of the answer."""
        body: dict[str, Any] = {"model": await self.served(), "messages": request.messages}
        if request.tools:
            body["tools"] = request.tools
            if request.tool_choice is not None:
                body["tool_choice"] = request.tool_choice
        if request.template_kwargs:
            body["chat_template_kwargs"] = request.template_kwargs
        if closed:
            body["add_generation_prompt"] = False
        answer = await self.http.post("/tokenize", _encode(body), msgspec.json.Decoder(_Tokens))
        return bytes(answer.tokens)

    async def ids_of(self, text: str) -> list[int]:
        body = {"model": await self.served(), "prompt": text, "add_special_tokens": False}
        answer = await self.http.post("/tokenize", _encode(body), msgspec.json.Decoder(_Tokens))
        return msgspec.json.decode(answer.tokens, type=list[int])

    async def detokenize(self, ids: Sequence[int]) -> str:
        body = {"model": await self.served(), "tokens": ids, "skip_special_tokens": False}
        answer = await self.http.post("/detokenize", _encode(body), msgspec.json.Decoder(_Text))
        return answer.text

    async def separate_reasoning(self, text: str, parser: str) -> Separated:
        body = _encode({"text": text, "reasoning_parser": parser})
        return await self.http.post("/separate_reasoning", body, msgspec.json.Decoder(Separated))

    async def parse_calls(self, text: str, tools: list[dict[str, Any]], parser: str) -> ParsedCalls:
        body = _encode({"text": text, "tools": tools, "tool_call_parser": parser})
        return await self.http.post("/parse_function_call", body, msgspec.json.Decoder(ParsedCalls))

    async def likeliest(self, request: ModelRequest) -> float | None:
        """The log probability of the likeliest first token; None where it is not told."""
        body = await self.body(request)
        body["top_logprobs"] = 1
        answer = await self.http.post(CHAT, _encode(body), msgspec.json.Decoder(_Choices))
        told = answer.choices[0].logprobs if answer.choices else None
        if told is None or not told.content or not told.content[0].top_logprobs:
            return None
        return told.content[0].top_logprobs[0].logprob

    async def weight_version(self) -> str | None:
        info = await self.http.get("/get_model_info", msgspec.json.Decoder(_ModelInfo))
        return info.weight_version

    async def order(self, path: str, **said: Any) -> None:
        """Answers when it is carried out."""
        answer = await self.http.post(path, _encode(said), msgspec.json.Decoder(_Done))
        if not answer.success:
            kind = ErrorKind(status=500, code="internal", message=f"the engine did not {path}")
            message = f"{kind.message}: {answer.message}"
            raise EngineError(kind, infra=True, message=message, again=True)

    async def flush_cache(self) -> None:
        await self.http.post_raw("/flush_cache", b"")
