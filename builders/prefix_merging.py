"""Merge completions that continue one another into one trace each chain (paper §3.4.2).

A completion joins a chain when three things agree: its messages extend those of the chain's last
request under the same tools, the assistant message that follows is the chain's last answer, and its
prompt begins with the chain's last prompt, token by token. Whatever cannot be joined (a subagent, a
compaction, an edit, a retry, a sibling) starts a chain of its own, so that nothing is dropped.
"""

from array import array
from collections import Counter
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from builders import assemble
from builders.assemble import Link
from builders.eligible import Options, split
from builders.identity import call_ids, echo, head_key, message_key, same_answer
from builders.junctions import EndOfTurn, Junction, Refusal, end_of_turn, junction
from builders.records import Completion, CompletionSession, Ids, Trajectory

Beginning = Literal["no_predecessor", "prompt_changed", "answer_edited"] | Refusal
"""Why a completion began a chain: nothing came before it, or what kept it from joining."""


class PrefixMergingConfig(Options, kw_only=True, frozen=True, forbid_unknown_fields=True):
    end_of_turn_ids: list[int] = []
    """The ids that close an assistant turn; empty takes them from the engine."""


class PrefixMerging:
    """One trace for each append-only chain, in the order of the first requests, the main one last.

    The main trace is the chain with the most completions; among equals the one with more sampled
    tokens, then the earlier. It is the agent's own conversation in all but odd cases: side calls
    and subagents are shorter.
    """

    name: ClassVar[str] = "prefix_merging"
    Config: ClassVar[type[msgspec.Struct]] = PrefixMergingConfig

    def __init__(self, config: PrefixMergingConfig) -> None:
        self.options: Options = config
        self._configured_ends = config.end_of_turn_ids

    def build(self, session: CompletionSession) -> Trajectory:
        parts = split(session, self.options)
        ends = end_of_turn(self._configured_ends, session.end_of_turn_ids, parts.eligible)
        merge = _Merge(ends)
        for completion in parts.eligible:
            merge.add(completion)
        main = max(merge.chains, key=_weight, default=None)
        ordered = sorted(merge.chains, key=lambda chain: chain is main)
        traces = []
        for chain in ordered:
            trace = assemble.trace(session, self.name, chain.links, main=chain is main)
            trace.metadata["ambiguous"] = chain.ambiguous
            traces.append(trace)
        return assemble.trajectory(session, self.name, traces, parts, merge.stats())


class _Chain:
    """A chain under construction and the context that its next completion must extend."""

    def __init__(self, completion: Completion, prompt: Ids, messages: list[dict[str, Any]]) -> None:
        self.links = [Link(completion, array("i"))]
        self.prompt = prompt
        self.messages = messages
        self.ambiguous = 0
        """How many times its continuation fitted another chain just as well."""

    @property
    def last(self) -> Completion:
        return self.links[-1].completion


class _Fit(NamedTuple):
    """How well a completion continues a chain; greater is better evidence."""

    same_answer: bool
    same_calls: bool
    """The echoed tool-call ids are those of the answer: engines mint them anew for every answer."""
    same_tokens: bool


class _Merge:
    """The chains so far, findable by the messages of their last request.

    `_nodes` numbers every distinct beginning of a conversation: a node is its parent's number and
    the key of one more message, the root's parent is the key of the tools.
    """

    def __init__(self, ends: EndOfTurn) -> None:
        self.chains: list[_Chain] = []
        self._ends = ends
        self._nodes: dict[tuple[int | bytes, bytes], int] = {}
        self._open: dict[int, list[_Chain]] = {}
        self._keys: dict[int, bytes] = {}
        self._begun: Counter[str] = Counter()

    def add(self, completion: Completion) -> None:
        prompt, messages = completion.prompt_ids, completion.messages
        path = self._path(completion, messages)
        reason: Beginning = "no_predecessor"
        for node in reversed(path[:-1]):
            refusals: list[Beginning] = []
            fits: list[tuple[_Fit, _Chain, Junction]] = []
            for chain in self._open.get(node, ()):
                match self._fit(chain, prompt, messages):
                    case (fit, found):
                        fits.append((fit, chain, found))
                    case str(refusal):
                        refusals.append(refusal)
            if fits:
                best = max(fit for fit, _, _ in fits)
                *others, (_, chain, found) = [entry for entry in fits if entry[0] == best]
                chain.ambiguous += bool(others)
                self._open[node].remove(chain)
                chain.links.append(Link(completion, found.interstitial, found.drift))
                chain.prompt, chain.messages = prompt, messages
                break
            if refusals and reason == "no_predecessor":
                reason = refusals[-1]
        else:
            chain = _Chain(completion, prompt, messages)
            self.chains.append(chain)
            self._begun[reason] += 1
        if path:
            self._open.setdefault(path[-1], []).append(chain)

    def stats(self) -> dict[str, Any]:
        drifts = [link.drift for chain in self.chains for link in chain.links if link.drift]
        return {
            "begun": dict(self._begun),
            "context_drift": {"turns": len(drifts), "tokens": sum(drifts)},
            "ambiguous": sum(chain.ambiguous for chain in self.chains),
            "end_of_turn_ids": sorted(self._ends.ids),
            "end_of_turn_source": self._ends.source,
        }

    def _fit(
        self, chain: _Chain, prompt: Ids, messages: list[dict[str, Any]]
    ) -> tuple[_Fit, Junction] | Beginning:
        """How `chain` is continued by this request, or why it is not."""
        if prompt[: len(chain.prompt)] != chain.prompt:
            return "prompt_changed"
        tail, sampled = prompt[len(chain.prompt) :], chain.last.sampled_ids
        echoed = echo(messages, len(chain.messages))
        answer = chain.last.response_message
        fit = _Fit(
            same_answer(answer, echoed),
            call_ids([answer]) == call_ids(echoed),
            tail[: len(sampled)] == sampled,
        )
        if not fit.same_answer and not fit.same_tokens:
            return "answer_edited"
        found = junction(tail, sampled, self._ends.ids)
        return (fit, found) if isinstance(found, Junction) else found

    def _path(self, completion: Completion, messages: list[dict[str, Any]]) -> list[int]:
        """The nodes of the conversation after each message."""
        at: int | bytes = head_key(completion.tools)
        path = []
        for message in messages:
            key = self._keys.get(id(message))
            if key is None:
                key = self._keys[id(message)] = message_key(message)
            at = self._nodes.setdefault((at, key), len(self._nodes))
            path.append(at)
        return path


def _weight(chain: _Chain) -> tuple[int, int]:
    return len(chain.links), sum(len(link.completion.sampled_ids) for link in chain.links)
