"""A session's journal: an append-only file that outlives the process which wrote it.

A record is durable once the kernel has it (`os.write` returned): that survives the gateway's own
death, which is what it is for, and costs no disk flush per call. Where the host's death is to be
survived too, `Syncer` waits for the disk. Ids are little-endian int32, log probabilities float32.
"""

import os
import sys
from array import array
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import anyio
import msgspec

from builders.records import (
    AttachLevel,
    Floats,
    Ids,
    LogprobKind,
    Mode,
    TensorRef,
    VersionSpan,
)
from polar_gateway.capture import frames
from polar_gateway.errors import BoundaryError

VERSION = 2


class CaptureError(BoundaryError):
    """A record of a model call could not be made durable, so the call must not count."""

    def __init__(self, message: str, *, detail: str = "") -> None:
        super().__init__("capture", message, detail=detail)


class Opened(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="kind", tag="open"):
    """The session's header, always the first record."""

    session_id: str
    version: int = VERSION
    task_id: str | None = None
    metadata: bytes = b"{}"
    """JSON, whose integers may be of any size."""
    policy_version: str | None = None
    end_of_turn_ids: list[int] = []
    """The engine's, without which the same completions could not be built into the same traces."""
    end_of_turn_texts: list[str] = []


class Tools(msgspec.Struct, kw_only=True, tag_field="kind", tag="tools"):
    """A set of tools, before the first call that offers it."""

    number: int
    tools: bytes
    """JSON."""


class Intent(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="kind", tag="intent"):
    """A model call that is about to be made. `parent` and `previous` are the indexes of earlier
    completions; they and what belongs to them are as on `Completion`."""

    completion_id: str
    index: int
    parent: int | None = None
    previous: int | None = None
    attached: AttachLevel | None = None
    ambiguous: bool = False
    continued_tokens: int | None = None
    messages_shared: int = 0
    messages_tail: list[dict[str, Any]] = []
    tools: int | None = None
    """The number of the set that is offered."""
    kind: str = msgspec.field(default="turn", name="call_kind")
    """As `Completion.kind`; in the file, `kind` tells records apart."""
    dialect: str = ""
    model_requested: str = ""
    asked: bytes = b"{}"
    """JSON."""
    chain: dict[str, str] = {}
    notes: list[str] = []
    at: float = 0.0


class Appended(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="kind", tag="append"):
    """What an unfinished call has sampled since its last append. The first one of a call carries
    its prompt and how it was asked, so that what was sampled can be told even if nothing follows."""

    completion_id: str
    shared: int = 0
    tail: bytes = b""
    sampling: bytes = b"{}"
    mode: Mode = "messages"
    backend: str = ""
    policy_version: str | None = None
    versions: list[VersionSpan] = []
    """Of all that the call has sampled so far, and so is `policy_version`."""
    sampled: bytes
    logprobs: bytes = b""


class Completed(
    msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="kind", tag="completion"
):
    """A call that sampled something: everything that is not in the file yet."""

    completion_id: str
    appended: int = 0
    """How many of the sampled tokens are in the records that were appended for the call. Where it
    is not 0, the prompt is in the first of those, and `sampled` and `logprobs` are the rest."""
    shared: int = 0
    tail: bytes = b""
    sampled: bytes = b""
    logprobs: bytes | None = None
    """None: those of the call are missing or do not align."""
    response_message: dict[str, Any]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    model_used: str = ""
    sampling: bytes = b"{}"
    """JSON."""
    usage: dict[str, int] = {}
    mode: Mode = "messages"
    logprob_kind: LogprobKind = "unknown"
    backend: str = ""
    policy_version: str | None = None
    versions: list[VersionSpan] = []
    tensors: list[TensorRef] = []
    findings: list[str] = []
    notes: list[str] = []
    """Of the engine's side, besides those of the intent."""
    delivered: bool = True
    """False for a generation that was cut off: it is kept, and nobody can have received it whole."""
    delivered_tokens: int = 0
    """Where it was not delivered: how many of the sampled tokens were."""
    at: float = 0.0


class Failed(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="kind", tag="failed"):
    """A call that ended before it sampled anything; `code` becomes a finding of the session."""

    completion_id: str
    code: str = "call_failed"
    message: str = ""
    at: float = 0.0


class Undelivered(msgspec.Struct, kw_only=True, tag_field="kind", tag="undelivered"):
    """A finished call whose answer did not reach the harness whole."""

    completion_id: str
    delivered_tokens: int = 0


class Delivered(msgspec.Struct, kw_only=True, tag_field="kind", tag="delivered"):
    """An answer that was undelivered has reached a harness that asked for it again."""

    completion_id: str


class Rendered(msgspec.Struct, kw_only=True, tag_field="kind", tag="rendered"):
    """The engine's own rendering of a call's answer, up to and including its end of turn, as the
    difference to the sampled ids: the first `shared` of them, then `tail`. What stands before it is
    the engine's rendering of the call before and what the request added to that, which is recorded."""

    completion_id: str
    shared: int
    tail: bytes


class Sealed(msgspec.Struct, kw_only=True, tag_field="kind", tag="sealed"):
    """No call can be made from here on."""

    at: float = 0.0


AnyRecord = (
    Opened
    | Tools
    | Intent
    | Appended
    | Completed
    | Failed
    | Undelivered
    | Delivered
    | Rendered
    | Sealed
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyRecord] = msgspec.msgpack.Decoder(AnyRecord)


