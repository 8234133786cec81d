"""A turn that is answered, read by a harness and sent back is the assistant message it was."""

import base64
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_gateway.dialects import DIALECTS
from polar_gateway.dialects.messages import (
    assistant_message,
    compact_json,
    function_tool,
    image_part,
    message_of,
    text_part,
    tool_call,
)
from polar_gateway.dialects.turn import Block, Call, Dialect, ModelRequest, Reasoning, Text, Turn
from tests.generated import examples
from tests.polar_gateway.dialects.clients import receive, receive_stream, sealed, stream, turn
from tests.polar_gateway.dialects.conversations import body

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
leaves = st.none() | st.booleans() | st.integers() | texts
arguments = st.dictionaries(texts, leaves | st.lists(leaves, max_size=3), max_size=3)
spelling: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [{"indent": 1}, {"separators": (",", ":"), "ensure_ascii": False}, {}]
)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    """Reasoning first, text and calls in any order after it, as engines produce them."""
    blocks: list[Block] = [Reasoning(text=draw(texts))] if draw(st.booleans()) else []
    for index in range(draw(st.integers(0, 4))):
        if draw(st.booleans()) and not (blocks and isinstance(blocks[-1], Text)):
            blocks.append(Text(text=draw(texts)))
        else:
            name = draw(st.sampled_from(["run", "files__read", "patch"]))
            given = {"input": draw(texts)} if name == "patch" else draw(arguments)
            spelled = json.dumps(given, **draw(spelling))
            blocks.append(Call(id=f"call_{index}", name=name, arguments=spelled))
    finish: Any = draw(st.sampled_from(["stop", "length"]))
    return turn(blocks, finish, cached_tokens=draw(st.integers(0, 999)))


PARAMETERS = {"type": "object", "properties": {}}
FUNCTION = {"name": "run", "description": "Run.", "parameters": PARAMETERS}
REQUESTS: dict[str, dict[str, Any]] = {
    "anthropic": {
        "model": "m",
        "max_tokens": 99,
        "messages": [{"role": "user", "content": "Go."}],
        "tools": [{"name": "run", "input_schema": PARAMETERS}],
    },
    "chat": {
        "model": "m",
        "messages": [{"role": "user", "content": "Go."}],
        "tools": [{"type": "function", "function": FUNCTION}],
    },
    "google": {
        "model": "m",
        "contents": [{"role": "user", "parts": [{"text": "Go."}]}],
        "tools": [{"functionDeclarations": [{"name": "run", "parameters": PARAMETERS}]}],
        "generationConfig": {"thinkingConfig": {"includeThoughts": True}},
        "alt": "sse",
    },
    "responses": {
        "model": "m",
        "input": [{"role": "user", "content": "Go."}],
        "tools": [
            {"type": "function", **FUNCTION},
            {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "read"}]},
            {"type": "custom", "name": "patch"},
        ],
    },
}


def asked_again(dialect: Dialect, history: list[dict[str, Any]]) -> ModelRequest:
    body = dict(REQUESTS[dialect.name])
    field = {"google": "contents", "responses": "input"}.get(dialect.name, "messages")
    told = "parts" if dialect.name == "google" else "content"
    text = [{"text": "Go on."}] if dialect.name == "google" else "Go on."
    body[field] = [*body[field], *history, {"role": "user", told: text}]
    return dialect.normalise(body)


def cut_call(answered: Turn) -> bool:
    last = answered.blocks[-1] if answered.blocks else None
    return answered.finish_reason == "length" and isinstance(last, Call)


