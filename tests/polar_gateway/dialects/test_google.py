import base64
import json
import time
from typing import Any

import pytest

from polar_gateway.dialects import google
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
from tests.polar_gateway.dialects.clients import (
    COMPLETION_ID,
    CREATED,
    parse_sse,
    receive,
    stream,
    turn,
)

SIGNATURE = base64.b64encode(COMPLETION_ID.encode()).decode()
USER = {"role": "user", "parts": [{"text": "Hi"}]}
PNG = {"inlineData": {"mimeType": "image/png", "data": "iVBORw0="}}
PNG_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0="}}


def normalise(*contents: Any, **fields: Any) -> ModelRequest:
    return google.normalise({"model": "m", "contents": list(contents) or [USER], **fields})


def config(**fields: Any) -> ModelRequest:
    return normalise(generationConfig=fields)


def model(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "parts": list(parts)}


def call(name: str, signature: str | None = None, **fields: Any) -> dict[str, Any]:
    part: dict[str, Any] = {"functionCall": {"name": name, "args": {}, **fields}}
    return part if signature is None else {**part, "thoughtSignature": signature}


def result(name: str, output: Any = "done", **fields: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": {"output": output}, **fields}}


def calls_and_results(request: ModelRequest) -> list[tuple[str, str]]:
    """(name of the call, what it returned), in the order of the results."""
    names = {
        call["id"]: call["function"]["name"]
        for message in request.messages
        for call in message.get("tool_calls", [])
    }
    return [
        (names[message["tool_call_id"]], message["content"])
        for message in request.messages
        if message["role"] == "tool"
    ]


@pytest.mark.parametrize(
    "instruction", ["Be brief.", {"parts": [{"text": "Be brief."}], "role": "user"}]
)
def test_the_system_instruction_is_the_system_message(instruction: Any) -> None:
    request = normalise(systemInstruction=instruction)
    assert request.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]


def test_a_turn_keeps_its_thought_its_text_and_its_calls() -> None:
    request = normalise(
        USER,
        model(
            {"text": "hm", "thought": True},
            {"text": "I "},
            {"text": "will."},
            call("run", id="a", args={"x": 1.5, "s": "é"}),
        ),
        user(result("run", id="a")),
    )
    function = {"name": "run", "arguments": '{"x":1.5,"s":"é"}'}
    assert request.messages[1:] == [
        {
            "role": "assistant",
            "content": "I will.",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "done"},
    ]


def test_results_belong_to_their_calls_by_id() -> None:
    request = normalise(
        USER,
        model(call("run", id="a"), call("run", id="b")),
        user(result("run", "B", id="b"), result("run", "A", id="a")),
    )
    assert [(m["tool_call_id"], m["content"]) for m in request.messages[2:]] == [
        ("b", "B"),
        ("a", "A"),
    ]


@pytest.mark.parametrize("with_id", [{}, {"id": "made-up#0-0"}])
def test_results_of_calls_without_ids_belong_to_them_by_name_and_order(
    with_id: dict[str, str],
) -> None:
    """Gemini CLI's sub-agents send ids with the results alone, pi sends none at all."""
    request = normalise(
        USER,
        model(call("read"), call("run"), call("read")),
        user(result("run", "3", **with_id), result("read", "1", **with_id), result("read", "2")),
        model(call("read")),
        user(result("read", "4", **with_id)),
    )
    assert calls_and_results(request) == [
        ("run", "3"),
        ("read", "1"),
        ("read", "2"),
        ("read", "4"),
    ]
    ids = [call["id"] for m in request.messages for call in m.get("tool_calls", [])]
    assert len(set(ids)) == 4


def test_a_result_whose_call_is_gone_is_told_as_text() -> None:
    request = normalise(USER, user(result("run", "late", id="gone")), model({"text": "ok"}), USER)
    assert request.messages[1]["role"] == "user"
    assert request.messages[1]["content"] == "[result of tool call gone]\n\nlate"
    assert request.notes == ["tool result without its call sent as user text"]


