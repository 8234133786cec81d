"""The invariants of a trajectory, checked before every delivery.

With E = the sampled tokens that are eligible under the builder's options: every token of E is
trainable in exactly one trace and no other token is in any; each stands where its completion
sampled it, in the context that completion saw; what is left out is counted by reason, and E plus
those counts is all that was sampled. E is computed here from the session alone, so two builders
that pass with equal options have trained on the same tokens.
"""

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from builders.assemble import span
from builders.eligible import Options, Split, split
from builders.identity import echo
from builders.junctions import closes_once, drift, end_markup
from builders.records import Completion, CompletionSession, Ids, Span, Trace, Trajectory


def check(session: CompletionSession, trajectory: Trajectory, options: Options) -> list[str]:
    """One sentence for each violation; empty when the trajectory may be delivered.

    `options` are the builder's own (`builder.options`).
    """
    parts = split(session, options)
    eligible = {completion.completion_id: completion for completion in parts.eligible}
    stats = trajectory.metadata.get("reconstruction_stats")
    if not isinstance(stats, dict):
        return ["metadata.reconstruction_stats is missing"]
    ends = frozenset(stats.get("end_of_turn_ids", ()))
    markup = end_markup(session, ends)
    wrong: list[str] = []
    if len({completion.completion_id for completion in session.completions}) != len(
        session.completions
    ):
        wrong.append(f"session {session.session_id} holds two completions of the same id")
    trained: set[str] = set()
    for number, trace in enumerate(trajectory.traces):
        wrong += [f"trace {number}: {what}" for what in _shape(trace)]
        placed = _placed(trace, eligible)
        if isinstance(placed, str):
            wrong.append(f"trace {number}: {placed}")
            continue
        for run in placed:
            name = run.completion.completion_id
            if name in trained:
                wrong.append(f"trace {number}: {name} is trained on more than once")
            trained.add(name)
        wrong += [f"trace {number}: {what}" for what in _tokens(trace, placed)]
        wrong += [f"trace {number}: {what}" for what in _context(trace, placed, ends, markup)]
        wrong += [f"trace {number}: {what}" for what in _labels(trace, placed)]
    wrong += [
        f"{completion_id} is eligible and in no trace"
        for completion_id in eligible
        if completion_id not in trained
    ]
    return wrong + _accounts(session, trajectory, parts, stats)


class _Run(NamedTuple):
    span: Span
    completion: Completion

    @property
    def end(self) -> int:
        return self.span.start + self.span.length


def _shape(trace: Trace) -> list[str]:
    """What is wrong with the arrays by themselves."""
    wrong = []
    length, mask, logprobs = len(trace.response_ids), trace.loss_mask, trace.response_logprobs
    if not trace.prompt_ids:
        wrong.append("the prompt is empty")
    if len(mask) != length:
        wrong.append(f"{length} response ids, {len(mask)} mask entries")
    if logprobs is None:
        wrong.append("there are no log probabilities")
    elif len(logprobs) != length:
        wrong.append(f"{length} response ids, {len(logprobs)} log probabilities")
    if not set(map(type, mask)) <= {int} or mask.count(0) + mask.count(1) != len(mask):
        wrong.append("the mask holds something other than 0 and 1")
    return wrong


def _placed(trace: Trace, eligible: Mapping[str, Completion]) -> list[_Run] | str:
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
        completion = eligible.get(one.completion_id)
        if completion is None:
            return f"{one.completion_id} is trained on and not eligible"
        if one != span(completion, one.start):
            return f"the span of {one.completion_id} does not describe that completion"
        if one.start < at or one.start + one.length > len(trace.response_ids):
            return f"the span of {one.completion_id} overlaps another or leaves the response"
        placed.append(_Run(one, completion))
        at = one.start + one.length
    return placed


