import time
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_gateway.testing.tiny_model import train_tokenizer
from polar_gateway.testing.tokenizer import ChatTokenizer, RenderError

TOKENIZER = ChatTokenizer()
USER = {"role": "user", "content": "Fix it."}
CALLS: dict[str, Any] = {
    "role": "assistant",
    "content": "\n\nI look.\n",
    "reasoning": "\nWhere is it?\n",
    "tool_calls": [
        {"id": "a", "function": {"name": "bash", "arguments": '{"command":  "ls"}'}},
        {"id": "b", "function": {"name": "bash", "arguments": {"command": "cat <b>é"}}},
    ],
}
RESULTS: list[dict[str, Any]] = [
    {"role": "tool", "tool_call_id": "a", "content": "calc.py"},
    {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "1"}]},
]


@given(st.text())
def test_decoding_gives_back_the_normalised_text(text: str) -> None:
    decoded = TOKENIZER.decode(TOKENIZER.encode(text))
    assert decoded == unicodedata.normalize("NFC", text)


@given(st.text())
def test_the_bytes_of_an_encoding_are_those_of_its_text(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert b"".join(TOKENIZER.bytes_of[i] for i in ids).decode() == TOKENIZER.decode(ids)


@given(st.text(min_size=1))
def test_every_continuation_is_a_prefix_of_what_is_left_to_say(text: str) -> None:
    rest = text.encode()
    continuations = TOKENIZER.continuations(rest)
    assert continuations
    assert all(rest.startswith(TOKENIZER.bytes_of[i]) for i in continuations)


def test_nothing_continues_a_finished_text() -> None:
    assert TOKENIZER.continuations(b"") == []


def test_markup_is_never_spelled_out() -> None:
    assert TOKENIZER.continuations(b"<tool_call>\n") == [TOKENIZER.id_of("<tool_call>")]
    spellings = [TOKENIZER.bytes_of[i] for i in TOKENIZER.continuations(b"x</think>y")]
    assert spellings == [b"x"]


def test_the_vocabulary_needs_no_padding() -> None:
    assert TOKENIZER.size == train_tokenizer.VOCABULARY
    assert TOKENIZER.size % 64 == 0


def test_a_prompt_holds_tools_system_turns_and_the_opening_of_the_answer() -> None:
    prompt = TOKENIZER.render(
        [{"role": "system", "content": "Be brief."}, USER, CALLS, *RESULTS],
        [{"type": "function", "function": {"name": "bash"}}],
    )
    assert prompt == (
        "<|im_start|>system\nBe brief.\n\n# Tools\n\nThe functions you may call, one JSON "
        'signature a line:\n<tools>\n{"type": "function", "function": {"name": "bash"}}\n</tools>'
        "\n\nA call is a JSON object inside tags:\n<tool_call>\n"
        '{"name": <name>, "arguments": <object>}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nFix it.<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nWhere is it?\n</think>\n\nI look.\n"
        '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "bash", "arguments": {"command": "cat <b>é"}}\n</tool_call>'
        "<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\ncalc.py\n</tool_response>\n"
        "<tool_response>\n1\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_thinking_before_the_last_user_message_is_dropped() -> None:
    before = TOKENIZER.render([USER, CALLS, *RESULTS])
    after = TOKENIZER.render([USER, CALLS, *RESULTS, USER])
    assert "Where is it?" in before
    assert "Where is it?" not in after


def test_thinking_may_come_back_under_its_older_name() -> None:
    older = {k: v for k, v in CALLS.items() if k != "reasoning"}
    older["reasoning_content"] = CALLS["reasoning"]
    assert TOKENIZER.render([USER, older]) == TOKENIZER.render([USER, CALLS])


def test_thinking_switched_off_is_an_empty_thought_in_the_prompt() -> None:
    prompt = TOKENIZER.render([USER], enable_thinking=False)
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_arguments_that_are_no_object_become_an_empty_one() -> None:
    broken = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "f", "arguments": '{"unclosed'}}],
    }
    assert '{"name": "f", "arguments": {}}' in TOKENIZER.render([USER, broken])


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([USER, {"role": "system", "content": "Late."}], "must be at the beginning"),
        (
            [{"role": "system", "content": "A"}, {"role": "system", "content": "B"}, USER],
            "beginning",
        ),
        ([{"role": "developer", "content": "A"}, USER], "developer"),
        ([{"role": "alien", "content": "A"}], "alien"),
        ([], "no messages"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "multimodal"),
    ],
)
def test_what_strict_templates_refuse_is_refused(
    messages: list[dict[str, str]], reason: str
) -> None:
    with pytest.raises(RenderError, match=reason):
        TOKENIZER.render(messages)


def test_a_long_prompt_is_rendered_and_encoded_quickly() -> None:
    prose = (Path(__file__).parents[3] / "LICENSE").read_text()
    messages = [{"role": "system", "content": (prose * 20)[:126_000]}, USER]
    began = time.process_time()
    TOKENIZER.encode(TOKENIZER.render(messages))
    assert time.process_time() - began < 0.5  # 0.06 s on a quiet machine
