"""What the dialects share when they read a request: fields, content, and the folding of roles.

While a harness's history grows at its end only, so must the message list that comes out, because a
prompt whose earlier part changes cannot be merged with the record of the turn before it. A message
therefore never depends on the messages after it, except that text may be appended to the last one.
"""

import base64
import itertools
import json
import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from polar_gateway.dialects.turn import Block, Call, Reasoning, Text, UnsupportedRequestError

Treatment = Literal["translated", "answered", "ignored", "noted"]
"""What becomes of a field: part of the request to the engine; part of the answer; dropped, because
it cannot change what is sampled; dropped, and noted on the completion, because it might."""

_encode = msgspec.json.Encoder().encode
_encode_any = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def compact_json(value: Any) -> str:
    """Tool arguments that arrive as an object, in the one spelling that they get here."""
    try:
        return _encode(value).decode()
    except OverflowError:  # an integer of more than 64 bits
        return _encode_any(value)


def screen(
    body: dict[str, Any],
    fields: Mapping[str, Treatment],
    refused: Mapping[str, str],
    notes: list[str],
) -> None:
    """Note what is dropped and refuse what cannot be honoured; unknown fields are noted.

    Raises UnsupportedRequestError for a field of `refused` that is set to something.
    """
    for field, value in body.items():
        if value is None or fields.get(field, "noted") != "noted":
            continue
        if field in refused:
            if value not in (False, "", [], {}):
                raise UnsupportedRequestError(field, refused[field])
            continue
        note(notes, f"{field} ignored")


MOST_NOTES = 100
"""A hostile request could otherwise earn one for each of its fields."""


def note(notes: list[str], text: str) -> None:
    if len(notes) < MOST_NOTES and text not in notes:
        notes.append(text)


def model_name(body: dict[str, Any]) -> str:
    """Raises UnsupportedRequestError when the body names no model."""
    model = body.get("model")
    if not isinstance(model, str):
        raise UnsupportedRequestError("model", "must be a string")
    return model


def objects(value: Any, field: str) -> list[dict[str, Any]]:
    """`value` as a list of JSON objects; raises UnsupportedRequestError naming the field."""
    if isinstance(value, list):
        for item in value:
            if not isinstance(item, dict):
                break
        else:
            return value
    raise UnsupportedRequestError(field, "must be a list of objects")


def string(value: Any, field: str) -> str:
    """`value` as a string, None as the empty one; raises UnsupportedRequestError otherwise."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UnsupportedRequestError(field, "must be a string")
    return value


def mapping(value: Any, field: str) -> dict[str, Any]:
    """`value` as a JSON object, None as the empty one; raises UnsupportedRequestError otherwise."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UnsupportedRequestError(field, "must be an object")
    return value


def count(value: Any, field: str) -> int | None:
    """`value` as a number of tokens or None; raises UnsupportedRequestError otherwise."""
    if value is None or type(value) is int:
        return value
    raise UnsupportedRequestError(field, "must be an integer")


_COMPLETION = re.compile(r"msg_[0-9a-f]{12}")


def completion_reference(value: Any) -> str | None:
    """The completion that an opaque value of an answer (a signature) names; None for a value that
    another provider made."""
    return value if isinstance(value, str) and _COMPLETION.fullmatch(value) else None


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def image_part(url: str, detail: Any = None) -> dict[str, Any]:
    """An image by http or data URL. `detail` keeps only the values that every engine knows."""
    image: dict[str, Any] = {"url": url}
    if detail in ("auto", "low", "high"):
        image["detail"] = detail
    return {"type": "image_url", "image_url": image}


def document_text(title: str, text: str) -> str:
    return f"{title}\n{text}" if title else text


def found_text(names: list[str]) -> str:
    """What the model reads of a tool search's result; the definitions stand among the tools."""
    return f"Found, and ready to be called: {', '.join(names)}" if names else "Nothing was found."


def decoded_text(media_type: str, encoded: str, field: str) -> str:
    """The text of a file that comes as base64; raises UnsupportedRequestError for other kinds."""
    if not media_type.startswith("text/") and media_type != "application/json":
        raise UnsupportedRequestError(
            field, f"only files of plain text are supported, not {media_type!r}"
        )
    try:
        return base64.b64decode(encoded).decode()
    except ValueError as error:
        raise UnsupportedRequestError(field, "must be text in UTF-8, as base64") from error


