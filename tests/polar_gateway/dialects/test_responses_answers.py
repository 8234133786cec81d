import json
from typing import Any

import pytest

from polar_gateway.dialects import responses
from polar_gateway.dialects.turn import (
    BlockDelta,
    BlockEnd,
    BlockStart,
    ErrorKind,
    ModelRequest,
    Reasoning,
    Text,
)
from tests.polar_gateway.dialects.clients import (
    COMPLETION_ID,
    CREATED,
    Event,
    parse_sse,
    stream,
    turn,
)
from tests.polar_gateway.dialects.responses_items import (
    RUN,
    answer_items,
    message,
    normalise,
)

REQUEST = ModelRequest(
    model="gpt-x",
    messages=[],
    renames={
        "patch": {"type": "custom", "name": "patch"},
        "local_shell": {"type": "local_shell", "name": "local_shell"},
    },
)


@pytest.mark.parametrize(
    ("finish", "status", "details"),
    [("stop", "completed", None), ("length", "incomplete", {"reason": "max_output_tokens"})],
)
def test_an_answer_has_the_providers_shape(finish: Any, status: str, details: Any) -> None:
    answered = turn(
        [Text(text="ok")], finish, prompt_tokens=100, cached_tokens=64, reasoning_tokens=3
    )
    whole = json.loads(responses.answer(REQUEST, answered))
    assert (whole["id"], whole["object"], whole["created_at"]) == (
        "resp_0123456789ab",
        "response",
        CREATED,
    )
    assert (whole["status"], whole["incomplete_details"], whole["error"]) == (status, details, None)
    assert whole["usage"] == {
        "input_tokens": 100,
        "input_tokens_details": {"cached_tokens": 64, "cache_write_tokens": 0},
        "output_tokens": 50,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 150,
    }
    assert [item["status"] for item in whole["output"]] == [status]
    closing = parse_sse(stream(responses, REQUEST, answered))[-1]
    assert closing.name == f"response.{status}"
    assert closing.data["response"] == whole


def test_a_stream_tells_every_step_of_every_item() -> None:
    streamer = responses.streamer(REQUEST, COMPLETION_ID, CREATED)
    blocks = [
        (BlockStart(kind="reasoning"), "hm"),
        (BlockStart(kind="text"), "ok"),
        (BlockStart(kind="call", id="a", name="run"), '{"x": 1}'),
        (BlockStart(kind="call", id="b", name="patch"), '{"input": "+a"}'),
        (BlockStart(kind="call", id="c", name="local_shell"), '{"command": ["ls"]}'),
    ]
    written = streamer.open(12)
    for start, text in blocks:
        written += streamer.event(start)
        for piece in (text[:2], text[2:]):
            written += streamer.event(BlockDelta(text=piece)) if piece else b""
        written += streamer.event(BlockEnd())
    written += streamer.keep_alive()
    events = parse_sse(written)
    assert [event.data["sequence_number"] for event in events] == list(range(len(events)))
    assert [event.name for event in events] == [event.data["type"] for event in events]
    assert [(event.name or "").removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "output_item.added",
        "output_item.done",
        "in_progress",
    ]
    added = [event.data["item"] for event in events if event.name == "response.output_item.added"]
    done = [event.data["item"] for event in events if event.name == "response.output_item.done"]
    assert [item["id"] for item in added] == [item["id"] for item in done]
    assert [item["id"] for item in done] == [
        "rs_0123456789ab_0",
        "msg_0123456789ab_1",
        "fc_0123456789ab_2",
        "ctc_0123456789ab_3",
        "lsh_0123456789ab_4",
    ]
    assert {item.get("status", "in_progress") for item in added} == {"in_progress"}
    assert (added[0]["summary"], added[1]["content"], added[2]["arguments"], added[3]["input"]) == (
        [],
        [],
        "",
        "",
    )
    for event in events:
        if "item_id" in event.data:
            assert event.data["item_id"] == done[event.data["output_index"]]["id"]


@pytest.mark.parametrize(
    ("code", "retry_after", "told", "wait"),
    [
        ("context_overflow", None, "context_length_exceeded", ""),
        ("internal", None, "server_error", ""),
        ("session_closed", None, "invalid_prompt", ""),
        ("invalid_request", None, "invalid_prompt", ""),
        ("rate_limit", 3, "rate_limit_exceeded", " Please try again in 3s."),
        ("overloaded", None, "rate_limit_exceeded", " Please try again in 5s."),
    ],
)
def test_an_error_in_the_stream_is_one_that_harnesses_act_on(
    code: Any, retry_after: int | None, told: str, wait: str
) -> None:
    streamer = responses.streamer(REQUEST, COMPLETION_ID, CREATED)
    streamer.open(0)
    said = stream_block(streamer, BlockStart(kind="text"), "ok")
    kind = ErrorKind(status=400, code=code, message="No.", retry_after=retry_after)
    [failed] = parse_sse(streamer.error(kind))
    assert failed.name == "response.failed"
    assert failed.data["sequence_number"] == said[-1].data["sequence_number"] + 1
    assert failed.data["response"]["status"] == "failed"
    assert failed.data["response"]["error"] == {"code": told, "message": "No." + wait}
    assert failed.data["response"]["output"] == [said[-1].data["item"]]


