"""Every recorded exchange of seven harnesses goes through the dialects."""

import copy
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from polar_gateway.dialects import (
    DIALECTS,
    anthropic,
    api_key,
    chat,
    google,
    responses,
)
from polar_gateway.dialects.messages import message_of
from polar_gateway.dialects.turn import (
    Block,
    Call,
    Dialect,
    ModelRequest,
    Reasoning,
    Text,
    UnsupportedRequestError,
)
from tests.polar_gateway.dialects import conversations
from tests.polar_gateway.dialects.clients import (
    parse_sse,
    receive,
    receive_stream,
    stream,
    turn,
)
from tests.recordings import Exchange, load, recordings, routed

SCENARIOS = recordings()


def normalised(exchange: Exchange) -> ModelRequest:
    found = routed(exchange)
    return found.dialect.normalise({**exchange.request["body"], **found.fields})


def told(exchange: Exchange) -> list[Block]:
    """What the recorded answer said; calls that came without ids have some."""
    blocks = receive_stream(routed(exchange).dialect, exchange.response["sse"]).blocks
    return [
        Call(id=block.id or f"call_{at}", name=block.name, arguments=block.arguments)
        if isinstance(block, Call)
        else block
        for at, block in enumerate(blocks)
    ]


def chains(exchanges: list[Exchange]) -> list[list[Exchange]]:
    ordered = sorted(exchanges, key=lambda exchange: exchange.chain)
    return [
        list(group) for _, group in itertools.groupby(ordered, key=lambda exchange: exchange.chain)
    ]


HARNESSES = {"claude_code", "codex", "gemini_cli", "opencode", "pi", "pi_old", "qwen_code"}


def test_seven_harnesses_are_recorded_and_between_them_all_dialects() -> None:
    exchanges = [exchange for pair in SCENARIOS for exchange in load(*pair)]
    assert {exchange.harness for exchange in exchanges} >= HARNESSES
    assert {routed(e).dialect.name for e in exchanges} == {dialect.name for dialect in DIALECTS}
    assert len(exchanges) >= 178


@pytest.mark.parametrize(("harness", "scenario"), SCENARIOS)
def test_every_recorded_request_is_a_model_call_with_its_key(harness: str, scenario: str) -> None:
    for exchange in load(harness, scenario):
        assert routed(exchange).kind == "call"
        assert api_key(exchange.request["headers"], {}) == "dummy-key"


@pytest.mark.parametrize(("harness", "scenario"), SCENARIOS)
def test_a_recorded_request_becomes_messages_that_templates_accept(
    harness: str, scenario: str
) -> None:
    for exchange in load(harness, scenario):
        request = normalised(exchange)
        roles = [message["role"] for message in request.messages]
        assert roles[0] == "system", exchange.id
        assert set(roles[1:]) <= {"user", "assistant", "tool"}, exchange.id
        assert roles[-1] in ("user", "tool"), exchange.id
        assert request.stream is True
        assert request.model == "stub-model" or exchange.harness == "codex"
        assert request.tools is None or {tool["type"] for tool in request.tools} == {"function"}
        unanswered: set[str] = set()
        for message in request.messages:
            assert isinstance(message["content"], str), exchange.id
            unanswered |= {call["id"] for call in message.get("tool_calls", [])}
            if message["role"] == "tool":
                unanswered.remove(message["tool_call_id"])
        assert not unanswered, exchange.id


@pytest.mark.parametrize(("harness", "scenario"), SCENARIOS)
def test_no_recorded_text_is_lost(harness: str, scenario: str) -> None:
    for exchange in load(harness, scenario):
        request = normalised(exchange)
        whole = "\n".join(
            [str(message["content"]) for message in request.messages]
            + [message.get("reasoning_content", "") for message in request.messages]
        )
        for text in texts(exchange.request["body"]):
            assert text.startswith("x-anthropic-billing-header") or text in whole, exchange.id
        assert "x-anthropic-billing-header" not in whole
        assert "cache_control" not in str([request.messages, request.tools])


def texts(body: dict[str, Any]) -> list[str]:
    """Every text of the conversation, wherever this provider puts it."""

    def walk(value: Any) -> list[str]:
        if isinstance(value, list):
            return [text for each in value for text in walk(each)]
        if isinstance(value, dict):
            found = [
                value[key]
                for key in ("text", "thinking", "output", "content")
                if isinstance(value.get(key), str)
            ]
            inner = ("content", "summary", "parts", "functionResponse", "response")
            return found + [text for key in inner for text in walk(value.get(key))]
        return []

    given = [body.get(key) for key in ("instructions", "system")]
    fields = ("messages", "input", "system", "contents", "systemInstruction")
    return [text for text in given if isinstance(text, str)] + [
        text for field in fields for text in walk(body.get(field))
    ]


