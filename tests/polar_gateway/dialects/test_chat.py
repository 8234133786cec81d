import json
from typing import Any

import pytest

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

TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
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
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "system", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]},
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
    streamer = chat.streamer(REQUEST, COMPLETION_ID, CREATED)
    assert parse_sse(streamer.error(error)) == [(None, body)]


def test_auxiliary_answers_have_the_providers_shape() -> None:
    assert json.loads(chat.models_body(["m"])) == {
        "object": "list",
        "data": [{"id": "m", "object": "model", "created": 0, "owned_by": "polar"}],
    }
    assert json.loads(chat.count_body(42)) == {"total_tokens": 42}
