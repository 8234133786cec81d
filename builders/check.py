"""The invariants of a trajectory, checked before every delivery.

With E = the sampled tokens that are eligible under the builder's options: every token of E is
trainable in exactly one trace and no other token is in any; each stands where its completion
sampled it, in the context that completion saw; what is left out is counted by reason, and E plus
those counts is all that was sampled. E is computed here from the session alone, so builders that
pass with equal options have trained on the same tokens.
"""

from array import array
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import msgspec

from builders.assemble import finish_reason, received, span
from builders.chains import Link, previous
from builders.echoes import echo
from builders.eligible import Options, Split, split
from builders.junctions import closes_once, drift, end_markup
from builders.records import Completion, CompletionSession, Ids, Span, Trace, Trajectory


def check(session: CompletionSession, trajectory: Trajectory, options: Options) -> list[str]:
    """One sentence for each violation; empty when the trajectory may be delivered.

    `options` are the builder's own (`builder.options`).
    """
    parts = split(session, options)
    stats = trajectory.metadata.get("reconstruction_stats")
    if not isinstance(stats, dict):
        return ["metadata.reconstruction_stats is missing"]
    wrong: list[str] = []
    if len({completion.completion_id for completion in session.completions}) != len(
        session.completions
    ):
        wrong.append(f"session {session.session_id} holds two completions of the same id")
    ends = frozenset(stats.get("end_of_turn_ids", ()))
    reader = _Reader(session, trajectory.traces, parts, options, ends)
    for number in range(len(trajectory.traces)):
        wrong += [f"trace {number}: {what}" for what in reader.read(number)]
    for completion_id, tokens in parts.tokens.items():
        if (trained := reader.trained.get(completion_id, 0)) != tokens:
            wrong.append(f"{trained} of {tokens} eligible tokens of {completion_id} are trained on")
    return wrong + _accounts(session, trajectory, parts, stats)


class _Run(NamedTuple):
    span: Span
    completion: Completion

    @property
    def end(self) -> int:
        return self.span.start + self.span.length


