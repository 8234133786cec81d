"""Where one turn of a merged chain ends and the next begins: told by token ids (paper §3.4.2).

After the prompt of turn m the prompt of turn m+1 holds a canonical rendering of what m sampled,
then what the harness added. A merged trace keeps the tokens that were sampled and, of the canonical
tail, only what follows them: the interstitial.
"""

import re
from typing import Any, Literal, NamedTuple

from builders.echoes import wording
from builders.ids import difference
from builders.records import Completion, CompletionSession, Ids

COMMON_END_MARKUP = re.compile(
    r"<[|\uff5c][^\s<>]+[|\uff5c]>"  # <|im_end|>, <|eot_id|>, <|return|>, ...; DeepSeek's wide bars
    r"|</s>|<eos>|<end_of_turn>|<turn\|>|\[EOS\]|\[\|endofturn\|\]"
)
"""Text that chat models close turns with. Where the engine has not said how its own end of turn is
spelled, any of it counts: taking one too many costs a merge, missing one trains on a false context.
"""

MIN_AGREEING = 2
"""How many completions must end alike before their last id is taken for the end of a turn."""

Refusal = Literal["empty_tail", "no_end_of_turn", "inner_end_of_turn"]


class Junction(NamedTuple):
    interstitial: Ids
    drift: int
    """In how many positions the canonical rendering of the turn differs from what was sampled."""


class EndOfTurn(NamedTuple):
    ids: frozenset[int]
    source: Literal["config", "engine", "detected", "unknown"]


def junction(tail: Ids, sampled: Ids, ends: frozenset[int], *, one_end: bool) -> Junction | Refusal:
    """Part the canonical `tail` (next prompt less this prompt) into this turn's body and the rest.

    Where the tail begins with the sampled ids there is nothing to decide: what follows them is the
    interstitial, and the merged context is exactly the sampled one. Otherwise the body ends at the
    tail's first end-of-turn id, which stays in the interstitial unless it was sampled. That holds
    only for a body with `one_end` (see `closes_once`): at another one a part of the turn would be
    left in the interstitial, and stand in the context twice.
    """
    if not tail:
        return "empty_tail"
    if tail[: len(sampled)] == sampled:
        return Junction(tail[len(sampled) :], 0)
    body, last = sampled[:-1], sampled[-1]
    if not one_end or any(end in body for end in ends):
        # The rendering may repeat the inner one or not: its first need not close the turn.
        return "inner_end_of_turn"
    at = min((tail.index(end) for end in ends if end in tail), default=None)
    if at is None:
        return "no_end_of_turn"
    if tail[at] == last:
        at += 1
    return Junction(tail[at:], drift(tail[:at], sampled))


def closes_once(echoed: list[dict[str, Any]], markup: re.Pattern[str]) -> bool:
    """Whether a template writes these messages, the echo of one answer, with one end of turn.

    It closes every message, and a tokenizer makes the control token of any `markup` in their text,
    even where the model had spelled it in ordinary tokens.
    """
    return len(echoed) == 1 and not markup.search(wording(echoed[0]))


def end_markup(session: CompletionSession, ends: frozenset[int]) -> re.Pattern[str]:
    """The text that becomes one of `ends` when rendered: the engine's word, else whatever may."""
    texts = dict(zip(session.end_of_turn_ids, session.end_of_turn_texts, strict=False))
    known = [texts.get(end, "") for end in sorted(ends)]
    if not known or not all(known):
        return COMMON_END_MARKUP
    return re.compile("|".join(map(re.escape, known)))


def drift(canonical: Ids, sampled: Ids) -> int:
    """How many positions differ: the longer of what is left without common beginning and end."""
    if canonical == sampled:
        return 0
    return max(map(len, difference(canonical, sampled)))


def end_of_turn(config: list[int], engine: list[int], completions: list[Completion]) -> EndOfTurn:
    """The ids that end a turn: as configured, else as the engine says, else as the samples agree.

    Samples count only where the model itself stopped, and agree only if at least MIN_AGREEING end
    in the same id, none ends otherwise, and none holds it anywhere else.
    """
    if config:
        return EndOfTurn(frozenset(config), "config")
    if engine:
        return EndOfTurn(frozenset(engine), "engine")
    stopped = [
        completion
        for completion in completions
        if completion.finish_reason in ("stop", "tool_calls")
        and not isinstance(completion.stop_reason, str)
    ]
    last = {completion.sampled_ids[-1] for completion in stopped}
    if len(stopped) >= MIN_AGREEING and len(last) == 1:
        (end,) = last
        if not any(end in completion.sampled_ids[:-1] for completion in completions):
            return EndOfTurn(frozenset(last), "detected")
    return EndOfTurn(frozenset(), "unknown")
