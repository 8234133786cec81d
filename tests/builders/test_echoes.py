from typing import Any

from builders.echoes import echo, wording


def answer(content: Any = None, *calls: tuple[str, Any], **fields: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": content, **fields}
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{at}", "type": "function", "function": {"name": name, "arguments": text}}
            for at, (name, text) in enumerate(calls)
        ]
    return message


def test_the_echo_is_the_run_of_assistant_messages() -> None:
    messages = [{"role": "user"}, answer("a"), answer("b"), {"role": "tool"}, answer("c")]
    assert echo(messages[1:]) == [answer("a"), answer("b")]
    assert echo(messages[3:]) == []
    assert echo(messages[5:]) == []


def test_arguments_nested_too_deep_to_decode_are_text() -> None:
    deep = "[" * 100_000
    assert deep in wording(answer("", ("f", deep + "]" * 100_000)))


def test_the_wording_holds_every_text_and_arguments_decoded() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}, {"type": "image"}]
    message = answer(parts, ("f", '{"\\u003ca": [{"b": "\\u003cc"}, 1]}'), reasoning_content="why")
    lines = wording(message).splitlines()
    assert {"one", "two", "onetwo", "why", "f", "<a", "<c"} <= set(lines)


def test_arguments_that_are_an_object_are_part_of_the_wording() -> None:
    assert {"a", "b"} <= set(wording(answer("", ("f", {"a": ["b"]}))).splitlines())
