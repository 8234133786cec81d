"""From chains of completions to traces and a trajectory: the part that all builders share."""

from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from builders.chains import Chain, Link, cut_behind, previous
from builders.echoes import echo
from builders.eligible import Options, Split
from builders.records import (
    Completion,
    CompletionSession,
    Span,
    Trace,
    Trajectory,
    VersionSpan,
)

ECHOED = ("group_id", "policy_version", "rollout_step", "repetition_index")
"""Keys of the task's metadata that every trace and the trajectory repeat for trainers."""


class Parent(NamedTuple):
    """The trace that another one branches off."""

    trace: int
    """Its number in the session."""
    completion_id: str
    """The completion that the branch goes on from."""
    shared_tokens: int = 0
    """How many leading tokens of prompt + response are the parent's, and trained there or before."""


def trajectory(
    session: CompletionSession,
    builder: str,
    chains: list[Chain],
    parts: Split,
    options: Options,
    *,
    prompts: Sequence[list[int]] | None = None,
    stats: dict[str, Any] | None = None,
) -> Trajectory:
    """One trace for each chain, and what became of every sampled token.

    The last chain is the main one. `prompts` are those of the chains, where somebody has them.
    """
    if prompts is None:
        prompts = [chain.links[0].completion.prompt_ids.tolist() for chain in chains]
    stories = parents(chains, parts)
    cut = cut_behind(session, parts, chains)
    traces = [
        _trace(
            session,
            chain,
            parts,
            options,
            prompt_ids=prompt_ids,
            metadata={
                "builder": builder,
                "trace_index": number,
                "main": number == len(chains) - 1,
                "begun": chain.begun,
                "parent": None if parent is None else parent._asdict(),
                "max_tokens_cut": cut[number],
            },
        )
        for number, (chain, prompt_ids, parent) in enumerate(
            zip(chains, prompts, stories, strict=True)
        )
    ]
    completions = session.completions
    return Trajectory(
        traces=traces,
        metadata={
            "builder": builder,
            "session_id": session.session_id,
            "task_id": session.task_id,
            "api_type": _first(c.dialect for c in completions),
            "model_requested": _first(c.model_requested for c in completions),
            "model_used": _first(c.model_used for c in completions),
            "policy_versions": policy_versions(completions),
            "record_count": len(completions),
            "trace_count": len(traces),
            "task_metadata": session.metadata,
            "reconstruction_stats": {
                "chains": len(traces),
                "merged": len(parts.eligible) - len(traces),
                "sampled_tokens": sum(len(c.sampled_ids) for c in completions),
                "trainable_tokens": sum(parts.tokens.values()),
                "left_out": parts.left_out,
                **(stats or {}),
            },
            **_echoed(session),
        },
    )


def parents(chains: list[Chain], parts: Split) -> list[Parent | None]:
    """Of each chain, the one that it branches off, if there is one.

    That is the one with which it shares most; else the one that holds the answer from which its
    first completion goes on, which may be a later one: the main chain is the last.
    """
    holders: dict[str, list[tuple[int, int, int]]] = {}
    found: list[Parent | None] = []
    for number, chain in enumerate(chains):
        position = chain.links[0].completion.prompt_length
        parent = None
        for link in chain.links:
            name = link.completion.completion_id
            position += len(link.interstitial)
            if link.shared:
                holder = next(trace for trace, length, _ in holders[name] if length >= link.shared)
                parent = Parent(holder, name, position + link.shared)
            position += link.length
            holders.setdefault(name, []).append((number, link.length, link.shared))
        found.append(parent)
    for number, chain in enumerate(chains):
        before = previous(chain.links[0].completion, parts.tokens)
        if found[number] is None and before is not None:
            name = before.completion.completion_id
            found[number] = Parent(
                next(trace for trace, length, shared in holders[name] if shared < length), name
            )
    return found


