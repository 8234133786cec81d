import json
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_gateway.dialects import chat
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
from tests.polar_gateway.dialects.clients import COMPLETION_ID, CREATED, parse_sse, turn
from tests.polar_gateway.dialects.spoiling import ROLES, spoiled

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "bash", "parameters": {"type": "object"}},
}
USER = {"role": "user", "content": "Hi"}


def normalise(*messages: Any, **fields: Any) -> ModelRequest:
    return chat.normalise({"model": "m", "messages": list(messages) or [USER], **fields})


def test_a_developer_is_a_system_and_parts_are_a_string() -> None:
    request = normalise(
        {
            "role": "developer",
            "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}],
        },
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    )
    assert request.messages == [{"role": "system", "content": "Be\nbrief."}, USER]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("content", [None, "", []])
def test_an_assistant_message_has_one_form(field: str, content: Any) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "bash", "arguments": '{"x": 1}'}}
    said = {
        "role": "assistant",
        "content": content,
        field: "hm",
        "tool_calls": [call],
        "refusal": None,
    }
    request = normalise(USER, said, {"role": "tool", "tool_call_id": "a", "content": "done"})
    assert request.messages[1:] == [
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "done"},
    ]


def test_text_parts_of_an_assistant_are_one_sampled_text() -> None:
    parts = [{"type": "text", "text": "I "}, {"type": "refusal", "refusal": "won't."}]
    request = normalise(USER, {"role": "assistant", "content": parts}, USER)
    assert request.messages[1] == {"role": "assistant", "content": "I won't."}


def test_arguments_given_as_an_object_are_spelled() -> None:
    def spelled(arguments: Any) -> str:
        call = {"id": "a", "function": {"name": "bash", "arguments": arguments}}
        request = normalise(USER, {"role": "assistant", "tool_calls": [call]}, USER)
        return str(request.messages[1]["tool_calls"][0]["function"]["arguments"])

    assert spelled({"b": 1, "a": "é"}) == '{"b":1,"a":"é"}'
    assert spelled(None) == "{}"
    assert spelled('{"broken') == '{"broken'


def test_a_refusal_is_the_text_that_was_sampled() -> None:
    request = normalise(USER, {"role": "assistant", "content": None, "refusal": "I won't."}, USER)
    assert request.messages[1] == {"role": "assistant", "content": "I won't."}


def test_a_tools_image_stays_in_its_result() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    image = {"type": "image_url", "image_url": {"url": "http://host/a.png", "detail": "low"}}
    content = [{"type": "text", "text": "Here:"}, image]
    request = normalise(
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "name": "look", "content": content},
    )
    assert request.messages[-1] == {"role": "tool", "tool_call_id": "a", "content": content}
    assert request.notes == []


def test_a_file_of_text_is_its_name_and_text() -> None:
    file = {"filename": "a.md", "file_data": "data:text/markdown;base64,Ym9keQ=="}
    request = normalise({"role": "user", "content": [{"type": "file", "file": file}]})
    assert request.messages[0]["content"] == "a.md\nbody"


def test_a_name_of_a_speaker_is_noted() -> None:
    request = normalise({**USER, "name": "ann"})
    assert (request.messages, request.notes) == ([USER], ["name of a user message ignored"])


