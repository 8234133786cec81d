"""From calls to traces, the whole of it, held against what the engine and the harness know.

Sessions made up at random go through the real capture, the real composing of prompts, the journal
and every builder.
"""

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from hypothesis import given
from hypothesis import strategies as st

import builders
from builders.base import StrategySpec
from builders.check import check
from builders.records import CompletionSession, Span, Trace, Trajectory
from polar_gateway.capture.reading import read_session
from tests.builders.world import END, END_TEXT, World, decode, render
from tests.generated import examples
from tests.polar_gateway.token_world import ACTIONS, Answered, CapturedWorld, play


class Setting(NamedTuple):
    """How one session's harness and engine are."""

    seed: int
    forgets_thinking: bool
    spells_ends: bool
    repeats_itself: bool
    prompts: Any
    history: Any
    renders: Any
    deaf: float
    refers: bool
    counts_calls: bool

    @contextmanager
    def world(self, *, faithful: bool = False) -> Iterator[CapturedWorld]:
        words = World(
            self.seed,
            forgets_thinking=self.forgets_thinking,
            spells_ends=self.spells_ends,
            repeats_itself=self.repeats_itself,
            faithful=faithful,
        )
        with tempfile.TemporaryDirectory() as folder:
            yield CapturedWorld(
                words,
                Path(folder),
                prompts=self.prompts,
                history=self.history,
                renders=self.renders,
                deaf=self.deaf,
                refers=self.refers,
                counts_calls=self.counts_calls,
            )


def ways(**fixed: Any) -> st.SearchStrategy[Setting]:
    chosen = {
        "seed": st.integers(0, 2**32),
        "forgets_thinking": st.booleans(),
        "spells_ends": st.booleans(),
        "repeats_itself": st.booleans(),
        "prompts": st.sampled_from(["messages", "tokens"]),
        "history": st.sampled_from(["template", "keep"]),
        "renders": st.sampled_from(["full", "full", "suffix"]),
        "deaf": st.sampled_from([0.0, 0.0, 0.3]),
        "refers": st.booleans(),
        "counts_calls": st.booleans(),
    }
    return st.builds(Setting, **{**chosen, **{key: st.just(to) for key, to in fixed.items()}})


sessions = st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=14)
options = st.fixed_dictionaries(
    {"split_on_drift": st.booleans(), "max_tokens": st.none() | st.integers(100, 800)}
)


def build(session: CompletionSession, strategy: str, config: dict[str, Any]) -> Trajectory:
    builder = builders.make(StrategySpec(strategy=strategy, config=config))
    trajectory = builder.build(session)
    assert check(session, trajectory, builder.options) == []
    return trajectory


def spans(trace: Trace) -> list[Span]:
    return msgspec.convert(trace.metadata["spans"], list[Span])


def received(world: CapturedWorld, session: CompletionSession) -> dict[str, int]:
    """Completion -> how many of its sampled tokens the harness has shown that it received."""
    heard = {
        name: len(answer.sampled) if answer.delivered else 0
        for name, answer in world.answers.items()
    }
    for completion in session.completions:
        mark = world.continues[completion.completion_id]
        if mark is not None and completion.previous is not None and not completion.ambiguous:
            name = mark.answer.completion_id
            told = len(mark.answer.sampled) if mark.continued is None else mark.continued
            heard[name] = max(heard[name], told)
    return heard


@given(way=ways(), actions=sessions, config=options)
@examples(60)
def test_every_builder_trains_on_what_the_engine_sampled_and_the_harness_received(
    way: Setting, actions: list[str], config: dict[str, Any]
) -> None:
    with way.world() as world:
        play(world, actions)
        session = world.capture.completion_session()
    truth: Counter[tuple[int, float]] = Counter()
    heard = received(world, session)
    for completion in session.completions:
        answer = world.answers[completion.completion_id]
        trainable = heard[completion.completion_id] if answer.sound else 0
        if completion.kind == "title":
            trainable = 0
        if config["max_tokens"] is not None:
            trainable = min(trainable, max(0, config["max_tokens"] - len(answer.prompt)))
        truth += Counter(zip(answer.sampled[:trainable], answer.logprobs[:trainable], strict=True))
    for strategy in builders.BUILDERS:
        trajectory = build(session, strategy, config)
        trained: Counter[tuple[int, float]] = Counter()
        for trace in trajectory.traces:
            triples = zip(
                trace.response_ids, trace.loss_mask, trace.response_logprobs or [], strict=True
            )
            trained += Counter((token, logprob) for token, mask, logprob in triples if mask)
        assert trained == truth
        left_out = trajectory.metadata["reconstruction_stats"]["left_out"].values()
        sampled = sum(len(answer.sampled) for answer in world.answers.values())
        assert truth.total() + sum(counts["tokens"] for counts in left_out) == sampled


@given(way=ways(), actions=sessions, config=options)
@examples(60)
def test_drift_is_counted_exactly_where_a_token_was_sampled_in_another_context(
    way: Setting, actions: list[str], config: dict[str, Any]
) -> None:
    with way.world() as world:
        play(world, actions)
        session = world.capture.completion_session()
    for completion in session.completions:
        assert completion.prompt_ids.tolist() == world.answers[completion.completion_id].prompt
    for strategy in builders.BUILDERS:
        for trace in build(session, strategy, config).traces:
            same = []
            for span in spans(trace):
                answer = world.answers[span.completion_id]
                sampled = trace.response_ids[span.start : span.start + span.length]
                assert sampled == answer.sampled[: span.length]
                same.append(trace.prompt_ids + trace.response_ids[: span.start] == answer.prompt)
            assert (trace.metadata["context_drift"] == 0) == all(same)


