import json
from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any

import builders
from builders.base import StrategySpec
from builders.check import check
from builders.records import Completion, CompletionSession, Trajectory
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
    return [
        Completion(
            completion_id=f"msg_{number}",
            index=number,
            tail=array("i", turn["prompt_token_ids"]),
            sampled_ids=array("i", turn["token_ids"]),
            logprobs=array("f", turn["logprobs"]),
            messages_tail=turn["messages"],
            tools=turn["tools"],
            response_message=turn["message"],
            finish_reason=turn["finish_reason"],
            stop_reason=turn["stop_reason"],
        )
        for number, turn in enumerate(turns)
    ]


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
    second = world.ask(thread, answer=said("two"))
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
    world.ask(THREAD, answer=answer)
    world.ask([*THREAD, said("yes"), {"role": "user", "content": "more"}], answer=said("done"))
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


def test_siblings_that_cannot_be_told_apart_give_way_to_the_latest_and_it_is_said() -> None:
    world = World(drifts=False)
    world.ask(THREAD, answer=said("same"))
    world.ask(THREAD, answer=said("same"))
    world.ask([*THREAD, said("same"), {"role": "user", "content": "more"}])
    trajectory = build(world.session())
    assert chains(trajectory) == [["msg_0"], ["msg_1", "msg_2"]]
    assert stats(trajectory)["ambiguous"] == 1
    assert [trace.metadata["ambiguous"] for trace in trajectory.traces] == [0, 1]


def test_the_harness_own_name_for_a_conversation_tells_equal_subagents_apart() -> None:
    world = World(drifts=False)
    for name in ("a", "b"):
        world.ask(THREAD, answer=said("same"), chain={"thread-id": name})
    thread = [*THREAD, said("same"), {"role": "user", "content": "more"}]
    world.ask(thread, chain={"thread-id": "a"})
    trajectory = build(world.session())
    assert chains(trajectory) == [["msg_1"], ["msg_0", "msg_2"]]
    assert stats(trajectory)["ambiguous"] == 0


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


def test_an_edited_answer_starts_a_chain() -> None:
    world = World()
    world.ask(THREAD, answer=said("yes"))
    world.ask([*THREAD, said("no"), {"role": "user", "content": "more"}])
    trajectory = build(world.session())
    assert len(trajectory.traces) == 2
    assert stats(trajectory)["begun"] == {"no_predecessor": 1, "answer_edited": 1}


def test_other_tools_or_another_system_prompt_start_a_chain() -> None:
    world = World()
    thread = world.follow(THREAD, world.ask(THREAD))
    world.ask([{"role": "system", "content": "Another."}, *thread[1:]])
    world.tools = None
    world.ask(thread)
    assert len(build(world.session()).traces) == 3


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
    world.ask([*THREAD, echoed, {"role": "user", "content": "resume"}])
    (trace,) = build(world.session()).traces
    end = len(cut.sampled_ids)
    assert (trace.response_ids[end], trace.loss_mask[end]) == (END, 0)


def test_a_completion_without_log_probabilities_becomes_masked_context() -> None:
    world = World(drifts=False)
    thread = THREAD
    for findings in ((), ("logprobs_missing",), ()):
        world.ask(thread, answer=said("on it"), findings=findings)
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
    last = world.ask([*thread, first.response_message, result])
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
    world.ask(THREAD, answer=said("one two"))
    thread = [*THREAD, said("one"), said("two"), {"role": "user", "content": "more"}]
    world.ask(thread)
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
    before = [(c.prompt_ids, c.sampled_ids[:], c.thread) for c in world.completions]
    build(world.session())
    assert [(c.prompt_ids, c.sampled_ids, c.thread) for c in world.completions] == before
