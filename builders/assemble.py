"""From chains of completions to traces and a trajectory: the part that all builders share."""

from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from builders.eligible import Split
from builders.identity import echo
from builders.records import Completion, CompletionSession, Ids, Span, Trace, Trajectory

ECHOED = ("group_id", "policy_version", "rollout_step")
"""Keys of the task's metadata that every trace and the trajectory repeat for trainers."""


class Link(NamedTuple):
    """A completion's place in a chain: what came between it and the one before it."""

    completion: Completion
    interstitial: Ids
    """Empty for the first of a chain."""
    drift: int = 0
    """Positions in which the context it saw of the turn before differs from what was sampled."""
    ambiguous: bool = False
    """Whether it may as well have continued another completion."""


def prompts(session: CompletionSession) -> dict[str, list[int]]:
    """Completion id -> its prompt. What is shared with an earlier one is copied from that one's
    list, which costs a fraction of the time and memory of unpacking every prompt anew.
    """
    known: dict[str, list[int]] = {}
    for completion in session.completions:
        parent, shared = completion.parent, completion.shared
        if parent is not None and parent.completion_id in known:
            ids = known[parent.completion_id][:shared]
            ids += parent.sampled_ids[: shared - len(ids)].tolist()
            ids += completion.tail.tolist()
        else:
            ids = completion.prompt_ids.tolist()
        known[completion.completion_id] = ids
    return known


def trace(
    session: CompletionSession,
    builder: str,
    chain: list[Link],
    *,
    prompt_ids: list[int],
    main: bool,
) -> Trace:
    """One training sample: the first prompt, then samples (mask 1) and interstitials (mask 0)."""
    first, last = chain[0].completion, chain[-1].completion
    response_ids: list[int] = []
    loss_mask: list[int] = []
    logprobs: list[float] = []
    spans: list[dict[str, Any]] = []
    for completion, interstitial, *_ in chain:
        response_ids += interstitial.tolist()
        loss_mask += [0] * len(interstitial)
        logprobs += [0.0] * len(interstitial)
        spans.append(msgspec.structs.asdict(span(completion, len(response_ids))))
        assert completion.logprobs is not None, "an eligible completion has log probabilities"
        response_ids += completion.sampled_ids.tolist()
        loss_mask += [1] * len(completion.sampled_ids)
        logprobs += completion.logprobs.tolist()
    return Trace(
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        loss_mask=loss_mask,
        response_logprobs=logprobs,
        prompt_messages=first.messages,
        response_messages=_response_messages(chain),
        tools=first.tools,
        finish_reason=last.finish_reason,
        metadata={
            "session_id": session.session_id,
            "task_id": session.task_id,
            "builder": builder,
            "main": main,
            "completion_ids": [link.completion.completion_id for link in chain],
            "spans": spans,
            "context_drift": sum(link.drift for link in chain),
            "ambiguous": sum(link.ambiguous for link in chain),
            "api_type": first.dialect,
            "model_requested": first.model_requested,
            "model_used": first.model_used,
            **_echoed(session),
        },
    )


def span(completion: Completion, start: int) -> Span:
    """Where a completion's sampled ids stand in a trace, and how they were sampled."""
    return Span(
        start=start,
        length=len(completion.sampled_ids),
        completion_id=completion.completion_id,
        kind=completion.kind,
        policy_version=completion.policy_version,
        sampling=completion.sampling,
        finish_reason=completion.finish_reason,
    )


def trajectory(
    session: CompletionSession,
    builder: str,
    traces: list[Trace],
    parts: Split,
    stats: dict[str, Any],
) -> Trajectory:
    """All traces of a session, and what became of every sampled token."""
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
            "record_count": len(completions),
            "trace_count": len(traces),
            "task_metadata": session.metadata,
            "reconstruction_stats": {
                "chains": len(traces),
                "merged": len(parts.eligible) - len(traces),
                "sampled_tokens": sum(len(c.sampled_ids) for c in completions),
                "trainable_tokens": sum(len(c.sampled_ids) for c in parts.eligible),
                "left_out": parts.left_out,
                **stats,
            },
            **_echoed(session),
        },
    )


def _response_messages(chain: list[Link]) -> list[dict[str, Any]]:
    """The thread after the first prompt: answers as sampled, in the place of their echoes."""
    said = [chain[0].completion.response_message]
    for before, link in pairwise(chain):
        known = len(before.completion.messages)
        messages = link.completion.messages
        said += messages[known + len(echo(messages, known)) :]
        said.append(link.completion.response_message)
    return said


def _echoed(session: CompletionSession) -> dict[str, Any]:
    return {key: session.metadata[key] for key in ECHOED if key in session.metadata}


def _first(values: Any) -> str:
    return next((value for value in values if value), "")