def test_a_result_with_anothers_id_is_not_given_to_a_call_that_has_its_own() -> None:
    request = normalise(USER, model(call("run", id="a")), user(result("run", id="b")))
    assert [message["role"] for message in request.messages] == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ({"output": "text"}, "text"),
        ({"result": "text"}, "text"),
        ({"name": "run", "content": "text"}, "text"),
        ({"error": "no such file"}, "Error: no such file"),
        ({"error": "Error: no such file"}, "Error: no such file"),
        ({"output": {"a": 1}}, '{"output":{"a":1}}'),
        ({"output": "text", "code": 0}, '{"output":"text","code":0}'),
        ({}, ""),
        (None, ""),
    ],
)
def test_a_response_is_its_text_where_it_holds_one(response: Any, expected: str) -> None:
    part = {"functionResponse": {"name": "run", "id": "a", "response": response}}
    request = normalise(USER, model(call("run", id="a")), user(part))
    assert request.messages[2] == {"role": "tool", "tool_call_id": "a", "content": expected}


def test_an_image_behind_or_in_a_response_is_part_of_it() -> None:
    inside = {"functionResponse": {"name": "see", "id": "b", "response": {}, "parts": [PNG]}}
    request = normalise(
        USER,
        model(call("see", id="a"), call("see", id="b")),
        user(result("see", "seen", id="a"), PNG, inside),
    )
    assert [message["content"] for message in request.messages[2:]] == [
        [{"type": "text", "text": "seen"}, PNG_PART],
        [PNG_PART],
    ]


def test_what_a_user_says_beside_results_follows_them() -> None:
    said = {"text": "Hurry."}
    request = normalise(USER, model(call("run", id="a")), user(said, result("run", id="a"), PNG))
    assert [message["role"] for message in request.messages[2:]] == ["tool", "user"]
    assert request.messages[3]["content"] == [{"type": "text", "text": "Hurry."}, PNG_PART]
    assert request.notes == ["text before tool results sent behind them"]


def test_a_reminder_beside_results_stays_with_them() -> None:
    reminder = {"text": "<system-reminder>\nBe quick.\n</system-reminder>"}
    request = normalise(USER, model(call("run", id="a")), user(result("run", id="a"), reminder))
    assert request.messages[2:] == [
        {"role": "tool", "tool_call_id": "a", "content": f"done\n\n{reminder['text']}"}
    ]


def test_a_reminder_beside_results_stays_with_them_when_the_user_goes_on() -> None:
    reminder = {"text": "<system-reminder>\nBe quick.\n</system-reminder>"}
    before = normalise(USER, model(call("run", id="a")), user(result("run", id="a"), reminder))
    said = user(result("run", id="a"), reminder, {"text": "And now?"})
    request = normalise(USER, model(call("run", id="a")), said)
    assert request.messages == [*before.messages, {"role": "user", "content": "And now?"}]


def test_a_signature_of_ours_names_the_answer_and_no_other_does() -> None:
    theirs = base64.b64encode(b"sig00000001").decode()
    request = normalise(
        USER,
        model({"text": "a", "thoughtSignature": SIGNATURE}, call("run", SIGNATURE, id="1")),
        user(result("run", id="1")),
        model(call("run", "skip_thought_signature_validator", id="2")),
        user(result("run", id="2")),
        model(call("run", theirs, id="3"), call("run", id="4")),
        user(result("run", id="3"), result("run", id="4")),
        systemInstruction="Be brief.",
    )
    assert request.answers == {2: COMPLETION_ID}
    assert request.messages[2]["content"] == "a"


def test_answers_that_a_harness_joined_are_taken_apart() -> None:
    other = base64.b64encode(b"msg_ba9876543210").decode()
    request = normalise(
        USER,
        model(
            {"text": "one"},
            {"text": "two", "thoughtSignature": SIGNATURE},
            {"text": "three", "thoughtSignature": other},
            call("run", id="a"),
        ),
        user(result("run", id="a")),
    )
    assert [message["content"] for message in request.messages[1:3]] == ["onetwo", "three"]
    assert request.answers == {1: COMPLETION_ID, 2: "msg_ba9876543210"}