def fold_parts(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Content of user, system and tool messages: texts in a row are joined by a line break, and
    what is text only becomes a string, so that a harness that sends the same text now as a string
    and now as a list of blocks sends the same message. (Engines join text parts alike.)
    """
    if len(parts) == 1 and parts[0]["type"] == "text":
        return str(parts[0]["text"])
    folded: list[dict[str, Any]] = []
    for kind, run in itertools.groupby(parts, key=lambda part: part["type"]):
        if kind == "text":
            folded.append(text_part("\n".join(part["text"] for part in run)))
        else:
            folded += run
    if not folded:
        return ""
    if len(folded) == 1 and folded[0]["type"] == "text":
        return str(folded[0]["text"])
    return folded


def with_suffix(content: str | list[dict[str, Any]], text: str) -> str | list[dict[str, Any]]:
    """The content with a paragraph after it; never changes `content` in place."""
    if isinstance(content, str):
        return f"{content}\n\n{text}" if content else text
    if content and content[-1]["type"] == "text":
        return [*content[:-1], text_part(f"{content[-1]['text']}\n\n{text}")]
    return [*content, text_part(text)]


def with_prefix(text: str, content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """The content with a paragraph before it; never changes `content` in place."""
    if isinstance(content, str):
        return f"{text}\n\n{content}" if content else text
    if content and content[0]["type"] == "text":
        return [text_part(f"{text}\n\n{content[0]['text']}"), *content[1:]]
    return [text_part(text), *content]


def as_error(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """A failed tool result, whose text says so too where the provider says it only beside it."""
    text = content if isinstance(content, str) else content[0].get("text", "")
    if text.lstrip("<").lower().startswith(("error", "tool_use_error")):
        return content
    if isinstance(content, str):
        return f"Error: {content}"
    if text:
        return [text_part(f"Error: {text}"), *content[1:]]
    return [text_part("Error:"), *content]


def is_reminder(text: str) -> bool:
    stripped = text.strip()
    return stripped.startswith("<system-reminder>") and stripped.endswith("</system-reminder>")


def as_reminder(text: str) -> str:
    return text.strip() if is_reminder(text) else f"<system-reminder>\n{text}\n</system-reminder>"


_UNPARSED = "__unparsedToolInput"


def object_of_arguments(arguments: str) -> dict[str, Any]:
    """A call's arguments for an API in which they are an object. What is none is wrapped as Claude
    Code wraps it, so that the tool refuses it and the model hears of it."""
    try:
        value = msgspec.json.decode(arguments) if arguments.strip() else {}
    except (msgspec.DecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {_UNPARSED: {"raw": arguments}}


def arguments_of_object(value: Any) -> str:
    """The arguments again, as they were sampled where they had to be wrapped."""
    wrapped = value.get(_UNPARSED) if isinstance(value, dict) and len(value) == 1 else None
    if isinstance(wrapped, dict) and isinstance(wrapped.get("raw"), str):
        return str(wrapped["raw"])
    return compact_json({} if value is None else value)


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def function_tool(
    name: str, description: str, parameters: Any, *, strict: bool = False
) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name}
    if description:
        function["description"] = description
    function["parameters"] = (
        parameters if parameters is not None else {"type": "object", "properties": {}}
    )
    if strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def schema_format(schema: Any) -> dict[str, Any]:
    """The response format that holds an answer to a JSON schema."""
    return {"type": "json_schema", "json_schema": {"name": "response", "schema": schema}}


def assistant_message(text: str, reasoning: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """The one form of an assistant message: content always a string, absent parts left out."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def message_of(blocks: list[Block]) -> dict[str, Any]:
    """The assistant message that a turn becomes when a harness sends it back."""
    return assistant_message(
        "".join(block.text for block in blocks if isinstance(block, Text)),
        "".join(block.text for block in blocks if isinstance(block, Reasoning)),
        [tool_call(b.id, b.name, b.arguments) for b in blocks if isinstance(b, Call)],
    )


class Conversation:
    """Builds the engine's message list from a harness's, in order.

    - The leading run of system texts becomes one system message, joined by blank lines.
    - A later one becomes a `<system-reminder>` behind the user or tool message before it. Behind an
      assistant message there is no place for it, so it opens the next user or tool message, or,
      when the assistant speaks next or nothing follows, is a user message of its own.
    - A tool result without a call (a harness dropped the call when it compacted) becomes user text:
      templates refuse it or attach it to the wrong call.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._head: list[str] = []
        self._messages: list[dict[str, Any]] = []
        self._reminders: list[str] = []
        """For the next user or tool message."""
        self._behind: list[str] = []
        """For the last message."""
        self._unanswered: OrderedDict[str, int] = OrderedDict()
        """Calls without a result, in order; a harness may give two of them one id. (A plain dict
        looks for its first key behind all that were taken out before it.)"""
        self._answers: dict[int, str] = {}

    def system(self, text: str) -> None:
        if not text.strip():
            return
        if not self._messages:
            self._head.append(text)
        elif self._messages[-1]["role"] == "assistant":
            self._reminders.append(as_reminder(text))
        else:
            self.remind(text)

    def remind(self, text: str) -> None:
        """Put a reminder behind the last message, which must be a user's or a tool's."""
        self._behind.append(as_reminder(text))

    def user(self, content: str | list[dict[str, Any]]) -> None:
        self._append({"role": "user", "content": self._reminded(content)})

    def _append(self, message: dict[str, Any]) -> None:
        self._settle()
        self._messages.append(message)

    def _settle(self) -> None:
        """Put what has gathered behind the last message there, all at once: one by one would copy
        its text as often."""
        if self._behind:
            last = self._messages[-1]
            last["content"] = with_suffix(last["content"], "\n\n".join(self._behind))
            self._behind.clear()

    def tool(self, call_id: str, content: str | list[dict[str, Any]]) -> None:
        """The result of a call; one without an id belongs to the first call without a result."""
        if not call_id and self._unanswered:
            call_id = next(iter(self._unanswered))
        if call_id not in self._unanswered:
            note(self.notes, "tool result without its call sent as user text")
            self.user(with_prefix(f"[result of tool call {call_id}]", content))
            return
        if self._unanswered[call_id] > 1:
            self._unanswered[call_id] -= 1
        else:
            del self._unanswered[call_id]
        self._append({"role": "tool", "tool_call_id": call_id, "content": self._reminded(content)})

    def beside_results(self, parts: list[dict[str, Any]]) -> None:
        """What a harness says behind tool results in one message with them. The reminders that it
        begins with stay with the last result: as a user message they would be the template's latest
        question, and drop the reasoning before it."""
        for index, part in enumerate(parts):
            if part["type"] != "text" or not is_reminder(part["text"]):
                self.user(fold_parts(parts[index:]))
                return
            self.remind(part["text"])

    def assistant(
        self, text: str, reasoning: str, calls: list[dict[str, Any]], answer: str | None = None
    ) -> None:
        """`answer` is the completion that the message says it is the answer of."""
        self._flush()
        if answer is not None:
            self._answers[len(self._messages)] = answer
        self._append(assistant_message(text, reasoning, calls))
        for call in calls:
            self._unanswered[call["id"]] = self._unanswered.get(call["id"], 0) + 1

    @property
    def answers(self) -> dict[int, str]:
        """`ModelRequest.answers` for the messages that `finish` returns."""
        offset = 1 if self._head else 0
        return {index + offset: answer for index, answer in self._answers.items()}

    @property
    def ends_with_assistant(self) -> bool:
        return (
            not self._reminders
            and bool(self._messages)
            and self._messages[-1]["role"] == "assistant"
        )

    def finish(self) -> list[dict[str, Any]]:
        if self.ends_with_assistant:
            note(self.notes, "the last message is the assistant's: answered anew, not continued")
        self._flush()
        self._settle()
        if not self._head:
            return self._messages
        return [{"role": "system", "content": "\n\n".join(self._head)}, *self._messages]

    def _reminded(self, content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        if not self._reminders:
            return content
        prefix = "\n\n".join(self._reminders)
        self._reminders.clear()
        return with_prefix(prefix, content)

    def _flush(self) -> None:
        if self._reminders:
            self.user("")
