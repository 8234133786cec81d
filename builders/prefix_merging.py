"""Merge completions that continue one another into one trace each chain (paper §3.4.2).

A completion continues an earlier one when three things agree: its messages extend the earlier
request's under the same tools, the assistant message that follows is the earlier answer, and its
prompt begins with the earlier prompt, token by token. Where several completions continue the same
one (siblings, a rewind), the longest line goes on in its chain. Whatever continues nothing (a
subagent, a compaction, an edit, a retry, the shorter branch) starts a chain of its own, so that
nothing is dropped.
"""

import re
from array import array
from collections import Counter
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from builders import assemble
from builders.assemble import Link
from builders.eligible import Options, split
from builders.identity import call_ids, echo, head_key, message_key, same_answer
from builders.junctions import (
    Junction,
    Refusal,
    closes_once,
    end_markup,
    end_of_turn,
    junction,
)
from builders.records import Completion, CompletionSession, Trajectory

Beginning = Literal["no_predecessor", "prompt_changed", "answer_edited", "branch"] | Refusal
"""Why a completion began a chain: nothing came before it, what kept it from joining, or that
another line went on in the chain that it continues."""


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
        history = _History(ends.ids, end_markup(session, ends.ids))
        steps = [history.step(number, one) for number, one in enumerate(parts.eligible)]
        chains, begun = _chains(parts.eligible, steps)
        main = max(chains, key=_weight, default=None)
        traces = [
            assemble.trace(
                session,
                self.name,
                chain,
                prompt_ids=chain[0].completion.prompt_ids.tolist(),
                main=chain is main,
            )
            for chain in sorted(chains, key=lambda chain: chain is main)
        ]
        drifts = [link.drift for chain in chains for link in chain if link.drift]
        stats = {
            "begun": begun,
            "context_drift": {"turns": len(drifts), "tokens": sum(drifts)},
            "ambiguous": sum(link.ambiguous for chain in chains for link in chain),
            "end_of_turn_ids": sorted(ends.ids),
            "end_of_turn_source": ends.source,
        }
        return assemble.trajectory(session, self.name, traces, parts, stats)


class _Fit(NamedTuple):
    """How well a completion continues another; greater is better evidence."""

    same_answer: bool
    same_thread: bool
    """The harness names the same conversation in its headers, or names none."""
    same_calls: bool
    """The echoed tool-call ids are those of the answer: engines mint them anew for every answer."""
    same_tokens: bool


class _Step(NamedTuple):
    """That a completion continues the one of number `after`, and how the two meet."""

    fit: _Fit
    after: int
    junction: Junction
    ambiguous: bool = False
    """Another completion fitted just as well; the latest of them is taken."""


class _History:
    """The requests so far, findable by their messages.

    `_nodes` numbers every distinct beginning of a conversation: a node is its parent's number and
    the key of one more message; the root's parent is the key of the tools.
    """

    def __init__(self, ends: frozenset[int], markup: re.Pattern[str]) -> None:
        self._ends = ends
        self._markup = markup
        self._nodes: dict[tuple[int | bytes, bytes], int] = {}
        self._keys: dict[int, bytes] = {}
        self._asked: dict[int, list[tuple[int, Completion]]] = {}

    def step(self, number: int, completion: Completion) -> _Step | Beginning:
        """Which earlier completion this one continues.

        Asked are those alone that share the longest beginning with it: if none of them fits, going
        further back would step over a turn that the template or the harness has changed.
        """
        messages = completion.messages
        path = self._path(completion, messages)
        if not path:
            return "no_predecessor"
        known = next((n for n in range(len(path) - 1, 0, -1) if path[n - 1] in self._asked), 0)
        candidates = self._asked.get(path[known - 1], []) if known else []
        echoed = echo(messages, known)
        found = [self._meet(earlier, after, completion, echoed) for after, earlier in candidates]
        self._asked.setdefault(path[-1], []).append((number, completion))
        fitting = [step for step in found if isinstance(step, _Step)]
        if not fitting:
            return next((why for why in found if not isinstance(why, _Step)), "no_predecessor")
        best = max(step.fit for step in fitting)
        *others, last = [step for step in fitting if step.fit == best]
        return last._replace(ambiguous=bool(others))

    def _meet(
        self, earlier: Completion, after: int, completion: Completion, echoed: list[dict[str, Any]]
    ) -> _Step | Beginning:
        tail = completion.prompt_after(earlier)
        if tail is None:
            return "prompt_changed"
        answer, sampled = earlier.response_message, earlier.sampled_ids
        fit = _Fit(
            same_answer(answer, echoed),
            earlier.chain == completion.chain,
            call_ids([answer]) == call_ids(echoed),
            tail[: len(sampled)] == sampled,
        )
        if not fit.same_answer and not fit.same_tokens:
            return "answer_edited"
        once = fit.same_tokens or closes_once(echoed, self._markup)
        found = junction(tail, sampled, self._ends, one_end=once)
        return _Step(fit, after, found) if isinstance(found, Junction) else found

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


def _chains(
    completions: list[Completion], steps: list[_Step | Beginning]
) -> tuple[list[list[Link]], dict[str, int]]:
    """Part the tree of steps into chains; and how many began for which reason.

    Each completion hands its chain on to the continuation from which the longest line follows, the
    latest among equals.
    """
    heirs: dict[int, int] = {}
    heights = [1] * len(completions)
    for number in range(len(completions) - 1, -1, -1):
        step = steps[number]
        if isinstance(step, _Step) and heights[number] >= heights[step.after]:
            heights[step.after] = heights[number] + 1
            heirs[step.after] = number
    chains: list[list[Link]] = []
    chain_of: list[list[Link]] = []
    begun: Counter[str] = Counter()
    for number, (completion, step) in enumerate(zip(completions, steps, strict=True)):
        if isinstance(step, _Step) and heirs[step.after] == number:
            chain = chain_of[step.after]
            interstitial, drift = step.junction
            chain.append(Link(completion, interstitial, drift, step.ambiguous))
        else:
            chain = [Link(completion, array("i"))]
            chains.append(chain)
            begun["branch" if isinstance(step, _Step) else step] += 1
        chain_of.append(chain)
    return chains, dict(begun)


def _weight(chain: list[Link]) -> tuple[int, int]:
    return len(chain), sum(len(link.completion.sampled_ids) for link in chain)
