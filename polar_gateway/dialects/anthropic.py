"""Anthropic's Messages API."""

from collections.abc import Mapping
from typing import Any

import msgspec

from polar_gateway.dialects import messages as shared
from polar_gateway.dialects.messages import Conversation, Treatment, mapping, note, objects, string
from polar_gateway.dialects.sse import EVENT_STREAM, event, json_bytes
from polar_gateway.dialects.turn import (
    Block,
    BlockDelta,
    BlockEnd,
    BlockKind,
    BlockStart,
    Call,
    ErrorKind,
    Match,
    ModelRequest,
    Reasoning,
    Text,
    Turn,
    TurnEnd,
    TurnEvent,
    UnsupportedRequestError,
    Usage,
)

name = "anthropic"
request_id_header = "request-id"

FIELDS: dict[str, Treatment] = {
    "model": "translated",
    "messages": "translated",
    "system": "translated",
    "tools": "translated",
    "tool_choice": "translated",
    "max_tokens": "translated",
    "temperature": "translated",
    "top_p": "translated",
    "top_k": "translated",
    "stop_sequences": "translated",
    "thinking": "translated",
    "stream": "answered",
    "metadata": "ignored",
    "service_tier": "ignored",
    "betas": "ignored",
    "inference_geo": "ignored",
    "cache_control": "ignored",
    "context_management": "noted",
    "output_config": "noted",
}

REFUSED = {
    "mcp_servers": "the model behind this endpoint cannot call MCP servers by itself",
    "container": "there is no code execution container behind this endpoint",
}

_BILLING = "x-anthropic-billing-header"
_UNPARSED = "__unparsedToolInput"


def match(
    method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str]
) -> Match | None:
    path = path.rstrip("/")
    if method == "POST":
        if path.endswith("/messages"):
            return Match("call")
        if path.endswith("/messages/count_tokens"):
            return Match("count_tokens")
    elif method in ("GET", "HEAD"):
        if path.endswith("/api/hello"):
            return Match("probe")
        if "anthropic-version" in headers:
            if path.endswith("/models"):
                return Match("models")
            if method == "HEAD":
                return Match("probe")
    return None


def normalise(body: dict[str, Any]) -> ModelRequest:
    conversation = Conversation()
    notes = conversation.notes
    shared.screen(body, FIELDS, REFUSED, notes)
    conversation.system(_system_text(body.get("system"), notes))
    for index, message in enumerate(objects(body.get("messages"), "messages")):
        _add_message(conversation, message, f"messages[{index}]")
    if conversation.ends_with_assistant:
        raise UnsupportedRequestError(
            "messages",
            "this model does not support assistant message prefill; the conversation must end with a user message",
        )

    sampling = {
        field: body[field]
        for field in ("temperature", "top_p", "top_k")
        if body.get(field) is not None
    }
    if body.get("stop_sequences"):
        sampling["stop"] = body["stop_sequences"]
    disabled = mapping(body.get("thinking"), "thinking").get("type") == "disabled"
    tools = _tools(body.get("tools"), notes)
    tool_choice, parallel = _tool_choice(body.get("tool_choice"), tools, notes)
    return ModelRequest(
        model=shared.model_name(body),
        messages=conversation.finish(),
        tools=tools,
        tool_choice=tool_choice,
        parallel_tool_calls=parallel,
        max_tokens=shared.count(body.get("max_tokens"), "max_tokens"),
        sampling=sampling,
        template_kwargs={"enable_thinking": False} if disabled else {},
        stream=bool(body.get("stream")),
        notes=notes,
    )


def _system_text(system: Any, notes: list[str]) -> str:
    """The system prompt without the billing line, which differs between conversations and is not
    meant for the model."""
    if system is None:
        return ""
    if isinstance(system, str):
        if system.startswith(_BILLING):
            return system.partition("\n")[2]
        return system
    texts = [
        string(block.get("text"), f"system[{index}].text")
        for index, block in enumerate(objects(system, "system"))
    ]
    return _text(
        shared.fold_parts(
            [shared.text_part(text) for text in texts if not text.startswith(_BILLING)]
        )
    )