def test_text_files_are_their_text_and_linked_images_are_links() -> None:
    data = base64.b64encode("naïve".encode()).decode()
    linked = {"fileData": {"mimeType": "image/jpeg", "fileUri": "https://example.com/a.jpg"}}
    document = {"inlineData": {"mimeType": "text/plain", "data": data}}
    request = normalise(user(document, linked))
    assert request.messages[0]["content"] == [
        {"type": "text", "text": "naïve"},
        {"type": "image_url", "image_url": {"url": "https://example.com/a.jpg"}},
    ]


def test_code_that_the_provider_would_run_is_noted() -> None:
    code = {"executableCode": {"language": "PYTHON", "code": "1"}}
    request = normalise(user(code), model(code, {"text": "ok"}), USER)
    assert request.messages[0]["content"] == ('{"executableCode":{"language":"PYTHON","code":"1"}}')
    assert request.messages[1] == {"role": "assistant", "content": "ok"}
    assert request.notes == [
        "part executableCode sent as JSON text",
        "model part executableCode ignored",
    ]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"cachedContent": "cachedContents/1"}, "cachedContent"),
        ({"generationConfig": {"candidateCount": 2}}, "generationConfig.candidateCount"),
        ({"generationConfig": {"speechConfig": {"a": 1}}}, "generationConfig.speechConfig"),
        (
            {"generationConfig": {"responseModalities": ["AUDIO"]}},
            "generationConfig.responseModalities",
        ),
        (
            {"generationConfig": {"responseMimeType": "text/x.enum"}},
            "generationConfig.responseMimeType",
        ),
        ({"generationConfig": {"maxOutputTokens": "9"}}, "generationConfig.maxOutputTokens"),
        ({"generationConfig": []}, "generationConfig"),
        ({"contents": "Hi"}, "contents"),
        ({"contents": [{"role": "judge", "parts": []}]}, "contents[0].role"),
        ({"contents": [user({"text": 1})]}, "contents[0].parts[0].text"),
        (
            {"contents": [user({"inlineData": {"mimeType": "audio/wav", "data": "aa"}})]},
            "contents[0].parts[0]",
        ),
        (
            {"contents": [user({"fileData": {"mimeType": "image/png", "fileUri": "gs://a/b"}})]},
            "contents[0].parts[0]",
        ),
        ({"systemInstruction": {"parts": [PNG]}}, "systemInstruction.parts[0]"),
        (
            {
                "tools": [{"functionDeclarations": [{"name": "a"}]}],
                "toolConfig": {"functionCallingConfig": {"mode": "SOME"}},
            },
            "toolConfig.functionCallingConfig.mode",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_path(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedRequestError) as raised:
        google.normalise({"model": "m", "contents": [USER], **fields})
    assert raised.value.field == field


def test_a_tool_is_a_function_and_hosted_ones_are_dropped() -> None:
    schema = {"type": "object", "properties": {"type": {"type": "string"}}}
    request = normalise(
        tools=[
            {"functionDeclarations": [{"name": "a", "parametersJsonSchema": schema}]},
            {"googleSearch": {}, "function_declarations": [{"name": "b", "description": "B."}]},
        ]
    )
    empty = {"type": "object", "properties": {}}
    assert request.tools == [
        {"type": "function", "function": {"name": "a", "parameters": schema}},
        {"type": "function", "function": {"name": "b", "description": "B.", "parameters": empty}},
    ]
    assert request.notes == ["tool googleSearch ignored"]


def test_the_apis_own_kind_of_schema_becomes_json_schema() -> None:
    parameters = {
        "type": "OBJECT",
        "propertyOrdering": ["type", "list"],
        "properties": {
            "type": {"type": "STRING", "enum": ["A"], "nullable": True},
            "list": {"type": "ARRAY", "items": {"type": "NUMBER"}, "min_items": "1"},
            "either": {"any_of": [{"type": "INTEGER"}, {"type": "TYPE_UNSPECIFIED"}]},
        },
        "required": ["type"],
    }
    request = normalise(tools=[{"functionDeclarations": [{"name": "a", "parameters": parameters}]}])
    assert request.tools is not None
    assert request.tools[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "type": {"type": ["string", "null"], "enum": ["A", None]},
            "list": {"type": "array", "items": {"type": "number"}, "minItems": 1},
            "either": {"anyOf": [{"type": "integer"}, {}]},
        },
        "required": ["type"],
    }