class Place(NamedTuple):
    """Where in the file a record is, in bytes."""

    offset: int
    size: int


class Journal:
    """The writing end. The file must be new: a journal belongs to one attempt of one session."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600
            )
        except OSError as error:
            raise CaptureError(f"cannot create the journal {path}: {error.strerror}") from error
        self._length = 0
        self._named = False
        """Whether the disk knows that there is such a file."""
        self._flushable = True
        """False once the disk has refused what was written: the kernel then forgets that it has
        not got there, so that a later flush would say nothing of it."""

    def append(self, record: AnyRecord) -> Place:
        """Write one record; durable when this returns, CaptureError when it is not."""
        if not self._flushable:
            raise self._unflushed()
        frame = encode(record)
        place = Place(self._length or len(frames.MAGIC), len(frame))
        if not self._length:
            frame = frames.MAGIC + frame
        written = 0
        try:
            while written < len(frame):
                written += os.write(self._fd, frame[written:] if written else frame)
        except OSError as error:
            self._cut_back(written)
            raise self._error("write to", error) from error
        self._length += written
        return place

    def _cut_back(self, written: int) -> None:
        """Take a half-written frame away, so that a later record does not continue it."""
        if not written:
            return
        try:
            os.ftruncate(self._fd, self._length)
        except OSError:
            self.close()  # nothing after a torn frame could be read back; writing again must fail

    def read(self, place: Place) -> AnyRecord:
        """A record that was written before. Raises CaptureError."""
        try:
            return _decoder.decode(frames.decode(os.pread(self._fd, place.size, place.offset)))
        except OSError as error:
            raise self._error("read", error) from error
        except (frames.DamagedError, msgspec.DecodeError) as error:
            raise CaptureError(f"cannot read the journal {self.path}: {error}") from error

    def sync(self) -> None:
        """Returns when the disk has what was written; blocks. Raises CaptureError."""
        if self._fd < 0:
            raise CaptureError(f"cannot flush the journal {self.path}: it is closed")
        if not self._flushable:
            raise self._unflushed()
        try:
            os.fdatasync(self._fd)
            if not self._named:
                sync_folder(self.path.parent)
                self._named = True
        except OSError as error:
            self._flushable = False
            raise self._error("flush", error) from error

    def _unflushed(self) -> CaptureError:
        return CaptureError(
            f"the journal {self.path} is not written to any more: a flush of it has failed"
        )

    def _error(self, what: str, error: OSError) -> CaptureError:
        return CaptureError(f"cannot {what} the journal {self.path}: {error.strerror}")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def sync_folder(path: Path) -> None:
    """Let the disk know the names in a folder. Raises OSError."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class _Round:
    """The journals that the disk is asked for at once."""

    def __init__(self) -> None:
        self.waiting: set[Journal] = set()
        self.failed: dict[Journal, CaptureError] = {}
        self.over = False

    def run(self) -> None:
        for journal in self.waiting:
            try:
                journal.sync()
            except CaptureError as error:
                self.failed[journal] = error
        self.over = True


class Syncer:
    """Flushes journals to the disk, all that wait at once: who comes while it is at work waits for
    the next round. The event loop goes on meanwhile."""

    def __init__(self) -> None:
        self._one_round_at_a_time = anyio.Lock()
        self._next = _Round()
        self.rounds = 0

    async def flushed(self, journal: Journal) -> None:
        """Returns when the disk has what was written to the journal. Raises CaptureError."""
        mine = self._next
        mine.waiting.add(journal)
        async with self._one_round_at_a_time:
            if not mine.over:
                self._next = _Round()
                self.rounds += 1
                await anyio.to_thread.run_sync(mine.run)
        if journal in mine.failed:
            raise mine.failed[journal]


class JournalContents(msgspec.Struct, kw_only=True):
    """What could be read back. Reading stops at the first frame that is not what was written."""

    records: list[AnyRecord]
    places: list[Place] = []
    """Of the records, in their order."""
    finding: str | None = None
    """journal_cut_short: the last record is half-written. journal_damaged: an earlier one is not
    what was written, and it and everything after it are left out."""
    problem: str = ""
    """What the finding is about, as a sentence."""
    size: int = 0
    """Of the file, in bytes."""


def encode(record: AnyRecord) -> bytes:
    return frames.encode(_encoder.encode(record))


def read_journal(path: Path) -> JournalContents:
    """Read and verify a journal. Raises OSError when there is none."""
    data = path.read_bytes()
    reader = frames.Reader(data)
    contents = JournalContents(records=[], places=[], size=len(data))
    for frame in reader:
        try:
            contents.records.append(_decoder.decode(frame.body))
        except msgspec.DecodeError as error:
            contents.finding = "journal_damaged"
            contents.problem = f"the record at byte {frame.offset} is no record: {error}"
            return contents
        contents.places.append(Place(frame.offset, frame.size))
    if reader.ending.problem:
        contents.problem = reader.ending.problem
        contents.finding = "journal_damaged" if reader.ending.damaged else "journal_cut_short"
    return contents


def pack(values: Ids | Floats) -> bytes:
    """Little-endian bytes of an int32 or float32 array."""
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def unpack_ids(data: bytes) -> Ids:
    return _filled(array("i"), data)


def unpack_floats(data: bytes) -> Floats:
    return _filled(array("f"), data)


_Array = TypeVar("_Array", Ids, Floats)


def _filled(values: _Array, data: bytes) -> _Array:
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
