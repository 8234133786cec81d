"""The typed intermediate that every dialect shares: a request in the engine's chat form, and a turn.

No dialect knows another. Each translates its own requests into a `ModelRequest` and renders a `Turn`
(whole) or a sequence of `TurnEvent`s (streamed) back.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from builders.records import Ids


class ModelRequest(msgspec.Struct, kw_only=True):
    """A model call in the engine's chat-completions form, whatever dialect it came in."""

    model: str
    """As the harness asked for it; the answer names it again."""
    messages: list[dict[str, Any]]
    """role system|user|assistant|tool; at most one system message, the first; string or part-list
    content; assistant messages may carry reasoning_content and tool_calls."""
    tools: list[dict[str, Any]] | None = None
    """Chat-completions function tools; None rather than an empty list."""
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_tokens: int | None = None
    sampling: dict[str, Any] = {}
    """temperature, top_p, top_k, min_p, stop, seed, penalties: only what the harness set."""
    response_format: dict[str, Any] | None = None
    template_kwargs: dict[str, Any] = {}
    stream: bool = False
    include_usage: bool = True
    """Whether a chat stream ends with a usage chunk."""
    notes: list[str] = []
    """What was dropped on the way, one short phrase each."""
    renames: dict[str, Any] = {}
    """Tool name as the engine sees it -> how the dialect must name it in the answer."""
    answers: dict[int, str] = {}
    """Index of an assistant message -> the completion that it says it is the answer of: the opaque
    reference that our answer carried (a signature, an item's id) and the harness sent back."""
    kind: str = "turn"
    """What the endpoint itself says the call is for; "turn" where it says nothing."""
    framing: Literal["sse", "json_array"] = "sse"
    """How the parts of a streamed answer are told apart."""
    include_reasoning: bool = True
    """Whether the answer shows the reasoning: one provider shows it only to those who ask."""
    echo: dict[str, Any] = {}
    """What the answer says again of the request, in the dialect's own terms."""
    prompt_ids: Ids | None = None
    """What the engine is sent as the prompt in place of a rendering of the messages, which then
    serve its parsers alone; None: it renders the messages."""
    rendering: bytes = b""
    """What the engine itself renders the messages to, as JSON, where that is at hand: it mostly
    spells `prompt_ids`, which then need not be spelled again."""


class Usage(msgspec.Struct, kw_only=True):
    """Token counts, true ones: harnesses decide on compaction by them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class Reasoning(msgspec.Struct, kw_only=True, tag="reasoning"):
    text: str


class Text(msgspec.Struct, kw_only=True, tag="text"):
    text: str


class Call(msgspec.Struct, kw_only=True, tag="call"):
    """A tool call; `arguments` is the model's own spelling."""

    id: str
    name: str
    arguments: str


Block = Reasoning | Text | Call
BlockKind = Literal["reasoning", "text", "call"]
FinishReason = Literal["stop", "length", "tool_calls"]


class Turn(msgspec.Struct, kw_only=True):
    """One finished answer: ordered blocks."""

    completion_id: str
    """`msg_` + 12 hex digits; dialects derive their own ids from it."""
    created: int
    """Seconds since the epoch."""
    blocks: list[Block]
    finish_reason: FinishReason
    stop_sequence: str | None = None
    usage: Usage


class BlockStart(msgspec.Struct, kw_only=True, tag="start"):
    """A block opens; `id` and `name` are set for calls."""

    kind: BlockKind
    id: str = ""
    name: str = ""


class BlockDelta(msgspec.Struct, kw_only=True, tag="delta"):
    """More text of the open block: reasoning, text, or argument text."""

    text: str


class BlockEnd(msgspec.Struct, kw_only=True, tag="end"):
    """The open block is complete. For a call this is the point from which a harness may act."""

    cut: bool = False
    """The output limit ended the answer inside this block."""


class TurnEnd(msgspec.Struct, kw_only=True, tag="turn_end"):
    """The turn is complete and its record durable."""

    turn: Turn


TurnEvent = BlockStart | BlockDelta | BlockEnd | TurnEnd
"""Blocks never overlap: every BlockStart is followed by its deltas and its BlockEnd."""


class UnsupportedRequestError(Exception):
    """The request holds something that cannot be honoured without changing its meaning.

    `optional` says that clients know of endpoints without it and then ask again for the same.
    """

    def __init__(self, field: str, message: str, *, optional: bool = False) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.optional = optional


class ErrorKind(msgspec.Struct, kw_only=True, frozen=True):
    """An error before its dialect's shape is put on."""

    status: int
    code: Literal[
        "invalid_request",
        "authentication",
        "not_found",
        "too_large",
        "context_overflow",
        "rate_limit",
        "overloaded",
        "session_closed",
        "internal",
    ]
    message: str
    retry_after: int | None = None
    """Seconds after which asking again makes sense, for the header of that name."""
    param: str | None = None
    """The request's field that the error is about, for dialects that say so."""


class Streamer(Protocol):
    """Renders one streamed answer; every method returns bytes to write, possibly none."""

    content_type: str

    def open(self, prompt_tokens: int) -> bytes:
        """The first event(s), before any block. Called exactly once, first. `prompt_tokens` is 0
        when the engine has not said yet."""
        ...

    def event(self, event: TurnEvent) -> bytes: ...

    def keep_alive(self) -> bytes:
        """What this dialect's harnesses take for a sign of life without acting on it."""
        ...

    def error(self, error: ErrorKind) -> bytes:
        """The dialect's in-band error, which ends the stream."""
        ...


RouteKind = Literal["call", "count_tokens", "models", "model", "stored", "probe", "websocket"]
"""A model call, or an auxiliary request: how many tokens a request has, which models there are, one
of them by name, an answer that was stored, a sign of life, an upgrade that is answered with 426 so
that the harness uses HTTP."""


class Match(NamedTuple):
    """What a dialect recognises a request as."""

    kind: RouteKind
    fields: dict[str, Any] = {}
    """Body fields that this dialect carries in its URL; the body is updated with them before it is
    normalised."""


class Dialect(Protocol):
    """One provider's wire format, pure. Implemented by the modules of this package."""

    name: str
    request_id_header: str
    """In which this provider's answers carry the request's id."""

    def match(
        self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str]
    ) -> Match | None:
        """Whether the request is in this dialect. Header names are lower-case."""
        ...

    def normalise(self, body: dict[str, Any]) -> ModelRequest:
        """Raises UnsupportedRequestError."""
        ...

    def answer(self, request: ModelRequest, turn: Turn) -> bytes: ...

    def streamer(self, request: ModelRequest, completion_id: str, created: int) -> Streamer: ...

    def error_status(self, error: ErrorKind) -> int:
        """The HTTP status that this provider uses for the error."""
        ...

    def error_body(self, error: ErrorKind) -> bytes: ...

    def models_body(self, models: list[str]) -> bytes:
        """The answer to a `models` request."""
        ...

    def model_body(self, model: str) -> bytes:
        """The answer to a `model` request; any name is served by the session's model."""
        ...

    def count_body(self, tokens: int) -> bytes:
        """The answer to a `count_tokens` request."""
        ...
