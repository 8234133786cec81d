"""OpenAI's Responses API: requests to the engine's chat form.

Pure, and so without state: what a request refers to (`previous_response_id`, items by id) is put
into its `input` before, by `StoredResponses.expand`.
"""

import re
from collections.abc import Mapping
from typing import Any

from polar_gateway.dialects import messages as shared
from polar_gateway.dialects.messages import Conversation, Treatment, mapping, note, objects, string
from polar_gateway.dialects.openai import error_body, error_status, model_body, models_body
from polar_gateway.dialects.responses_answers import (
    COMPACTION,
    Sealed,
    answer,
    answered_by,
    echo,
    streamer,
    unseal,
)
from polar_gateway.dialects.responses_tools import (
    CALLS,
    OUTPUTS,
    SEARCH_OUTPUT,
    Tools,
    has_search,
    shell_text,
)
from polar_gateway.dialects.sse import json_bytes
from polar_gateway.dialects.turn import Match, ModelRequest, UnsupportedRequestError

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
    "previous_response_id": "translated",
    "tools": "translated",
    "tool_choice": "translated",
    "parallel_tool_calls": "translated",
    "max_output_tokens": "translated",
    "temperature": "translated",
    "top_p": "translated",
    "text": "translated",
    "reasoning": "translated",
    "stream": "answered",
    "store": "answered",
    "metadata": "answered",
    "stream_options": "ignored",
    "include": "ignored",
    "client_metadata": "ignored",
    "user": "ignored",
    "service_tier": "ignored",
    "prompt_cache_key": "ignored",
    "prompt_cache_retention": "ignored",
    "prompt_cache_options": "ignored",
    "safety_identifier": "ignored",
    "moderation": "ignored",
    "truncation": "noted",
    "context_management": "noted",
    "max_tool_calls": "noted",
    "top_logprobs": "noted",
}

REFUSED = {
    "conversation": "no conversations are kept here; send previous_response_id or the whole input",
    "prompt": "no prompt templates are kept here; send instructions and input",
    "background": "answers are given in the request only",
}

_DATA_URL = re.compile(r"data:([^;,]*)(?:;[^;,]*)*;base64,")
_STORED = re.compile(r"/responses/[^/]+$")
_STORED_PART = re.compile(r"/responses/[^/]+/(input_items|cancel)$")

COMPACTION_REQUEST = (
    "Summarise this conversation for the assistant that will go on with the task and will see your "
    "summary and the user's messages, but nothing else of it. Say what the user wants, what has been "
    "done and found out so far (with the names of files, the commands and the values that matter), "
    "what is being done at this moment, and what is left to do. Answer with the summary alone, and "
    "call no tools."
)
SUMMARY_OPENING = "Summary of the conversation so far:"


def match(
    method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str]
) -> Match | None:
    path = path.rstrip("/")
    match method:
        case "POST" if path.endswith("/responses"):
            return Match("call")
        case "POST" if path.endswith("/responses/input_tokens"):
            return Match("count_tokens")
        case "GET" if path.endswith(("/responses", "/realtime")):
            return Match("websocket")
        case "GET" | "DELETE" if _STORED.search(path):
            return Match("stored")
        case "GET" | "POST":
            found = _STORED_PART.search(path)
            if found and (method == "GET") == (found[1] == "input_items"):
                return Match("stored")
    return None


