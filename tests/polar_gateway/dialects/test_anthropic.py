import json
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_gateway.dialects import anthropic
from polar_gateway.dialects.turn import (
    Block,
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
from tests.polar_gateway.dialects.clients import COMPLETION_ID, parse_sse, turn
from tests.polar_gateway.dialects.spoiling import ROLES, spoiled

TOOL = {"name": "Bash", "description": "Run.", "input_schema": {"type": "object"}}
USE = {"type": "tool_use", "id": "a", "name": "Bash", "input": {"command": "ls"}}


def normalise(*messages: dict[str, Any], **fields: Any) -> ModelRequest:
    return anthropic.normalise({"model": "m", "messages": list(messages), **fields})


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def text(value: str, **extra: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **extra}


def result(content: Any, **extra: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "a", "content": content, **extra}


ASKED = [user(text("Go.")), {"role": "assistant", "content": [USE]}]


def test_a_text_is_the_same_as_a_string_and_as_cached_blocks() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    plain = normalise({"role": "user", "content": "Hello"}, system="Be brief.")
    blocks = normalise(user(text("Hello", **cached)), system=[text("Be brief.", **cached)])
    assert plain == blocks
    assert plain.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    ]


@pytest.mark.parametrize(
    "system",
    [
        [text("x-anthropic-billing-header: cc_version=1;"), text("Be brief.")],
        [text("Be brief."), text("x-anthropic-billing-header: cc_version=1;")],
        [text("x-anthropic-billing-header: cc_version=1;\n\nBe brief.")],
        "x-anthropic-billing-header: cc_version=1;\nBe brief.",
    ],
)
def test_the_billing_line_does_not_reach_the_prompt(system: Any) -> None:
    assert normalise(user(text("Hi")), system=system).messages[0]["content"] == "Be brief."


def test_any_number_of_billing_lines_is_dropped_in_the_time_of_their_length() -> None:
    began = time.process_time()
    request = normalise(user(text("Hi")), system="x-anthropic-billing-header\n" * 100_000 + "Hello")
    assert time.process_time() - began < 2
    assert request.messages[0]["content"] == "Hello"


def test_a_turn_with_thinking_and_calls_keeps_all_of_it() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    request = normalise(
        user(text("Go.")),
        {"role": "assistant", "content": [thinking, text("Running."), USE]},
        user(result("done")),
    )
    assert request.messages[1:] == [
        {
            "role": "assistant",
            "content": "Running.",
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "a",
                    "type": "function",
                    "function": {"name": "Bash", "arguments": '{"command":"ls"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "done"},
    ]


def thinking(signature: str, thought: str = "") -> dict[str, Any]:
    return {"type": "thinking", "thinking": thought, "signature": signature}


def test_a_signature_of_ours_says_whose_answer_a_message_is() -> None:
    ours, other = "msg_00000000000a", "msg_00000000000b"
    redacted = {"type": "redacted_thinking", "data": ours}

    def answers(*content: Any) -> dict[int, str]:
        said = {"role": "assistant", "content": list(content)}
        return normalise(user(text("Go.")), said, user(text("On.")), system="Be brief.").answers

    assert answers(thinking(ours), text("ok")) == {2: ours}
    assert answers(thinking(ours, "hm"), text("ok"), thinking(ours, "hm")) == {2: ours}
    assert answers(redacted, text("ok")) == {2: ours}
    assert answers(thinking("EqQBCgIYAhIMmsg_00000000000a", "hm"), text("ok")) == {}
    assert answers(thinking(ours), text("a"), thinking(other), text("b")) == {2: ours, 3: other}


def test_redacted_thinking_of_another_is_noted() -> None:
    said = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}
    request = normalise(user(text("Go.")), said, user(text("On.")))
    assert request.messages[1] == {"role": "assistant", "content": ""}
    assert request.notes == ["redacted_thinking of another ignored"]


def test_what_a_user_says_beside_tool_results_follows_them() -> None:
    messages = normalise(*ASKED, user(text("And now?"), result("done"))).messages
    assert [message["role"] for message in messages[2:]] == ["tool", "user"]
    assert messages[-1]["content"] == "And now?"


def test_a_reminder_beside_tool_results_stays_with_them() -> None:
    note = "<system-reminder>\nThe file changed.\n</system-reminder>"
    beside = normalise(*ASKED, user(result("done"), text(note + "\n")))
    behind = normalise(
        *ASKED, user(result("done")), {"role": "system", "content": "The file changed."}
    )
    assert beside.messages == behind.messages
    assert beside.messages[-1] == {
        "role": "tool",
        "tool_call_id": "a",
        "content": f"done\n\n{note}",
    }


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("exit 1", "Error: exit 1"),
        ("Error: no such file", "Error: no such file"),
        ("<tool_use_error>no</tool_use_error>", "<tool_use_error>no</tool_use_error>"),
        ([text("exit 1")], "Error: exit 1"),
    ],
)
def test_a_failed_tool_says_so_in_its_text(content: Any, expected: str) -> None:
    assert (
        normalise(*ASKED, user(result(content, is_error=True))).messages[-1]["content"] == expected
    )
    assert normalise(*ASKED, user(result(content, is_error=False))).messages[-1]["content"] in (
        content,
        "exit 1",
    )