def test_images_stay_parts() -> None:
    url = "data:image/png;base64,AA=="
    request = normalise(
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Look:"},
                {"type": "image_url", "image_url": {"url": url, "detail": "original"}},
                {"type": "image_url", "image_url": url},
            ],
        }
    )
    part = {"type": "image_url", "image_url": {"url": url}}
    assert request.messages[0]["content"] == [{"type": "text", "text": "Look:"}, part, part]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"n": 2}, "n"),
        ({"functions": [{}]}, "functions"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "assistant", "function_call": {"name": "x"}}]},
            "messages[0].function_call",
        ),
        ({"messages": [{"role": "assistant", "audio": {"id": "x"}}]}, "messages[0].audio"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content[0]",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "file",
                                "file": {"file_data": "data:application/pdf;base64,AA=="},
                            }
                        ],
                    }
                ]
            },
            "messages[0].content[0].file.file_data",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]}
                ]
            },
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "system", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"type": "shell"}]}]},
            "messages[0].tool_calls[0]",
        ),
        ({"messages": "Hi"}, "messages"),
        ({"max_tokens": "7"}, "max_tokens"),
        ({"stream_options": True}, "stream_options"),
        ({"model": None}, "model"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_path(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedRequestError) as refused:
        chat.normalise({"model": "m", "messages": [USER], **fields})
    assert refused.value.field == field


def test_no_tools_means_no_tool_choice_either() -> None:
    for tools in (None, [], [{"type": "web_search"}]):
        request = normalise(tools=tools, tool_choice="required", parallel_tool_calls=True)
        assert (request.tools, request.tool_choice, request.parallel_tool_calls) == (
            None,
            None,
            None,
        )
        assert request.notes[-1] == "tool_choice without tools ignored"
    kept = normalise(tools=[TOOL], tool_choice="required", parallel_tool_calls=False, n=1)
    assert (kept.tools, kept.tool_choice, kept.parallel_tool_calls) == ([TOOL], "required", False)
    assert kept.notes == []


def test_a_function_tool_has_one_form() -> None:
    given = {**TOOL["function"], "description": "Run.", "strict": True}
    cached = {"cache_control": {"type": "ephemeral"}}
    plain = {"type": "function", "function": {**TOOL["function"], "strict": False}, **cached}
    bare = {"type": "function", "function": {"name": "now"}}
    assert normalise(tools=[{"type": "function", "function": given}, plain, bare]).tools == [
        {"type": "function", "function": given},
        TOOL,
        {
            "type": "function",
            "function": {"name": "now", "parameters": {"type": "object", "properties": {}}},
        },
    ]


FUNCTION = {"type": "function", "function": {"name": "bash"}}
PATCH = {"type": "custom", "custom": {"name": "patch"}}


@pytest.mark.parametrize(
    ("choice", "names", "expected"),
    [
        ("none", ["bash", "patch"], "none"),
        (FUNCTION, ["bash", "patch"], FUNCTION),
        (PATCH, ["bash", "patch"], {"type": "function", "function": {"name": "patch"}}),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [PATCH]}},
            ["patch"],
            "required",
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
            [],
            None,
        ),
    ],
)
def test_a_tool_choice_is_the_engines(choice: Any, names: list[str], expected: Any) -> None:
    request = normalise(tools=[TOOL, PATCH], tool_choice=choice)
    assert [tool["function"]["name"] for tool in request.tools or []] == names
    assert request.tool_choice == expected


@pytest.mark.parametrize(
    "choice", ["dice", {"type": "function", "function": {"name": "gone"}}, {"type": "mcp"}]
)
def test_a_choice_of_what_is_not_there_is_refused(choice: Any) -> None:
    with pytest.raises(UnsupportedRequestError, match="tool_choice"):
        normalise(tools=[TOOL], tool_choice=choice)


def test_a_custom_tool_is_a_function_and_is_called_as_a_custom_one() -> None:
    grammar = {"syntax": "lark", "definition": "start: x"}
    tool = {
        "type": "custom",
        "custom": {
            "name": "patch",
            "description": "Patch.",
            "format": {"type": "grammar", "grammar": grammar},
        },
    }
    said = {"id": "a", "type": "custom", "custom": {"name": "patch", "input": 'say "é"'}}
    request = normalise(
        USER,
        {"role": "assistant", "content": None, "tool_calls": [said]},
        {"role": "tool", "tool_call_id": "a", "content": "done"},
        tools=[tool, TOOL],
    )
    assert request.tools is not None
    function = request.tools[0]["function"]
    assert function["description"] == "Patch.\n\nThe input follows this lark grammar:\nstart: x"
    assert list(function["parameters"]["properties"]) == ["input"]
    [call] = request.messages[1]["tool_calls"]
    assert call["function"] == {"name": "patch", "arguments": '{"input":"say \\"é\\""}'}

    plain = Call(id="b", name="bash", arguments="{}")
    blocks: list[Block] = [Call(id="a", name="patch", arguments='{"input": "say \\"é\\""}'), plain]
    whole = json.loads(chat.answer(request, turn(blocks)))["choices"][0]["message"]
    assert whole["tool_calls"][0] == said
    assert whole["tool_calls"][1]["type"] == "function"

    streamer = chat.streamer(request, COMPLETION_ID, CREATED)
    written = b""
    for event in (
        BlockStart(kind="call", id="a", name="patch"),
        BlockDelta(text='{"inp'),
        BlockDelta(text='ut": "say \\"'),
        BlockDelta(text='é\\""}'),
        BlockEnd(),
        BlockStart(kind="call", id="b", name="bash"),
        BlockDelta(text="{}"),
        BlockEnd(),
    ):
        written += streamer.event(event)
    [opened, *more] = [e.data["choices"][0]["delta"]["tool_calls"][0] for e in parse_sse(written)]
    assert opened == {
        "index": 0,
        "id": "a",
        "type": "custom",
        "custom": {"name": "patch", "input": ""},
    }
    inputs = [part["custom"]["input"] for part in more if "custom" in part]
    assert len(inputs) > 1
    assert "".join(inputs) == 'say "é"'
    assert [part["index"] for part in more if "function" in part] == [1, 1]
    assert "tool_calls" not in json.loads(chat.answer(request, turn([])))["choices"][0]["message"]


