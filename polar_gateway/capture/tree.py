"""The messages of a session's calls as a prefix tree, in which a call's place and its echoes of
earlier answers are found.

Equal messages in the same place are kept once. Where an echo stands, evidence says of which answer
it is one, strongest first: a reference that our answer carried; a call id that the session handed
out; the messages before it, which lead to where the answer was said.
"""

from typing import Any, NamedTuple

import msgspec

from builders.records import Completion
from polar_gateway.capture import restore
from polar_gateway.capture.restore import AMBIGUOUS, Candidate, Restoration
from polar_gateway.dialects.turn import ModelRequest


class _Echo(NamedTuple):
    """How a harness has sent an answer back in other words, and what that lacked."""

    message: dict[str, Any]
    reference: str | None
    restoration: Restoration


class _Node:
    """One message in the place where it was said."""

    __slots__ = ("answers", "children", "echo", "latest", "message")

    def __init__(self, message: dict[str, Any]) -> None:
        self.message = message
        self.children: list[_Node] = []
        self.latest: dict[int, Completion] = {}
        """The latest completion that came through here, for each set of tools."""
        self.answers: list[Completion] = []
        """The completions that said this, here or where it was said first."""
        self.echo: _Echo | None = None
        """The last echo that nothing but this can be meant by."""

    def child(self, message: dict[str, Any]) -> "_Node | None":
        for node in self.children:
            if node.message is message or node.message == message:
                return node
        return None

    @property
    def answer(self) -> Completion:
        """The latest delivered one of `answers`, which must not be empty."""
        return max(self.answers, key=lambda each: (each.delivered, each.index))

    def may_be_of(self, reference: str | None) -> bool:
        """Whether this is no answer of another completion than the one referred to."""
        return (
            reference is None
            or not self.answers
            or any(answer.completion_id == reference for answer in self.answers)
        )


class _Recalled(NamedTuple):
    """The answer that an echo is one of."""

    node: _Node
    restoration: Restoration
    ambiguous: bool = False


class Place:
    """Where a request stands in the tree; its messages and tools are the stored objects if equal."""

    __slots__ = ("messages", "parent", "path", "shared", "tools", "toolset")

    def __init__(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        toolset: int,
        path: list[_Node],
        parent: Completion | None,
        shared: int,
    ) -> None:
        self.messages = messages
        self.tools = tools
        self.toolset = toolset
        self.path = path
        self.parent = parent
        self.shared = shared

    def previous(self) -> tuple[int, Completion | None]:
        """The call whose answer the request continues, and how many of its messages that covers."""
        for depth in range(len(self.path), 0, -1):
            answers = [each for each in self.path[depth - 1].answers if each.tools == self.tools]
            if answers:
                return depth, max(answers, key=lambda each: (each.delivered, each.index))
        return 0, None