def test_an_image_goes_on_as_a_url_also_from_a_tool() -> None:
    image = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": "AA=="},
    }
    remote = {"type": "image", "source": {"type": "url", "url": "http://host/a.png"}}
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    assert normalise(*ASKED, user(result([image], is_error=True))).messages[-1]["content"] == [
        {"type": "text", "text": "Error:"},
        part,
    ]
    assert normalise(user(image, remote)).messages[0]["content"] == [
        part,
        {"type": "image_url", "image_url": {"url": "http://host/a.png"}},
    ]


@pytest.mark.parametrize(
    "source",
    [
        {"type": "text", "media_type": "text/plain", "data": "body"},
        {"type": "content", "content": "body"},
        {"type": "content", "content": [text("body")]},
        {"type": "base64", "media_type": "text/markdown", "data": "Ym9keQ=="},
    ],
)
def test_a_document_of_text_is_its_title_and_text(source: dict[str, Any]) -> None:
    block = {"type": "document", "source": source, "title": "Notes"}
    assert normalise(user(block)).messages[0]["content"] == "Notes\nbody"
    with_context = normalise(user({**block, "context": "From yesterday."})).messages[0]["content"]
    assert with_context == "Notes\nFrom yesterday.\nbody"


def test_a_search_result_is_its_heading_and_text() -> None:
    found = {"type": "search_result", "title": "T", "source": "http://host", "content": [text("t")]}
    messages = normalise(*ASKED, user(result([found]))).messages
    assert messages[-1]["content"] == "T\nhttp://host\nt"


@pytest.mark.parametrize(
    ("block", "field"),
    [
        (
            {"type": "document", "source": {"type": "base64", "data": "AA=="}},
            "messages[0].content[0].source",
        ),
        (
            {"type": "image", "source": {"type": "file", "file_id": "f"}},
            "messages[0].content[0].source",
        ),
        (
            {"type": "document", "source": {"type": "file", "file_id": "f"}},
            "messages[0].content[0].source",
        ),
        (
            {"type": "document", "source": {"type": "url", "url": "http://host/a.pdf"}},
            "messages[0].content[0].source",
        ),
        (
            {
                "type": "document",
                "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="},
            },
            "messages[0].content[0].source",
        ),
        ({"type": "container_upload", "file_id": "f"}, "messages[0].content[0]"),
        ({"type": "text", "text": 1}, "messages[0].content[0].text"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_path(block: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedRequestError) as refused:
        normalise(user(block))
    assert refused.value.field == field


def test_an_unknown_block_is_never_refused() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    state = {"type": "browser_state", "tabs": [{"url": "http://host", **cached}], **cached}
    searched = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    request = normalise(
        user(text("Go.")), {"role": "assistant", "content": [searched, USE]}, user(result([state]))
    )
    assert (
        request.messages[-1]["content"] == '{"type":"browser_state","tabs":[{"url":"http://host"}]}'
    )
    assert request.notes == [
        "assistant block server_tool_use ignored",
        "block browser_state sent as JSON text",
    ]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user"}],
        [{"role": "robot", "content": "Hi"}],
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I"}],
        ["Hi"],
    ],
)
def test_a_conversation_that_cannot_be_answered_is_refused(messages: list[Any]) -> None:
    with pytest.raises(UnsupportedRequestError, match="messages"):
        normalise(*messages, max_tokens=9)


