"""The calls of a session by what their requests said: where a request belongs, and whose answer it
continues.

The messages of all calls form a tree, in which equal messages in the same place are one. Of the
messages only digests are kept, of the calls only ids; where the words of an answer are needed, they
are read back from the journal. Where an echo of an answer stands, evidence says of which answer it
is one, strongest first: a reference that our answer carried; a call id that the session handed out;
the messages before it, which lead to where the answer was said.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from builders.records import AttachLevel, Mode, TokenNode
from polar_gateway.capture import journal, restore
from polar_gateway.capture.digests import message_digest
from polar_gateway.capture.restore import AMBIGUOUS, Candidate, Part, Restoration
from polar_gateway.dialects.turn import ModelRequest

MANY = 8
"""Answers that one echo is compared with. Where more may be meant, as some engines give every call
the same id, it is those that read like it."""

Answers = Callable[["Node"], dict[str, Any]]
"""Reads the words of a call's answer. Raises CaptureError."""


class Node(TokenNode, kw_only=True, eq=False):
    """One call that sampled something, as long as its session lives."""

    index: int
    head: int
    """The number of what its prompt began with, apart from messages."""
    said: "Said | None" = None
    """Where its answer was said first."""
    place: journal.Place
    """Where the journal has its answer."""
    mode: Mode
    canonical_length: int | None = None
    """How many ids the engine's own rendering of the prompt has; None: as many as the prompt."""
    answer_rendered: bool = False
    """Whether the engine's own rendering of the answer is in the journal."""
    findings: tuple[str, ...]
    chain: Mapping[str, str]
    delivered: bool = True
    delivered_tokens: int | None = None
    part: Part | None = None
    """What was delivered of the answer, where that was not all."""
    continued: bool = False
    """Whether a request was attached to it."""


class Said:
    """One message in the place where it was said."""

    __slots__ = ("_only", "_several", "answers", "digest", "echo", "halves", "latest", "likeness")

    def __init__(self, digest: bytes) -> None:
        self.digest = digest
        self._only: Said | None = None
        """The first child; most have no other."""
        self._several: dict[bytes, Said] | None = None
        """All of them, where there are more."""
        self.latest: tuple[Node, ...] = ()
        """The latest call that came through here, for each head."""
        self.answers: list[Node] | None = None
        """The calls whose answer this is, said here or where it was said first."""
        self.halves: list[_Rival] | None = None
        """The calls of whose answers this is all that a harness had received once."""
        self.echo: _Echo | None = None
        """The last echo that nothing but this can be meant by."""
        self.likeness: bytes | None = None
        """Of an answer, once it was asked for."""

    @property
    def children(self) -> Sequence["Said"]:
        if self._several is not None:
            return list(self._several.values())
        return () if self._only is None else (self._only,)

    def child(self, digest: bytes) -> "Said | None":
        if self._several is not None:
            return self._several.get(digest)
        only = self._only
        return only if only is not None and only.digest == digest else None

    def grown(self, digest: bytes) -> "Said":
        """The child of that digest, a new one if there is none."""
        found = self.child(digest)
        if found is None:
            found = Said(digest)
            if self._only is None:
                self._only = found
            elif self._several is None:
                self._several = {self._only.digest: self._only, digest: found}
            else:
                self._several[digest] = found
        return found

    @property
    def received(self) -> bool:
        """Whether this is no answer of calls alone whose answers, by all that is known, did not get
        through."""
        return not self.answers or any(
            answer.delivered or answer.continued for answer in self.answers
        )

    def was_said_in(self, chain: Mapping[str, str]) -> bool:
        """Whether it may be an answer of this conversation, or is none."""
        return not chain or not self.answers or any(each.chain == chain for each in self.answers)

    def may_be_of(self, reference: str | None) -> bool:
        """Whether this is no answer of another call than the one referred to."""
        return (
            reference is None
            or not self.answers
            or any(answer.completion_id == reference for answer in self.answers)
        )


class _Echo(NamedTuple):
    """How a harness has sent an answer back in other words, and what that lacked."""

    digest: bytes
    reference: str | None
    restoration: Restoration