@given(way=ways(prompts="tokens"), actions=sessions)
@examples(60)
def test_a_prompt_sent_as_tokens_is_the_record_and_then_what_the_messages_add_to_it(
    way: Setting, actions: list[str]
) -> None:
    with way.world() as world:
        play(world, actions)
        session = world.capture.completion_session()
    for completion in session.completions:
        if completion.mode != "tokens":
            continue
        answer = world.answers[completion.completion_id]
        before = completion.previous
        assert before is not None
        known = world.answers[before.completion_id]
        context = known.prompt + known.sampled[: completion.continued_tokens]
        assert answer.prompt[: len(context)] == context
        mark = world.continues[completion.completion_id]
        assert mark is not None
        new = answer.request.messages[mark.messages :]
        added = decode(render(new, None, forgets_thinking=way.forgets_thinking))
        ended = context[:-1] if context[-1] == END else context
        assert decode(answer.prompt) == f"{decode(ended)}{END_TEXT}\n{added}"


@given(way=ways(), actions=sessions)
@examples(100)
def test_a_request_is_attached_to_the_answer_that_it_goes_on_from_or_marked_as_ambiguous(
    way: Setting, actions: list[str]
) -> None:
    with way.world() as world:
        play(world, actions)
        session = world.capture.completion_session()
    for completion in session.completions:
        truth, previous = world.continues[completion.completion_id], completion.previous
        if truth is None:
            assert previous is None
        elif not completion.ambiguous:
            assert previous is not None
            assert previous.completion_id == truth.answer.completion_id
            assert completion.continued_tokens == truth.continued
        if truth is not None and (way.refers or told_apart(truth.answer, world)):
            assert not completion.ambiguous


def told_apart(answer: Answered, world: CapturedWorld) -> bool:
    """Whether no other answer of the session reads like this one."""

    def words(of: Answered) -> Any:
        calls = [call["id"] for call in of.message.get("tool_calls", ())]
        return of.message["content"].strip(), calls

    return sum(words(answer) == words(other) for other in world.answers.values()) == 1


@given(way=ways(), actions=sessions, share=st.floats(0, 1))
@examples(60)
def test_a_gateway_killed_at_any_byte_leaves_every_call_whose_record_was_written(
    way: Setting, actions: list[str], share: float
) -> None:
    with way.world() as world:
        play(world, actions)
        data = world.journal.read_bytes()
        at = int(len(data) * share)
        world.journal.write_bytes(data[:at])
        session = read_session(world.journal)
    there = {completion.completion_id: completion for completion in session.completions}
    for name, answer in world.answers.items():
        if answer.durable <= at:
            assert there[name].prompt_ids.tolist() == answer.prompt
            assert there[name].sampled_ids.tolist() == answer.sampled
            assert there[name].delivered == answer.delivered
    for name, completion in there.items():
        sampled = completion.sampled_ids.tolist()
        assert sampled == world.answers[name].sampled[: len(sampled)]
    for strategy in builders.BUILDERS:
        build(session, strategy, {})


@given(way=ways(), actions=sessions, in_flight=st.integers(0, 2))
@examples(50)
def test_a_sealed_session_reads_back_from_its_journal_as_it_was(
    way: Setting, actions: list[str], in_flight: int
) -> None:
    with way.world() as world:
        play(world, [*actions, *["open"] * in_flight])
        world.capture.seal()
        live = world.capture.completion_session()
        read = read_session(world.journal)
    assert [plain(completion) for completion in live.completions] == [
        plain(completion) for completion in read.completions
    ]
    assert live.findings == read.findings
    for strategy in builders.BUILDERS:
        assert build(live, strategy, {}) == build(read, strategy, {})


def plain(completion: Any) -> dict[str, Any]:
    """A completion's fields, others named by their ids."""
    fields = {name: getattr(completion, name) for name in completion.__struct_fields__}
    for name in ("parent", "previous"):
        fields[name] = fields[name] and fields[name].completion_id
    return fields


@given(
    way=ways(
        forgets_thinking=False,
        spells_ends=False,
        repeats_itself=False,
        renders="full",
        deaf=0.0,
        counts_calls=True,
    ),
    actions=st.lists(st.sampled_from(["turn", "cut", "ended_otherwise", "retry"]), min_size=1),
)
@examples(50)
def test_a_conversation_that_only_grows_is_one_chain_in_either_mode(
    way: Setting, actions: list[str]
) -> None:
    with way.world() as world:
        play(world, actions)
        session = world.capture.completion_session()
    (trace,) = build(session, "prefix_merging", {}).traces
    assert len(trace.metadata["completion_ids"]) == len(actions)
    if way.prompts == "tokens":
        assert [completion.mode for completion in session.completions[1:]].count(
            "messages"
        ) <= actions.count("retry")
        assert trace.metadata["context_drift"] == 0