def test_what_is_only_counted_may_end_with_the_assistants() -> None:
    said = {"role": "assistant", "content": "I"}
    assert normalise(user(text("Hi")), said).messages[-1] == said


def test_a_tool_is_a_function() -> None:
    typed = {"type": "custom", "name": "Read", "input_schema": {"type": "object"}}
    search = {"type": "web_search_20250305", "name": "web_search"}
    request = normalise(user(text("Hi")), tools=[TOOL, typed, search])
    assert request.tools == [
        {
            "type": "function",
            "function": {"name": "Bash", "description": "Run.", "parameters": {"type": "object"}},
        },
        {"type": "function", "function": {"name": "Read", "parameters": {"type": "object"}}},
    ]
    assert request.notes == ["tool web_search of type web_search_20250305 ignored"]


def test_a_strict_tool_stays_strict_and_its_examples_are_noted() -> None:
    tool = {**TOOL, "strict": True, "input_examples": [{}], "eager_input_streaming": True}
    request = normalise(user(text("Hi")), tools=[tool])
    assert request.tools is not None
    assert request.tools[0]["function"]["strict"] is True
    assert request.notes == ["input_examples ignored"]


@pytest.mark.parametrize(
    ("kind", "name", "fields"),
    [
        ("bash_20250124", "bash", {"command", "restart"}),
        (
            "text_editor_20250728",
            "str_replace_based_edit_tool",
            {
                "command",
                "path",
                "file_text",
                "old_str",
                "new_str",
                "insert_line",
                "insert_text",
                "view_range",
            },
        ),
        (
            "text_editor_20250124",
            "str_replace_editor",
            {"command", "path", "file_text", "old_str", "new_str", "insert_line", "view_range"},
        ),
        (
            "memory_20250818",
            "memory",
            {
                "command",
                "path",
                "file_text",
                "old_str",
                "new_str",
                "insert_line",
                "insert_text",
                "view_range",
                "old_path",
                "new_path",
            },
        ),
    ],
)
def test_a_tool_that_the_harness_executes_has_the_parameters_of_its_version(
    kind: str, name: str, fields: set[str]
) -> None:
    request = normalise(user(text("Hi")), tools=[{"type": kind, "name": name}])
    assert request.tools is not None
    [tool] = request.tools
    assert tool["function"]["name"] == name
    assert set(tool["function"]["parameters"]["properties"]) == fields
    assert request.notes == []


def names(request: ModelRequest) -> list[str]:
    return [tool["function"]["name"] for tool in request.tools or []]


def deferred(name: str) -> dict[str, Any]:
    return {"name": name, "input_schema": {"type": "object"}, "defer_loading": True}


def found(*tools: str) -> dict[str, Any]:
    return user(result([{"type": "tool_reference", "tool_name": name} for name in tools]))


def test_a_deferred_tool_comes_last_once_it_was_found() -> None:
    tools = [deferred("Edit"), TOOL, deferred("Read"), deferred("Grep")]
    before = normalise(user(text("Go.")), tools=tools)
    after = normalise(*ASKED, found("Read", "Edit", "Bash", "Gone"), tools=tools)
    assert names(before) == ["Bash"]
    assert names(after) == ["Bash", "Read", "Edit"]
    assert after.messages[-1]["content"] == "Found, and ready to be called: Read, Edit, Bash, Gone"
    assert before.notes == ["3 deferred tools left out until they are found"]
    assert after.notes == ["1 deferred tools left out until they are found"]


def test_deferred_tools_that_only_the_provider_could_find_are_there_at_once() -> None:
    search = {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}
    request = normalise(user(text("Go.")), tools=[search, deferred("Edit"), TOOL])
    assert names(request) == ["Edit", "Bash"]


