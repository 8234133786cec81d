"""Digests that stand for messages and heads, so that a session need not keep their texts.

A call's messages are digested each time it comes, with all that came before, so this must cost next
to nothing: xxh3 reads a conversation of half a megabyte in some 50 microseconds. It is not made to
withstand forgery; the seed, which every process draws anew and tells nobody, is why a harness
cannot prepare two messages with one digest. Digests are never stored.
"""

import secrets
from typing import Any

import msgspec
import xxhash

from polar_gateway.dialects.messages import compact_json
from polar_gateway.dialects.turn import ModelRequest

_SEED = secrets.randbits(64)

_sorted = msgspec.msgpack.Encoder(order="deterministic").encode
_as_is = msgspec.msgpack.Encoder().encode


def message_digest(message: dict[str, Any]) -> bytes:
    """16 bytes, the same for equal messages."""
    return xxhash.xxh3_128_digest(_sorted(message), _SEED)


def head_digest(request: ModelRequest) -> bytes:
    """16 bytes, the same for requests that are rendered alike apart from their messages.

    Of the choices of a tool only the one of none changes a rendering: some engines leave out the
    tools.
    """
    return value_digest((request.tools, request.tool_choice == "none", request.template_kwargs))


def value_digest(value: Any) -> bytes:
    """16 bytes, the same for equal JSON values. The order of fields counts, since templates write
    them in the order that they have."""
    try:
        encoded = _as_is(value)
    except OverflowError:  # an integer of more than 64 bits
        encoded = compact_json(value).encode()
    return xxhash.xxh3_128_digest(encoded, _SEED)
