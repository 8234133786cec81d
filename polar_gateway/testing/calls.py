"""What a scripted server was asked and has said, and how it is made to fail."""

from typing import Any, Literal

import msgspec


class Fault(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How the next calls go wrong; what is unset goes as usual."""

    times: int = 1
    """How many calls it spoils before it is used up."""
    skip: int = 0
    """How many calls it lets pass first."""
    match: str = ""
    """Regular expression: only calls whose request, as JSON, has it are spoiled or let pass; or
    whose prompt has it, as text, where that is sent as ids."""
    status: int | None = None
    """Answer with this status and an error document."""
    message: str = "scripted fault"
    headers: dict[str, str] = {}
    """Of the answer with `status`, such as retry-after."""
    delay: float = 0.0
    """Seconds before the first token, before the status or before hanging up."""
    token_delay: float | None = None
    """Seconds between tokens, instead of the engine's own."""
    stall_after: int | None = None
    """Fall silent after this many tokens, for `stall` seconds."""
    stall: float = 0.0
    hang_up: bool = False
    """Cut the connection without an answer."""
    disconnect_after: int | None = None
    """Cut the connection after the headers and this many tokens."""
    error_after: int | None = None
    """Streamed: an error inside the stream after this many tokens. Whole: status 500."""
    abort_after: int | None = None
    """End with finish_reason "abort" after this many tokens."""
    omit: list[Literal["prompt_token_ids", "token_ids", "logprobs"]] = []
    """What the answer leaves out."""


class VersionOf(msgspec.Struct):
    """Which weights sampled the tokens from `start` up to `end`."""

    version: str
    start: int
    end: int


class Call(msgspec.Struct, kw_only=True):
    """One answer that was asked for."""

    request_id: str
    request: dict[str, Any] = {}
    path: str = ""
    received_at: float
    """Seconds since the epoch."""
    status: int = 200
    prompt: str = ""
    """As rendered, or as its ids spell it."""
    prompt_token_ids: list[int] = []
    token_ids: list[int] = []
    logprobs: list[float] = []
    weight_versions: list[VersionOf] = []
    finish_reason: str | None = None
    message: dict[str, Any] | None = None
    """The answer as the whole, unstreamed one would have it."""
    sent_tokens: int = 0
    finished: bool = False
    """False while it runs, and for ever when the client went away."""
