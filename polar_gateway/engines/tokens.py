"""What an engine said of an answer's tokens, checked against itself. Pure."""

import math
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from builders.records import Floats, Ids

MINUS_INFINITY = -9999.0
"""How vLLM writes it in JSON, which has no word for it."""

LOST_IN_STREAMS = frozenset(
    {
        "prompt_ids_missing",
        "ids_missing",
        "ids_usage_mismatch",
        "logprobs_missing",
        "logprobs_misaligned",
    }
)
"""Findings of streamed answers that whole answers of the same engine need not have."""


class Tokens(NamedTuple):
    """Token data as far as it can be trusted; `findings` says what cannot."""

    prompt_ids: Ids
    sampled_ids: Ids
    logprobs: Floats | None
    findings: list[str]


def checked_tokens(
    prompt_ids: Ids | None,
    sampled_ids: Sequence[int] | None,
    logprobs: Sequence[float | None],
    completion_tokens: int | None,
) -> Tokens:
    """Check what the engine reported against itself. Nothing is repaired or made up.

    `completion_tokens` is the engine's own count, None where it says none.
    """
    findings: list[str] = []
    if prompt_ids is None:
        findings.append("prompt_ids_missing")
    if sampled_ids is None:
        findings.append("ids_missing")
    elif completion_tokens is not None and len(sampled_ids) != completion_tokens:
        findings.append("ids_usage_mismatch")
    prompt = array("i") if prompt_ids is None else prompt_ids
    sampled = array("i", sampled_ids or ())
    values: Floats | None = None
    if sampled and not logprobs:
        findings.append("logprobs_missing")
    elif wrong := untrustworthy(logprobs):
        findings += wrong
    elif len(logprobs) != len(sampled):
        findings.append("logprobs_misaligned")
    else:
        values = array("f", [value for value in logprobs if value is not None])
    return Tokens(prompt, sampled, values, findings)


def untrustworthy(logprobs: Iterable[float | None]) -> list[str]:
    """A finding for each way in which some of the values are no log probabilities."""
    found: dict[str, None] = {}
    for value in logprobs:
        if value is None:
            found["logprobs_null"] = None
        elif value <= MINUS_INFINITY:
            found["logprobs_minus_infinity"] = None
        elif not math.isfinite(value):
            found["logprobs_non_finite"] = None
        elif value > 0.0:
            found["logprobs_positive"] = None
    return list(found)