class _Reader:
    """Goes through the traces in their order; what they may share is said by those before."""

    def __init__(
        self,
        session: CompletionSession,
        traces: list[Trace],
        parts: Split,
        options: Options,
        ends: frozenset[int],
    ) -> None:
        self._session = session
        self._parts = parts
        self._options = options
        self._ends = ends
        self._markup = end_markup(session, ends)
        self._completions = {each.completion_id: each for each in parts.eligible}
        self._traces = traces
        self.trained: dict[str, int] = {}
        """Completion id -> how many of its tokens, from the first on, are trained on so far."""

    def read(self, number: int) -> list[str]:
        """What is wrong with the next trace, which has this number."""
        trace = self._traces[number]
        if (misshapen := _shape(trace)) is not None:
            return [misshapen]
        placed = self._placed(trace)
        if isinstance(placed, str):
            return [placed]
        prompt = placed[0].completion.prompt_ids
        wrong = []
        if trace.prompt_ids != prompt.tolist() or placed[0].span.start != 0:
            wrong.append(f"the prompt is not that of {placed[0].completion.completion_id}")
        limit = self._options.max_tokens
        length = len(trace.prompt_ids) + len(trace.response_ids)
        if limit is not None and length > limit:
            wrong.append(f"it has {length} tokens, more than {limit}")
        wrong += self._branching(number, trace, placed)
        wrong += _tokens(trace, placed)
        wrong += self._context(trace, placed)
        return wrong + self._labels(number, trace, placed)

    def _placed(self, trace: Trace) -> list[_Run] | str:
        """The trace's spans with their completions, in order and without overlap; or why not."""
        try:
            spans = msgspec.convert(trace.metadata.get("spans"), list[Span])
        except msgspec.ValidationError as error:
            return f"metadata.spans is not a list of spans: {error}"
        if not spans:
            return "no span of sampled tokens"
        placed: list[_Run] = []
        at = 0
        for one in spans:
            name = one.completion_id
            completion = self._completions.get(name)
            if completion is None:
                return f"{name} is trained on and not eligible"
            if not 0 < one.length <= self._parts.tokens[name] or not 0 <= one.shared <= one.length:
                return f"the span of {name} holds tokens that are not eligible"
            first = placed[0].completion if placed else completion
            if one != span(completion, one.start, one.length, one.shared, first):
                return f"the span of {name} does not describe that completion"
            if one.start < at or one.start + one.length > len(trace.response_ids):
                return f"the span of {name} overlaps another or leaves the response"
            placed.append(_Run(one, completion))
            at = one.start + one.length
        return placed

    def _branching(self, number: int, trace: Trace, placed: list[_Run]) -> list[str]:
        """Trained on is what no earlier trace has; what one has is masked, and named a prefix of it."""
        wrong = []
        shared_to = None
        for run in placed:
            name, shared = run.completion.completion_id, run.span.shared
            known = self.trained.get(name, 0)
            if shared < min(known, run.span.length):
                wrong.append(f"{name} is trained on more than once")
            elif shared > known:
                wrong.append(f"{name} is masked as if an earlier trace trained it")
            self.trained[name] = max(known, run.span.length)
            if shared:
                shared_to = len(trace.prompt_ids) + run.span.start + shared
        parent = trace.metadata.get("parent")
        said = parent.get("shared_tokens") if isinstance(parent, dict) else 0
        if said != (shared_to or 0):
            wrong.append(f"it shares {shared_to or 0} tokens with an earlier trace, not {said}")
        elif shared_to is not None:
            of = parent.get("trace") if isinstance(parent, dict) else None
            if not isinstance(of, int) or not 0 <= of < number:
                wrong.append(f"its parent {of} is no earlier trace")
            elif _leading(trace, shared_to) != _leading(self._traces[of], shared_to):
                wrong.append(f"its first {shared_to} tokens are not those of trace {of}")
        return wrong

    def _context(self, trace: Trace, placed: list[_Run]) -> list[str]:
        """Every run stands in the context that its completion saw, drift counted."""
        wrong = []
        drifted = 0
        for before, run in pairwise(placed):
            name = run.completion.completion_id
            follows = previous(run.completion, self._parts.tokens)
            if follows is None or follows.completion is not before.completion:
                wrong.append(f"{name} does not go on from {before.completion.completion_id}")
                continue
            if follows.taken != before.span.length:
                wrong.append(
                    f"{name} goes on from {follows.taken} tokens, not from as many as here"
                )
                continue
            tail = run.completion.prompt_after(before.completion)
            if tail is None:
                wrong.append(f"the prompt of {name} does not begin with that of the call before it")
                continue
            sampled = before.completion.sampled_ids[: follows.taken]
            cut = len(tail) - (run.span.start - before.end)
            body, interstitial = tail[: max(cut, 0)], tail[max(cut, 0) :]
            between = trace.response_ids[before.end : run.span.start]
            if cut < 0 or interstitial.tolist() != between:
                wrong.append(f"what stands before {name} is not what its prompt ends with")
            elif body == sampled:
                continue
            elif follows.composed:
                wrong.append(f"{name} was asked with other tokens than stand before it")
            elif not (
                closes_once(
                    echo(run.completion.messages_from(before.completion.message_count)),
                    self._markup,
                )
                and _closed_once(body, sampled, interstitial, self._ends)
            ):
                wrong.append(f"the turn before {name} is not closed by exactly one end of turn")
            else:
                drifted += drift(body, sampled)
        said = trace.metadata.get("context_drift")
        if said != drifted:
            wrong.append(f"the contexts differ in {drifted} places, not in {said}")
        if drifted and self._options.split_on_drift:
            wrong.append(f"the contexts differ in {drifted} places, and were to be kept apart")
        return wrong

    def _labels(self, number: int, trace: Trace, placed: list[_Run]) -> list[str]:
        """Messages, tools and names are those of the completions."""
        wrong = []
        first, last = placed[0].completion, placed[-1]
        if trace.finish_reason != finish_reason(last.completion, last.span.length, self._options):
            wrong.append(f"the finish reason is not that of {last.completion.completion_id}")
        if trace.tools != first.tools:
            wrong.append(f"the tools are not those of {first.completion_id}")
        if trace.metadata.get("completion_ids") != [run.completion.completion_id for run in placed]:
            wrong.append("metadata.completion_ids does not name the completions of the spans")
        if trace.metadata.get("trace_index") != number:
            wrong.append(f"metadata.trace_index is {trace.metadata.get('trace_index')}")
        if trace.prompt_messages != first.messages:
            wrong.append(f"the prompt messages are not those of {first.completion_id}")
        thread = iter(trace.response_messages)
        for run in placed:
            link = Link(run.completion, run.span.length, array("i"))
            if any(message not in thread for message in received(self._session, link)):
                name = run.completion.completion_id
                wrong.append(f"the answer of {name} is not among the messages")
                break
        return wrong


