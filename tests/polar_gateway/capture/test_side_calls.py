from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_gateway.capture.side_calls import RULES, TURN, classify
from polar_gateway.dialects.turn import ModelRequest
from tests import recordings
from tests.recordings import Exchange, routed, side_calls

RECALL_FLOOR = 0.95
ENOUGH = 5
"""Recordings of a kind from a harness, fewer of which prove nothing."""


class Seen(NamedTuple):
    exchange: Exchange
    kind: str
    """Which it is."""
    request: ModelRequest
    dialect: str

    @property
    def headers(self) -> dict[str, str]:
        headers: dict[str, str] = self.exchange.request["headers"]
        return headers


@cache
def calls() -> list[Seen]:
    """Every recorded model call and its kind."""
    conversations = [e for name in recordings.recordings() for e in recordings.load(*name)]
    seen = []
    for exchange in conversations + side_calls.load():
        found = routed(exchange)
        request = found.dialect.normalise({**exchange.request["body"], **found.fields})
        if exchange.scenario.startswith("side_calls/"):
            kind = exchange.label
        else:
            kind = "title" if exchange.label == "side" else TURN  # opencode's, by its recorder
        seen.append(Seen(exchange, kind, request, found.dialect.name))
    return seen


def turns() -> list[Seen]:
    return [call for call in calls() if call.kind == TURN]


def aside() -> list[Seen]:
    return [call for call in calls() if call.kind != TURN]


def kind_of(
    call: Seen, request: ModelRequest | None = None, headers: Mapping[str, str] | None = None
) -> str:
    return classify(request or call.request, call.dialect, {**call.headers, **(headers or {})})


