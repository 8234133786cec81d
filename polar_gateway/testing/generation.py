"""Saying a scripted line in sampled tokens. Pure, given the source of chance."""

import codecs
import random
from collections.abc import Sequence
from typing import NamedTuple

from polar_gateway.testing.policy import SeededPolicy
from polar_gateway.testing.script import Line
from polar_gateway.testing.tokenizer import ChatTokenizer


class Token(NamedTuple):
    """One sampled token and what it adds to the visible text."""

    token_id: int
    logprob: float
    context: int
    """What the policy knew when it sampled."""
    text: str
    """Empty inside a UTF-8 sequence, behind a stop string, and for the end of the turn."""
    scale: float = 1.0
    """The temperature of the distribution that the log probability is of."""


class Generation(NamedTuple):
    tokens: list[Token]
    finish_reason: str
    stop_reason: int | str | None = None
    """The stop string, or the end of the turn where that is not the template's."""


class _Stop(NamedTuple):
    begin: int
    text: str


def generate(
    line: Line,
    prompt_ids: list[int],
    tokenizer: ChatTokenizer,
    policy: SeededPolicy,
    *,
    limit: int,
    temperature: float,
    stop: list[str],
    source: random.Random,
    processed: bool = False,
    only: Sequence[int] = (),
    begun: Sequence[Token] = (),
) -> Generation:
    """At most `limit` tokens that spell the line, its end of turn or stop string included.

    `processed` log probabilities are those at the temperature; the others know of none. `only` are
    the tokens that a request allows, whatever the line is; where that is a single one, processed
    log probabilities know that too. `begun` are tokens of this line that have been sampled already,
    perhaps by another policy.
    """
    end = tokenizer.id_of(line.end)
    scale = temperature if processed and temperature else 1.0
    forced: list[int] | None = None
    if line.tokens == "canonical" and not line.begun:
        forced = [*tokenizer.encode(line.text), end]
    rest = line.text.encode()[len(line.begun) :]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(line.begun)
    context = policy.context(prompt_ids)
    said = ""
    for token in begun:
        spelled = tokenizer.bytes_of[token.token_id]
        said += decoder.decode(spelled)
        rest = rest[len(spelled) :]
        context = policy.context([token.token_id], context)
    tokens = list(begun)
    while len(tokens) < limit:
        allowed = [forced[len(tokens)]] if forced else tokenizer.continuations(rest) or [end]
        allowed = list(only) or allowed
        token_id = policy.choose(context, allowed, temperature, source).token_id
        ends = token_id in tokenizer.ends_of_turn
        spelled = b"" if ends else tokenizer.bytes_of[token_id]
        certain = processed and len(only) == 1
        logprob = 0.0 if certain else policy.logprob(context, token_id, scale)
        text = decoder.decode(spelled, final=ends)
        tokens.append(Token(token_id, logprob, context, text, scale))
        if ends:
            other = token_id != tokenizer.end_of_turn
            return Generation(tokens, "stop", token_id if other else None)
        said += text
        found = _first_stop(said, stop)
        if found is not None:
            return Generation(_cut(tokens, found.begin), "stop", found.text)
        rest = rest[len(spelled) :]
        context = policy.context([token_id], context)
    return Generation(tokens, "length")


def _first_stop(said: str, stop: list[str]) -> _Stop | None:
    found = [_Stop(said.index(text), text) for text in stop if text in said]
    return min(found, default=None)


def _cut(tokens: list[Token], length: int) -> list[Token]:
    """The tokens, all of them, with the visible text ending after `length` characters."""
    cut = []
    for token in tokens:
        cut.append(token._replace(text=token.text[:length]))
        length -= len(cut[-1].text)
    return cut