def _trace(
    session: CompletionSession,
    chain: Chain,
    parts: Split,
    options: Options,
    *,
    prompt_ids: list[int],
    metadata: dict[str, Any],
) -> Trace:
    """One training sample: the first prompt, then samples (mask 1) and interstitials (mask 0)."""
    links = chain.links
    first, last = links[0].completion, links[-1].completion
    response_ids = array("i")
    loss_mask: list[int] = []
    logprobs: list[float] = []
    spans: list[dict[str, Any]] = []
    for completion, length, interstitial, _, _, shared in links:
        response_ids += interstitial
        spans.append(
            msgspec.to_builtins(span(completion, len(response_ids), length, shared, first))
        )
        response_ids += completion.sampled_ids[:length]
        masked = len(interstitial) + shared
        loss_mask += [0] * masked
        loss_mask += [1] * (length - shared)
        assert completion.logprobs is not None, "an eligible completion has log probabilities"
        logprobs += [0.0] * masked
        logprobs += completion.logprobs[shared:length].tolist()
    return Trace(
        prompt_ids=prompt_ids,
        response_ids=response_ids.tolist(),
        loss_mask=loss_mask,
        response_logprobs=logprobs,
        prompt_messages=first.messages,
        response_messages=_response_messages(session, links),
        tools=first.tools,
        finish_reason=finish_reason(last, links[-1].length, options),
        metadata={
            "session_id": session.session_id,
            "task_id": session.task_id,
            **metadata,
            "trainable": True,
            "mask_reason": None,
            "completion_ids": [link.completion.completion_id for link in links],
            "spans": spans,
            "context_drift": sum(link.drift for link in links),
            "ambiguous": sum(link.ambiguous for link in links),
            "policy_versions": policy_versions([link.completion for link in links]),
            "api_type": first.dialect,
            "model_requested": first.model_requested,
            "model_used": first.model_used,
            "asked": first.asked,
            "started_at": first.started_at,
            "ended_at": last.ended_at,
            **_echoed(session),
        },
    )


def span(completion: Completion, start: int, length: int, shared: int, first: Completion) -> Span:
    """Where a completion's first `length` sampled ids stand in a trace that begins with `first`,
    how they were sampled, and how many of them an earlier trace trains."""
    sampled = len(completion.sampled_ids)
    return Span(
        start=start,
        length=length,
        completion_id=completion.completion_id,
        kind=completion.kind,
        policy_version=completion.policy_version,
        logprob_kind=completion.logprob_kind,
        sampling=completion.sampling,
        finish_reason=completion.finish_reason,
        shared=shared,
        sampled=sampled if length < sampled else None,
        versions=[
            VersionSpan(version=one.version, start=one.start, end=min(one.end, length))
            for one in completion.versions
            if one.start < length
        ],
        mode=completion.mode,
        previous=completion.previous.completion_id if completion.previous else None,
        attached=completion.attached,
        ambiguous=completion.ambiguous,
        continued_tokens=completion.continued_tokens,
        delivered=completion.delivered,
        stop_reason=completion.stop_reason,
        asked=completion.asked if completion.asked != first.asked else {},
        backend=completion.backend,
        usage=completion.usage,
        started_at=completion.started_at,
        ended_at=completion.ended_at,
        findings=completion.findings,
        tensors=completion.tensors,
    )


def finish_reason(last: Completion, length: int, options: Options) -> str | None:
    """How a trace ends that holds the first `length` sampled tokens of its last completion: as that
    did, by "length" where `max_tokens` cut it, and nobody can say where it was not received."""
    if length == len(last.sampled_ids):
        return last.finish_reason
    return "length" if last.prompt_length + length == options.max_tokens else None


def policy_versions(completions: Sequence[Completion]) -> dict[str, str | None]:
    """The policy versions of the first and of the last token that was sampled, where known."""
    named = [version for completion in completions for version in _versions(completion)]
    return {"start": named[0] if named else None, "end": named[-1] if named else None}


def _versions(completion: Completion) -> list[str]:
    spans = [one.version for one in completion.versions] or [completion.policy_version]
    return [version for version in spans if version is not None]


def received(session: CompletionSession, link: Link) -> list[dict[str, Any]]:
    """The answer as a message, as far as it is in the chain: as sampled where that is all of it,
    else as it was echoed by the longest request that went on from there."""
    completion = link.completion
    if link.length < len(completion.sampled_ids):
        for other in session.completions:
            if other.previous is completion and other.continued_tokens == link.length:
                return echo(other.messages_from(completion.message_count))
    return [completion.response_message]


def _response_messages(session: CompletionSession, links: list[Link]) -> list[dict[str, Any]]:
    """The thread after the first prompt: answers as sampled, in the place of their echoes."""
    said = received(session, links[0])
    for before, link in pairwise(links):
        later = link.completion.messages_from(before.completion.message_count)
        said += later[len(echo(later)) :]
        said += received(session, link)
    return said


def _echoed(session: CompletionSession) -> dict[str, Any]:
    return {key: session.metadata[key] for key in ECHOED if key in session.metadata}


def _first(values: Any) -> str:
    return next((value for value in values if value), "")
