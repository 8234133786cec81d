"""OpenAI's Chat Completions API."""

from collections.abc import Mapping
from typing import Any

from polar_gateway.dialects import messages as shared
from polar_gateway.dialects.messages import Conversation, Treatment, mapping, note, objects, string
from polar_gateway.dialects.openai import error_body, error_status, model_body, models_body
from polar_gateway.dialects.sse import DONE, EVENT_STREAM, json_bytes
from polar_gateway.dialects.turn import (
    BlockDelta,
    BlockEnd,
    BlockKind,
    BlockStart,
    Call,
    ErrorKind,
    Match,
    ModelRequest,
    Turn,
    TurnEnd,
    TurnEvent,
    UnsupportedRequestError,
    Usage,
)

__all__ = [
    "answer",
    "count_body",
    "error_body",
    "error_status",
    "match",
    "model_body",
    "models_body",
    "name",
    "normalise",
    "request_id_header",
    "streamer",
]

name = "chat"
request_id_header = "x-request-id"

FIELDS: dict[str, Treatment] = {
    "model": "translated",
    "messages": "translated",
    "tools": "translated",
    "tool_choice": "translated",
    "parallel_tool_calls": "translated",
    "max_tokens": "translated",
    "max_completion_tokens": "translated",
    "temperature": "translated",
    "top_p": "translated",
    "top_k": "translated",
    "min_p": "translated",
    "stop": "translated",
    "seed": "translated",
    "presence_penalty": "translated",
    "frequency_penalty": "translated",
    "repetition_penalty": "translated",
    "logit_bias": "translated",
    "response_format": "translated",
    "chat_template_kwargs": "translated",
    "reasoning_effort": "translated",
    "stream": "answered",
    "stream_options": "answered",
    "n": "answered",
    "store": "ignored",
    "metadata": "ignored",
    "user": "ignored",
    "service_tier": "ignored",
    "prompt_cache_key": "ignored",
    "prompt_cache_retention": "ignored",
    "safety_identifier": "ignored",
    "verbosity": "noted",
    "logprobs": "noted",
    "top_logprobs": "noted",
    "prediction": "noted",
    "web_search_options": "noted",
}

REFUSED = {
    "functions": "the form before tools is not supported",
    "function_call": "the form before tool_choice is not supported",
    "audio": "the model behind this endpoint does not speak",
}

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
)


def match(
    method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str]
) -> Match | None:
    path = path.rstrip("/")
    if method == "POST":
        return Match("call") if path.endswith("/chat/completions") else None
    if method == "GET" and path.endswith("/models"):
        return Match("models")
    if method == "HEAD" or (method == "GET" and path in ("", "/v1")):
        return Match("probe")
    return None


def normalise(body: dict[str, Any]) -> ModelRequest:
    conversation = Conversation()
    notes = conversation.notes
    shared.screen(body, FIELDS, REFUSED, notes)
    if body.get("n") not in (None, 1):
        raise UnsupportedRequestError("n", "one answer to a request; ask again for another sample")
    for index, message in enumerate(objects(body.get("messages"), "messages")):
        _add_message(conversation, message, f"messages[{index}]")

    tools = _tools(body.get("tools"), notes)
    tool_choice, parallel = body.get("tool_choice"), body.get("parallel_tool_calls")
    if tools is None:
        # Engines refuse either of them without tools.
        if tool_choice not in (None, "auto", "none"):
            note(notes, "tool_choice without tools ignored")
        tool_choice = parallel = None
    template_kwargs = dict(mapping(body.get("chat_template_kwargs"), "chat_template_kwargs"))
    effort = body.get("reasoning_effort")
    if effort == "none":
        template_kwargs["enable_thinking"] = False
    elif effort is not None:
        note(notes, "reasoning_effort ignored")
    limit = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    return ModelRequest(
        model=shared.model_name(body),
        messages=conversation.finish(),
        tools=tools,
        tool_choice=tool_choice,
        parallel_tool_calls=parallel,
        max_tokens=shared.count(body.get(limit), limit),
        sampling={field: body[field] for field in _SAMPLING if body.get(field) is not None},
        response_format=body.get("response_format"),
        template_kwargs=template_kwargs,
        stream=bool(body.get("stream")),
        include_usage=bool(
            mapping(body.get("stream_options"), "stream_options").get("include_usage")
        ),
        notes=notes,
    )


def _add_message(conversation: Conversation, message: dict[str, Any], where: str) -> None:
    content = message.get("content")
    match message.get("role"):
        case "system" | "developer":
            conversation.system(_text(content, where, "\n"))
        case "user":
            conversation.user(_content(content, f"{where}.content"))
        case "assistant":
            reasoning = message.get("reasoning_content") or message.get("reasoning")
            conversation.assistant(
                _text(content, where, ""),
                string(reasoning, f"{where}.reasoning_content"),
                _calls(message.get("tool_calls"), f"{where}.tool_calls"),
            )
        case "tool":
            call_id = string(message.get("tool_call_id"), f"{where}.tool_call_id")
            conversation.tool(call_id, _content(content, f"{where}.content"))
        case other:
            raise UnsupportedRequestError(f"{where}.role", f"{other!r} is not supported")