class MessageTree:
    def __init__(self) -> None:
        self._root = _Node({})
        self._toolsets: list[list[dict[str, Any]] | None] = []
        self._said: dict[str, _Node] = {}
        """Completion id -> where it was said."""
        self._recorded: dict[int, _Node] = {}
        """`id` of a recorded message, which lives as long as the tree -> where it was said."""
        self._called: dict[str, list[_Node]] = {}
        """Call id -> the answers that handed it out: some engines count from 0 in each."""

    def find(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> Place:
        toolset = self._intern(tools)
        path: list[_Node] = []
        parent: Completion | None = None
        shared = 0
        node = self._root
        for message in messages:
            found = node.child(message)
            if found is None:
                break
            node = found
            path.append(node)
            if toolset in node.latest:
                parent, shared = node.latest[toolset], len(path)
        if parent is None and path:
            parent = max(node.latest.values(), key=lambda completion: completion.index)
            shared = len(path)
        return Place(
            messages=[*(node.message for node in path), *messages[len(path) :]],
            tools=self._toolsets[toolset],
            toolset=toolset,
            path=path,
            parent=parent,
            shared=shared,
        )

    def insert(self, place: Place, completion: Completion) -> None:
        node = place.path[-1] if place.path else self._root
        for message in place.messages[len(place.path) :]:
            node = self._grown(node, message)
            place.path.append(node)
        said = self._grown(node, completion.response_message)
        if not said.answers:
            self._recorded[id(said.message)] = said
            for call in said.message.get("tool_calls", ()):
                self._called.setdefault(call["id"], []).append(said)
            for sibling in node.children:
                sibling.echo = None  # may be that of the new answer as well
        said.answers.append(completion)
        self._said[completion.completion_id] = said
        place.path.append(said)
        for node in place.path:
            node.latest[place.toolset] = completion

    def _grown(self, node: _Node, message: dict[str, Any]) -> _Node:
        found = node.child(message)
        if found is None:
            found = _Node(message)
            node.children.append(found)
            if (said := self._recorded.get(id(message))) is not None:
                found.answers = said.answers
        return found

    def restored(self, request: ModelRequest) -> ModelRequest:
        """The request with recorded answers in place of their echoes, and every message that is
        known already as the stored object, so that `find` need not compare them again."""
        sent = request.messages
        messages: list[dict[str, Any]] = []
        notes: list[str] = []
        call_ids: list[tuple[str, str]] = []
        node: _Node | None = self._root
        for index, message in enumerate(sent):
            if message["role"] == "assistant":
                reference = request.answers.get(index)
                found = None if node is None else node.child(message)
                call_ids = []
                if found is None or not found.may_be_of(reference):
                    following = sent[index + 1] if index + 1 < len(sent) else None
                    recalled = self._recall(node, message, following, reference, request.tools)
                    if recalled is not None:
                        found = recalled.node
                        call_ids = list(recalled.restoration.call_ids)
                        notes += recalled.restoration.notes
                        notes += [AMBIGUOUS] if recalled.ambiguous else []
            else:
                if call_ids and message["role"] == "tool":
                    message = _reissued(message, call_ids)
                found = None if node is None else node.child(message)
            messages.append(message if found is None else found.message)
            node = found
        if notes:
            notes = list(dict.fromkeys([*request.notes, *notes]))
        return msgspec.structs.replace(request, messages=messages, notes=notes or request.notes)

    def _recall(
        self,
        before: _Node | None,
        echo: dict[str, Any],
        following: dict[str, Any] | None,
        reference: str | None,
        tools: list[dict[str, Any]] | None,
    ) -> _Recalled | None:
        """The answer that `echo`, said behind `before`, is one of; None where it is the harness's
        own words."""
        here = [] if before is None else [node for node in before.children if node.answers]
        for node in here:
            if (known := node.echo) and known.reference == reference and known.message == echo:
                return _Recalled(node, known.restoration)
        nodes: list[_Node] = []
        candidates: list[Candidate] = []
        for node in self._suspects(echo, here, reference):
            found = restore.restoration(echo, node.message, tools)
            if found is not None:
                in_place = next((each for each in here if each.answers is node.answers), None)
                node = in_place or node
                goes_on = following is not None and (
                    node.child(_reissued(following, list(found.call_ids))) is not None
                )
                nodes.append(node)
                candidates.append(Candidate(node.answer, found, in_place is not None, goes_on))
        if not candidates:
            return None
        number, ambiguous = restore.choose(candidates)
        node, restoration = nodes[number], candidates[number].restoration
        if len(candidates) == 1 and candidates[0].in_place:
            node.echo = _Echo(echo, reference, restoration)
        return _Recalled(node, restoration, ambiguous)

    def _suspects(
        self, echo: dict[str, Any], here: list[_Node], reference: str | None
    ) -> list[_Node]:
        """The answers that the strongest evidence there is allows."""
        if reference is not None and reference in self._said:
            return [self._said[reference]]
        for call in echo.get("tool_calls", ()):
            if call["id"] in self._called:
                return self._called[call["id"]]
        return here

    def _intern(self, tools: list[dict[str, Any]] | None) -> int:
        for number, known in enumerate(self._toolsets):
            if known == tools:
                return number
        self._toolsets.append(tools)
        return len(self._toolsets) - 1


def _reissued(message: dict[str, Any], call_ids: list[tuple[str, str]]) -> dict[str, Any]:
    """A tool message with the recorded id of its call; takes the pair out of `call_ids`."""
    for number, (theirs, ours) in enumerate(call_ids):
        if message.get("tool_call_id") == theirs:
            del call_ids[number]
            return {**message, "tool_call_id": ours}
    return message
