import os
import resource
import signal
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from polar_gateway.capture import frames
from polar_gateway.capture.frames import MAGIC
from polar_gateway.capture.journal import (
    Appended,
    CaptureError,
    Failed,
    Journal,
    Opened,
    Place,
    Sealed,
    Syncer,
    pack,
    read_journal,
    unpack_floats,
    unpack_ids,
)

HEADER = Opened(session_id="s1", task_id="t1", metadata=b'{"group_id":7}', policy_version="3")
SOME = Appended(completion_id="msg_1", sampled=pack(array("i", [1, 2])), logprobs=b"")
LONG = Appended(completion_id="msg_1", sampled=b"", tail=pack(array("i", range(20)) * 60))


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """As on a full disk: the kernel takes what still fits and then refuses."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def journal_of(path: Path, *records: Opened | Appended | Failed | Sealed) -> Path:
    journal = Journal(path)
    for record in records:
        journal.append(record)
    journal.close()
    return path


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    path = journal_of(tmp_path / "j", HEADER, SOME, Sealed(at=1.5))
    contents = read_journal(path)
    assert contents.records == [HEADER, SOME, Sealed(at=1.5)]
    assert contents.finding is None


def test_a_record_is_in_the_file_as_soon_as_append_returns(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.append(HEADER)
    assert read_journal(tmp_path / "j").records == [HEADER]
    journal.append(SOME)
    assert read_journal(tmp_path / "j").records == [HEADER, SOME]
    journal.close()


def test_records_can_be_read_back_one_by_one_while_others_are_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    places = [journal.append(record) for record in (HEADER, SOME, LONG)]
    assert [journal.read(place) for place in places] == [HEADER, SOME, LONG]
    assert places == read_journal(tmp_path / "j").places
    with pytest.raises(CaptureError, match=r"cannot read the journal .*/j: the record is not"):
        journal.read(Place(places[0].offset, places[0].size + 1))
    journal.close()
    with pytest.raises(CaptureError, match=r"cannot read the journal .*/j: Bad file descriptor"):
        journal.read(places[0])


def test_what_repeats_itself_takes_little_space(tmp_path: Path) -> None:
    path = journal_of(tmp_path / "j", HEADER, LONG)
    assert path.stat().st_size < len(LONG.tail) / 10
    assert read_journal(path).records == [HEADER, LONG]


def test_a_journal_that_ends_at_any_byte_gives_what_is_whole_and_says_if_there_is_more(
    tmp_path: Path,
) -> None:
    path = journal_of(tmp_path / "j", HEADER, SOME, LONG, Sealed(at=1.0))
    data, whole = path.read_bytes(), read_journal(path)
    ends = [0, len(MAGIC), *(place.offset + place.size for place in whole.places)]
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        contents = read_journal(path)
        known = sum(end <= length for end in ends[2:])
        assert contents.records == whole.records[:known]
        assert contents.finding == (None if length in ends else "journal_cut_short")
        assert bool(contents.problem) == (length not in ends)
        assert contents.size == length


def test_damage_at_any_byte_is_told_and_what_comes_before_it_is_kept(tmp_path: Path) -> None:
    path = journal_of(tmp_path / "j", HEADER, SOME, LONG, Sealed(at=1.0))
    data, whole = path.read_bytes(), read_journal(path)
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        contents = read_journal(path)
        known = sum(place.offset + place.size <= at for place in whole.places)
        assert contents.records == whole.records[: 0 if at < len(MAGIC) else known]
        assert contents.finding == "journal_damaged"
        assert contents.problem


def test_a_file_that_is_no_journal_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(b'{"kind":"open"}')
    contents = read_journal(path)
    assert (contents.records, contents.finding) == ([], "journal_damaged")
    assert contents.problem == "the file does not begin as a journal does"


def test_a_whole_frame_that_holds_no_record_is_damage(tmp_path: Path) -> None:
    path = journal_of(tmp_path / "j", HEADER)
    path.write_bytes(path.read_bytes() + frames.encode(b"\x80"))
    contents = read_journal(path)
    assert (contents.records, contents.finding) == ([HEADER], "journal_damaged")
    assert "is no record: Object missing required field `kind`" in contents.problem


def test_an_empty_journal_holds_nothing(tmp_path: Path) -> None:
    contents = read_journal(journal_of(tmp_path / "j"))
    assert contents.records == []
    assert contents.finding is None


def test_a_full_disk_is_an_error_that_names_the_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.append(HEADER)
    with (
        files_limited_to(os.stat(tmp_path / "j").st_size),
        pytest.raises(
            CaptureError, match=r"cannot write to the journal .*/j: File too large"
        ) as raised,
    ):
        journal.append(SOME)
    journal.close()
    assert raised.value.failure.boundary == "capture"
    assert raised.value.failure.infra


def test_a_record_that_fits_only_half_leaves_no_trace_and_a_later_one_can_be_read(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path / "j")
    journal.append(HEADER)
    with files_limited_to(os.stat(tmp_path / "j").st_size + 20), pytest.raises(CaptureError):
        journal.append(SOME)
    journal.append(Sealed())
    journal.close()
    contents = read_journal(tmp_path / "j")
    assert contents.records == [HEADER, Sealed()]
    assert contents.finding is None


def test_a_journal_is_never_continued_by_another_session(tmp_path: Path) -> None:
    path = journal_of(tmp_path / "j", HEADER)
    with pytest.raises(CaptureError, match=r"cannot create the journal .*: File exists"):
        Journal(path)


def test_a_journal_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = journal_of(tmp_path / "folder" / "j", HEADER)
    assert path.stat().st_mode & 0o777 == 0o600


def test_arrays_survive_packing() -> None:
    ids, logprobs = array("i", [0, 151_000, -1]), array("f", [-0.5, 0.0, -9.25])
    assert unpack_ids(pack(ids)) == ids
    assert unpack_floats(pack(logprobs)) == logprobs
    assert pack(array("i", [258])) == b"\x02\x01\x00\x00"


# ---- the disk ----


class CountedJournal(Journal):
    """Takes as long to flush as the test lets it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.flushes = 0
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()

    def sync(self) -> None:
        self.begun.set()
        self.may_end.wait()
        super().sync()
        self.flushes += 1


