import math
import random

from hypothesis import given
from hypothesis import strategies as st

from polar_gateway.testing.policy import SeededPolicy

POLICY = SeededPolicy(4096, seed=3)
IDS = st.lists(st.integers(0, 4095), max_size=50)


@given(IDS)
def test_the_probabilities_of_a_context_sum_to_one(ids: list[int]) -> None:
    context = POLICY.context(ids)
    logprobs = [POLICY.logprob(context, i) for i in range(4096)]
    assert max(logprobs) < 0
    assert math.isclose(math.fsum(map(math.exp, logprobs)), 1.0)


@given(IDS, IDS)
def test_a_context_may_be_extended_piece_by_piece(first: list[int], second: list[int]) -> None:
    assert POLICY.context(first + second) == POLICY.context(second, POLICY.context(first))


def test_other_ids_before_a_token_give_it_another_probability() -> None:
    given_one, given_two = POLICY.context([1]), POLICY.context([2])
    assert POLICY.logprob(given_one, 7) != POLICY.logprob(given_two, 7)


def test_without_temperature_the_likeliest_allowed_token_is_chosen() -> None:
    context = POLICY.context([1, 2])
    chosen = POLICY.choose(context, [5, 6, 7], 0.0, random.Random())
    assert chosen.logprob == max(POLICY.logprob(context, i) for i in (5, 6, 7))


def test_the_top_tokens_come_in_order_and_none_is_likelier() -> None:
    context = POLICY.context([9])
    top = POLICY.top(context, 5)
    everything = sorted((POLICY.logprob(context, i) for i in range(4096)), reverse=True)
    assert [sample.logprob for sample in top] == everything[:5]
    assert all(POLICY.logprob(context, sample.token_id) == sample.logprob for sample in top)
