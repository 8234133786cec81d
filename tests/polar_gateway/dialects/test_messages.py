import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_gateway.dialects import messages
from polar_gateway.dialects.messages import Conversation
from polar_gateway.dialects.turn import Block, Call, Reasoning, Text, UnsupportedRequestError


def call(call_id: str) -> dict[str, Any]:
    return messages.tool_call(call_id, "run", "{}")


def reminder(text: str) -> str:
    return f"<system-reminder>\n{text}\n</system-reminder>"


def test_the_leading_system_messages_become_one() -> None:
    conversation = Conversation()
    for text in ("You are an agent.", "  \n", "Be brief."):
        conversation.system(text)
    conversation.user("Hello")
    assert conversation.finish() == [
        {"role": "system", "content": "You are an agent.\n\nBe brief."},
        {"role": "user", "content": "Hello"},
    ]


@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_later_system_message_stands_behind_the_message_before_it(role: str) -> None:
    conversation = Conversation()
    conversation.user("Hello")
    if role == "tool":
        conversation.assistant("", "", [call("a")])
        conversation.tool("a", "done")
    conversation.system("The file changed.")
    last = conversation.finish()[-1]
    said = {"user": "Hello", "tool": "done"}[role]
    assert (last["role"], last["content"]) == (role, f"{said}\n\n{reminder('The file changed.')}")


def test_a_reminder_is_not_wrapped_twice() -> None:
    conversation = Conversation()
    conversation.user("Hello")
    conversation.system(reminder("mind the gap"))
    assert conversation.finish()[0]["content"] == f"Hello\n\n{reminder('mind the gap')}"


def test_a_system_message_behind_an_assistants_opens_the_next_one() -> None:
    conversation = Conversation()
    conversation.user("Hello")
    conversation.assistant("", "", [call("a")])
    conversation.system("One.")
    conversation.system("Two.")
    conversation.tool("a", "done")
    assert conversation.finish()[-1] == {
        "role": "tool",
        "tool_call_id": "a",
        "content": f"{reminder('One.')}\n\n{reminder('Two.')}\n\ndone",
    }


def test_a_system_message_between_two_of_the_assistants_is_a_users() -> None:
    def said(last: list[str]) -> list[dict[str, Any]]:
        conversation = Conversation()
        conversation.user("Hello")
        conversation.assistant("Hi.", "", [])
        conversation.system("Go on.")
        for text in last:
            conversation.assistant(text, "", [])
        return conversation.finish()

    before, after = said([]), said(["Going on."])
    assert before[-1] == {"role": "user", "content": reminder("Go on.")}
    assert after[:3] == before