@pytest.mark.parametrize(
    ("choice", "expected", "kept"),
    [
        ({}, None, ["a", "b"]),
        ({"mode": "AUTO"}, "auto", ["a", "b"]),
        ({"mode": "VALIDATED"}, "auto", ["a", "b"]),
        ({"mode": "NONE"}, "none", ["a", "b"]),
        ({"mode": "ANY"}, "required", ["a", "b"]),
        (
            {"mode": "ANY", "allowedFunctionNames": ["b"]},
            {"type": "function", "function": {"name": "b"}},
            ["a", "b"],
        ),
        ({"mode": "ANY", "allowed_function_names": ["b", "c"]}, "required", ["b"]),
    ],
)
def test_a_tool_choice_is_the_engines(choice: Any, expected: Any, kept: list[str]) -> None:
    request = normalise(
        tools=[{"functionDeclarations": [{"name": "a"}, {"name": "b"}]}],
        toolConfig={"functionCallingConfig": choice},
    )
    assert request.tools is not None
    assert request.tool_choice == expected
    assert [tool["function"]["name"] for tool in request.tools] == kept


@pytest.mark.parametrize("mode", ["ANY", "VALIDATED"])
@pytest.mark.parametrize("allowed", [["z"], ["y", "z"], [1]])
def test_a_choice_of_functions_that_are_not_there_is_refused(mode: str, allowed: list[Any]) -> None:
    with pytest.raises(UnsupportedRequestError, match="allowedFunctionNames"):
        normalise(
            tools=[{"functionDeclarations": [{"name": "a"}]}],
            toolConfig={"functionCallingConfig": {"mode": mode, "allowedFunctionNames": allowed}},
        )


def test_no_tools_means_no_tool_choice_either() -> None:
    request = normalise(tools=[], toolConfig={"functionCallingConfig": {"mode": "ANY"}})
    assert (request.tools, request.tool_choice) == (None, None)
    assert request.notes == ["toolConfig without tools ignored"]


def test_sampling_is_only_what_the_harness_set() -> None:
    assert config(stopSequences=[]).sampling == {}
    request = config(
        temperature=0,
        topP=0.5,
        topK=3,
        stopSequences=["x"],
        seed=1,
        presencePenalty=0.1,
        frequencyPenalty=0.2,
        maxOutputTokens=7,
        candidateCount=1,
        responseModalities=["TEXT"],
    )
    assert request.sampling == {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "stop": ["x"],
        "seed": 1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
    }
    assert request.max_tokens == 7
    assert request.notes == []


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"responseMimeType": "text/plain"}, None),
        ({"responseMimeType": "application/json"}, {"type": "json_object"}),
        (
            {"responseMimeType": "application/json", "responseSchema": {"type": "STRING"}},
            {
                "type": "json_schema",
                "json_schema": {"name": "response", "schema": {"type": "string"}},
            },
        ),
        (
            {"responseJsonSchema": {"type": ["string", "null"]}},
            {
                "type": "json_schema",
                "json_schema": {"name": "response", "schema": {"type": ["string", "null"]}},
            },
        ),
    ],
)
def test_a_response_schema_is_the_engines_format(fields: dict[str, Any], expected: Any) -> None:
    assert config(**fields).response_format == expected


