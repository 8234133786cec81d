"""Which answer an echo is one of, seen through a session's capture."""

import itertools
import json
from array import array
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders.records import Completion
from polar_gateway.capture.session import OpenCall, SessionCapture
from polar_gateway.dialects.messages import assistant_message, message_of
from polar_gateway.dialects.turn import (
    Block,
    BlockDelta,
    BlockStart,
    Call,
    ModelRequest,
    Reasoning,
    Text,
    TurnEvent,
    Usage,
)
from polar_gateway.engines.base import EngineReply
from tests.generated import examples
from tests.polar_gateway.capture.blocks import blocks_of, closed, parent_of

Message = dict[str, Any]


@pytest.fixture
def capture(tmp_path: Path) -> SessionCapture:
    return capture_in(tmp_path)


def capture_in(folder: Path) -> SessionCapture:
    return SessionCapture(session_id="s1", journal_path=folder / "journal")


def asked(
    messages: list[Message],
    answers: dict[int, str] | None = None,
    tools: list[dict[str, Any]] | None = None,
) -> ModelRequest:
    # A harness sends its history anew each time, so no object is the one of an earlier call.
    sent = msgspec.json.decode(msgspec.json.encode([messages, tools]))
    return ModelRequest(model="m", messages=sent[0], tools=sent[1], answers=answers or {})


class Session:
    """Calls as the proxy makes them."""

    def __init__(self, capture: SessionCapture) -> None:
        self.capture = capture
        self._ids = itertools.count()

    def open(self, request: ModelRequest, thread: str = "") -> OpenCall:
        headers = {"thread-id": thread} if thread else {}
        return self.capture.open(
            self.capture.restored(request, headers),
            completion_id=f"msg_{next(self._ids):012x}",
            dialect="chat",
            headers=headers,
        )

    def answer(self, request: ModelRequest, *blocks: Block, thread: str = "") -> Completion:
        return closed(self.capture, self.open(request, thread), reply(*blocks))


def reply(*blocks: Block) -> EngineReply:
    return EngineReply(
        prompt_ids=array("i", [1]),
        sampled_ids=array("i", [2]),
        logprobs=array("f", [-0.5]),
        blocks=list(blocks),
        finish_reason="stop",
        usage=Usage(),
    )


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def result(call_id: str, text: str = "done") -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def bash(call_id: str, command: str = "ls") -> Call:
    return Call(id=call_id, name="bash", arguments=json.dumps({"command": command}, indent=1))


def echo(completion: Completion, **changes: Any) -> Message:
    """The answer as a harness sends it back that drops reasoning and spells arguments anew."""
    message = msgspec.json.decode(msgspec.json.encode(completion.response_message))
    message.pop("reasoning_content", None)
    for call in message.get("tool_calls", ()):
        call["function"]["arguments"] = compact(json.loads(call["function"]["arguments"]))
    return {**message, **changes}


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


GO = [user("go")]


def test_an_echo_becomes_the_recorded_message_and_the_notes_say_what_came_back(
    capture: SessionCapture,
) -> None:
    session = Session(capture)
    first = session.answer(asked(GO), Reasoning(text="Hm."), Text(text="Look."), bash("c1"))
    request = asked([*GO, echo(first), result("c1")])
    request.notes.append("store ignored")
    restored = capture.restored(request)
    assert restored.messages[1] == first.response_message
    assert restored.messages[0] == first.messages[0]
    assert restored.messages[2:] == request.messages[2:]
    assert restored.notes == ["store ignored", "reasoning restored", "arguments restored"]
    assert request.messages[1] == echo(first)
    assert request.notes == ["store ignored"]


def test_a_history_that_came_back_whole_is_as_it_was_and_nothing_is_noted(
    capture: SessionCapture,
) -> None:
    session = Session(capture)
    first = session.answer(asked(GO), Reasoning(text="Hm."), bash("c1"))
    request = asked([*GO, first.response_message, result("c1")])
    assert capture.restored(request) == request
    assert capture.restored(asked(GO)) == asked(GO)


def test_the_record_is_what_the_engine_was_sent(capture: SessionCapture) -> None:
    session = Session(capture)
    first = session.answer(asked(GO), Reasoning(text="Hm."), bash("c1"))
    second = session.answer(asked([*GO, echo(first), result("c1")]), Text(text="Done."))
    assert second.messages == [*GO, first.response_message, result("c1")]
    assert (parent_of(second), second.messages_shared) == (first.completion_id, 2)
    assert second.messages_tail == [result("c1")]
    assert second.notes == ["reasoning restored", "arguments restored"]
    call = capture.open(
        asked([*GO, echo(first), result("c1")]),
        completion_id="msg_00000000000f",
        dialect="chat",
        headers={},
    )
    unrestored = closed(capture, call, reply(Text(text="Done.")))
    assert unrestored.messages[1] == echo(first)


