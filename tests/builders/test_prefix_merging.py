import json
from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any

import builders
from builders.base import StrategySpec
from builders.check import check
from builders.records import Completion, CompletionSession, Trajectory, VersionSpan
from tests.builders.world import END, END_TEXT, SYSTEM, Message, World, decode, play

THREAD: list[Message] = [SYSTEM, {"role": "user", "content": "fix it"}]
RECORDINGS = Path(__file__).parent / "recordings"


def build(session: CompletionSession, **config: Any) -> Trajectory:
    builder = builders.make(StrategySpec(strategy="prefix_merging", config=config))
    trajectory = builder.build(session)
    assert check(session, trajectory, builder.options) == []
    return trajectory


def chains(trajectory: Trajectory) -> list[list[str]]:
    return [trace.metadata["completion_ids"] for trace in trajectory.traces]


def stats(trajectory: Trajectory) -> dict[str, Any]:
    found = trajectory.metadata["reconstruction_stats"]
    assert isinstance(found, dict)
    return found


def said(text: str, **fields: Any) -> Message:
    return {"role": "assistant", "content": text, **fields}


def called(call_id: str, arguments: str = "{}") -> Message:
    function = {"name": "edit", "arguments": arguments}
    return said("", tool_calls=[{"id": call_id, "type": "function", "function": function}])


def recorded() -> list[Completion]:
    """Four turns of a real vLLM (a tiny model): sampled non-canonically, the last after a new user
    message, before which the template drops the earlier reasoning."""
    turns = json.loads((RECORDINGS / "vllm_four_turns.json").read_text())
    found: list[Completion] = []
    for number, turn in enumerate(turns):
        completion = Completion(
            completion_id=f"msg_{number}",
            index=number,
            previous=found[-1] if found else None,
            tail=array("i", turn["prompt_token_ids"]),
            sampled_ids=array("i", turn["token_ids"]),
            logprobs=array("f", turn["logprobs"]),
            messages_tail=turn["messages"],
            tools=turn["tools"],
            response_message=turn["message"],
            finish_reason=turn["finish_reason"],
            stop_reason=turn["stop_reason"],
        )
        found.append(completion)
    return found


def test_turns_recorded_from_vllm_merge_until_the_template_rewrites_the_prompt() -> None:
    turns = recorded()
    trajectory = build(CompletionSession(session_id="s", completions=turns, end_of_turn_ids=[4089]))
    assert chains(trajectory) == [["msg_3"], ["msg_0", "msg_1", "msg_2"]]
    assert stats(trajectory)["begun"] == {"no_predecessor": 1, "prompt_changed": 1}
    assert stats(trajectory)["context_drift"]["turns"] == 2
    merged = trajectory.traces[-1]
    # By hand: the sampled turns, and of each next prompt what follows its first end of turn.
    expected = turns[0].sampled_ids.tolist()
    for before, after in pairwise(turns[:3]):
        tail = after.prompt_ids.tolist()[before.prompt_length :]
        expected += tail[tail.index(4089) + 1 :] + after.sampled_ids.tolist()
    assert merged.response_ids == expected


def test_the_recorded_turns_merge_alike_when_the_end_of_turn_is_found_in_the_samples() -> None:
    known = CompletionSession(session_id="s", completions=recorded(), end_of_turn_ids=[4089])
    unknown = CompletionSession(session_id="s", completions=recorded())
    assert build(known).traces == build(unknown).traces
    assert stats(build(unknown))["end_of_turn_source"] == "detected"
    assert build(unknown, end_of_turn_ids=[4089]).traces == build(known).traces


def test_a_merged_trace_masks_exactly_what_the_harness_and_the_template_wrote() -> None:
    world = World(drifts=False)
    first = world.ask(THREAD, answer=said("one"))
    thread = [*THREAD, said("one"), {"role": "user", "content": "more"}]
    second = world.ask(thread, answer=said("two"), previous=first)
    (trace,) = build(world.session()).traces
    sampled = [sample.sampled for sample in world.samples]
    between = len(trace.response_ids) - sum(map(len, sampled))
    assert trace.loss_mask == [1] * len(sampled[0]) + [0] * between + [1] * len(sampled[1])
    assert trace.prompt_ids == world.samples[0].prompt
    assert trace.prompt_ids + trace.response_ids == second.context_ids.tolist()
    assert trace.response_logprobs is not None
    assert trace.response_logprobs[len(sampled[0]) :][:between] == [0.0] * between
    assert trace.prompt_messages == THREAD
    assert trace.response_messages == [said("one"), thread[-1], said("two")]
    assert trace.metadata["context_drift"] == 0
    assert [span["policy_version"] for span in trace.metadata["spans"]] == ["v0", "v0"]
    assert first.messages == THREAD


