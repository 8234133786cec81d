"""Which completions stand one behind another: what the builders that merge have in common.

That a request continues an earlier answer was found when it arrived (`Completion.previous`). Here
the tokens are asked whether the context is the same, too.
"""

import re
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from builders.echoes import echo
from builders.eligible import Options, Split, continued
from builders.junctions import Junction, Refusal, closes_once, end_markup, end_of_turn, junction
from builders.records import Completion, CompletionSession, Ids

Beginning = (
    Literal[
        "per_request",
        "no_predecessor",
        "previous_left_out",
        "previous_cut",
        "prompt_changed",
        "drift",
        "branch",
        "max_tokens",
    ]
    | Refusal
)
"""Why a completion began a trace: each does (per_request); it continued nothing; or only what is not
trained on; or more of an answer than is trained on; what kept it from joining; that it was to be
kept apart (drift); that another line went on in the trace that it continues; or that the merged
trace grew too long."""


class Previous(NamedTuple):
    """The nearest completion with trainable tokens among those that a request goes on from."""

    completion: Completion
    taken: int
    """How many of its sampled tokens are in the conversation."""
    composed: bool
    """Whether what followed it was composed of its recorded tokens (tokens mode)."""
    ambiguous: bool
    """Whether another may have been meant, here or in between."""


def previous(completion: Completion, tokens: Mapping[str, int]) -> Previous | None:
    """The nearest completion that `completion` goes on from of those that `tokens` has."""
    ambiguous = False
    while (before := completion.previous) is not None:
        ambiguous |= completion.ambiguous
        if before.completion_id in tokens:
            composed = completion.mode == "tokens"
            return Previous(before, continued(completion), composed, ambiguous)
        completion = before
    return None


class Link(NamedTuple):
    """A completion's place in a chain: what came between it and the one before it."""

    completion: Completion
    length: int
    """How many of its sampled tokens are in the chain."""
    interstitial: Ids
    """Empty for the first of a chain."""
    drift: int = 0
    """Positions in which the context it saw of the turn before differs from what was sampled."""
    ambiguous: bool = False
    """Whether it may as well have continued another completion."""
    shared: int = 0
    """How many of its leading tokens an earlier trace trains."""


class Chain(NamedTuple):
    """What becomes one trace."""

    links: list[Link]
    begun: Beginning
    """Why the chain's first completion is not in another one."""

    @property
    def weight(self) -> tuple[int, int]:
        """By which the main chain of a session is told: completions, then sampled tokens."""
        return len(self.links), sum(link.length for link in self.links)


class Joint(NamedTuple):
    """That a completion may stand behind `before`, and how the two meet."""

    before: Previous
    junction: Junction

    def link(self, completion: Completion, length: int) -> Link:
        interstitial, drift = self.junction
        return Link(completion, length, interstitial, drift, self.before.ambiguous)


class Joints(NamedTuple):
    found: dict[str, Joint]
    """Completion id -> its joint."""
    refused: dict[str, Beginning]
    """Completion id -> why it has none. Every eligible completion is in one of the two."""
    stats: dict[str, Any]
    """How the ends of turns were known."""


def joints(
    session: CompletionSession, parts: Split, options: Options, ends: Sequence[int]
) -> Joints:
    """How each eligible completion joins the one that it continues; `ends` are configured ids.

    Raises ValueError where two completions have the same id.
    """
    if len(parts.tokens) != len(parts.eligible):
        raise ValueError(f"session {session.session_id} holds two completions of the same id")
    known = end_of_turn(list(ends), session.end_of_turn_ids, parts.eligible)
    markup = end_markup(session, known.ids)
    found: dict[str, Joint] = {}
    refused: dict[str, Beginning] = {}
    for completion in parts.eligible:
        joint = _joint(completion, parts, options, known.ids, markup)
        if isinstance(joint, Joint):
            found[completion.completion_id] = joint
        else:
            refused[completion.completion_id] = joint
    stats = {"end_of_turn_ids": sorted(known.ids), "end_of_turn_source": known.source}
    return Joints(found, refused, stats)


def _joint(
    completion: Completion,
    parts: Split,
    options: Options,
    ends: frozenset[int],
    markup: re.Pattern[str],
) -> Joint | Beginning:
    before = previous(completion, parts.tokens)
    if before is None:
        return "no_predecessor" if completion.previous is None else "previous_left_out"
    earlier, taken = before.completion, before.taken
    if not 0 < taken <= parts.tokens[earlier.completion_id]:
        return "previous_cut"
    tail = completion.prompt_after(earlier)
    if tail is None:
        return "prompt_changed"
    sampled = earlier.sampled_ids[:taken]
    if tail[:taken] == sampled:
        return Joint(before, Junction(tail[taken:], 0))
    if before.composed:
        return "prompt_changed"
    echoed = echo(completion.messages_from(earlier.message_count))
    met = junction(tail, sampled, ends, one_end=closes_once(echoed, markup))
    if not isinstance(met, Junction):
        return met
    return "drift" if met.drift and options.split_on_drift else Joint(before, met)


def first(completion: Completion, parts: Split) -> Link:
    """The link with which a chain begins."""
    return Link(completion, parts.tokens[completion.completion_id], array("i"))


def main_last(chains: list[Chain]) -> list[Chain]:
    """The chains with the main one last: the one with the most completions, among equals the one
    with more sampled tokens, then the earlier. That is the agent's own conversation in all but odd
    cases: side calls and subagents are shorter.
    """
    main = max(chains, key=lambda chain: chain.weight, default=None)
    return sorted(chains, key=lambda chain: chain is main)


def cut_behind(session: CompletionSession, parts: Split, chains: list[Chain]) -> Counter[int]:
    """Number of a chain -> how many sampled tokens `max_tokens` cut off behind its end."""
    ends = {chain.links[-1].completion.completion_id: at for at, chain in enumerate(chains)}
    cut: Counter[int] = Counter()
    for completion in session.completions:
        if tokens := parts.cut.get(completion.completion_id):
            before = previous(completion, parts.tokens)
            name = completion.completion_id
            if name not in parts.tokens and before is not None:
                name = before.completion.completion_id
            if name in ends:
                cut[ends[name]] += tokens
    return cut