def _tokens(trace: Trace, placed: list[_Run]) -> list[str]:
    """Trainable are the sampled runs, token by token, and nothing else."""
    wrong = []
    mask, logprobs = trace.loss_mask, trace.response_logprobs or []
    at = 0
    for run in placed:
        start, end, completion = run.span.start, run.end, run.completion
        name = completion.completion_id
        if mask[start:end].count(1) != run.span.length:
            wrong.append(f"sampled tokens of {name} are masked out")
        if trace.response_ids[start:end] != completion.sampled_ids.tolist():
            wrong.append(f"the ids of {name} are not those that were sampled")
        if completion.logprobs is None or logprobs[start:end] != completion.logprobs.tolist():
            wrong.append(f"the log probabilities of {name} are not those of the samples")
        wrong += _masked(mask[at:start], logprobs[at:start], f"before {name}")
        at = end
    wrong += _masked(mask[at:], logprobs[at:], "after the last sample")
    if at != len(trace.response_ids):
        wrong.append("the response does not end with a sample")
    return wrong


def _masked(mask: list[int], logprobs: list[float], where: str) -> list[str]:
    wrong = []
    if mask.count(0) != len(mask):
        wrong.append(f"a token {where} is trainable and was not sampled")
    if logprobs.count(0.0) != len(logprobs):
        wrong.append(f"a masked token {where} has a log probability")
    return wrong


def _context(
    trace: Trace, placed: list[_Run], ends: frozenset[int], markup: re.Pattern[str]
) -> list[str]:
    """Every run stands in the context that its completion saw, drift counted."""
    wrong = []
    first = placed[0]
    prompt = first.completion.prompt_ids
    if trace.prompt_ids != prompt.tolist() or first.span.start != 0:
        wrong.append(f"the prompt is not that of {first.completion.completion_id}")
    drifted = 0
    for before, run in pairwise(placed):
        name = run.completion.completion_id
        follows, sampled = run.completion.prompt_ids, before.completion.sampled_ids
        tail = follows[len(prompt) :]
        cut = len(tail) - (run.span.start - before.end)
        body, interstitial = tail[: max(cut, 0)], tail[max(cut, 0) :]
        if follows[: len(prompt)] != prompt:
            wrong.append(f"the prompt of {name} does not begin with that of the call before it")
        elif cut < 0 or interstitial.tolist() != trace.response_ids[before.end : run.span.start]:
            wrong.append(f"what stands before {name} is not what its prompt ends with")
        elif body != sampled and not (
            closes_once(echo(run.completion.messages, len(before.completion.messages)), markup)
            and _closed_once(body, sampled, interstitial, ends)
        ):
            wrong.append(f"the turn before {name} is not closed by exactly one end of turn")
        else:
            drifted += drift(body, sampled)
        prompt = follows
    if trace.metadata.get("context_drift") != drifted:
        said = trace.metadata.get("context_drift")
        wrong.append(f"the contexts differ in {drifted} places, not in {said}")
    return wrong


def _closed_once(body: Ids, sampled: Ids, interstitial: Ids, ends: frozenset[int]) -> bool:
    """Whether the sampled turn in the place of its canonical `body` ends where that one did."""
    if any(end in body[:-1] for end in ends):
        return False
    if body and body[-1] in ends:
        return body[-1] == sampled[-1]
    return bool(interstitial) and interstitial[0] in ends and interstitial[0] != sampled[-1]


def _labels(trace: Trace, placed: list[_Run]) -> list[str]:
    """Messages, tools and names are those of the completions."""
    wrong = []
    first, last = placed[0].completion, placed[-1].completion
    if trace.finish_reason != last.finish_reason:
        wrong.append(f"the finish reason is not that of {last.completion_id}")
    if trace.tools != first.tools:
        wrong.append(f"the tools are not those of {first.completion_id}")
    if trace.metadata.get("completion_ids") != [run.completion.completion_id for run in placed]:
        wrong.append("metadata.completion_ids does not name the completions of the spans")
    if trace.prompt_messages != first.messages:
        wrong.append(f"the prompt messages are not those of {first.completion_id}")
    thread = iter(trace.response_messages)
    for run in placed:
        if run.completion.response_message not in thread:
            wrong.append(f"the answer of {run.completion.completion_id} is not among the messages")
            break
    return wrong


def _accounts(
    session: CompletionSession, trajectory: Trajectory, parts: Split, stats: dict[str, Any]
) -> list[str]:
    """The counts that the trajectory gives are those of the session; one trace is the main one."""
    expected = {
        "sampled_tokens": sum(len(c.sampled_ids) for c in session.completions),
        "trainable_tokens": sum(len(c.sampled_ids) for c in parts.eligible),
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
    return wrong
