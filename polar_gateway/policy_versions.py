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
    """Whether an update is on its way or has failed, so that they may be others."""


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
    if _covers(said, leg.start, leg.end) and any(span.version != UNNAMED for span in said):
        named = [_named(span, leg.before, unnamed) for span in said]
        return [(span, True) for span in named]
    sure = leg.end if leg.before.changes == leg.after.changes else leg.sure
    if leg.before.in_doubt:
        sure = leg.start
    sure = max(leg.start, min(sure, leg.end))
    version = leg.before.version or unnamed
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


def _named(span: VersionSpan, before: Weights, unnamed: str | None) -> VersionSpan:
    """In the trainer's words what the engine said in its own."""
    if span.version != UNNAMED:
        return span
    version = before.version or unnamed
    return VersionSpan(version=version, start=span.start, end=span.end)
