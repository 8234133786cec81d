"""A file of checksummed frames: what is whole in it, and how it ends. Pure.

A file begins with `MAGIC`. A frame is a head of 13 bytes and a body: the body's length (uint32,
little-endian), flags (uint8), the body's CRC-32 and that of the nine bytes before it. As the head
has a checksum of its own, a length that was damaged is not taken for a frame that was cut off.
"""

import struct
import sys
from binascii import crc32
from collections.abc import Iterator
from typing import NamedTuple

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MAGIC = b"polar journal 2\n"

COMPRESSED = 1
"""The flag of a body that is a zstd frame."""

SMALL = 400
"""Bytes of a body below which compressing it saves next to nothing."""

MAX_BODY = 1 << 30
"""A compressed body that claims to be larger is not unpacked."""

_LEVEL = 1
_FIELDS = struct.Struct("<IBI")
_CHECK = struct.Struct("<I")
_HEAD = _FIELDS.size + _CHECK.size


class DamagedError(Exception):
    """The bytes are not what was written."""


class Frame(NamedTuple):
    body: bytes
    offset: int
    """Where it begins in the file."""
    size: int
    """In the file."""


class Ending(NamedTuple):
    """Where and why reading stopped."""

    offset: int
    """Everything before it is whole."""
    problem: str = ""
    """A sentence; empty when that is the end of the file."""
    damaged: bool = False
    """What follows is not what was written, rather than the beginning of it."""


def encode(body: bytes) -> bytes:
    flags = 0
    if len(body) >= SMALL:
        packed = zstd.compress(body, _LEVEL)
        if len(packed) < len(body):
            body, flags = packed, COMPRESSED
    fields = _FIELDS.pack(len(body), flags, crc32(body))
    return b"".join((fields, _CHECK.pack(crc32(fields)), body))


def decode(frame: bytes) -> bytes:
    """The body of one whole frame. Raises DamagedError."""
    for found in _read(frame, 0):
        if found.size == len(frame):
            return found.body
    raise DamagedError("the record is not what was written")


class Reader:
    """Iterates over the whole frames of a file's bytes; `ending` says how it ended."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.ending = Ending(0)

    def __iter__(self) -> Iterator[Frame]:
        data = self._data
        if not data.startswith(MAGIC):
            if MAGIC.startswith(data):
                self.ending = Ending(0, "the file ends inside its first line" if data else "")
            else:
                self.ending = Ending(0, "the file does not begin as a journal does", damaged=True)
            return
        offset = len(MAGIC)
        try:
            for frame in _read(data, offset):
                yield frame
                offset = frame.offset + frame.size
        except DamagedError as error:
            self.ending = Ending(offset, f"{error}, at byte {offset}", damaged=True)
        else:
            rest = len(data) - offset
            problem = f"the last record is cut off, {rest} bytes of it at byte {offset}"
            self.ending = Ending(offset, problem if rest else "")


def _read(data: bytes, offset: int) -> Iterator[Frame]:
    """The whole frames from `offset` on. Raises DamagedError at one that is not what was written."""
    while offset + _HEAD <= len(data):
        length, flags, checksum = _FIELDS.unpack_from(data, offset)
        (head_checksum,) = _CHECK.unpack_from(data, offset + _FIELDS.size)
        if head_checksum != crc32(data[offset : offset + _FIELDS.size]):
            raise DamagedError("the head of a record is not what was written")
        start = offset + _HEAD
        body = data[start : start + length]
        if len(body) < length:
            return
        if crc32(body) != checksum:
            raise DamagedError("a record is not what was written")
        yield Frame(_unpacked(body) if flags & COMPRESSED else body, offset, _HEAD + length)
        offset = start + length


def _unpacked(body: bytes) -> bytes:
    reader = zstd.ZstdDecompressor()
    try:
        whole = reader.decompress(body, MAX_BODY)
    except zstd.ZstdError as error:
        raise DamagedError(f"a record cannot be unpacked ({error})") from error
    if not reader.eof:
        raise DamagedError("a record cannot be unpacked")
    return whole
