"""Every recorded exchange of four harnesses goes through the dialects."""

import copy
import itertools
from typing import Any

import pytest

from polar_gateway.dialects import DIALECTS, Route, api_key, route
from polar_gateway.dialects.messages import message_of
from polar_gateway.dialects.turn import ModelRequest
from tests.polar_gateway.dialects.clients import (
    parse_sse,
    receive,
    receive_stream,
    stream,
    turn,
)
from tests.recordings import Exchange, load, recordings


def spoken(harness: str, scenario: str) -> list[Exchange]:
    """The exchanges of a recording that are in a dialect of ours."""
    return [e for e in load(harness, scenario) if "/v1beta/" not in e.request["path"]]


SCENARIOS = [pair for pair in recordings() if spoken(*pair)]


def routed(exchange: Exchange) -> Route:
    request = exchange.request
    found = route(request["method"], request["path"], {}, request["headers"])
    assert found is not None
    return found


def normalised(exchange: Exchange) -> ModelRequest:
    return routed(exchange).dialect.normalise(exchange.request["body"])


def chains(exchanges: list[Exchange]) -> list[list[Exchange]]:
    ordered = sorted(exchanges, key=lambda exchange: exchange.chain)
    return [
        list(group) for _, group in itertools.groupby(ordered, key=lambda exchange: exchange.chain)
    ]


def test_the_four_harnesses_are_recorded_in_all_three_dialects() -> None:
    exchanges = [e for pair in SCENARIOS for e in spoken(*pair)]
    assert {e.harness for e in exchanges} == {"claude_code", "codex", "pi", "pi_old"}
    assert {routed(e).dialect.name for e in exchanges} == {dialect.name for dialect in DIALECTS}
    assert len(exchanges) >= 80


@pytest.mark.parametrize(("harness", "scenario"), SCENARIOS)
def test_every_recorded_request_is_a_model_call_with_its_key(harness: str, scenario: str) -> None:
    for exchange in spoken(harness, scenario):
        assert routed(exchange).kind == "call"
        assert api_key(exchange.request["headers"], {}) == "dummy-key"


@pytest.mark.parametrize(("harness", "scenario"), SCENARIOS)
def test_a_recorded_request_becomes_messages_that_templates_accept(
    harness: str, scenario: str
) -> None:
    for exchange in spoken(harness, scenario):
        request = normalised(exchange)
        roles = [message["role"] for message in request.messages]
        assert roles[0] == "system", exchange.id
        assert set(roles[1:]) <= {"user", "assistant", "tool"}, exchange.id
        assert roles[-1] in ("user", "tool"), exchange.id
        assert request.stream is True
        assert request.model == exchange.request["body"]["model"]
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
    for exchange in spoken(harness, scenario):
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
                for key in ("text", "thinking", "output")
                if isinstance(value.get(key), str)
            ]
            if isinstance(value.get("content"), str):
                found.append(value["content"])
            return found + walk(value.get("content")) + walk(value.get("summary"))
        return []

    given = [body.get(key) for key in ("instructions", "system")]
    return [text for text in given if isinstance(text, str)] + [
        text for key in ("messages", "input", "system") for text in walk(body.get(key))
    ]


@pytest.mark.parametrize(("harness", "scenario"), SCENARIOS)
def test_a_chains_messages_only_grow_at_their_end(harness: str, scenario: str) -> None:
    """Equal up to the last message, which may have text behind it after an answer that broke or was
    cut; after any other answer it is equal too, and that answer follows it."""
    for chain in chains(spoken(harness, scenario)):
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
                told = receive_stream(routed(earlier).dialect, earlier.response["sse"]).blocks
                assert after.messages[last + 1] == message_of(told), later.id
            assert (after.tools, after.tool_choice, after.renames) == (
                before.tools,
                before.tool_choice,
                before.renames,
            ), later.id


@pytest.mark.parametrize(("harness", "scenario"), SCENARIOS)
def test_translating_leaves_the_body_as_it_was(harness: str, scenario: str) -> None:
    for exchange in spoken(harness, scenario):
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
    for exchange in spoken(harness, scenario):
        if exchange.response["status"] != 200 or exchange.cut:
            continue
        dialect, request = routed(exchange).dialect, normalised(exchange)
        recorded = exchange.response["sse"]
        told = receive_stream(dialect, recorded).blocks
        finish = "length" if scenario == "length" and exchange.number == 0 else "stop"
        answer = turn(told, finish)
        streamed = stream(dialect, request, answer)
        assert receive_stream(dialect, streamed).blocks == told, exchange.id
        assert receive(dialect, dialect.answer(request, answer)).blocks == told, exchange.id
        ours = iter(kinds(streamed))
        assert all(kind in ours for kind in kinds(recorded)), exchange.id


def kinds(answer: bytes | str) -> list[str]:
    """Event types in order, a run of equal ones once and signs of life left out; for chat chunks,
    which have no type, what they carry."""
    return [kind for kind, _ in itertools.groupby(_kinds(answer)) if kind not in ("ping", "")]


def _kinds(answer: bytes | str) -> list[str]:
    found = []
    for name, data in parse_sse(answer):
        if name is not None:
            found.append(name)
            continue
        found += [
            "finish" if choice["finish_reason"] else "+".join(choice["delta"])
            for choice in data["choices"]
        ]
        if data.get("usage"):
            found.append("usage")
    return found