def test_restoring_is_stable_over_a_whole_conversation(capture: SessionCapture) -> None:
    session = Session(capture)
    sent: list[Message] = [*GO]
    done: list[Completion] = []
    for turn in range(8):
        done.append(
            session.answer(
                asked(sent), Reasoning(text=f"Step {turn}."), bash(f"c{turn}", f"step {turn}")
            )
        )
        sent = [*sent, echo(done[-1]), result(f"c{turn}")]
    for earlier, later in itertools.pairwise(done):
        assert parent_of(later) == earlier.completion_id
        assert later.messages[:-1] == [*earlier.messages, earlier.response_message]
        assert later.messages[-2] == earlier.response_message


# ---- evidence ----


def siblings(session: Session, *blocks: list[Block]) -> list[Completion]:
    """Several answers to one prompt."""
    return [session.answer(asked(GO), *each) for each in blocks]


def thought(text: str, *, said: str = "Yes.") -> list[Block]:
    return [Reasoning(text=text), Text(text=said)]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_reference_tells_siblings_apart(capture: SessionCapture, which: int) -> None:
    said: list[Block] = [Text(text="Yes.")]
    answers = siblings(Session(capture), thought("a"), said, thought("b"))
    request = asked([*GO, echo(answers[which]), user("more")], {1: answers[which].completion_id})
    restored = capture.restored(request)
    assert restored.messages[1] == answers[which].response_message
    assert restored.notes == ([] if which == 1 else ["reasoning restored"])


@pytest.mark.parametrize("which", [0, 1])
def test_a_call_id_tells_siblings_apart(capture: SessionCapture, which: int) -> None:
    answers = siblings(
        Session(capture),
        [Reasoning(text="a"), bash("x")],
        [Reasoning(text="b"), bash("y")],
    )
    restored = capture.restored(asked([*GO, echo(answers[which]), result("xy"[which])]))
    assert restored.messages[1] == answers[which].response_message
    assert "ambiguous echo" not in restored.notes


def test_reasoning_that_is_there_tells_siblings_apart(capture: SessionCapture) -> None:
    first, second = siblings(
        Session(capture),
        [Reasoning(text="a"), bash("functions.bash:0")],
        [Reasoning(text="b"), bash("functions.bash:0")],
    )
    for answer, reasoning in ((first, "a"), (second, "b")):
        sent = echo(answer, reasoning_content=reasoning)
        restored = capture.restored(asked([*GO, sent, result("functions.bash:0")]))
        assert restored.messages[1] == answer.response_message
        assert restored.notes == ["arguments restored"]


def test_an_echo_that_is_exactly_one_of_the_siblings_is_that_one(capture: SessionCapture) -> None:
    plain, _ = siblings(Session(capture), [Text(text="Yes.")], thought("b"))
    restored = capture.restored(asked([*GO, echo(plain), user("more")]))
    assert restored.messages[1] == plain.response_message
    assert restored.notes == []


def test_repeated_call_ids_are_narrowed_by_the_place_of_the_echo(capture: SessionCapture) -> None:
    session = Session(capture)
    sent: list[Message] = [*GO]
    done = []
    for turn in range(3):
        done.append(
            session.answer(asked(sent), Reasoning(text=f"try {turn}"), bash("functions.bash:0"))
        )
        sent = [*sent, echo(done[-1]), result("functions.bash:0", f"try {turn} failed")]
    restored = capture.restored(asked(sent))
    assert [
        message == d.response_message
        for message, d in zip(restored.messages[1::2], done, strict=True)
    ] == [True] * 3
    assert "ambiguous echo" not in restored.notes


def test_an_ambiguous_echo_is_of_the_latest_delivered_answer_and_that_is_noted(
    capture: SessionCapture,
) -> None:
    session = Session(capture)
    _, second = siblings(session, thought("a"), thought("b"))
    lost = session.open(asked(GO))
    lost.close(reply(*thought("c")), {})
    lost.delivered_tokens = 0
    lost.undelivered()
    restored = capture.restored(asked([*GO, echo(second), user("more")]))
    assert restored.messages[1] == second.response_message
    assert restored.notes == ["reasoning restored", "ambiguous echo"]


