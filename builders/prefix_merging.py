"""Merge completions that continue one another into one trace each chain (paper §3.4.2).

A completion continues an earlier one when two things agree: the request was recognised as going on
from its answer when it arrived, and its prompt begins with the earlier prompt, token by token, with
the turn in between closed in a way that leaves no doubt. Where several completions continue the same
one (siblings, a rewind), the longest line goes on in its chain. Whatever continues nothing (a
subagent, a compaction, an edit, a retry, the shorter branch) starts a chain of its own, so that
nothing is dropped.
"""

from collections import Counter
from typing import ClassVar

import msgspec

from builders import assemble
from builders.chains import Beginning, Chain, Joint, Joints, first, joints, main_last
from builders.eligible import Options, Split, split
from builders.records import CompletionSession, Trajectory


class MergingConfig(Options, kw_only=True, frozen=True, forbid_unknown_fields=True):
    end_of_turn_ids: list[int] = []
    """The ids that close an assistant turn; empty takes them from the engine."""


class PrefixMerging:
    """One trace for each append-only chain, in the order of the first requests, the main one last."""

    name: ClassVar[str] = "prefix_merging"
    Config: ClassVar[type[msgspec.Struct]] = MergingConfig

    def __init__(self, config: MergingConfig) -> None:
        self.options: Options = config
        self._ends = config.end_of_turn_ids

    def build(self, session: CompletionSession) -> Trajectory:
        parts = split(session, self.options)
        known = joints(session, parts, self.options, self._ends)
        chains = _chains(parts, known, self.options)
        stats = {**chain_stats(chains), **known.stats}
        return assemble.trajectory(
            session, self.name, main_last(chains), parts, self.options, stats=stats
        )


def chain_stats(chains: list[Chain]) -> dict[str, object]:
    """What a reader of a merged trajectory wants counted over all chains."""
    links = [link for chain in chains for link in chain.links if not link.shared]
    drifts = [link.drift for link in links if link.drift]
    return {
        "begun": dict(Counter(chain.begun for chain in chains)),
        "context_drift": {"turns": len(drifts), "tokens": sum(drifts)},
        "ambiguous": sum(link.ambiguous for link in links),
    }


def _chains(parts: Split, known: Joints, options: Options) -> list[Chain]:
    """Part the tree of joints into chains, in order of their first requests.

    Each completion hands its chain on to the continuation from which the longest line follows, the
    latest among equals, of those that go on from all of its trainable tokens.
    """
    heirs = _heirs(parts, known.found)
    chains: list[Chain] = []
    chain_of: dict[str, Chain] = {}
    lengths: dict[int, int] = {}
    for completion in parts.eligible:
        name, own = completion.completion_id, first(completion, parts)
        joint = known.found.get(name)
        begun: Beginning
        if joint is None:
            begun = known.refused[name]
        elif heirs.get(joint.before.completion.completion_id) != name:
            begun = "branch"
        else:
            chain = chain_of[joint.before.completion.completion_id]
            link = joint.link(completion, own.length)
            length = lengths[id(chain.links)] + len(link.interstitial) + link.length
            if options.max_tokens is None or length <= options.max_tokens:
                chain.links.append(link)
                lengths[id(chain.links)] = length
                chain_of[name] = chain
                continue
            begun = "max_tokens"
        chain = chain_of[name] = Chain([own], begun)
        lengths[id(chain.links)] = completion.prompt_length + own.length
        chains.append(chain)
    return chains


def _heirs(parts: Split, found: dict[str, Joint]) -> dict[str, str]:
    """Completion id -> the one that goes on in its chain."""
    heirs: dict[str, str] = {}
    heights: dict[str, int] = {}
    for completion in reversed(parts.eligible):
        name = completion.completion_id
        height = heights.setdefault(name, 1)
        if joint := found.get(name):
            before = joint.before.completion.completion_id
            whole = joint.before.taken == parts.tokens[before]
            if whole and height >= heights.get(before, 1):
                heights[before] = height + 1
                heirs[before] = name
    return heirs
