import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_gateway.testing.generation import Generation, generate
from polar_gateway.testing.policy import SeededPolicy
from polar_gateway.testing.script import Line, Spelling
from polar_gateway.testing.tokenizer import ChatTokenizer

TOKENIZER = ChatTokenizer()
POLICY = SeededPolicy(TOKENIZER.size)
MARKUP = ["<think>\n", "\n</think>\n\n", "<tool_call>\n", "\n</tool_call>"]
TEXT = st.lists(st.one_of(st.text(), st.sampled_from(MARKUP))).map("".join)


def say(
    text: str,
    *,
    tokens: Spelling = "random",
    limit: int = 100_000,
    temperature: float = 1.0,
    stop: list[str] | None = None,
    seed: int = 0,
) -> Generation:
    return generate(
        Line(text, tokens),
        [1, 2, 3],
        TOKENIZER,
        POLICY,
        limit=limit,
        temperature=temperature,
        stop=stop or [],
        source=random.Random(seed),
    )


@given(TEXT, st.integers())
def test_the_sampled_tokens_spell_the_line_and_then_end_the_turn(text: str, seed: int) -> None:
    tokens = say(text, seed=seed).tokens
    spelled = b"".join(TOKENIZER.bytes_of[token.token_id] for token in tokens[:-1])
    assert spelled.decode() == text
    assert tokens[-1].token_id == TOKENIZER.end_of_turn


@given(TEXT)
def test_the_visible_pieces_add_up_to_the_line(text: str) -> None:
    assert "".join(token.text for token in say(text).tokens) == text


@given(TEXT)
def test_every_logprob_is_that_of_the_token_in_its_context(text: str) -> None:
    context = [1, 2, 3]
    for token in say(text).tokens:
        assert token.logprob == POLICY.logprob(POLICY.context(context), token.token_id)
        context.append(token.token_id)


def test_random_spelling_varies_and_canonical_does_not() -> None:
    text = "<think>\nThe tests should pass now.\n</think>\n\nThey do."
    spellings = {tuple(t.token_id for t in say(text, seed=seed).tokens) for seed in range(10)}
    assert len(spellings) == 10
    canonical = [t.token_id for t in say(text, tokens="canonical").tokens]
    assert canonical == [*TOKENIZER.encode(text), TOKENIZER.end_of_turn]


def test_a_seed_or_no_temperature_repeats_a_spelling() -> None:
    assert say("The same again.", seed=4) == say("The same again.", seed=4)
    cold = [say("The same again.", temperature=0.0, seed=seed) for seed in (1, 2)]
    assert cold[0] == cold[1]


def test_the_limit_cuts_the_line_off() -> None:
    generation = say("one two three four", limit=3)
    assert len(generation.tokens) == 3
    assert generation.finish_reason == "length"


@pytest.mark.parametrize("tokens", ["random", "canonical"])
def test_a_stop_string_ends_the_text_but_keeps_the_token_that_completed_it(
    tokens: Spelling,
) -> None:
    generation = say("one two import three", tokens=tokens, stop=["zzz", "o import"])
    assert generation.stop_reason == "o import"
    assert "".join(token.text for token in generation.tokens) == "one tw"
    spelled = b"".join(TOKENIZER.bytes_of[token.token_id] for token in generation.tokens)
    assert spelled == b"one two import"