def _text(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join(p.get("text", "") for p in content)


def _add_message(conversation: Conversation, message: dict[str, Any], where: str) -> None:
    role, content = message.get("role"), message.get("content")
    if role == "assistant":
        _add_assistant(conversation, content, where)
    elif role == "user":
        if isinstance(content, str):
            conversation.user(content)
        else:
            _add_user(conversation, objects(content, f"{where}.content"), where)
    elif role == "system":
        conversation.system(_text(_content(conversation, content, f"{where}.content")))
    else:
        raise UnsupportedRequestError(
            f"{where}.role", f"{role!r} is none of user, assistant, system"
        )


def _add_assistant(conversation: Conversation, content: Any, where: str) -> None:
    if isinstance(content, str):
        conversation.assistant(content, "", [])
        return
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(objects(content, f"{where}.content")):
        field = f"{where}.content[{index}]"
        match block.get("type"):
            case "text":
                texts.append(string(block.get("text"), f"{field}.text"))
            case "thinking":
                reasoning.append(string(block.get("thinking"), f"{field}.thinking"))
            case "tool_use":
                calls.append(
                    shared.tool_call(
                        string(block.get("id"), f"{field}.id"),
                        string(block.get("name"), f"{field}.name"),
                        _spell_input(block.get("input")),
                    )
                )
            case other:
                note(conversation.notes, f"assistant block {other} ignored")
    # Joined without anything between them: they are parts of one sampled text.
    conversation.assistant("".join(texts), "".join(reasoning), calls)


def _add_user(conversation: Conversation, blocks: list[dict[str, Any]], where: str) -> None:
    """Tool results first, as the template needs them right behind their calls, then the rest.

    A reminder that the harness appended to tool results stays with the last of them: as a user
    message it would be the template's latest question, and drop the reasoning before it.
    """
    parts: list[dict[str, Any]] = []
    results = False
    for index, block in enumerate(blocks):
        field = f"{where}.content[{index}]"
        if block.get("type") == "tool_result":
            if parts:
                note(conversation.notes, "text before tool results sent behind them")
            results = True
            content = _content(conversation, block.get("content"), f"{field}.content")
            conversation.tool(
                string(block.get("tool_use_id"), f"{field}.tool_use_id"),
                shared.as_error(content) if block.get("is_error") else content,
            )
        else:
            parts.append(_part(conversation, block, field))
    if results and not parts:
        return
    if results and all(p["type"] == "text" and shared.is_reminder(p["text"]) for p in parts):
        for part in parts:
            conversation.remind(part["text"])
        return
    conversation.user(shared.fold_parts(parts))


def _content(conversation: Conversation, content: Any, field: str) -> str | list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        return content or ""
    return shared.fold_parts(
        [
            _part(conversation, block, f"{field}[{index}]")
            for index, block in enumerate(objects(content, field))
        ]
    )


def _part(conversation: Conversation, block: dict[str, Any], field: str) -> dict[str, Any]:
    match block.get("type"):
        case "text":
            return shared.text_part(string(block.get("text"), f"{field}.text"))
        case "image":
            return shared.image_part(_image_url(block.get("source"), f"{field}.source"))
        case "document":
            return shared.text_part(_document_text(block, field))
        case other:
            note(conversation.notes, f"block {other} sent as JSON text")
            plain = {key: value for key, value in block.items() if key != "cache_control"}
            return shared.text_part(shared.compact_json(plain))


def _image_url(source: Any, field: str) -> str:
    match source:
        case {"type": "base64", "media_type": str(media_type), "data": str(data)}:
            return f"data:{media_type};base64,{data}"
        case {"type": "url", "url": str(url)}:
            return url
    raise UnsupportedRequestError(field, "only base64 and url images are supported")


def _document_text(block: dict[str, Any], field: str) -> str:
    title = string(block.get("title"), f"{field}.title")
    match block.get("source"):
        case {"type": "text", "data": str(text)}:
            pass
        case {"type": "content", "content": str(text)}:
            pass
        case {"type": "content", "content": list(parts)} if all(
            isinstance(part, dict) and part.get("type") == "text" for part in parts
        ):
            text = "\n".join(string(part.get("text"), f"{field}.source") for part in parts)
        case _:
            raise UnsupportedRequestError(
                f"{field}.source", "only documents of plain text are supported"
            )
    return f"{title}\n{text}" if title else text


def _spell_input(value: Any) -> str:
    """A tool input as argument text, undoing how `answer` had to wrap what is no JSON object."""
    wrapped = value.get(_UNPARSED) if isinstance(value, dict) and len(value) == 1 else None
    if isinstance(wrapped, dict) and isinstance(wrapped.get("raw"), str):
        return str(wrapped["raw"])
    return shared.compact_json({} if value is None else value)


def _tools(tools: Any, notes: list[str]) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    kept = []
    for index, tool in enumerate(objects(tools, "tools")):
        tool_name = string(tool.get("name"), f"tools[{index}].name")
        if "input_schema" not in tool and tool.get("type") not in (None, "custom"):
            note(notes, f"tool {tool_name} of type {tool['type']} ignored")
            continue
        description = string(tool.get("description"), f"tools[{index}].description")
        kept.append(shared.function_tool(tool_name, description, tool.get("input_schema")))
    return kept or None


def _tool_choice(
    choice: Any, tools: list[dict[str, Any]] | None, notes: list[str]
) -> tuple[Any, bool | None]:
    choice = mapping(choice, "tool_choice")
    if not choice:
        return None, None
    if tools is None:
        note(notes, "tool_choice without tools ignored")
        return None, None
    parallel = False if choice.get("disable_parallel_tool_use") else None
    match choice.get("type"):
        case "auto":
            return "auto", parallel
        case "any":
            return "required", parallel
        case "none":
            return "none", parallel
        case "tool":
            tool_name = string(choice.get("name"), "tool_choice.name")
            return {"type": "function", "function": {"name": tool_name}}, parallel
    raise UnsupportedRequestError("tool_choice.type", f"{choice.get('type')!r} is not supported")


def answer(request: ModelRequest, turn: Turn) -> bytes:
    return json_bytes(
        {
            "id": turn.completion_id,
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "content": [_answer_block(block, turn.completion_id) for block in turn.blocks],
            "stop_reason": _stop_reason(turn),
            "stop_sequence": turn.stop_sequence,
            "usage": _usage(turn.usage),
        }
    )


def _answer_block(block: Block, completion_id: str) -> dict[str, Any]:
    match block:
        case Reasoning(text=text):
            return {"type": "thinking", "thinking": text, "signature": completion_id}
        case Text(text=text):
            return {"type": "text", "text": text}
        case Call():
            return {
                "type": "tool_use",
                "id": block.id,
                "name": block.name,
                "input": _parse_arguments(block.arguments),
            }


def _parse_arguments(arguments: str) -> dict[str, Any]:
    """This API's inputs are objects; anything else is wrapped as Claude Code wraps it, so that the
    tool refuses it and the model hears of it."""
    try:
        value = msgspec.json.decode(arguments) if arguments.strip() else {}
    except msgspec.DecodeError:
        value = None
    return value if isinstance(value, dict) else {_UNPARSED: {"raw": arguments}}


def _stop_reason(turn: Turn) -> str:
    if turn.finish_reason == "length":
        return "max_tokens"
    if any(isinstance(block, Call) for block in turn.blocks):
        return "tool_use"
    return "end_turn" if turn.stop_sequence is None else "stop_sequence"


def _usage(usage: Usage) -> dict[str, int]:
    """This API counts cached prompt tokens beside the others; harnesses add them up."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


_PING = event("ping", {"type": "ping"})
_STOP = event("message_stop", {"type": "message_stop"})
_BLOCK_START = b'event: content_block_start\ndata: {"type":"content_block_start","index":%d,"content_block":%b}\n\n'
_BLOCK_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{%b%b}}\n\n'
_BLOCK_STOP = b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n'
_DELTA: dict[BlockKind, bytes] = {
    "reasoning": b'"type":"thinking_delta","thinking":',
    "text": b'"type":"text_delta","text":',
    "call": b'"type":"input_json_delta","partial_json":',
}
_SIGNATURE = b'"type":"signature_delta","signature":'
_EMPTY_BLOCK: dict[BlockKind, bytes] = {
    "reasoning": b'{"type":"thinking","thinking":"","signature":""}',
    "text": b'{"type":"text","text":""}',
}


class _Streamer:
    content_type = EVENT_STREAM

    def __init__(self, request: ModelRequest, completion_id: str) -> None:
        self._model = request.model
        self._completion_id = completion_id
        self._index = -1
        self._kind: BlockKind = "text"

    def open(self, prompt_tokens: int) -> bytes:
        return event(
            "message_start",
            {
                "type": "message_start",
                "message": {
                    "id": self._completion_id,
                    "type": "message",
                    "role": "assistant",
                    "model": self._model,
                    "content": [],
                    "stop_reason": None,
                    "stop_sequence": None,
                    "usage": _usage(Usage(prompt_tokens=prompt_tokens)),
                },
            },
        )

    def event(self, event: TurnEvent) -> bytes:
        match event:
            case BlockDelta(text=text):
                return _BLOCK_DELTA % (self._index, _DELTA[self._kind], json_bytes(text))
            case BlockStart():
                return self._start(event)
            case BlockEnd():
                stop = _BLOCK_STOP % self._index
                if self._kind != "reasoning":
                    return stop
                signature = json_bytes(self._completion_id)
                return _BLOCK_DELTA % (self._index, _SIGNATURE, signature) + stop
            case TurnEnd(turn=turn):
                return _end(turn)

    def _start(self, start: BlockStart) -> bytes:
        self._index += 1
        self._kind = start.kind
        if start.kind == "call":
            block = json_bytes(
                {"type": "tool_use", "id": start.id, "name": start.name, "input": {}}
            )
        else:
            block = _EMPTY_BLOCK[start.kind]
        return _BLOCK_START % (self._index, block)

    def keep_alive(self) -> bytes:
        return _PING

    def error(self, error: ErrorKind) -> bytes:
        return b"event: error\ndata: %b\n\n" % error_body(error)


def _end(turn: Turn) -> bytes:
    delta = {"stop_reason": _stop_reason(turn), "stop_sequence": turn.stop_sequence}
    return (
        event(
            "message_delta", {"type": "message_delta", "delta": delta, "usage": _usage(turn.usage)}
        )
        + _STOP
    )


def streamer(request: ModelRequest, completion_id: str, created: int) -> _Streamer:
    return _Streamer(request, completion_id)


_NO_DATE = "1970-01-01T00:00:00Z"

_ERROR_TYPES = {
    "invalid_request": "invalid_request_error",
    "authentication": "authentication_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "context_overflow": "invalid_request_error",
    "rate_limit": "rate_limit_error",
    "overloaded": "overloaded_error",
    "session_closed": "permission_error",
    "internal": "api_error",
}


def error_status(error: ErrorKind) -> int:
    return 529 if error.code == "overloaded" else error.status


def error_body(error: ErrorKind) -> bytes:
    message = error.message
    if error.code == "context_overflow" and "prompt is too long" not in message:
        # The words by which Claude Code knows that it must compact.
        message = f"prompt is too long: {message}"
    return json_bytes(
        {"type": "error", "error": {"type": _ERROR_TYPES[error.code], "message": message}}
    )


def _model(model: str) -> dict[str, Any]:
    return {"type": "model", "id": model, "display_name": model, "created_at": _NO_DATE}


def model_body(model: str) -> bytes:
    return json_bytes(_model(model))


def models_body(models: list[str]) -> bytes:
    return json_bytes(
        {
            "data": [_model(model) for model in models],
            "has_more": False,
            "first_id": models[0] if models else None,
            "last_id": models[-1] if models else None,
        }
    )


def count_body(tokens: int) -> bytes:
    return json_bytes({"input_tokens": tokens})