async def test_journals_that_wait_at_once_are_flushed_in_one_round(tmp_path: Path) -> None:
    syncer = Syncer()
    first, *others = [CountedJournal(tmp_path / f"{number}") for number in range(20)]
    first.may_end.clear()
    async with anyio.create_task_group() as group:
        group.start_soon(syncer.flushed, first)
        await anyio.to_thread.run_sync(first.begun.wait)
        for journal in others:
            for _ in range(3):
                group.start_soon(syncer.flushed, journal)
        await anyio.wait_all_tasks_blocked()
        assert [journal.flushes for journal in others] == [0] * 19
        first.may_end.set()
    assert [journal.flushes for journal in (first, *others)] == [1] * 20
    assert syncer.rounds == 2
    for journal in (first, *others):
        journal.close()


async def test_what_was_written_during_a_flush_waits_for_the_next_one(tmp_path: Path) -> None:
    syncer, journal = Syncer(), CountedJournal(tmp_path / "j")
    journal.may_end.clear()
    async with anyio.create_task_group() as group:
        group.start_soon(syncer.flushed, journal)
        await anyio.to_thread.run_sync(journal.begun.wait)
        journal.append(HEADER)
        group.start_soon(syncer.flushed, journal)
        await anyio.wait_all_tasks_blocked()
        journal.may_end.set()
    assert journal.flushes == 2
    journal.close()


async def test_who_stops_waiting_holds_up_nobody(tmp_path: Path) -> None:
    syncer, slow, other = Syncer(), CountedJournal(tmp_path / "1"), CountedJournal(tmp_path / "2")
    slow.may_end.clear()
    async with anyio.create_task_group() as group:
        group.start_soon(syncer.flushed, slow)
        await anyio.to_thread.run_sync(slow.begun.wait)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await syncer.flushed(other)
        group.start_soon(syncer.flushed, other)
        await anyio.wait_all_tasks_blocked()
        slow.may_end.set()
    assert other.flushes == 1
    slow.close()
    other.close()


async def test_a_flush_that_fails_is_an_error_of_its_own_journal(tmp_path: Path) -> None:
    syncer, broken, whole = Syncer(), Journal(tmp_path / "1"), CountedJournal(tmp_path / "2")
    broken.close()
    async with anyio.create_task_group() as group:
        group.start_soon(syncer.flushed, whole)
        with pytest.raises(CaptureError, match=r"cannot flush the journal .*/1: it is closed"):
            await syncer.flushed(broken)
    assert whole.flushes == 1
    whole.close()


def test_a_journal_that_was_not_flushed_once_is_written_to_no_more(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    place = journal.append(HEADER)
    whole = os.dup(journal._fd)
    with open(os.devnull, "rb") as null:  # which cannot be flushed
        os.dup2(null.fileno(), journal._fd)
    with pytest.raises(CaptureError, match=r"cannot flush the journal .*/j: "):
        journal.sync()
    os.dup2(whole, journal._fd)
    os.close(whole)
    with pytest.raises(CaptureError, match=r"/j is not written to any more"):
        journal.sync()
    with pytest.raises(CaptureError, match=r"/j is not written to any more"):
        journal.append(SOME)
    assert journal.read(place) == HEADER
    journal.close()
