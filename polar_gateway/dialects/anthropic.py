"""Anthropic's Messages API."""

import re
from collections.abc import Mapping
from typing import Any

from polar_gateway.dialects import messages as shared
from polar_gateway.dialects.anthropic_tools import as_function
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
    "output_config": "translated",
    "output_format": "translated",
    "stream": "answered",
    "metadata": "ignored",
    "service_tier": "ignored",
    "speed": "ignored",
    "betas": "ignored",
    "inference_geo": "ignored",
    "cache_control": "ignored",
    "diagnostics": "ignored",
    "user_profile_id": "ignored",
    "workspace_id": "ignored",
    "context_management": "noted",
    "fallbacks": "noted",
}

REFUSED = {
    "mcp_servers": "the model behind this endpoint cannot call MCP servers by itself",
    "container": "there is no code execution container behind this endpoint",
    "compaction": "this endpoint does not compact; ask for a summary in a message",
    "thread": "this endpoint keeps no threads; send the whole conversation",
}

_BILLING = re.compile(r"(?:x-anthropic-billing-header[^\n]*\n*)++")


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
            if "/models/" in path:
                return Match("model", {"model": path.partition("/models/")[2]})
    return None


def normalise(body: dict[str, Any]) -> ModelRequest:
    history = _History()
    conversation, notes = history.conversation, history.conversation.notes
    if body.get("thread"):
        # This provider's SDK does without as soon as it hears so.
        raise UnsupportedRequestError("thread", REFUSED["thread"], optional=True)
    shared.screen(body, FIELDS, REFUSED, notes)
    conversation.system(_system_text(body.get("system")))
    for index, message in enumerate(objects(body.get("messages"), "messages")):
        history.add(message, f"messages[{index}]")
    # Only a call has a limit: what is counted is not continued, so it may end anyhow.
    if conversation.ends_with_assistant and "max_tokens" in body:
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
    thinking = mapping(body.get("thinking"), "thinking")
    if thinking.get("budget_tokens") is not None:
        note(notes, "thinking.budget_tokens ignored")
    tools = history.tools(body.get("tools"))
    tool_choice, parallel = _tool_choice(body, tools, notes)
    return ModelRequest(
        model=shared.model_name(body),
        messages=conversation.finish(),
        answers=conversation.answers,
        tools=tools,
        tool_choice=tool_choice,
        parallel_tool_calls=parallel,
        max_tokens=shared.count(body.get("max_tokens"), "max_tokens"),
        sampling=sampling,
        response_format=_response_format(body, notes),
        template_kwargs={"enable_thinking": False} if thinking.get("type") == "disabled" else {},
        stream=bool(body.get("stream")),
        notes=notes,
    )


def _response_format(body: dict[str, Any], notes: list[str]) -> dict[str, Any] | None:
    given, where = body.get("output_format"), "output_format"
    for field, value in mapping(body.get("output_config"), "output_config").items():
        if field == "format":
            given, where = value, "output_config.format"
        elif value is not None:
            note(notes, f"output_config.{field} ignored")
    match given:
        case None:
            return None
        case {"type": "json_schema", "schema": schema}:
            return shared.schema_format(schema)
    raise UnsupportedRequestError(where, "only json_schema with a schema is supported")


def _system_text(system: Any) -> str:
    if system is None or isinstance(system, str):
        return _without_billing(system or "")
    texts = [
        _without_billing(string(block.get("text"), f"system[{index}].text"))
        for index, block in enumerate(objects(system, "system"))
    ]
    return "\n".join(text for text in texts if text)


def _without_billing(text: str) -> str:
    """A system text without the lines that say whom to bill: it differs between conversations and is
    not meant for the model."""
    found = _BILLING.match(text)
    return text[found.end() :] if found else text


