"""OpenAI's Chat Completions API."""

from collections.abc import Mapping
from typing import Any

import msgspec

from polar_gateway.dialects import messages as shared
from polar_gateway.dialects.custom_tools import (
    CustomInput,
    custom_arguments,
    custom_function,
    custom_input,
)
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
    "enable_thinking": "translated",
    "reasoning_effort": "translated",
    "stream": "answered",
    "stream_options": "answered",
    "n": "answered",
    "modalities": "answered",
    "store": "ignored",
    "metadata": "ignored",
    "user": "ignored",
    "service_tier": "ignored",
    "prompt_cache_key": "ignored",
    "prompt_cache_options": "ignored",
    "prompt_cache_retention": "ignored",
    "safety_identifier": "ignored",
    "moderation": "ignored",
    "verbosity": "noted",
    "logprobs": "noted",
    "top_logprobs": "noted",
    "prediction": "noted",
    "web_search_options": "noted",
}

_SILENT = "the model behind this endpoint does not speak"
_OLD_CALLS = "the form before tool_calls is not supported"
REFUSED = {
    "functions": "the form before tools is not supported",
    "function_call": "the form before tool_choice is not supported",
    "audio": _SILENT,
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
    if method == "GET":
        if path.endswith("/models"):
            return Match("models")
        if "/models/" in path:
            return Match("model", {"model": path.partition("/models/")[2]})
        return Match("probe") if path in ("", "/v1") else None
    return Match("probe") if method == "HEAD" else None


def normalise(body: dict[str, Any]) -> ModelRequest:
    conversation = Conversation()
    notes = conversation.notes
    shared.screen(body, FIELDS, REFUSED, notes)
    if body.get("n") not in (None, 1):
        raise UnsupportedRequestError("n", "one answer to a request; ask again for another sample")
    if body.get("modalities") not in (None, [], ["text"]):
        raise UnsupportedRequestError("modalities", _SILENT)
    for index, message in enumerate(objects(body.get("messages"), "messages")):
        _add_message(conversation, message, f"messages[{index}]")

    tools, renames = _tools(body.get("tools"), notes)
    tools, tool_choice = _choose(body.get("tool_choice"), tools, notes)
    sampling = {field: body[field] for field in _SAMPLING if body.get(field) is not None}
    if isinstance(sampling.get("stop"), str):
        sampling["stop"] = [sampling["stop"]]
    response_format = mapping(body.get("response_format"), "response_format")
    limit = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    return ModelRequest(
        model=shared.model_name(body),
        messages=conversation.finish(),
        answers=conversation.answers,
        tools=tools or None,
        tool_choice=tool_choice,
        parallel_tool_calls=body.get("parallel_tool_calls") if tools else None,
        max_tokens=shared.count(body.get(limit), limit),
        sampling=sampling,
        response_format=response_format if response_format.get("type", "text") != "text" else None,
        template_kwargs=_template_kwargs(body, notes),
        stream=bool(body.get("stream")),
        include_usage=bool(
            mapping(body.get("stream_options"), "stream_options").get("include_usage")
        ),
        notes=notes,
        renames=renames,
    )


def _template_kwargs(body: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    kwargs = dict(mapping(body.get("chat_template_kwargs"), "chat_template_kwargs"))
    if isinstance(body.get("enable_thinking"), bool):
        kwargs.setdefault("enable_thinking", body["enable_thinking"])
    effort = body.get("reasoning_effort")
    if effort == "none":
        kwargs["enable_thinking"] = False
    elif effort is not None:
        note(notes, "reasoning_effort ignored")
    return kwargs


def _add_message(conversation: Conversation, message: dict[str, Any], where: str) -> None:
    content, role = message.get("content"), message.get("role")
    if message.get("name") is not None and role != "tool":
        note(conversation.notes, f"name of a {role} message ignored")
    match role:
        case "system" | "developer":
            conversation.system(_text(content, where, "\n"))
        case "user":
            conversation.user(_content(content, where))
        case "assistant":
            _add_assistant(conversation, message, where)
        case "tool":
            call_id = message.get("tool_call_id")
            if not isinstance(call_id, str):
                call_id = string(call_id, f"{where}.tool_call_id")
            conversation.tool(call_id, _content(content, where))
        case "function":
            raise UnsupportedRequestError(f"{where}.role", _OLD_CALLS)
        case other:
            raise UnsupportedRequestError(f"{where}.role", f"{other!r} is not supported")


def _add_assistant(conversation: Conversation, message: dict[str, Any], where: str) -> None:
    for field, reason in (("audio", _SILENT), ("function_call", _OLD_CALLS)):
        if message.get(field) is not None:
            raise UnsupportedRequestError(f"{where}.{field}", reason)
    text = _text(message.get("content"), where, "") or message.get("refusal")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    conversation.assistant(
        string(text, f"{where}.refusal"),
        string(reasoning, f"{where}.reasoning_content"),
        _calls(message.get("tool_calls"), where),
    )


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


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    """Of a user's or a tool's message."""
    if content is None or isinstance(content, str):
        return content or ""
    return shared.fold_parts(
        [
            _part(part, f"{where}.content[{index}]")
            for index, part in enumerate(objects(content, f"{where}.content"))
        ]
    )


def _part(part: dict[str, Any], field: str) -> dict[str, Any]:
    match part:
        case {"type": "text"}:
            return shared.text_part(string(part.get("text"), f"{field}.text"))
        case {"type": "image_url", "image_url": {"url": str(url), **rest}}:
            return shared.image_part(url, rest.get("detail"))
        case {"type": "image_url", "image_url": str(url)}:
            return shared.image_part(url)
        case {"type": "file", "file": {"file_data": str(data), **rest}}:
            title = string(rest.get("filename"), f"{field}.file.filename")
            return shared.text_part(
                shared.document_text(title, _file_text(data, f"{field}.file.file_data"))
            )
    raise UnsupportedRequestError(field, f"a part of type {part.get('type')!r} is not supported")


def _file_text(data: str, field: str) -> str:
    media_type, comma, encoded = data.removeprefix("data:").partition(";base64,")
    if not comma:
        raise UnsupportedRequestError(field, "only data URLs in base64 are supported")
    return shared.decoded_text(media_type, encoded, field)


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not calls:
        return []
    kept = []
    for index, call in enumerate(objects(calls, f"{where}.tool_calls")):
        function, custom = call.get("function"), call.get("custom")
        field = f"{where}.tool_calls[{index}]"
        if isinstance(function, dict):
            called, arguments = function.get("name"), function.get("arguments")
            if not isinstance(arguments, str):
                arguments = shared.compact_json(arguments or {})
        elif isinstance(custom, dict):
            called = custom.get("name")
            arguments = custom_arguments(string(custom.get("input"), f"{field}.custom.input"))
        else:
            raise UnsupportedRequestError(field, "only function and custom calls are supported")
        kept.append(
            shared.tool_call(
                string(call.get("id"), f"{field}.id"), string(called, f"{field}.name"), arguments
            )
        )
    return kept


def _tools(tools: Any, notes: list[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The engine's tools, and which of them were custom ones: name -> kind and name."""
    kept: list[dict[str, Any]] = []
    renames: dict[str, Any] = {}
    for index, tool in enumerate(objects(tools, "tools") if tools else []):
        kind, field = tool.get("type"), f"tools[{index}]"
        if kind not in ("function", "custom") or not isinstance(tool.get(kind), dict):
            note(notes, f"tool of type {kind} ignored")
            continue
        given = tool[kind]
        name = string(given.get("name"), f"{field}.{kind}.name")
        description = string(given.get("description"), f"{field}.{kind}.description")
        if kind == "custom":
            form = mapping(given.get("format"), f"{field}.custom.format")
            grammar = mapping(form.get("grammar"), f"{field}.custom.format.grammar")
            kept.append(custom_function(name, description, grammar))
            renames[name] = {"type": "custom", "name": name}
        else:
            strict = bool(given.get("strict"))
            kept.append(
                shared.function_tool(name, description, given.get("parameters"), strict=strict)
            )
    return kept, renames


def _choose(
    choice: Any, tools: list[dict[str, Any]], notes: list[str]
) -> tuple[list[dict[str, Any]], Any]:
    """The tools that may be called, and which of them must be."""
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        field = "tool_choice.allowed_tools"
        given = mapping(choice.get("allowed_tools"), field)
        allowed = {_chosen(each) for each in objects(given.get("tools"), f"{field}.tools")}
        tools = [tool for tool in tools if tool["function"]["name"] in allowed]
        choice = given.get("mode")
    if not tools:
        # Engines refuse a choice without tools.
        if choice not in (None, "auto", "none"):
            note(notes, "tool_choice without tools ignored")
        return tools, None
    if choice in (None, "auto", "none", "required"):
        return tools, choice
    chosen = _chosen(choice) if isinstance(choice, dict) else None
    if not any(tool["function"]["name"] == chosen for tool in tools):
        raise UnsupportedRequestError(
            "tool_choice", "must be auto, none, required, or tools that are among the tools"
        )
    return tools, {"type": "function", "function": {"name": chosen}}


def _chosen(choice: dict[str, Any]) -> str | None:
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
        case {"type": "custom", "custom": {"name": str(name)}}:
            return name
    return None


def answer(request: ModelRequest, turn: Turn) -> bytes:
    message = shared.message_of(turn.blocks)
    if request.renames and "tool_calls" in message:
        message["tool_calls"] = [_call(request, call) for call in message["tool_calls"]]
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


def _call(request: ModelRequest, call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    if function["name"] not in request.renames:
        return call
    custom = {"name": function["name"], "input": custom_input(function["arguments"])}
    return {"id": call["id"], "type": "custom", "custom": custom}


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
_CUSTOM_DELTA = b'{"tool_calls":[{"index":%d,"custom":{"input":%b}}]}'


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
        self._renames = request.renames
        self._custom: CustomInput | None = None
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
                if self._custom is not None:
                    return self._more_input(self._custom.feed(text))
                if self._kind == "call":
                    return self._chunk(_CALL_DELTA % (self._call, json_bytes(text)))
                return self._chunk(_DELTA[self._kind] % json_bytes(text))
            case BlockStart(kind=kind):
                self._kind = kind
                return self._start_call(event) if kind == "call" else b""
            case BlockEnd():
                rest = "" if self._custom is None else self._custom.close()
                self._custom = None
                return self._more_input(rest)
            case TurnEnd(turn=turn):
                return self._end(turn)

    def _start_call(self, start: BlockStart) -> bytes:
        self._call += 1
        if start.name in self._renames:
            self._custom = CustomInput()
            custom = {"name": start.name, "input": ""}
            call = {"index": self._call, "id": start.id, "type": "custom", "custom": custom}
        else:
            call = {"index": self._call, **shared.tool_call(start.id, start.name, "")}
        return self._chunk(b'{"tool_calls":[%b]}' % json_bytes(call))

    def _more_input(self, text: str) -> bytes:
        return self._chunk(_CUSTOM_DELTA % (self._call, json_bytes(text))) if text else b""

    def _end(self, turn: Turn) -> bytes:
        end = self._chunk(b"{}", json_bytes(_finish_reason(turn)))
        if self._include_usage:
            end += b'%b"choices":[],"usage":%b}\n\n' % (self._head, json_bytes(_usage(turn.usage)))
        return end + DONE

    def keep_alive(self) -> bytes:
        return self._chunk(b"{}")

    def error(self, error: ErrorKind) -> bytes:
        """Clients judge it by its sentence: pi asks again after one that names such a status."""
        status = error_status(error)
        if status >= 429:
            error = msgspec.structs.replace(error, message=f"{status} {error.message}")
        return b"data: %b\n\n" % error_body(error)


def streamer(request: ModelRequest, completion_id: str, created: int) -> _Streamer:
    return _Streamer(request, completion_id, created)


def count_body(tokens: int) -> bytes:
    return json_bytes({"total_tokens": tokens})