def test_one_stop_text_is_a_list_and_plain_text_no_format() -> None:
    request = normalise(stop="END", response_format={"type": "text"})
    assert (request.sampling, request.response_format) == ({"stop": ["END"]}, None)


def test_sampling_and_format_pass_through() -> None:
    sampling = {
        "temperature": 0.0,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.1,
        "stop": ["END"],
        "seed": 7,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"1": -100},
    }
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    request = normalise(**sampling, response_format=schema, logprobs=True, user="me")
    assert request.sampling == sampling
    assert request.response_format == schema
    assert request.notes == ["logprobs ignored"]


def test_the_newer_limit_outranks_the_older() -> None:
    assert normalise(max_tokens=5).max_tokens == 5
    assert normalise(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert normalise(max_completion_tokens=None).max_tokens is None


@pytest.mark.parametrize(
    ("fields", "template_kwargs", "notes"),
    [
        ({"reasoning_effort": "none"}, {"enable_thinking": False}, []),
        ({"reasoning_effort": "high"}, {}, ["reasoning_effort ignored"]),
        ({"chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}, []),
        ({"enable_thinking": False}, {"enable_thinking": False}, []),
        (
            {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True},
            [],
        ),
    ],
)
def test_thinking_is_the_templates_own_unless_said_otherwise(
    fields: dict[str, Any], template_kwargs: dict[str, Any], notes: list[str]
) -> None:
    request = normalise(**fields)
    assert (request.template_kwargs, request.notes) == (template_kwargs, notes)


def test_a_last_message_of_the_assistants_is_noted() -> None:
    request = normalise(USER, {"role": "assistant", "content": "I was"})
    assert request.messages[-1] == {"role": "assistant", "content": "I was"}
    assert request.notes == ["the last message is the assistant's: answered anew, not continued"]


REQUEST = ModelRequest(model="gpt-x", messages=[], stream=True, include_usage=True)
CALLS: list[Block] = [
    Reasoning(text="hm"),
    Call(id="a", name="bash", arguments='{"x": 1}'),
    Call(id="b", name="bash", arguments="{}"),
]


def test_a_whole_answer_has_the_providers_shape() -> None:
    answered = turn(CALLS, "stop", prompt_tokens=100, cached_tokens=64, reasoning_tokens=3)
    assert json.loads(chat.answer(REQUEST, answered)) == {
        "id": "chatcmpl-0123456789ab",
        "object": "chat.completion",
        "created": CREATED,
        "model": "gpt-x",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": None,
                    "reasoning_content": "hm",
                    "tool_calls": [
                        {
                            "id": "a",
                            "type": "function",
                            "function": {"name": "bash", "arguments": '{"x": 1}'},
                        },
                        {
                            "id": "b",
                            "type": "function",
                            "function": {"name": "bash", "arguments": "{}"},
                        },
                    ],
                },
                "logprobs": None,
                "finish_reason": "tool_calls",
            }
        ],
        "usage": {
            "prompt_tokens": 100,
            "completion_tokens": 50,
            "total_tokens": 150,
            "prompt_tokens_details": {"cached_tokens": 64},
            "completion_tokens_details": {"reasoning_tokens": 3},
        },
    }


