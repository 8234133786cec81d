from typing import Any

import pytest

from polar_gateway.capture.restore import (
    Candidate,
    Part,
    Restoration,
    choose,
    likeness,
    restoration,
    told,
)
from polar_gateway.dialects.messages import assistant_message, tool_call
from polar_gateway.dialects.turn import BlockDelta, BlockEnd, BlockStart, TurnEvent

EDIT = {
    "type": "function",
    "function": {
        "name": "Edit",
        "parameters": {
            "type": "object",
            "properties": {
                "file_path": {"type": "string"},
                "replace_all": {"type": "boolean", "default": False},
                "hunks": {
                    "type": "array",
                    "items": {"properties": {"count": {"type": "integer", "default": 1}}},
                },
            },
        },
    },
}


def says(
    *arguments: str, text: str = "", reasoning: str = "", name: str = "Edit"
) -> dict[str, Any]:
    calls = [tool_call(f"c{number}", name, each) for number, each in enumerate(arguments)]
    return assistant_message(text, reasoning, calls)


def restored(echo: dict[str, Any], answer: dict[str, Any]) -> tuple[str, ...] | None:
    """The notes of a restoration; None where there is none."""
    found = restoration(echo, answer, [EDIT])
    return None if found is None else found.notes


def test_an_identical_echo_lacks_nothing() -> None:
    said = says('{"file_path": "a"}', text="I edit.", reasoning="Hm.")
    assert restoration(said, {**said}, None) == Restoration()


@pytest.mark.parametrize(
    ("echo", "answer"),
    [
        ('{"a":1}', '{"a": 1.0}'),
        ('{"b":2,"a":1}', '{"a":1,"b":2}'),
        ('{"a":"é"}', '{"a": "\\u00e9"}'),
        ('{"a":100}', '{"a": 1e2}'),
        ('{"a":12345678901234567000}', '{"a": 12345678901234567890}'),
        ('{"a":{"b":[1,{"c":null}]}}', '{ "a": { "b": [ 1.0, { "c": null } ] } }'),
        ("{}", ""),
        ("{}", " "),
        ('{"file_path":"a"}', '{"file_path": "b", "file_path": "a"}'),
    ],
)
def test_arguments_that_are_spelled_anew_mean_the_same(echo: str, answer: str) -> None:
    assert restored(says(echo), says(answer)) == ("arguments restored",)


@pytest.mark.parametrize(
    ("echo", "answer"),
    [
        ('{"replace_all":false,"file_path":"a"}', '{"file_path": "a"}'),
        ('{"file_path":"a"}', '{"file_path": "a", "replace_all": false}'),
        ('{"hunks":[{"count":1},{}]}', '{"hunks": [{}, {"count": 1.0}]}'),
    ],
)
def test_arguments_with_defaults_added_or_dropped_mean_the_same(echo: str, answer: str) -> None:
    assert restored(says(echo), says(answer)) == ("arguments restored",)
    # The schema is the one of the tool that was called.
    assert restored(says(echo, name="Write"), says(answer, name="Write")) is None


@pytest.mark.parametrize(
    ("echo", "answer"),
    [
        ('{"a":1}', '{"a": 2}'),
        ('{"a":1}', '{"a": true}'),
        ('{"a":0}', '{"a": false}'),
        ('{"a":1}', '{"a": "1"}'),
        ('{"a":null}', "{}"),
        ('{"a":[1]}', '{"a": [1, 2]}'),
        ('{"a":[1]}', '{"a": {"0": 1}}'),
        ('{"file_path":"a","replace_all":true}', '{"file_path": "a"}'),
        ('{"file_path":""}', "{}"),
        ("{}", '{"a": '),
        ('{"a":"b"}', '{"a": "b'),
        ('{"a":null}', '{"a": NaN}'),
        ("1" + "0" * 400, "2.5"),
        ("[" * 5000 + "]" * 5000, "[" * 5000 + " " + "]" * 5000),
    ],
)
def test_arguments_that_say_something_else_are_an_edit(echo: str, answer: str) -> None:
    assert restored(says(echo), says(answer)) is None


