"""Which policy version sampled which token of an answer. Pure.

An answer is sampled in legs: one, unless the engine aborted it and it was gone on with. Where the
weights changed between two legs the boundary is exact; where they did in the middle of one, only
the engine can say where, and else nobody does.
"""

from collections.abc import Sequence
from typing import NamedTuple

from builders.records import VersionSpan

UNNAMED = "default"
"""What engines call weights that nobody has named."""


class Weights(NamedTuple):
    """The weights behind a backend at one moment, as far as the gateway was told."""

    version: str | None = None
    """None: nobody has named them."""
    changes: int = 0
    """Grows when an update begins: what was sampled between two equal ones had the same weights."""
    in_doubt: bool = False
    """Whether an update is on its way or has failed, or the engine was started anew, so that they
    may be others."""
    blurred: int = 0
    """Grows when they turn out to have become others, perhaps, while they had their earlier name:
    between two unequal ones nobody knows which weights that name stood for."""
    told: bool = False
    """Whether the engine itself was told the version."""

    def doubted(self) -> "Weights":
        """They may become others from now on."""
        if self.in_doubt:
            return self
        return self._replace(changes=self.changes + 1, in_doubt=True)

    def mistaken(self) -> "Weights":
        """They may have become others before this was noticed."""
        return self.doubted()._replace(blurred=self.blurred + 1)

    def updated(self, version: str, *, told: bool) -> "Weights":
        return Weights(version, self.changes + 1, blurred=self.blurred, told=told)


def named(version: str | None) -> str | None:
    """What an engine calls its weights, where somebody has named them."""
    return None if version == UNNAMED else version


class Leg(NamedTuple):
    """A run of an answer's tokens that one call of an engine brought."""

    start: int
    end: int
    """Counted from the answer's first token."""
    before: Weights
    """When the engine was asked."""
    after: Weights
    """When it had answered."""
    sure: int
    """How many tokens of the answer had come before the weights changed, if they did."""
    said: Sequence[VersionSpan] = ()
    """By the engine, of the whole answer; empty where it does not say."""


class Versions(NamedTuple):
    """As a completion records them."""

    first: str | None
    spans: list[VersionSpan]
    """Empty where all tokens have the first one; a span without version is of tokens of which
    nobody can say it."""


def versions_of(legs: Sequence[Leg], unnamed: str | None) -> Versions:
    """`unnamed` is the version of weights that nobody has named to the gateway or the engine: what
    the task says that its policy is."""
    spans: list[VersionSpan] = []
    unknown = False
    for leg in legs:
        for span, known in _spans(leg, unnamed):
            unknown = unknown or not known
            if spans and spans[-1].version == span.version:
                span = VersionSpan(version=span.version, start=spans.pop().start, end=span.end)
            spans.append(span)
    if len(spans) == 1 and not unknown:
        return Versions(spans[0].version, [])
    first = spans[0].version if spans else unnamed
    return Versions(first, spans)


def _spans(leg: Leg, unnamed: str | None) -> list[tuple[VersionSpan, bool]]:
    """The leg's spans, each with whether its version is known."""
    said = [
        VersionSpan(
            version=span.version, start=max(span.start, leg.start), end=min(span.end, leg.end)
        )
        for span in leg.said
        if span.start < leg.end and span.end > leg.start
    ]
    before, after = leg.before, leg.after
    blurred = before.in_doubt or before.blurred != after.blurred
    names = before.told or any(span.version != UNNAMED for span in said)
    if names and _covers(said, leg.start, leg.end):
        return [_named(span, before, unnamed, blurred=blurred) for span in said]
    sure = leg.end if before.changes == after.changes else leg.sure
    if blurred:
        sure = leg.start
    sure = max(leg.start, min(sure, leg.end))
    version = before.version or unnamed
    parts = [
        (VersionSpan(version=version, start=leg.start, end=sure), True),
        (VersionSpan(version=None, start=sure, end=leg.end), False),
    ]
    return [(span, known) for span, known in parts if span.start < span.end]


def _covers(spans: Sequence[VersionSpan], start: int, end: int) -> bool:
    reached = start
    for span in spans:
        if span.start != reached:
            return False
        reached = span.end
    return reached == end


def _named(
    span: VersionSpan, before: Weights, unnamed: str | None, *, blurred: bool
) -> tuple[VersionSpan, bool]:
    """In the trainer's words what the engine said in its own. The name that it had before is no
    evidence where that may have become one of others; nor has it none any more unless it was
    started anew."""
    version, known = span.version, True
    if version == UNNAMED:
        version, known = before.version or unnamed, not before.told
    if blurred and version in (before.version, unnamed):
        known = False
    named = VersionSpan(version=version if known else None, start=span.start, end=span.end)
    return named, known