def expected(dialect: Dialect, answered: Turn) -> dict[str, Any]:
    """The turn's message; its arguments in our spelling where the provider's API carries objects,
    and without a call that the limit cut where it can carry nothing else."""
    google = dialect.name == "google"
    blocks = answered.blocks[:-1] if google and cut_call(answered) else answered.blocks
    message = message_of(blocks)
    for call in message.get("tool_calls", []):
        function = call["function"]
        if dialect.name in ("anthropic", "google") or (
            dialect.name == "responses" and function["name"] == "patch"
        ):
            function["arguments"] = compact_json(json.loads(function["arguments"]))
    return message


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@examples(60)
@given(answered=turns())
def test_an_answer_comes_back_as_the_message_that_was_sampled(
    dialect: Dialect, answered: Turn
) -> None:
    request = dialect.normalise(REQUESTS[dialect.name])
    if not answered.blocks:
        return
    for received in (
        receive(dialect, dialect.answer(request, answered)),
        receive_stream(dialect, stream(dialect, request, answered)),
    ):
        again = asked_again(dialect, received.history)
        assert again.messages[: len(request.messages)] == request.messages
        assert again.messages[len(request.messages)] == expected(dialect, answered)
        assert len(again.messages) == len(request.messages) + 2
        assert again.tools == request.tools


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@examples(60)
@given(answered=turns(), haltingly=st.booleans())
def test_the_streamed_and_the_whole_answer_are_the_same(
    dialect: Dialect, answered: Turn, haltingly: bool
) -> None:
    request = dialect.normalise(REQUESTS[dialect.name])
    whole = receive(dialect, dialect.answer(request, answered))
    streamed = receive_stream(dialect, stream(dialect, request, answered, haltingly=haltingly))
    assert whole.blocks == streamed.blocks
    if (
        dialect.name != "chat"
    ):  # an absent text is null in a whole answer, and empty in a streamed one
        assert whole.history == streamed.history


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_an_empty_turn_is_an_answer_too(dialect: Dialect) -> None:
    request = dialect.normalise(REQUESTS[dialect.name])
    assert receive(dialect, dialect.answer(request, turn([]))).blocks == []
    assert receive_stream(dialect, stream(dialect, request, turn([]))).blocks == []


@examples(30)
@given(text=texts)
def test_reasoning_survives_a_harness_that_keeps_only_the_encrypted_content(text: str) -> None:
    responses = next(dialect for dialect in DIALECTS if dialect.name == "responses")
    request = responses.normalise(REQUESTS["responses"])
    [item] = receive(responses, responses.answer(request, turn([Reasoning(text=text)]))).history
    assert sealed(item) == text
    kept = {"type": "reasoning", "summary": [], "encrypted_content": item["encrypted_content"]}
    assert asked_again(responses, [kept]).messages[1]["reasoning_content"] == text


images = st.binary(min_size=1, max_size=4).map(
    lambda data: image_part(f"data:image/png;base64,{base64.b64encode(data).decode()}")
)


maybe = st.just("") | texts


@st.composite
def contents(draw: st.DrawFn) -> str | list[dict[str, Any]]:
    if draw(st.booleans()):
        return draw(texts)
    return [*map(text_part, draw(st.lists(texts, max_size=1))), *draw(st.lists(images, min_size=1))]


names = st.sampled_from(["run", "read"])
tools = st.lists(names, unique=True, min_size=1).map(
    lambda chosen: [function_tool(name, f"Does {name}.", PARAMETERS) for name in chosen]
)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Messages whose next is the assistant's; system messages are anywhere, arguments compact."""
    messages: list[dict[str, Any]] = []
    ids = itertools.count()
    for _ in range(draw(st.integers(1, 4))):
        messages += [system(text) for text in draw(st.lists(texts, max_size=1))]
        messages += [user(content) for content in draw(st.lists(contents(), max_size=2))]
        reasoning, text = draw(maybe), draw(maybe)
        calls = [
            tool_call(f"call_{next(ids)}", name, compact_json(given))
            for name, given in draw(st.lists(st.tuples(names, arguments), max_size=2))
        ]
        messages.append(assistant_message(text, reasoning, calls))
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": draw(contents())}
            for call in calls
        ]
    return [*messages, user(draw(contents()))]


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(content: str | list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": "user", "content": content}


@examples(40)
@given(asked=conversations(), tools=tools, chain=st.permutations(DIALECTS))
def test_a_conversation_is_the_same_request_in_every_dialect_and_stays_it_through_all_of_them(
    asked: list[dict[str, Any]], tools: list[dict[str, Any]], chain: list[Dialect]
) -> None:
    [request, *others] = [each.normalise(body(each.name, asked, tools)) for each in DIALECTS]
    assert request.tools == tools
    for other in others:
        assert (other.messages, other.tools) == (request.messages, tools)
    messages = request.messages
    for dialect in chain:
        again = dialect.normalise(body(dialect.name, messages, tools))
        assert (again.messages, again.tools) == (request.messages, tools)
        messages = again.messages
