import os
import random
from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders.eligible import Options, split
from builders.records import Completion, CompletionSession, Floats, Ids, VersionSpan
from polar_gateway.capture.journal import CaptureError, Syncer, read_journal
from polar_gateway.capture.reading import read_session
from polar_gateway.capture.session import OpenCall, SessionCapture
from polar_gateway.dialects.turn import Block, Call, ModelRequest, Reasoning, Text, Usage
from polar_gateway.engines.base import EngineReply, Tensor
from tests.generated import examples
from tests.polar_gateway.capture.blocks import closed, parent_of, recorded
from tests.polar_gateway.capture.test_journal import files_limited_to

END = 7


class Stream:
    """A generation that has come as far as its last `say`."""

    def __init__(self, prompt: list[int] | None) -> None:
        self._prompt = prompt
        self._sampled: list[int] = []
        self._asked = 0

    def say(self, *ids: int) -> "Stream":
        self._sampled += ids
        return self

    @property
    def prompt_ids(self) -> Ids | None:
        return None if self._prompt is None else array("i", self._prompt)

    def sampled_so_far(self) -> tuple[Ids, Floats]:
        ids = array("i", self._sampled[self._asked :])
        self._asked = len(self._sampled)
        return ids, array("f", [-0.5] * len(ids))

    @property
    def reply(self) -> EngineReply:
        return reply(self._prompt or [], self._sampled)


def capture_in(folder: Path) -> SessionCapture:
    return SessionCapture(
        session_id="s1",
        task_id="t1",
        journal_path=folder / "journal",
        metadata={"group_id": 3},
        policy_version="12",
    )


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def request(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
) -> ModelRequest:
    # A harness sends its history anew each time, so no object is the one of an earlier call.
    return ModelRequest(
        model="asked-for",
        messages=msgspec.json.decode(msgspec.json.encode(messages)),
        tools=msgspec.json.decode(msgspec.json.encode(tools)),
    )


def reply(prompt: list[int], sampled: list[int], blocks: list[Block] | None = None) -> EngineReply:
    return EngineReply(
        prompt_ids=array("i", prompt),
        sampled_ids=array("i", sampled),
        logprobs=array("f", [-0.5] * len(sampled)),
        blocks=blocks or [Text(text=f"said {sampled}")],
        finish_reason="stop",
        usage=Usage(prompt_tokens=len(prompt), completion_tokens=len(sampled)),
        model="served",
    )


def start(
    capture: SessionCapture,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
) -> OpenCall:
    number = random.randrange(1 << 48)
    return capture.open(
        request(messages, tools), completion_id=f"msg_{number:012x}", dialect="chat", headers={}
    )


def plain(session: CompletionSession) -> dict[str, Any]:
    """Everything a session says, for comparing: parents by index."""

    def fields(completion: Completion) -> dict[str, Any]:
        known = {name: getattr(completion, name) for name in completion.__struct_fields__}
        known["parent"] = completion.parent and completion.parent.index
        known["previous"] = completion.previous and completion.previous.index
        return {**known, "prompt_ids": completion.prompt_ids, "messages": completion.messages}

    completions = [fields(completion) for completion in session.completions]
    known = {name: getattr(session, name) for name in session.__struct_fields__}
    return {**known, "completions": completions}


