"""The words of recorded answers that were asked for lately, shared by a node's sessions.

A harness that sends answers back in other words does so with each call, so that the recorded ones
are wanted again and again; they are kept as bytes, which are a fraction of what they are decoded.
"""

from collections import OrderedDict
from typing import Any

import msgspec

from polar_gateway.capture.journal import CaptureError, Completed, Journal, Place

MAX_BYTES = 32 << 20

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, Any]).decode


class AnswerCache:
    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[tuple[Journal, int], bytes] = OrderedDict()

    def answer(self, journal: Journal, place: Place) -> dict[str, Any]:
        """The words of the completion at that place of the journal. Raises CaptureError."""
        key = journal, place.offset
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
            return _decode(kept)
        record = journal.read(place)
        if not isinstance(record, Completed):
            raise CaptureError(
                f"the journal {journal.path} holds no completion at byte {place.offset}"
            )
        kept = self._kept[key] = _encode(record.response_message)
        self._bytes += len(kept)
        while self._bytes > self._max_bytes:
            self._bytes -= len(self._kept.popitem(last=False)[1])
        return record.response_message

    def forget(self, journal: Journal) -> None:
        """A session has ended, and nothing of it will be asked for again."""
        for key in [key for key in self._kept if key[0] is journal]:
            self._bytes -= len(self._kept.pop(key))
