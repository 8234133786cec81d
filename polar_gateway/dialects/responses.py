"""OpenAI's Responses API, without state on our side: every request carries its whole history."""

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import msgspec

from polar_gateway.dialects import messages as shared
from polar_gateway.dialects import openai
from polar_gateway.dialects.messages import Conversation, Treatment, mapping, note, objects, string
from polar_gateway.dialects.openai import error_body, error_status, model_body, models_body
from polar_gateway.dialects.sse import EVENT_STREAM, json_bytes
from polar_gateway.dialects.turn import (
    Block,
    BlockDelta,
    BlockEnd,
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

name = "responses"
request_id_header = "x-request-id"

FIELDS: dict[str, Treatment] = {
    "model": "translated",
    "instructions": "translated",
    "input": "translated",
    "tools": "translated",
    "tool_choice": "translated",
    "parallel_tool_calls": "translated",
    "max_output_tokens": "translated",
    "temperature": "translated",
    "top_p": "translated",
    "text": "translated",
    "reasoning": "translated",
    "stream": "answered",
    "stream_options": "ignored",
    "include": "ignored",
    "store": "ignored",
    "metadata": "ignored",
    "client_metadata": "ignored",
    "user": "ignored",
    "service_tier": "ignored",
    "prompt_cache_key": "ignored",
    "prompt_cache_retention": "ignored",
    "safety_identifier": "ignored",
    "truncation": "noted",
    "max_tool_calls": "noted",
    "top_logprobs": "noted",
}

_STATELESS = "this endpoint keeps no responses; send the whole input"
REFUSED = {
    "previous_response_id": _STATELESS,
    "conversation": _STATELESS,
    "prompt": "this endpoint keeps no prompt templates; send instructions and input",
    "background": "this endpoint answers in the request only",
}

_SEAL = "polar.1."
"""Opens the `encrypted_content` that we make, so that what others made is not taken for it."""


def match(
    method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str]
) -> Match | None:
    path = path.rstrip("/")
    if path.endswith("/responses"):
        return (
            Match("call") if method == "POST" else Match("websocket") if method == "GET" else None
        )
    if method == "POST" and path.endswith("/responses/input_tokens"):
        return Match("count_tokens")
    return None


def normalise(body: dict[str, Any]) -> ModelRequest:
    history = _History()
    notes = history.conversation.notes
    shared.screen(body, FIELDS, REFUSED, notes)
    tools = _Tools(notes)
    tools.add(body.get("tools"), "tools")
    history.conversation.system(string(body.get("instructions"), "instructions"))
    given = body.get("input")
    if isinstance(given, str):
        history.conversation.user(given)
    else:
        items = objects(given, "input")
        for index, item in enumerate(items):
            if item.get("type") == "additional_tools":
                tools.add(item.get("tools"), f"input[{index}].tools")
        for index, item in enumerate(items):
            history.add(item, f"input[{index}]", tools)
    history.close()

    tool_choice, parallel = tools.choice(body.get("tool_choice")), body.get("parallel_tool_calls")
    template_kwargs = {}
    effort = mapping(body.get("reasoning"), "reasoning").get("effort")
    if effort == "none":
        template_kwargs["enable_thinking"] = False
    elif effort is not None:
        note(notes, "reasoning.effort ignored")
    return ModelRequest(
        model=shared.model_name(body),
        messages=history.conversation.finish(),
        tools=tools.functions or None,
        tool_choice=tool_choice,
        parallel_tool_calls=parallel if tools.functions else None,
        max_tokens=shared.count(body.get("max_output_tokens"), "max_output_tokens"),
        sampling={
            field: body[field] for field in ("temperature", "top_p") if body.get(field) is not None
        },
        response_format=_response_format(mapping(body.get("text"), "text"), notes),
        template_kwargs=template_kwargs,
        stream=bool(body.get("stream")),
        notes=notes,
        renames=tools.renames,
    )


def _response_format(text: dict[str, Any], notes: list[str]) -> dict[str, Any] | None:
    if text.get("verbosity") is not None:
        note(notes, "text.verbosity ignored")
    match text.get("format"):
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "json_object"}
        case {"type": "json_schema", **schema}:
            return {"type": "json_schema", "json_schema": schema}
    raise UnsupportedRequestError(
        "text.format", "only text, json_object and json_schema are supported"
    )


