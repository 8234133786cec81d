"""Which sampled tokens may be trained on: one pure answer that builders and the check share."""

import math
from typing import NamedTuple

import msgspec

from builders.records import Completion, CompletionSession, Floats

DISQUALIFYING = frozenset(
    {
        "ids_missing",
        "ids_usage_mismatch",
        "prompt_ids_missing",
        "logprobs_missing",
        "logprobs_misaligned",
        "logprobs_invalid",
    }
)
"""Findings of the capture under which a completion's tokens or their context cannot be vouched for."""

NO_PROBABILITY = -9999.0
"""What vLLM writes for minus infinity: no sampled token can have it."""


class Options(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What a builder declares eligible; builders' own `Config`s extend it."""

    kinds: tuple[str, ...] = ("turn", "compaction")
    """The kinds of completion to train on."""


class Split(NamedTuple):
    eligible: list[Completion]
    """In order of arrival."""
    left_out: dict[str, dict[str, int]]
    """Reason -> {"completions": n, "tokens": n}; with the eligible ones, all that was sampled."""


def split(session: CompletionSession, options: Options) -> Split:
    """Part the session's completions into those to train on and those left out, by reason."""
    eligible: list[Completion] = []
    left_out: dict[str, dict[str, int]] = {}
    for completion in session.completions:
        reason = why_not(completion, options)
        if reason is None:
            eligible.append(completion)
        else:
            counts = left_out.setdefault(reason, {"completions": 0, "tokens": 0})
            counts["completions"] += 1
            counts["tokens"] += len(completion.sampled_ids)
    return Split(eligible, left_out)


def why_not(completion: Completion, options: Options) -> str | None:
    """The reason why this completion is not trained on, the first that applies; None if it is."""
    if completion.kind not in options.kinds:
        return f"kind_{completion.kind}"
    if not completion.delivered:
        return "undelivered"
    for finding in completion.findings:
        if finding in DISQUALIFYING:
            return finding
    if not completion.sampled_ids:
        return "ids_missing"
    if completion.prompt_length == 0:
        return "prompt_ids_missing"
    if completion.logprobs is None:
        return "logprobs_missing"
    if len(completion.logprobs) != len(completion.sampled_ids):
        return "logprobs_misaligned"
    if not _valid(completion.logprobs):
        return "logprobs_invalid"
    return None


def _valid(logprobs: Floats) -> bool:
    # NaN and infinities survive a sum (float32 values cannot overflow a float64), so the comparisons
    # after it, which NaN would slip through, see finite numbers only.
    return math.isfinite(sum(logprobs)) and max(logprobs) <= 0.0 and min(logprobs) > NO_PROBABILITY
