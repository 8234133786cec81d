from array import array
from typing import Any

import pytest

from builders.eligible import Options, split
from tests.builders.world import SYSTEM, World

THREAD = [SYSTEM, {"role": "user", "content": "fix it"}]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"kind": "compaction"}, None),
        ({"kind": "title"}, "kind_title"),
        ({"delivered": False}, "undelivered"),
        ({"delivered": False, "findings": ["ids_missing"]}, "undelivered"),
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
    world = World()
    completion = world.ask(THREAD)
    for field, value in changes.items():
        setattr(completion, field, value)
    assert list(split(world.session(), Options()).left_out) == ([reason] if reason else [])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 0.25, -9999.0])
def test_a_value_that_is_no_log_probability_of_a_sample_disqualifies(value: float) -> None:
    world = World()
    completion = world.ask(THREAD)
    assert completion.logprobs is not None
    completion.logprobs[1] = value
    assert split(world.session(), Options()).eligible == []


def test_a_certain_token_is_eligible() -> None:
    world = World()
    completion = world.ask(THREAD)
    completion.logprobs = array("f", [0.0] * len(completion.sampled_ids))
    assert split(world.session(), Options()).eligible == [completion]


def test_kinds_are_the_builders_choice() -> None:
    world = World()
    completion = world.ask(THREAD, kind="title")
    assert split(world.session(), Options(kinds=("title",))).eligible == [completion]


def test_a_finding_that_is_no_obstacle_becomes_one_for_the_strict() -> None:
    world = World()
    world.ask(THREAD, truncated=True)
    assert split(world.session(), Options()).left_out == {}
    counts = {"completions": 1, "tokens": len(world.samples[0].sampled)}
    strict = split(world.session(), Options(strict=("budget_cut",)))
    assert (strict.eligible, strict.left_out) == ([], {"budget_cut": counts})


@pytest.mark.parametrize(
    ("heard", "ambiguous", "tokens"),
    [([], False, 0), ([0], False, 0), ([3], False, 3), ([3, 5, 4], False, 5), ([3], True, 0)],
    ids=["not continued", "of nothing", "of a part", "of several parts", "perhaps of another"],
)
def test_of_an_undelivered_answer_the_most_that_was_continued_is_eligible(
    heard: list[int], ambiguous: bool, tokens: int
) -> None:
    world = World()
    lost = world.ask(THREAD, delivered=False)
    for part in heard:
        world.ask(THREAD, kind="title", previous=lost, continued_tokens=part, ambiguous=ambiguous)
    parts = split(world.session(), Options())
    rest = len(lost.sampled_ids) - tokens
    assert parts.tokens == ({"msg_0": tokens} if tokens else {})
    assert parts.left_out["undelivered"] == {"completions": 1, "tokens": rest}


def test_an_undelivered_answer_that_was_continued_whole_is_eligible() -> None:
    world = World()
    lost = world.ask(THREAD, delivered=False)
    world.ask(THREAD, kind="title", previous=lost)
    assert split(world.session(), Options()).tokens == {"msg_0": len(lost.sampled_ids)}


def test_tokens_behind_the_limit_are_left_out_by_their_place_in_their_own_context() -> None:
    world = World()
    first = world.ask(THREAD)
    second = world.ask(world.follow(THREAD, first))
    sampled = len(second.sampled_ids)
    for room, kept in ((sampled, sampled), (2, 2), (0, 0)):
        parts = split(world.session(), Options(max_tokens=second.prompt_length + room))
        assert parts.tokens.get("msg_1", 0) == kept
        cut = {"msg_1": sampled - kept} if kept < sampled else {}
        assert parts.cut == cut
        assert parts.left_out.get("max_tokens", {}).get("tokens", 0) == sampled - kept


def test_what_was_not_received_is_not_cut_a_second_time() -> None:
    world = World()
    lost = world.ask(THREAD, delivered=False)
    world.ask(THREAD, kind="title", previous=lost, continued_tokens=5)
    limit = lost.prompt_length + 3
    parts = split(world.session(), Options(max_tokens=limit))
    assert parts.tokens == {"msg_0": 3}
    assert parts.left_out["undelivered"]["tokens"] == len(lost.sampled_ids) - 5
    assert parts.left_out["max_tokens"]["tokens"] == 2


def test_eligible_and_left_out_tokens_are_all_that_was_sampled() -> None:
    world = World()
    world.ask(THREAD)
    world.ask(THREAD, delivered=False)
    world.ask(THREAD, delivered=False)
    world.ask(THREAD, kind="title", delivered=False)
    eligible, left_out, *_ = split(world.session(), Options())
    lengths = [len(sample.sampled) for sample in world.samples]
    assert [completion.completion_id for completion in eligible] == ["msg_0"]
    assert left_out == {
        "undelivered": {"completions": 2, "tokens": lengths[1] + lengths[2]},
        "kind_title": {"completions": 1, "tokens": lengths[3]},
    }