class _Rival(NamedTuple):
    """A call that a request may continue."""

    node: Node
    tokens: int | None
    """How many of its sampled tokens the request would go on from; None: all of them."""

    def same(self, other: "_Rival") -> bool:
        """Whether it makes no difference which of the two is continued."""
        return self == other or (
            self.node.sampled_ids[: self.tokens] == other.node.sampled_ids[: other.tokens]
            and self.node.prompt_ids == other.node.prompt_ids
        )


class _Sent(NamedTuple):
    """An assistant message of a request, and what may tell of which answer it is the echo."""

    message: dict[str, Any]
    digest: bytes
    reference: str | None
    following: dict[str, Any] | None
    tools: list[dict[str, Any]] | None
    chain: Mapping[str, str]


class _Recalled(NamedTuple):
    """The answer, or the part of one, that an echo is one of."""

    said: Said
    message: dict[str, Any]
    restoration: Restoration
    ambiguous: bool = False


class Walk:
    """The messages of a request on their way into the tree."""

    __slots__ = ("ambiguous", "digests", "known", "levels", "messages")

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self.messages = messages
        self.digests: list[bytes] = []
        self.known: dict[int, Said] = {}
        """By index: the recorded answers."""
        self.levels: dict[int, AttachLevel] = {}
        """By index: by how much an echo had differed from its answer."""
        self.ambiguous: set[int] = set()
        """Indexes of echoes that may be those of other answers."""


class Attachment(NamedTuple):
    """Whose answer a request continues."""

    previous: Node
    level: AttachLevel
    ambiguous: bool
    continued_tokens: int | None
    messages: int
    """How many of the request's messages are the other call's and its answer."""


class Branch:
    """Where in the tree a request stands."""

    __slots__ = ("attachment", "head", "parent", "path", "rest", "shared")

    def __init__(self, head: int, path: list[Said], rest: list[tuple[bytes, Said | None]]) -> None:
        self.head = head
        self.path = path
        self.rest = rest
        """The digests of the messages beyond the path, and the recorded answers that they are."""
        self.parent: Node | None = None
        """The call against which it is stored: the latest one that came through the deepest node,
        of those with the same head if there are any."""
        self.shared = 0
        """How many messages it has in common with that call and its answer."""
        self.attachment: Attachment | None = None
        self._choose_parent()

    def _choose_parent(self) -> None:
        for depth in range(len(self.path), 0, -1):
            latest = self.path[depth - 1].latest
            for node in latest:
                if node.head == self.head:
                    self.parent, self.shared = node, depth
                    return
            if latest and self.parent is None:
                self.parent, self.shared = max(latest, key=lambda node: node.index), depth