def test_a_completion_says_all_that_is_known_of_its_call(tmp_path: Path) -> None:
    capture = capture_in(tmp_path)
    asked = request([user("hi")], [tool("bash")])
    asked.notes = ["store ignored"]
    asked.tool_choice, asked.template_kwargs = "required", {"enable_thinking": False}
    call = capture.open(
        asked,
        completion_id="msg_0123456789ab",
        dialect="anthropic",
        headers={"x-claude-code-agent-id": "a1", "authorization": "Bearer secret"},
        kind="compaction",
    )
    blocks: list[Block] = [
        Reasoning(text="hm"),
        Text(text="I look."),
        Call(id="c1", name="bash", arguments='{"command": 1.0}'),
    ]
    answered = reply([1, 2], [3, END], blocks)
    answered.finish_reason, answered.stop_reason, answered.findings = "tool_calls", 42, ["x"]
    completion = closed(capture, call, answered, {"temperature": 0.5})
    assert completion.completion_id == "msg_0123456789ab"
    assert completion.messages == [user("hi")]
    assert completion.tools == [tool("bash")]
    assert completion.prompt_ids == array("i", [1, 2])
    assert completion.sampled_ids == array("i", [3, END])
    assert completion.logprobs == array("f", [-0.5, -0.5])
    assert completion.response_message["content"] == "I look."
    assert completion.response_message["reasoning_content"] == "hm"
    assert (
        completion.response_message["tool_calls"][0]["function"]["arguments"] == '{"command": 1.0}'
    )
    assert (completion.finish_reason, completion.stop_reason) == ("tool_calls", 42)
    assert (completion.model_requested, completion.model_used) == ("asked-for", "served")
    assert (completion.kind, completion.dialect, completion.policy_version) == (
        "compaction",
        "anthropic",
        "12",
    )
    assert completion.asked == {
        "tool_choice": "required",
        "template_kwargs": {"enable_thinking": False},
    }
    assert completion.chain == {"x-claude-code-agent-id": "a1"}
    assert completion.sampling == {"temperature": 0.5}
    assert completion.usage["completion_tokens"] == 2
    assert (completion.notes, completion.findings) == (["store ignored"], ["x"])
    assert (completion.delivered, completion.delivered_tokens) == (True, None)
    assert 0 < completion.started_at <= completion.ended_at
    assert "secret" not in str(read_journal(tmp_path / "journal").records)


def test_a_turn_is_stored_as_what_it_adds_to_the_one_before(tmp_path: Path) -> None:
    capture = capture_in(tmp_path)
    tools = [tool("bash")]
    first = closed(capture, start(capture, [user("hi")], tools), reply([1, 2], [3, END]))
    history = [user("hi"), first.response_message, user("go on")]
    second = closed(capture, start(capture, history, tools), reply([1, 2, 3, END, 8, 9], [4, END]))
    assert parent_of(second) == first.completion_id
    assert (second.shared, second.tail) == (4, array("i", [8, 9]))
    assert (second.messages_shared, second.messages_tail) == (2, [user("go on")])
    assert second.tools == first.tools
    last = str(read_journal(tmp_path / "journal").records[-2:])
    assert "hi" not in last
    assert "bash" not in last


def test_memory_and_journal_grow_with_what_is_new(tmp_path: Path) -> None:
    capture = capture_in(tmp_path)
    path = tmp_path / "journal"
    messages, prompt, sizes = [user("x" * 10_000)], list(range(5000)), [path.stat().st_size]
    for turn in range(12):
        completion = closed(capture, start(capture, messages), reply(prompt, [turn, END]))
        messages = [*messages, completion.response_message, user(f"next {turn}")]
        prompt = [*prompt, turn, END, 100 + turn]
        sizes.append(path.stat().st_size)
    growth = [after - before for before, after in pairwise(sizes)]
    assert growth[0] > 10_000
    assert max(growth[1:]) < 900
    session = capture.completion_session([])
    assert sum(len(c.tail) for c in session.completions) == 5000 + 11
    assert session.completions[-1].prompt_ids == array("i", prompt[:-3])


def test_equal_messages_are_kept_once_even_when_the_tokens_differ(tmp_path: Path) -> None:
    capture = capture_in(tmp_path)
    long = user("x" * 1000)
    first = closed(capture, start(capture, [long], [tool("a")]), reply([1], [END]))
    second = closed(capture, start(capture, [long], [tool("b")]), reply([2], [END]))
    assert second.messages[0] == first.messages[0]
    assert second.shared == 0


def test_a_sibling_attaches_to_the_latest_call_with_the_same_tools(tmp_path: Path) -> None:
    capture = capture_in(tmp_path)
    ours, theirs = [tool("a")], [tool("b")]
    first = closed(capture, start(capture, [user("hi")], ours), reply([1, 2, 3], [END]))
    closed(capture, start(capture, [user("hi"), user("compact")], theirs), reply([9, 2], [END]))
    third = closed(
        capture, start(capture, [user("hi"), user("more")], ours), reply([1, 2, 3, 4], [END])
    )
    assert parent_of(third) == first.completion_id
    assert third.shared == 3


