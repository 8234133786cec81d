from typing import Any

import msgspec

from polar_gateway.capture.digests import head_digest, message_digest, value_digest
from polar_gateway.dialects.messages import assistant_message, tool_call
from polar_gateway.dialects.turn import ModelRequest

TOOL = {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}


def test_equal_messages_have_one_digest_whatever_the_order_of_their_fields() -> None:
    one = assistant_message("hi", "hm", [tool_call("c", "f", "{}")])
    other = dict(reversed(msgspec.json.decode(msgspec.json.encode(one)).items()))
    assert message_digest(one) == message_digest(other)
    assert len(message_digest(one)) == 16


def test_messages_that_differ_have_different_digests() -> None:
    said = assistant_message("hi", "hm", [tool_call("c", "f", "{}")])
    others: list[dict[str, Any]] = [
        {**said, "content": "hi "},
        {**said, "content": [{"type": "text", "text": "hi"}]},
        {**said, "reasoning_content": ""},
        {**said, "tool_calls": []},
        {**said, "role": "user"},
        assistant_message("hih", "m", [tool_call("c", "f", "{}")]),
        assistant_message("hi", "hm", [tool_call("d", "f", "{}")]),
        assistant_message("hi", "hm", [tool_call("c", "f", "{ }")]),
    ]
    digests = {message_digest(message) for message in [said, *others]}
    assert len(digests) == 1 + len(others)


def test_a_head_is_what_is_rendered_beside_the_messages() -> None:
    def head(**fields: Any) -> bytes:
        return head_digest(ModelRequest(model="m", messages=[], **fields))

    assert head(tools=[TOOL]) == head(tools=[TOOL], tool_choice="auto")
    assert head(tools=[TOOL]) == head(tools=[TOOL], tool_choice="required", max_tokens=5)
    different = {
        head(),
        head(tools=[TOOL]),
        head(tools=[TOOL, TOOL]),
        head(tools=[TOOL], tool_choice="none"),
        head(tools=[TOOL], template_kwargs={"enable_thinking": False}),
        head(tools=[dict(reversed(TOOL.items()))]),
    }
    assert len(different) == 6


def test_numbers_of_any_size_can_be_digested() -> None:
    assert value_digest({"maximum": 10**30}) != value_digest({"maximum": 10**30 + 1})
