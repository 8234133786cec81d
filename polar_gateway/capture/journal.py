"""A session's journal: an append-only file that outlives the process which wrote it.

One record a line: the CRC-32 of the JSON as eight hex digits, a space, the JSON. A record is durable
once the kernel has it (`os.write` returned): that survives the gateway's own death, which is what
it is for, and costs no disk flush per call. Ids are base64 of little-endian int32, log
probabilities of float32.
"""

import binascii
import os
import sys
from array import array
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from builders.records import AttachLevel, Floats, Ids, LogprobKind, Mode, VersionSpan
from polar_gateway.errors import BoundaryError

VERSION = 1


class CaptureError(BoundaryError):
    """A record of a model call could not be made durable, so the call must not count."""

    def __init__(self, message: str, *, detail: str = "") -> None:
        super().__init__("capture", message, detail=detail)


class Opened(msgspec.Struct, kw_only=True, tag_field="kind", tag="open"):
    """The session's header, always the first line."""

    session_id: str
    version: int = VERSION
    task_id: str | None = None
    metadata: dict[str, Any] = {}
    policy_version: str | None = None
    end_of_turn_ids: list[int] = []
    """The engine's, without which the same completions could not be built into the same traces."""


class Intent(msgspec.Struct, kw_only=True, tag_field="kind", tag="intent"):
    """A model call that is about to be made. `parent` is the index of an earlier completion."""

    completion_id: str
    index: int
    parent: int | None = None
    previous: int | None = None
    attached: AttachLevel | None = None
    ambiguous: bool = False
    continued_tokens: int | None = None
    messages_shared: int = 0
    messages_tail: list[dict[str, Any]] = []
    tools_as_parent: bool = False
    """The tools are the parent's; `tools` is then empty."""
    tools: list[dict[str, Any]] | None = None
    kind: str = msgspec.field(default="turn", name="call_kind")
    """As `Completion.kind`; on a line, `kind` tells records apart."""
    dialect: str = ""
    model_requested: str = ""
    asked: dict[str, Any] = {}
    chain: dict[str, str] = {}
    notes: list[str] = []
    at: float = 0.0


class Appended(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="kind", tag="append"):
    """What an unfinished call has sampled since its last append. The first one of a call carries
    its prompt, so that what was sampled can be told even if nothing follows."""

    completion_id: str
    shared: int = 0
    tail: bytes = b""
    sampled: bytes
    logprobs: bytes = b""


class Completed(msgspec.Struct, kw_only=True, tag_field="kind", tag="completion"):
    """A call that sampled something: everything that its intent did not know yet."""

    completion_id: str
    shared: int = 0
    tail: bytes
    sampled: bytes
    logprobs: bytes | None = None
    response_message: dict[str, Any]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    model_used: str = ""
    sampling: dict[str, Any] = {}
    usage: dict[str, int] = {}
    mode: Mode = "messages"
    logprob_kind: LogprobKind = "unknown"
    backend: str = ""
    policy_version: str | None = None
    versions: list[VersionSpan] = []
    findings: list[str] = []
    notes: list[str] = []
    """Of the engine's side, besides those of the intent."""
    delivered: bool = True
    """False for a generation that was cut off: it is kept, and nobody can have received it whole."""
    delivered_tokens: int = 0
    """Where it was not delivered: how many of the sampled tokens were."""
    at: float = 0.0


class Failed(msgspec.Struct, kw_only=True, tag_field="kind", tag="failed"):
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
    """The engine's own rendering of a conversation up to and including a call's answer, as the
    difference to that call's recorded prompt and sampled ids."""

    completion_id: str
    shared: int
    tail: bytes


class Sealed(msgspec.Struct, kw_only=True, tag_field="kind", tag="sealed"):
    """No call can be made from here on."""

    at: float = 0.0


AnyRecord = (
    Opened | Intent | Appended | Completed | Failed | Undelivered | Delivered | Rendered | Sealed
)

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyRecord] = msgspec.json.Decoder(AnyRecord)


class Journal:
    """The writing end. The file must be new: a journal belongs to one attempt of one session."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600
            )
        except OSError as error:
            raise CaptureError(f"cannot create the journal {path}: {error.strerror}") from error
        self._length = 0

    def append(self, record: AnyRecord) -> None:
        """Write one record; durable when this returns, CaptureError when it is not."""
        line = encode(record)
        written = 0
        try:
            while written < len(line):
                written += os.write(self._fd, line[written:] if written else line)
        except OSError as error:
            self._cut_back(written)
            raise CaptureError(
                f"cannot write to the journal {self.path}: {error.strerror}"
            ) from error
        self._length += written

    def _cut_back(self, written: int) -> None:
        """Take a half-written line away, so that a later record does not continue it."""
        if not written:
            return
        try:
            os.ftruncate(self._fd, self._length)
        except OSError:
            self.close()  # nothing after a torn line could be read back; writing again must fail

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class JournalContents(msgspec.Struct, kw_only=True):
    """What could be read back. Reading stops at the first line that is not what was written."""

    records: list[AnyRecord]
    finding: str | None = None
    """journal_cut_short: the last line is half-written. journal_damaged: an earlier one is not
    what was written, and it and everything after it are left out."""


def encode(record: AnyRecord) -> bytes:
    body = _encoder.encode(record)
    return b"%08x %b\n" % (binascii.crc32(body), body)


def read_journal(path: Path) -> JournalContents:
    """Read and verify a journal. Raises OSError when there is none."""
    *lines, rest = path.read_bytes().split(b"\n")
    records: list[AnyRecord] = []
    for line in lines:
        body = line[9:]
        if line[:9] != b"%08x " % binascii.crc32(body):
            return JournalContents(records=records, finding="journal_damaged")
        records.append(_decoder.decode(body))
    return JournalContents(records=records, finding="journal_cut_short" if rest else None)


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