def test_an_answer_that_comes_back_changed_still_shares_what_precedes_it(tmp_path: Path) -> None:
    capture = capture_in(tmp_path)
    first = closed(capture, start(capture, [user("hi")]), reply([1, 2], [3, 4, END]))
    echoed = {**first.response_message, "content": "respelled"}
    second = closed(
        capture,
        start(capture, [user("hi"), echoed, user("go")]),
        reply([1, 2, 3, 5, END, 6], [END]),
    )
    assert parent_of(second) == first.completion_id
    assert second.shared == 3
    assert second.messages_shared == 1
    assert second.messages == [user("hi"), echoed, user("go")]


def test_calls_that_end_out_of_order_are_listed_in_order_of_arrival(tmp_path: Path) -> None:
    capture = capture_in(tmp_path)
    early, late = start(capture, [user("a")]), start(capture, [user("b")])
    closed(capture, late, reply([2], [END]), {})
    closed(capture, early, reply([1], [END]), {})
    listed = capture.completion_session([]).completions
    assert [completion.tail[0] for completion in listed] == [1, 2]


def test_a_call_that_fails_before_it_samples_is_no_completion_and_a_finding(
    tmp_path: Path,
) -> None:
    capture = capture_in(tmp_path)
    call = start(capture, [user("a")])
    call.follow(Stream([1, 2]), {})
    call.append()
    call.fail("the engine broke off")
    assert not call.is_open
    session = capture.completion_session([END])
    assert (session.completions, session.findings) == ([], ["call_failed"])
    assert session.end_of_turn_ids == [END]
    assert plain(read_session(tmp_path / "journal", [END])) == plain(session)


def assert_counted_and_not_trained_on(
    session: CompletionSession, sampled: list[int], finding: str
) -> None:
    [completion] = session.completions
    assert list(completion.sampled_ids) == sampled
    assert list(completion.logprobs or ()) == [-0.5] * len(sampled)
    assert completion.findings == [finding]
    assert (completion.finish_reason, completion.stop_reason) == (None, None)
    assert session.findings == []
    counts = {"completions": 1, "tokens": len(sampled)}
    assert split(session, Options())[:2] == ([], {"undelivered": counts})


@pytest.mark.parametrize("appended", [False, True])
def test_what_a_call_sampled_before_it_failed_is_counted_and_not_trained_on(
    tmp_path: Path, appended: bool
) -> None:
    capture = capture_in(tmp_path)
    call, stream = start(capture, [user("a")]), Stream([1, 2])
    call.follow(stream, {"top_p": 0.9})
    stream.say(3, 4)
    if appended:
        call.append()
    stream.say(5)
    call.fail("it broke", "engine_broke_off")
    call.fail("it broke", "engine_broke_off")
    session = capture.completion_session()
    assert_counted_and_not_trained_on(session, [3, 4, 5], "engine_broke_off")
    assert session.completions[0].sampling == {"top_p": 0.9}
    assert plain(read_session(tmp_path / "journal")) == plain(session)


def test_what_a_call_sampled_before_the_seal_is_counted_and_not_trained_on(
    tmp_path: Path,
) -> None:
    capture = capture_in(tmp_path)
    first = closed(capture, start(capture, [user("a")]), reply([1], [2]))
    call, stream = start(capture, [user("a"), first.response_message, user("b")]), Stream([1, 2, 8])
    call.follow(stream.say(3, 4), {})
    call.append()
    stream.say(5)
    capture.seal()
    session = capture.completion_session()
    assert plain(read_session(tmp_path / "journal")) == plain(session)
    cut = session.completions.pop()
    assert list(cut.prompt_ids) == [1, 2, 8]
    assert parent_of(cut) == first.completion_id
    session.completions = [cut]
    assert_counted_and_not_trained_on(session, [3, 4, 5], "call_cut_by_seal")


def test_a_journal_that_ends_in_mid_call_tells_what_was_appended(tmp_path: Path) -> None:
    capture = capture_in(tmp_path)
    first = closed(capture, start(capture, [user("a")]), reply([1], [2]))
    call, stream = start(capture, [user("a"), first.response_message, user("b")]), Stream([1, 2, 8])
    call.follow(stream.say(3), {})
    call.append()
    call.append()
    stream.say(4, 5)
    call.append()
    stream.say(6)
    session = read_session(tmp_path / "journal")
    assert plain(session) == plain(capture.completion_session())
    cut = session.completions.pop()
    assert list(cut.prompt_ids) == [1, 2, 8]
    assert (cut.shared, cut.messages[-1]) == (2, user("b"))
    session.completions = [cut]
    assert_counted_and_not_trained_on(session, [3, 4, 5], "call_unfinished")


