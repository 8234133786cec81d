"""Which sampled tokens may be trained on: one pure answer that builders and the check share."""

from typing import Annotated, NamedTuple

import msgspec

from builders import findings
from builders.records import Completion, CompletionSession


class OptionError(ValueError):
    """A builder's setting of the right type that means nothing; `field` is its path in the config."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class Options(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What a builder declares eligible; builders' own `Config`s extend it."""

    kinds: tuple[str, ...] = ("turn", "compaction")
    """The kinds of completion to train on."""
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """The most tokens of a trace, its prompt included. A sampled token that stood at this position
    or later in the context of its own call is left out, and so are the calls after it."""
    strict: tuple[str, ...] = ()
    """Codes of findings that shall count as fatal, beside those that always do."""
    split_on_drift: bool = False
    """Whether a trace ends where the next prompt spells a turn in other tokens than were sampled,
    so that every context is exactly the one that the policy saw."""

    def __post_init__(self) -> None:
        for number, code in enumerate(self.strict):
            if code not in findings.REGISTRY:
                raise OptionError(
                    f"strict[{number}]",
                    f"{code!r} is no finding; there are {', '.join(sorted(findings.REGISTRY))}",
                )


class Split(NamedTuple):
    """Where every sampled token of a session belongs."""

    eligible: list[Completion]
    """Those with at least one token to train on, in order of arrival."""
    left_out: dict[str, dict[str, int]]
    """Reason -> {"completions": n, "tokens": n}; with the eligible tokens, all that was sampled. A
    completion of which a part is left out counts as one, too."""
    tokens: dict[str, int]
    """Completion id -> how many of its tokens, from the first on, are eligible; at least 1."""
    cut: dict[str, int]
    """Completion id -> how many of its tokens `max_tokens` alone leaves out; at least 1."""


def split(session: CompletionSession, options: Options) -> Split:
    """Part the session's sampled tokens into those to train on and those left out, by reason."""
    heard = _heard(session)
    parts = Split([], {}, {}, {})
    for completion in session.completions:
        name, sampled = completion.completion_id, len(completion.sampled_ids)
        received = sampled if completion.delivered else heard.get(name, 0)
        if reason := why_not(completion, options, received):
            _leave_out(parts, reason, sampled)
            continue
        eligible = received
        if options.max_tokens is not None:
            eligible = min(received, max(0, options.max_tokens - completion.prompt_length))
        if received < sampled:
            _leave_out(parts, "undelivered", sampled - received)
        if eligible < received:
            _leave_out(parts, "max_tokens", received - eligible)
            parts.cut[name] = received - eligible
        if eligible:
            parts.eligible.append(completion)
            parts.tokens[name] = eligible
    return parts


def why_not(completion: Completion, options: Options, received: int) -> str | None:
    """The reason why none of the completion's tokens is trained on, the first that applies; None if
    there is none. Of its tokens the harness has `received` so many.
    """
    if completion.kind not in options.kinds:
        return f"kind_{completion.kind}"
    if not completion.delivered and not received:
        return "undelivered"
    return findings.disqualifying(completion, options.strict)


def continued(completion: Completion) -> int:
    """How many of the sampled tokens of `completion.previous` the request goes on from."""
    if completion.previous is None:
        return 0
    sampled = len(completion.previous.sampled_ids)
    if completion.continued_tokens is None:
        return sampled
    return min(completion.continued_tokens, sampled)


def _heard(session: CompletionSession) -> dict[str, int]:
    """Completion id -> the most of its tokens that any later request goes on from.

    That a harness went on from an answer proves that it had received it, whatever became of the
    connection. A request that may as well have continued another call proves nothing.
    """
    heard: dict[str, int] = {}
    for completion in session.completions:
        before = completion.previous
        if before is not None and not completion.ambiguous:
            name = before.completion_id
            heard[name] = max(heard.get(name, 0), continued(completion))
    return heard


def _leave_out(parts: Split, reason: str, tokens: int) -> None:
    counts = parts.left_out.setdefault(reason, {"completions": 0, "tokens": 0})
    counts["completions"] += 1
    counts["tokens"] += tokens
