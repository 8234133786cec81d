import builders
from builders.base import StrategySpec
from builders.records import CompletionSession, Trajectory
from tests.builders.world import SYSTEM, World, play

THREAD = [SYSTEM, {"role": "user", "content": "fix it"}]


def build(session: CompletionSession) -> Trajectory:
    return builders.make(StrategySpec(strategy="per_request")).build(session)


def test_every_eligible_completion_is_one_trace_in_order_of_arrival() -> None:
    world = World()
    play(world, ["turn", "title", "retry", "turn"])
    trajectory = build(world.session())
    assert [trace.metadata["completion_ids"] for trace in trajectory.traces] == [
        ["msg_0"],
        ["msg_3"],
        ["msg_4"],
    ]
    assert [trace.metadata["main"] for trace in trajectory.traces] == [False, False, True]


def test_a_trace_is_the_call_as_the_engine_saw_it() -> None:
    world = World()
    completion = world.ask(THREAD)
    (trace,) = build(world.session()).traces
    (sample,) = world.samples
    assert trace.prompt_ids == sample.prompt
    assert trace.response_ids == sample.sampled
    assert trace.loss_mask == [1] * len(sample.sampled)
    assert trace.response_logprobs == sample.logprobs
    assert trace.prompt_messages == THREAD
    assert trace.response_messages == [completion.response_message]
    assert trace.tools == completion.tools
    assert trace.finish_reason == completion.finish_reason
    assert trace.metadata["spans"] == [
        {
            "start": 0,
            "length": len(sample.sampled),
            "completion_id": "msg_0",
            "kind": "turn",
            "policy_version": "v0",
            "logprob_kind": "processed",
            "sampling": {"temperature": 1.0},
            "finish_reason": completion.finish_reason,
        }
    ]


def test_the_trainers_keys_of_the_task_are_repeated() -> None:
    world = World()
    world.ask(THREAD, dialect="anthropic", model_requested="claude", model_used="tiny")
    trajectory = build(world.session(group_id="g", policy_version=7, rollout_step=3, other=1))
    echoed = {"group_id": "g", "policy_version": 7, "rollout_step": 3}
    for metadata in (trajectory.metadata, trajectory.traces[0].metadata):
        assert echoed.items() <= metadata.items()
        assert "other" not in metadata
        assert (metadata["api_type"], metadata["model_requested"], metadata["model_used"]) == (
            "anthropic",
            "claude",
            "tiny",
        )
    assert trajectory.metadata["task_metadata"]["other"] == 1


def test_the_trajectory_accounts_for_every_sampled_token() -> None:
    world = World()
    play(world, ["turn", "title", "retry"])
    metadata = build(world.session()).metadata
    stats = metadata["reconstruction_stats"]
    left_out = sum(counts["tokens"] for counts in stats["left_out"].values())
    assert stats["trainable_tokens"] + left_out == stats["sampled_tokens"]
    assert stats["sampled_tokens"] == sum(len(sample.sampled) for sample in world.samples)
    assert (metadata["record_count"], metadata["trace_count"]) == (4, 2)


def test_a_session_without_completions_is_an_empty_trajectory() -> None:
    trajectory = build(World().session())
    assert trajectory.traces == []
    assert trajectory.metadata["model_used"] == ""


def test_the_traces_name_the_calls_that_they_continue() -> None:
    world = World()
    play(world, ["turn", "turn"])
    first, second = build(world.session()).traces
    assert first.metadata["parent"] is None
    assert second.metadata["parent"] == {"trace": 0, "completion_id": "msg_0", "shared_tokens": 0}
    assert second.metadata["spans"][0]["previous"] == "msg_0"