def test_a_journal_knows_the_engines_end_of_turn(tmp_path: Path) -> None:
    capture = SessionCapture(
        session_id="s1", journal_path=tmp_path / "journal", end_of_turn_ids=[END]
    )
    assert capture.completion_session().end_of_turn_ids == [END]
    assert capture.completion_session([9]).end_of_turn_ids == [9]
    assert read_session(tmp_path / "journal").end_of_turn_ids == [END]


def test_a_seal_that_cannot_be_journalled_seals_all_the_same_and_says_so(tmp_path: Path) -> None:
    capture = capture_in(tmp_path)
    silent, speaking = start(capture, [user("a")]), start(capture, [user("b")])
    speaking.follow(Stream([1]).say(3, 4), {})
    with (
        files_limited_to((tmp_path / "journal").stat().st_size),
        pytest.raises(CaptureError, match="cannot write to the journal"),
    ):
        capture.seal()
    capture.seal()
    assert not silent.is_open
    assert not speaking.is_open
    with pytest.raises(CaptureError, match="session s1 is sealed"):
        start(capture, [user("c")])
    session = capture.completion_session()
    assert session.findings == ["call_cut_by_seal", "journal_failed"]
    session.findings = []
    assert_counted_and_not_trained_on(session, [3, 4], "call_cut_by_seal")


@pytest.mark.parametrize("told", [0, 3])
def test_an_undelivered_answer_says_how_much_of_it_was_delivered(tmp_path: Path, told: int) -> None:
    capture = capture_in(tmp_path)
    call = start(capture, [user("a")])
    call.close(reply([1], [3, 4, 5, END]), {})
    call.delivered_tokens = told
    call.undelivered()
    completion = recorded(capture, call.completion_id)
    assert (completion.delivered, completion.delivered_tokens) == (False, told)
    session = capture.completion_session()
    assert plain(read_session(tmp_path / "journal")) == plain(session)
    assert split(session, Options())[:2] == ([], {"undelivered": {"completions": 1, "tokens": 4}})


def test_a_session_that_cannot_even_be_opened_keeps_no_file_open(tmp_path: Path) -> None:
    with files_limited_to(3), pytest.raises(CaptureError, match="cannot write to the journal"):
        capture_in(tmp_path)
    opened = {Path(f"/proc/self/fd/{fd}").resolve() for fd in os.listdir("/proc/self/fd")}
    assert tmp_path / "journal" not in opened


def test_an_undelivered_answer_is_none_where_that_cannot_be_written_either(tmp_path: Path) -> None:
    capture = capture_in(tmp_path)
    call = start(capture, [user("a")])
    call.close(reply([1], [3, END]), {})
    with (
        files_limited_to((tmp_path / "journal").stat().st_size),
        pytest.raises(CaptureError, match="cannot write to the journal"),
    ):
        call.undelivered()
    assert not call.counts_as_delivered
    session = capture.completion_session()
    assert session.findings == ["journal_failed"]
    assert split(session, Options())[:2] == ([], {"undelivered": {"completions": 1, "tokens": 2}})


def test_an_answer_that_reached_who_asked_again_is_delivered(tmp_path: Path) -> None:
    capture = capture_in(tmp_path)
    call = start(capture, [user("a")])
    call.close(reply([1], [3, END]), {})
    call.delivered_tokens = 1
    call.undelivered()
    capture.redelivered(call.completion_id)
    session = capture.completion_session()
    [completion] = session.completions
    assert (completion.delivered, completion.delivered_tokens) == (True, None)
    assert plain(read_session(tmp_path / "journal")) == plain(session)
    assert split(session, Options())[:2] == ([completion], {})


def test_nothing_is_redelivered_once_the_session_is_sealed(tmp_path: Path) -> None:
    capture = capture_in(tmp_path)
    call = start(capture, [user("a")])
    call.close(reply([1], [END]), {})
    call.undelivered()
    capture.seal()
    capture.redelivered(call.completion_id)
    assert not read_session(tmp_path / "journal").completions[0].delivered