def test_the_messages_of_a_merged_trace_are_those_sampled_not_those_echoed() -> None:
    world = World()
    answer = said("yes ", reasoning_content="let me see")
    first = world.ask(THREAD, answer=answer)
    thread = [*THREAD, said("yes"), {"role": "user", "content": "more"}]
    world.ask(thread, answer=said("done"), previous=first)
    (trace,) = build(world.session()).traces
    assert trace.response_messages[0] == answer


def test_a_retry_that_nobody_received_is_left_out_and_the_chain_goes_on() -> None:
    world = World()
    play(world, ["turn", "retry", "turn"])
    trajectory = build(world.session())
    assert chains(trajectory) == [["msg_0", "msg_2", "msg_3"]]
    assert stats(trajectory)["left_out"]["undelivered"]["completions"] == 1


def test_siblings_never_join_each_other_and_the_continued_one_keeps_the_chain() -> None:
    for chosen in (0, 1):
        world = World()
        answers = [world.ask(THREAD, answer=called("a")), world.ask(THREAD, answer=called("b"))]
        world.ask(world.follow(THREAD, answers[chosen]))
        trajectory = build(world.session())
        assert chains(trajectory) == [[f"msg_{1 - chosen}"], [f"msg_{chosen}", "msg_2"]]
        assert stats(trajectory)["ambiguous"] == 0


def test_siblings_that_cannot_be_told_apart_are_marked() -> None:
    world = World(drifts=False)
    world.ask(THREAD, answer=said("same"))
    taken = world.ask(THREAD, answer=said("same"))
    thread = [*THREAD, said("same"), {"role": "user", "content": "more"}]
    world.ask(thread, previous=taken, ambiguous=True)
    trajectory = build(world.session())
    assert chains(trajectory) == [["msg_0"], ["msg_1", "msg_2"]]
    assert stats(trajectory)["ambiguous"] == 1
    assert [trace.metadata["ambiguous"] for trace in trajectory.traces] == [0, 1]
    assert [span.get("ambiguous") for span in trajectory.traces[1].metadata["spans"]] == [
        None,
        True,
    ]


def test_an_answer_with_the_tokens_of_a_longer_ones_beginning_is_not_followed() -> None:
    world = World(drifts=False, faithful=True)
    long = world.ask(THREAD, answer=said(f"so{END_TEXT}it goes"))
    world.ask(THREAD, answer=said("so"))
    world.ask(world.follow(THREAD, long))
    assert ["msg_1", "msg_2"] not in chains(build(world.session()))


def test_after_a_rewind_the_longer_line_keeps_the_chain() -> None:
    world = World()
    first = world.ask(THREAD, answer=called("a"))
    world.ask(world.follow(THREAD, first), answer=called("b"))
    thread = world.follow(THREAD, first)
    second = world.ask(thread, answer=called("c"))
    world.ask(world.follow(thread, second))
    trajectory = build(world.session())
    assert chains(trajectory) == [["msg_1"], ["msg_0", "msg_2", "msg_3"]]
    assert stats(trajectory)["begun"] == {"no_predecessor": 1, "branch": 1}


def test_a_request_that_continues_nothing_starts_a_chain_though_its_tokens_would_fit() -> None:
    world = World(drifts=False)
    world.ask(THREAD, answer=said("yes"))
    world.ask([*THREAD, said("yes"), {"role": "user", "content": "more"}])
    trajectory = build(world.session())
    assert len(trajectory.traces) == 2
    assert stats(trajectory)["begun"] == {"no_predecessor": 2}