def _shape(trace: Trace) -> str | None:
    """What is wrong with the arrays by themselves."""
    length, mask, logprobs = len(trace.response_ids), trace.loss_mask, trace.response_logprobs
    if not trace.prompt_ids:
        return "the prompt is empty"
    if len(mask) != length:
        return f"{length} response ids, {len(mask)} mask entries"
    if logprobs is None:
        return "there are no log probabilities"
    if len(logprobs) != length:
        return f"{length} response ids, {len(logprobs)} log probabilities"
    try:
        msgspec.convert(mask, list[Literal[0, 1]])
    except msgspec.ValidationError:
        return "the mask holds something other than 0 and 1"
    return None


def _leading(trace: Trace, length: int) -> list[int]:
    """The first ids of prompt and response together."""
    return trace.prompt_ids[:length] + trace.response_ids[: max(0, length - len(trace.prompt_ids))]


def _tokens(trace: Trace, placed: list[_Run]) -> list[str]:
    """Trainable are the sampled runs, token by token, and nothing else."""
    wrong = []
    ids, mask, logprobs = trace.response_ids, trace.loss_mask, trace.response_logprobs or []
    at = 0
    for run in placed:
        start, end, completion = run.span.start, run.end, run.completion
        shared, length = run.span.shared, run.span.length
        name = completion.completion_id
        wrong += _masked(mask[at : start + shared], logprobs[at : start + shared], f"before {name}")
        if mask[start + shared : end].count(1) != length - shared:
            wrong.append(f"sampled tokens of {name} are masked out")
        if ids[start:end] != completion.sampled_ids[:length].tolist():
            wrong.append(f"the ids of {name} are not those that were sampled")
        known = completion.logprobs
        if known is None or logprobs[start + shared : end] != known[shared:length].tolist():
            wrong.append(f"the log probabilities of {name} are not those of the samples")
        at = end
    wrong += _masked(mask[at:], logprobs[at:], "after the last sample")
    if at != len(ids):
        wrong.append("the response does not end with a sample")
    return wrong


def _masked(mask: list[int], logprobs: list[float], where: str) -> list[str]:
    wrong = []
    if mask.count(0) != len(mask):
        wrong.append(f"a token {where} is trainable and is not to be")
    if logprobs.count(0.0) != len(logprobs):
        wrong.append(f"a masked token {where} has a log probability")
    return wrong


def _closed_once(body: Ids, sampled: Ids, interstitial: Ids, ends: frozenset[int]) -> bool:
    """Whether the sampled turn in the place of its canonical `body` ends where that one did."""
    if any(end in body[:-1] for end in ends):
        return False
    if body and body[-1] in ends:
        return body[-1] == sampled[-1]
    return bool(interstitial) and interstitial[0] in ends and interstitial[0] != sampled[-1]


def _accounts(
    session: CompletionSession, trajectory: Trajectory, parts: Split, stats: dict[str, Any]
) -> list[str]:
    """The counts that the trajectory gives are those of the session; one trace is the main one."""
    expected = {
        "sampled_tokens": sum(len(c.sampled_ids) for c in session.completions),
        "trainable_tokens": sum(parts.tokens.values()),
        "left_out": parts.left_out,
        "chains": len(trajectory.traces),
    }
    wrong = [
        f"{key} is {count}, the trajectory says {stats.get(key)}"
        for key, count in expected.items()
        if stats.get(key) != count
    ]
    main = [trace.metadata.get("main") for trace in trajectory.traces]
    if main != [False] * (len(main) - 1) + [True] * bool(main):
        wrong.append("the last trace must be marked main, and no other")
    cut = [trace.metadata.get("max_tokens_cut") for trace in trajectory.traces]
    known = sum(parts.cut.values())
    if sum(tokens for tokens in cut if isinstance(tokens, int)) > known or None in cut:
        wrong.append(f"max_tokens cut off {known} tokens, the traces say {cut}")
    return wrong