def test_a_call_that_broke_off_says_how_much_of_it_was_delivered(tmp_path: Path) -> None:
    capture = capture_in(tmp_path)
    call = start(capture, [user("a")])
    call.follow(Stream([1, 2]).say(3, 4, 5), {})
    call.delivered_tokens = 2
    call.fail("it broke", "engine_broke_off")
    session = capture.completion_session()
    assert session.completions[0].delivered_tokens == 2
    assert plain(read_session(tmp_path / "journal")) == plain(session)
    assert_counted_and_not_trained_on(session, [3, 4, 5], "engine_broke_off")


def test_the_engine_is_sent_recorded_answers_and_the_record_says_so(tmp_path: Path) -> None:
    capture = capture_in(tmp_path)
    blocks: list[Block] = [Reasoning(text="hm"), Text(text="Yes.")]
    first = closed(capture, start(capture, [user("hi")]), reply([1], [3, END], blocks))
    echo = {"role": "assistant", "content": "Yes."}
    restored = capture.restored(request([user("hi"), echo, user("go")]))
    assert restored.messages[1] == first.response_message
    capture.open(restored, completion_id="msg_000000000002", dialect="chat", headers={}).close(
        reply([1, 3, END, 9], [END]), {}
    )
    session = capture.completion_session()
    assert session.completions[1].messages == restored.messages
    assert session.completions[1].notes == ["reasoning restored"]
    assert session.completions[1].messages_tail == [user("go")]
    assert plain(read_session(tmp_path / "journal")) == plain(session)


def test_the_seal_ends_calls_in_flight_and_keeps_what_was_there(tmp_path: Path) -> None:
    capture = capture_in(tmp_path)
    done, cut = start(capture, [user("a")]), start(capture, [user("b")])
    closed(capture, done, reply([1], [END]), {})
    capture.seal()
    capture.seal()
    assert not cut.is_open
    with pytest.raises(CaptureError, match="session s1 is sealed"):
        closed(capture, cut, reply([2], [END]), {})
    with pytest.raises(CaptureError, match="session s1 is sealed"):
        start(capture, [user("c")])
    done.undelivered()
    session = capture.completion_session([])
    assert [c.delivered for c in session.completions] == [True]
    assert session.findings == ["call_cut_by_seal"]
    assert plain(read_session(tmp_path / "journal")) == plain(session)


def test_a_journal_cut_short_gives_what_came_before_and_says_so(tmp_path: Path) -> None:
    capture = capture_in(tmp_path)
    closed(capture, start(capture, [user("a")]), reply([1], [END]))
    closed(capture, start(capture, [user("b")]), reply([2], [END]))
    capture.close()
    path = tmp_path / "journal"
    path.write_bytes(path.read_bytes()[:-10])
    session = read_session(path)
    assert len(session.completions) == 1
    assert session.findings == ["call_unfinished", "journal_cut_short"]


def test_reading_back_a_long_session_takes_no_recursion(tmp_path: Path) -> None:
    capture = capture_in(tmp_path)
    prompt = [1]
    messages = [user("hi")]
    for turn in range(600):
        answer = reply(prompt, [turn])
        start(capture, messages).close(answer, {})
        prompt.append(turn)
        messages = [*messages, answer.message]
    assert capture.completion_session([]).completions[-1].prompt_ids == array("i", prompt[:-1])


# ---- over generated sessions ----

Ids_ = st.lists(st.integers(0, 3), min_size=0, max_size=6)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int, list[int], list[int], str]]:
    """Calls as (what, which earlier call it continues, new prompt ids, sampled ids, text)."""
    what = st.sampled_from(
        [
            "turn",
            "turn",
            "turn",
            "fresh",
            "other tools",
            "failed",
            "broken",
            "lost",
            "lost, then found",
            "open",
            "silent",
        ]
    )
    return draw(
        st.lists(
            st.tuples(what, st.integers(0, 9), Ids_, Ids_.filter(bool), st.text(max_size=3)),
            max_size=10,
        )
    )


