"""Answers of OpenAI's Responses API, whole and streamed.

A whole answer says the request's parameters again, as the provider's does. The events of a stream
leave out `instructions` and `tools`, tens of kilobytes that would go out three times in every call
and that no harness reads.
"""

import base64
import binascii
import re
from typing import Any

import msgspec

from polar_gateway.dialects.custom_tools import CustomInput
from polar_gateway.dialects.responses_tools import call_item
from polar_gateway.dialects.sse import EVENT_STREAM, json_bytes
from polar_gateway.dialects.turn import (
    Block,
    BlockDelta,
    BlockEnd,
    BlockStart,
    Call,
    ErrorKind,
    ModelRequest,
    Reasoning,
    Text,
    Turn,
    TurnEnd,
    TurnEvent,
    Usage,
)

COMPACTION = "compaction"
"""The kind of a request whose answer is a summary that stands for the history."""

_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{12})_\d+")
_SEAL = re.compile(r"polar\.1\.([0-9a-f]*)\.([A-Za-z0-9+/=]*)")
_MINE = "polar."
"""Opens the `encrypted_content` that we make, so that what others made is not taken for it."""


class Sealed(msgspec.Struct, frozen=True):
    """What our `encrypted_content` holds."""

    completion_id: str
    text: str


def seal(completion_id: str, text: str) -> str:
    """Opaque to the harness, for those that send back nothing else: which answer it was, and what
    it said, so that a summary or reasoning is there even where the record of it is not."""
    return f"polar.1.{_base(completion_id)}.{base64.b64encode(text.encode()).decode()}"


