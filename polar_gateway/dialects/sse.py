"""Server-sent events as bytes. Constant parts are encoded once, texts by msgspec's C encoder."""

from typing import Any

import msgspec

json_bytes = msgspec.json.Encoder().encode
"""Any JSON value, a string's quotes included, as compact UTF-8."""

EVENT_STREAM = "text/event-stream; charset=utf-8"

DONE = b"data: [DONE]\n\n"


def event(name: str, payload: Any) -> bytes:
    """A named event."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), json_bytes(payload))
