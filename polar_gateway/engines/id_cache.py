"""Reads the ids of long prompts at the cost of what is new in them.

An agent's prompt mostly is an earlier context and a little more, and an engine reports all of its
ids, as JSON, each time. Where the JSON text begins with that of the earlier context, the ids do
too, and only the rest is decoded. Text that does not begin so is decoded whole: the cache can be
small, empty or wrong about what extends what, and the ids are the engine's all the same.
"""

from array import array
from collections import OrderedDict
from typing import NamedTuple

import msgspec

from builders.records import Ids

MAX_BYTES = 64 << 20

_ids = msgspec.json.Decoder(list[int])
_spell = msgspec.json.Encoder().encode


class Context(NamedTuple):
    """Prompt and sampled ids of a completion, and the JSON array of them without its last bracket."""

    ids: Ids
    text: bytes

    @property
    def size(self) -> int:
        return len(self.text) + len(self.ids) * self.ids.itemsize


class IdCache:
    """The latest contexts, by the id of the completion that ended with them."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._contexts: OrderedDict[str, Context] = OrderedDict()
        self._bytes = 0

    def decode(self, text: bytes, after: str | None) -> Ids:
        """The ids in a JSON array; `after` names the completion that they probably extend.

        Raises msgspec.DecodeError when it is no array of integers.
        """
        earlier = None if after is None else self._contexts.get(after)
        if earlier is None or not text.startswith(earlier.text):
            return array("i", _ids.decode(text))
        rest = text[len(earlier.text) :]
        if rest[:1] == b",":
            return earlier.ids + array("i", _ids.decode(b"[" + rest[1:]))
        if rest == b"]":
            return earlier.ids[:]
        return array("i", _ids.decode(text))  # the last number goes on

    def remember(self, completion_id: str, text: bytes, prompt: Ids, sampled: Ids) -> None:
        """Keep a context; `text` is what `prompt` was decoded from."""
        if not prompt:
            return
        answer = b"," + _spell(sampled.tolist())[1:-1] if sampled else b""
        context = Context(prompt + sampled, text[:-1] + answer)
        replaced = self._contexts.pop(completion_id, None)
        self._contexts[completion_id] = context
        self._bytes += context.size - (replaced.size if replaced else 0)
        while self._bytes > self._max_bytes:
            _, oldest = self._contexts.popitem(last=False)
            self._bytes -= oldest.size