class _History:
    """This API's messages to the engine's, and what they say of the tools on the way."""

    def __init__(self) -> None:
        self.conversation = Conversation()
        self._found: dict[str, dict[str, Any] | None] = {}
        """Deferred tools that a search or the harness has brought, in order, with the definition
        where it came along."""
        self._withdrawn: set[str] = set()

    def add(self, message: dict[str, Any], where: str) -> None:
        role, content = message.get("role"), message.get("content")
        if role == "assistant":
            self._add_assistant(content, where)
        elif role == "user":
            if isinstance(content, str):
                self.conversation.user(content)
            else:
                self._add_user(objects(content, f"{where}.content"), where)
        elif role == "system":
            self._add_system(message, where)
        else:
            raise UnsupportedRequestError(
                f"{where}.role", f"{role!r} is none of user, assistant, system"
            )

    def _add_system(self, message: dict[str, Any], where: str) -> None:
        """Texts, and changes of the tools, of which the model is told too."""
        for field in ("clear_at", "output_config"):
            if message.get(field) not in (None, "never"):
                note(self.conversation.notes, f"{field} of a system message ignored")
        content = message.get("content")
        if content is None or isinstance(content, str):
            self.conversation.system(_without_billing(content or ""))
            return
        texts = []
        for index, block in enumerate(objects(content, f"{where}.content")):
            field = f"{where}.content[{index}]"
            if block.get("type") in ("tool_addition", "tool_removal"):
                texts.append(self._change_tools(block, field))
                continue
            part = self._part(block, field)
            if part["type"] != "text":
                raise UnsupportedRequestError(field, "a system message holds text only")
            texts.append(_without_billing(part["text"]))
        self.conversation.system("\n".join(text for text in texts if text))

    def _change_tools(self, block: dict[str, Any], field: str) -> str:
        """Heed a change of the tools; returns what the model is told of it."""
        change = mapping(block.get("tool"), f"{field}.tool")
        definition = None
        match change.get("type"):
            case "tool_reference":
                changed = string(change.get("name"), f"{field}.tool.name")
            case "tool_definition":
                definition = mapping(change.get("definition"), f"{field}.tool.definition")
                changed = string(definition.get("name"), f"{field}.tool.definition.name")
            case other:
                note(self.conversation.notes, f"{block['type']} of {other} ignored")
                return ""
        if block["type"] == "tool_addition":
            self._withdrawn.discard(changed)
            self._found[changed] = definition or self._found.get(changed)
            return f"The tool {changed} can be called from now on."
        self._withdrawn.add(changed)
        return f"The tool {changed} can no longer be called."

    def _add_assistant(self, content: Any, where: str) -> None:
        if isinstance(content, str):
            self.conversation.assistant(content, "", [])
            return
        texts: list[str] = []
        reasoning: list[str] = []
        calls: list[dict[str, Any]] = []
        answer: str | None = None
        for index, block in enumerate(objects(content, f"{where}.content")):
            match block.get("type"):
                case "text":
                    texts.append(_field(block, "text", where, index))
                case "tool_use":
                    calls.append(
                        shared.tool_call(
                            _field(block, "id", where, index),
                            _field(block, "name", where, index),
                            shared.arguments_of_object(block.get("input")),
                        )
                    )
                case "thinking" | "redacted_thinking" as kind:
                    mark = block.get("signature" if kind == "thinking" else "data")
                    named = shared.completion_reference(mark)
                    if named is not None and answer is not None and named != answer:
                        # A harness joined two answers that followed each other.
                        self._say(texts, reasoning, calls, answer)
                        texts, reasoning, calls = [], [], []
                    answer = named or answer
                    if kind == "thinking":
                        reasoning.append(_field(block, "thinking", where, index))
                    elif named is None:
                        note(self.conversation.notes, "redacted_thinking of another ignored")
                case other:
                    note(self.conversation.notes, f"assistant block {other} ignored")
        self._say(texts, reasoning, calls, answer)

    def _say(
        self,
        texts: list[str],
        reasoning: list[str],
        calls: list[dict[str, Any]],
        answer: str | None,
    ) -> None:
        # Joined without anything between them: they are parts of one sampled text.
        self.conversation.assistant("".join(texts), "".join(reasoning), calls, answer=answer)

    def _add_user(self, blocks: list[dict[str, Any]], where: str) -> None:
        """Tool results first, as the template needs them right behind their calls, then the rest."""
        conversation = self.conversation
        parts: list[dict[str, Any]] = []
        results = False
        for index, block in enumerate(blocks):
            kind, text = block.get("type"), block.get("text")
            if kind == "tool_result":
                if parts:
                    note(conversation.notes, "text before tool results sent behind them")
                results = True
                content = block.get("content")
                if not isinstance(content, str):
                    content = self._content(content, f"{where}.content[{index}].content")
                conversation.tool(
                    _field(block, "tool_use_id", where, index),
                    shared.as_error(content) if block.get("is_error") else content,
                )
            elif kind == "text" and isinstance(text, str):
                if results and not parts and shared.is_reminder(text):
                    # At once, so that it stays where it is when the harness adds to the message.
                    conversation.remind(text)
                else:
                    parts.append(shared.text_part(text))
            else:
                parts.append(self._part(block, f"{where}.content[{index}]"))
        if not results:
            conversation.user(shared.fold_parts(parts))
        else:
            conversation.beside_results(parts)

    def _content(self, content: Any, field: str) -> str | list[dict[str, Any]]:
        """The content of a tool result that is no string."""
        parts = []
        found = []
        for index, block in enumerate(objects(content or [], field)):
            if block.get("type") == "tool_reference":
                found.append(string(block.get("tool_name"), f"{field}[{index}].tool_name"))
            else:
                parts.append(self._part(block, f"{field}[{index}]"))
        if found:
            for each in found:
                self._found.setdefault(each, None)
            parts.append(shared.text_part(shared.found_text(found)))
        return shared.fold_parts(parts)

    def _part(self, block: dict[str, Any], field: str) -> dict[str, Any]:
        match block.get("type"):
            case "text":
                return shared.text_part(string(block.get("text"), f"{field}.text"))
            case "image":
                return shared.image_part(_image_url(block.get("source"), f"{field}.source"))
            case "document":
                return shared.text_part(_document_text(block, field))
            case "search_result":
                return shared.text_part(_search_text(block, field))
            case "container_upload":
                raise UnsupportedRequestError(field, "this endpoint keeps no files and containers")
            case other:
                note(self.conversation.notes, f"block {other} sent as JSON text")
                return shared.text_part(shared.compact_json(_without_cache_control(block)))

    def tools(self, tools: Any) -> list[dict[str, Any]] | None:
        """The engine's tools. Deferred ones come last, and only after they were found, in that
        order, so that the list of the turn before stays its beginning."""
        notes = self.conversation.notes
        listed = objects(tools, "tools") if tools else []
        # Nobody else can search where the provider would have done it.
        searched = not any(str(tool.get("type")).startswith("tool_search_tool") for tool in listed)
        kept: dict[str, dict[str, Any]] = {}
        deferred: dict[str, dict[str, Any]] = {}
        for index, tool in enumerate(listed):
            function = as_function(tool, f"tools[{index}]", notes)
            if function is not None:
                later = searched and tool.get("defer_loading")
                (deferred if later else kept)[function["function"]["name"]] = function
        for found, definition in self._found.items():
            if found in kept:
                continue
            function = deferred.pop(found, None)
            if definition is not None:
                function = as_function(definition, f"the definition of {found}", notes)
            if function is not None:
                kept[found] = function
        if deferred:
            note(notes, f"{len(deferred)} deferred tools left out until they are found")
        return [tool for each, tool in kept.items() if each not in self._withdrawn] or None