def test_another_system_prompt_before_a_known_answer_starts_a_chain() -> None:
    world = World()
    first = world.ask(THREAD)
    thread = world.follow(THREAD, first)
    world.ask([{"role": "system", "content": "Another."}, *thread[1:]], previous=first)
    trajectory = build(world.session())
    assert stats(trajectory)["begun"] == {"no_predecessor": 1, "prompt_changed": 1}


def test_a_subagent_is_a_chain_of_its_own_and_the_agents_trace_is_the_last() -> None:
    world = World()
    thread = world.follow(THREAD, world.ask(THREAD, answer=said("one")))
    world.ask([{"role": "system", "content": "You help."}, {"role": "user", "content": "look"}])
    world.ask(thread)
    trajectory = build(world.session())
    assert chains(trajectory) == [["msg_1"], ["msg_0", "msg_2"]]
    assert [trace.metadata["main"] for trace in trajectory.traces] == [False, True]


def test_compaction_in_the_conversation_joins_it_and_what_follows_is_a_new_chain() -> None:
    world = World(drifts=False)
    play(world, ["turn", "turn", "compact", "turn"])
    trajectory = build(world.session())
    assert chains(trajectory) == [["msg_3"], ["msg_0", "msg_1", "msg_2"]]
    kinds = [span["kind"] for span in trajectory.traces[-1].metadata["spans"]]
    assert kinds == ["turn", "turn", "compaction"]


def test_kinds_of_the_config_decide_what_is_trained_on() -> None:
    world = World(drifts=False)
    play(world, ["turn", "compact", "title"])
    assert chains(build(world.session(), kinds=["turn"])) == [["msg_0"]]
    assert len(build(world.session(), kinds=["turn", "title"]).traces) == 2


def test_a_truncated_turn_is_closed_by_a_masked_token() -> None:
    world = World(drifts=False)
    cut = world.ask(THREAD, answer=said("a long answer"), truncated=True)
    echoed = cut.response_message
    world.ask([*THREAD, echoed, {"role": "user", "content": "resume"}], previous=cut)
    (trace,) = build(world.session()).traces
    end = len(cut.sampled_ids)
    assert (trace.response_ids[end], trace.loss_mask[end]) == (END, 0)


def test_a_completion_without_log_probabilities_becomes_masked_context() -> None:
    world = World(drifts=False)
    thread, last = THREAD, None
    for findings in ((), ("logprobs_missing",), ()):
        last = world.ask(thread, answer=said("on it"), findings=findings, previous=last)
        thread = [*thread, said("on it"), {"role": "user", "content": "more"}]
    trajectory = build(world.session())
    assert chains(trajectory) == [["msg_0", "msg_2"]]
    assert stats(trajectory)["left_out"] == {
        "logprobs_missing": {"completions": 1, "tokens": len(world.samples[1].sampled)}
    }
    (trace,) = trajectory.traces
    assert trace.prompt_ids + trace.response_ids == world.completions[2].context_ids.tolist()


def test_without_a_known_end_of_turn_only_what_was_rendered_as_sampled_merges() -> None:
    exact, drifting = World(drifts=False), World(drifts=True)
    for world in (exact, drifting):
        first = world.ask(THREAD, answer=said("a long answer in many tokens"))
        world.ask(world.follow(THREAD, first), truncated=True)
    assert len(build(exact.session(ends=())).traces) == 1
    trajectory = build(drifting.session(ends=()))
    assert stats(trajectory)["begun"] == {"no_predecessor": 1, "no_end_of_turn": 1}
    assert stats(trajectory)["end_of_turn_source"] == "unknown"


def test_a_turn_that_spells_the_end_of_a_turn_is_not_followed_in_its_trace() -> None:
    for more in (said("It is <|im_end|>."), called("a", '{"text": "\\u003c|im_end|>"}')):
        world = World(faithful=True)
        world.ask(world.follow(THREAD, world.ask(THREAD, answer=more)), answer=said("done"))
        trajectory = build(world.session())
        assert chains(trajectory) == [["msg_1"], ["msg_0"]]
        assert stats(trajectory)["begun"] == {"no_predecessor": 1, "inner_end_of_turn": 1}