def test_text_that_is_no_json_means_what_it_says() -> None:
    assert restored(says('{"a": '), says('{"a": ')) == ()
    assert restored(says('{"a":'), says('{"a": ')) is None


def test_a_schema_that_is_none_says_nothing_about_defaults() -> None:
    odd: list[Any] = [True, None, [], {"properties": []}, {"properties": {"x": True}}]
    for schema in odd:
        tools = [{"type": "function", "function": {"name": "Edit", "parameters": schema}}]
        assert restoration(says('{"x":1}'), says("{}"), tools) is None
        assert restoration(says('{"x":[1]}'), says('{"x": [1]}'), tools) is not None


def test_reasoning_that_was_dropped_comes_back_and_changed_reasoning_is_an_edit() -> None:
    answer = says(text="Yes.", reasoning="Let me think.\n")
    assert restored(says(text="Yes."), answer) == ("reasoning restored",)
    assert restored(says(text="Yes.", reasoning="Let me think."), answer) == ("reasoning restored",)
    assert restored(says(text="Yes.", reasoning="Let me thin"), answer) is None
    assert restored(says(text="Yes.", reasoning="I know."), says(text="Yes.")) is None


def test_white_space_around_a_text_comes_back_and_nothing_else_does() -> None:
    answer = says("{}", text="\n\nI look at it.\n")
    assert restored(says("{}", text="I look at it."), answer) == ("white space restored",)
    assert restored(says("{}", text=""), says("{}", text="\n")) == ("white space restored",)
    for text in ("", "I look", "I look  at it.", "i look at it."):
        assert restored(says("{}", text=text), answer) is None
    parts = [{"type": "text", "text": "I look at it."}]
    assert restored({**says("{}"), "content": parts}, answer) is None


def test_other_calls_are_an_edit() -> None:
    answer = says("{}", '{"a": 1}')
    assert restored(says("{}"), answer) is None
    assert restored(says("{}", '{"a": 1}', "{}"), answer) is None
    assert restored(says('{"a": 1}', "{}"), answer) is None
    assert restored(says("{}", '{"a": 1}', name="invalid"), answer) is None
    assert restored(says(), answer) is None


def test_call_ids_do_not_count_and_are_paired_in_order() -> None:
    echo = says("{}", "{}", "{}")
    for call, call_id in zip(echo["tool_calls"], ("x", "c1", "y"), strict=True):
        call["id"] = call_id
    assert restoration(echo, says("{}", "{}", "{}"), None) == Restoration(
        ("call ids restored",), (("x", "c0"), ("y", "c2")), "arguments_respelt"
    )


def candidate(
    index: int,
    said: str,
    *,
    delivered: bool = True,
    in_place: bool = True,
    goes_on: bool = False,
) -> Candidate:
    return Candidate(says(reasoning=said), delivered, index, in_place, goes_on)


def chosen(*candidates: Candidate) -> tuple[int, bool]:
    number, ambiguous = choose(candidates)
    return candidates[number].arrived, ambiguous


def test_of_several_answers_the_one_with_the_most_evidence_is_chosen() -> None:
    assert chosen(candidate(1, "a")) == (1, False)
    assert chosen(candidate(1, "a"), candidate(2, "b", in_place=False, goes_on=True)) == (1, False)
    assert chosen(candidate(1, "a", goes_on=True), candidate(2, "b")) == (1, False)


