"""Whether a session may be trained on: is its reward meant, and are its tokens true? Pure.

What a builder could not vouch for is in no trace. What speaks against all of a session's tokens is
masked in every trace (`masked`), so that a trainer who ignores verdicts trains on nothing false.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import msgspec

from builders import findings
from builders.findings import REGISTRY
from builders.records import Completion, CompletionSession, Trace, Trajectory
from polar_gateway.errors import Failure
from polar_gateway.protocol import Finding, RewardVerdict, TokenVerdict, Verdict

TRAINED_KINDS = frozenset({"turn", "compaction"})
"""What is no side call."""

MIN_CONTINUATIONS = 3
"""How many calls must have continued others before it means something that none was merged: one or
two edits or compactions break as many."""

MIN_SIDE_CALLS = 4
"""Fewer are what a harness may ask around the shortest session: a title, a check, a memory."""

SIDE_CALL_SHARE = 0.5
"""An agent's own turns are the bulk of its calls in every harness as it comes."""

MIN_TURNS_WITH_TOOLS = 8
"""An agent that works on a repository calls a tool in nearly every turn; one that only answers
questions seldom needs this many turns."""

CALL_MARKUP = re.compile(
    r"<(?:tool_call|function_call|tool_use)>|<function=|<invoke name="  # Hermes, Qwen, Claude
    r"|<[|\uff5c]tool[\w\u2581]*[|\uff5c]>|<\|(?:python_tag|tool_call|tool_calls_section_begin)"
    r"|\[TOOL_CALLS\]|\bto=functions\."  # Mistral; gpt-oss
)
"""How chat models write tool calls, where no parser takes them out of the text."""

NO_ENDING = frozenset(
    {"aborted", "engine_broke_off", "call_unfinished", "call_cut_by_seal", "gateway_failed"}
)
"""Findings of answers that ended otherwise than by the policy's or the harness's will."""


def verdict(
    session: CompletionSession,
    trajectory: Trajectory | None,
    *,
    failure: Failure | None,
    graded: bool,
    notes: list[Finding],
    strict: Collection[str] = (),
) -> Verdict:
    """Reward validity and token usability of a session that has ended.

    `notes` are findings of the runtime and the stages (unisolated, harness_crash, ...); codes in
    `strict` count as fatal.
    """
    found = [
        *notes,
        *_of_calls(session),
        *_of_session(session),
        *_of_traces(session, trajectory),
    ]
    if failure is not None and failure.code == "context_overflow":
        found.append(Finding(code="context_overflow", message=failure.message))
    found = [
        msgspec.structs.replace(
            one,
            level=findings.level(one.code, strict),
            message=one.message or _meaning(one.code),
        )
        for one in found
    ]
    reward: RewardVerdict = "ungraded"
    if graded:
        reward = "graded"
    elif failure is not None and failure.infra:
        reward = "infra"
    return Verdict(reward=reward, tokens=_tokens(trajectory, found), findings=found)


def masking(said: Verdict) -> list[str]:
    """The fatal findings that speak against all of a session's tokens, worst first as found."""
    return [one.code for one in said.findings if one.level == "fatal" and _of_all(one.code)]


def masked(trajectory: Trajectory, said: Verdict) -> Trajectory:
    """The trajectory with nothing left to train on, if the verdict speaks against all its tokens.

    The ids stay for people to look at; masks and log probabilities are 0, each trace's metadata is
    not `trainable` with the first finding as its `mask_reason`, under which `left_out` counts all.
    """
    reasons = masking(said)
    if not reasons or not _trainable(trajectory):
        return trajectory
    stats = trajectory.metadata.get("reconstruction_stats", {})
    before = stats.get("left_out", {}).get(reasons[0], {"completions": 0, "tokens": 0})
    masks = {
        "completions": before["completions"] + len(_trained(trajectory)),
        "tokens": before["tokens"] + sum(sum(trace.loss_mask) for trace in trajectory.traces),
    }
    left_out = {**stats.get("left_out", {}), reasons[0]: masks}
    return msgspec.structs.replace(
        trajectory,
        traces=[_masked(trace, reasons[0]) for trace in trajectory.traces],
        metadata={
            **trajectory.metadata,
            "reconstruction_stats": {**stats, "trainable_tokens": 0, "left_out": left_out},
        },
    )


