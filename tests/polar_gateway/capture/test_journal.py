import os
import resource
import signal
import zlib
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from polar_gateway.capture.journal import (
    Appended,
    CaptureError,
    Failed,
    Journal,
    Opened,
    Sealed,
    encode,
    pack,
    read_journal,
    unpack_floats,
    unpack_ids,
)

HEADER = Opened(session_id="s1", task_id="t1", metadata={"group_id": 7}, policy_version="3")
SOME = Appended(completion_id="msg_1", sampled=pack(array("i", [1, 2])), logprobs=b"")


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


def test_a_line_is_a_checksum_and_json_with_ids_in_base64(tmp_path: Path) -> None:
    body = b'{"kind":"append","completion_id":"msg_1","sampled":"AQAAAAIAAAA="}'
    assert encode(SOME) == f"{zlib.crc32(body):08x} ".encode() + body + b"\n"


@pytest.mark.parametrize("missing", [1, 2, 40])
def test_a_half_written_last_line_is_told_apart_and_left_out(tmp_path: Path, missing: int) -> None:
    path = journal_of(tmp_path / "j", HEADER, SOME)
    path.write_bytes(path.read_bytes()[:-missing])
    contents = read_journal(path)
    assert contents.records == [HEADER]
    assert contents.finding == "journal_cut_short"


def test_reading_stops_at_a_line_that_is_not_what_was_written(tmp_path: Path) -> None:
    path = journal_of(tmp_path / "j", HEADER, SOME, Sealed())
    path.write_bytes(path.read_bytes().replace(b'"msg_1"', b'"msg_2"'))
    contents = read_journal(path)
    assert contents.records == [HEADER]
    assert contents.finding == "journal_damaged"


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