@pytest.mark.parametrize(
    ("thinking", "kwargs", "notes"),
    [
        ({}, {}, []),
        ({"thinkingBudget": 0}, {"enable_thinking": False}, []),
        ({"thinkingBudget": -1}, {}, []),
        ({"thinkingBudget": 999}, {}, ["thinkingBudget ignored"]),
        ({"thinkingLevel": "high"}, {}, ["thinkingLevel ignored"]),
        ({"thinking_level": "THINKING_LEVEL_UNSPECIFIED"}, {}, []),
    ],
)
def test_thinking_is_turned_off_only_where_the_harness_says_so(
    thinking: dict[str, Any], kwargs: dict[str, Any], notes: list[str]
) -> None:
    request = config(thinkingConfig=thinking)
    assert (request.template_kwargs, request.notes) == (kwargs, notes)


def test_names_may_be_in_snake_case_and_what_is_the_users_stays_as_it_is() -> None:
    request = normalise(
        model({"function_call": {"name": "run_it", "args": {"snake_key": 1}}}),
        user({"function_response": {"name": "run_it", "response": {"exit_code": 0}}}, PNG),
        system_instruction={"parts": [{"text": "Be brief."}]},
        generation_config={"max_output_tokens": 5, "thinking_config": {"thinking_budget": 0}},
        safety_settings=[],
    )
    assert request.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"snake_key":1}'
    assert request.messages[2]["content"][0]["text"] == '{"exit_code":0}'
    assert (request.max_tokens, request.template_kwargs) == (5, {"enable_thinking": False})
    assert request.notes == []


def test_what_is_counted_may_be_a_whole_request() -> None:
    whole = {"model": "models/x", "contents": [USER], "systemInstruction": "Be brief."}
    for field in ("generateContentRequest", "generate_content_request"):
        request = google.normalise({"model": "m", field: whole})
        assert request.model == "m"
        assert request.messages == normalise(systemInstruction="Be brief.").messages


def test_a_last_message_of_the_models_is_noted() -> None:
    assert normalise(USER, model({"text": "So"})).notes == [
        "the last message is the assistant's: answered anew, not continued"
    ]


def asked(*, thoughts: bool = True, alt: str = "sse") -> ModelRequest:
    return normalise(
        stream=True, alt=alt, generationConfig={"thinkingConfig": {"includeThoughts": thoughts}}
    )


BLOCKS: list[Block] = [
    Reasoning(text="hm"),
    Text(text="Yes."),
    Call(id="call_1", name="run", arguments='{"x": 1}'),
]


def test_a_whole_answer_has_the_providers_shape() -> None:
    answered = turn(BLOCKS, "tool_calls", cached_tokens=900, reasoning_tokens=20)
    assert json.loads(google.answer(asked(), answered)) == {
        "candidates": [
            {
                "content": {
                    "parts": [
                        {"text": "hm", "thought": True, "thoughtSignature": SIGNATURE},
                        {"text": "Yes.", "thoughtSignature": SIGNATURE},
                        {
                            "functionCall": {"id": "call_1", "name": "run", "args": {"x": 1}},
                            "thoughtSignature": SIGNATURE,
                        },
                    ],
                    "role": "model",
                },
                "finishReason": "STOP",
                "index": 0,
            }
        ],
        "usageMetadata": {
            "promptTokenCount": 1000,
            "candidatesTokenCount": 30,
            "totalTokenCount": 1050,
            "thoughtsTokenCount": 20,
            "cachedContentTokenCount": 900,
        },
        "modelVersion": "m",
        "responseId": COMPLETION_ID,
    }


def test_thoughts_are_told_to_those_who_ask() -> None:
    request = asked(thoughts=False)
    whole = json.loads(google.answer(request, turn(BLOCKS)))
    assert [next(iter(part)) for part in whole["candidates"][0]["content"]["parts"]] == [
        "text",
        "functionCall",
    ]
    assert b'thought":true' not in stream(google, request, turn(BLOCKS))
    silent = json.loads(google.answer(request, turn(BLOCKS[:1])))
    assert silent["candidates"][0]["content"]["parts"] == [{"text": ""}]