@pytest.mark.parametrize(
    ("finish", "reason"), [("stop", "stop"), ("length", "length"), ("tool_calls", "stop")]
)
def test_an_answer_without_calls_says_why_it_stopped(finish: Any, reason: str) -> None:
    whole = json.loads(chat.answer(REQUEST, turn([Text(text="a")], finish)))
    assert whole["choices"][0]["finish_reason"] == reason
    assert whole["choices"][0]["message"]["content"] == "a"


@pytest.mark.parametrize("include_usage", [True, False])
def test_a_stream_ends_with_a_reason_the_usage_if_asked_and_done(include_usage: bool) -> None:
    request = ModelRequest(model="gpt-x", messages=[], include_usage=include_usage)
    streamer = chat.streamer(request, COMPLETION_ID, CREATED)
    answered = turn([Text(text="a")], "length")
    written = streamer.event(TurnEnd(turn=answered))
    assert written.endswith(b"data: [DONE]\n\n")
    chunks = [event.data for event in parse_sse(written)]
    assert chunks[0]["choices"][0]["finish_reason"] == "length"
    if include_usage:
        assert chunks[1]["choices"] == []
        assert chunks[1]["usage"] == json.loads(chat.answer(request, answered))["usage"]
    assert len(chunks) == 1 + include_usage


def test_a_stream_is_written_byte_for_byte_as_the_provider_does() -> None:
    streamer = chat.streamer(REQUEST, COMPLETION_ID, CREATED)
    written = streamer.open(12)
    for event in (
        BlockStart(kind="reasoning"),
        BlockDelta(text="hm"),
        BlockEnd(),
        BlockStart(kind="text"),
        BlockDelta(text='"é"\n'),
        BlockEnd(),
        BlockStart(kind="call", id="a", name="bash"),
        BlockDelta(text='{"x":'),
        BlockEnd(),
        BlockStart(kind="call", id="b", name="bash"),
        BlockDelta(text="{}"),
        BlockEnd(),
    ):
        written += streamer.event(event)
    written += streamer.keep_alive()
    head = (
        'data: {"id":"chatcmpl-0123456789ab","object":"chat.completion.chunk",'
        '"created":1700000000,"model":"gpt-x","choices":[{"index":0,"delta":'
    )
    tail = ',"logprobs":null,"finish_reason":null}]}'
    assert written.decode().split("\n\n") == [
        *(
            head + delta + tail
            for delta in (
                '{"role":"assistant","content":""}',
                '{"reasoning_content":"hm"}',
                '{"content":"\\"é\\"\\n"}',
                '{"tool_calls":[{"index":0,"id":"a","type":"function","function":{"name":"bash","arguments":""}}]}',
                '{"tool_calls":[{"index":0,"function":{"arguments":"{\\"x\\":"}}]}',
                '{"tool_calls":[{"index":1,"id":"b","type":"function","function":{"name":"bash","arguments":""}}]}',
                '{"tool_calls":[{"index":1,"function":{"arguments":"{}"}}]}',
                "{}",
            )
        ),
        "",
    ]


@pytest.mark.parametrize(
    ("code", "kind", "provider_code"),
    [
        ("invalid_request", "invalid_request_error", None),
        ("authentication", "invalid_request_error", "invalid_api_key"),
        ("not_found", "invalid_request_error", "not_found"),
        ("too_large", "invalid_request_error", "request_too_large"),
        ("context_overflow", "invalid_request_error", "context_length_exceeded"),
        ("rate_limit", "rate_limit_error", "rate_limit_exceeded"),
        ("overloaded", "server_error", "server_is_overloaded"),
        ("session_closed", "invalid_request_error", "session_closed"),
        ("internal", "server_error", None),
    ],
)
def test_an_error_has_the_providers_shape(code: Any, kind: str, provider_code: str | None) -> None:
    error = ErrorKind(status=418, code=code, message="So it is.")
    body = json.loads(chat.error_body(error))
    assert body == {
        "error": {"message": "So it is.", "type": kind, "param": None, "code": provider_code}
    }


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("context_overflow", 400, "So it is."),
        ("session_closed", 400, "So it is."),
        ("rate_limit", 429, "429 So it is."),
        ("overloaded", 503, "503 So it is."),
        ("internal", 500, "500 So it is."),
    ],
)
def test_an_error_inside_a_stream_names_in_its_sentence_the_status_that_is_asked_again_after(
    code: Any, status: int, said: str
) -> None:
    error = ErrorKind(status=status, code=code, message="So it is.")
    streamer = chat.streamer(REQUEST, COMPLETION_ID, CREATED)
    [(event, body)] = parse_sse(streamer.error(error))
    assert event is None
    assert body == json.loads(chat.error_body(msgspec.structs.replace(error, message=said)))


