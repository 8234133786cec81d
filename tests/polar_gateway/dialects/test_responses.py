import json
from typing import Any

import pytest

from polar_gateway.dialects import responses
from polar_gateway.dialects.turn import (
    BlockDelta,
    BlockEnd,
    BlockStart,
    Call,
    ErrorKind,
    ModelRequest,
    Reasoning,
    Text,
    TurnEnd,
    UnsupportedRequestError,
)
from tests.polar_gateway.dialects.clients import (
    COMPLETION_ID,
    CREATED,
    Event,
    parse_sse,
    stream,
    turn,
)

PARAMETERS = {"type": "object", "properties": {}}
RUN = {
    "type": "function",
    "name": "run",
    "description": "Run.",
    "strict": False,
    "parameters": PARAMETERS,
}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [{"type": "function", "name": "spawn", "parameters": PARAMETERS}],
}
FILE = {
    "type": "input_file",
    "filename": "a.txt",
    "file_data": "data:text/plain;charset=utf-8;base64,w6k=",
}
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: line+"},
}
SHELL = {"type": "local_shell"}


def normalise(*items: Any, **fields: Any) -> ModelRequest:
    return responses.normalise({"model": "m", "input": list(items) or "Hi", **fields})


def message(role: str, content: Any, **extra: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content, **extra}


def call(call_id: str, **extra: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "run", "arguments": "{}", **extra}


def output(call_id: str, content: Any = "done") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": content}


def test_instructions_and_leading_developers_are_one_system_message() -> None:
    request = normalise(
        message("developer", [{"type": "input_text", "text": "Be brief."}]),
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        instructions="You are an agent.",
    )
    assert request.messages == [
        {"role": "system", "content": "You are an agent.\n\nBe brief.\n\nBe kind."},
        {"role": "user", "content": "Hi"},
    ]


def test_a_string_is_a_users_message() -> None:
    assert normalise().messages == [{"role": "user", "content": "Hi"}]


def test_what_one_answer_was_made_of_is_one_assistant_message() -> None:
    reasoning = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    said = message("assistant", [{"type": "output_text", "text": "Running."}])
    request = normalise(reasoning, said, call("a"), call("b"), output("a"), output("b"))
    assert [each["role"] for each in request.messages] == ["assistant", "tool", "tool"]
    first = request.messages[0]
    assert (first["content"], first["reasoning_content"]) == ("Running.", "hm")
    assert [each["id"] for each in first["tool_calls"]] == ["a", "b"]


def test_answers_that_follow_each_other_stay_apart_by_our_ids() -> None:
    def said(text: str, item_id: str | None) -> dict[str, Any]:
        return message("assistant", text, **({"id": item_id} if item_id else {}))

    ours = normalise(
        said("One.", "msg_aaaaaaaaaaaa_0"), said("Two.", "msg_bbbbbbbbbbbb_0"), message("user", "x")
    )
    assert [each["content"] for each in ours.messages] == ["One.", "Two.", "x"]
    theirs = normalise(said("One", "msg_1"), said(".", None), message("user", "x"))
    assert [each["content"] for each in theirs.messages] == ["One.", "x"]


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (
            {
                "content": [{"type": "reasoning_text", "text": "raw"}],
                "summary": [{"text": "short"}],
            },
            "raw",
        ),
        (
            {"summary": [{"text": "a"}, {"text": "b"}], "encrypted_content": "another provider's"},
            "a\n\nb",
        ),
        (
            {"summary": [{"text": "a"}], "encrypted_content": "polar.1.0123456789ab.cmF3"},
            "raw",
        ),
        ({"summary": []}, None),
    ],
)
def test_reasoning_is_taken_from_where_most_of_it_is(
    item: dict[str, Any], expected: str | None
) -> None:
    request = normalise({"type": "reasoning", **item}, call("a"), output("a"))
    assert request.messages[0].get("reasoning_content") == expected


