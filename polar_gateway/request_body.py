"""A request's body as it comes from a harness, bounded in all that it can cost. Pure.

A harness is hostile until proven otherwise, and the event loop that reads its requests serves the
other sessions too: nothing here takes more than a fraction of a second, whatever the bytes are.
"""

import re
import sys
import zlib
from typing import Any

import brotli
import msgspec

from polar_gateway.dialects.turn import ErrorKind

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MAX_VALUES = 500_000
"""Commas and opening brackets, those in strings among them, as what is built from a body grows with
them: more than fit into the contexts of today's models."""
MAX_FIELDS = 1000
"""Of the body itself, as unknown ones are noted by name; the largest API has some dozens."""
MAX_ENCODINGS = 2
"""Of one body; each may take as long as the first."""
MAX_MEMBERS = 16
"""Of one compressed body: gzip and zstd streams may be written one behind the other."""
SPARE_FRAMES = 200
"""Of Python's recursion limit, for all who walk through the value after it was decoded; the last
of them decodes it as a part of a session's result."""

SHALLOW = 400
"""Opening brackets that can be nested in each other without harm, all of them."""

LONE_SURROGATE_NOTE = "half a character sent as U+FFFD"

_plain = msgspec.json.Decoder().decode
_SURROGATES = re.compile(
    r"\\(?:\\|u[dD][89abAB][0-9a-fA-F]{2}(?P<pair>\\u[dD][c-fC-F][0-9a-fA-F]{2})?"
    r"|u[dD][c-fC-F][0-9a-fA-F]{2})"
)


class RefusedError(Exception):
    """The request gets an error of its dialect for an answer."""

    def __init__(self, kind: ErrorKind) -> None:
        super().__init__(kind.message)
        self.kind = kind


def invalid(message: str, param: str | None = None) -> ErrorKind:
    return ErrorKind(status=400, code="invalid_request", message=message, param=param)


def too_large(what: str) -> ErrorKind:
    return ErrorKind(status=413, code="too_large", message=f"the body {what}")


def headers_too_large(limit: int) -> ErrorKind:
    message = f"the headers are larger than {limit} bytes"
    return ErrorKind(status=431, code="too_large", message=message)


def inflated(data: bytes, encoding: str, limit: int) -> bytes:
    """Decompress a request body. Raises RefusedError when it is not what it says or grows too big."""
    names = [part.strip().lower() for part in encoding.split(",")]
    names = [name for name in names if name not in ("", "identity")]
    if len(names) > MAX_ENCODINGS:
        raise RefusedError(invalid(f"the body is encoded {len(names)} times"))
    for name in reversed(names):
        try:
            data, whole = _inflate(data, name, limit + 1)
        except (zlib.error, zstd.ZstdError, brotli.error) as error:
            raise RefusedError(invalid(f"the body is not {name}: {error}")) from error
        if len(data) > limit:
            raise RefusedError(too_large(f"is larger than {limit} bytes"))
        if not whole:
            raise RefusedError(invalid(f"the {name} body is cut short"))
    return data


def _inflate(data: bytes, encoding: str, most: int) -> tuple[bytes, bool]:
    """At most about `most` bytes of what the data holds, and whether it has come to its end."""
    if encoding == "br":
        reader = brotli.Decompressor()
        return reader.process(data, output_buffer_limit=most), reader.is_finished()
    parts: list[bytes] = []
    for _ in range(MAX_MEMBERS):
        member = _member(encoding)
        parts.append(member.decompress(data, most))
        most -= len(parts[-1])
        data = member.unused_data
        if not member.eof or not data or most <= 0:
            return b"".join(parts), member.eof
    raise RefusedError(too_large(f"has more than {MAX_MEMBERS} parts"))


def _member(encoding: str) -> "zlib._Decompress | zstd.ZstdDecompressor":
    match encoding:
        case "gzip" | "x-gzip":
            return zlib.decompressobj(zlib.MAX_WBITS | 16)
        case "deflate":
            return zlib.decompressobj()
        case "zstd":
            return zstd.ZstdDecompressor()
    raise RefusedError(invalid(f"content-encoding {encoding!r} is not supported"))


def decoded(data: bytes) -> tuple[dict[str, Any], list[str]]:
    """The JSON object that a body is, and notes of what was changed to read it.

    Raises RefusedError when it is none, or one that would cost too much.
    """
    if len(data) > MAX_VALUES and sum(map(data.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise RefusedError(too_large("holds too many values"))
    notes: list[str] = []
    try:
        try:
            body = _decoded(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            mended = with_whole_characters(data)
            if mended == data:
                raise
            body = _decoded(mended)
            notes.append(LONE_SURROGATE_NOTE)
    except RecursionError as error:
        raise RefusedError(invalid("the body is nested too deeply")) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RefusedError(invalid(f"the body is not JSON: {error}")) from error
    if not isinstance(body, dict):
        raise RefusedError(invalid("the body must be a JSON object"))
    if len(body) > MAX_FIELDS:
        raise RefusedError(too_large("has too many fields"))
    return body, notes


def with_whole_characters(data: bytes) -> bytes:
    """The JSON text with U+FFFD for each half of a UTF-16 pair that lacks the other, and for bytes
    that are not UTF-8: harnesses cut text anywhere, in the middle of an emoji too."""
    if data.count(b"\\") > MAX_VALUES:
        return data
    text = data.decode("utf-8", "replace")
    return _SURROGATES.sub(_whole, text).encode()


def _whole(found: re.Match[str]) -> str:
    return found[0] if found[0] == "\\\\" or found["pair"] else "\\ufffd"


def _decoded(data: bytes) -> Any:
    """What the JSON text says. Raises RecursionError also for a value which only just decodes, so
    that it does not fail later where nobody can refuse it."""
    if data.count(b"{") + data.count(b"[") <= SHALLOW:
        return _plain(data)
    return _decode(data, SPARE_FRAMES)


def _decode(data: bytes, spare_frames: int) -> Any:
    """Decode with that much less of the recursion limit."""
    return _decode(data, spare_frames - 1) if spare_frames else _plain(data)