def _masked(trace: Trace, reason: str) -> Trace:
    length = len(trace.response_ids)
    return msgspec.structs.replace(
        trace,
        loss_mask=[0] * length,
        response_logprobs=None if trace.response_logprobs is None else [0.0] * length,
        metadata={**trace.metadata, "trainable": False, "mask_reason": reason},
    )


def nothing_trainable(said: Verdict) -> Failure | None:
    """A session that gives nothing to train on has failed, whatever its harness did."""
    if said.tokens != "none":
        return None
    reasons = ", ".join(one.code for one in said.findings if one.level == "fatal")
    return Failure(
        boundary="capture",
        message=f"no trainable token was captured: {reasons or 'everything was left out'}",
    )


def _tokens(trajectory: Trajectory | None, found: list[Finding]) -> TokenVerdict:
    fatal = {one.code for one in found if one.level == "fatal"}
    if trajectory is None or not _trainable(trajectory) or any(map(_of_all, fatal)):
        return "none"
    # A side call that cannot be vouched for would not have been trained on: what was left out for
    # a finding is what counts, not that it was found.
    lost = fatal & _left_out(trajectory).keys() or any(_cuts(one.code) for one in found)
    return "prefix" if lost else "all"


def _trainable(trajectory: Trajectory) -> bool:
    return any(1 in trace.loss_mask for trace in trajectory.traces)


def _of_all(code: str) -> bool:
    return code in REGISTRY and REGISTRY[code].scope == "session"


def _cuts(code: str) -> bool:
    return code in REGISTRY and REGISTRY[code].cuts


def _meaning(code: str) -> str:
    return REGISTRY[code].meaning if code in REGISTRY else ""


# Findings of single calls, counted


def _of_calls(session: CompletionSession) -> Iterator[Finding]:
    """What single calls have, one finding a code; calls that sampled nothing are in it, too."""
    sampled = _sampled(session.completions)
    calls: Counter[str] = Counter(session.findings)
    numbers: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for completion in session.completions:
        for one in findings.of(completion):
            calls[one.code] += 1
            numbers[one.code]["tokens"] += len(completion.sampled_ids)
            for name, number in one.numbers.items():
                numbers[one.code][name] += number
    for code, count in sorted(calls.items()):
        counted = dict(numbers[code])
        if counted:
            counted["share"] = _share(counted["tokens"], sampled)
        yield _finding(code, count, **counted)


# Findings of the calls among each other


def _of_session(session: CompletionSession) -> Iterator[Finding]:
    completions = session.completions
    if not completions:
        yield Finding(code="no_completions")
        return
    yield from _cut_answers(completions)
    yield from _duplicates(completions)
    yield from _side_calls(completions)
    yield from _unused_tools(completions)


def _cut_answers(completions: list[Completion]) -> Iterator[Finding]:
    """Answers that were broken off: taken for whole, or lost where no other came in their place."""
    continued = {c.previous.completion_id for c in completions if c.previous is not None}
    in_chain, lost = [], []
    for one in completions:
        if one.kind not in TRAINED_KINDS or not _broken_off(one):
            continue
        if one.completion_id in continued:
            in_chain.append(one)
        elif not _asked_again(one, completions):
            lost.append(one)
    for code, found in (("abort_in_chain", in_chain), ("tail_lost", lost)):
        if found:
            yield _finding(code, len(found), tokens=_sampled(found))


def _broken_off(completion: Completion) -> bool:
    return completion.finish_reason == "abort" or not NO_ENDING.isdisjoint(completion.findings)


def _asked_again(completion: Completion, completions: list[Completion]) -> bool:
    return any(
        other.index > completion.index
        and not _broken_off(other)
        and _same_prompt(completion, other)
        for other in completions
    )


def _same_prompt(one: Completion, other: Completion) -> bool:
    if one.prompt_length != other.prompt_length or one.kind != other.kind:
        return False
    if one.parent is other.parent and one.shared == other.shared:
        return one.tail == other.tail
    return one.prompt_ids == other.prompt_ids


def _duplicates(completions: list[Completion]) -> Iterator[Finding]:
    by_length: dict[int, list[Completion]] = defaultdict(list)
    again = []
    for one in completions:
        if not one.delivered or not one.prompt_length:
            continue
        alike = by_length[one.prompt_length]
        if any(_same_prompt(one, other) for other in alike):
            again.append(one)
        alike.append(one)
    if again:
        yield _finding("duplicated", len(again), tokens=_sampled(again))