@pytest.mark.parametrize(("harness", "scenario"), SCENARIOS)
def test_a_chains_messages_only_grow_at_their_end(harness: str, scenario: str) -> None:
    """Equal up to the last message, which may have text behind it after an answer that broke or was
    cut; after any other answer it is equal too, and that answer follows it."""
    for chain in chains(load(harness, scenario)):
        for earlier, later in itertools.pairwise(chain):
            before, after = normalised(earlier), normalised(later)
            last = len(before.messages) - 1
            if scenario == "err400":  # this harness answers a 400 with another prompt, by design
                continue
            assert after.messages[:last] == before.messages[:last], later.id
            assert after.messages[last]["role"] == before.messages[last]["role"], later.id
            assert after.messages[last]["content"].startswith(before.messages[last]["content"]), (
                later.id
            )
            if scenario.startswith(("rec_", "basic", "parallel", "thinking", "gpt55", "patch")):
                assert after.messages[last] == before.messages[last], later.id
                answer = with_ids_of(message_of(told(earlier)), after.messages[last + 1])
                if harness == "gemini_cli":
                    answer.pop("reasoning_content", None)  # which is for the record to restore
                assert after.messages[last + 1] == answer, later.id
            assert (after.tools, after.tool_choice, after.renames) == (
                before.tools,
                before.tool_choice,
                before.renames,
            ), later.id