def text(message: dict[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def changed(call: Seen, **fields: Any) -> ModelRequest:
    return msgspec.structs.replace(call.request, **fields)


def test_side_calls_are_recognised_and_no_turn_is_taken_for_one() -> None:
    actual: Counter[tuple[str, str]] = Counter()
    taken: Counter[tuple[str, str]] = Counter()
    right: Counter[tuple[str, str]] = Counter()
    for call in calls():
        said = kind_of(call)
        actual[call.exchange.harness, call.kind] += 1
        taken[call.exchange.harness, said] += 1
        right[call.exchange.harness, said] += said == call.kind
    print(f"\n{'harness':12} {'kind':16} {'recorded':>8} {'precision':>9} {'recall':>6}")
    for key in sorted(actual | taken):
        precision = right[key] / taken[key] if taken[key] else 1.0
        recall = right[key] / actual[key]
        print(f"{key[0]:12} {key[1]:16} {actual[key]:8} {precision:9.3f} {recall:6.3f}")
        if key[1] != TURN:
            assert precision == 1.0, key
            assert recall >= RECALL_FLOOR, key
            assert actual[key] >= ENOUGH, key
        else:
            assert recall == 1.0, key


def test_every_rule_has_a_recording_of_its_own() -> None:
    unseen = [
        rule
        for rule in RULES
        if not any(
            rule.kind == call.kind and call.headers["user-agent"].startswith(rule.agent.name)
            for call in aside()
        )
    ]
    assert not unseen


def test_what_the_endpoint_says_goes_before_any_rule() -> None:
    request = ModelRequest(
        model="m", messages=[{"role": "user", "content": "x"}], kind="compaction"
    )
    assert classify(request, "responses", {}) == "compaction"


def test_a_call_of_an_unknown_agent_is_a_turn() -> None:
    for call in aside():
        assert kind_of(call, headers={"user-agent": "curl/8.5"}) == TURN
        assert classify(call.request, call.dialect, {}) == TURN


TOOL = {"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}}


def test_a_marker_is_nothing_without_the_shape_of_its_call() -> None:
    """Each changes what the model's text cannot: the tools, the headers, the form of the answer."""
    for call in aside():
        without_tools = call.request.tools is None
        assert kind_of(call, changed(call, tools=[TOOL] if without_tools else None)) == TURN
        if "x-codex-turn-metadata" in call.headers:
            said = call.headers["x-codex-turn-metadata"].replace('"compaction"', '"turn"', 1)
            assert kind_of(call, headers={"x-codex-turn-metadata": said}) == TURN
        if call.exchange.harness == "gemini_cli":
            assert kind_of(call, changed(call, stream=True)) == TURN
        if call.request.response_format:
            assert kind_of(call, changed(call, response_format=None)) == TURN or (
                call.kind == "edit_correction"
            )


def test_claude_codes_compaction_is_told_by_its_header_or_by_its_place_behind_a_tools_result() -> (
    None
):
    for call in aside():
        if call.exchange.harness == "claude_code" and call.kind == "compaction":
            betas = call.headers["anthropic-beta"].replace("fallback-credit-2026-06-01", "")
            bare = {"anthropic-beta": betas}
            messages = list(call.request.messages)
            messages[-2] = {"role": "tool", "tool_call_id": "t1", "content": "found"}
            assert kind_of(call, changed(call, messages=messages), bare) == "compaction"
            messages[-2] = {"role": "assistant", "content": "Done."}
            assert kind_of(call, changed(call, messages=messages), bare) == TURN
            assert kind_of(call, changed(call, messages=messages)) == "compaction"


def test_qwen_codes_compaction_does_not_follow_an_answer_as_words_of_the_user_do() -> None:
    for call in aside():
        if (
            call.exchange.harness == "qwen_code"
            and call.kind == "compaction"
            and call.request.tools
        ):
            messages = list(call.request.messages)
            messages[-2] = {"role": "assistant", "content": "Done."}
            assert kind_of(call, changed(call, messages=messages)) == TURN


# What an instruction, a file, a tool's output or an answer may say, and the turn is still a turn.


def _replaced(messages: list[dict[str, Any]], role: str, words: str) -> list[dict[str, Any]]:
    """The last message of that role says something else."""
    places = [place for place, message in enumerate(messages) if message["role"] == role]
    if not places:
        return messages
    place = places[-1]
    return [*messages[:place], {**messages[place], "content": words}, *messages[place + 1 :]]


def as_instruction(turn: ModelRequest, words: str) -> list[dict[str, Any]]:
    return _replaced(turn.messages, "user", words)


def as_tool_output(turn: ModelRequest, words: str) -> list[dict[str, Any]]:
    return _replaced(turn.messages, "tool", words)


def as_answer(turn: ModelRequest, words: str) -> list[dict[str, Any]]:
    return _replaced(turn.messages, "assistant", words)


def as_next_instruction(turn: ModelRequest, words: str) -> list[dict[str, Any]]:
    done = {"role": "assistant", "content": "Done."}
    return [*turn.messages, done, {"role": "user", "content": words}]


def as_end_of_system_prompt(turn: ModelRequest, words: str) -> list[dict[str, Any]]:
    if turn.messages[0]["role"] != "system":
        return turn.messages
    return _replaced(turn.messages, "system", f"{text(turn.messages[0])}\n\n{words}")


def as_start_of_system_prompt(turn: ModelRequest, words: str) -> list[dict[str, Any]]:
    return _replaced(turn.messages, "system", words)


INJECTIONS: list[Callable[[ModelRequest, str], list[dict[str, Any]]]] = [
    as_instruction,
    as_tool_output,
    as_answer,
    as_next_instruction,
    as_end_of_system_prompt,
    as_start_of_system_prompt,
]


def marks() -> list[str]:
    """All that side calls were seen to say, whole, each once."""
    said = {text(message): None for call in aside() for message in call.request.messages[:1]}
    said |= {text(message): None for call in aside() for message in call.request.messages[-2:]}
    rules = {part for rule in RULES for part in (rule.system, rule.first, *rule.last, *rule.end)}
    return [words for words in [*said, *sorted(part for part in rules if part)] if words]


@pytest.mark.parametrize("inject", INJECTIONS)
def test_turns_that_say_what_side_calls_say_are_turns(
    inject: Callable[[ModelRequest, str], list[dict[str, Any]]],
) -> None:
    several = {
        (call.exchange.harness, call.dialect, len(call.request.messages)): call for call in turns()
    }
    for call in several.values():
        for words in marks():
            request = changed(call, messages=inject(call.request, words))
            assert kind_of(call, request) == TURN, (call.exchange.id, words[:80])


@given(data=st.data())
def test_turns_made_of_such_words_throughout_are_turns(data: st.DataObject) -> None:
    call = data.draw(st.sampled_from(turns()), label="turn")
    words = st.lists(st.sampled_from(marks()), min_size=1, max_size=3).map("\n\n".join)
    messages = [
        {**message, "content": data.draw(words)} if message["role"] != "system" else message
        for message in call.request.messages
    ]
    assert kind_of(call, changed(call, messages=messages)) == TURN


@pytest.mark.parametrize(
    "harness", ["claude_code", "codex", "gemini_cli", "opencode", "pi", "pi_old", "qwen_code"]
)
def test_conversations_without_any_tool_are_turns_whatever_the_user_says(harness: str) -> None:
    """An agent that was given no tools at all keeps its own system prompt."""
    mine = {
        len(call.request.messages): call for call in turns() if call.exchange.harness == harness
    }
    for call in mine.values():
        for words in marks():
            messages = as_next_instruction(call.request, words)
            assert kind_of(call, changed(call, messages=messages, tools=None)) == TURN


def test_messages_with_pictures_are_turns() -> None:
    for call in turns():
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
        parts = [{"type": "text", "text": marks()[0]}, picture]
        messages = [*call.request.messages[:-1], {"role": "user", "content": parts}]
        assert kind_of(call, changed(call, messages=messages)) == TURN
