"""A chat completion request as vLLM checks it. Pure."""

import json
from typing import Any, NamedTuple

import msgspec


class ApiError(Exception):
    """A refusal; `document` is what the client gets, in vLLM's shape."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.document: dict[str, Any] = {
            "error": {"message": message, "type": kind, "param": param, "code": status}
        }


def refused(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, "BadRequestError", param)


def invalid(kind: str, path: str, message: str) -> ApiError:
    """A document of the wrong form, which vLLM words differently from one it cannot honour."""
    text = f"1 validation error:\n  {{'type': '{kind}', 'loc': '{path}', 'msg': '{message}'}}"
    return ApiError(400, text, "Bad Request", path)


class _Role(msgspec.Struct):
    role: str


class _Function(msgspec.Struct):
    name: str


class _Tool(msgspec.Struct):
    function: _Function


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _KvTransfer(msgspec.Struct):
    prompt_token_ids: list[int] | None = None


class _Body(msgspec.Struct, kw_only=True):
    """The fields that decide on a generation; as in vLLM, unknown ones change nothing."""

    messages: list[_Role]
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    return_token_ids: bool | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    kv_transfer_params: _KvTransfer | None = None
    allowed_token_ids: list[int] | None = None


class ChatRequest(NamedTuple):
    messages: list[dict[str, Any]]
    prompt_ids: list[int] | None
    """What the prompt is in place of the messages."""
    tools: list[dict[str, Any]] | None
    template_arguments: dict[str, Any]
    max_tokens: int | None
    temperature: float
    seed: int | None
    stop: list[str]
    stream: bool
    include_usage: bool
    logprobs: bool
    top_logprobs: int
    return_token_ids: bool
    allowed_token_ids: list[int]
    parse_tools: bool
    parallel_tool_calls: bool


def has_media(messages: list[dict[str, Any]]) -> bool:
    return any(
        isinstance(part, dict) and part.get("type") == "image_url"
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
    )


def _tool(given: dict[str, Any]) -> dict[str, Any]:
    """A tool as vLLM's chat endpoint hands it to the template: the fields it knows, in its order."""
    function = {field: given.get(field) for field in ("name", "description", "parameters")}
    if given.get("strict") is not None:
        function["strict"] = given["strict"]
    return {"type": "function", "function": function}


def decoded(raw: bytes) -> dict[str, Any]:
    """Raises ApiError when `raw` is not a JSON object."""
    try:
        document = json.loads(raw)
    except ValueError as error:
        raise invalid("json_invalid", "body", f"JSON decode error: {error}") from error
    if not isinstance(document, dict):
        raise invalid("dict_type", "body", "Input should be a valid dictionary")
    return document


def checked(document: dict[str, Any], model: str, max_model_len: int) -> ChatRequest:
    """Raises ApiError when vLLM with this model would refuse the request."""
    if "messages" not in document:
        raise invalid("missing", "body.messages", "Field required")
    try:
        body = msgspec.convert(document, _Body)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise invalid("type", "body" + path.rstrip("`"), message) from error
    if not body.messages:
        raise refused(
            "Cannot apply chat template to an empty conversation. Provide at least one message."
        )
    if body.model not in (None, model):
        text = f"The model `{body.model}` does not exist. Valid aliases: {model}."
        raise ApiError(404, text, "NotFoundError", "model")
    max_tokens = body.max_completion_tokens
    if max_tokens is None:
        max_tokens = body.max_tokens
    if max_tokens is not None and max_tokens < 1:
        raise refused(
            f"max_tokens must be at least 1, got {max_tokens}. "
            f"(parameter=max_tokens, value={max_tokens})",
            "max_tokens",
        )
    if max_tokens is not None and max_tokens > max_model_len:
        raise refused(
            f"max_tokens={max_tokens} cannot be greater than max_model_len={max_model_len}. Please "
            f"request fewer output tokens. (parameter=max_tokens, value={max_tokens})",
            "max_tokens",
        )
    temperature = 1.0 if body.temperature is None else body.temperature
    if temperature < 0:
        raise refused(
            f"temperature must be non-negative, got {temperature}. "
            f"(parameter=temperature, value={temperature})",
            "temperature",
        )
    if body.tools == []:
        raise refused(
            "`tools` must not be an empty array. Either provide at least one tool or omit the "
            "field entirely. (parameter=tools)",
            "tools",
        )
    if body.n not in (None, 1):
        raise refused("The scripted engine gives one choice: n must be 1.", "n")
    top_logprobs = body.top_logprobs or 0
    if top_logprobs > 20:
        raise refused(
            f"Requested sample logprobs of {top_logprobs}, which is greater than max allowed: 20 "
            f"(parameter=logprobs, value={top_logprobs})",
            "logprobs",
        )
    return ChatRequest(
        messages=document["messages"],
        prompt_ids=body.kv_transfer_params.prompt_token_ids if body.kv_transfer_params else None,
        tools=None if body.tools is None else [_tool(t["function"]) for t in document["tools"]],
        template_arguments={
            **(body.chat_template_kwargs or {}),
            "add_generation_prompt": body.add_generation_prompt,
        },
        max_tokens=max_tokens,
        temperature=temperature,
        seed=body.seed,
        stop=[body.stop] if isinstance(body.stop, str) else body.stop or [],
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        logprobs=bool(body.logprobs),
        top_logprobs=top_logprobs,
        return_token_ids=bool(body.return_token_ids),
        allowed_token_ids=body.allowed_token_ids or [],
        parse_tools=body.tools is not None and body.tool_choice != "none",
        parallel_tool_calls=body.parallel_tool_calls is not False,
    )
