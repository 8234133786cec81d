"""What is left of a session whose gateway was killed."""

import random
import signal
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

import builders
from builders.base import StrategySpec
from builders.check import check
from builders.records import CompletionSession
from polar_gateway.capture.journal import Completed, Intent, Place, read_journal
from polar_gateway.capture.reading import read_session
from polar_gateway.capture.session import SessionCapture
from tests.polar_gateway.capture.test_session import END, Stream, capture_in, reply, start, user

WRITER = """
import itertools
from pathlib import Path
from tests.polar_gateway.capture.test_session import END, Stream, capture_in, reply, start, user

capture = capture_in(Path({folder!r}))
messages, prompt = [user("go" * 2000)], list(range(3000))
for turn in itertools.count():
    call = start(capture, messages)
    sampled = [turn, turn, END]
    stream = Stream(prompt)
    call.follow(stream.say(*sampled[:2]), {{}})
    call.append()
    answer = reply(prompt, sampled)
    call.close(answer, {{}})
    print(turn, flush=True)
    messages = [*messages, answer.message, user(f"next {{turn}}")]
    prompt = [*prompt, *sampled, 100 + turn]
"""


def test_whatever_moment_a_writer_is_killed_at_each_call_that_it_told_of_is_there(
    tmp_path: Path,
) -> None:
    chance = random.Random(4)
    for attempt in range(6):
        folder = tmp_path / str(attempt)
        script = WRITER.format(folder=str(folder))
        told = 0
        with subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            for _ in range(chance.randrange(1, 60)):
                told = int(writer.stdout.readline()) + 1
            writer.send_signal(signal.SIGKILL)
            told += len(writer.stdout.read().splitlines())
        session = read_session(folder / "journal")
        whole = [each for each in session.completions if each.delivered]
        assert len(whole) >= told
        for turn, completion in enumerate(whole):
            assert completion.sampled_ids.tolist() == [turn, turn, END]
            assert completion.prompt_length == 3000 + 4 * turn
        assert len(session.completions) <= len(whole) + 1
        assert_can_be_built(session)


def assert_can_be_built(session: CompletionSession) -> None:
    for strategy in builders.BUILDERS:
        builder = builders.make(StrategySpec(strategy=strategy))
        assert check(session, builder.build(session), builder.options) == []


def played(folder: Path) -> SessionCapture:
    """A session with an answer that was lost, one that came in pieces, a call that failed, one
    that was cut off and one in flight."""
    capture = capture_in(folder)
    lost = start(capture, [user("a")])
    lost.close(reply([1, 2], [3, END]), {})
    lost.undelivered()
    pieces, stream = start(capture, [user("b")]), Stream([1, 5])
    pieces.follow(stream.say(6), {"top_p": 0.5})
    pieces.append()
    stream.say(7)
    pieces.append()
    answer = reply([1, 5], [6, 7, END])
    pieces.close(answer, {"top_p": 0.5})
    start(capture, [user("c")]).fail("it broke")
    cut = start(capture, [user("b"), answer.message, user("d")])
    cut.follow(Stream([1, 5, 6, 7, END, 8]).say(9), {})
    cut.fail("it broke off", "engine_broke_off")
    flying = start(capture, [user("b"), answer.message, user("e")])
    flying.follow(Stream([1, 5, 6, 7, END, 4]).say(9), {})
    flying.append()
    capture.redelivered(lost.completion_id)
    return capture


def test_a_journal_cut_off_at_any_byte_gives_every_call_that_was_whole_there(
    tmp_path: Path,
) -> None:
    capture = played(tmp_path)
    path = tmp_path / "journal"
    contents, data = read_journal(path), path.read_bytes()
    known = {each.completion_id: each for each in capture.completion_session().completions}
    capture.close()
    ends = [place.offset + place.size for place in contents.places]
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        session = read_session(path)
        written = [
            record for record, end in zip(contents.records, ends, strict=True) if end <= length
        ]
        asked = {each.completion_id for each in written if isinstance(each, Intent)}
        there = {each.completion_id: each for each in session.completions}
        assert there.keys() <= asked
        for record in written:
            if isinstance(record, Completed):
                assert (
                    there[record.completion_id].sampled_ids
                    == known[record.completion_id].sampled_ids
                )
                assert (
                    there[record.completion_id].prompt_ids == known[record.completion_id].prompt_ids
                )
        for name, completion in there.items():
            count = len(completion.sampled_ids)
            assert completion.sampled_ids == known[name].sampled_ids[:count]
        at_an_end = length in (0, 16, *ends)
        assert ("journal_cut_short" in session.findings) == (not at_an_end)
        if at_an_end:
            assert_can_be_built(session)


def test_damage_leaves_what_comes_before_it_and_is_a_finding(tmp_path: Path) -> None:
    played(tmp_path).close()
    path = tmp_path / "journal"
    data, whole = path.read_bytes(), read_journal(path)
    [first, *_] = [
        place
        for record, place in zip(whole.records, whole.places, strict=True)
        if isinstance(record, Completed)
    ]
    damaged = bytearray(data)
    damaged[_end(first) + 20] ^= 1
    path.write_bytes(damaged)
    session = read_session(path)
    assert [completion.index for completion in session.completions] == [0]
    assert session.findings == ["journal_damaged"]
    assert_can_be_built(session)


def _end(place: Place) -> int:
    return place.offset + place.size


def test_there_must_be_a_journal(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_session(tmp_path / "journal")


def test_log_probabilities_that_do_not_align_with_what_was_appended_are_left_out(
    tmp_path: Path,
) -> None:
    class Forgetful(Stream):
        def sampled_so_far(self) -> tuple["array[int]", "array[float]"]:
            ids, logprobs = super().sampled_so_far()
            return ids, logprobs[1:]

    capture = capture_in(tmp_path)
    call = start(capture, [user("a")])
    call.follow(Forgetful([1]).say(2, 3), {})
    call.append()
    [cut] = read_session(tmp_path / "journal").completions
    assert (list(cut.sampled_ids), cut.logprobs) == ([2, 3], None)