def with_ids_of(message: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The message with the other's call ids: harnesses make their own where none were given."""
    for call, same in zip(message.get("tool_calls", []), other.get("tool_calls", []), strict=True):
        call["id"] = same["id"]
    return message


@pytest.mark.parametrize(("harness", "scenario"), SCENARIOS)
def test_translating_leaves_the_body_as_it_was(harness: str, scenario: str) -> None:
    for exchange in load(harness, scenario):
        untouched = copy.deepcopy(exchange.request["body"])
        first, second = normalised(exchange), normalised(exchange)
        assert exchange.request["body"] == untouched
        assert first == second


@pytest.mark.parametrize(("harness", "scenario"), SCENARIOS)
def test_a_recorded_answer_streamed_by_us_has_its_blocks_and_its_events(
    harness: str, scenario: str
) -> None:
    """The recorded answers are streamed anew by us: same blocks, whole and streamed, and at least
    the events that the harness was content with, in their order."""
    for exchange in load(harness, scenario):
        if exchange.response["status"] != 200 or exchange.cut:
            continue
        dialect, request = routed(exchange).dialect, normalised(exchange)
        blocks = told(exchange)
        finish = "length" if scenario == "length" and exchange.number == 0 else "stop"
        answer = turn(blocks, finish)
        streamed = stream(dialect, request, answer)
        assert receive_stream(dialect, streamed).blocks == blocks, exchange.id
        assert receive(dialect, dialect.answer(request, answer)).blocks == blocks, exchange.id
        ours = iter(kinds(streamed))
        assert all(kind in ours for kind in kinds(exchange.response["sse"])), exchange.id


def kinds(answer: bytes | str) -> list[str]:
    """Event types in order, a run of equal ones once and signs of life left out; for chunks, which
    have no type, what they carry."""
    found = [kind for name, data in parse_sse(answer) for kind in carried(name, data)]
    return [kind for kind, _ in itertools.groupby(found) if kind not in ("ping", "")]


def carried(name: str | None, chunk: dict[str, Any]) -> list[str]:
    if name is not None:
        return [name]
    found = [
        "finish" if choice["finish_reason"] else "+".join(choice["delta"])
        for choice in chunk.get("choices", [])
    ]
    for candidate in chunk.get("candidates", []):
        parts = [part for part in candidate["content"]["parts"] if part != {"text": ""}]
        found += ["+".join(sorted(set(part) - {"thoughtSignature"})) for part in parts]
        if "finishReason" in candidate:
            found += ["finish", *(["usage"] if "usageMetadata" in chunk else [])]
    return [*found, "usage"] if chunk.get("usage") else found


CHUNKS = (chat, ["reasoning_content", "content", "tool_calls", "finish"])
BLOCK = ["content_block_start", "content_block_delta", "content_block_stop"]
NEEDED: dict[str, tuple[Dialect, list[str]]] = {
    "claude_code": (anthropic, ["message_start", *BLOCK, *BLOCK, *BLOCK]),
    "codex": (responses, [*["response.output_item.done"] * 3, "response.completed"]),
    "gemini_cli": (google, ["text", "functionCall"]),
    "opencode": CHUNKS,
    "pi": CHUNKS,
    "pi_old": CHUNKS,
    "qwen_code": CHUNKS,
}
"""Without which events a harness loses something of a thought, a text and a call, as was tried."""


@pytest.mark.parametrize("harness", sorted(HARNESSES))
def test_a_stream_has_every_event_that_the_harness_needs(harness: str) -> None:
    [exchange, *_] = load(harness, "thinking" if harness.startswith("pi") else "rec_thinking")
    dialect, needed = NEEDED[harness]
    assert routed(exchange).dialect == dialect
    answer = turn(told(exchange))
    assert [type(block) for block in answer.blocks] == [Reasoning, Text, Call]
    streamed = stream(dialect, normalised(exchange), answer)
    ours = (kind for name, data in parse_sse(streamed) for kind in carried(name, data))
    assert all(kind in ours for kind in needed)
    named = [line for line in streamed.split(b"\n") if line.startswith(b"event: ")]
    assert bool(named) == (harness in ("claude_code", "codex"))


@pytest.mark.parametrize(("harness", "scenario"), SCENARIOS)
def test_a_recorded_conversation_is_the_same_request_in_every_dialect(
    harness: str, scenario: str
) -> None:
    for exchange in load(harness, scenario):
        request = normalised(exchange)
        for dialect in DIALECTS:
            again = dialect.normalise(
                conversations.body(dialect.name, request.messages, request.tools or [])
            )
            assert again.messages == request.messages, (exchange.id, dialect.name)
            assert again.tools == request.tools, (exchange.id, dialect.name)


APIS = ("thinking_api_anthropic", "thinking_api_google", "thinking_api_responses")


@pytest.mark.parametrize(
    ("harness", "over_chat", "same_tools"),
    [("pi", "thinking", True), ("opencode", "rec_thinking", False)],
)
def test_a_harness_that_speaks_four_dialects_asks_the_same_in_each(
    harness: str, over_chat: str, same_tools: bool
) -> None:
    """opencode writes the schemas of its tools anew for each provider."""
    [expected, *others] = [
        [normalised(e) for e in load(harness, scenario) if e.label.startswith("main")]
        for scenario in (over_chat, *APIS)
    ]
    assert len(expected) == 3
    for asked in others:
        assert [with_ids_by_order(each) for each in asked] == [
            with_ids_by_order(each) for each in expected
        ]
        assert not same_tools or [each.tools for each in asked] == [e.tools for e in expected]


def with_ids_by_order(request: ModelRequest) -> list[dict[str, Any]]:
    messages = copy.deepcopy(request.messages)
    ids: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", []):
            call["id"] = ids.setdefault(call["id"], str(len(ids)))
        if message["role"] == "tool":
            message["tool_call_id"] = ids[message["tool_call_id"]]
    return messages


FOREIGN: tuple[Any, ...] = (
    None,
    True,
    0,
    -1.5,
    "",
    "x",
    [],
    {},
    [[]],
    ["a"],
    [1],
    {"a": 1},
    [{}],
    {"type": "x"},
)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_a_body_with_anything_in_any_place_is_translated_or_refused(dialect: Dialect) -> None:
    """Refused means the one exception that becomes the provider's 400."""
    rng = random.Random(7)
    bodies = [
        {**exchange.request["body"], **routed(exchange).fields}
        for pair in SCENARIOS
        for exchange in load(*pair)[-1:]
        if routed(exchange).dialect == dialect
    ]
    refused = 0
    for _ in range(800):
        body = copy.deepcopy(rng.choice(bodies))
        holder, key = rng.choice(list(places(body)))
        holder[key] = copy.deepcopy(rng.choice(FOREIGN))
        try:
            dialect.normalise(body)
        except UnsupportedRequestError:
            refused += 1
    assert refused > 100


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Where in a body there is a value: what holds it, and under which key."""
    if isinstance(value, (dict, list)):
        for key, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield value, key
            if key not in ("parameters", "parametersJsonSchema", "input_schema"):
                yield from places(each)