def _field(block: dict[str, Any], field: str, where: str, index: int) -> str:
    """A string of a block; its path is only spelled where it is needed."""
    value = block.get(field)
    return value if isinstance(value, str) else string(value, f"{where}.content[{index}].{field}")


def _without_cache_control(block: dict[str, Any]) -> dict[str, Any]:
    """The block, and the blocks in it, without marks that move from request to request."""
    plain = {}
    for field, value in block.items():
        if field == "cache_control":
            continue
        if isinstance(value, list):
            value = [
                {key: each for key, each in item.items() if key != "cache_control"}
                if isinstance(item, dict)
                else item
                for item in value
            ]
        plain[field] = value
    return plain


def _image_url(source: Any, field: str) -> str:
    match source:
        case {"type": "base64", "media_type": str(media_type), "data": str(data)}:
            return f"data:{media_type};base64,{data}"
        case {"type": "url", "url": str(url)}:
            return url
    raise UnsupportedRequestError(field, "only base64 and url images are supported")


def _document_text(block: dict[str, Any], field: str) -> str:
    source = f"{field}.source"
    match block.get("source"):
        case {"type": "text", "data": str(text)}:
            pass
        case {"type": "base64", "media_type": str(media_type), "data": str(data)}:
            text = shared.decoded_text(media_type, data, source)
        case {"type": "content", "content": str(text)}:
            pass
        case {"type": "content", "content": list(parts)} if all(
            isinstance(part, dict) and part.get("type") == "text" for part in parts
        ):
            text = "\n".join(string(part.get("text"), source) for part in parts)
        case _:
            raise UnsupportedRequestError(
                source, "only documents of plain text that come with the request are supported"
            )
    heading = [string(block.get(name), f"{field}.{name}") for name in ("title", "context")]
    return shared.document_text("\n".join(line for line in heading if line), text)