def stream_block(streamer: Any, start: BlockStart, *pieces: str, cut: bool = False) -> list[Event]:
    written = streamer.event(start)
    for piece in pieces:
        written += streamer.event(BlockDelta(text=piece))
    return parse_sse(written + streamer.event(BlockEnd(cut=cut)))


def test_an_error_before_the_stream_has_the_providers_shape() -> None:
    error = ErrorKind(status=400, code="context_overflow", message="Too long.")
    assert json.loads(responses.error_body(error))["error"]["code"] == "context_length_exceeded"
    assert responses.error_status(error) == 400


def test_reasoning_is_sealed_for_harnesses_that_keep_nothing_else() -> None:
    [item] = answer_items(REQUEST, Reasoning(text="hm"))
    assert item["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert item["encrypted_content"].startswith("polar.1.0123456789ab.")
    assert "hm" not in item["encrypted_content"]


def test_a_custom_tools_text_is_streamed_as_it_comes() -> None:
    streamer = responses.streamer(REQUEST, COMPLETION_ID, CREATED)
    streamer.open(0)
    start = BlockStart(kind="call", id="a", name="patch")
    events = stream_block(streamer, start, '{"inp', 'ut": "+\\u00', "e9\\n+", 'b"}')
    deltas = [e.data["delta"] for e in events if (e.name or "").endswith("input.delta")]
    assert deltas == ["+", "é\n+", "b"]
    assert events[-2].data["input"] == events[-1].data["item"]["input"] == "+é\n+b"


@pytest.mark.parametrize(
    "start",
    [
        BlockStart(kind="reasoning"),
        BlockStart(kind="text"),
        BlockStart(kind="call", id="a", name="run"),
        BlockStart(kind="call", id="a", name="patch"),
    ],
)
def test_an_item_that_was_cut_says_so(start: BlockStart) -> None:
    streamer = responses.streamer(REQUEST, COMPLETION_ID, CREATED)
    streamer.open(0)
    assert stream_block(streamer, start, "ab", cut=True)[-1].data["item"]["status"] == "incomplete"


ECHOED = {
    "instructions": "Be brief.",
    "metadata": {"a": "b"},
    "parallel_tool_calls": False,
    "previous_response_id": "resp_1",
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "store": False,
    "temperature": 0.5,
    "top_p": 0.9,
    "tool_choice": "required",
    "tools": [RUN],
    "truncation": "disabled",
    "max_output_tokens": 7,
    "max_tool_calls": 3,
    "top_logprobs": 2,
    "user": "u",
}


def test_a_whole_answer_says_the_requests_parameters_again() -> None:
    request = normalise(reasoning={"effort": "low"}, text={"verbosity": "low"}, **ECHOED)
    whole = json.loads(responses.answer(request, turn([Text(text="ok")])))
    assert {name: whole[name] for name in ECHOED} == ECHOED
    assert whole["reasoning"] == {"effort": "low", "summary": None}
    assert whole["text"] == {"format": {"type": "text"}, "verbosity": "low"}


def test_a_whole_answer_is_complete_without_them() -> None:
    whole = json.loads(responses.answer(normalise(), turn([Text(text="ok")])))
    assert whole["tools"] == []
    assert whole["tool_choice"] == "auto"
    assert (whole["parallel_tool_calls"], whole["store"]) == (True, True)
    assert (whole["truncation"], whole["background"], whole["metadata"]) == ("disabled", False, {})
    assert whole["reasoning"] == {"effort": None, "summary": None}
    assert whole["text"] == {"format": {"type": "text"}}
    assert {whole[name] for name in ("instructions", "previous_response_id", "temperature")} == {
        None
    }


def test_the_events_of_a_stream_leave_out_what_is_long() -> None:
    request = normalise(**ECHOED)
    events = parse_sse(stream(responses, request, turn([Text(text="ok")])))
    told = [event.data["response"] for event in events if "response" in event.data]
    assert [each["status"] for each in told] == ["in_progress", "in_progress", "completed"]
    for each in told:
        assert (each["instructions"], each["tools"]) == (None, [])
        rest = {
            name: value for name, value in ECHOED.items() if name not in ("tools", "instructions")
        }
        assert {name: each[name] for name in rest} == rest


def test_a_compaction_is_answered_with_one_sealed_item() -> None:
    request = normalise(message("user", "Hi"), {"type": "compaction_trigger"})
    summary = turn([Reasoning(text="hm"), Text(text=" All is well.\n")])
    [item] = json.loads(responses.answer(request, summary))["output"]
    assert item["type"] == "compaction"
    events = parse_sse(stream(responses, request, summary))
    assert [event.name for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[-2].data["item"] == item
    assert events[-1].data["response"]["output"] == [item]
    assert normalise(item).messages == [
        {"role": "user", "content": "Summary of the conversation so far:\n\nAll is well."}
    ]
