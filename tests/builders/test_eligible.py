from array import array
from typing import Any

import pytest

from builders.eligible import Options, split, why_not
from tests.builders.world import SYSTEM, World

THREAD = [SYSTEM, {"role": "user", "content": "fix it"}]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"kind": "compaction"}, None),
        ({"kind": "title"}, "kind_title"),
        ({"delivered": False}, "undelivered"),
        ({"findings": ["logprobs_misaligned"]}, "logprobs_misaligned"),
        ({"findings": ["ids_usage_mismatch"]}, "ids_usage_mismatch"),
        ({"findings": ["something_odd"]}, None),
        ({"sampled_ids": array("i"), "logprobs": array("f")}, "ids_missing"),
        ({"tail": array("i")}, "prompt_ids_missing"),
        ({"logprobs": None}, "logprobs_missing"),
        ({"logprobs": array("f", [-0.5])}, "logprobs_misaligned"),
    ],
)
def test_a_completion_is_left_out_for_the_first_reason_that_applies(
    changes: dict[str, Any], reason: str | None
) -> None:
    completion = World().ask(THREAD)
    for field, value in changes.items():
        setattr(completion, field, value)
    assert why_not(completion, Options()) == reason


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 0.25, -9999.0])
def test_a_value_that_is_no_log_probability_of_a_sample_disqualifies(value: float) -> None:
    completion = World().ask(THREAD)
    assert completion.logprobs is not None
    completion.logprobs[1] = value
    assert why_not(completion, Options()) == "logprobs_invalid"


def test_a_certain_token_is_eligible() -> None:
    completion = World().ask(THREAD)
    completion.logprobs = array("f", [0.0] * len(completion.sampled_ids))
    assert why_not(completion, Options()) is None


def test_kinds_are_the_builders_choice() -> None:
    completion = World().ask(THREAD, kind="title")
    assert why_not(completion, Options(kinds=("title",))) is None


def test_eligible_and_left_out_tokens_are_all_that_was_sampled() -> None:
    world = World()
    world.ask(THREAD)
    world.ask(THREAD, delivered=False)
    world.ask(THREAD, delivered=False)
    world.ask(THREAD, kind="title", delivered=False)
    eligible, left_out = split(world.session(), Options())
    lengths = [len(sample.sampled) for sample in world.samples]
    assert [completion.completion_id for completion in eligible] == ["msg_0"]
    assert left_out == {
        "undelivered": {"completions": 2, "tokens": lengths[1] + lengths[2]},
        "kind_title": {"completions": 1, "tokens": lengths[3]},
    }
