"""The engine seam: what a running model server is asked, and what it says.

Ids and log probabilities come from the engine's own fields only; a reply in which they are missing
or do not align says so in `findings` and is never repaired.
"""

from collections.abc import AsyncIterator
from typing import Any, Protocol

import msgspec

from builders.records import Floats, Ids
from polar_gateway.dialects.turn import ErrorKind, ModelRequest, TurnEvent, Usage


class EngineReply(msgspec.Struct, kw_only=True):
    """One finished generation."""

    prompt_ids: Ids
    sampled_ids: Ids
    logprobs: Floats | None
    message: dict[str, Any]
    """Chat form: role, content, reasoning_content, tool_calls."""
    finish_reason: str | None
    stop_reason: int | str | None = None
    usage: Usage
    model: str = ""
    findings: list[str] = []


class EngineError(Exception):
    """The engine refused or broke; `kind` is what the harness shall hear, `infra` whether it was
    the engine's fault rather than the request's."""

    def __init__(self, kind: ErrorKind, *, infra: bool, detail: str = "") -> None:
        super().__init__(kind.message)
        self.kind = kind
        self.infra = infra
        self.detail = detail


class EngineProbe(msgspec.Struct, kw_only=True):
    """What a start-up probe found out about a backend."""

    engine: str
    model: str
    version: str = ""
    max_model_len: int | None = None
    token_ids: bool = False
    end_of_turn_ids: list[int] = []
    problems: list[str] = []
    """Sentences; training cannot do without what they name."""


class EngineStream(Protocol):
    """A generation in flight: iterate over turn events (all but TurnEnd); afterwards `reply`."""

    def __aiter__(self) -> AsyncIterator[TurnEvent]: ...

    def sampled_so_far(self) -> tuple[Ids, Floats]:
        """What has been sampled and not yet been asked for by an earlier call of this method."""
        ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def reply(self) -> EngineReply: ...

    async def aclose(self) -> None:
        """End the generation; the engine stops sampling."""
        ...


class Engine(Protocol):
    """One backend. Methods raise EngineError."""

    async def probe(self) -> EngineProbe: ...

    async def complete(self, request: ModelRequest, request_id: str) -> EngineReply: ...

    async def stream(self, request: ModelRequest, request_id: str) -> EngineStream: ...

    async def aclose(self) -> None: ...
