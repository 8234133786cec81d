"""What must hold for every session, over sessions made up at random."""

from collections import Counter
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import builders
from builders.base import StrategySpec
from builders.check import check
from builders.records import CompletionSession, Span, Trace, Trajectory
from tests.builders.world import ACTIONS, END_TEXT, World, decode, play
from tests.generated import examples

worlds = st.builds(
    World,
    seed=st.integers(0, 2**32),
    forgets_thinking=st.booleans(),
    drifts=st.booleans(),
    flat=st.booleans(),
    spells_ends=st.booleans(),
    composes=st.sampled_from([0.0, 0.7, 1.0]),
    keeps=st.booleans(),
)
sessions = st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=14)
strategies = st.sampled_from(sorted(builders.BUILDERS))
KINDS = [["turn", "compaction"], ["turn"], ["turn", "compaction", "title"]]
options = st.fixed_dictionaries(
    {
        "kinds": st.sampled_from(KINDS),
        "max_tokens": st.none() | st.integers(30, 400),
        "strict": st.lists(
            st.sampled_from(["budget_cut", "undelivered", "ambiguous_attachment"]), max_size=2
        ),
        "split_on_drift": st.booleans(),
    }
)


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


def spans(trace: Trace) -> list[Span]:
    return msgspec.convert(trace.metadata["spans"], list[Span])


def build(session: CompletionSession, strategy: str, config: dict[str, Any]) -> Trajectory:
    builder = builders.make(StrategySpec(strategy=strategy, config=config))
    trajectory = builder.build(session)
    assert check(session, trajectory, builder.options) == []
    return trajectory


@given(world=worlds, actions=sessions, ends=st.sampled_from([(2,), ()]), config=options)
@examples(150)
def test_all_builders_train_on_exactly_what_was_sampled_and_received(
    world: World, actions: list[str], ends: tuple[int, ...], config: dict[str, Any]
) -> None:
    play(world, actions)
    session = world.session(ends=ends)
    truth = Counter(
        pair
        for sample in world.samples
        for pair in list(zip(sample.sampled, sample.logprobs, strict=True))[
            : world.trainable(sample, **config)
        ]
    )
    sampled = sum(len(sample.sampled) for sample in world.samples)
    for name in builders.BUILDERS:
        trajectory = build(session, name, config)
        assert trained(trajectory) == truth
        stats = trajectory.metadata["reconstruction_stats"]
        left_out = sum(counts["tokens"] for counts in stats["left_out"].values())
        assert truth.total() + left_out == sampled


@given(world=worlds, actions=sessions, strategy=strategies, config=options)
@examples(150)
def test_every_token_stands_in_the_sampled_context_wherever_no_drift_is_counted(
    world: World, actions: list[str], strategy: str, config: dict[str, Any]
) -> None:
    play(world, actions)
    truth = {sample.completion_id: sample for sample in world.samples}
    trajectory = build(world.session(), strategy, config)
    for trace in trajectory.traces:
        assert len(trace.prompt_ids + trace.response_ids) <= (config["max_tokens"] or 10**6)
        if config["split_on_drift"] or strategy == "per_request":
            assert trace.metadata["context_drift"] == 0
        for span in spans(trace):
            sample = truth[span.completion_id]
            sampled = trace.response_ids[span.start : span.start + span.length]
            assert sampled == sample.sampled[: span.length]
            if trace.metadata["context_drift"] == 0:
                assert trace.prompt_ids + trace.response_ids[: span.start] == sample.prompt


@given(
    seed=st.integers(0, 2**32),
    forgets_thinking=st.booleans(),
    spells_ends=st.booleans(),
    actions=sessions,
    strategy=strategies,
    config=options,
)
@examples(100)
def test_prompts_composed_of_recorded_tokens_never_drift(
    seed: int,
    forgets_thinking: bool,
    spells_ends: bool,
    actions: list[str],
    strategy: str,
    config: dict[str, Any],
) -> None:
    world = World(
        seed, forgets_thinking=forgets_thinking, spells_ends=spells_ends, composes=1.0, keeps=True
    )
    play(world, actions)
    trajectory = build(world.session(), strategy, config)
    assert not any(trace.metadata["context_drift"] for trace in trajectory.traces)
    begun = trajectory.metadata["reconstruction_stats"].get("begun", {})
    assert not {"prompt_changed", "inner_end_of_turn", "no_end_of_turn"} & begun.keys()