def test_an_echo_that_was_told_by_its_reference_is_ambiguous_without_it(
    capture: SessionCapture,
) -> None:
    session = Session(capture)
    first, second = siblings(session, thought("a"), thought("b"))
    sent = [*GO, echo(first), user("more")]
    for answer in (first, second, first):
        restored = capture.restored(asked(sent, {1: answer.completion_id}))
        assert restored.messages[1] == answer.response_message
        assert restored.notes == ["reasoning restored"]
    assert capture.restored(asked(sent)).notes == ["reasoning restored", "ambiguous echo"]


def test_of_two_answers_that_an_echo_may_be_of_the_one_of_its_own_conversation_counts(
    capture: SessionCapture,
) -> None:
    session = Session(capture)
    plain = session.answer(asked(GO), Text(text="Done."), thread="one")
    thinking = session.answer(asked(GO), *thought("Hm.", said="Done."), thread="two")
    on = asked([*GO, echo(plain), user("more")])
    for thread, answer, level in (
        ("two", thinking, "reasoning_restored"),
        ("one", plain, "exact"),
        ("two", thinking, "reasoning_restored"),
    ):
        call = session.open(on, thread)
        assert call.previous is not None
        assert (call.previous.completion_id, call.attached) == (answer.completion_id, level)
        assert not call.ambiguous


def test_a_conversation_that_begins_with_anothers_answer_continues_that(
    capture: SessionCapture,
) -> None:
    session = Session(capture)
    first = session.answer(asked(GO), *thought("a"), thread="one")
    call = session.open(asked([*GO, echo(first), user("more")]), "two")
    assert call.previous is not None
    assert call.previous.completion_id == first.completion_id


def test_an_ambiguous_echo_stays_with_the_answer_that_it_was_taken_for(
    capture: SessionCapture,
) -> None:
    session = Session(capture)
    first = session.answer(asked(GO), *thought("a"))
    on = [*GO, echo(first), user("more")]
    second = session.answer(asked(on), Text(text="Fine."))
    session.answer(asked(GO), *thought("b"))
    third = session.answer(asked([*on, echo(second), user("and more")]), Text(text="Good."))
    assert third.messages[1] == first.response_message
    assert parent_of(third) == second.completion_id
    # The other conversation, too, once it goes on.
    fourth = session.answer(asked([*GO, echo(first), user("else")]), Text(text="Fine."))
    assert fourth.notes == ["reasoning restored", "ambiguous echo"]
    assert fourth.messages[1]["reasoning_content"] == "b"


def test_answers_that_are_equal_are_not_ambiguous(capture: SessionCapture) -> None:
    first, _ = siblings(Session(capture), thought("a"), thought("a"))
    restored = capture.restored(asked([*GO, echo(first), user("more")]))
    assert restored.messages[1] == first.response_message
    assert restored.notes == ["reasoning restored"]


def test_an_answer_is_found_under_another_head_by_its_reference_or_its_call_id(
    capture: SessionCapture,
) -> None:
    session = Session(capture)
    first = session.answer(asked(GO), Reasoning(text="a"), bash("c1"))
    second = session.answer(asked([*GO, echo(first), result("c1")]), *thought("b", said="One."))
    sent = [*second.messages, second.response_message, user("?")]
    third = session.answer(asked(sent), *thought("c", said="Two."))
    tail = [echo(first), result("c1"), echo(second), user("?"), echo(third), user("!")]
    after_compaction = asked([user("Summary."), *tail])
    restored = capture.restored(after_compaction)
    # The first by its call id, the others because they stand behind it as before.
    for index, answer in ((1, first), (3, second), (5, third)):
        assert restored.messages[index] == answer.response_message
    fourth = session.answer(after_compaction, Text(text="Ok."))
    assert fourth.messages == restored.messages
    # Without the call there is nothing but the reference to go by.
    alone = [user("Summary."), echo(third), user("!")]
    assert capture.restored(asked(alone)) == asked(alone)
    referring = capture.restored(asked(alone, {1: third.completion_id}))
    assert referring.messages[1] == third.response_message
    # Where it has been restored once, its place is known as well.
    session.answer(asked(alone, {1: third.completion_id}), Text(text="Ok."))
    assert capture.restored(asked(alone)).messages[1] == third.response_message


