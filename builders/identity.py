"""When are two messages the same? Harnesses re-render what they echo; this says what counts.

They respell tool arguments, add default ones, drop reasoning and trim white space. That a message
was echoed is decided here; that the context is the same is for the tokens to say.
"""

from collections.abc import Iterator
from typing import Any

import msgspec


def head_key(tools: list[dict[str, Any]] | None) -> bytes:
    """Equal for equal tool lists; none and an empty list are the same."""
    return msgspec.json.encode(tools or None, order="deterministic")


def message_key(message: dict[str, Any]) -> bytes:
    """Equal for messages that are the same in a conversation's history."""
    calls = [(name, _arguments(text)) for _, name, text in _calls(message)]
    return msgspec.json.encode(
        (message.get("role"), _text(message), message.get("tool_call_id"), calls),
        order="deterministic",
    )


def echo(messages: list[dict[str, Any]], start: int) -> list[dict[str, Any]]:
    """The assistant messages from `start` on: what the harness made of one answer, in order."""
    end = start
    while end < len(messages) and messages[end].get("role") == "assistant":
        end += 1
    return messages[start:end]


def same_answer(answer: dict[str, Any], echoed: list[dict[str, Any]]) -> bool:
    """Whether `echoed` is `answer` as a harness sends it back, rather than an edit of it."""
    if not echoed:
        return False
    said, heard = _text(answer), [_text(message) for message in echoed]
    if any(not isinstance(text, str) for text in [said, *heard]):
        if [said] != [text for text in heard if text != ""]:
            return False
    elif "".join(said.split()) != "".join("".join(heard).split()):
        return False
    made = _calls(answer)
    returned = [call for message in echoed for call in _calls(message)]
    return len(made) == len(returned) and all(
        name == other and _same_arguments(text, respelt)
        for (_, name, text), (_, other, respelt) in zip(made, returned, strict=True)
    )


def call_ids(messages: list[dict[str, Any]]) -> list[str]:
    """The ids of all tool calls in `messages`."""
    return [call_id for message in messages for call_id, _, _ in _calls(message)]


def wording(message: dict[str, Any]) -> str:
    """Every text in a message that a chat template may write out, a line between one and the next.

    Templates decode arguments, so they are here as sent and as decoded.
    """
    decoded = [_arguments(arguments) for _, _, arguments in _calls(message)]
    return "\n".join(_strings([message, _text(message), decoded]))


def _strings(value: Any) -> Iterator[str]:
    """Every string in a JSON value, names of fields too, in no particular order."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            waiting += [*one, *one.values()]
        elif isinstance(one, list):
            waiting += one


def _text(message: dict[str, Any]) -> Any:
    """The content as one stripped string, or the list of parts where some are not text."""
    content = message.get("content")
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            return content
        content = "".join(part.get("text", "") for part in content)
    return (content or "").strip()


def _calls(message: dict[str, Any]) -> list[tuple[str, str, Any]]:
    """(id, name, arguments as sent) of each tool call."""
    calls = []
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        calls.append((call.get("id") or "", function.get("name") or "", function.get("arguments")))
    return calls


def _arguments(sent: Any) -> Any:
    """Arguments as a value where the text is JSON, else the text without white space around it.

    JSON nested too deep to be decoded counts as text: whoever wrote it must not break the build.
    """
    if not isinstance(sent, str):
        return sent
    try:
        return msgspec.json.decode(sent)
    except (ValueError, RecursionError):
        return sent.strip()


def _same_arguments(sampled: Any, echoed: Any) -> bool:
    ours, theirs = _arguments(sampled), _arguments(echoed)
    if isinstance(ours, dict) and isinstance(theirs, dict):
        # Some harnesses add the arguments that have defaults, some drop them.
        shared = ours.keys() & theirs.keys()
        return (shared == ours.keys() or shared == theirs.keys()) and all(
            ours[name] == theirs[name] for name in shared
        )
    if isinstance(ours, str):
        # Text that is no JSON comes back wrapped, repaired or emptied; the call is still this one.
        return True
    return bool(ours == theirs)
