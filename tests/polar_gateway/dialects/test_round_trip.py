"""A turn that is answered, read by a harness and sent back is the assistant message it was."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_gateway.dialects import DIALECTS
from polar_gateway.dialects.messages import compact_json, message_of
from polar_gateway.dialects.turn import Block, Call, Dialect, ModelRequest, Reasoning, Text, Turn
from tests.polar_gateway.dialects.clients import receive, receive_stream, sealed, stream, turn

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
        if draw(st.booleans()):
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
    field = "input" if dialect.name == "responses" else "messages"
    body[field] = [*body[field], *history, {"role": "user", "content": "Go on."}]
    return dialect.normalise(body)


def expected(dialect: Dialect, answered: Turn) -> dict[str, Any]:
    """The turn's message; its arguments in our spelling where the provider's API carries objects."""
    message = message_of(answered.blocks)
    for call in message.get("tool_calls", []):
        function = call["function"]
        if dialect.name == "anthropic" or (
            dialect.name == "responses" and function["name"] == "patch"
        ):
            function["arguments"] = compact_json(json.loads(function["arguments"]))
    return message


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
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
@given(answered=turns())
def test_the_streamed_and_the_whole_answer_are_the_same(dialect: Dialect, answered: Turn) -> None:
    request = dialect.normalise(REQUESTS[dialect.name])
    whole = receive(dialect, dialect.answer(request, answered))
    streamed = receive_stream(dialect, stream(dialect, request, answered))
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


@given(text=texts)
def test_reasoning_survives_a_harness_that_keeps_only_the_encrypted_content(text: str) -> None:
    responses = next(dialect for dialect in DIALECTS if dialect.name == "responses")
    request = responses.normalise(REQUESTS["responses"])
    [item] = receive(responses, responses.answer(request, turn([Reasoning(text=text)]))).history
    assert sealed(item) == text
    kept = {"type": "reasoning", "summary": [], "encrypted_content": item["encrypted_content"]}
    assert asked_again(responses, [kept]).messages[1]["reasoning_content"] == text