def test_tools_change_in_mid_conversation_and_the_model_is_told() -> None:
    def changed(kind: str, **tool: Any) -> dict[str, Any]:
        return {"role": "system", "content": [{"type": f"tool_{kind}", "tool": tool}]}

    edit = {"type": "tool_reference", "name": "Edit"}
    defined = {"type": "tool_definition", "definition": {**TOOL, "name": "Look"}}
    history = [
        user(text("Go.")),
        changed("addition", **edit),
        changed("addition", **defined),
        changed("removal", type="tool_reference", name="Bash"),
        changed("addition", type="mcp_toolset_reference", server_name="s"),
    ]
    tools = [TOOL, deferred("Edit")]
    assert names(normalise(*history[:2], tools=tools)) == ["Bash", "Edit"]
    assert names(normalise(*history[:3], tools=tools)) == ["Bash", "Edit", "Look"]
    last = normalise(*history, tools=tools)
    assert names(last) == ["Edit", "Look"]
    assert last.messages[0]["content"].split("\n\n") == [
        "Go.",
        *(
            f"<system-reminder>\nThe tool {said}.\n</system-reminder>"
            for said in (
                "Edit can be called from now on",
                "Look can be called from now on",
                "Bash can no longer be called",
            )
        ),
    ]
    assert last.notes == ["tool_addition of mcp_toolset_reference ignored"]
    back = normalise(*history, changed("addition", **edit | {"name": "Bash"}), tools=tools)
    assert names(back) == ["Bash", "Edit", "Look"]


def test_a_system_message_that_shall_vanish_stays_and_is_noted() -> None:
    said = {"role": "system", "content": "Hurry.", "clear_at": "next_user_message"}
    request = normalise(user(text("Go.")), said)
    assert "Hurry." in request.messages[0]["content"]
    assert request.notes == ["clear_at of a system message ignored"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ("auto", None)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", False)),
        ({"type": "none"}, ("none", None)),
        (
            {"type": "tool", "name": "Bash"},
            ({"type": "function", "function": {"name": "Bash"}}, None),
        ),
    ],
)
def test_a_tool_choice_is_the_engines(choice: dict[str, Any], expected: tuple[Any, Any]) -> None:
    request = normalise(user(text("Hi")), tools=[TOOL], tool_choice=choice)
    assert (request.tool_choice, request.parallel_tool_calls) == expected
    without = normalise(user(text("Hi")), tools=[], tool_choice=choice)
    assert (without.tools, without.tool_choice, without.parallel_tool_calls) == (None, None, None)
    assert without.notes == ["tool_choice without tools ignored"]


def test_a_tool_choice_of_another_kind_is_refused() -> None:
    with pytest.raises(UnsupportedRequestError, match="tool_choice"):
        normalise(user(text("Hi")), tools=[TOOL], tool_choice={"type": "dice"})


def test_a_choice_of_a_tool_that_is_not_there_is_refused_and_of_a_dropped_one_noted() -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    choice = {"type": "tool", "name": "web_search"}
    dropped = normalise(user(text("Hi")), tools=[TOOL, search], tool_choice=choice)
    assert dropped.tool_choice is None
    assert dropped.notes[-1] == "tool_choice of web_search ignored, as the tool is"
    with pytest.raises(UnsupportedRequestError, match=r"tool_choice\.name"):
        normalise(user(text("Hi")), tools=[TOOL], tool_choice=choice)


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_a_schema_for_the_answer_is_the_engines(field: str) -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "schema": schema}
    request = normalise(
        user(text("Hi")),
        **{field: {"format": form, "effort": "high"} if field == "output_config" else form},
    )
    assert request.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "response", "schema": schema},
    }
    assert request.notes == ["output_config.effort ignored"] * (field == "output_config")
    with pytest.raises(UnsupportedRequestError, match=r"output_config\.format"):
        normalise(user(text("Hi")), output_config={"format": {"type": "grammar"}})


def test_sampling_is_only_what_the_harness_set() -> None:
    request = normalise(
        user(text("Hi")),
        max_tokens=7,
        temperature=0,
        top_p=None,
        top_k=5,
        stop_sequences=["END"],
        stream=True,
    )
    assert request.sampling == {"temperature": 0, "top_k": 5, "stop": ["END"]}
    assert (request.max_tokens, request.stream) == (7, True)
    assert normalise(user(text("Hi"))).sampling == {}


