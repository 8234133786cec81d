"""Whether an assistant message is the echo of a recorded answer, and what it lacks of it. Pure.

Harnesses send an answer back with its tool arguments spelled anew, with default arguments added or
dropped, without its reasoning (Gemini CLI) or with that trimmed (Qwen Code), and without a text that
is all white space (Claude Code, pi), such as the empty line that many models say before a tool call.
Such an echo means the same as the answer, and is replaced by it. What a harness has changed in
meaning is its own words and stays.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from builders.records import Completion

AMBIGUOUS = "ambiguous echo"
"""Noted where an echo may be that of several answers that are not the same."""


class Restoration(NamedTuple):
    """What becomes of an echo that is replaced by its answer."""

    notes: tuple[str, ...] = ()
    """What came back, one short phrase each; empty when the echo is identical."""
    call_ids: tuple[tuple[str, str], ...] = ()
    """The echo's id of a call and the answer's, where they differ."""


class Candidate(NamedTuple):
    """An answer that an echo means the same as, and the evidence beside that."""

    completion: Completion
    restoration: Restoration
    in_place: bool
    """It was said after the same messages."""
    goes_on: bool
    """It has been followed before by the message that follows the echo."""


class Choice(NamedTuple):
    number: int
    """Of the chosen candidate."""
    ambiguous: bool
    """The evidence would have allowed another answer, too."""


def choose(candidates: Sequence[Candidate]) -> Choice:
    """The answer with the most evidence, and of several the latest delivered one."""
    chosen = max(candidates, key=_evidence)
    rivals = [
        each
        for each in candidates
        if (each.in_place, each.goes_on) == (chosen.in_place, chosen.goes_on)
    ]
    said = chosen.completion.response_message
    return Choice(
        candidates.index(chosen), any(each.completion.response_message != said for each in rivals)
    )


def _evidence(candidate: Candidate) -> tuple[bool, bool, bool, int]:
    completion = candidate.completion
    return candidate.in_place, candidate.goes_on, completion.delivered, completion.index


def restoration(
    echo: dict[str, Any], answer: dict[str, Any], tools: list[dict[str, Any]] | None
) -> Restoration | None:
    """How `echo` is turned into `answer`; None when it does not mean the same.

    `tools` are those of the request, whose schemas say which arguments are defaults.
    """
    notes: list[str] = []
    if echo["content"] != answer["content"]:
        if not _equal_stripped(echo["content"], answer["content"]):
            return None
        notes.append("white space restored")
    said, thought = echo.get("reasoning_content", ""), answer.get("reasoning_content", "")
    if said != thought:
        if said.strip() and not _equal_stripped(said, thought):
            return None
        notes.append("reasoning restored")
    calls, answered = echo.get("tool_calls", ()), answer.get("tool_calls", ())
    if len(calls) != len(answered):
        return None
    call_ids = []
    for call, original in zip(calls, answered, strict=True):
        function, called = call["function"], original["function"]
        if function["name"] != called["name"]:
            return None
        if function["arguments"] != called["arguments"]:
            if not _same_arguments(function["arguments"], called["arguments"], called, tools):
                return None
            notes.append("arguments restored")
        if call["id"] != original["id"]:
            call_ids.append((call["id"], original["id"]))
    if call_ids:
        notes.append("call ids restored")
    return Restoration(tuple(dict.fromkeys(notes)), tuple(call_ids))


def _equal_stripped(one: Any, other: Any) -> bool:
    return isinstance(one, str) and isinstance(other, str) and one.strip() == other.strip()


def _same_arguments(
    one: str, other: str, function: dict[str, Any], tools: list[dict[str, Any]] | None
) -> bool:
    """Whether two argument texts mean the same JSON, give or take the tool's defaults. Texts that
    are no JSON mean what they say, so they are the same only if they are equal."""
    try:
        return _same_value(_parsed(one), _parsed(other), _schema(function["name"], tools or ()))
    except (ValueError, RecursionError):
        return False


def _parsed(arguments: str) -> Any:
    """Raises ValueError for what is no JSON. No text at all is a call without arguments."""
    return msgspec.json.decode(arguments) if arguments.strip() else {}


def _schema(name: str, tools: Iterable[dict[str, Any]]) -> Any:
    functions = (tool["function"] for tool in tools)
    return next((each.get("parameters") for each in functions if each.get("name") == name), None)


def _same_value(one: Any, other: Any, schema: Any) -> bool:
    known = schema if isinstance(schema, dict) else {}
    if isinstance(one, dict) and isinstance(other, dict):
        properties = known.get("properties")
        return all(
            _same_member(
                one, other, key, properties.get(key) if isinstance(properties, dict) else None
            )
            for key in one.keys() | other.keys()
        )
    if isinstance(one, list) and isinstance(other, list):
        items = known.get("items")
        return len(one) == len(other) and all(
            _same_value(a, b, items) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, int | float) and isinstance(other, int | float):
        return _same_number(one, other)
    return bool(one == other)


def _same_member(one: dict[str, Any], other: dict[str, Any], key: str, schema: Any) -> bool:
    if key in one and key in other:
        return _same_value(one[key], other[key], schema)
    if not isinstance(schema, dict) or "default" not in schema:
        return False
    return _same_value(one[key] if key in one else other[key], schema["default"], schema)


def _same_number(one: float, other: float) -> bool:
    """As the double that most harnesses read any number as."""
    try:
        return one == other or float(one) == float(other)
    except OverflowError:
        return False