def test_a_model_is_asked_for_by_any_name() -> None:
    assert chat.match("GET", "/v1/models/org/model", {}, {}) == ("model", {"model": "org/model"})
    assert chat.match("GET", "/v1/models/", {}, {}) == ("models", {})
    assert chat.match("GET", "/v1/files", {}, {}) is None


def test_auxiliary_answers_have_the_providers_shape() -> None:
    assert json.loads(chat.models_body(["m"])) == {
        "object": "list",
        "data": [{"id": "m", "object": "model", "created": 0, "owned_by": "polar"}],
    }
    assert json.loads(chat.model_body("m")) == json.loads(chat.models_body(["m"]))["data"][0]
    assert json.loads(chat.count_body(42)) == {"total_tokens": 42}


STEP = st.sampled_from(["system", "developer", "user", "answer", "calls"])


def conversation(steps: list[str]) -> list[list[dict[str, Any]]]:
    """A harness's messages at each of its requests: whenever they end with no answer, every call of
    which has its result. Notes for the model may stand anywhere, between calls and results too."""
    sent: list[dict[str, Any]] = [{"role": "system", "content": "head"}, USER]
    requests = [list(sent)]
    for index, step in enumerate(steps):
        match step:
            case "answer":
                sent.append({"role": "assistant", "content": f"answer {index}"})
                continue
            case "calls":
                ids = [f"{index}.{n}" for n in range(index % 3 + 1)]
                calls = [{"id": i, "type": "function", "function": {"name": "f"}} for i in ids]
                sent.append({"role": "assistant", "content": None, "tool_calls": calls})
                for each in ids:
                    sent.append({"role": "system", "content": f"before {each}"})
                    sent.append({"role": "tool", "tool_call_id": each, "content": f"did {each}"})
            case role:
                sent.append({"role": role, "content": f"{role} {index}"})
        requests.append(list(sent))
    return requests


@given(st.lists(STEP, max_size=9))
def test_a_request_continues_the_messages_of_every_request_before_it(steps: list[str]) -> None:
    listed = [normalise(*sent).messages for sent in conversation(steps)]
    final = listed[-1]
    for before in listed:
        last = len(before) - 1
        assert final[:last] == before[:last]
        assert final[last]["content"].startswith(before[last]["content"])
        assert final[last] == {**before[last], "content": final[last]["content"]}
    assert [message["role"] for message in final].count("system") == 1


EVERYTHING: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://host"}}]},
        {"role": "user", "content": [{"type": "file", "file": {"filename": "a", "file_data": "data:text/a;base64,YQ=="}}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "bash", "arguments": {"x": 1}}},
                {"id": "b", "type": "custom", "custom": {"name": "patch", "input": "x"}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "done"}]},
        {"role": "developer", "content": "note"},
    ],
    "tools": [TOOL, {"type": "custom", "custom": {"name": "patch", "format": {"type": "grammar", "grammar": {}}}}],
    "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [FUNCTION, PATCH]}},
    "response_format": {"type": "json_schema", "json_schema": {}},
    "chat_template_kwargs": {"enable_thinking": True},
    "stream_options": {"include_usage": True},
    "stop": ["x"],
    "modalities": ["text"],
}  # fmt: skip


@given(st.data())
def test_whatever_stands_in_a_request_it_is_read_or_refused_in_words(data: st.DataObject) -> None:
    body = spoiled(data, EVERYTHING)
    untouched = json.dumps(body)
    with suppress(UnsupportedRequestError):
        assert {message["role"] for message in chat.normalise(body).messages} <= ROLES
    assert json.dumps(body) == untouched