def unseal(sealed: Any) -> Sealed | None:
    """None for what is not ours; raises ValueError when it is and was damaged."""
    if not isinstance(sealed, str) or not sealed.startswith(_MINE):
        return None
    found = _SEAL.fullmatch(sealed)
    if found is None:
        raise ValueError("is not as it was sent")
    try:
        text = base64.b64decode(found[2], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise ValueError(f"is not as it was sent: {error}") from error
    return Sealed(f"msg_{found[1]}", text)


def answered_by(item_id: Any) -> str | None:
    """The completion that an item of ours belongs to; None for ids that others made."""
    found = _ITEM_ID.fullmatch(item_id) if isinstance(item_id, str) else None
    return f"msg_{found[1]}" if found else None


def _base(completion_id: str) -> str:
    return completion_id.removeprefix("msg_")


_ECHOED: dict[str, Any] = {
    "instructions": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "store": True,
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
    "user": None,
}
"""Parameters that an answer says again, with what they are when the request leaves them out."""
_LONG = ("instructions", "tools")


def echo(body: dict[str, Any]) -> dict[str, Any]:
    """What answers say again of a request."""
    said = {name: body[name] for name in _ECHOED if body.get(name) is not None}
    reasoning, text = body.get("reasoning") or {}, body.get("text") or {}
    said["reasoning"] = {"effort": None, "summary": None, **reasoning}
    said["text"] = {"format": {"type": "text"}, **text}
    return said


def _response(
    request: ModelRequest, completion_id: str, created: int, *, short: bool
) -> dict[str, Any]:
    """A response that has only begun; `short` without what is long in it."""
    left_out = _LONG if short else ()
    said = {**request.echo, **{name: _ECHOED[name] for name in left_out}}
    return {
        "id": f"resp_{_base(completion_id)}",
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "max_output_tokens": request.max_tokens,
        "model": request.model,
        "output": [],
        "service_tier": "default",
        "temperature": request.sampling.get("temperature"),
        "top_p": request.sampling.get("top_p"),
        **_ECHOED,
        **said,
        "usage": None,
    }


def _ended(response: dict[str, Any], turn: Turn, output: list[Any]) -> dict[str, Any]:
    cut = turn.finish_reason == "length"
    return {
        **response,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output,
        "usage": usage(turn.usage),
    }


def usage(counted: Usage) -> dict[str, Any]:
    return {
        "input_tokens": counted.prompt_tokens,
        "input_tokens_details": {"cached_tokens": counted.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": counted.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": counted.reasoning_tokens},
        "total_tokens": counted.prompt_tokens + counted.completion_tokens,
    }


def compaction_item(turn: Turn) -> dict[str, Any]:
    """The summary that a turn is, as the item that stands for the history from now on."""
    text = "".join(block.text for block in turn.blocks if isinstance(block, Text))
    return {
        "id": f"cmp_{_base(turn.completion_id)}_0",
        "type": "compaction",
        "encrypted_content": seal(turn.completion_id, text.strip()),
    }


def _item(
    request: ModelRequest, completion_id: str, index: int, block: Block, status: str
) -> dict[str, Any]:
    """An output item; its id says which answer it is of, and where in it."""
    suffix = f"{_base(completion_id)}_{index}"
    match block:
        case Reasoning(text=text):
            return {
                "id": f"rs_{suffix}",
                "type": "reasoning",
                "status": status,
                "summary": [{"type": "summary_text", "text": text}],
                "encrypted_content": seal(completion_id, text),
            }
        case Text(text=text):
            return {
                "id": f"msg_{suffix}",
                "type": "message",
                "status": status,
                "role": "assistant",
                "content": [
                    {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
                ],
            }
        case Call():
            return call_item(request, suffix, block, status)


def answer(request: ModelRequest, turn: Turn) -> bytes:
    if request.kind == COMPACTION:
        output = [compaction_item(turn)]
    else:
        last = len(turn.blocks) - 1 if turn.finish_reason == "length" else None
        output = [
            _item(request, turn.completion_id, i, b, "incomplete" if i == last else "completed")
            for i, b in enumerate(turn.blocks)
        ]
    response = _response(request, turn.completion_id, turn.created, short=False)
    return json_bytes(_ended(response, turn, output))


_IN_BAND_CODES = {
    "context_overflow": "context_length_exceeded",
    "rate_limit": "rate_limit_exceeded",
    "overloaded": "rate_limit_exceeded",
    "internal": "server_error",
}
"""By which harnesses tell the errors of a stream apart. Codex asks again after a `server_error`, and
when told how long to wait after a `rate_limit_exceeded`; it gives up on `server_is_overloaded`."""
_FINAL_CODE = "invalid_prompt"
"""What codex does not ask again after."""
_RETRY_AFTER = 5
"""Seconds, where nobody said how long an overload lasts."""

_EVENT = b'event: %b\ndata: {"type":"%b","sequence_number":%d,%b}\n\n'


class Streamer:
    """One streamed answer. Its closing event repeats the items as they were sent."""

    content_type = EVENT_STREAM

    def __init__(self, request: ModelRequest, completion_id: str, created: int) -> None:
        self._request = request
        self._completion_id = completion_id
        self._response = _response(request, completion_id, created, short=True)
        self._in_progress = b'"response":%b' % json_bytes(self._response)
        self._sequence = -1
        self._done: list[msgspec.Raw] = []
        """The finished items, as they were sent."""
        self._start = BlockStart(kind="text")
        self._texts: list[str] = []
        self._call_type = ""
        """The type of the open item if it is a call."""
        self._custom = CustomInput()
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
        if isinstance(event, TurnEnd):
            return self._end(event.turn)
        if self._request.kind == COMPACTION:
            return b""  # the summary goes out sealed, at its end
        match event:
            case BlockDelta(text=text):
                self._texts.append(text)
                return self._delta(text)
            case BlockStart():
                self._start, self._texts = event, []
                return self._open_item()
            case BlockEnd(cut=cut):
                return self._close_item("incomplete" if cut else "completed")

    def _end(self, turn: Turn) -> bytes:
        written = b""
        if self._request.kind == COMPACTION:
            item = compaction_item(turn)
            written = self._added(item) + self._finished(item)
        response = _ended(self._response, turn, self._done)
        name = b"response.%b" % response["status"].encode()
        return written + self._event(name, b'"response":%b' % json_bytes(response))

    def _open_item(self) -> bytes:
        item = self._item("in_progress")
        self._at = b'"item_id":%b,"output_index":%d,' % (json_bytes(item["id"]), len(self._done))
        match self._start.kind:
            case "reasoning":
                item["summary"], item["encrypted_content"] = [], ""
                part = b'"summary_index":0,"part":{"type":"summary_text","text":""}'
                return self._added(item) + self._event(
                    b"response.reasoning_summary_part.added", self._at + part
                )
            case "text":
                [part] = (json_bytes(each) for each in item["content"])
                item["content"] = []
                return self._added(item) + self._event(
                    b"response.content_part.added",
                    b'%b"content_index":0,"part":%b' % (self._at, part),
                )
            case "call":
                self._call_type = item["type"]
                self._custom = CustomInput()
                return self._added(item)

    def _item(self, status: str) -> dict[str, Any]:
        """The open item with what has come of it so far."""
        text, start = "".join(self._texts), self._start
        block: Block
        match start.kind:
            case "reasoning":
                block = Reasoning(text=text)
            case "text":
                block = Text(text=text)
            case "call":
                block = Call(id=start.id, name=start.name, arguments=text)
        return _item(self._request, self._completion_id, len(self._done), block, status)

    def _added(self, item: dict[str, Any]) -> bytes:
        fields = b'"output_index":%d,"item":%b' % (len(self._done), json_bytes(item))
        return self._event(b"response.output_item.added", fields)

    def _finished(self, item: dict[str, Any]) -> bytes:
        encoded = json_bytes(item)
        fields = b'"output_index":%d,"item":%b' % (len(self._done), encoded)
        self._done.append(msgspec.Raw(encoded))
        return self._event(b"response.output_item.done", fields)

    def _delta(self, text: str) -> bytes:
        match self._start.kind:
            case "reasoning":
                fields = b'%b"summary_index":0,"delta":%b' % (self._at, json_bytes(text))
                return self._event(b"response.reasoning_summary_text.delta", fields)
            case "text":
                fields = b'%b"content_index":0,"delta":%b,"logprobs":[]' % (
                    self._at,
                    json_bytes(text),
                )
                return self._event(b"response.output_text.delta", fields)
            case "call":
                return self._call_delta(text)

    def _call_delta(self, text: str) -> bytes:
        match self._call_type:
            case "function_call":
                fields = b'%b"delta":%b' % (self._at, json_bytes(text))
                return self._event(b"response.function_call_arguments.delta", fields)
            case "custom_tool_call":
                return self._custom_delta(self._custom.feed(text))
        return b""  # what is not one text goes out whole, at its end

    def _custom_delta(self, text: str) -> bytes:
        if not text:
            return b""
        fields = b'%b"delta":%b' % (self._at, json_bytes(text))
        return self._event(b"response.custom_tool_call_input.delta", fields)

    def _close_item(self, status: str) -> bytes:
        item = self._item(status)
        match item["type"]:
            case "reasoning":
                [part] = item["summary"]
                closed = self._event(
                    b"response.reasoning_summary_text.done",
                    b'%b"summary_index":0,"text":%b' % (self._at, json_bytes(part["text"])),
                ) + self._event(
                    b"response.reasoning_summary_part.done",
                    b'%b"summary_index":0,"part":%b' % (self._at, json_bytes(part)),
                )
            case "message":
                [part] = item["content"]
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
                    b'%b"name":%b,"arguments":%b'
                    % (self._at, json_bytes(item["name"]), json_bytes(item["arguments"])),
                )
            case "custom_tool_call":
                closed = self._custom_delta(self._custom.close()) + self._event(
                    b"response.custom_tool_call_input.done",
                    b'%b"input":%b' % (self._at, json_bytes(item["input"])),
                )
            case _:
                closed = b""
        return closed + self._finished(item)

    def error(self, error: ErrorKind) -> bytes:
        """`response.failed` and not the API's `error` event, whose code pi does not see: it would
        not ask again."""
        code, message = _IN_BAND_CODES.get(error.code, _FINAL_CODE), error.message
        if code == "rate_limit_exceeded":
            message = f"{message} Please try again in {error.retry_after or _RETRY_AFTER}s."
        failure = {"code": code, "message": message}
        failed = {**self._response, "status": "failed", "error": failure, "output": self._done}
        return self._event(b"response.failed", b'"response":%b' % json_bytes(failed))


def streamer(request: ModelRequest, completion_id: str, created: int) -> Streamer:
    return Streamer(request, completion_id, created)