def test_an_answer_that_is_not_recorded_yet_stays_as_it_was_sent_first(
    capture: SessionCapture,
) -> None:
    session = Session(capture)
    slow = session.open(asked(GO))
    answer = reply(Reasoning(text="a"), bash("c1"))
    sent = assistant_message("", "a", [])
    sent["tool_calls"] = [{**answer.message["tool_calls"][0]}]
    sent["tool_calls"][0]["function"] = {"name": "bash", "arguments": '{"command":"ls"}'}
    on = [*GO, sent, result("c1")]
    second = closed(capture, session.open(asked(on)), reply(Text(text="Done.")))
    slow.close(answer, {})
    third = session.open(asked([*on, second.response_message, user("more")]))
    assert third.after is not None
    assert third.after.completion_id == second.completion_id


# ---- whose answer a request continues ----

TOOLSET = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]


def previous(call: OpenCall | Completion) -> str | None:
    return None if call.previous is None else call.previous.completion_id


def with_tokens(*ids: int) -> EngineReply:
    """The same answer, in these tokens."""
    return msgspec.structs.replace(
        reply(Text(text="Yes.")),
        sampled_ids=array("i", ids),
        logprobs=array("f", [-0.5] * len(ids)),
    )


def test_a_request_continues_the_last_answer_that_it_begins_with(capture: SessionCapture) -> None:
    session = Session(capture)
    first = session.answer(asked(GO), bash("c1"))
    second = session.answer(asked([*GO, echo(first), result("c1")]), Text(text="Done."))
    assert (previous(first), first.attached) == (None, None)
    assert (previous(second), second.attached) == (first.completion_id, "arguments_respelt")
    sent = [*GO, echo(first), result("c1"), echo(second), user("more")]
    call = session.open(asked(sent))
    assert (previous(call), call.attached, call.previous_messages) == (
        second.completion_id,
        "exact",
        4,
    )
    # Words that the harness puts into the assistant's mouth, and what comes after, are new.
    call = session.open(asked([*sent[:-1], assistant_message("Not mine.", "", []), user("more")]))
    assert (previous(call), call.previous_messages) == (second.completion_id, 4)
    edited = session.open(asked([*sent[:3], assistant_message("Not mine.", "", []), user("?")]))
    assert (previous(edited), edited.previous_messages) == (first.completion_id, 2)


def test_another_head_begins_a_branch_and_the_old_one_can_be_gone_on_with(
    capture: SessionCapture,
) -> None:
    session = Session(capture)
    first = session.answer(asked(GO, tools=TOOLSET), Text(text="Yes."))
    on = [*GO, first.response_message, user("more")]
    assert previous(session.open(asked(on, tools=TOOLSET))) == first.completion_id
    assert previous(session.open(asked(on))) is None
    for field, value in (("tool_choice", "none"), ("template_kwargs", {"enable_thinking": False})):
        request = msgspec.structs.replace(asked(on, tools=TOOLSET), **{field: value})
        assert previous(session.open(request)) is None
    required = msgspec.structs.replace(asked(on, tools=TOOLSET), tool_choice="required")
    assert previous(session.open(required)) == first.completion_id
    # What the other head has answered meanwhile is not taken for it.
    session.answer(asked(GO), Text(text="Yes."))
    assert previous(session.open(asked(on, tools=TOOLSET))) == first.completion_id


def test_another_system_prompt_or_beginning_is_another_conversation(
    capture: SessionCapture,
) -> None:
    session = Session(capture)
    first = session.answer(asked(GO), bash("c1"))
    tail = [echo(first), result("c1")]
    assert previous(session.open(asked([user("Summary."), *tail]))) is None
    assert previous(session.open(asked([{"role": "system", "content": "x"}, *GO, *tail]))) is None


def test_an_answer_that_is_on_its_way_is_continued_by_nothing(capture: SessionCapture) -> None:
    session = Session(capture)
    slow = session.open(asked(GO))
    on = asked([*GO, assistant_message("Yes.", "", []), user("more")])
    assert previous(session.open(on)) is None
    slow.close(reply(Text(text="Yes.")), {})
    assert previous(session.open(on)) == slow.completion_id


def test_between_answers_of_the_same_words_evidence_decides(capture: SessionCapture) -> None:
    session = Session(capture)
    calls = []
    for number, agent in enumerate(("a", "b", "c")):
        call = capture.open(
            asked(GO),
            completion_id=f"msg_00000000a{number:03}",
            dialect="chat",
            headers={"x-session-id": agent},
        )
        call.close(with_tokens(number), {})
        calls.append(call.completion_id)
    sent = [*GO, assistant_message("Yes.", "", []), user("more")]

    def continued(agent: str, answers: dict[int, str] | None = None) -> tuple[str | None, bool]:
        call = capture.open(
            asked(sent, answers),
            completion_id=f"msg_{next(session._ids):012x}",
            dialect="chat",
            headers={"x-session-id": agent},
        )
        return previous(call), call.ambiguous

    for agent, call_id in zip("abc", calls, strict=True):
        assert continued(agent) == (call_id, False)
    assert continued("a", {1: calls[2]}) == (calls[2], False)
    # Nothing tells whose answer another one goes on from.
    assert continued("d")[1]


