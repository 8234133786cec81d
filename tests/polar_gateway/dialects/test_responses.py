import json
from typing import Any

import pytest

from polar_gateway.dialects import responses
from polar_gateway.dialects.turn import (
    Call,
    Reasoning,
    Text,
    UnsupportedRequestError,
)
from tests.polar_gateway.dialects.clients import (
    COMPLETION_ID,
)
from tests.polar_gateway.dialects.responses_items import (
    AGENTS,
    FILE,
    PARAMETERS,
    RUN,
    answer_items,
    call,
    message,
    normalise,
    output,
)


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


def test_auxiliary_answers_have_the_providers_shape() -> None:
    assert json.loads(responses.count_body(42)) == {
        "object": "response.input_tokens",
        "input_tokens": 42,
    }
    assert json.loads(responses.models_body(["m"]))["data"][0]["id"] == "m"


def test_a_message_says_which_answer_of_ours_it_is() -> None:
    [reasoning, said, asked] = answer_items(
        normalise(),
        Reasoning(text="hm"),
        Text(text="Go."),
        Call(id="a", name="run", arguments="{}"),
    )
    by_ids = normalise(message("user", "Hi"), said, asked, output("a"), instructions="Be brief.")
    assert by_ids.answers == {2: COMPLETION_ID}
    sealed = {key: value for key, value in reasoning.items() if key not in ("id", "summary")}
    plain = message("assistant", "Go.")
    by_seal = normalise(message("user", "Hi"), sealed, plain, call("a"), output("a"))
    assert by_seal.answers == {1: COMPLETION_ID}
    assert by_seal.messages[1]["reasoning_content"] == "hm"
    assert normalise(message("assistant", "Go.", id="msg_01a1f902-4f48-7012")).answers == {}


def test_results_between_calls_of_one_answer_come_after_both() -> None:
    one, two = "fc_aaaaaaaaaaaa_0", "fc_aaaaaaaaaaaa_1"
    request = normalise(call("a", id=one), output("a"), call("b", id=two), output("b"))
    assert [each["role"] for each in request.messages] == ["assistant", "tool", "tool"]
    apart = normalise(call("a"), output("a"), call("b"), output("b"))
    assert [each["role"] for each in apart.messages] == ["assistant", "tool"] * 2


def test_a_result_without_its_call_is_a_users_text() -> None:
    request = normalise(output("gone", "left"), message("user", "Hi"))
    assert request.messages[0] == {"role": "user", "content": "[result of tool call gone]\n\nleft"}


def test_a_result_without_an_id_is_the_first_open_calls() -> None:
    request = normalise(
        call("a"), {"type": "function_call_output", "id": "fco_1", "name": "run", "output": "ok"}
    )
    assert request.messages[1] == {"role": "tool", "tool_call_id": "a", "content": "ok"}


def test_a_file_of_text_is_read() -> None:
    request = normalise(message("user", [{"type": "input_text", "text": "See:"}, FILE]))
    assert request.messages[0]["content"] == "See:\na.txt\né"


def test_a_later_configuration_counts() -> None:
    update = {
        "type": "configuration_update",
        "reasoning": {"effort": "none"},
        "text": {"format": {"type": "json_object"}},
    }
    request = normalise(message("user", "Hi"), update, reasoning={"effort": "high"})
    assert request.template_kwargs == {"enable_thinking": False}
    assert request.response_format == {"type": "json_object"}


def test_a_trigger_at_the_end_asks_for_a_summary_without_tools() -> None:
    history = [message("user", "Hi"), call("a", name="spawn", namespace="agents"), output("a")]
    fields: dict[str, Any] = {"tools": [AGENTS], "tool_choice": "required"}
    before = normalise(*history, **fields)
    request = normalise(*history, {"type": "compaction_trigger"}, **fields)
    assert (request.kind, request.tools, request.tool_choice) == ("compaction", None, None)
    assert request.messages[:-1] == before.messages
    assert "Summarise" in request.messages[-1]["content"]
    assert before.kind == "turn"


def test_a_trigger_elsewhere_is_nothing() -> None:
    request = normalise({"type": "compaction_trigger"}, message("user", "Hi"))
    assert (request.kind, len(request.messages)) == ("turn", 1)
