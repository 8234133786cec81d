"""What must hold for every session, over sessions made up at random."""

from collections import Counter
from itertools import pairwise

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

import builders
from builders.base import StrategySpec
from builders.check import check
from builders.records import Trace, Trajectory
from tests.builders.world import ACTIONS, END_TEXT, World, decode, play

worlds = st.builds(
    World,
    seed=st.integers(0, 2**32),
    forgets_thinking=st.booleans(),
    drifts=st.booleans(),
    flat=st.booleans(),
    spells_ends=st.booleans(),
)
sessions = st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=14)


def trained(trajectory: Trajectory) -> Counter[tuple[int, float]]:
    """Every trainable token with its log probability."""
    return Counter(
        (token, logprob)
        for trace in trajectory.traces
        for token, mask, logprob in zip(
            trace.response_ids, trace.loss_mask, trace.response_logprobs or [], strict=True
        )
        if mask
    )


def spans(trace: Trace) -> list[tuple[str, int, int]]:
    return [
        (span["completion_id"], span["start"], span["length"]) for span in trace.metadata["spans"]
    ]


@given(world=worlds, actions=sessions, ends=st.sampled_from([(2,), ()]))
@settings(deadline=None, max_examples=100)
def test_both_builders_train_on_exactly_what_was_sampled_and_delivered(
    world: World, actions: list[str], ends: tuple[int, ...]
) -> None:
    play(world, actions)
    session = world.session(ends=ends)
    truth = Counter(
        pair
        for sample in world.samples
        if sample.trainable
        for pair in zip(sample.sampled, sample.logprobs, strict=True)
    )
    for name in builders.BUILDERS:
        builder = builders.make(StrategySpec(strategy=name))
        trajectory = builder.build(session)
        assert check(session, trajectory, builder.options) == []
        assert trained(trajectory) == truth


@given(world=worlds, actions=sessions)
@settings(deadline=None, max_examples=100)
def test_a_merged_context_is_the_sampled_one_wherever_no_drift_is_counted(
    world: World, actions: list[str]
) -> None:
    play(world, actions)
    truth = {sample.completion_id: sample for sample in world.samples}
    trajectory = builders.make(StrategySpec(strategy="prefix_merging")).build(world.session())
    for trace in trajectory.traces:
        for completion_id, start, length in spans(trace):
            sample = truth[completion_id]
            assert trace.response_ids[start : start + length] == sample.sampled
            if trace.metadata["context_drift"] == 0:
                assert trace.prompt_ids + trace.response_ids[:start] == sample.prompt


@given(
    seed=st.integers(0, 2**32),
    spells_ends=st.booleans(),
    texts=st.sampled_from([(), (END_TEXT,)]),
    actions=sessions,
)
@settings(deadline=None, max_examples=100)
def test_a_merged_context_has_the_sampled_ones_text_where_the_harness_echoes_verbatim(
    seed: int, spells_ends: bool, texts: tuple[str, ...], actions: list[str]
) -> None:
    world = World(seed, faithful=True, spells_ends=spells_ends, repeats_itself=False)
    play(world, actions)
    truth = {sample.completion_id: sample for sample in world.samples}
    session = world.session(texts=texts)
    trajectory = builders.make(StrategySpec(strategy="prefix_merging")).build(session)
    for trace in trajectory.traces:
        for completion_id, start, _ in spans(trace):
            context = trace.prompt_ids + trace.response_ids[:start]
            assert decode(context) == decode(truth[completion_id].prompt)


@given(world=worlds, actions=sessions)
@settings(deadline=None, max_examples=50)
def test_the_traces_survive_a_trip_through_json(world: World, actions: list[str]) -> None:
    play(world, actions)
    session = world.session()
    builder = builders.make(StrategySpec(strategy="prefix_merging"))
    trajectory = builder.build(session)
    decoded = msgspec.json.decode(msgspec.json.encode(trajectory), type=Trajectory)
    assert check(session, decoded, builder.options) == []
    assert decoded == trajectory


@given(world=worlds, actions=sessions)
@settings(deadline=None, max_examples=100)
def test_a_chain_follows_the_answers_that_were_truly_continued(
    world: World, actions: list[str]
) -> None:
    play(world, actions)
    trainable = {sample.completion_id for sample in world.samples if sample.trainable}
    calls = {completion.completion_id: completion for completion in world.completions}
    # Rendered again, a text that spells the end of a turn begins with the very tokens of one that
    # ended there: up to it the two are the same to whoever goes by tokens.
    visible = {
        name: {
            **completion.response_message,
            "reasoning_content": None,
            "content": (completion.response_message.get("content") or "").partition("<|im_end|>")[
                0
            ],
        }
        for name, completion in calls.items()
    }
    trajectory = builders.make(StrategySpec(strategy="prefix_merging")).build(world.session())
    for trace in trajectory.traces:
        for before, after in pairwise(trace.metadata["completion_ids"]):
            truth = world.truly_after.get(after)
            if truth in trainable and calls[truth].tools == calls[after].tools:
                # Siblings that said the same in public, without a call, cannot be told apart.
                assert before == truth or visible[before] == visible[truth]


@given(
    seed=st.integers(0, 2**32),
    actions=st.lists(st.sampled_from(["turn", "truncated", "retry", "sibling"]), min_size=1),
    drifts=st.booleans(),
)
@settings(deadline=None, max_examples=100)
def test_an_append_only_conversation_is_one_chain_beside_its_childless_siblings(
    seed: int, actions: list[str], drifts: bool
) -> None:
    world = World(seed, drifts=drifts, repeats_itself=False)
    play(world, actions)
    trajectory = builders.make(StrategySpec(strategy="prefix_merging")).build(world.session())
    assert len(trajectory.traces) == 1 + actions.count("sibling")
    childless = [trace.metadata["completion_ids"] for trace in trajectory.traces[:-1]]
    assert [len(ids) for ids in childless] == [1] * len(childless)
    assert len(trajectory.traces[-1].metadata["completion_ids"]) == len(actions)