def test_a_delivered_answer_is_continued_rather_than_one_that_was_not(
    capture: SessionCapture,
) -> None:
    session = Session(capture)
    delivered = session.open(asked(GO))
    delivered.close(with_tokens(1), {})
    lost = session.open(asked(GO))
    lost.close(with_tokens(2), {})
    lost.undelivered()
    call = session.open(asked([*GO, assistant_message("Yes.", "", []), user("more")]))
    assert (previous(call), call.ambiguous) == (delivered.completion_id, False)


def test_where_nothing_tells_and_it_makes_a_difference_the_call_is_marked(
    capture: SessionCapture,
) -> None:
    session = Session(capture)
    first, second = session.open(asked(GO)), session.open(asked(GO))
    first.close(with_tokens(1, 2), {})
    second.close(with_tokens(3), {})
    sent = [*GO, assistant_message("Yes.", "", []), user("more")]
    one = session.open(asked(sent))
    assert (previous(one), one.ambiguous) == (second.completion_id, True)
    # Each of the two is continued once, before one is a second time.
    other = session.open(asked(sent))
    assert (previous(other), other.ambiguous) == (first.completion_id, True)
    completions = capture.completion_session().completions
    assert not any(completion.ambiguous for completion in completions)
    one.close(with_tokens(4), {})
    assert capture.completion_session().completions[-1].ambiguous


def test_where_it_makes_no_difference_nothing_is_marked(capture: SessionCapture) -> None:
    session = Session(capture)
    for _ in range(2):
        session.open(asked(GO)).close(with_tokens(1, 2), {})
    call = session.open(asked([*GO, assistant_message("Yes.", "", []), user("more")]))
    assert call.previous is not None
    assert not call.ambiguous


def test_an_echo_whose_answer_is_not_certain_leaves_the_call_ambiguous(
    capture: SessionCapture,
) -> None:
    session = Session(capture)
    _, second = siblings(session, thought("a"), thought("b"))
    call = session.open(asked([*GO, echo(second), user("more")]))
    assert (previous(call), call.attached) == (second.completion_id, "reasoning_restored")
    assert call.ambiguous


def test_many_answers_with_one_call_id_do_not_make_an_echo_costly(capture: SessionCapture) -> None:
    """Some engines count from 0 in each answer; compaction then takes the echoes' places away."""
    session = Session(capture)
    sent: list[Message] = [*GO]
    for turn in range(40):
        answered = session.answer(
            asked(sent), Reasoning(text=f"try {turn}"), bash("functions.bash:0", f"step {turn}")
        )
        sent = [*sent, echo(answered), result("functions.bash:0", f"{turn} failed")]
    restored = capture.restored(asked([user("Summary."), *sent[31:]]))
    assert [message["reasoning_content"] for message in restored.messages[1::2]] == [
        f"try {turn}" for turn in range(15, 40)
    ]
    assert "ambiguous echo" not in restored.notes


# ---- ids ----


def test_call_ids_that_a_harness_made_up_become_the_recorded_ones_in_the_results_too(
    capture: SessionCapture,
) -> None:
    session = Session(capture)
    first = session.answer(asked(GO), bash("x", "a"), bash("y", "b"), bash("x", "c"))
    sent = echo(first)
    for number, call in enumerate(sent["tool_calls"]):
        call["id"] = f"functionCall_{number}"
    results = [result(f"functionCall_{number}", str(number)) for number in (2, 0, 1)]
    on = [*GO, sent, *results]
    for _ in range(2):
        restored = capture.restored(asked(on))
        assert restored.messages[1] == first.response_message
        assert restored.messages[2:] == [result("x", "2"), result("x", "0"), result("y", "1")]
        assert restored.notes == ["arguments restored", "call ids restored"]
        session.answer(asked(on), Text(text="Done."))
    later = asked([*on, user("more"), assistant_message("Hm", "", []), result("functionCall_0")])
    assert capture.restored(later).messages[-1] == result("functionCall_0")


# ---- edits ----