def test_a_tool_may_answer_with_an_image() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "original"}
    request = normalise(call("a"), output("a", [{"type": "input_text", "text": "See:"}, image]))
    assert request.messages[1]["content"] == [
        {"type": "text", "text": "See:"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
    ]


def test_a_namespace_is_expanded_and_put_back() -> None:
    history = [
        message("user", "Go."),
        call("a", name="spawn", namespace="agents"),
        output("a"),
    ]
    request = normalise(*history, tools=[RUN, AGENTS])
    assert [tool["function"]["name"] for tool in request.tools or []] == ["run", "agents__spawn"]
    assert request.messages[1]["tool_calls"][0]["function"]["name"] == "agents__spawn"
    assert normalise(*history).messages == request.messages  # compaction asks without tools
    [item] = answer_items(request, Call(id="b", name="agents__spawn", arguments="{}"))
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "agents", "spawn")
    [plain] = answer_items(request, Call(id="b", name="run", arguments="{}"))
    assert "namespace" not in plain


def test_a_plain_tool_keeps_its_name_beside_a_namespace_that_would_take_it() -> None:
    plain = {**RUN, "name": "agents__spawn"}
    request = normalise(
        call("a", name="spawn", namespace="agents"), output("a"), tools=[AGENTS, plain]
    )
    assert [tool["function"]["name"] for tool in request.tools or []] == [
        "agents__spawn_",
        "agents__spawn",
    ]
    assert request.messages[0]["tool_calls"][0]["function"]["name"] == "agents__spawn_"
    [spawn] = answer_items(request, Call(id="b", name="agents__spawn_", arguments="{}"))
    assert (spawn["namespace"], spawn["name"]) == ("agents", "spawn")


def test_a_custom_tool_is_a_function_of_one_text_and_put_back() -> None:
    item = {"type": "custom_tool_call", "call_id": "a", "name": "patch", "input": "+é\n"}
    done = {"type": "custom_tool_call_output", "call_id": "a", "output": "ok"}
    request = normalise(item, done, tools=[PATCH])
    [tool] = request.tools or []
    assert tool["function"]["parameters"]["required"] == ["input"]
    assert tool["function"]["description"].startswith("Edit files.")
    assert tool["function"]["description"].endswith("lark grammar:\nstart: line+")
    assert request.messages[0]["tool_calls"][0]["function"]["arguments"] == '{"input":"+é\\n"}'
    assert request.messages[1] == {"role": "tool", "tool_call_id": "a", "content": "ok"}
    for spelled, text in (
        ('{"input": "+a"}', "+a"),
        ("+a", "+a"),
        ('{"patch": 1}', '{"patch": 1}'),
    ):
        [back] = answer_items(request, Call(id="b", name="patch", arguments=spelled))
        assert (back["type"], back["input"], back["call_id"]) == ("custom_tool_call", text, "b")


def test_a_local_shell_is_a_function_and_put_back() -> None:
    action: dict[str, Any] = {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": None}
    item = {"type": "local_shell_call", "call_id": "a", "action": action}
    done = {"type": "local_shell_call_output", "id": "a", "output": "ok"}
    request = normalise(item, done, tools=[SHELL])
    assert request.messages[0]["tool_calls"][0]["function"]["arguments"] == '{"command":["ls"]}'
    assert request.messages[1]["role"] == "tool"
    [back] = answer_items(
        request, Call(id="b", name="local_shell", arguments='{"command": ["pwd"]}')
    )
    assert back["action"] == {"type": "exec", "command": ["pwd"], "env": {}}
    [broken] = answer_items(request, Call(id="b", name="local_shell", arguments="pwd"))
    assert broken["action"]["command"] == []


def test_tools_may_come_among_the_items() -> None:
    request = normalise({"type": "additional_tools", "tools": [AGENTS]}, message("user", "Hi"))
    assert [tool["function"]["name"] for tool in request.tools or []] == ["agents__spawn"]
    assert [each["role"] for each in request.messages] == ["user"]


def test_hosted_tools_and_items_are_dropped_and_noted() -> None:
    request = normalise(
        message("user", "Hi"),
        {"type": "web_search_call", "id": "x"},
        tools=[{"type": "web_search"}, {**RUN, "strict": True}],
        reasoning={"effort": "high", "summary": "auto"},
        text={"verbosity": "low"},
        truncation="auto",
        store=False,
    )
    assert [tool["function"]["strict"] for tool in request.tools or []] == [True]
    assert request.notes == [
        "truncation ignored",
        "tool of type web_search ignored",
        "input item of type web_search_call ignored",
        "reasoning.effort ignored",
        "text.verbosity ignored",
    ]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", "auto"),
        ("required", "required"),
        ("none", "none"),
        ({"type": "function", "name": "run"}, {"type": "function", "function": {"name": "run"}}),
        ({"type": "custom", "name": "patch"}, {"type": "function", "function": {"name": "patch"}}),
        (
            {"type": "function", "name": "spawn", "namespace": "agents"},
            {"type": "function", "function": {"name": "agents__spawn"}},
        ),
        (None, None),
    ],
)
def test_a_tool_choice_is_the_engines(choice: Any, expected: Any) -> None:
    tools = [RUN, AGENTS, PATCH]
    assert normalise(tools=tools, tool_choice=choice).tool_choice == expected
    without = normalise(tools=[], tool_choice=choice, parallel_tool_calls=True)
    assert (without.tools, without.tool_choice, without.parallel_tool_calls) == (None, None, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ({"format": {"type": "text"}}, None),
        ({"format": {"type": "json_object"}}, {"type": "json_object"}),
        (
            {"format": {"type": "json_schema", "name": "x", "schema": PARAMETERS, "strict": True}},
            {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": PARAMETERS, "strict": True},
            },
        ),
    ],
)
def test_a_text_format_is_the_engines_response_format(text: Any, expected: Any) -> None:
    assert normalise(text=text).response_format == expected


