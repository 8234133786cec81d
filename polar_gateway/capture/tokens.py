"""The tokens of one call as they get into its journal: each of them once."""

from array import array

from builders.ids import common_start
from builders.records import Floats, Ids, TokenNode
from polar_gateway.capture import journal
from polar_gateway.engines.base import EngineReply


class Tokens:
    """What is known of a call's tokens, and what the journal has of them."""

    def __init__(self, parent: TokenNode | None) -> None:
        self.shared = 0
        self.tail: Ids = array("i")
        """The prompt, as the difference to the parent's context."""
        self.sampled: Ids = array("i")
        """All that was sampled, once the call has ended."""
        self._parent = parent
        self._prompt: Ids | None = None
        self._appended: Ids = array("i")
        self._logprobs: Floats = array("f")

    @property
    def appended(self) -> int:
        """How many sampled tokens are in the journal."""
        return len(self._appended)

    def begin(self, prompt: Ids) -> None:
        """Find out what a prompt has in common with the parent's context."""
        self._prompt = prompt
        self.shared = 0 if self._parent is None else shared_prefix(prompt, self._parent)
        self.tail = prompt[self.shared :]

    def add(self, ids: Ids, logprobs: Floats) -> None:
        """These are in the journal now."""
        self._appended += ids
        self._logprobs += logprobs

    def finish(self, reply: EngineReply, record: journal.Completed) -> None:
        """Put into the record what the journal lacks: all, if the answer turned out to be another
        one than it had seemed until then."""
        if reply.prompt_ids is not self._prompt and reply.prompt_ids != self._prompt:
            record.appended = 0
            self.begin(reply.prompt_ids)
        else:
            record.appended = self._in_journal(reply)
        if not record.appended:
            record.shared, record.tail = self.shared, journal.pack(self.tail)
        self.sampled = reply.sampled_ids[:]
        record.sampled = journal.pack(self.sampled[record.appended :])
        if reply.logprobs is not None:
            record.logprobs = journal.pack(reply.logprobs[record.appended :])

    def _in_journal(self, reply: EngineReply) -> int:
        """How many of the answer's tokens need not be written again."""
        known = len(self._appended)
        if reply.sampled_ids[:known] != self._appended:
            return 0
        if reply.logprobs is None:
            return known
        # As bytes: what is not a number differs from itself.
        same = journal.pack(reply.logprobs[:known]) == journal.pack(self._logprobs)
        return known if same else 0


def shared_prefix(prompt: Ids, parent: TokenNode) -> int:
    """How many leading ids of `prompt` are those of the parent's prompt and sampled ids.

    Compares piece by piece along the parent's own ancestry, so that no prompt is expanded.
    """
    for start, piece in _context_pieces(parent):
        ours = prompt[start : start + len(piece)]
        if not ours.tobytes().startswith(memoryview(piece)):  # compared in bulk
            return start + common_start(ours, piece)
    return min(len(prompt), parent.prompt_length + len(parent.sampled_ids))


def _context_pieces(call: TokenNode) -> list[tuple[int, Ids]]:
    """The stored pieces that a call's context consists of, each with its offset, in order."""
    pieces: list[tuple[int, Ids]] = []
    node: TokenNode | None = call
    wanted = call.prompt_length + len(call.sampled_ids)
    while node is not None and wanted > 0:
        prompt_end = node.prompt_length
        if wanted > prompt_end:
            pieces.append((prompt_end, _first(node.sampled_ids, wanted - prompt_end)))
            wanted = prompt_end
        if wanted > node.shared:
            pieces.append((node.shared, _first(node.tail, wanted - node.shared)))
            wanted = node.shared
        node = node.parent
    pieces.reverse()
    return pieces


def _first(ids: Ids, count: int) -> Ids:
    return ids if count >= len(ids) else ids[:count]