def _side_calls(completions: list[Completion]) -> Iterator[Finding]:
    side = [one for one in completions if one.kind not in TRAINED_KINDS]
    share = len(side) / len(completions)
    if len(side) >= MIN_SIDE_CALLS and share > SIDE_CALL_SHARE:
        yield _finding(
            "side_call_share", len(side), calls=len(side), tokens=_sampled(side), share=share
        )


def _unused_tools(completions: list[Completion]) -> Iterator[Finding]:
    offered = [one for one in completions if one.kind == "turn" and one.tools]
    if any(one.response_message.get("tool_calls") for one in offered):
        return
    markup = sum(bool(CALL_MARKUP.search(_text(one.response_message))) for one in offered)
    if markup:
        yield _finding("calls_not_parsed", markup, offered=len(offered), looks_like_calls=markup)
    elif len(offered) >= MIN_TURNS_WITH_TOOLS:
        yield _finding("tools_never_called", len(offered), offered=len(offered))


def _text(message: dict[str, Any]) -> str:
    said = (message.get("content"), message.get("reasoning_content"))
    return "\n".join(part for part in said if isinstance(part, str))


# Findings of what was built


def _of_traces(session: CompletionSession, trajectory: Trajectory | None) -> Iterator[Finding]:
    if trajectory is None:
        return
    stats = trajectory.metadata.get("reconstruction_stats", {})
    ids = _trained(trajectory)
    trained = [one for one in session.completions if one.completion_id in ids]
    tokens, traces = _sampled(trained), len(trajectory.traces)
    if trained and _ends_unknown(session, stats):
        yield _finding("end_of_turn_unknown")
    if drift := stats.get("context_drift", {}).get("tokens"):
        turns = stats["context_drift"]["turns"]
        yield _finding(
            "context_drift", turns, tokens=drift, turns=turns, share=_share(drift, tokens)
        )
    continuing = sum(
        one.previous is not None and one.previous.completion_id in ids for one in trained
    )
    merges = trajectory.metadata.get("builder") != "per_request"
    if merges and continuing >= MIN_CONTINUATIONS and traces == len(trained):
        yield _finding("one_turn_traces", traces, traces=traces, continuing=continuing)
    by_version = _versions(trained)
    if len(by_version) > 1:
        others = tokens - max(by_version.values())
        yield _finding(
            "mixed_policy_versions",
            versions=len(by_version),
            tokens=others,
            share=_share(others, tokens),
        )
    if left_out := _left_out(trajectory):
        by_reason = {reason: counts["tokens"] for reason, counts in sorted(left_out.items())}
        lost = sum(by_reason.values())
        if cut := left_out.get("max_tokens"):
            yield _finding(
                "trace_cut",
                cut["completions"],
                tokens=cut["tokens"],
                share=_share(cut["tokens"], _sampled(session.completions)),
            )
        yield _finding(
            "left_out",
            sum(counts["completions"] for counts in left_out.values()),
            **by_reason,
            tokens=lost,
            share=_share(lost, _sampled(session.completions)),
        )


def _ends_unknown(session: CompletionSession, stats: dict[str, Any]) -> bool:
    if source := stats.get("end_of_turn_source"):
        return bool(source == "unknown")
    return not session.end_of_turn_ids


def _versions(completions: list[Completion]) -> Counter[str | None]:
    """How many tokens each policy version sampled."""
    counts: Counter[str | None] = Counter()
    for one in completions:
        for span in one.versions:
            counts[span.version] += span.end - span.start
        if not one.versions:
            counts[one.policy_version] += len(one.sampled_ids)
    return counts


def _trained(trajectory: Trajectory) -> set[str]:
    """The ids of the completions that are in its traces."""
    return {
        name for trace in trajectory.traces for name in trace.metadata.get("completion_ids", ())
    }


def _left_out(trajectory: Trajectory) -> dict[str, dict[str, int]]:
    stats = trajectory.metadata.get("reconstruction_stats", {})
    left_out: dict[str, dict[str, int]] = stats.get("left_out", {})
    return left_out


def _finding(code: str, count: int = 1, /, **numbers: float) -> Finding:
    return Finding(code=code, count=count, numbers=numbers)


def _sampled(completions: Iterable[Completion]) -> int:
    return sum(len(one.sampled_ids) for one in completions)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
