"""The engine seam: what a running model server is asked, and what it says.

Ids and log probabilities come from the engine's own fields only; a reply in which they are missing
or do not align says so in `findings` and is never repaired.
"""

from collections.abc import AsyncIterator
from typing import Any, Protocol

import msgspec

from builders.records import Floats, Ids
from polar_gateway.dialects.messages import message_of
from polar_gateway.dialects.turn import (
    Block,
    Call,
    ErrorKind,
    FinishReason,
    ModelRequest,
    Turn,
    TurnEvent,
    Usage,
)


class EngineReply(msgspec.Struct, kw_only=True):
    """One finished generation."""

    prompt_ids: Ids
    sampled_ids: Ids
    logprobs: Floats | None
    blocks: list[Block]
    """What the engine's parsers made of the tokens, in order."""
    finish_reason: str | None
    stop_reason: int | str | None = None
    usage: Usage
    model: str = ""
    findings: list[str] = []
    notes: list[str] = []
    """What was changed so that the engine would take the request, one short phrase each."""

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a chat message, in the form in which a harness's echo of it is normalised."""
        return message_of(self.blocks)

    def turn(self, completion_id: str, created: int) -> Turn:
        """The answer as dialects render it."""
        called = any(isinstance(block, Call) for block in self.blocks)
        reason: FinishReason = "tool_calls" if called else "stop"
        return Turn(
            completion_id=completion_id,
            created=created,
            blocks=self.blocks,
            finish_reason="length" if self.finish_reason == "length" else reason,
            stop_sequence=self.stop_reason if isinstance(self.stop_reason, str) else None,
            usage=self.usage,
        )


class EngineError(Exception):
    """The engine refused or broke; `kind` is what the harness shall hear, `infra` whether it was
    the engine's fault rather than the request's. `message` is for the operator alone, where it
    says more: the harness must learn nothing of the hosts behind the gateway."""

    def __init__(
        self,
        kind: ErrorKind,
        *,
        infra: bool,
        detail: str = "",
        message: str = "",
        again: bool = False,
    ) -> None:
        super().__init__(message or kind.message)
        self.kind = kind
        self.infra = infra
        self.detail = detail
        self.again = again
        """Whether the same request may succeed later."""


class EngineProbe(msgspec.Struct, kw_only=True):
    """What a start-up probe found out about a backend."""

    engine: str
    model: str
    version: str = ""
    max_model_len: int | None = None
    token_ids: bool = False
    stream_ids: bool = False
    """Whether streamed answers come with all ids and log probabilities, too."""
    end_of_turn_ids: list[int] = []
    problems: list[str] = []
    """Sentences; training cannot do without what they name."""
    notes: list[str] = []
    """Sentences; what they name costs something, and how the gateway does without it."""


class Generation(Protocol):
    """What is known of an answer that comes in pieces."""

    @property
    def prompt_ids(self) -> Ids | None:
        """None until the engine has said them."""
        ...

    def sampled_so_far(self) -> tuple[Ids, Floats]:
        """What has been sampled and not yet been asked for by an earlier call of this method."""
        ...

    @property
    def reply(self) -> EngineReply:
        """All that there is until now: whole once the iteration has ended by itself, and else
        without a finish reason. Ends the open block, so nothing may be iterated afterwards."""
        ...


class EngineStream(Generation, Protocol):
    """A generation in flight: iterate over batches of turn events (all but TurnEnd).

    A batch is what arrived together. Waiting for the next one may be cancelled and repeated;
    nothing is lost by it. Raises EngineError when the engine breaks off.
    """

    def __aiter__(self) -> AsyncIterator[list[TurnEvent]]: ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def sampled_tokens(self) -> int:
        """How many tokens the events handed out so far were made of."""
        ...

    async def aclose(self) -> None:
        """End the generation; the engine stops sampling."""
        ...


class Engine(Protocol):
    """One backend. Methods ask once and raise EngineError, which says whether to ask again."""

    async def probe(self) -> EngineProbe: ...

    async def complete(
        self, request: ModelRequest, request_id: str, after: str | None = None
    ) -> EngineReply:
        """Ask for a whole answer.

        `request_id` is the completion's; `after` is that of an earlier one whose prompt and answer
        this prompt probably extends, which may save work and changes nothing.
        """
        ...

    async def stream(
        self, request: ModelRequest, request_id: str, after: str | None = None
    ) -> EngineStream:
        """Ask for a streamed answer, as `complete`.

        Returns once the generation's first event is there, so that everything that fails before
        can still be tried again or answered with a status.
        """
        ...

    async def count_tokens(self, request: ModelRequest) -> int:
        """How many tokens the request's prompt has, as the engine would render it. Nothing of it
        is recorded."""
        ...

    async def aclose(self) -> None: ...