@pytest.mark.parametrize(
    ("thinking", "template_kwargs"),
    [
        (None, {}),
        ({"type": "disabled"}, {"enable_thinking": False}),
        ({"type": "adaptive"}, {}),
        ({"type": "enabled", "budget_tokens": 1024}, {}),
    ],
)
def test_thinking_is_turned_off_only_where_the_harness_says_so(
    thinking: Any, template_kwargs: dict[str, Any]
) -> None:
    request = normalise(user(text("Hi")), thinking=thinking)
    assert request.template_kwargs == template_kwargs
    budget = "budget_tokens" in (thinking or {})
    assert request.notes == ["thinking.budget_tokens ignored"] * budget


REQUEST = ModelRequest(model="claude-x", messages=[])


@pytest.mark.parametrize(
    ("blocks", "finish", "stop_sequence", "reason"),
    [
        ([Text(text="a")], "stop", None, "end_turn"),
        ([Text(text="a")], "stop", "END", "stop_sequence"),
        ([Text(text="a")], "length", None, "max_tokens"),
        ([Call(id="a", name="Bash", arguments="{}")], "tool_calls", None, "tool_use"),
        ([Call(id="a", name="Bash", arguments="{}")], "stop", None, "tool_use"),
        ([Call(id="a", name="Bash", arguments="{}")], "stop", "END", "tool_use"),
        ([], "tool_calls", None, "end_turn"),
    ],
)
def test_an_answer_says_why_it_stopped(
    blocks: Any, finish: Any, stop_sequence: Any, reason: str
) -> None:
    answered = turn(blocks, finish)
    answered.stop_sequence = stop_sequence
    whole = json.loads(anthropic.answer(REQUEST, answered))
    told = stop_sequence if reason == "stop_sequence" else None
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, told)
    streamer = anthropic.streamer(REQUEST, COMPLETION_ID, 1)
    [delta, stop] = parse_sse(streamer.event(TurnEnd(turn=answered)))
    assert delta.data["delta"] == {"stop_reason": reason, "stop_sequence": told}
    assert delta.data["usage"] == whole["usage"]
    assert stop.name == "message_stop"


def test_a_whole_answer_has_the_providers_shape() -> None:
    blocks: list[Block] = [
        Reasoning(text="hm"),
        Text(text="ok"),
        Call(id="a", name="Bash", arguments='{"command": "ls"}'),
        Call(id="b", name="Bash", arguments='{"command": "l'),
    ]
    answered = turn(blocks, "tool_calls", prompt_tokens=100, cached_tokens=64, reasoning_tokens=7)
    assert json.loads(anthropic.answer(REQUEST, answered)) == {
        "id": COMPLETION_ID,
        "type": "message",
        "role": "assistant",
        "model": "claude-x",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": COMPLETION_ID},
            {"type": "text", "text": "ok"},
            {"type": "tool_use", "id": "a", "name": "Bash", "input": {"command": "ls"}},
            {
                "type": "tool_use",
                "id": "b",
                "name": "Bash",
                "input": {"__unparsedToolInput": {"raw": '{"command": "l'}},
            },
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 36,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 64,
            "output_tokens": 50,
            "output_tokens_details": {"thinking_tokens": 7},
        },
    }


def test_arguments_that_are_no_object_come_back_as_they_were_sampled() -> None:
    for spelled in ('{"command": "l', "[1]", "no json", "7"):
        [call] = json.loads(
            anthropic.answer(REQUEST, turn([Call(id="a", name="Bash", arguments=spelled)]))
        )["content"]
        again = normalise(
            user(text("Go.")), {"role": "assistant", "content": [call]}, user(result("no"))
        )
        assert again.messages[1]["tool_calls"][0]["function"]["arguments"] == spelled