@pytest.mark.parametrize("arguments", ['{"command": "echo', "[1]", "NaN", '{"a": 1}}', "[" * 9999])
def test_arguments_that_are_no_object_come_back_as_they_were_sampled(arguments: str) -> None:
    answered = turn([Call(id="call_1", name="run", arguments=arguments)])
    [content] = receive(google, google.answer(asked(), answered)).history
    assert content["parts"][0]["functionCall"]["args"] == {
        "__unparsedToolInput": {"raw": arguments}
    }
    [_, message, *_] = normalise(USER, content, user(result("run", id="call_1"))).messages
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


def test_a_call_that_the_limit_cut_is_not_made() -> None:
    blocks: list[Block] = [Text(text="I run"), Call(id="call_1", name="run", arguments='{"comm')]
    answered = turn(blocks, "length")
    whole = json.loads(google.answer(asked(), answered))["candidates"][0]
    assert whole["content"]["parts"] == [{"text": "I run", "thoughtSignature": SIGNATURE}]
    assert whole["finishReason"] == "MAX_TOKENS"
    streamed = stream(google, asked(), answered)
    assert b"functionCall" not in streamed
    assert b'"finishReason":"MAX_TOKENS"' in streamed


def test_a_stream_is_written_byte_for_byte_as_the_provider_does() -> None:
    streamer = google.streamer(asked(), COMPLETION_ID, CREATED)
    head = b'data: {"candidates":[{"content":{"parts":['
    tail = b'],"role":"model"},"index":0}],"modelVersion":"m","responseId":"msg_0123456789ab"}\n\n'
    signed = b',"thoughtSignature":"%b"}' % SIGNATURE.encode()
    assert streamer.content_type == "text/event-stream; charset=utf-8"
    assert streamer.open(1000) == b""
    assert streamer.event(BlockStart(kind="reasoning")) == b""
    assert streamer.event(BlockDelta(text="h")) == (
        head + b'{"text":"h","thought":true' + signed + tail
    )
    assert streamer.event(BlockDelta(text="m")) == head + b'{"text":"m","thought":true}' + tail
    assert streamer.event(BlockEnd()) == b""
    assert streamer.keep_alive() == head + b'{"text":""}' + tail
    assert streamer.event(BlockStart(kind="text")) == b""
    assert streamer.event(BlockDelta(text='"é"')) == (
        head + '{"text":"\\"é\\""'.encode() + signed + tail
    )
    assert streamer.event(BlockDelta(text=".")) == head + b'{"text":"."}' + tail
    assert streamer.event(BlockEnd()) == b""
    assert streamer.event(BlockStart(kind="call", id="call_1", name="run")) == b""
    assert streamer.event(BlockDelta(text='{"x"')) == b""
    assert streamer.event(BlockDelta(text=": 1}")) == b""
    assert streamer.event(BlockEnd()) == (
        head + b'{"functionCall":{"id":"call_1","name":"run","args":{"x":1}}' + signed + tail
    )
    assert streamer.event(TurnEnd(turn=turn(BLOCKS, "tool_calls"))) == (
        b'data: {"candidates":[{"content":{"parts":[{"text":""}],"role":"model"},'
        b'"finishReason":"STOP","index":0}],"usageMetadata":{"promptTokenCount":1000,'
        b'"candidatesTokenCount":50,"totalTokenCount":1050},"modelVersion":"m",'
        b'"responseId":"msg_0123456789ab"}\n\n'
    )


def test_without_alt_sse_a_streamed_answer_is_one_json_array() -> None:
    request = asked(alt="json")
    assert request.framing == "json_array"
    assert google.streamer(request, COMPLETION_ID, CREATED).content_type.startswith(
        "application/json"
    )
    in_events = [data for _, data in parse_sse(stream(google, asked(), turn(BLOCKS)))]
    assert json.loads(stream(google, request, turn(BLOCKS))) == in_events


OVERLOADED = ErrorKind(status=529, code="overloaded", message="Busy.", retry_after=3)