def test_a_reminder_joins_the_text_of_a_message_with_an_image() -> None:
    image = messages.image_part("data:image/png;base64,AA==", "original")
    assert image == {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    for content, expected in (
        ([image], [image, messages.text_part(reminder("r"))]),
        ([image, messages.text_part("t")], [image, messages.text_part(f"t\n\n{reminder('r')}")]),
    ):
        conversation = Conversation()
        conversation.user(content)
        conversation.system("r")
        assert conversation.finish()[0]["content"] == expected
    opened = Conversation()
    opened.assistant("Hi.", "", [])
    opened.system("r")
    opened.user([image])
    assert opened.finish()[1]["content"] == [messages.text_part(reminder("r")), image]


def test_texts_are_one_string_however_they_were_split() -> None:
    part, image = messages.text_part, messages.image_part("http://host/a.png", "low")
    assert messages.fold_parts([]) == ""
    assert messages.fold_parts([part("a")]) == "a"
    assert messages.fold_parts([part("a"), part("b")]) == "a\nb"
    assert messages.fold_parts([part("a"), part("b"), image, part("c")]) == [
        part("a\nb"),
        image,
        part("c"),
    ]


def test_a_tool_result_without_its_call_becomes_user_text() -> None:
    conversation = Conversation()
    conversation.assistant("", "", [call("a")])
    conversation.tool("a", "first")
    conversation.tool("a", "again")
    conversation.tool("gone", [messages.image_part("http://host/a.png")])
    rest = conversation.finish()[2:]
    assert [message["role"] for message in rest] == ["user", "user"]
    assert rest[0]["content"] == "[result of tool call a]\n\nagain"
    assert rest[1]["content"][0] == messages.text_part("[result of tool call gone]")
    assert conversation.notes == ["tool result without its call sent as user text"]


def test_a_tool_result_without_an_id_belongs_to_the_first_unanswered_call() -> None:
    conversation = Conversation()
    conversation.assistant("", "", [call("a"), call("b")])
    conversation.tool("", "first")
    conversation.tool("", "second")
    assert [message["tool_call_id"] for message in conversation.finish()[1:]] == ["a", "b"]


def test_pairing_any_number_of_results_takes_the_time_of_their_number() -> None:
    conversation = Conversation()
    conversation.assistant("", "", [call(str(at)) for at in range(100_000)])
    began = time.process_time()
    for at in range(100_000):
        conversation.tool("", str(at))
    assert time.process_time() - began < 3
    assert all(each["tool_call_id"] == each["content"] for each in conversation.finish()[1:])


def test_two_calls_of_one_id_have_two_results() -> None:
    conversation = Conversation()
    conversation.assistant("", "", [call("a"), call("a")])
    conversation.tool("a", "first")
    conversation.tool("a", "second")
    conversation.tool("a", "third")
    assert [message["role"] for message in conversation.finish()] == [
        "assistant",
        "tool",
        "tool",
        "user",
    ]


@pytest.mark.parametrize("head", [[], ["You are an agent."]])
def test_an_answer_is_found_at_the_place_of_its_message(head: list[str]) -> None:
    conversation = Conversation()
    for text in head:
        conversation.system(text)
    conversation.user("Hello")
    conversation.assistant("Hi.", "", [], answer="msg_000000000001")
    conversation.system("Go on.")  # becomes a message between the two
    conversation.assistant("Of another.", "", [])
    conversation.assistant("Well.", "", [], answer="msg_000000000002")
    listed = conversation.finish()
    assert {listed[at]["content"]: answer for at, answer in conversation.answers.items()} == {
        "Hi.": "msg_000000000001",
        "Well.": "msg_000000000002",
    }


def test_only_ids_of_completions_are_references() -> None:
    assert messages.completion_reference("msg_0123456789ab") == "msg_0123456789ab"
    for other in ("msg_0123456789ab\n", "msg_0123456789AB", "EqQBCgIYAhIM", "", None, 7):
        assert messages.completion_reference(other) is None


def test_reminders_beside_results_stay_with_them_up_to_the_first_text() -> None:
    def beside(*texts: str) -> list[tuple[str, Any]]:
        conversation = Conversation()
        conversation.assistant("", "", [call("a")])
        conversation.tool("a", "done")
        conversation.beside_results([messages.text_part(text) for text in texts])
        return [(each["role"], each["content"]) for each in conversation.finish()[1:]]

    assert beside() == [("tool", "done")]
    assert beside(reminder("r")) == [("tool", f"done\n\n{reminder('r')}")]
    assert beside(reminder("r"), "And?", reminder("s")) == [
        ("tool", f"done\n\n{reminder('r')}"),
        ("user", f"And?\n{reminder('s')}"),
    ]


def test_a_failed_result_says_so_once_in_its_text() -> None:
    part, image = messages.text_part, messages.image_part("http://host/a.png")
    assert messages.as_error("exit 1") == "Error: exit 1"
    assert messages.as_error("Error: exit 1") == "Error: exit 1"
    assert messages.as_error([part("exit 1"), image]) == [part("Error: exit 1"), image]
    assert messages.as_error([image]) == [part("Error:"), image]


def test_a_file_of_text_is_its_title_and_text() -> None:
    assert messages.decoded_text("text/x-python", "w6k=", "file") == "é"
    assert messages.document_text("", "body") == "body"
    assert messages.document_text("Notes", "body") == "Notes\nbody"
    for media_type, encoded in (
        ("application/pdf", "AA=="),
        ("text/plain", "/w=="),
        ("text/a", "A"),
    ):
        with pytest.raises(UnsupportedRequestError, match="file: "):
            messages.decoded_text(media_type, encoded, "file")


def test_a_turn_is_one_assistant_message() -> None:
    blocks: list[Block] = [
        Reasoning(text="hm"),
        Text(text="I "),
        Call(id="a", name="run", arguments='{"x": 1}'),
        Text(text="ran."),
    ]
    assert messages.message_of(blocks) == {
        "role": "assistant",
        "content": "I ran.",
        "reasoning_content": "hm",
        "tool_calls": [messages.tool_call("a", "run", '{"x": 1}')],
    }
    assert messages.message_of([]) == {"role": "assistant", "content": ""}


def test_unknown_fields_are_noted_and_refused_ones_name_themselves() -> None:
    notes: list[str] = []
    body = {"model": "m", "store": True, "new_thing": 1, "unset": None, "background": False}
    messages.screen(body, {"model": "translated", "store": "ignored"}, {"background": "no"}, notes)
    assert notes == ["new_thing ignored"]
    with pytest.raises(UnsupportedRequestError, match="background: no") as refused:
        messages.screen({"background": True}, {}, {"background": "no"}, notes)
    assert refused.value.field == "background"


@pytest.mark.parametrize(
    ("check", "value"),
    [
        (messages.objects, "text"),
        (messages.objects, [1]),
        (messages.objects, None),
        (messages.string, 1),
        (messages.mapping, []),
        (messages.count, "7"),
        (messages.count, True),
        (messages.count, 1.5),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_its_path(check: Any, value: Any) -> None:
    with pytest.raises(UnsupportedRequestError, match=r"messages\[3\]"):
        check(value, "messages[3]")


def test_a_request_must_name_a_model() -> None:
    with pytest.raises(UnsupportedRequestError, match="model"):
        messages.model_name({})


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_arguments_are_spelled_compactly_without_loss(value: Any) -> None:
    spelled = messages.compact_json(value)
    assert json.loads(spelled) == value
    assert messages.compact_json(json.loads(spelled)) == spelled
    assert "\\u00e9" not in messages.compact_json("é")


STEP = st.sampled_from(["system", "user", "assistant", "tool"])


@given(st.lists(STEP, max_size=12), st.lists(STEP, min_size=1, max_size=6))
def test_a_longer_history_continues_a_shorter_ones_messages(
    shorter: list[str], more: list[str]
) -> None:
    """Up to the last message, which may have text put behind it."""

    def build(steps: list[str]) -> list[dict[str, Any]]:
        conversation = Conversation()
        conversation.system("head")
        conversation.user("task")
        calls = 0
        for index, step in enumerate(steps):
            match step:
                case "system":
                    conversation.system(f"note {index}")
                case "user":
                    conversation.user(f"user {index}")
                case "assistant":
                    calls += 1
                    conversation.assistant(f"assistant {index}", "", [call(str(calls))])
                case "tool":
                    conversation.tool(str(calls), f"result {index}")
        return conversation.finish()

    before, after = build(shorter), build(shorter + more)
    assert after[: len(before) - 1] == before[:-1]
    assert len(after) >= len(before)
    kept, grown = before[-1], after[len(before) - 1]
    assert grown["content"].startswith(kept["content"])
    # A reminder at the very end was a user message only while no tool result was there to carry it.
    waited = shorter[-1:] == ["system"] and grown["role"] == "tool"
    assert grown["role"] == kept["role"] or waited
    roles = [message["role"] for message in after]
    assert roles.count("system") == 1
    assert roles[0] == "system"