def test_a_stream_is_written_byte_for_byte_as_the_provider_does() -> None:
    streamer = anthropic.streamer(REQUEST, COMPLETION_ID, 1)
    written = streamer.open(12)
    for event in (
        BlockStart(kind="reasoning"),
        BlockDelta(text="hm"),
        BlockEnd(),
        BlockStart(kind="text"),
        BlockDelta(text='"é"\n'),
        BlockEnd(),
        BlockStart(kind="call", id="a", name="Bash"),
        BlockDelta(text='{"x":'),
        BlockEnd(),
    ):
        written += streamer.event(event)
    assert written.decode().split("\n\n") == [
        'event: message_start\ndata: {"type":"message_start","message":{"id":"msg_0123456789ab","type":"message","role":"assistant","model":"claude-x","content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":12,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":0}}}',
        'event: content_block_start\ndata: {"type":"content_block_start","index":0,"content_block":{"type":"thinking","thinking":"","signature":""}}',
        'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"hm"}}',
        'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"signature_delta","signature":"msg_0123456789ab"}}',
        'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}',
        'event: content_block_start\ndata: {"type":"content_block_start","index":1,"content_block":{"type":"text","text":""}}',
        'event: content_block_delta\ndata: {"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"\\"é\\"\\n"}}',
        'event: content_block_stop\ndata: {"type":"content_block_stop","index":1}',
        'event: content_block_start\ndata: {"type":"content_block_start","index":2,"content_block":{"type":"tool_use","id":"a","name":"Bash","input":{}}}',
        'event: content_block_delta\ndata: {"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":"{\\"x\\":"}}',
        'event: content_block_stop\ndata: {"type":"content_block_stop","index":2}',
        "",
    ]
    assert streamer.keep_alive() == b'event: ping\ndata: {"type":"ping"}\n\n'


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("invalid_request", 400, "invalid_request_error"),
        ("authentication", 401, "authentication_error"),
        ("not_found", 404, "not_found_error"),
        ("too_large", 413, "request_too_large"),
        ("rate_limit", 429, "rate_limit_error"),
        ("overloaded", 529, "overloaded_error"),
        ("session_closed", 403, "permission_error"),
        ("internal", 500, "api_error"),
    ],
)
def test_an_error_has_the_providers_shape(code: Any, status: int, kind: str) -> None:
    engines = 503 if code in ("overloaded", "rate_limit") else status
    error = ErrorKind(status=engines, code=code, message="So it is.")
    assert anthropic.error_status(error) == status
    body = json.loads(anthropic.error_body(error))
    assert body == {"type": "error", "error": {"type": kind, "message": "So it is."}}
    streamer = anthropic.streamer(REQUEST, COMPLETION_ID, 1)
    assert parse_sse(streamer.error(error)) == [("error", body)]


@pytest.mark.parametrize(
    "thread", [{"type": "create"}, {"type": "continue", "previous_message_id": COMPLETION_ID}]
)
def test_a_thread_is_refused_so_that_the_providers_sdk_does_without(thread: dict[str, str]) -> None:
    with pytest.raises(UnsupportedRequestError, match="thread: ") as refused:
        normalise(user(text("Go.")), thread=thread)
    assert refused.value.optional
    error = ErrorKind(status=400, code="invalid_request", message="So it is.", param="thread")
    told = json.loads(anthropic.error_body(error))["error"]
    assert told["details"] == {"error_code": "thread_unsupported_request"}


@pytest.mark.parametrize("message", ["prompt is too long: 9 tokens > 8 maximum", "9 tokens, 8 fit"])
def test_an_overflow_is_said_in_the_words_that_make_claude_code_compact(message: str) -> None:
    error = ErrorKind(status=400, code="context_overflow", message=message)
    body = json.loads(anthropic.error_body(error))
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].count("prompt is too long") == 1
    assert body["error"]["message"].endswith(message)


def test_a_model_is_asked_for_by_any_name() -> None:
    version = {"anthropic-version": "2023-06-01"}
    asked = anthropic.match("GET", "/s/1/v1/models/org/model", {}, version)
    assert asked == ("model", {"model": "org/model"})
    assert anthropic.match("GET", "/v1/models/", {}, version) == ("models", {})
    assert anthropic.match("GET", "/v1/models/m", {}, {}) is None


def test_auxiliary_answers_have_the_providers_shape() -> None:
    assert json.loads(anthropic.count_body(42)) == {"input_tokens": 42}
    listed = json.loads(anthropic.models_body(["m", "n"]))
    assert [entry["id"] for entry in listed["data"]] == ["m", "n"]
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("m", "n", False)
    assert json.loads(anthropic.models_body([]))["data"] == []
    assert json.loads(anthropic.model_body("m")) == listed["data"][0]


