"""Reads the ids of long prompts at the cost of what is new in them.

An agent's prompt mostly is an earlier context and a little more, and an engine reports all of its
ids, as JSON, each time. Where the JSON text begins with the spelling of the earlier context, the ids
do too, and only the rest is decoded. Of a spelling no more is kept than its length and digest; the
ids are those of the earlier call's record. Text that does not begin so is decoded whole: the cache
can be small, empty or wrong about what extends what, and the ids are the engine's all the same.
"""

from array import array
from collections import OrderedDict
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from builders.records import Ids, TokenNode
from polar_gateway.engines.refusals import unreadable

MAX_ENTRIES = 16_384

_ids = msgspec.json.Decoder(list[int])
_encode = msgspec.json.Encoder().encode


def spelling(ids: Ids) -> bytes:
    """The ids as a JSON array, as engines write it."""
    return _encode(ids.tolist())


def decoded_ids(text: bytes) -> Ids:
    """Raises msgspec.DecodeError when it is no JSON array of ids."""
    try:
        return array("i", _ids.decode(text))
    except OverflowError as error:
        raise msgspec.DecodeError(str(error)) from error


class Spelling(NamedTuple):
    """Of the JSON array of a context's ids, without its last bracket."""

    length: int
    digest: bytes


class IdCache:
    """The spellings of the latest contexts, by the id of the completion that ended with them."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._spellings: OrderedDict[str, Spelling] = OrderedDict()

    def get(self, completion_id: str) -> Spelling | None:
        return self._spellings.get(completion_id)

    def keep(self, completion_id: str, spelling: Spelling) -> None:
        self._spellings[completion_id] = spelling
        self._spellings.move_to_end(completion_id)
        if len(self._spellings) > self._max_entries:
            self._spellings.popitem(last=False)


class PromptReader:
    """The prompt's ids of one call, as the engine says them once in its answer."""

    def __init__(
        self,
        cache: IdCache,
        completion_id: str,
        after: TokenNode | None,
        sent: Ids | None = None,
        rendering: bytes = b"",
    ) -> None:
        """`after` is the call that this one probably extends; `sent` is what the engine is told to
        take for the prompt, and `rendering` a text that probably spells it."""
        self.ids: Ids | None = None
        """Those sent themselves where the engine says that it has read just them."""
        self._cache = cache
        self._completion_id = completion_id
        self._after = after
        self._sent = sent
        self._text = b""
        self._hash = blake2b(digest_size=16)
        self._hashed = 0
        self.sent_text = b""
        """How what is sent is spelled."""
        if sent is not None:
            self.sent_text = rendering if self._spells(rendering, sent) else spelling(sent)

    def read(self, raw: msgspec.Raw) -> None:
        """`raw` is empty or null where the engine does not say them. Raises EngineError."""
        text = bytes(raw)
        if not text or text == b"null":
            return
        try:
            if self._sent is not None and text == self.sent_text:
                self.ids = self._sent
            else:
                self._begin_anew()
                self.ids = self._decoded(text)
        except msgspec.DecodeError as error:
            raise unreadable(error, text) from error
        self._text = text

    def _decoded(self, text: bytes) -> Ids:
        after = self._after
        earlier = None if after is None else self._cache.get(after.completion_id)
        if after is None or earlier is None or len(text) <= earlier.length:
            return decoded_ids(text)
        self._digest(text, earlier.length)
        rest = text[earlier.length :]
        if self._hash.digest() != earlier.digest or rest[:1] not in b",]":
            return decoded_ids(text)  # another text, or one whose last number goes on
        ids = after.context_ids
        if rest != b"]":
            ids += decoded_ids(b"[" + rest[1:])
        return ids

    def _spells(self, text: bytes, ids: Ids) -> bool:
        """Whether the text is the JSON array of the ids; False also where only decoding all of it
        would tell."""
        after = self._after
        earlier = None if after is None else self._cache.get(after.completion_id)
        if after is None or earlier is None or len(text) <= earlier.length:
            return False
        self._digest(text, earlier.length)
        rest, known = text[earlier.length :], after.prompt_length + len(after.sampled_ids)
        if (
            self._hash.digest() == earlier.digest
            and rest[:1] == b","
            and ids[:known] == after.context_ids
            and decoded_ids(b"[" + rest[1:]) == ids[known:]
        ):
            return True
        self._begin_anew()
        return False

    def _begin_anew(self) -> None:
        self._hash = blake2b(digest_size=16)
        self._hashed = 0

    def remember(self, sampled: Ids) -> None:
        """Let the next turn's prompt be read as what it adds to this one and its answer."""
        if not self.ids or not self._text:
            return
        self._digest(self._text, len(self._text) - 1)
        answer = b"," + spelling(sampled)[1:-1] if sampled else b""
        self._hash.update(answer)
        kept = Spelling(self._hashed + len(answer), self._hash.digest())
        self._cache.keep(self._completion_id, kept)
        self._text = b""

    def _digest(self, text: bytes, end: int) -> None:
        self._hash.update(memoryview(text)[self._hashed : end])
        self._hashed = end