class Forest:
    def __init__(self, answers: Answers) -> None:
        self._answer = answers
        self._root = Said(b"")
        self._heads: dict[bytes, int] = {}
        self._by_id: dict[str, Node] = {}
        self._called: dict[str, list[Said]] = {}
        """Call id -> the answers that handed it out."""

    def node(self, completion_id: str) -> Node:
        return self._by_id[completion_id]

    def find(self, completion_id: str) -> Node | None:
        return self._by_id.get(completion_id)

    # a request comes

    def restored(
        self, request: ModelRequest, chain: Mapping[str, str]
    ) -> tuple[ModelRequest, Walk]:
        """The request with recorded answers in place of their echoes; `chain` names its
        conversation. Raises CaptureError."""
        sent = request.messages
        walk = Walk([])
        notes: list[str] = []
        call_ids: list[tuple[str, str]] = []
        said: Said | None = self._root
        for index, message in enumerate(sent):
            digest = message_digest(message)
            if message["role"] == "assistant":
                reference = request.answers.get(index)
                found = None if said is None else said.child(digest)
                call_ids = []
                if (
                    found is None
                    or not (found.received and found.may_be_of(reference))
                    or not found.was_said_in(chain)
                ):
                    following = sent[index + 1] if index + 1 < len(sent) else None
                    echo = _Sent(message, digest, reference, following, request.tools, chain)
                    recalled = self._recall(said, echo)
                    if recalled is not None:
                        found, message = recalled.said, recalled.message
                        digest = found.digest
                        call_ids = list(recalled.restoration.call_ids)
                        notes += recalled.restoration.notes
                        walk.levels[index] = recalled.restoration.level
                        if recalled.ambiguous:
                            notes.append(AMBIGUOUS)
                            walk.ambiguous.add(index)
                if found is not None and found.answers:
                    walk.known[index] = found
            else:
                if call_ids and message["role"] == "tool":
                    message = _reissued(message, call_ids)
                    digest = message_digest(message)
                found = None if said is None else said.child(digest)
            walk.messages.append(message)
            walk.digests.append(digest)
            said = found
        if notes:
            notes = list(dict.fromkeys([*request.notes, *notes]))
        restored = msgspec.structs.replace(
            request, messages=walk.messages, notes=notes or request.notes
        )
        return restored, walk

    def branch(
        self,
        walk: Walk,
        head: bytes,
        references: Mapping[int, str],
        chain: Mapping[str, str],
    ) -> Branch:
        """Where a request stands; it is attached to the call that it continues."""
        path: list[Said] = []
        said = self._root
        for digest in walk.digests:
            found = said.child(digest)
            if found is None:
                break
            said = found
            path.append(said)
        rest = [
            (walk.digests[index], walk.known.get(index))
            for index in range(len(path), len(walk.digests))
        ]
        branch = Branch(self._heads.setdefault(head, len(self._heads)), path, rest)
        branch.attachment = self._attachment(branch, walk, references, chain)
        return branch

    def _attachment(
        self,
        branch: Branch,
        walk: Walk,
        references: Mapping[int, str],
        chain: Mapping[str, str],
    ) -> Attachment | None:
        for depth in range(len(branch.path), 0, -1):
            said, index = branch.path[depth - 1], depth - 1
            rivals = [
                self._whole(node)
                for node in said.answers or ()
                if node.said is said and node.head == branch.head
            ]
            rivals += [half for half in said.halves or () if half.node.head == branch.head]
            if not rivals:
                continue

            def evidence(rival: _Rival, index: int = index) -> tuple[bool, bool, bool, bool]:
                node, tokens = rival
                return (
                    references.get(index) == node.completion_id,
                    node.chain == chain,
                    tokens is None and node.delivered,
                    tokens is not None,
                )

            chosen = max(rivals, key=lambda r: (evidence(r), not r.node.continued, r.node.index))
            others = [each for each in rivals if evidence(each) == evidence(chosen)]
            half = chosen.tokens is not None
            return Attachment(
                chosen.node,
                "half_delivered" if half else walk.levels.get(index, "exact"),
                index in walk.ambiguous or not all(chosen.same(each) for each in others),
                chosen.tokens,
                depth,
            )
        return None

    def _whole(self, node: Node) -> _Rival:
        """All of the call's answer, or as much of it as was told where that has all its words."""
        return _Rival(node, node.delivered_tokens if self._was_told_all_its_words(node) else None)

    def _was_told_all_its_words(self, node: Node) -> bool:
        """Whether an answer that was not delivered lacks tokens without words alone."""
        if node.delivered or not node.delivered_tokens or node.part is None:
            return False
        words = self._answer(node)
        return node.part.of(words) == words

    def _recall(self, before: Said | None, echo: "_Sent") -> _Recalled | None:
        """The answer that `echo`, said behind `before`, is one of; None where it is the harness's
        own words."""
        here = [] if before is None else [each for each in before.children if each.answers]
        for said in here:
            known = said.echo
            if (
                known
                and (known.digest, known.reference) == (echo.digest, echo.reference)
                and said.was_said_in(echo.chain)
            ):
                return _Recalled(said, self._words(said), known.restoration)
        in_place = {id(each.answers): each for each in here}
        suspects = list(
            dict.fromkeys(
                in_place.get(id(each.answers), each) for each in self._suspects(echo, here)
            )
        )
        places = set(here)
        near = self._alike(echo, [each for each in suspects if each in places])
        far = self._alike(echo, [each for each in suspects if each not in places])
        delivered = [each for each in near if _latest(each).delivered]
        own = [each for each in delivered if each.was_said_in(echo.chain)]
        return (
            self._chosen(echo, own, in_place=True)
            or self._chosen(echo, delivered, in_place=True)
            or self._half(before, echo, near)
            or self._chosen(echo, near, in_place=True)
            or self._chosen(echo, far, in_place=False)
        )

    def _alike(self, echo: _Sent, suspects: Sequence[Said]) -> Sequence[Said]:
        """Of many answers those that read like the echo, or the latest if none does."""
        if len(suspects) <= MANY:
            return suspects
        likeness = restore.likeness(echo.message)
        for said in suspects:
            if said.likeness is None:
                said.likeness = restore.likeness(self._words(said))
        alike = [said for said in suspects if said.likeness == likeness]
        return (alike or suspects)[-MANY:]

    def _chosen(self, echo: _Sent, suspects: Sequence[Said], *, in_place: bool) -> _Recalled | None:
        """The one of these answers that the echo is one of."""
        found: list[_Recalled] = []
        candidates: list[Candidate] = []
        for said in suspects:
            words = self._words(said)
            restoration = restore.restoration(echo.message, words, echo.tools)
            if restoration is not None:
                found.append(_Recalled(said, words, restoration))
                latest = _latest(said)
                goes_on = echo.following is not None and _goes_on(said, echo.following, restoration)
                candidates.append(
                    Candidate(words, latest.delivered, latest.index, in_place, goes_on)
                )
        if not candidates:
            return None
        number, ambiguous = restore.choose(candidates)
        chosen = found[number]._replace(ambiguous=ambiguous)
        if in_place and len(candidates) == 1:
            chosen.said.echo = _Echo(echo.digest, echo.reference, chosen.restoration)
        return chosen

    def _half(self, before: Said | None, echo: _Sent, near: Sequence[Said]) -> _Recalled | None:
        """The answer of which no more was delivered than what the echo says."""
        if before is None:
            return None
        found: _Recalled | None = None
        for said in near:
            for node in said.answers or ():
                if node.delivered or not node.delivered_tokens or node.part is None:
                    continue
                words = node.part.of(self._answer(node))
                restoration = restore.restoration(echo.message, words, echo.tools)
                if restoration is None:
                    continue
                half = before.grown(message_digest(words))
                half.halves = half.halves or []
                if (rival := _Rival(node, node.delivered_tokens)) not in half.halves:
                    half.halves.append(rival)
                found = _Recalled(half, words, restoration._replace(level="half_delivered"))
        return found

    def _words(self, said: Said) -> dict[str, Any]:
        return self._answer(_latest(said))

    def _suspects(self, echo: _Sent, here: list[Said]) -> list[Said]:
        """The answers that the strongest evidence there is allows."""
        if echo.reference is not None and echo.reference in self._by_id:
            said = self._by_id[echo.reference].said
            return [] if said is None else [said]
        for call in echo.message.get("tool_calls", ()):
            if call["id"] in self._called:
                return self._called[call["id"]]
        return here

    # a call has its answer

    def insert(self, branch: Branch, node: Node, answer: dict[str, Any]) -> None:
        said = branch.path[-1] if branch.path else self._root
        for digest, known in branch.rest:
            said = said.grown(digest)
            if known is not None and not said.answers:
                said.answers = known.answers
            branch.path.append(said)
        branch.rest = []
        before, said = said, said.grown(message_digest(answer))
        if not said.answers:
            said.answers = []
            for call in answer.get("tool_calls", ()):
                self._called.setdefault(call["id"], []).append(said)
            for sibling in before.children:
                sibling.echo = None  # may be that of the new answer as well
        said.answers.append(node)
        node.said = said
        self._by_id[node.completion_id] = node
        branch.path.append(said)
        alone = (node,)
        for each in branch.path:
            others = [other for other in each.latest if other.head != node.head]
            each.latest = (*others, node) if others else alone


def _latest(said: Said) -> Node:
    """Of the calls whose answer this is, which must be one; a delivered one before the others."""
    return max(said.answers or (), key=lambda node: (node.delivered, node.index))


def _goes_on(said: Said, following: dict[str, Any], restoration: Restoration) -> bool:
    digest = message_digest(_reissued(following, list(restoration.call_ids)))
    return said.child(digest) is not None


def _reissued(message: dict[str, Any], call_ids: list[tuple[str, str]]) -> dict[str, Any]:
    """A tool message with the recorded id of its call; takes the pair out of `call_ids`."""
    for number, (theirs, ours) in enumerate(call_ids):
        if message.get("tool_call_id") == theirs:
            del call_ids[number]
            return {**message, "tool_call_id": ours}
    return message