def edits(answer: Message) -> dict[str, Message]:
    """What harnesses make of an answer that is no longer what the model said."""
    call = answer["tool_calls"][0]
    renamed = {**call, "function": {**call["function"], "name": "invalid"}}
    emptied = {**call, "function": {**call["function"], "arguments": "{}"}}
    return {
        "reasoning of its own": {**answer, "reasoning_content": "I was told to."},
        "reasoning cut off": {**answer, "reasoning_content": answer["reasoning_content"][:3]},
        "text": {**answer, "content": "I do it."},
        "half of the text": {**answer, "content": answer["content"][:5]},
        "text without its call": assistant_message(
            answer["content"], answer["reasoning_content"], []
        ),
        "tool renamed": {**answer, "tool_calls": [renamed]},
        "arguments emptied": {**answer, "tool_calls": [emptied]},
        "a call more": {**answer, "tool_calls": [call, {**call, "id": "c9"}]},
    }


EDITS = list(edits(message_of([*thought("abcdef", said="I look."), bash("c1")])))


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("referring", [False, True])
@pytest.mark.parametrize("arguments", ['{"command": "ls"}', '{"command": "l'])
def test_an_edit_stays_the_harnesss_words(
    capture: SessionCapture, edit: str, referring: bool, arguments: str
) -> None:
    session = Session(capture)
    call = Call(id="c1", name="bash", arguments=arguments)
    first = session.answer(asked(GO), *thought("abcdef", said="I look."), call)
    # Another answer says what the edit says, but it is not the one that is referred to.
    changed = edits(first.response_message)[edit]
    twin = {**changed, "reasoning_content": changed["reasoning_content"] + "\n"}
    session.answer(asked(GO), *blocks_of({**twin, "tool_calls": []}))
    sent = [*GO, changed, user("more")]
    answers = {1: first.completion_id} if referring else {}
    for _ in range(2):
        restored = capture.restored(asked(sent, answers))
        if referring or changed.get("tool_calls"):
            assert restored.messages == sent
            assert restored.notes == []
        session.answer(asked(sent, answers), Text(text="Done."))


def test_a_half_delivered_answer_keeps_the_half_that_the_harness_kept(
    capture: SessionCapture,
) -> None:
    session = Session(capture)
    call = session.open(asked(GO))
    call.close(reply(*thought("a", said="I look at it, then I"), bash("c1")), {})
    call.delivered_tokens = 5
    call.undelivered()
    sent = [*GO, assistant_message("I look at it,", "a", []), user("Go on.")]
    assert capture.restored(asked(sent)).messages == sent


def told(*pieces: str) -> list[TurnEvent]:
    return [BlockStart(kind="text"), *(BlockDelta(text=piece) for piece in pieces)]


def sampling(ids: list[int], text: str) -> EngineReply:
    return msgspec.structs.replace(
        reply(Text(text=text)),
        sampled_ids=array("i", ids),
        logprobs=array("f", [-0.5] * len(ids)),
    )


def test_a_half_goes_on_from_its_own_tokens_however_much_is_delivered_later(
    capture: SessionCapture,
) -> None:
    session = Session(capture)
    first, events = session.open(asked(GO)), told("I look", " around")

    def continued(text: str, more: str) -> tuple[str | None, int | None]:
        sent = [*GO, assistant_message(text, "", []), user(more)]
        answered = session.answer(asked(sent), Text(text=f"Done: {more}"))
        assert answered.previous is not None
        assert answered.previous.completion_id == first.completion_id
        return answered.attached, answered.continued_tokens

    first.heard(2, events, 2)
    first.close(sampling([1, 2, 3, 4, 5], "I look around."), {})
    first.undelivered()
    assert continued("I look", "a") == ("half_delivered", 2)
    first.heard(4, events, 3)
    first.undelivered()
    assert continued("I look", "b") == ("half_delivered", 2)
    assert continued("I look around", "c") == ("half_delivered", 4)
    capture.redelivered(first.completion_id)
    assert continued("I look", "d") == ("half_delivered", 2)
    assert continued("I look around.", "e") == ("exact", None)


@pytest.mark.parametrize("first", [True, False])
def test_of_an_answer_that_was_not_told_and_the_half_of_another_the_half_is_continued(
    capture: SessionCapture, first: bool
) -> None:
    session = Session(capture)
    silent, half = session.open(asked(GO)), session.open(asked(GO))
    half.heard(3, told("I look", " around"), 2)
    ending = [(silent, sampling([1, 2], "I look")), (half, sampling([3, 4, 5, 6], "I look around"))]
    for call, answer in ending if first else reversed(ending):
        call.close(answer, {})
        call.undelivered()
    sent = [*GO, assistant_message("I look", "", []), user("Go on.")]
    answered = session.answer(asked(sent), Text(text="Done."))
    assert answered.previous is not None
    assert answered.previous.completion_id == half.completion_id
    assert (answered.attached, answered.continued_tokens) == ("half_delivered", 3)
    assert not answered.ambiguous