def _search_text(block: dict[str, Any], field: str) -> str:
    heading = [string(block.get(name), f"{field}.{name}") for name in ("title", "source")]
    texts = [
        string(part.get("text"), f"{field}.content[{index}].text")
        for index, part in enumerate(objects(block.get("content"), f"{field}.content"))
    ]
    return "\n".join([line for line in heading if line] + texts)


def _tool_choice(
    body: dict[str, Any], tools: list[dict[str, Any]] | None, notes: list[str]
) -> tuple[Any, bool | None]:
    choice = mapping(body.get("tool_choice"), "tool_choice")
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
            chosen = string(choice.get("name"), "tool_choice.name")
            if any(tool["function"]["name"] == chosen for tool in tools):
                return {"type": "function", "function": {"name": chosen}}, parallel
            if any(tool.get("name") == chosen for tool in body["tools"]):
                note(notes, f"tool_choice of {chosen} ignored, as the tool is")
                return None, parallel
            raise UnsupportedRequestError("tool_choice.name", f"there is no tool {chosen!r}")
    raise UnsupportedRequestError("tool_choice.type", f"{choice.get('type')!r} is not supported")


def answer(request: ModelRequest, turn: Turn) -> bytes:
    return json_bytes(
        {
            "id": turn.completion_id,
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "content": [_answer_block(block, turn.completion_id) for block in turn.blocks],
            **_stop(turn),
            "usage": _final_usage(turn.usage),
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
                "input": shared.object_of_arguments(block.arguments),
            }


def _stop(turn: Turn) -> dict[str, str | None]:
    if turn.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if any(isinstance(block, Call) for block in turn.blocks):
        return {"stop_reason": "tool_use", "stop_sequence": None}
    reason = "end_turn" if turn.stop_sequence is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": turn.stop_sequence}


def _usage(usage: Usage) -> dict[str, int]:
    """This API counts cached prompt tokens beside the others; harnesses add them up."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _final_usage(usage: Usage) -> dict[str, Any]:
    details = {"thinking_tokens": usage.reasoning_tokens}
    return {**_usage(usage), "output_tokens_details": details}


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
    delta = {"type": "message_delta", "delta": _stop(turn), "usage": _final_usage(turn.usage)}
    return event("message_delta", delta) + _STOP


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


_STATUSES = {"context_overflow": 400, "rate_limit": 429, "overloaded": 529}
"""Where this API has one status for the error, whatever the engine's was."""


def error_status(error: ErrorKind) -> int:
    return _STATUSES.get(error.code, error.status)


def error_body(error: ErrorKind) -> bytes:
    message = error.message
    if error.code == "context_overflow" and "prompt is too long" not in message:
        # The words by which Claude Code knows that it must compact.
        message = f"prompt is too long: {message}"
    told: dict[str, Any] = {"type": _ERROR_TYPES[error.code], "message": message}
    if error.param == "thread":
        told["details"] = {"error_code": "thread_unsupported_request"}
    return json_bytes({"type": "error", "error": told})


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