class _Tools:
    """The engine's function tools, and how the answer must name each.

    `renames` holds only names that the answer changes: engine's name -> the fields of the item.
    """

    def __init__(self, notes: list[str]) -> None:
        self.functions: list[dict[str, Any]] = []
        self.renames: dict[str, Any] = {}
        self._names: dict[tuple[str, str], str] = {}
        self._taken: set[str] = set()
        self._notes = notes

    def add(self, tools: Any, field: str) -> None:
        if not tools:
            return
        listed = objects(tools, field)
        # Plain names first: they are never changed, whatever a namespace contains.
        self._taken.update(
            str(tool.get("name")) for tool in listed if tool.get("type") != "namespace"
        )
        for index, tool in enumerate(listed):
            self._add_one(tool, "", f"{field}[{index}]")

    def _add_one(self, tool: dict[str, Any], namespace: str, field: str) -> None:
        kind = tool.get("type")
        if kind == "namespace" and not namespace:
            inner = string(tool.get("name"), f"{field}.name")
            for index, each in enumerate(objects(tool.get("tools"), f"{field}.tools")):
                self._add_one(each, inner, f"{field}.tools[{index}]")
            return
        if kind not in ("function", "custom", "local_shell"):
            note(self._notes, f"tool of type {kind} ignored")
            return
        plain = (
            "local_shell" if kind == "local_shell" else string(tool.get("name"), f"{field}.name")
        )
        engine_name = self._claim(namespace, plain)
        rename = {"type": kind, "name": plain}
        if namespace:
            rename["namespace"] = namespace
        if kind != "function" or namespace:
            self.renames[engine_name] = rename
        self.functions.append(_function(tool, kind, engine_name, field))

    def _claim(self, namespace: str, plain: str) -> str:
        if not namespace:
            return self._names.setdefault(("", plain), plain)
        engine_name = engine_tool_name(namespace, plain)
        while engine_name in self._taken:
            engine_name += "_"
        self._taken.add(engine_name)
        self._names[namespace, plain] = engine_name
        return engine_name

    def engine_name(self, namespace: str, plain: str) -> str:
        """What a call of the history was named, also when the request no longer has the tool."""
        return self._names.get((namespace, plain)) or engine_tool_name(namespace, plain)

    def choice(self, choice: Any) -> Any:
        if choice is None:
            return None
        if not self.functions:
            if choice not in ("auto", "none"):
                note(self._notes, "tool_choice without tools ignored")
            return None
        match choice:
            case "auto" | "none" | "required":
                return choice
            case {"type": "function" | "custom", "name": str(plain)}:
                engine_name = self.engine_name(str(choice.get("namespace") or ""), plain)
                return {"type": "function", "function": {"name": engine_name}}
        raise UnsupportedRequestError(
            "tool_choice", "only auto, none, required and one function are supported"
        )


def engine_tool_name(namespace: str, plain: str) -> str:
    return f"{namespace}__{plain}" if namespace else plain


def _function(tool: dict[str, Any], kind: Any, engine_name: str, field: str) -> dict[str, Any]:
    description = string(tool.get("description"), f"{field}.description")
    if kind == "local_shell":
        return shared.function_tool(engine_name, "Run a command.", _LOCAL_SHELL_PARAMETERS)
    if kind == "custom":
        grammar = mapping(tool.get("format"), f"{field}.format")
        if grammar.get("type") == "grammar":
            # The engine is not held to the grammar, so the model must at least be told of it.
            syntax, definition = grammar.get("syntax"), grammar.get("definition")
            description = f"{description}\n\nThe input follows this {syntax} grammar:\n{definition}"
        return shared.function_tool(engine_name, description.strip(), _CUSTOM_PARAMETERS)
    function = shared.function_tool(engine_name, description, tool.get("parameters"))
    if tool.get("strict"):
        function["function"]["strict"] = True
    return function


_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The tool's input as plain text."}},
    "required": ["input"],
    "additionalProperties": False,
}
_LOCAL_SHELL_PARAMETERS = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
    },
    "required": ["command"],
    "additionalProperties": False,
}


