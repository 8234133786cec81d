"""One trace for each branch of the tree of completions, for trainers that learn from trees.

Every branch has its whole context, from the first prompt to its last answer. Sampled tokens that
stand in several branches are trained in the first of them and masked in the others, whose metadata
says where they are trained, so that the sum over all traces trains each token once.
"""

from typing import ClassVar, NamedTuple

import msgspec

from builders import assemble
from builders.chains import Beginning, Chain, Joints, Link, Previous, first, joints, main_last
from builders.eligible import Options, Split, split
from builders.prefix_merging import MergingConfig, chain_stats
from builders.records import CompletionSession, Trajectory


class LineageConfig(MergingConfig, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """As of prefix_merging."""


class Lineage:
    """Traces in the order of the requests with which the branches end, the main one last."""

    name: ClassVar[str] = "lineage"
    Config: ClassVar[type[msgspec.Struct]] = LineageConfig

    def __init__(self, config: LineageConfig) -> None:
        self.options: Options = config
        self._ends = config.end_of_turn_ids

    def build(self, session: CompletionSession) -> Trajectory:
        parts = split(session, self.options)
        known = joints(session, parts, self.options, self._ends)
        branches = _branches(parts, known, self.options)
        chains = _trained_once(main_last(branches))
        stats = {**chain_stats(chains), **known.stats}
        return assemble.trajectory(session, self.name, chains, parts, self.options, stats=stats)


class _Step(NamedTuple):
    link: Link
    before: Previous | None
    """None of a root."""
    begun: Beginning
    """Why its root is one."""
    end: int
    """Tokens of the path up to and including its own."""


def _branches(parts: Split, known: Joints, options: Options) -> list[Chain]:
    """A path from a root for each completion of which no other goes on from all trainable tokens."""
    steps: dict[str, _Step] = {}
    handed_on: set[str] = set()
    for completion in parts.eligible:
        name, own = completion.completion_id, first(completion, parts)
        begun: Beginning = "max_tokens"
        if joint := known.found.get(name):
            before, link = joint.before, joint.link(completion, own.length)
            step = steps[before.completion.completion_id]
            end = step.end - step.link.length + before.taken + len(link.interstitial) + link.length
            if options.max_tokens is None or end <= options.max_tokens:
                steps[name] = _Step(link, before, step.begun, end)
                if before.taken == step.link.length:
                    handed_on.add(before.completion.completion_id)
                continue
        else:
            begun = known.refused[name]
        steps[name] = _Step(own, None, begun, completion.prompt_length + own.length)
    return [_path(steps, name) for name in steps if name not in handed_on]


def _path(steps: dict[str, _Step], name: str) -> Chain:
    """From the root to the completion of that name."""
    step = steps[name]
    links = [step.link]
    while step.before is not None:
        taken, step = step.before.taken, steps[step.before.completion.completion_id]
        links.append(step.link._replace(length=taken))
    return Chain(links[::-1], step.begun)


def _trained_once(chains: list[Chain]) -> list[Chain]:
    """The chains with each token left to the first of them that holds it."""
    trained: dict[str, int] = {}
    once = []
    for chain in chains:
        links: list[Link] = []
        for link in chain.links:
            name = link.completion.completion_id
            done = trained.get(name, 0)
            links.append(link._replace(shared=min(done, link.length)))
            trained[name] = max(done, link.length)
        once.append(Chain(links, "branch" if links[0].shared else chain.begun))
    return once