# ---- over generated conversations ----

NAMES = ("bash", "Edit", "Write")
DEFAULTS = {"replace_all": False, "limit": 20, "mode": None}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {key: {"default": value} for key, value in DEFAULTS.items()},
            },
        },
    }
    for name in NAMES
]

Words = st.text(st.characters(codec="utf-8"), max_size=8)
Blank = st.sampled_from(["", "\n", "\n\n "])
Said = st.builds("{}{}{}".format, Blank, Words, Blank)
"""As models speak: with line breaks around it, and often with nothing between them."""
Json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | Words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(Words, inner, max_size=3),
    max_leaves=6,
)
Arguments = st.builds(
    lambda given, defaults: {**given, **{key: DEFAULTS[key] for key in defaults}},
    st.dictionaries(Words, Json, max_size=3),
    st.lists(st.sampled_from(list(DEFAULTS)), max_size=2),
)


class Turn(NamedTuple):
    reasoning: str
    text: str
    calls: list[tuple[str, str]]
    """Name and argument text, in the model's spelling, which may be none at all."""


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    calls = []
    for name in draw(st.lists(st.sampled_from(NAMES), max_size=3)):
        value = draw(Arguments)
        spelled = draw(
            st.sampled_from([compact(value), json.dumps(value), json.dumps(value, indent=2)])
        )
        calls.append((name, spelled[:-1] if draw(st.integers(0, 9)) == 0 else spelled))
    return Turn(draw(Said), draw(Said), calls)


class Client(NamedTuple):
    """What a harness does to an answer before it sends it back."""

    arguments: str = "spelled anew"
    """or verbatim, or with defaults added or dropped"""
    reasoning: str = "kept"
    """or trimmed, or dropped"""
    drops_blank_text: bool = False
    refers: bool = False
    """It sends back the reference that came with each answer."""
    keeps_ids: bool = True


CLIENTS = {
    "codex": Client("verbatim", refers=True),
    "claude_code": Client("defaults added", drops_blank_text=True, refers=True),
    "pi": Client(drops_blank_text=True),
    "qwen_code": Client(reasoning="trimmed"),
    "opencode": Client(),
    "gemini_cli": Client(reasoning="dropped", refers=True),
    "a sub-agent of gemini_cli": Client(reasoning="dropped", keeps_ids=False),
    "one that drops defaults": Client("defaults dropped", refers=True),
}