def input_items(given: Any) -> list[dict[str, Any]]:
    """The items of an `input`, which may be a mere text. Raises UnsupportedRequestError."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return objects(given, "input")


def normalise(body: dict[str, Any]) -> ModelRequest:
    """The body with all that it refers to already in its `input`."""
    notes: list[str] = []
    shared.screen(body, FIELDS, REFUSED, notes)
    items = input_items(body.get("input"))
    settings = {field: dict(mapping(body.get(field), field)) for field in ("reasoning", "text")}
    tools = _tools(body, items, notes)
    history = _History(tools, notes)
    history.conversation.system(string(body.get("instructions"), "instructions"))
    for index, item in enumerate(items):
        history.add(item, f"input[{index}]")
        if item.get("type") == "configuration_update":
            for field, setting in settings.items():
                setting.update(mapping(item.get(field), f"input[{index}].{field}"))
    history.close()

    compacting = bool(items) and items[-1].get("type") == "compaction_trigger"
    if compacting:
        history.conversation.user(COMPACTION_REQUEST)
        tools.functions.clear()
    template_kwargs = {}
    effort = settings["reasoning"].get("effort")
    if effort == "none":
        template_kwargs["enable_thinking"] = False
    elif effort is not None:
        note(notes, "reasoning.effort ignored")
    response_format = _response_format(settings["text"], notes)
    tool_choice = tools.choose(body.get("tool_choice"))
    return ModelRequest(
        model=shared.model_name(body),
        messages=history.conversation.finish(),
        tools=tools.functions or None,
        tool_choice=tool_choice,
        parallel_tool_calls=body.get("parallel_tool_calls") if tools.functions else None,
        max_tokens=shared.count(body.get("max_output_tokens"), "max_output_tokens"),
        sampling={
            field: body[field] for field in ("temperature", "top_p") if body.get(field) is not None
        },
        response_format=None if compacting else response_format,
        template_kwargs=template_kwargs,
        stream=bool(body.get("stream")),
        notes=notes,
        renames=tools.renames,
        answers=history.conversation.answers,
        kind=COMPACTION if compacting else "turn",
        echo=echo(body),
    )


def _tools(body: dict[str, Any], items: list[dict[str, Any]], notes: list[str]) -> Tools:
    """All tools that there are by the end of the input."""
    given = [(body.get("tools"), "tools", False)]
    for index, item in enumerate(items):
        kind = item.get("type")
        if kind in ("additional_tools", SEARCH_OUTPUT):
            given.append((item.get("tools"), f"input[{index}].tools", kind == SEARCH_OUTPUT))
    tools = Tools(notes, searched=any(has_search(listed) for listed, _, _ in given))
    for listed, field, found in given:
        tools.add(listed, field, found=found)
    return tools


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


class _History:
    """Input items to messages: what one answer was made of becomes one assistant message again.

    Items of assistant kind that follow each other are one turn, unless what we put into them says
    that they come from different answers. Results between two calls of the same answer (a harness
    ran the first before the second was there) come after both.
    """

    def __init__(self, tools: Tools, notes: list[str]) -> None:
        self.conversation = Conversation()
        self.conversation.notes = notes
        self._tools = tools
        self._answer: str | None = None
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._results: list[tuple[str, str | list[dict[str, Any]]]] = []

    def add(self, item: dict[str, Any], field: str) -> None:
        kind = string(item.get("type"), f"{field}.type") or (
            "message" if "role" in item else "item_reference"
        )
        if item.get("execution") == "server":
            note(self.conversation.notes, f"input item of type {kind} ignored")
        elif kind == "message":
            self._add_message(item, field)
        elif kind == "reasoning":
            sealed = _unsealed(item, field)
            self._continue(item, sealed)
            self._reasoning.append(sealed.text if sealed else _reasoning_text(item, field))
        elif kind in CALLS:
            self._continue(item)
            self._calls.append(self._tools.call(item, field))
        elif kind in OUTPUTS or kind == SEARCH_OUTPUT:
            self._results.append((_call_id(item, field), self._result(item, field)))
        elif kind == "compaction":
            sealed = _unsealed(item, field)
            if sealed is None:
                raise UnsupportedRequestError(
                    f"{field}.encrypted_content", "was not made here and cannot be read"
                )
            self.close()
            self.conversation.user(f"{SUMMARY_OPENING}\n\n{sealed.text}")
        elif kind == "item_reference":
            raise UnsupportedRequestError(f"{field}.id", "there is no such item here")
        elif kind not in ("additional_tools", "configuration_update", "compaction_trigger"):
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

    def _result(self, item: dict[str, Any], field: str) -> str | list[dict[str, Any]]:
        match item["type"]:
            case "tool_search_output":
                return self._tools.found(item.get("tools"), f"{field}.tools")
            case "shell_call_output":
                return shell_text(item.get("output"), f"{field}.output")
            case "apply_patch_call_output":
                said = string(item.get("output"), f"{field}.output")
                return said or string(item.get("status"), f"{field}.status")
        return _content(item.get("output"), f"{field}.output")

    def _continue(self, item: dict[str, Any], sealed: Sealed | None = None) -> None:
        """Open an assistant turn or go on with the open one."""
        answer_id = answered_by(item.get("id")) or (sealed.completion_id if sealed else None)
        same = answer_id is not None and answer_id == self._answer
        unknown = answer_id is None or self._answer is None
        if not same and (self._results or not unknown):
            self.close()
        self._answer = answer_id or self._answer

    def close(self) -> None:
        if self._texts or self._reasoning or self._calls:
            self.conversation.assistant(
                "".join(self._texts), "".join(self._reasoning), self._calls, self._answer
            )
            self._texts, self._reasoning, self._calls = [], [], []
        for call_id, content in self._results:
            self.conversation.tool(call_id, content)
        self._results.clear()
        self._answer = None


def _call_id(item: dict[str, Any], field: str) -> str:
    """Of the call that a result belongs to; empty where the item does not say."""
    by = (
        "id" if item["type"] == "local_shell_call_output" and not item.get("call_id") else "call_id"
    )
    return string(item.get(by), f"{field}.{by}")


def _unsealed(item: dict[str, Any], field: str) -> Sealed | None:
    try:
        return unseal(item.get("encrypted_content"))
    except ValueError as error:
        raise UnsupportedRequestError(f"{field}.encrypted_content", str(error)) from error


def _reasoning_text(item: dict[str, Any], field: str) -> str:
    content = _text(item.get("content"), f"{field}.content", "")
    return content or _text(item.get("summary"), f"{field}.summary", "\n\n")


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
        case {"type": "input_file"}:
            return shared.text_part(_file_text(part, field))
        case {"type": "input_image", "file_id": str()}:
            raise UnsupportedRequestError(f"{field}.file_id", "no files are kept here")
    raise UnsupportedRequestError(field, f"a part of type {part.get('type')!r} is not supported")


def _file_text(part: dict[str, Any], field: str) -> str:
    """The text of a file that comes along, under its name."""
    for elsewhere in ("file_id", "file_url"):
        if part.get(elsewhere):
            raise UnsupportedRequestError(f"{field}.{elsewhere}", "only file_data is read here")
    data = string(part.get("file_data"), f"{field}.file_data")
    found = _DATA_URL.match(data)
    if found is None:
        raise UnsupportedRequestError(f"{field}.file_data", "must be a data URL in base64")
    text = shared.decoded_text(found[1], data[found.end() :], f"{field}.file_data")
    return shared.document_text(string(part.get("filename"), f"{field}.filename"), text)


def count_body(tokens: int) -> bytes:
    return json_bytes({"object": "response.input_tokens", "input_tokens": tokens})
