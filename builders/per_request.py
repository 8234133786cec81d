"""Every eligible completion is a trace of its own (paper §3.4.1): nothing to merge, nothing to doubt."""

from array import array
from typing import ClassVar

import msgspec

from builders import assemble
from builders.eligible import Options, split
from builders.records import CompletionSession, Trajectory


class PerRequestConfig(Options, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`kinds` alone."""


class PerRequest:
    """Traces in order of arrival; the last is the main one, as step-wise trainers expect."""

    name: ClassVar[str] = "per_request"
    Config: ClassVar[type[msgspec.Struct]] = PerRequestConfig

    def __init__(self, config: PerRequestConfig) -> None:
        self.options: Options = config

    def build(self, session: CompletionSession) -> Trajectory:
        parts = split(session, self.options)
        prompts = assemble.prompts(session)
        traces = [
            assemble.trace(
                session,
                self.name,
                [assemble.Link(completion, array("i"))],
                prompt_ids=prompts[completion.completion_id],
                main=completion is parts.eligible[-1],
            )
            for completion in parts.eligible
        ]
        return assemble.trajectory(session, self.name, traces, parts, {})