def play(
    capture: SessionCapture, history: list[tuple[str, int, list[int], list[int], str]]
) -> list[tuple[list[int], list[dict[str, Any]]]]:
    """Make the calls; returns prompt and messages of those that sampled, as they were sent."""
    done: list[Completion] = []
    sent = []
    for what, which, added, sampled, text in history:
        messages, prompt = [user("start")], [5, 5, *added]
        if done and what != "fresh":
            base = done[which % len(done)]
            # Sometimes the history comes back with the answer respelled, as text and as tokens.
            answer = (
                base.response_message if which % 2 else {**base.response_message, "content": text}
            )
            messages = [*base.messages, answer, user(text)]
            prompt = [*base.context_ids[: len(base.context_ids) - which % 3], *added]
        call = start(capture, messages, [tool("b")] if what == "other tools" else None)
        if what == "failed":
            call.fail("broke")
        if what in ("failed", "silent"):
            continue
        stream = Stream(prompt)
        call.follow(stream.say(*sampled), {"top_p": 0.9})
        call.append()
        sent.append((prompt, messages))
        if what == "broken":
            call.fail("broke")
        if what in ("broken", "open"):
            continue
        done.append(closed(capture, call, reply(prompt, sampled), {"top_p": 0.9}))
        if what.startswith("lost"):
            call.delivered_tokens = which
            call.undelivered()
        if what == "lost, then found":
            capture.redelivered(call.completion_id)
    return sent


@examples(60)
@given(history=histories(), sealed=st.booleans())
def test_a_journal_holds_exactly_the_live_session(
    tmp_path_factory: pytest.TempPathFactory,
    history: list[tuple[str, int, list[int], list[int], str]],
    sealed: bool,
) -> None:
    folder = tmp_path_factory.mktemp("session")
    capture = capture_in(folder)
    sent = play(capture, history)
    if sealed:
        capture.seal()
    live = capture.completion_session([END])
    capture.close()
    assert plain(read_session(folder / "journal", [END])) == plain(live)
    assert [(list(c.prompt_ids), c.messages) for c in live.completions] == sent
    counted = split(live, Options())
    tokens = sum(len(c.sampled_ids) for c in counted.eligible)
    tokens += sum(counts["tokens"] for counts in counted.left_out.values())
    assert tokens == sum(len(call[3]) for call in history if call[0] not in ("failed", "silent"))


def test_a_call_cut_by_the_seal_says_how_much_of_it_was_delivered(tmp_path: Path) -> None:
    capture = capture_in(tmp_path)
    call = start(capture, [user("a")])
    call.follow(Stream([1, 2]).say(3, 4, 5), {})
    call.delivered_tokens = 2
    capture.seal()
    [cut] = capture.completion_session().completions
    assert (cut.delivered, cut.delivered_tokens) == (False, 2)
    assert plain(read_session(tmp_path / "journal")) == plain(capture.completion_session())


def test_what_the_engine_had_to_be_asked_otherwise_is_noted(tmp_path: Path) -> None:
    capture = capture_in(tmp_path)
    call = start(capture, [user("a")])
    answered = reply([1], [3, END])
    answered.notes = ["max_tokens: 5 instead of 900"]
    assert closed(capture, call, answered, {}).notes == ["max_tokens: 5 instead of 900"]
    assert plain(read_session(tmp_path / "journal")) == plain(capture.completion_session())


# ---- the disk and large things ----


def test_a_full_disk_fails_the_call_and_leaves_no_half_a_record(tmp_path: Path) -> None:
    capture = capture_in(tmp_path)
    start(capture, [user("a")]).close(reply([1], [END]), {})
    call, path = start(capture, [user("b" * 50)]), tmp_path / "journal"
    with (
        files_limited_to(path.stat().st_size + 20),
        pytest.raises(CaptureError, match=r"cannot write to the journal .*: File too large"),
    ):
        call.close(reply([2], [3, END]), {})
    session = capture.completion_session()
    assert (len(session.completions), session.findings) == (1, ["call_unfinished"])
    assert capture.completion_count == 1
    with files_limited_to(path.stat().st_size), pytest.raises(CaptureError):
        start(capture, [user("c")])
    with files_limited_to(path.stat().st_size), pytest.raises(CaptureError):
        start(capture, [user("c")], [tool("bash")])
    # Once there is room again, nothing is amiss.
    closed(capture, call, reply([2], [3, END]))
    last = closed(capture, start(capture, [user("c")], [tool("bash")]), reply([4], [END]))
    assert last.tools == [tool("bash")]
    assert read_session(path).findings == []


