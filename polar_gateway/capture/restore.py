"""Whether an assistant message is the echo of a recorded answer, and what it lacks of it. Pure.

Harnesses send an answer back with its tool arguments spelled anew, with default arguments added or
dropped, without its reasoning (Gemini CLI) or with that trimmed (Qwen Code), and without a text that
is all white space (Claude Code, pi), such as the empty line that many models say before a tool call.
Such an echo means the same as the answer, and is replaced by it. What a harness has changed in
meaning is its own words and stays.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, get_args

import msgspec

from builders.records import AttachLevel
from polar_gateway.capture.digests import value_digest
from polar_gateway.dialects.messages import assistant_message
from polar_gateway.dialects.turn import BlockDelta, BlockEnd, BlockStart, TurnEvent

AMBIGUOUS = "ambiguous echo"
"""Noted where an echo may be that of several answers that are not the same."""


LEVELS: tuple[AttachLevel, ...] = get_args(AttachLevel)

UNDECLARED_DEFAULTS: dict[str, dict[str, Any]] = {
    "Edit": {"replace_all": False},
    "edit": {"replaceAll": False, "replace_all": False},
}
"""By tool: defaults that harnesses add or drop although no schema of theirs declares them, of
Claude Code, and of opencode and Qwen Code. One that is declared counts instead."""


class Restoration(NamedTuple):
    """What becomes of an echo that is replaced by its answer."""

    notes: tuple[str, ...] = ()
    """What came back, one short phrase each; empty when the echo is identical."""
    call_ids: tuple[tuple[str, str], ...] = ()
    """The echo's id of a call and the answer's, where they differ."""
    level: AttachLevel = "exact"
    """The weakest of the differences."""


class Candidate(NamedTuple):
    """An answer that an echo means the same as, and the evidence beside that."""

    answer: dict[str, Any]
    delivered: bool
    arrived: int
    """The place of its call in the order of arrival."""
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
    """The answer with the most evidence, and of several the latest."""
    chosen = max(candidates, key=lambda each: (_evidence(each), each.arrived))
    return Choice(
        candidates.index(chosen),
        any(
            _evidence(each) == _evidence(chosen) and each.answer != chosen.answer
            for each in candidates
        ),
    )


def _evidence(candidate: Candidate) -> tuple[bool, bool, bool]:
    return candidate.in_place, candidate.goes_on, candidate.delivered


class Part(NamedTuple):
    """How far an answer was delivered."""

    reasoning: int
    """Characters."""
    text: int
    """Characters."""
    calls: int
    """Whole ones."""

    def of(self, answer: dict[str, Any]) -> dict[str, Any]:
        """That part of the answer, as a harness keeps it."""
        return assistant_message(
            answer["content"][: self.text],
            answer.get("reasoning_content", "")[: self.reasoning],
            answer.get("tool_calls", [])[: self.calls],
        )


def told(events: Sequence[TurnEvent]) -> Part | None:
    """How far an answer was told by these first events of it; None where that ends inside a call,
    of which a harness keeps nothing."""
    reasoning = text = calls = 0
    inside = ""
    for event in events:
        if isinstance(event, BlockStart):
            inside = event.kind
        elif isinstance(event, BlockDelta):
            reasoning += len(event.text) if inside == "reasoning" else 0
            text += len(event.text) if inside == "text" else 0
        elif isinstance(event, BlockEnd):
            calls += inside == "call"
            inside = ""
    return None if inside == "call" else Part(reasoning, text, calls)


def restoration(
    echo: dict[str, Any], answer: dict[str, Any], tools: list[dict[str, Any]] | None
) -> Restoration | None:
    """How `echo` is turned into `answer`; None when it does not mean the same.

    `tools` are those of the request, whose schemas say which arguments are defaults.
    """
    notes: list[str] = []
    levels: list[AttachLevel] = ["exact"]
    if echo["content"] != answer["content"]:
        if not _equal_stripped(echo["content"], answer["content"]):
            return None
        notes.append("white space restored")
        levels.append("white_space")
    said, thought = echo.get("reasoning_content", ""), answer.get("reasoning_content", "")
    if said != thought:
        if said.strip() and not _equal_stripped(said, thought):
            return None
        notes.append("reasoning restored")
        levels.append("reasoning_restored")
    calls, answered = echo.get("tool_calls", ()), answer.get("tool_calls", ())
    if len(calls) != len(answered):
        return None
    call_ids = []
    for call, original in zip(calls, answered, strict=True):
        function, called = call["function"], original["function"]
        if function["name"] != called["name"]:
            return None
        if function["arguments"] != called["arguments"]:
            level = _same_arguments(function["arguments"], called["arguments"], called, tools)
            if level is None:
                return None
            notes.append("arguments restored")
            levels.append(level)
        if call["id"] != original["id"]:
            call_ids.append((call["id"], original["id"]))
    if call_ids:
        notes.append("call ids restored")
        levels.append("arguments_respelt")
    weakest = max(levels, key=LEVELS.index)
    return Restoration(tuple(dict.fromkeys(notes)), tuple(call_ids), weakest)


def likeness(message: dict[str, Any]) -> bytes:
    """Equal for messages of which one may be restored to the other, defaults of arguments apart;
    reasoning does not count, as many echoes lack it."""
    content = message["content"]
    text = content.strip() if isinstance(content, str) else content
    calls = [
        (call["function"]["name"], _respelt(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    ]
    return value_digest((text, calls))


def _respelt(arguments: str) -> str:
    """Arguments in a spelling that is the same for all that mean the same."""
    try:
        return _sorted(_as_doubles(_parsed(arguments))).decode()
    except (ValueError, RecursionError):
        return arguments


def _as_doubles(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_doubles(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_as_doubles(each) for each in value]
    if isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return str(value)
    return value


_sorted = msgspec.json.Encoder(order="deterministic").encode


def _equal_stripped(one: Any, other: Any) -> bool:
    return isinstance(one, str) and isinstance(other, str) and one.strip() == other.strip()


def _same_arguments(
    one: str, other: str, function: dict[str, Any], tools: list[dict[str, Any]] | None
) -> AttachLevel | None:
    """Whether two argument texts mean the same JSON, and whether it took the tool's defaults to say
    so. Texts that are no JSON mean what they say, so they are the same only if they are equal."""
    name = function["name"]
    try:
        values = _parsed(one), _parsed(other)
        if _same_value(*values, {}):
            return "arguments_respelt"
        schema = _with_undeclared(name, _schema(name, tools or ()))
        return "default_arguments" if _same_value(*values, schema) else None
    except (ValueError, RecursionError):
        return None


def _parsed(arguments: str) -> Any:
    """Raises ValueError for what is no JSON. No text at all is a call without arguments."""
    return msgspec.json.decode(arguments) if arguments.strip() else {}


def _schema(name: str, tools: Iterable[dict[str, Any]]) -> Any:
    functions = (tool["function"] for tool in tools)
    return next((each.get("parameters") for each in functions if each.get("name") == name), None)


def _with_undeclared(name: str, schema: Any) -> Any:
    """The schema, with what is known of its tool's defaults beside what it declares."""
    undeclared = UNDECLARED_DEFAULTS.get(name)
    if undeclared is None:
        return schema
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        properties = {field: {} for field in undeclared}  # the tool is no longer offered
    known = {
        field: {"default": default, **properties[field]}
        for field, default in undeclared.items()
        if isinstance(properties.get(field), dict)
    }
    return {"properties": {**properties, **known}}


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
