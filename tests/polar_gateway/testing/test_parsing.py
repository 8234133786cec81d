import json
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from polar_gateway.testing.parsing import TurnParser
from polar_gateway.testing.tokenizer import ChatTokenizer

TOKENIZER = ChatTokenizer()
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


def parse(
    text: str, *, thinking: bool = True, tools: bool = True
) -> tuple[TurnParser, list[dict[str, Any]]]:
    parser = TurnParser(thinking=thinking, tools=tools)
    tokens = [TOKENIZER.bytes_of[i] for i in TOKENIZER.encode(text)]
    return parser, [parser.feed(token, token.decode()) for token in tokens]


def streamed(deltas: list[dict[str, Any]], field: str) -> str:
    return "".join(delta.get(field) or "" for delta in deltas)


def test_a_turn_is_split_into_thinking_words_and_calls() -> None:
    parser, deltas = parse(f"<think>\nHm.\n</think>\n\nI look.\n{CALL}\n{CALL}")
    message = parser.message()
    assert message["reasoning"] == streamed(deltas, "reasoning") == "\nHm.\n"
    assert message["content"] == streamed(deltas, "content") == "\n\nI look.\n"
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "bash", "arguments": '{"command": "ls"}'}
    ] * 2


def test_a_call_is_streamed_name_first_and_keeps_its_id() -> None:
    parser, deltas = parse(f"</think>{CALL}")
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", [])]
    assert pieces[0]["function"] == {"name": "bash"}
    assert pieces[0]["id"] == parser.message()["tool_calls"][0]["id"]
    assert not any("id" in piece for piece in pieces[1:])
    arguments = "".join(piece["function"].get("arguments", "") for piece in pieces)
    assert arguments == '{"command": "ls"}'


def test_whitespace_before_a_call_is_content_only_in_a_stream() -> None:
    parser, deltas = parse(f"</think>\n\n{CALL}")
    assert streamed(deltas, "content") == "\n\n"
    assert parser.message()["content"] is None


def test_a_call_ends_thinking_that_was_never_closed() -> None:
    parser, _ = parse(f"<think>Hm. {CALL}")
    assert parser.message()["reasoning"] == "Hm. "
    assert len(parser.message()["tool_calls"]) == 1


def test_a_turn_without_the_end_of_thinking_is_all_thinking() -> None:
    parser, _ = parse("just words")
    assert parser.message()["reasoning"] == "just words"
    assert parser.message()["content"] is None


def test_without_tools_a_call_is_words() -> None:
    parser, deltas = parse(f"</think>{CALL}", tools=False)
    assert parser.message()["content"] == streamed(deltas, "content") == CALL
    assert "tool_calls" not in parser.message()


def test_a_call_that_is_no_json_is_words_in_a_whole_answer() -> None:
    broken = '<tool_call>\n{"name": "bash", "arguments": {"command": \n</tool_call>'
    parser, _ = parse(f"</think>Now: {broken}")
    assert parser.message()["content"] == f"Now: {broken}"
    assert "tool_calls" not in parser.message()
    assert parser.called


def test_words_after_a_call_are_dropped() -> None:
    parser, deltas = parse(f"</think>{CALL} trailing")
    assert parser.message()["content"] is None
    assert streamed(deltas, "content") == ""


@given(st.dictionaries(st.text(), st.one_of(st.text(), st.integers(), st.lists(st.booleans()))))
def test_streamed_arguments_add_up_to_what_was_said(arguments: dict[str, Any]) -> None:
    said = json.dumps(arguments)
    assume("</tool_call>" not in said)  # the markup ends a call wherever it stands
    parser = TurnParser(thinking=False, tools=True)
    text = f'<tool_call>\n{{"name": "f", "arguments": {said}}}\n</tool_call>'
    tokens = [TOKENIZER.bytes_of[i] for i in TOKENIZER.encode(text)]
    pieces = [
        piece["function"].get("arguments", "")
        for token in tokens
        for piece in parser.feed(token, token.decode()).get("tool_calls", [])
    ]
    assert "".join(pieces) == said