def test_an_end_of_turn_spelled_by_the_user_or_a_tool_keeps_nothing_apart() -> None:
    world = World(faithful=True)
    thread = [*THREAD, {"role": "user", "content": "and what of <|im_end|>?"}]
    first = world.ask(thread, answer=called("a"))
    result = {"role": "tool", "tool_call_id": "a", "content": "x <|im_end|> y"}
    last = world.ask([*thread, first.response_message, result], previous=first)
    (trace,) = build(world.session()).traces
    start = trace.metadata["spans"][1]["start"]
    context = trace.prompt_ids + trace.response_ids[:start]
    assert decode(context) == decode(last.prompt_ids.tolist())


def test_a_spelled_marker_keeps_nothing_apart_where_the_engine_closes_turns_by_another() -> None:
    world = World(faithful=True)
    answer = said("Strike it: <s>so</s>.")
    world.ask(world.follow(THREAD, world.ask(THREAD, answer=answer)))
    assert len(build(world.session()).traces) == 2
    assert len(build(world.session(texts=(END_TEXT,))).traces) == 1


def test_an_answer_echoed_in_two_messages_merges_only_as_it_was_sampled() -> None:
    world = World()
    first = world.ask(THREAD, answer=said("one two"))
    thread = [*THREAD, said("one"), said("two"), {"role": "user", "content": "more"}]
    world.ask(thread, previous=first)
    assert stats(build(world.session()))["begun"] == {"no_predecessor": 1, "inner_end_of_turn": 1}


def test_completions_without_messages_stand_alone() -> None:
    world = World(flat=True)
    world.ask(THREAD, messages_tail=[])
    world.ask(THREAD, messages_tail=[])
    assert len(build(world.session()).traces) == 2


def test_nothing_is_built_of_nothing() -> None:
    trajectory = build(World().session())
    assert trajectory.traces == []
    assert stats(trajectory)["chains"] == 0


def test_the_completions_are_left_as_they_were() -> None:
    world = World()
    play(world, ["turn", "truncated", "fork", "turn"])
    before = [(c.prompt_ids, c.sampled_ids[:], c.messages) for c in world.completions]
    build(world.session())
    assert [(c.prompt_ids, c.sampled_ids, c.messages) for c in world.completions] == before


def test_of_a_half_delivered_answer_what_was_continued_is_trained_and_the_rest_left_out() -> None:
    world = World(drifts=False)
    cut = world.ask(THREAD, answer=said("a long answer in many tokens"), delivered=False)
    world.ask(world.follow(THREAD, cut, heard=5))
    trajectory = build(world.session())
    (trace,) = trajectory.traces
    rest = len(cut.sampled_ids) - 5
    assert stats(trajectory)["left_out"] == {"undelivered": {"completions": 1, "tokens": rest}}
    first, _ = trace.metadata["spans"]
    assert (first["length"], first["sampled"], first["delivered"]) == (5, rest + 5, False)
    # The template closes the turn that the harness has: masked.
    assert trace.response_ids[:6] == [*cut.sampled_ids[:5], END]
    assert trace.loss_mask[:6] == [1, 1, 1, 1, 1, 0]
    assert trace.response_messages[0] == said("a long ans")


def test_of_two_that_go_on_from_parts_of_an_answer_the_longer_part_keeps_the_chain() -> None:
    world = World(drifts=False)
    cut = world.ask(THREAD, answer=said("a long answer in many tokens"), delivered=False)
    less = world.follow(THREAD, cut, heard=3)
    less = world.follow(less, world.ask(less))
    world.ask(world.follow(THREAD, cut, heard=7))
    world.ask(less)
    trajectory = build(world.session())
    assert chains(trajectory) == [["msg_0", "msg_2"], ["msg_1", "msg_3"]]
    assert trajectory.traces[0].metadata["spans"][0]["length"] == 7
    assert stats(trajectory)["begun"] == {"no_predecessor": 1, "branch": 1}


def test_a_request_that_may_have_continued_another_proves_no_delivery() -> None:
    world = World(drifts=False)
    lost = world.ask(THREAD, answer=said("same"), delivered=False)
    thread = [*THREAD, said("same"), {"role": "user", "content": "more"}]
    world.ask(thread, previous=lost, ambiguous=True)
    trajectory = build(world.session())
    assert chains(trajectory) == [["msg_1"]]
    assert stats(trajectory)["begun"] == {"previous_left_out": 1}


