"""Rendered conversations as the JSON text in which an engine tells their ids.

Two renderings mostly share all but their ends. Compared as text and decoded only where they differ,
they cost next to nothing, however long the conversation is. Pure.
"""

from array import array
from functools import cached_property

import msgspec

from builders.records import Ids
from polar_gateway.engines.base import Rendering
from polar_gateway.engines.id_cache import decoded_ids
from polar_gateway.engines.refusals import unreadable


class JsonRendering:
    """A JSON array of ids; see `Rendering`. Raises EngineError when what is read of it is none."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        self._length: int | None = None
        """Counted at most once, and not at all for what was found to go on from another."""

    @cached_property
    def ids(self) -> Ids:
        return _read(self.text)

    def __len__(self) -> int:
        if self._length is None:
            self._length = self.text.count(b",") + 1 if self.text != b"[]" else 0
        return self._length

    def last(self, count: int) -> Ids:
        start = _end_without(self.text, count)
        return _read(b"[" + self.text[max(start, 1) :].removeprefix(b",")) if count else array("i")

    def after(self, earlier: Rendering, *, less: int = 0) -> Ids | None:
        text = earlier.text
        end = _end_without(text, less)
        if not self.text.startswith(text[:end]):
            return None
        rest = self.text[end:]
        if end > 1 and rest[:1] not in (b",", b"]"):
            return None
        # Of the earlier one only the bracket may be left.
        added = _read(b"[" + (rest if end == 1 else rest.removeprefix(b",")))
        self._length = max(0, len(earlier) - less) + len(added)
        return added


def _end_without(text: bytes, less: int) -> int:
    """Where the last `less` ids of a JSON array begin, separator included."""
    end = len(text) - 1
    for _ in range(less):
        end = text.rfind(b",", 0, end)
        if end < 0:
            return 1
    return end


def _read(text: bytes) -> Ids:
    try:
        return decoded_ids(text)
    except msgspec.DecodeError as error:
        raise unreadable(error, text) from error