def _text(content: Any, where: str, separator: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(objects(content, f"{where}.content")):
        kind = part.get("type")
        if kind not in ("text", "refusal"):
            raise UnsupportedRequestError(
                f"{where}.content[{index}]",
                f"a part of type {kind!r} is not supported in this role",
            )
        texts.append(string(part.get(kind), f"{where}.content[{index}]"))
    return separator.join(texts)


def _content(content: Any, field: str) -> str | list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        return content or ""
    return shared.fold_parts(
        [_part(part, f"{field}[{index}]") for index, part in enumerate(objects(content, field))]
    )


def _part(part: dict[str, Any], field: str) -> dict[str, Any]:
    match part:
        case {"type": "text"}:
            return shared.text_part(string(part.get("text"), f"{field}.text"))
        case {"type": "image_url", "image_url": {"url": str(url), **rest}}:
            return shared.image_part(url, rest.get("detail"))
        case {"type": "image_url", "image_url": str(url)}:
            return shared.image_part(url)
    raise UnsupportedRequestError(field, f"a part of type {part.get('type')!r} is not supported")


def _calls(calls: Any, field: str) -> list[dict[str, Any]]:
    if not calls:
        return []
    kept = []
    for index, call in enumerate(objects(calls, field)):
        function = call.get("function")
        if not isinstance(function, dict):
            raise UnsupportedRequestError(f"{field}[{index}]", "only function calls are supported")
        arguments = function.get("arguments")
        kept.append(
            shared.tool_call(
                string(call.get("id"), f"{field}[{index}].id"),
                string(function.get("name"), f"{field}[{index}].function.name"),
                arguments if isinstance(arguments, str) else shared.compact_json(arguments or {}),
            )
        )
    return kept


def _tools(tools: Any, notes: list[str]) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    kept = []
    for tool in objects(tools, "tools"):
        if tool.get("type") == "function" and isinstance(tool.get("function"), dict):
            kept.append(tool)
        else:
            note(notes, f"tool of type {tool.get('type')} ignored")
    return kept or None


def answer(request: ModelRequest, turn: Turn) -> bytes:
    message = shared.message_of(turn.blocks)
    if message["content"] == "" and "tool_calls" in message:
        message["content"] = None
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": _finish_reason(turn),
    }
    return json_bytes(
        {
            "id": _answer_id(turn.completion_id),
            "object": "chat.completion",
            "created": turn.created,
            "model": request.model,
            "choices": [choice],
            "usage": _usage(turn.usage),
        }
    )


def _answer_id(completion_id: str) -> str:
    return "chatcmpl-" + completion_id.removeprefix("msg_")


def _finish_reason(turn: Turn) -> str:
    if turn.finish_reason == "length":
        return "length"
    return "tool_calls" if any(isinstance(block, Call) for block in turn.blocks) else "stop"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


_DELTA: dict[BlockKind, bytes] = {
    "reasoning": b'{"reasoning_content":%b}',
    "text": b'{"content":%b}',
}
_CALL_DELTA = b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}'


class _Streamer:
    content_type = EVENT_STREAM

    def __init__(self, request: ModelRequest, completion_id: str, created: int) -> None:
        self._head = b'data: {"id":%b,"object":"chat.completion.chunk","created":%d,"model":%b,' % (
            json_bytes(_answer_id(completion_id)),
            created,
            json_bytes(request.model),
        )
        self._before = self._head + b'"choices":[{"index":0,"delta":'
        self._include_usage = request.include_usage
        self._kind: BlockKind = "text"
        self._call = -1

    def _chunk(self, delta: bytes, finish_reason: bytes = b"null") -> bytes:
        return b'%b%b,"logprobs":null,"finish_reason":%b}]}\n\n' % (
            self._before,
            delta,
            finish_reason,
        )

    def open(self, prompt_tokens: int) -> bytes:
        return self._chunk(b'{"role":"assistant","content":""}')

    def event(self, event: TurnEvent) -> bytes:
        match event:
            case BlockDelta(text=text):
                if self._kind == "call":
                    return self._chunk(_CALL_DELTA % (self._call, json_bytes(text)))
                return self._chunk(_DELTA[self._kind] % json_bytes(text))
            case BlockStart(kind=kind):
                self._kind = kind
                return self._start_call(event) if kind == "call" else b""
            case BlockEnd():
                return b""
            case TurnEnd(turn=turn):
                return self._end(turn)

    def _start_call(self, start: BlockStart) -> bytes:
        self._call += 1
        call = {"index": self._call, **shared.tool_call(start.id, start.name, "")}
        return self._chunk(b'{"tool_calls":[%b]}' % json_bytes(call))

    def _end(self, turn: Turn) -> bytes:
        end = self._chunk(b"{}", json_bytes(_finish_reason(turn)))
        if self._include_usage:
            end += b'%b"choices":[],"usage":%b}\n\n' % (self._head, json_bytes(_usage(turn.usage)))
        return end + DONE

    def keep_alive(self) -> bytes:
        return self._chunk(b"{}")

    def error(self, error: ErrorKind) -> bytes:
        return b"data: %b\n\n" % error_body(error)


def streamer(request: ModelRequest, completion_id: str, created: int) -> _Streamer:
    return _Streamer(request, completion_id, created)


def count_body(tokens: int) -> bytes:
    return json_bytes({"total_tokens": tokens})
