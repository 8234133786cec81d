"""Saying a scripted line in sampled tokens. Pure, given the source of chance."""

import codecs
import random
from typing import NamedTuple

from polar_gateway.testing.policy import Sample, SeededPolicy
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


class Generation(NamedTuple):
    tokens: list[Token]
    finish_reason: str
    stop_reason: str | None = None


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
) -> Generation:
    """At most `limit` tokens that spell the line, its end of turn or stop string included."""
    forced: list[int] | None = None
    if line.tokens == "canonical":
        forced = [*tokenizer.encode(line.text), tokenizer.end_of_turn]
    rest = line.text.encode()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    context = policy.context(prompt_ids)
    said = ""
    tokens: list[Token] = []
    while len(tokens) < limit:
        allowed = [forced[len(tokens)]] if forced else tokenizer.continuations(rest)
        sample = policy.choose(context, allowed, temperature, source)
        ends = sample.token_id == tokenizer.end_of_turn
        spelled = b"" if ends else tokenizer.bytes_of[sample.token_id]
        tokens.append(_token(sample, context, decoder.decode(spelled, final=ends)))
        if ends:
            return Generation(tokens, "stop")
        said += tokens[-1].text
        found = _first_stop(said, stop)
        if found is not None:
            return Generation(_cut(tokens, found.begin), "stop", found.text)
        rest = rest[len(spelled) :]
        context = policy.context([sample.token_id], context)
    return Generation(tokens, "length")


def _token(sample: Sample, context: int, text: str) -> Token:
    return Token(sample.token_id, sample.logprob, context, text)


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
