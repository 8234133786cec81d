"""Every eligible completion is a trace of its own (paper §3.4.1): nothing to merge, nothing to doubt."""

from typing import ClassVar

import msgspec

from builders import assemble
from builders.chains import Chain, first
from builders.eligible import Options, split
from builders.records import CompletionSession, Trajectory


class PerRequestConfig(Options, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The options alone."""


class PerRequest:
    """Traces in order of arrival; the last is the main one, as step-wise trainers expect."""

    name: ClassVar[str] = "per_request"
    Config: ClassVar[type[msgspec.Struct]] = PerRequestConfig

    def __init__(self, config: PerRequestConfig) -> None:
        self.options: Options = config

    def build(self, session: CompletionSession) -> Trajectory:
        parts = split(session, self.options)
        prompts = _prompts(session)
        chains = [Chain([first(completion, parts)], "per_request") for completion in parts.eligible]
        return assemble.trajectory(
            session,
            self.name,
            chains,
            parts,
            self.options,
            prompts=[prompts[completion.completion_id] for completion in parts.eligible],
        )


def _prompts(session: CompletionSession) -> dict[str, list[int]]:
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
