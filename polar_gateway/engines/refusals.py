"""What an engine's refusals and failures mean to a harness, and what their sentences say. Pure."""

import re
from typing import NamedTuple

import msgspec

from polar_gateway.dialects.turn import ErrorKind
from polar_gateway.engines.base import EngineError, EngineReply

_OVERFLOW = re.compile(
    r"maximum context length|longer than the (?:maximum model length|model's context length)"
    r"|exceeds the maximum allowed length",
    re.I,
)
_LIMIT = re.compile(
    r"(?:maximum (?:context|model) length (?:is|of)|max_model_len=|context length \(|"
    r"maximum allowed length \() ?(\d+)",
    re.I,
)
_ASKED = re.compile(
    r"(?:contains at least|contains|requested|has|length|input \(|input length \() ?(\d+)\b"
    r"(?! characters)",
    re.I,
)
_UNCOUNTED = re.compile(r"contains at least \d+|contains \d+ characters", re.I)
_OUTPUT = re.compile(
    r"requested \d+ output tokens|(?:in|for) the completion|\bmax_(?:completion_)?tokens", re.I
)
_PROMPT = re.compile(
    r"(\d+) (?:in the messages|tokens from the input messages)|(?:has|contains) (\d+) input tokens",
    re.I,
)


class Room(NamedTuple):
    """What is said of a request whose prompt might fit if less output were asked for."""

    limit: int
    """Of prompt and output together, in tokens."""
    prompt: int | None
    """None where the engine did not count to its end."""


def room_of(said: str) -> Room | None:
    """None for a refusal that has another reason than the output that was asked for."""
    limit = _LIMIT.search(said)
    if limit is None or not _OUTPUT.search(said):
        return None
    prompt = _PROMPT.search(said)
    return Room(int(limit[1]), int(prompt[1] or prompt[2]) if prompt else None)


def error_of(status: int | None, data: bytes, retry_after: str = "") -> EngineError:
    """What an error answer of vLLM means to a harness.

    `status` is None for an error that came inside a stream; it then says its code itself.
    `retry_after` is the header of that name, of which only seconds are understood.
    """
    said, code = _said(data)
    status = status or code or 500
    detail = data[:2048].decode("utf-8", "replace")
    if status == 400 and _OVERFLOW.search(said):
        kind = ErrorKind(status=400, code="context_overflow", message=overflow_message(said))
        return EngineError(kind, infra=False, detail=detail)
    if status in (400, 413, 422):
        kind = ErrorKind(status=400, code="invalid_request", message=said)
        return EngineError(kind, infra=False, detail=detail)
    if status in (429, 503):
        kind = ErrorKind(
            status=503,
            code="overloaded",
            message="the engine is busy",
            retry_after=int(retry_after) if retry_after.isdecimal() else None,
        )
        said = f"{kind.message}: {said}"
        return EngineError(kind, infra=True, detail=detail, message=said, again=True)
    kind = ErrorKind(status=500, code="internal", message="the engine failed")
    said = f"the engine answered {status}: {said}"
    return EngineError(kind, infra=True, detail=detail, message=said, again=status >= 500)


def overflow_message(said: str, prompt: int | None = None) -> str:
    """vLLM's sentence, with the numbers in front in the words that Claude Code compacts by; other
    agents know the sentence itself. `prompt` is the true length where vLLM stopped counting."""
    limit, asked = _LIMIT.search(said), _ASKED.search(said)
    if limit is None:
        return said
    most = int(limit[1])
    if prompt is None or prompt < most:  # what says less than the engine has counted something else
        prompt = int(asked[1]) if asked else most + 1
    return f"prompt is too long: {prompt} tokens > {most} maximum. {said}"


def is_uncounted(error: EngineError) -> bool:
    """Whether the error is an overflow that does not say how long the prompt is."""
    return error.kind.code == "context_overflow" and bool(_UNCOUNTED.search(error.kind.message))


def overflow(error: EngineError, prompt: int) -> EngineError:
    """The refusal as one for the length of the prompt, which has `prompt` tokens."""
    sentence = error.kind.message.partition(" maximum. ")[2] or error.kind.message
    message = overflow_message(sentence, prompt)
    kind = ErrorKind(status=400, code="context_overflow", message=message)
    return EngineError(kind, infra=False, detail=error.detail)


def unreachable(error: Exception) -> EngineError:
    said = str(error) or type(error).__name__
    kind = ErrorKind(status=503, code="overloaded", message="the engine cannot be reached")
    message = f"{kind.message}: {said}"
    return EngineError(kind, infra=True, detail=said, message=message, again=True)


def unready(why: str) -> EngineError:
    kind = ErrorKind(status=503, code="overloaded", message="the engine is not ready")
    return EngineError(kind, infra=True, message=f"{kind.message}: {why}", again=True)


def broke_off(what: str) -> EngineError:
    kind = ErrorKind(status=500, code="internal", message="the engine broke off")
    return EngineError(kind, infra=True, message=f"{kind.message}: {what}", again=True)


def aborted(partial: EngineReply | None = None) -> EngineError:
    """`partial` is what there was, where it can be gone on with."""
    kind = ErrorKind(status=503, code="overloaded", message="the engine aborted the generation")
    return EngineError(kind, infra=True, again=True, partial=partial)


def unresumable() -> EngineError:
    kind = ErrorKind(status=503, code="overloaded", message="the engine aborted the generation")
    said = f"{kind.message}, which cannot be gone on with"
    return EngineError(kind, infra=True, message=said)


def unreadable(error: msgspec.DecodeError, data: bytes) -> EngineError:
    kind = ErrorKind(status=500, code="internal", message="the engine's answer cannot be read")
    said = f"{kind.message}: {error}"
    detail = data[:2048].decode("utf-8", "replace")
    return EngineError(kind, infra=True, detail=detail, message=said, again=True)


def _said(data: bytes) -> tuple[str, int | None]:
    """The message and code of an error body, which is an object, a string, or no JSON at all."""
    try:
        error = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return data[:300].decode("utf-8", "replace") or "nothing", None
    if isinstance(error, dict):
        error = error.get("error", error)
    if not isinstance(error, dict):
        return str(error), None
    code = error.get("code")
    return str(error.get("message", error)), code if isinstance(code, int) else None
