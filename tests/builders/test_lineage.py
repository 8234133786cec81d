from typing import Any

import builders
from builders.base import StrategySpec
from builders.check import check
from builders.records import CompletionSession, Trajectory
from tests.builders.world import SYSTEM, Message, World, play

THREAD: list[Message] = [SYSTEM, {"role": "user", "content": "fix it"}]


def build(session: CompletionSession, **config: Any) -> Trajectory:
    builder = builders.make(StrategySpec(strategy="lineage", config=config))
    trajectory = builder.build(session)
    assert check(session, trajectory, builder.options) == []
    return trajectory


def branches(trajectory: Trajectory) -> list[list[str]]:
    return [trace.metadata["completion_ids"] for trace in trajectory.traces]


def called(call_id: str) -> Message:
    function = {"name": "edit", "arguments": "{}"}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def test_a_conversation_without_branches_is_one_trace_as_prefix_merging_makes_it() -> None:
    world = World()
    play(world, ["turn", "truncated", "turn"])
    merged = builders.make(StrategySpec(strategy="prefix_merging")).build(world.session())
    (trace,) = build(world.session()).traces
    (other,) = merged.traces
    trace.metadata["builder"] = "prefix_merging"
    assert trace == other


def test_each_branch_has_its_whole_context_and_what_they_share_is_trained_once() -> None:
    world = World(drifts=False, faithful=True)
    first = world.ask(THREAD, answer=called("a"))
    side = world.ask(world.follow(THREAD, first), answer=called("b"))
    thread = world.follow(THREAD, first)
    second = world.ask(thread, answer=called("c"))
    last = world.ask(world.follow(thread, second), answer=called("d"))
    trajectory = build(world.session())
    assert branches(trajectory) == [["msg_0", "msg_1"], ["msg_0", "msg_2", "msg_3"]]
    short, main = trajectory.traces
    assert short.prompt_ids + short.response_ids == side.context_ids.tolist()
    assert main.prompt_ids + main.response_ids == last.context_ids.tolist()
    own = len(first.sampled_ids)
    assert short.loss_mask[:own] == [1] * own
    assert main.loss_mask[:own] == [0] * own
    assert (main.response_logprobs or [])[:own] == [0.0] * own
    assert [span.get("shared", 0) for span in main.metadata["spans"]] == [own, 0, 0]
    assert main.metadata["begun"] == "branch"
    assert main.metadata["parent"] == {
        "trace": 0,
        "completion_id": "msg_0",
        "shared_tokens": len(first.context_ids),
    }
    assert short.metadata["parent"] is None
    assert main.metadata["main"]


def test_the_parent_is_the_branch_with_which_most_is_shared() -> None:
    world = World(drifts=False)
    first = world.ask(THREAD, answer=called("a"))
    world.ask(world.follow(THREAD, first), answer=called("b"))
    thread = world.follow(THREAD, first)
    second = world.ask(thread, answer=called("c"))
    world.ask(world.follow(thread, second), answer=called("d"))
    world.ask(world.follow(thread, second), answer=called("e"))
    trajectory = build(world.session())
    # Of the two longest lines the earlier is the main one, and last.
    assert branches(trajectory) == [
        ["msg_0", "msg_1"],
        ["msg_0", "msg_2", "msg_4"],
        ["msg_0", "msg_2", "msg_3"],
    ]
    parents = [(trace.metadata["parent"] or {}).get("trace") for trace in trajectory.traces]
    assert parents == [None, 0, 1]


def test_siblings_are_roots_of_their_own() -> None:
    world = World()
    play(world, ["fork", "turn"])
    trajectory = build(world.session())
    assert [trace.metadata["parent"] for trace in trajectory.traces] == [None, None]


def test_lines_from_different_parts_of_an_answer_train_each_its_own_part() -> None:
    world = World(drifts=False)
    answer = {"role": "assistant", "content": "a long answer in many tokens"}
    cut = world.ask(THREAD, answer=answer, delivered=False)
    world.ask(world.follow(THREAD, cut, heard=3))
    longer = world.follow(THREAD, cut, heard=7)
    world.ask(world.follow(longer, world.ask(longer)))
    short, main = build(world.session()).traces
    assert short.metadata["spans"][0]["length"] == 3
    told = main.metadata["spans"][0]
    assert (told["length"], told["shared"]) == (7, 3)
    assert short.loss_mask[:3] == [1, 1, 1]
    assert main.loss_mask[:7] == [0, 0, 0, 1, 1, 1, 1]


def test_an_answer_continued_in_part_alone_ends_a_branch_of_its_own() -> None:
    world = World(drifts=False)
    answer = {"role": "assistant", "content": "a long answer in many tokens"}
    whole = world.ask(THREAD, answer=answer)
    world.ask(world.follow(THREAD, whole, heard=3))
    trajectory = build(world.session())
    assert branches(trajectory) == [["msg_0"], ["msg_0", "msg_1"]]
    assert trajectory.traces[1].metadata["spans"][0]["shared"] == 3


def test_what_keeps_a_request_from_joining_makes_it_a_root_that_names_its_parent() -> None:
    world = World()
    answer = {"role": "assistant", "content": "a long answer in many tokens"}
    first = world.ask(THREAD, answer=answer)
    world.ask(world.follow(THREAD, first))
    trajectory = build(world.session(), split_on_drift=True)
    assert branches(trajectory) == [["msg_1"], ["msg_0"]] or branches(trajectory) == [
        ["msg_0"],
        ["msg_1"],
    ]
    later = next(t for t in trajectory.traces if t.metadata["completion_ids"] == ["msg_1"])
    assert later.metadata["begun"] == "drift"
    assert later.metadata["parent"]["completion_id"] == "msg_0"
    assert later.metadata["parent"]["shared_tokens"] == 0


def test_a_branch_that_outgrows_the_limit_by_drift_begins_anew() -> None:
    world = World()
    first = world.ask_at_length(THREAD)
    second = world.ask(world.follow(THREAD, first))
    (whole,) = build(world.session()).traces
    needed, canonical = len(whole.prompt_ids + whole.response_ids), len(second.context_ids)
    assert needed > canonical
    assert len(build(world.session(), max_tokens=needed).traces) == 1
    trajectory = build(world.session(), max_tokens=needed - 1)
    assert [trace.metadata["begun"] for trace in trajectory.traces] == [
        "max_tokens",
        "no_predecessor",
    ]
    assert trajectory.metadata["reconstruction_stats"]["left_out"] == {}