class _History:
    """Input items to messages: what one answer was made of becomes one assistant message again.

    Items of assistant kind that follow each other are one turn, unless their ids, which we made,
    say that they come from different answers.
    """

    def __init__(self) -> None:
        self.conversation = Conversation()
        self._answer: str | None = None
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def add(self, item: dict[str, Any], field: str, tools: _Tools) -> None:
        match item.get("type") or ("message" if "role" in item else None):
            case "message":
                self._add_message(item, field)
            case "reasoning":
                self._continue(item)
                self._reasoning.append(_reasoning_text(item, field))
            case "function_call" | "custom_tool_call" | "local_shell_call" as kind:
                self._continue(item)
                self._calls.append(_call(item, kind, field, tools))
            case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output":
                self.close()
                call_id = string(item.get("call_id") or item.get("id"), f"{field}.call_id")
                self.conversation.tool(call_id, _content(item.get("output"), f"{field}.output"))
            case "additional_tools":
                pass
            case "item_reference" | "compaction" as kind:
                raise UnsupportedRequestError(
                    field, f"an item of type {kind} refers to state that {_STATELESS}"
                )
            case kind:
                note(self.conversation.notes, f"input item of type {kind} ignored")

    def _add_message(self, item: dict[str, Any], field: str) -> None:
        content = item.get("content")
        match item.get("role"):
            case "assistant":
                self._continue(item)
                self._texts.append(_text(content, f"{field}.content", ""))
            case "user":
                self.close()
                self.conversation.user(_content(content, f"{field}.content"))
            case "system" | "developer":
                self.close()
                self.conversation.system(_text(content, f"{field}.content", "\n"))
            case other:
                raise UnsupportedRequestError(f"{field}.role", f"{other!r} is not supported")

    def _continue(self, item: dict[str, Any]) -> None:
        """Open an assistant turn or go on with the open one."""
        answer = _answer_of(item.get("id"))
        if answer is not None and self._answer is not None and answer != self._answer:
            self.close()
        self._answer = answer or self._answer

    def close(self) -> None:
        if self._texts or self._reasoning or self._calls:
            self.conversation.assistant("".join(self._texts), "".join(self._reasoning), self._calls)
            self._texts, self._reasoning, self._calls = [], [], []
        self._answer = None


def _answer_of(item_id: Any) -> str | None:
    """Which answer of ours an item id belongs to; None for ids that others made."""
    if not isinstance(item_id, str):
        return None
    parts = item_id.split("_")
    return parts[1] if len(parts) == 3 and len(parts[1]) == 12 else None


def _reasoning_text(item: dict[str, Any], field: str) -> str:
    sealed = item.get("encrypted_content")
    if isinstance(sealed, str) and sealed.startswith(_SEAL):
        try:
            return base64.b64decode(sealed[len(_SEAL) :], validate=True).decode()
        except (binascii.Error, UnicodeDecodeError) as error:
            raise UnsupportedRequestError(
                f"{field}.encrypted_content", f"is damaged: {error}"
            ) from error
    content = _text(item.get("content"), f"{field}.content", "")
    return content or _text(item.get("summary"), f"{field}.summary", "\n\n")


def _seal(text: str) -> str:
    return _SEAL + base64.b64encode(text.encode()).decode()


def _call(item: dict[str, Any], kind: str, field: str, tools: _Tools) -> dict[str, Any]:
    call_id = string(item.get("call_id") or item.get("id"), f"{field}.call_id")
    if kind == "local_shell_call":
        action = mapping(item.get("action"), f"{field}.action")
        arguments = {key: action[key] for key in _LOCAL_SHELL_FIELDS if action.get(key) is not None}
        return shared.tool_call(call_id, "local_shell", shared.compact_json(arguments))
    plain = string(item.get("name"), f"{field}.name")
    engine_name = tools.engine_name(string(item.get("namespace"), f"{field}.namespace"), plain)
    if kind == "custom_tool_call":
        text = string(item.get("input"), f"{field}.input")
        return shared.tool_call(call_id, engine_name, shared.compact_json({"input": text}))
    return shared.tool_call(
        call_id, engine_name, string(item.get("arguments"), f"{field}.arguments")
    )


_LOCAL_SHELL_FIELDS = ("command", "working_directory", "timeout_ms")


