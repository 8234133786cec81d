from typing import Any

import pytest

from builders.identity import call_ids, echo, head_key, message_key, same_answer, wording


def answer(content: Any = None, *calls: tuple[str, Any], **fields: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": content, **fields}
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{at}", "type": "function", "function": {"name": name, "arguments": text}}
            for at, (name, text) in enumerate(calls)
        ]
    return message


@pytest.mark.parametrize(
    ("said", "echoed"),
    [
        (answer("yes"), [answer("yes")]),
        (answer(" yes\n"), [answer("yes")]),
        (answer("yes"), [answer([{"type": "text", "text": "yes"}])]),
        (answer("yes", reasoning_content="hm"), [answer("yes")]),
        (answer(None, ("f", "{}")), [answer("", ("f", "{}"))]),
        (answer("", ("f", '{"a": 1.0, "b": "\\u00e9"}')), [answer("", ("f", '{"a":1,"b":"é"}'))]),
        (answer("", ("f", '{"a": 1}')), [answer("", ("f", '{"replace_all":false,"a":1}'))]),
        (answer("", ("f", '{"a": 1, "b": 2}')), [answer("", ("f", '{"a":1}'))]),
        (answer("", ("f", '{"a": ')), [answer("", ("f", "{}"))]),
        (answer("", ("f", {"a": 1})), [answer("", ("f", '{"a": 1}'))]),
        (
            answer("so", ("f", "{}"), ("g", "{}")),
            [answer("so"), answer("", ("f", "{}"), ("g", "{}"))],
        ),
    ],
    ids=[
        "verbatim",
        "trimmed",
        "as parts",
        "without its reasoning",
        "null content as empty",
        "arguments respelt",
        "defaults added",
        "defaults dropped",
        "unparsable arguments replaced",
        "arguments as an object",
        "text and calls as two messages",
    ],
)
def test_an_answer_is_recognised_as_harnesses_send_it_back(
    said: dict[str, Any], echoed: list[dict[str, Any]]
) -> None:
    assert same_answer(said, echoed)


@pytest.mark.parametrize(
    ("said", "echoed"),
    [
        (answer("yes"), []),
        (answer("yes"), [answer("no")]),
        (answer("", ("f", "{}")), [answer("")]),
        (answer("", ("f", "{}")), [answer("", ("invalid", "{}"))]),
        (answer("", ("f", '{"a": 1}')), [answer("", ("f", '{"a": 2}'))]),
        (answer("", ("f", '{"a": 1}')), [answer("", ("f", '{"b": 1}'))]),
        (answer("", ("f", "[1]")), [answer("", ("f", "[2]"))]),
        (answer("", ("f", "{}"), ("g", "{}")), [answer("", ("g", "{}"), ("f", "{}"))]),
        (answer([{"type": "image_url"}]), [answer("yes")]),
    ],
    ids=[
        "nothing echoed",
        "other text",
        "call dropped",
        "call renamed",
        "argument changed",
        "argument renamed",
        "list changed",
        "calls reordered",
        "parts that are no text",
    ],
)
def test_an_edited_answer_is_not_taken_for_an_echo(
    said: dict[str, Any], echoed: list[dict[str, Any]]
) -> None:
    assert not same_answer(said, echoed)


def test_parts_that_are_no_text_are_compared_as_they_are() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "data:,x"}}]
    assert same_answer(answer(parts), [answer(parts)])
    assert message_key({"role": "user", "content": parts}) != message_key(
        {"role": "user", "content": []}
    )


def test_a_history_message_keeps_its_key_when_it_is_respelt() -> None:
    assert message_key(answer("a ", ("f", '{"x": [1], "y": 2}'), reasoning_content="hm")) == (
        message_key(answer([{"type": "text", "text": "a"}], ("f", '{"y":2,"x":[1]}')))
    )


def test_role_text_and_the_answered_call_tell_messages_apart() -> None:
    keys = {
        message_key(message)
        for message in (
            {"role": "user", "content": "a"},
            {"role": "user", "content": "b"},
            {"role": "system", "content": "a"},
            {"role": "tool", "content": "a", "tool_call_id": "1"},
            {"role": "tool", "content": "a", "tool_call_id": "2"},
        )
    }
    assert len(keys) == 5


def test_no_tools_and_an_empty_list_are_the_same_head() -> None:
    assert head_key(None) == head_key([])
    assert head_key([{"b": 1, "a": 2}]) == head_key([{"a": 2, "b": 1}])
    assert head_key([{"a": 1}]) != head_key(None)


def test_the_echo_is_the_run_of_assistant_messages() -> None:
    messages = [{"role": "user"}, answer("a"), answer("b"), {"role": "tool"}, answer("c")]
    assert echo(messages, 1) == [answer("a"), answer("b")]
    assert echo(messages, 3) == []
    assert echo(messages, 5) == []


def test_arguments_nested_too_deep_to_decode_are_compared_as_text() -> None:
    deep = "[" * 100_000
    message = answer("", ("f", deep + "]" * 100_000))
    assert same_answer(message, [answer("", ("f", "{}"))])
    assert message_key(message) != message_key(answer("", ("f", deep)))
    assert deep in wording(message)


def test_the_wording_holds_every_text_and_arguments_decoded() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    message = answer(parts, ("f", '{"\\u003ca": [{"b": "\\u003cc"}, 1]}'), reasoning_content="why")
    lines = wording(message).splitlines()
    assert {"onetwo", "why", "f", "<a", "<c"} <= set(lines)


def test_call_ids_are_listed_in_order() -> None:
    assert call_ids([answer("x"), answer("", ("f", "{}"), ("g", "{}"))]) == ["call_0", "call_1"]
