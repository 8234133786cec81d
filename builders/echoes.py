"""What a harness made of an answer when it sent that back, and what a template may write of it."""

from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import msgspec


def echo(later: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the messages after those of a request: what the harness made of its answer, in order."""
    return list(takewhile(lambda message: message.get("role") == "assistant", later))


def wording(message: dict[str, Any]) -> str:
    """Every text in a message that a chat template may write out, a line between one and the next.

    Templates decode arguments, so they are here as sent and as decoded; the parts of a content are
    here one by one and together.
    """
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    together = "".join(part.get("text", "") for part in parts if part.get("type") == "text")
    decoded = [
        _decoded((call.get("function") or {}).get("arguments"))
        for call in message.get("tool_calls") or []
    ]
    return "\n".join(_strings([message, together, decoded]))


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


def _decoded(arguments: Any) -> Any:
    """Arguments as a value where their text is JSON; nothing else can hide in text that is not.

    JSON nested too deep to be decoded counts as text: whoever wrote it must not break the build.
    """
    if not isinstance(arguments, str):
        return None
    try:
        return msgspec.json.decode(arguments)
    except (ValueError, RecursionError):
        return None