def test_a_prompt_composed_of_other_tokens_than_were_recorded_starts_a_chain() -> None:
    world = World()
    first = world.ask(THREAD, answer=said("a long answer in many tokens"))
    world.ask(world.follow(THREAD, first), mode="tokens")
    assert stats(build(world.session()))["begun"] == {"no_predecessor": 1, "prompt_changed": 1}


def test_a_trace_is_cut_to_what_fits_and_says_what_was_cut() -> None:
    world = World(drifts=False)
    first = world.ask(THREAD, answer=said("a long answer in many tokens"))
    second = world.ask(world.follow(THREAD, first))
    limit = first.prompt_length + 4
    trajectory = build(world.session(), max_tokens=limit)
    (trace,) = trajectory.traces
    assert len(trace.prompt_ids + trace.response_ids) == limit
    assert trace.finish_reason == "length"
    cut = len(first.sampled_ids) - 4 + len(second.sampled_ids)
    assert trace.metadata["max_tokens_cut"] == cut
    assert stats(trajectory)["left_out"] == {"max_tokens": {"completions": 2, "tokens": cut}}
    assert build(world.session(), max_tokens=first.prompt_length).traces == []


def test_a_merged_trace_that_outgrows_the_limit_by_drift_is_split_and_nothing_is_lost() -> None:
    world = World()
    first = world.ask_at_length(THREAD)
    second = world.ask(world.follow(THREAD, first))
    limit = len(second.context_ids)
    trajectory = build(world.session(), max_tokens=limit)
    assert stats(trajectory)["begun"] == {"no_predecessor": 1, "max_tokens": 1}
    assert stats(trajectory)["left_out"] == {}


def test_split_on_drift_keeps_apart_what_was_rendered_otherwise() -> None:
    world = World()
    first = world.ask(THREAD, answer=said("a long answer in many tokens"))
    world.ask(world.follow(THREAD, first))
    assert len(build(world.session()).traces) == 1
    assert stats(build(world.session(), split_on_drift=True))["begun"] == {
        "no_predecessor": 1,
        "drift": 1,
    }


def test_a_trace_tells_where_each_run_of_tokens_comes_from() -> None:
    world = World(drifts=False)
    first = world.ask(THREAD, backend="a", usage={"cached_tokens": 3}, started_at=1.0, ended_at=2.0)
    swap = [VersionSpan(version="5", start=0, end=2), VersionSpan(version="6", start=2, end=6)]
    world.ask(
        world.follow(THREAD, first),
        answer=said("six it is"),
        versions=swap,
        asked={"tool_choice": "auto"},
        ended_at=4.0,
    )
    (trace,) = build(world.session(group_id="g", repetition_index=2)).traces
    told, then = trace.metadata["spans"]
    assert (told["backend"], told["usage"], told["started_at"]) == ("a", {"cached_tokens": 3}, 1.0)
    assert (told["logprob_kind"], told["sampling"]) == ("processed", {"temperature": 1.0})
    assert (then["previous"], then["attached"]) == ("msg_0", "exact")
    assert then["versions"][1] == {"version": "6", "start": 2, "end": 6}
    assert then["asked"] == {"tool_choice": "auto"}
    metadata = trace.metadata
    assert metadata["policy_versions"] == {"start": "v0", "end": "6"}
    assert (metadata["group_id"], metadata["repetition_index"]) == ("g", 2)
    assert (metadata["started_at"], metadata["ended_at"], metadata["asked"]) == (1.0, 4.0, {})
    assert (metadata["trainable"], metadata["mask_reason"]) == (True, None)
    assert (metadata["begun"], metadata["parent"]) == ("no_predecessor", None)


def test_a_branch_names_the_trace_and_the_answer_that_it_goes_on_from() -> None:
    world = World()
    first = world.ask(THREAD, answer=called("a"))
    world.ask(world.follow(THREAD, first), answer=called("b"))
    thread = world.follow(THREAD, first)
    world.ask(world.follow(thread, world.ask(thread, answer=called("c"))))
    branch, _ = build(world.session()).traces
    assert branch.metadata["begun"] == "branch"
    assert branch.metadata["parent"] == {"trace": 1, "completion_id": "msg_0", "shared_tokens": 0}
