"""The engine seam: what a running model server is asked, and what it says.

Ids and log probabilities come from the engine's own fields only; a reply in which they are missing
or do not align says so in `findings` and is never repaired.
"""

from collections.abc import AsyncIterator
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from builders.records import Floats, Ids, LogprobKind, TokenNode, VersionSpan
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


class Tensor(NamedTuple):
    """Something large that an engine sends beside the tokens, as the bytes of a .npy file."""

    name: str
    data: bytes


class EngineReply(msgspec.Struct, kw_only=True):
    """One finished generation."""

    prompt_ids: Ids
    """As the engine says that it has read them, also where it was sent them."""
    sampled_ids: Ids
    logprobs: Floats | None
    blocks: list[Block]
    """What the engine's parsers made of the tokens, in order."""
    finish_reason: str | None
    stop_reason: int | str | None = None
    usage: Usage
    model: str = ""
    logprob_kind: LogprobKind = "unknown"
    versions: list[VersionSpan] = []
    """Which weights sampled which tokens, where the engine says so."""
    tensors: list[Tensor] = []
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
        partial: EngineReply | None = None,
    ) -> None:
        super().__init__(message or kind.message)
        self.kind = kind
        self.infra = infra
        self.detail = detail
        self.again = again
        """Whether the same request may succeed later."""
        self.partial = partial
        """What an answer that the engine aborted had sampled until then; see `Engine.resume`."""


TokenRoute = Literal["chat", "generate"]
"""How an engine is sent a prompt's ids: beside the messages of a chat request, whose answer it
parses itself; or to an endpoint of its own, whose answer is parsed by another one afterwards. The
second says which weights sampled which token, and streams no text."""

Renders = Literal["full", "suffix", "none"]
"""What an engine tells of its canonical renderings: those of whole conversations, exactly as a call
would have them; only of messages without earlier reasoning, so that the rendering of new messages
is told by a fixed frame around them; nothing."""


class EngineProbe(msgspec.Struct, kw_only=True):
    """What a start-up probe found out about a backend: one report, also for people."""

    engine: str
    model: str
    version: str = ""
    max_model_len: int | None = None
    token_ids: bool = False
    stream_ids: bool = False
    """Whether streamed answers come with all ids and log probabilities, too."""
    token_routes: list[TokenRoute] = []
    """The ways in which it takes prompts as ids, tried and echoed rightly; the preferred one first."""
    renders: Renders = "none"
    logprob_kind: LogprobKind = "unknown"
    end_of_turn_ids: list[int] = []
    """The id that the template closes a turn with, then others at which the engine stops by itself."""
    end_of_turn_texts: list[str] = []
    """The text of each of `end_of_turn_ids`; empty where the engine does not tell."""
    reasoning_parser: bool | None = None
    """Whether reasoning comes apart from the text; None: nothing was found out."""
    tool_parser: bool | None = None
    """Whether calls come apart from the text where tools are offered."""
    kv_connector: bool | None = None
    """Whether it moves KV caches between servers: the chat token route is that mechanism's then."""
    weight_versions: bool = False
    """Whether it can say which weights sampled which token."""
    weight_version: str | None = None
    """What it calls its weights now, where it says so."""
    resumes: bool = False
    """Whether an aborted answer can be gone on with, parsed as one whole."""
    controls: list[str] = []
    """Which of pause, abort, update it takes orders for."""
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


class Rendering(Protocol):
    """The ids of a rendered conversation, compared and cut without a copy of all of them."""

    @property
    def text(self) -> bytes:
        """The JSON array of them."""
        ...

    @property
    def ids(self) -> Ids: ...

    def __len__(self) -> int: ...

    def last(self, count: int) -> Ids:
        """Its last `count` ids."""
        ...

    def after(self, earlier: "Rendering", *, less: int = 0) -> Ids | None:
        """What follows in this one the ids of `earlier` without its last `less` ones; None when
        this one does not begin with those."""
        ...


PauseMode = Literal["wait", "keep", "abort"]
"""What becomes of the answers that are being sampled when an engine pauses: they are finished
first; they stand still and go on later; they end where they are."""


class Engine(Protocol):
    """One backend. Methods ask once and raise EngineError, which says whether to ask again."""

    async def probe(self) -> EngineProbe: ...

    async def complete(
        self, request: ModelRequest, request_id: str, after: TokenNode | None = None
    ) -> EngineReply:
        """Ask for a whole answer; for one to `request.prompt_ids` where these are set.

        `request_id` is the completion's; `after` is an earlier call whose prompt and answer this
        prompt probably extends, which may save work and changes nothing.
        """
        ...

    async def stream(
        self, request: ModelRequest, request_id: str, after: TokenNode | None = None
    ) -> EngineStream:
        """Ask for a streamed answer, as `complete`.

        Returns once the generation's first event is there, so that everything that fails before
        can still be tried again or answered with a status.
        """
        ...

    async def resume(
        self, request: ModelRequest, request_id: str, partial: EngineReply
    ) -> EngineReply:
        """Go on with an answer that was aborted, and return the whole: the partial tokens and log
        probabilities followed by the new ones, parsed once over both. Only where the probe says
        `resumes`."""
        ...

    async def count_tokens(self, request: ModelRequest) -> int:
        """How many tokens the request's prompt has, as the engine would render it. Nothing of it
        is recorded."""
        ...

    async def render(self, request: ModelRequest, *, closed: bool = False) -> Rendering:
        """The request's prompt, as the engine would render its messages. `closed` leaves out the
        beginning of the answer, so that the rendering ends with the last message."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling; returns when nothing is sampled any more. Only where `controls` say so."""
        ...

    async def unpause(self) -> None: ...

    async def update(self, policy_version: str, weights_path: str | None) -> None:
        """Name the weights from now on, after loading those in the folder `weights_path`, which
        the engine itself reads, where it is given; None: they have been put in place already.
        Cached prefixes of the earlier weights are dropped."""
        ...

    async def weight_version(self) -> str | None:
        """What it calls its weights now. Only where `controls` have `update`."""
        ...

    async def aclose(self) -> None: ...
