"""The record of one session's model calls, durable call by call."""

from pathlib import Path
from typing import Any

from builders.records import Completion, CompletionSession, Floats, Ids
from polar_gateway.dialects.turn import ModelRequest
from polar_gateway.engines.base import EngineReply


class OpenCall:
    """A model call whose intent is in the journal and whose answer is not there yet."""

    completion_id: str

    def append(self, ids: Ids, logprobs: Floats) -> None:
        """Journal what was sampled since the last append; durable when this returns."""
        raise NotImplementedError

    def close(self, reply: EngineReply, sampling: dict[str, Any]) -> Completion:
        """Journal the finished completion; durable when this returns."""
        raise NotImplementedError

    def fail(self, message: str) -> None:
        """Journal that the call ended without an answer."""
        raise NotImplementedError

    def undelivered(self) -> None:
        """Journal that the answer, once recorded, never reached the harness."""
        raise NotImplementedError


class SessionCapture:
    """All calls of a session; one journal file."""

    def __init__(self, *, session_id: str, task_id: str | None, journal_path: Path, metadata: dict[str, Any], policy_version: str | None) -> None:
        raise NotImplementedError

    def open(self, request: ModelRequest, *, dialect: str, headers: dict[str, str]) -> OpenCall:
        raise NotImplementedError

    def seal(self) -> None:
        raise NotImplementedError

    @property
    def completion_count(self) -> int:
        raise NotImplementedError

    def completion_session(self, end_of_turn_ids: list[int]) -> CompletionSession:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
