from pathlib import Path

import msgspec

from polar_gateway.capture import frames
from polar_gateway.capture.inspection import calls_in_the_end, ended, inspected, readable
from polar_gateway.capture.journal import AnyRecord, Completed, Intent, Opened, encode
from polar_gateway.capture.reading import read_session
from polar_gateway.engines.base import Tensor
from tests.polar_gateway.capture.test_session import (
    END,
    Stream,
    capture_in,
    reply,
    request,
    start,
    tool,
    user,
)


def journal_of(path: Path, *records: AnyRecord) -> Path:
    path.write_bytes(frames.MAGIC + b"".join(encode(record) for record in records))
    return path


def test_a_whole_journal_has_no_problems(tmp_path: Path) -> None:
    capture = capture_in(tmp_path)
    start(capture, [user("a")]).close(reply([1], [END]), {})
    start(capture, [user("b")])
    found = inspected(tmp_path / "journal")
    assert (found.problems, found.sealed) == ([], False)
    assert found.session.findings == ["call_unfinished"]
    assert calls_in_the_end(found.contents) == 1
    capture.seal()
    assert inspected(tmp_path / "journal").sealed


def test_where_a_journal_stops_being_one_is_said(tmp_path: Path) -> None:
    capture = capture_in(tmp_path)
    start(capture, [user("a")]).close(reply([1], [END]), {})
    path = tmp_path / "journal"
    path.write_bytes(path.read_bytes()[:-3])
    found = inspected(path)
    [problem] = found.problems
    assert problem.startswith("the last record is cut off, ")
    assert found.session.findings == ["call_unfinished", "journal_cut_short"]


def test_records_that_refer_to_nothing_are_a_problem(tmp_path: Path) -> None:
    done = Completed(completion_id="msg_1", response_message={})
    found = inspected(journal_of(tmp_path / "j", Opened(session_id="s1"), done))
    [problem] = found.problems
    assert problem.startswith("the record at byte ")
    assert problem.endswith("refers to what is not there: 'msg_1'")
    assert found.session.findings == ["journal_damaged"]
    assert read_session(tmp_path / "j").findings == ["journal_damaged"]


def test_an_empty_file_is_no_whole_journal(tmp_path: Path) -> None:
    (tmp_path / "j").touch()
    assert inspected(tmp_path / "j").problems == ["no first record says whose session it is"]


def test_a_journal_that_does_not_say_whose_it_is_and_ids_that_do_not_add_up_are_problems(
    tmp_path: Path,
) -> None:
    records: list[AnyRecord] = [
        Intent(completion_id="msg_1", index=0),
        Completed(completion_id="msg_1", sampled=bytes(8), logprobs=bytes(4), response_message={}),
        Intent(completion_id="msg_2", index=1, parent=0),
        Completed(completion_id="msg_2", shared=5, response_message={}),
    ]
    assert inspected(journal_of(tmp_path / "j", *records)).problems == [
        "no first record says whose session it is",
        "msg_1 has 1 log probabilities for 2 sampled ids",
        "msg_2 shares more ids with msg_1 than that has",
    ]


async def test_tensors_that_are_gone_or_changed_are_problems(tmp_path: Path) -> None:
    capture = capture_in(tmp_path)
    for number in range(2):
        call = start(capture, [user(str(number))])
        await call.keep([Tensor("routed_experts", bytes(number))])
        call.close(reply([1], [END]), {})
    path = tmp_path / "journal"
    assert inspected(path).problems == []
    first, second = (each.tensors[0].file for each in capture.completion_session().completions)
    (tmp_path / first).unlink()
    (tmp_path / second).write_bytes(b"?")
    gone, changed = inspected(path).problems
    assert gone.endswith(f"{first}, cannot be read: No such file or directory")
    assert changed.endswith(f"{second}, is not what was written")


def test_records_can_be_read_as_json(tmp_path: Path) -> None:
    capture = capture_in(tmp_path)
    call = capture.open(
        request([user("a")], [tool("bash")]), completion_id="msg_1", dialect="chat", headers={}
    )
    call.follow(Stream([1, 2]).say(3), {"top_p": 0.5})
    call.append()
    call.close(reply([1, 2], [3, END]), {"top_p": 0.5})
    contents = inspected(tmp_path / "journal").contents
    shown = [
        msgspec.json.decode(msgspec.json.encode(readable(record, place)))
        for record, place in zip(contents.records, contents.places, strict=True)
    ]
    assert [each["kind"] for each in shown] == ["open", "tools", "intent", "append", "completion"]
    opened, tools, intent, appended, completed = shown
    assert (opened["byte"], opened["metadata"]) == (16, {"group_id": 3})
    assert tools["tools"] == [tool("bash")]
    assert (intent["tools"], intent["messages_tail"]) == (0, [user("a")])
    assert (appended["tail"], appended["sampled"]) == ([1, 2], [3])
    assert (appended["logprobs"], appended["sampling"]) == ([-0.5], {"top_p": 0.5})
    assert (completed["appended"], completed["sampled"]) == (1, [END])


def test_how_a_call_ended_is_told_in_a_few_words(tmp_path: Path) -> None:
    capture = capture_in(tmp_path)
    start(capture, [user("a")]).close(reply([1], [END]), {})
    lost = start(capture, [user("b")])
    lost.close(reply([1], [3, 4, END]), {})
    lost.delivered_tokens = 2
    lost.undelivered()
    broken = start(capture, [user("c")])
    broken.follow(Stream([1]).say(3), {})
    broken.fail("it broke")
    completions = capture.completion_session().completions
    assert [ended(each) for each in completions] == [
        "stop",
        "stop, 2 of 3 delivered",
        "cut off, 0 of 1 delivered",
    ]
