import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from polar_gateway.dialects.custom_tools import (
    CustomInput,
    custom_arguments,
    custom_function,
    custom_input,
)

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
SPELLINGS: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [{"indent": 1}, {"separators": (",", ":"), "ensure_ascii": False}, {}]
)


def in_pieces(arguments: str, size: int) -> str:
    reader = CustomInput()
    read = [reader.feed(arguments[at : at + size]) for at in range(0, len(arguments), size)]
    return "".join(read) + reader.close()


@given(TEXTS, SPELLINGS, st.integers(1, 9))
def test_a_text_comes_out_of_the_arguments_in_whatever_pieces_they_come(
    text: str, spelling: dict[str, Any], size: int
) -> None:
    assert in_pieces(json.dumps({"input": text}, **spelling), size) == text
    assert custom_input(custom_arguments(text)) == text


@given(st.text(st.sampled_from('{}"input: \\\\n\\n,x1'), max_size=30), st.integers(1, 9))
def test_arguments_in_another_form_are_read_alike_whole_and_in_pieces(
    arguments: str, size: int
) -> None:
    assert in_pieces(arguments, size) == custom_input(arguments)


def test_arguments_that_are_no_object_are_the_text_themselves() -> None:
    for arguments in ("*** Begin Patch", '["input"]', '{"patch": "x"}', ""):
        assert custom_input(arguments) == arguments


def test_a_grammar_is_told_in_the_description() -> None:
    plain = custom_function("patch", "Patch a file.", {})
    bound = custom_function("patch", "", {"syntax": "regex", "definition": "a+"})
    assert plain["function"]["description"] == "Patch a file."
    assert bound["function"]["description"] == "The input follows this regex grammar:\na+"
    assert bound["function"]["parameters"] == plain["function"]["parameters"]