def test_an_error_in_the_stream_is_no_event_but_a_bare_object() -> None:
    streamer = google.streamer(asked(), COMPLETION_ID, CREATED)
    assert streamer.error(OVERLOADED) == google.error_body(OVERLOADED)


def test_an_error_in_an_array_is_its_last_item() -> None:
    streamer = google.streamer(asked(alt="json"), COMPLETION_ID, CREATED)
    opening = streamer.open(1000) + streamer.event(BlockStart(kind="text"))
    broken = opening + streamer.event(BlockDelta(text="Y")) + streamer.error(OVERLOADED)
    [part, error] = json.loads(broken)
    assert part["candidates"][0]["content"]["parts"][0]["text"] == "Y"
    assert error == json.loads(google.error_body(OVERLOADED))


@pytest.mark.parametrize(
    ("code", "status", "name"),
    [
        ("invalid_request", 400, "INVALID_ARGUMENT"),
        ("authentication", 401, "UNAUTHENTICATED"),
        ("not_found", 404, "NOT_FOUND"),
        ("too_large", 413, "INVALID_ARGUMENT"),
        ("rate_limit", 429, "RESOURCE_EXHAUSTED"),
        ("session_closed", 400, "FAILED_PRECONDITION"),
        ("internal", 500, "INTERNAL"),
    ],
)
def test_an_error_has_the_providers_shape(code: Any, status: int, name: str) -> None:
    error = ErrorKind(status=status, code=code, message="No.")
    assert google.error_status(error) == status
    assert json.loads(google.error_body(error)) == {
        "error": {"code": status, "message": "No.", "status": name}
    }


def test_overload_says_when_to_ask_again() -> None:
    assert google.error_status(OVERLOADED) == 503
    retry = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "3s"}
    assert json.loads(google.error_body(OVERLOADED)) == {
        "error": {"code": 503, "message": "Busy.", "status": "UNAVAILABLE", "details": [retry]}
    }


def test_an_overflow_is_said_in_the_providers_words() -> None:
    words = "The input token count exceeds the maximum number of tokens allowed"
    error = ErrorKind(status=400, code="context_overflow", message="9 > 8 tokens")
    assert json.loads(google.error_body(error))["error"] == {
        "code": 400,
        "message": f"{words}: 9 > 8 tokens",
        "status": "INVALID_ARGUMENT",
    }
    said = ErrorKind(status=400, code="context_overflow", message="9 exceeds the maximum of 8")
    assert json.loads(google.error_body(said))["error"]["message"] == said.message


def test_auxiliary_answers_have_the_providers_shape() -> None:
    listed = {
        "name": "models/a/b",
        "version": "1",
        "displayName": "a/b",
        "supportedGenerationMethods": ["generateContent", "countTokens"],
    }
    assert json.loads(google.model_body("a/b")) == listed
    assert json.loads(google.models_body(["a/b"])) == {"models": [listed]}
    assert google.count_body(7) == b'{"totalTokens":7}'


def test_pairing_any_number_of_results_takes_the_time_of_their_number() -> None:
    calls = [call("read") for _ in range(60_000)]
    answered = [result("read", str(at)) for at in range(50_000)]
    strangers = [result("other", id="x") for _ in range(10_000)]
    began = time.process_time()
    request = normalise(USER, model(*calls), user(*strangers, *answered))
    assert [message["content"] for message in request.messages[-50_000:]] == [
        str(at) for at in range(50_000)
    ]
    assert time.process_time() - began < 5


def test_allowing_any_number_of_functions_takes_the_time_of_their_number() -> None:
    names = [f"function_{at}" for at in range(20_000)]
    choice = {"mode": "ANY", "allowedFunctionNames": names[1:]}
    began = time.process_time()
    request = normalise(
        tools=[{"functionDeclarations": [{"name": name} for name in names]}],
        toolConfig={"functionCallingConfig": choice},
    )
    assert request.tools is not None
    assert len(request.tools) == 19_999
    assert time.process_time() - began < 2