def as_javascript(value: Any) -> Any:
    """Numbers as that language writes them."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [as_javascript(each) for each in value]
    if isinstance(value, dict):
        return {key: as_javascript(each) for key, each in value.items()}
    return value


def respelled(arguments: str, client: Client) -> str:
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    if client.arguments == "verbatim":
        return arguments
    if client.arguments == "defaults added":
        value = {**DEFAULTS, **value}
    if client.arguments == "defaults dropped":
        # By type as well: 0 is not the false that is the default.
        value = {
            key: each
            for key, each in value.items()
            if key not in DEFAULTS or compact(each) != compact(DEFAULTS[key])
        }
    return compact(as_javascript(value))


def rendered(answer: Message, client: Client, place: int) -> Message:
    text, reasoning = answer["content"], answer.get("reasoning_content", "")
    if client.drops_blank_text and not text.strip():
        text = ""
    if client.reasoning != "kept":
        reasoning = reasoning.strip() if client.reasoning == "trimmed" else ""
    calls = [
        {
            "id": call["id"] if client.keeps_ids else f"functionCall_{place}_{number}",
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": respelled(call["function"]["arguments"], client),
            },
        }
        for number, call in enumerate(answer.get("tool_calls", ()))
    ]
    return assistant_message(text, reasoning, calls)


def results_of(message: Message, texts: str) -> list[Message]:
    calls = message.get("tool_calls", ())
    return [result(call["id"], texts) for call in calls] or [user(texts)]


class Conversation:
    """One conversation of a harness, and what the engine should see of it."""

    def __init__(self, session: Session, client: Client, opening: str, counting_ids: bool) -> None:
        self._session = session
        self._client = client
        self._counting_ids = counting_ids
        self._sent: list[Message] = [user(opening)]
        self._seen: list[Message] = [user(opening)]
        self._answers: dict[int, str] = {}
        self._same = True

    def say(self, turn: Turn, number: int) -> None:
        request = asked(self._sent, self._answers, TOOLS)
        restored = self._session.capture.restored(request)
        assert restored.messages == self._seen
        assert (restored.notes == []) == self._same
        calls = [
            Call(
                id=f"{name}:{at}" if self._counting_ids else f"call_{number}_{at}",
                name=name,
                arguments=arguments,
            )
            for at, (name, arguments) in enumerate(turn.calls)
        ]
        blocks: list[Block] = [Reasoning(text=turn.reasoning), Text(text=turn.text), *calls]
        completion = self._session.answer(request, *blocks)
        answer = completion.response_message
        echoed = rendered(answer, self._client, len(self._sent))
        if self._client.refers:
            self._answers[len(self._sent)] = completion.completion_id
        self._same = self._same and echoed == answer
        said = f"result {number}"
        self._sent += [echoed, *results_of(echoed, said)]
        self._seen += [answer, *results_of(answer, said)]


@examples(40)
@given(
    said=st.lists(turns(), min_size=1, max_size=6),
    counting_ids=st.booleans(),
    name=st.sampled_from(list(CLIENTS)),
)
def test_what_a_harness_sends_back_is_restored_exactly(
    tmp_path_factory: pytest.TempPathFactory, said: list[Turn], counting_ids: bool, name: str
) -> None:
    session = Session(capture_in(tmp_path_factory.mktemp("session")))
    conversation = Conversation(session, CLIENTS[name], "go", counting_ids)
    for number, turn in enumerate(said):
        conversation.say(turn, number)


@examples(40)
@given(
    said=st.lists(st.tuples(st.integers(0, 2), turns()), min_size=2, max_size=8),
    counting_ids=st.booleans(),
)
def test_conversations_that_begin_alike_are_told_apart_by_reference(
    tmp_path_factory: pytest.TempPathFactory, said: list[tuple[int, Turn]], counting_ids: bool
) -> None:
    """Sub-agents with one prompt, which answer much the same and differ in their reasoning."""
    session = Session(capture_in(tmp_path_factory.mktemp("session")))
    client = CLIENTS["gemini_cli"]
    conversations = [Conversation(session, client, "go", counting_ids) for _ in range(3)]
    for number, (which, turn) in enumerate(said):
        conversations[which].say(turn, number)


@examples(40)
@given(
    said=st.lists(turns(), min_size=2, max_size=5),
    name=st.sampled_from(list(CLIENTS)),
    edited=st.integers(0, 4),
    edit=st.sampled_from(["text", "reasoning", "call added", "call dropped", "arguments"]),
)
def test_no_edit_is_ever_restored_away(
    tmp_path_factory: pytest.TempPathFactory, said: list[Turn], name: str, edited: int, edit: str
) -> None:
    session, client = Session(capture_in(tmp_path_factory.mktemp("session"))), CLIENTS[name]
    sent: list[Message] = [user("go")]
    answers: dict[int, str] = {}
    changed: Message | None = None
    at = -1
    for number, turn in enumerate(said):
        restored = session.capture.restored(asked(sent, answers, TOOLS))
        if changed is not None:
            assert restored.messages[at] == changed
        blocks = [
            Call(id=f"call_{number}_{k}", name=called, arguments=arguments)
            for k, (called, arguments) in enumerate(turn.calls)
        ]
        completion = session.answer(
            asked(sent, answers, TOOLS),
            Reasoning(text=turn.reasoning),
            Text(text=turn.text),
            *blocks,
        )
        message = rendered(completion.response_message, client, len(sent))
        if number == edited % len(said):
            at, message = len(sent), changed_by(message, edit)
            changed = message
        if client.refers:
            answers[len(sent)] = completion.completion_id
        sent = [*sent, message, *results_of(message, f"result {number}")]
    assert session.capture.restored(asked(sent, answers, TOOLS)).messages[at] == changed


def changed_by(message: Message, edit: str) -> Message:
    calls = message.get("tool_calls", [])
    reasoning = message.get("reasoning_content", "")
    if edit == "text" or (not calls and edit in ("call dropped", "arguments")):
        return {**message, "content": message["content"] + "!"}
    if edit == "reasoning":
        return {**message, "reasoning_content": reasoning + "I was told to."}
    if edit == "call added":
        added = bash("added").arguments
        call = {"id": "added", "type": "function", "function": {"name": "bash", "arguments": added}}
        return {**message, "tool_calls": [*calls, call]}
    if edit == "call dropped":
        return assistant_message(message["content"], reasoning, calls[1:])
    function = {**calls[0]["function"], "arguments": '{"something":"else"}'}
    return {**message, "tool_calls": [{**calls[0], "function": function}, *calls[1:]]}