async def test_a_call_waits_for_the_disk_where_that_is_asked_for(tmp_path: Path) -> None:
    syncer = Syncer()
    capture = SessionCapture(session_id="s1", journal_path=tmp_path / "journal", syncer=syncer)
    call = start(capture, [user("a")])
    call.close(reply([1], [END]), {})
    assert syncer.rounds == 0
    await call.durable()
    assert syncer.rounds == 1
    capture.close()
    with pytest.raises(CaptureError, match="cannot flush the journal"):
        await call.durable()


async def test_what_is_large_is_kept_beside_the_journal_and_referred_to(tmp_path: Path) -> None:
    capture = capture_in(tmp_path)
    call = start(capture, [user("a")])
    answered = reply([1], [END])
    answered.tensors = [Tensor("routed_experts", b"\x93NUMPY and so on")]
    await call.keep(answered.tensors)
    [tensor] = closed(capture, call, answered).tensors
    assert tensor.name == "routed_experts"
    assert (tmp_path / tensor.file).read_bytes() == answered.tensors[0].data


def test_numbers_of_any_size_can_be_recorded(tmp_path: Path) -> None:
    capture = SessionCapture(
        session_id="s1", journal_path=tmp_path / "journal", metadata={"seed": 10**30}
    )
    asked = request([user("a")], [{"type": "function", "function": {"name": "f"}}])
    assert asked.tools is not None
    asked.tools[0]["function"]["parameters"] = {"maximum": 10**30}
    asked.template_kwargs = {"budget": 10**30}
    call = capture.open(asked, completion_id="msg_1", dialect="chat", headers={})
    completion = closed(capture, call, reply([1], [END]), {"seed": 10**30})
    assert completion.tools == asked.tools
    assert completion.asked == {"template_kwargs": {"budget": 10**30}}
    assert completion.sampling == {"seed": 10**30}
    assert capture.completion_session().metadata == {"seed": 10**30}


def test_how_a_call_was_asked_is_recorded_with_it_also_where_it_is_cut_off(tmp_path: Path) -> None:
    capture = capture_in(tmp_path)
    call = start(capture, [user("a")])
    call.backend, call.policy_version = "b1", "13"
    call.composed("tokens", notes=["asked so"], findings=["history_kept"])
    call.follow(Stream([1]).say(3), {"top_p": 0.9})
    call.append()
    [open_] = capture.completion_session().completions
    assert (open_.mode, open_.backend, open_.policy_version) == ("tokens", "b1", "13")
    assert open_.sampling == {"top_p": 0.9}
    answered = reply([1], [3, END])
    answered.logprob_kind = "processed"
    answered.versions = [
        VersionSpan(version="13", start=0, end=1),
        VersionSpan(version="14", start=1, end=2),
    ]
    ended = closed(capture, call, answered, {"top_p": 0.9})
    assert (ended.mode, ended.backend, ended.policy_version) == ("tokens", "b1", "13")
    assert (ended.notes, ended.findings) == (["asked so"], ["history_kept"])
    assert (ended.logprob_kind, ended.versions) == ("processed", answered.versions)


def test_what_is_resident_is_what_the_journal_holds_without_its_words(tmp_path: Path) -> None:
    capture = capture_in(tmp_path)
    node = start(capture, [user("a")]).close(reply([1, 2], [3, END]), {})
    on = [user("a"), reply([1, 2], [3, END]).message, user("b")]
    call = start(capture, on)
    assert (call.previous, call.attached, call.previous_messages) == (node, "exact", 2)
    later = call.close(reply([1, 2, 3, END, 4], [5]), {})
    first, second = capture.completion_session().completions
    for resident, read in ((node, first), (later, second)):
        assert (resident.completion_id, resident.index) == (read.completion_id, read.index)
        assert (resident.shared, resident.tail) == (read.shared, read.tail)
        assert resident.sampled_ids == read.sampled_ids
    assert (second.previous, second.attached) == (first, "exact")
    assert second.parent is first