@given(world=worlds, actions=sessions, config=options)
@examples(150)
def test_each_branch_shares_with_its_parent_what_it_masks(
    world: World, actions: list[str], config: dict[str, Any]
) -> None:
    play(world, actions)
    trajectory = build(world.session(), "lineage", config)
    ends = []
    for number, trace in enumerate(trajectory.traces):
        shared = [span.shared for span in spans(trace)]
        parent = trace.metadata["parent"]
        if any(shared):
            assert parent["trace"] < number
            other = trajectory.traces[parent["trace"]]
            whole, known = (t.prompt_ids + t.response_ids for t in (trace, other))
            assert whole[: parent["shared_tokens"]] == known[: parent["shared_tokens"]]
        ends.append((trace.metadata["completion_ids"][-1], spans(trace)[-1].shared))
    # A trace adds something to those before it: no two are the same branch.
    assert all(
        shared < spans(trajectory.traces[at])[-1].length for at, (_, shared) in enumerate(ends)
    )
    assert len({name for name, _ in ends}) == len(ends)


@given(
    seed=st.integers(0, 2**32),
    spells_ends=st.booleans(),
    texts=st.sampled_from([(), (END_TEXT,)]),
    actions=sessions,
    composes=st.sampled_from([0.0, 1.0]),
)
@examples(100)
def test_a_merged_context_has_the_sampled_ones_text_where_the_harness_echoes_verbatim(
    seed: int, spells_ends: bool, texts: tuple[str, ...], actions: list[str], composes: float
) -> None:
    world = World(
        seed, faithful=True, spells_ends=spells_ends, repeats_itself=False, composes=composes
    )
    play(world, actions)
    truth = {sample.completion_id: sample for sample in world.samples}
    for trace in build(world.session(texts=texts), "prefix_merging", {}).traces:
        for span in spans(trace):
            context = trace.prompt_ids + trace.response_ids[: span.start]
            assert decode(context) == decode(truth[span.completion_id].prompt)


@given(world=worlds, actions=sessions, strategy=strategies, config=options)
@examples(100)
def test_the_traces_survive_a_trip_through_json(
    world: World, actions: list[str], strategy: str, config: dict[str, Any]
) -> None:
    play(world, actions)
    session = world.session()
    builder = builders.make(StrategySpec(strategy=strategy, config=config))
    trajectory = builder.build(session)
    decoded = msgspec.json.decode(msgspec.json.encode(trajectory), type=Trajectory)
    assert check(session, decoded, builder.options) == []
    assert decoded == trajectory


@given(world=worlds, actions=sessions, strategy=st.sampled_from(["prefix_merging", "lineage"]))
@examples(100)
def test_a_chain_follows_the_answers_that_were_truly_continued(
    world: World, actions: list[str], strategy: str
) -> None:
    play(world, actions)
    trainable = {sample.completion_id for sample in world.samples if world.trainable(sample)}
    for trace in build(world.session(), strategy, {}).traces:
        for before, after in pairwise(trace.metadata["completion_ids"]):
            # Siblings that said the same in public, without a call, cannot be told apart; whatever
            # was taken for continued is marked.
            if (truth := world.truly_after.get(after)) in trainable:
                assert before == truth


@given(
    seed=st.integers(0, 2**32),
    actions=st.lists(
        st.sampled_from(["turn", "truncated", "retry", "half_delivered", "aborted"]), min_size=1
    ),
    drifts=st.booleans(),
    composes=st.sampled_from([0.0, 1.0]),
)
@examples(100)
def test_an_append_only_conversation_is_one_chain(
    seed: int, actions: list[str], drifts: bool, composes: float
) -> None:
    world = World(seed, drifts=drifts, repeats_itself=False, composes=composes)
    play(world, [*actions, "turn"])
    (trace,) = build(world.session(), "prefix_merging", {}).traces
    assert len(trace.metadata["completion_ids"]) == len(actions) + 1


@pytest.mark.parametrize("composes", [0.0, 1.0])
@given(
    seed=st.integers(0, 2**32), actions=st.lists(st.sampled_from(["turn", "sibling"]), min_size=1)
)
@examples(50)
def test_a_childless_sibling_is_a_chain_of_its_own(
    composes: float, seed: int, actions: list[str]
) -> None:
    world = World(seed, repeats_itself=False, composes=composes)
    play(world, actions)
    traces = build(world.session(), "prefix_merging", {}).traces
    lengths = [len(trace.metadata["completion_ids"]) for trace in traces]
    assert lengths == [1] * actions.count("sibling") + [len(actions)]