BLOCK = st.sampled_from(["text", "reminder", "image"])
STEP = st.one_of(
    st.just("system"),
    st.just("grow"),
    st.lists(BLOCK, max_size=2).map(lambda said: ("user", said)),
    st.tuples(st.just("results"), st.integers(1, 3), st.lists(BLOCK, max_size=2)),
)


def grown(steps: list[Any]) -> list[list[dict[str, Any]]]:
    """A harness's messages at each of its requests. After every request there is an answer, which
    calls tools if the next step brings results, unless the step only adds to what was sent."""
    sent: list[dict[str, Any]] = [user(text("task"))]
    requests = []

    def block(kind: str, at: str) -> dict[str, Any]:
        if kind == "image":
            return {"type": "image", "source": {"type": "url", "url": f"http://host/{at}"}}
        inner = f"{kind} {at}"
        return text(f"<system-reminder>{inner}</system-reminder>" if kind == "reminder" else inner)

    for index, step in enumerate(steps):
        requests.append(list(sent))
        match step:
            case "system":
                sent.append({"role": "system", "content": f"note {index}"})
            case "grow":
                last = dict(sent[-1])
                if last["role"] == "user":
                    last["content"] = [*last["content"], text(f"more {index}")]
                    sent[-1] = last
            case ("user", said):
                sent.append({"role": "assistant", "content": [text(f"answer {index}")]})
                sent.append(user(text(f"user {index}"), *(block(k, f"{index}") for k in said)))
            case ("results", count, said):
                ids = [f"{index}.{n}" for n in range(count)]
                sent.append({"role": "assistant", "content": [{**USE, "id": i} for i in ids]})
                results = [{**result(f"result {i}"), "tool_use_id": i} for i in ids]
                sent.append(user(*results, *(block(k, f"{index}") for k in said)))
    return [*requests, sent]


@given(st.lists(STEP, max_size=8))
def test_a_request_continues_the_messages_of_every_request_before_it(steps: list[Any]) -> None:
    listed = [normalise(*sent, system="head").messages for sent in grown(steps)]
    final = listed[-1]
    for before in listed:
        last = len(before) - 1
        assert final[:last] == before[:last]
        kept, now = before[last], final[last]
        assert now["role"] == kept["role"]
        if isinstance(kept["content"], str) and isinstance(now["content"], str):
            assert now["content"].startswith(kept["content"])
        else:
            *same, end = kept["content"]
            assert now["content"][: len(same)] == same
            grows = end["type"] == "text"
            assert now["content"][len(same)] == end or (
                grows and now["content"][len(same)]["text"].startswith(end["text"])
            )


EVERYTHING: dict[str, Any] = {
    "model": "m",
    "max_tokens": 9,
    "system": [text("x-anthropic-billing-header: x"), text("Be brief.")],
    "messages": [
        user(text("Go."), {"type": "image", "source": {"type": "url", "url": "http://host"}}),
        {"role": "system", "content": [{"type": "tool_addition", "tool": {"type": "tool_reference", "name": "Edit"}}]},
        {"role": "assistant", "content": [thinking(COMPLETION_ID, "hm"), text("ok"), USE]},
        user(
            result([text("done"), {"type": "tool_reference", "tool_name": "Edit"}], is_error=True),
            {"type": "document", "title": "t", "source": {"type": "base64", "media_type": "text/plain", "data": "YQ=="}},
            {"type": "search_result", "title": "t", "source": "s", "content": [text("a")]},
            {"type": "other", "of": [{"x": 1}]},
        ),
        {"role": "system", "content": "note"},
    ],
    "tools": [TOOL, deferred("Edit"), {"type": "bash_20250124", "name": "bash"}],
    "tool_choice": {"type": "tool", "name": "Bash", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1},
    "output_config": {"format": {"type": "json_schema", "schema": {}}},
}  # fmt: skip


@given(st.data())
def test_whatever_stands_in_a_request_it_is_read_or_refused_in_words(data: st.DataObject) -> None:
    body = spoiled(data, EVERYTHING)
    untouched = json.dumps(body)
    with suppress(UnsupportedRequestError):
        assert {message["role"] for message in anthropic.normalise(body).messages} <= ROLES
    assert json.dumps(body) == untouched