def test_between_equal_evidence_the_latest_delivered_answer_is_taken_and_it_is_said() -> None:
    assert chosen(candidate(1, "a"), candidate(2, "b"), candidate(3, "c", delivered=False)) == (
        2,
        True,
    )
    assert chosen(candidate(1, "a", delivered=False), candidate(2, "b", delivered=False)) == (
        2,
        True,
    )
    assert chosen(candidate(1, "a"), candidate(2, "a")) == (2, False)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"b":2,"a":1.0}', '{ "a": 1, "b": 2 }'),
        ('{"a":[{"b":100}]}', '{"a": [{"b": 1e2}]}'),
        ("", "{}"),
        ('{"a":12345678901234567000}', '{"a": 12345678901234567890}'),
    ],
)
def test_echoes_and_answers_of_one_meaning_are_alike(one: str, other: str) -> None:
    answer = says(one, text=" I look.\n", reasoning="Hm.")
    assert likeness(answer) == likeness(says(other, text="I look."))


def test_what_means_something_else_is_not_alike() -> None:
    answer = says('{"a":1}', text="I look.")
    others = [
        says('{"a":true}', text="I look."),
        says('{"a":"1"}', text="I look."),
        says('{"a":2}', text="I look."),
        says('{"a":1', text="I look."),
        says('{"a":1}', text="I look"),
        says('{"a":1}', text="I look.", name="Write"),
        says(text="I look."),
        says("1" + "0" * 400, text="I look."),
        says("[" * 5000, text="I look."),
    ]
    assert len({likeness(message) for message in [answer, *others]}) == 1 + len(others)


def test_how_far_an_answer_was_told_is_counted_by_what_it_is_made_of() -> None:
    events: list[TurnEvent] = [
        BlockStart(kind="reasoning"),
        BlockDelta(text="Hm"),
        BlockDelta(text="."),
        BlockEnd(),
        BlockStart(kind="text"),
        BlockDelta(text="Look"),
        BlockEnd(),
        BlockStart(kind="call", id="c0", name="Edit"),
        BlockDelta(text="{}"),
        BlockEnd(),
        BlockStart(kind="call", id="c1", name="Edit"),
        BlockDelta(text="{"),
    ]
    answer = says("{}", "{}", text="Look here.", reasoning="Hm. Well.")
    assert told(events[:2]) == Part(2, 0, 0)
    assert told(events[:6]) == Part(3, 4, 0)
    assert told(events[:8]) is told(events) is None  # inside a call
    part = told(events[:10])
    assert part == Part(3, 4, 1)
    assert part.of(answer) == says("{}", text="Look", reasoning="Hm.")


@pytest.mark.parametrize(
    ("echo", "answer", "level"),
    [
        (says("{}", text="a"), says("{}", text="a"), "exact"),
        (says('{"a":1}'), says('{"a": 1.0}'), "arguments_respelt"),
        (says('{"replace_all":false}'), says("{}"), "default_arguments"),
        (says(text="a"), says(text="a", reasoning="b"), "reasoning_restored"),
        (says('{"replace_all":false}'), says("{}", reasoning="b"), "reasoning_restored"),
        (says(text="a"), says(text="a\n", reasoning="b"), "white_space"),
    ],
)
def test_the_level_is_that_of_the_weakest_difference(
    echo: dict[str, Any], answer: dict[str, Any], level: str
) -> None:
    found = restoration(echo, answer, [EDIT])
    assert found is not None
    assert found.level == level


def test_defaults_that_no_schema_declares_are_known_of_some_tools() -> None:
    echo, answer = says('{"a":1,"replaceAll":false}', name="edit"), says('{"a":1}', name="edit")
    properties: dict[str, Any] = {"a": {}, "replaceAll": {"type": "boolean"}}

    def level(properties: dict[str, Any]) -> str | None:
        tool = {"name": "edit", "parameters": {"properties": properties}}
        found = restoration(echo, answer, [{"type": "function", "function": tool}])
        return found and found.level

    assert level(properties) == "default_arguments"
    assert level({**properties, "replaceAll": {"default": True}}) is None
    assert level({"a": {}}) is None  # another tool of that name
    no_longer_offered = restoration(echo, answer, None)
    assert no_longer_offered is not None
    assert no_longer_offered.level == "default_arguments"