def test_sampling_is_only_what_the_harness_set() -> None:
    request = normalise(
        max_output_tokens=7, temperature=0, top_p=None, reasoning={"effort": "none"}, stream=True
    )
    assert (request.max_tokens, request.sampling, request.stream) == (7, {"temperature": 0}, True)
    assert request.template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"input": None}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
        ({"input": [{"id": "x"}]}, "input[0].id"),
        (
            {"input": [{"type": "compaction", "encrypted_content": "gAAA"}]},
            "input[0].encrypted_content",
        ),
        ({"input": [message("robot", "x")]}, "input[0].role"),
        ({"input": [message("user", [{"type": "input_audio"}])]}, "input[0].content[0]"),
        ({"input": [message("user", [FILE | {"file_id": "f"}])]}, "input[0].content[0].file_id"),
        ({"input": [message("user", [FILE | {"file_url": "u"}])]}, "input[0].content[0].file_url"),
        ({"input": [message("user", [{"type": "input_file"}])]}, "input[0].content[0].file_data"),
        (
            {
                "input": [
                    message("user", [FILE | {"file_data": "data:application/pdf;base64,AA=="}])
                ]
            },
            "input[0].content[0].file_data",
        ),
        (
            {"input": [message("user", [{"type": "input_image", "file_id": "f"}])]},
            "input[0].content[0].file_id",
        ),
        ({"input": [message("system", [{"type": "input_image"}])]}, "input[0].content[0]"),
        (
            {"input": [{"type": "reasoning", "encrypted_content": "polar.1.!!!"}]},
            "input[0].encrypted_content",
        ),
        ({"tools": [RUN], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [RUN], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"reasoning": "high"}, "reasoning"),
        ({"max_output_tokens": 1.5}, "max_output_tokens"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_path(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedRequestError) as refused:
        responses.normalise({"model": "m", "input": "Hi", **fields})
    assert refused.value.field == field


def answer_items(request: ModelRequest, *blocks: Any) -> list[dict[str, Any]]:
    items = json.loads(responses.answer(request, turn(list(blocks))))["output"]
    assert isinstance(items, list)
    return items


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
    error, failed = parse_sse(streamer.error(kind))
    assert (error.name, failed.name) == ("error", "response.failed")
    assert (error.data["sequence_number"] + 1, failed.data["sequence_number"]) == (
        failed.data["sequence_number"],
        said[-1].data["sequence_number"] + 2,
    )
    assert (error.data["code"], error.data["message"]) == (told, "No." + wait)
    assert error.data["error"]["code"] == told
    assert failed.data["response"]["status"] == "failed"
    assert failed.data["response"]["error"] == {
        "code": told,
        "message": "No." + wait,
        "param": None,
    }
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


def test_auxiliary_answers_have_the_providers_shape() -> None:
    assert json.loads(responses.count_body(42)) == {
        "object": "response.input_tokens",
        "input_tokens": 42,
    }
    assert json.loads(responses.models_body(["m"]))["data"][0]["id"] == "m"


def test_reasoning_is_sealed_for_harnesses_that_keep_nothing_else() -> None:
    [item] = answer_items(REQUEST, Reasoning(text="hm"))
    assert item["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert item["encrypted_content"].startswith("polar.1.0123456789ab.")
    assert "hm" not in item["encrypted_content"]