def _text(content: Any, field: str, separator: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(objects(content, field)):
        text = part.get("refusal") if part.get("type") == "refusal" else part.get("text")
        if not isinstance(text, str):
            raise UnsupportedRequestError(
                f"{field}[{index}]",
                f"a part of type {part.get('type')!r} is not supported in this role",
            )
        texts.append(text)
    return separator.join(texts)


def _content(content: Any, field: str) -> str | list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        return content or ""
    return shared.fold_parts(
        [_part(part, f"{field}[{index}]") for index, part in enumerate(objects(content, field))]
    )


def _part(part: dict[str, Any], field: str) -> dict[str, Any]:
    match part:
        case {"type": "input_text" | "output_text" | "text", "text": str(text)}:
            return shared.text_part(text)
        case {"type": "input_image", "image_url": str(url)}:
            return shared.image_part(url, part.get("detail"))
    raise UnsupportedRequestError(field, f"a part of type {part.get('type')!r} is not supported")


def _base(completion_id: str) -> str:
    return completion_id.removeprefix("msg_")


def _item(request: ModelRequest, completion_id: str, index: int, block: Block) -> dict[str, Any]:
    """A finished output item; its id says which answer it is of, and where in it."""
    suffix = f"{_base(completion_id)}_{index}"
    match block:
        case Reasoning(text=text):
            return {
                "id": f"rs_{suffix}",
                "type": "reasoning",
                "summary": [{"type": "summary_text", "text": text}],
                "encrypted_content": _seal(text),
            }
        case Text(text=text):
            return {
                "id": f"msg_{suffix}",
                "type": "message",
                "status": "completed",
                "role": "assistant",
                "content": [_text_content(text)],
            }
        case Call():
            return _call_item(request, suffix, block, "completed")


def _text_content(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_item(request: ModelRequest, suffix: str, call: Call, status: str) -> dict[str, Any]:
    rename = request.renames.get(call.name, {})
    plain = rename.get("name", call.name)
    item: dict[str, Any]
    match rename.get("type"):
        case "custom":
            item = {"id": f"ctc_{suffix}", "type": "custom_tool_call", "status": status}
            item |= {"call_id": call.id, "name": plain, "input": _custom_input(call.arguments)}
        case "local_shell":
            item = {"id": f"lsh_{suffix}", "type": "local_shell_call", "status": status}
            item |= {"call_id": call.id, "action": _shell_action(call.arguments)}
        case _:
            item = {"id": f"fc_{suffix}", "type": "function_call", "status": status}
            item |= {"call_id": call.id, "name": plain, "arguments": call.arguments}
    if "namespace" in rename:
        item["namespace"] = rename["namespace"]
    return item


def _arguments(arguments: str) -> dict[str, Any]:
    """The arguments as an object; an empty one when the model spelled none."""
    try:
        value = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _custom_input(arguments: str) -> str:
    """The plain text of a custom tool; what the model spelled in another form is handed on as it is."""
    text = _arguments(arguments).get("input")
    return text if isinstance(text, str) else arguments


def _shell_action(arguments: str) -> dict[str, Any]:
    given = _arguments(arguments)
    action = {key: given[key] for key in _LOCAL_SHELL_FIELDS if key in given}
    return {"type": "exec", "command": [], "env": {}, **action}


def _response(
    request: ModelRequest,
    completion_id: str,
    created: int,
    status: str,
    output: list[dict[str, Any]],
    usage: Usage | None = None,
    error: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return {
        "id": f"resp_{_base(completion_id)}",
        "object": "response",
        "created_at": created,
        "status": status,
        "error": error,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": None,
        "max_output_tokens": request.max_tokens,
        "model": request.model,
        "output": output,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "store": False,
        "tool_choice": "auto",
        "tools": [],
        "usage": None if usage is None else _usage(usage),
        "metadata": {},
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _finished(request: ModelRequest, turn: Turn, created: int) -> dict[str, Any]:
    output = [_item(request, turn.completion_id, i, block) for i, block in enumerate(turn.blocks)]
    status = "incomplete" if turn.finish_reason == "length" else "completed"
    return _response(request, turn.completion_id, created, status, output, turn.usage)


def answer(request: ModelRequest, turn: Turn) -> bytes:
    return json_bytes(_finished(request, turn, turn.created))


_EVENT = b'event: %b\ndata: {"type":"%b","sequence_number":%d,%b}\n\n'


class _Streamer:
    content_type = EVENT_STREAM

    def __init__(self, request: ModelRequest, completion_id: str, created: int) -> None:
        self._request = request
        self._completion_id = completion_id
        self._created = created
        self._sequence = -1
        self._index = -1
        self._start = BlockStart(kind="text")
        self._rename: dict[str, Any] = {}
        self._texts: list[str] = []
        self._in_progress = b'"response":%b' % json_bytes(
            _response(request, completion_id, created, "in_progress", [])
        )
        self._at = b""
        """The open item's id and index, as most of its events begin."""

    def _event(self, name: bytes, fields: bytes) -> bytes:
        self._sequence += 1
        return _EVENT % (name, name, self._sequence, fields)

    def open(self, prompt_tokens: int) -> bytes:
        return self._event(b"response.created", self._in_progress) + self.keep_alive()

    def keep_alive(self) -> bytes:
        return self._event(b"response.in_progress", self._in_progress)

    def event(self, event: TurnEvent) -> bytes:
        match event:
            case BlockDelta(text=text):
                return self._delta(text)
            case BlockStart():
                return self._open_item(event)
            case BlockEnd():
                return self._close_item()
            case TurnEnd(turn=turn):
                response = _finished(self._request, turn, self._created)
                fields = b'"response":%b' % json_bytes(response)
                return self._event(b"response.%b" % response["status"].encode(), fields)

    def _open_item(self, start: BlockStart) -> bytes:
        self._index += 1
        self._start = start
        self._rename = self._request.renames.get(start.name, {})
        self._texts = []
        item = self._item("in_progress")
        self._at = b'"item_id":%b,"output_index":%d,' % (json_bytes(item["id"]), self._index)
        if start.kind == "reasoning":
            item["summary"], item["encrypted_content"] = [], ""
            part = b'"summary_index":0,"part":{"type":"summary_text","text":""}'
            return self._added(item) + self._event(
                b"response.reasoning_summary_part.added", self._at + part
            )
        if start.kind == "text":
            item["content"] = []
            part = b'"content_index":0,"part":{"type":"output_text","text":"","annotations":[],"logprobs":[]}'
            return self._added(item) + self._event(b"response.content_part.added", self._at + part)
        return self._added(item)

    def _item(self, status: str) -> dict[str, Any]:
        """The open item with what has come of it so far."""
        text = "".join(self._texts)
        start = self._start
        if start.kind == "call":
            call = Call(id=start.id, name=start.name, arguments=text)
            return _call_item(
                self._request, f"{_base(self._completion_id)}_{self._index}", call, status
            )
        block: Block = Reasoning(text=text) if start.kind == "reasoning" else Text(text=text)
        item = _item(self._request, self._completion_id, self._index, block)
        if "status" in item:
            item["status"] = status
        return item

    def _added(self, item: dict[str, Any]) -> bytes:
        fields = b'"output_index":%d,"item":%b' % (self._index, json_bytes(item))
        return self._event(b"response.output_item.added", fields)

    def _delta(self, text: str) -> bytes:
        self._texts.append(text)
        quoted = json_bytes(text)
        match self._start.kind:
            case "reasoning":
                fields = b'%b"summary_index":0,"delta":%b' % (self._at, quoted)
                return self._event(b"response.reasoning_summary_text.delta", fields)
            case "text":
                fields = b'%b"content_index":0,"delta":%b,"logprobs":[]' % (self._at, quoted)
                return self._event(b"response.output_text.delta", fields)
            case "call":
                if self._rename.get("type", "function") != "function":
                    # A custom tool's input is inside the arguments: it goes out whole at their end.
                    return b""
                fields = b'%b"delta":%b' % (self._at, quoted)
                return self._event(b"response.function_call_arguments.delta", fields)

    def _close_item(self) -> bytes:
        item = self._item("completed")
        match item["type"]:
            case "reasoning":
                text = json_bytes(item["summary"][0]["text"])
                closed = self._event(
                    b"response.reasoning_summary_text.done",
                    b'%b"summary_index":0,"text":%b' % (self._at, text),
                ) + self._event(
                    b"response.reasoning_summary_part.done",
                    b'%b"summary_index":0,"part":%b' % (self._at, json_bytes(item["summary"][0])),
                )
            case "message":
                part = item["content"][0]
                closed = self._event(
                    b"response.output_text.done",
                    b'%b"content_index":0,"text":%b,"logprobs":[]'
                    % (self._at, json_bytes(part["text"])),
                ) + self._event(
                    b"response.content_part.done",
                    b'%b"content_index":0,"part":%b' % (self._at, json_bytes(part)),
                )
            case "function_call":
                closed = self._event(
                    b"response.function_call_arguments.done",
                    b'%b"arguments":%b' % (self._at, json_bytes(item["arguments"])),
                )
            case "custom_tool_call":
                text = json_bytes(item["input"])
                closed = self._event(
                    b"response.custom_tool_call_input.delta", b'%b"delta":%b' % (self._at, text)
                ) + self._event(
                    b"response.custom_tool_call_input.done", b'%b"input":%b' % (self._at, text)
                )
            case _:
                closed = b""
        fields = b'"output_index":%d,"item":%b' % (self._index, json_bytes(item))
        return closed + self._event(b"response.output_item.done", fields)

    def error(self, error: ErrorKind) -> bytes:
        failure = {"code": openai.error_code(error) or "server_error", "message": error.message}
        response = _response(
            self._request, self._completion_id, self._created, "failed", [], error=failure
        )
        return self._event(b"response.failed", b'"response":%b' % json_bytes(response))


def streamer(request: ModelRequest, completion_id: str, created: int) -> _Streamer:
    return _Streamer(request, completion_id, created)


def count_body(tokens: int) -> bytes:
    return json_bytes({"object": "response.input_tokens", "input_tokens": tokens})
