import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_gateway.dialects.custom_tools import CustomInput, custom_input


@given(text=st.text(max_size=30), ascii_only=st.booleans(), indent=st.sampled_from([None, 1]))
def test_the_text_of_a_custom_tool_is_read_from_its_arguments(
    text: str, ascii_only: bool, indent: int | None
) -> None:
    spelled = json.dumps({"input": text}, ensure_ascii=ascii_only, indent=indent)
    assert custom_input(spelled) == text


SPELLED = st.lists(
    st.sampled_from(
        [
            '{"input":',
            ' "',
            '"}',
            "\\",
            "\\n",
            "\\d",
            "\\u00e9",
            "\\ud83d",
            "\\ude00",
            "\\u1",
            "+ é",
        ]
    ),
    max_size=12,
).map("".join)


@given(spelled=SPELLED, cuts=st.lists(st.integers(1, 5), min_size=1, max_size=9))
def test_the_text_is_the_same_however_its_arguments_come(spelled: str, cuts: list[int]) -> None:
    reader, text, at = CustomInput(), "", 0
    while at < len(spelled):
        size = cuts[at % len(cuts)]
        text += reader.feed(spelled[at : at + size])
        at += size
    text += reader.close()
    assert text == custom_input(spelled)
    text.encode()


@pytest.mark.parametrize(
    ("spelled", "text"),
    [
        ('{"input": "+a\\n+b', "+a\n+b"),
        ('{"input": "+a\\', "+a\\"),
        ('{"input": "\\d+ \\u12zz"}', "\\d+ \\u12zz"),
        ('{"input": "raw\nbreak"}', "raw\nbreak"),
        ('{"input": 7}', '{"input": 7}'),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ("", ""),
    ],
)
def test_a_badly_spelled_text_is_handed_on_as_well_as_it_can_be(spelled: str, text: str) -> None:
    assert custom_input(spelled) == text
