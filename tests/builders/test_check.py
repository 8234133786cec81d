"""The check is only worth what it refuses: every corruption of a good trajectory must be reported."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import builders
from builders.base import StrategySpec
from builders.check import check
from builders.eligible import Options
from builders.records import Trace, Trajectory
from tests.builders.world import ACTIONS, END, END_TEXT, SYSTEM, World, play
from tests.generated import examples

Corruption = Callable[[Trajectory, random.Random], bool]
"""Changes the trajectory in place; returns False where it found nothing to change."""


def pick(trajectory: Trajectory, chance: random.Random) -> Trace:
    return chance.choice(trajectory.traces)


def flip_a_mask(trajectory: Trajectory, chance: random.Random) -> bool:
    trace = pick(trajectory, chance)
    at = chance.randrange(len(trace.loss_mask))
    trace.loss_mask[at] = 1 - trace.loss_mask[at]
    return True


def put_a_two_into_the_mask(trajectory: Trajectory, chance: random.Random) -> bool:
    trace = pick(trajectory, chance)
    trace.loss_mask[chance.randrange(len(trace.loss_mask))] = 2
    return True


def drop_a_token(trajectory: Trajectory, chance: random.Random) -> bool:
    trace = pick(trajectory, chance)
    at = chance.randrange(len(trace.response_ids))
    assert trace.response_logprobs is not None
    for row in (trace.response_ids, trace.loss_mask, trace.response_logprobs):
        del row[at]
    return True


def drop_a_token_of_one_row(trajectory: Trajectory, chance: random.Random) -> bool:
    trace = pick(trajectory, chance)
    assert trace.response_logprobs is not None
    row = chance.choice([trace.response_ids, trace.loss_mask, trace.response_logprobs])
    row.pop()
    return True


def change_a_response_id(trajectory: Trajectory, chance: random.Random) -> bool:
    trace = pick(trajectory, chance)
    trace.response_ids[chance.randrange(len(trace.response_ids))] += 1
    return True


def change_a_prompt_id(trajectory: Trajectory, chance: random.Random) -> bool:
    trace = pick(trajectory, chance)
    trace.prompt_ids[chance.randrange(len(trace.prompt_ids))] += 1
    return True


def move_a_prompt_id_into_the_response(trajectory: Trajectory, chance: random.Random) -> bool:
    trace = pick(trajectory, chance)
    assert trace.response_logprobs is not None
    trace.response_ids.insert(0, trace.prompt_ids.pop())
    trace.loss_mask.insert(0, 0)
    trace.response_logprobs.insert(0, 0.0)
    for span in trace.metadata["spans"]:
        span["start"] += 1
    return True


def shift_a_logprob(trajectory: Trajectory, chance: random.Random) -> bool:
    trace = pick(trajectory, chance)
    assert trace.response_logprobs is not None
    at = chance.randrange(len(trace.response_logprobs))
    trace.response_logprobs[at] += chance.choice([-0.5, 1e-3, float("nan"), float("-inf")])
    return True


def rotate_the_logprobs(trajectory: Trajectory, chance: random.Random) -> bool:
    trace = pick(trajectory, chance)
    before = trace.response_logprobs
    assert before is not None
    trace.response_logprobs = [*before[1:], before[0]]
    return trace.response_logprobs != before


def take_the_logprobs_away(trajectory: Trajectory, chance: random.Random) -> bool:
    pick(trajectory, chance).response_logprobs = None
    return True


def repeat_a_trace(trajectory: Trajectory, chance: random.Random) -> bool:
    trace = copy.deepcopy(pick(trajectory, chance))
    trace.metadata["main"] = False
    trajectory.traces.insert(0, trace)
    trajectory.metadata["reconstruction_stats"]["chains"] += 1
    return True


def lose_a_trace(trajectory: Trajectory, chance: random.Random) -> bool:
    trajectory.traces.remove(pick(trajectory, chance))
    trajectory.metadata["reconstruction_stats"]["chains"] -= 1
    if trajectory.traces:
        trajectory.traces[-1].metadata["main"] = True
    return True


def repeat_a_run(trajectory: Trajectory, chance: random.Random) -> bool:
    trace = pick(trajectory, chance)
    assert trace.response_logprobs is not None
    span = copy.deepcopy(trace.metadata["spans"][-1])
    rows = slice(span["start"], span["start"] + span["length"])
    span["start"] = len(trace.response_ids)
    trace.metadata["spans"].append(span)
    trace.metadata["completion_ids"].append(span["completion_id"])
    trace.response_ids += trace.response_ids[rows]
    trace.loss_mask += trace.loss_mask[rows]
    trace.response_logprobs += trace.response_logprobs[rows]
    return True


def lose_the_last_run(trajectory: Trajectory, chance: random.Random) -> bool:
    """Everything about the trace stays consistent; only the session knows that it is missing."""
    long = [trace for trace in trajectory.traces if len(trace.metadata["spans"]) > 1]
    if not long:
        return False
    trace = chance.choice(long)
    assert trace.response_logprobs is not None
    trace.metadata["spans"].pop()
    trace.metadata["completion_ids"].pop()
    last = trace.metadata["spans"][-1]
    for row in (trace.response_ids, trace.loss_mask, trace.response_logprobs):
        del row[last["start"] + last["length"] :]
    trace.finish_reason = last["finish_reason"]
    return True


def swap_the_names_of_two_runs(trajectory: Trajectory, chance: random.Random) -> bool:
    spans = [span for trace in trajectory.traces for span in trace.metadata["spans"]]
    if len(spans) < 2:
        return False
    one, other = chance.sample(spans, 2)
    one["completion_id"], other["completion_id"] = other["completion_id"], one["completion_id"]
    return bool(one["completion_id"] != other["completion_id"])


def misstate_the_policy(trajectory: Trajectory, chance: random.Random) -> bool:
    chance.choice(pick(trajectory, chance).metadata["spans"])["policy_version"] = "another"
    return True


def move_a_junction(trajectory: Trajectory, chance: random.Random) -> bool:
    """The interstitial loses its first token, or gains one, and all positions are adjusted."""
    long = [trace for trace in trajectory.traces if len(trace.metadata["spans"]) > 1]
    if not long:
        return False
    trace = chance.choice(long)
    assert trace.response_logprobs is not None
    number = chance.randrange(1, len(trace.metadata["spans"]))
    before = trace.metadata["spans"][number - 1]
    at = before["start"] + before["length"]
    change = chance.choice([-1, 1])
    if change == -1:
        for row in (trace.response_ids, trace.loss_mask, trace.response_logprobs):
            del row[at]
    else:
        trace.response_ids.insert(at, chance.choice([trace.response_ids[at - 1], 2]))
        trace.loss_mask.insert(at, 0)
        trace.response_logprobs.insert(at, 0.0)
    for span in trace.metadata["spans"][number:]:
        span["start"] += change
    return True


def cut_at_a_later_end_of_turn(trajectory: Trajectory, chance: random.Random) -> bool:
    """As if the first message of the harness were still part of the turn; the drift is restated."""
    for trace in trajectory.traces:
        assert trace.response_logprobs is not None
        for number, span in enumerate(trace.metadata["spans"][1:], 1):
            before = trace.metadata["spans"][number - 1]
            start = before["start"] + before["length"]
            interstitial = trace.response_ids[start : span["start"]]
            if interstitial[0] != END and END in interstitial:
                cut = interstitial.index(END) + 1
                for row in (trace.response_ids, trace.loss_mask, trace.response_logprobs):
                    del row[start : start + cut]
                for later in trace.metadata["spans"][number:]:
                    later["start"] -= cut
                return True
    return False


def append_a_masked_token(trajectory: Trajectory, chance: random.Random) -> bool:
    trace = pick(trajectory, chance)
    assert trace.response_logprobs is not None
    trace.response_ids.append(END)
    trace.loss_mask.append(0)
    trace.response_logprobs.append(0.0)
    return True


def misplace_a_span(trajectory: Trajectory, chance: random.Random) -> bool:
    span = chance.choice(pick(trajectory, chance).metadata["spans"])
    span["start"] += chance.choice([-1, 1])
    return True


def empty_the_prompt(trajectory: Trajectory, chance: random.Random) -> bool:
    pick(trajectory, chance).prompt_ids.clear()
    return True


def forget_a_completion_id(trajectory: Trajectory, chance: random.Random) -> bool:
    pick(trajectory, chance).metadata["completion_ids"].pop()
    return True


def forget_what_the_spans_are(trajectory: Trajectory, chance: random.Random) -> bool:
    pick(trajectory, chance).metadata["spans"] = []
    return True


def misstate_the_drift(trajectory: Trajectory, chance: random.Random) -> bool:
    pick(trajectory, chance).metadata["context_drift"] += 1
    return True


def join_two_traces(trajectory: Trajectory, chance: random.Random) -> bool:
    """A chain is continued by another that does not continue it."""
    if len(trajectory.traces) < 2:
        return False
    one, other = chance.sample(trajectory.traces, 2)
    assert one.response_logprobs is not None
    assert other.response_logprobs is not None
    for span in other.metadata["spans"]:
        one.metadata["spans"].append({**span, "start": span["start"] + len(one.response_ids)})
    one.metadata["completion_ids"] += other.metadata["completion_ids"]
    one.metadata["context_drift"] += other.metadata["context_drift"]
    one.response_ids += other.response_ids
    one.loss_mask += other.loss_mask
    one.response_logprobs += other.response_logprobs
    one.response_messages += other.response_messages
    one.finish_reason = other.finish_reason
    trajectory.traces.remove(other)
    trajectory.traces[-1].metadata["main"] = True
    trajectory.metadata["reconstruction_stats"]["chains"] -= 1
    return True


def misstate_what_was_left_out(trajectory: Trajectory, chance: random.Random) -> bool:
    left_out = trajectory.metadata["reconstruction_stats"]["left_out"]
    left_out["undelivered"] = {"completions": 1, "tokens": 10_000}
    return True


def misstate_the_samples(trajectory: Trajectory, chance: random.Random) -> bool:
    key = chance.choice(["sampled_tokens", "trainable_tokens", "chains"])
    trajectory.metadata["reconstruction_stats"][key] += 1
    return True


def unmark_the_main_trace(trajectory: Trajectory, chance: random.Random) -> bool:
    trajectory.traces[-1].metadata["main"] = False
    return True


def lose_the_spans(trajectory: Trajectory, chance: random.Random) -> bool:
    del pick(trajectory, chance).metadata["spans"]
    return True


def change_the_tools(trajectory: Trajectory, chance: random.Random) -> bool:
    pick(trajectory, chance).tools = [{"type": "function", "function": {"name": "other"}}]
    return True


def change_the_end(trajectory: Trajectory, chance: random.Random) -> bool:
    pick(trajectory, chance).finish_reason = "abort"
    return True


def lose_a_message(trajectory: Trajectory, chance: random.Random) -> bool:
    trace = pick(trajectory, chance)
    chance.choice([trace.prompt_messages, trace.response_messages]).pop()
    return True


def train_what_another_trace_trains(trajectory: Trajectory, chance: random.Random) -> bool:
    """A shared run is unmasked, with the log probabilities that it has where it is trained."""
    trained = {
        span["completion_id"]: (trace.response_logprobs or [])[span["start"] :][: span["length"]]
        for trace in trajectory.traces
        for span in trace.metadata["spans"]
        if not span.get("shared")
    }
    for trace in trajectory.traces:
        assert trace.response_logprobs is not None
        for span in trace.metadata["spans"]:
            if shared := span.pop("shared", 0):
                rows = slice(span["start"], span["start"] + shared)
                trace.loss_mask[rows] = [1] * shared
                trace.response_logprobs[rows] = trained[span["completion_id"]][:shared]
                return True
    return False


def mask_as_if_shared(trajectory: Trajectory, chance: random.Random) -> bool:
    trace = pick(trajectory, chance)
    assert trace.response_logprobs is not None
    span = chance.choice(trace.metadata["spans"])
    shared = span.get("shared", 0)
    if shared == span["length"]:
        return False
    trace.loss_mask[span["start"] + shared] = 0
    trace.response_logprobs[span["start"] + shared] = 0.0
    span["shared"] = shared + 1
    return True


def misstate_the_parent(trajectory: Trajectory, chance: random.Random) -> bool:
    branches = [
        trace
        for trace in trajectory.traces
        if (trace.metadata["parent"] or {}).get("shared_tokens")
    ]
    if not branches:
        return False
    parent = chance.choice(branches).metadata["parent"]
    chance.choice(
        [
            lambda: parent.update(shared_tokens=parent["shared_tokens"] - 1),
            lambda: parent.update(trace=len(trajectory.traces)),
            lambda: parent.update(trace=None),
            parent.clear,
        ]
    )()
    return True


def train_beyond_what_was_received(trajectory: Trajectory, chance: random.Random) -> bool:
    """A run gets one token more of its completion, whose ids and place are those of the record."""
    for trace in trajectory.traces:
        for number, span in enumerate(trace.metadata["spans"]):
            if "sampled" in span:
                assert trace.response_logprobs is not None
                at = span["start"] + span["length"]
                trace.response_ids.insert(at, 99)
                trace.loss_mask.insert(at, 1)
                trace.response_logprobs.insert(at, -0.5)
                span["length"] += 1
                for later in trace.metadata["spans"][number + 1 :]:
                    later["start"] += 1
                return True
    return False


def misstate_the_cut(trajectory: Trajectory, chance: random.Random) -> bool:
    pick(trajectory, chance).metadata["max_tokens_cut"] = chance.choice([10**6, None])
    return True


def misstate_the_number(trajectory: Trajectory, chance: random.Random) -> bool:
    pick(trajectory, chance).metadata["trace_index"] += 1
    return True


def forget_what_was_continued(trajectory: Trajectory, chance: random.Random) -> bool:
    span = chance.choice(pick(trajectory, chance).metadata["spans"])
    return span.pop("previous", None) is not None


def put_an_id_that_is_none(trajectory: Trajectory, chance: random.Random) -> bool:
    trace = pick(trajectory, chance)
    trace.response_ids[chance.randrange(len(trace.response_ids))] = 2**31
    return True


CORRUPTIONS: list[Corruption] = [
    flip_a_mask,
    put_a_two_into_the_mask,
    drop_a_token,
    drop_a_token_of_one_row,
    change_a_response_id,
    change_a_prompt_id,
    move_a_prompt_id_into_the_response,
    shift_a_logprob,
    rotate_the_logprobs,
    take_the_logprobs_away,
    repeat_a_trace,
    lose_a_trace,
    repeat_a_run,
    lose_the_last_run,
    swap_the_names_of_two_runs,
    misstate_the_policy,
    move_a_junction,
    cut_at_a_later_end_of_turn,
    append_a_masked_token,
    misplace_a_span,
    empty_the_prompt,
    forget_a_completion_id,
    forget_what_the_spans_are,
    misstate_the_drift,
    join_two_traces,
    misstate_what_was_left_out,
    misstate_the_samples,
    unmark_the_main_trace,
    lose_the_spans,
    change_the_tools,
    change_the_end,
    lose_a_message,
    train_what_another_trace_trains,
    mask_as_if_shared,
    misstate_the_parent,
    train_beyond_what_was_received,
    misstate_the_cut,
    misstate_the_number,
    forget_what_was_continued,
    put_an_id_that_is_none,
]


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda corrupt: corrupt.__name__)
@given(
    seed=st.integers(0, 2**32),
    spells_ends=st.booleans(),
    actions=st.lists(st.sampled_from(ACTIONS), min_size=2, max_size=6),
    strategy=st.sampled_from(sorted(builders.BUILDERS)),
    config=st.fixed_dictionaries(
        {"split_on_drift": st.booleans(), "max_tokens": st.none() | st.integers(100, 400)}
    ),
    composes=st.sampled_from([0.0, 0.7]),
)
# Some corruptions need a merged trace to change, which many sessions do not have.
@settings(examples(25), suppress_health_check=[HealthCheck.filter_too_much])
def test_every_corruption_is_reported(
    corrupt: Corruption,
    seed: int,
    spells_ends: bool,
    actions: list[str],
    strategy: str,
    config: dict[str, Any],
    composes: float,
) -> None:
    world = World(seed, spells_ends=spells_ends, composes=composes)
    play(world, actions)
    session = world.session()
    builder = builders.make(StrategySpec(strategy=strategy, config=config))
    trajectory = builder.build(session)
    assume(trajectory.traces)
    corrupted = copy.deepcopy(trajectory)
    assume(corrupt(corrupted, random.Random(seed)))
    assert check(session, trajectory, builder.options) == []
    assert check(session, corrupted, builder.options)


def test_a_violation_names_the_trace_and_the_completion() -> None:
    world = World(drifts=False)
    play(world, ["turn"])
    trajectory = builders.make(StrategySpec(strategy="per_request")).build(world.session())
    trajectory.traces[0].response_ids[0] += 1
    assert check(world.session(), trajectory, Options()) == [
        "trace 0: the ids of msg_0 are not those that were sampled"
    ]


def test_a_turn_cut_at_an_end_of_turn_that_it_spelled_is_reported() -> None:
    world = World(faithful=True)
    thread = [SYSTEM, {"role": "user", "content": "How does a turn end?"}]
    answer = {"role": "assistant", "content": f"With {END_TEXT} and a line feed."}
    world.ask(world.follow(thread, world.ask(thread, answer=answer)))
    builder = builders.make(StrategySpec(strategy="prefix_merging"))
    misled = builder.build(world.session(texts=("<another end>",)))
    violation = "trace 0: the turn before msg_1 is not closed by exactly one end of turn"
    assert violation in check(world.session(), misled, builder.options)


def test_a_trajectory_is_held_to_the_options_of_its_builder() -> None:
    world = World()
    play(world, ["turn", "title"])
    builder = builders.make(
        StrategySpec(strategy="per_request", config={"kinds": ["turn", "title"]})
    )
    trajectory = builder.build(world.session())
    assert check(world.session(), trajectory, builder.options) == []
    assert "trace 1: msg_1 is trained on and not eligible" in check(
        world.session(), trajectory, Options()
    )


def test_a_trajectory_without_statistics_is_refused() -> None:
    assert check(World().session(), Trajectory(), Options()) == [
        "metadata.reconstruction_stats is missing"
    ]


def test_two_completions_of_one_id_are_refused() -> None:
    world = World()
    play(world, ["turn", "turn"])
    world.completions[1].completion_id = world.completions[0].completion_id
    trajectory = builders.make(StrategySpec(strategy="per_request")).build(world.session())
    assert "session session-1 holds two completions of the same id" in check(
        world.session(), trajectory, Options()
    )


def test_a_trace_that_grew_too_long_by_drift_is_reported() -> None:
    world = World()
    thread = [SYSTEM, {"role": "user", "content": "Say much."}]
    last = world.ask(world.follow(thread, world.ask_at_length(thread)))
    trajectory = builders.make(StrategySpec(strategy="prefix_merging")).build(world.session())
    limit = len(last.context_ids)
    (violation,) = check(world.session(), trajectory, Options(max_tokens=limit))
    assert violation.endswith(f"tokens, more than {limit}")


def test_a_drifting_trace_is_reported_where_such_were_to_be_kept_apart() -> None:
    world = World()
    thread = [SYSTEM, {"role": "user", "content": "Say much."}]
    answer = {"role": "assistant", "content": "a long answer in many tokens"}
    world.ask(world.follow(thread, world.ask(thread, answer=answer)))
    trajectory = builders.make(StrategySpec(strategy="prefix_merging")).build(world.session())
    (violation,) = check(world.session(), trajectory, Options(split_on_drift=True))
    assert violation.endswith("and were to be kept apart")
