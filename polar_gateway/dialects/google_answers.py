"""Answers of Google's generateContent, whole and streamed."""

import base64
from typing import Any

from polar_gateway.dialects import messages as shared
from polar_gateway.dialects.sse import EVENT_STREAM, json_bytes
from polar_gateway.dialects.turn import (
    Block,
    BlockDelta,
    BlockEnd,
    BlockStart,
    Call,
    ErrorKind,
    ModelRequest,
    Reasoning,
    Text,
    Turn,
    TurnEnd,
    TurnEvent,
    Usage,
)


def signature_of(completion_id: str) -> str:
    """What this API's clients keep with a part and send back: bytes, as base64."""
    return base64.b64encode(completion_id.encode()).decode()


def completion_of(signature: Any) -> str | None:
    """The completion that a signature names; None for another's, and for the placeholders that
    harnesses put where they have none."""
    if not isinstance(signature, str):
        return None
    try:
        return shared.completion_reference(base64.b64decode(signature, validate=True).decode())
    except ValueError:
        return None


def answer(request: ModelRequest, turn: Turn) -> bytes:
    signature = signature_of(turn.completion_id)
    blocks = turn.blocks
    if turn.finish_reason == "length" and blocks and isinstance(blocks[-1], Call):
        # Arguments are objects in this API, and this call has only part of its.
        blocks = blocks[:-1]
    parts = [
        _answer_part(block, signature)
        for block in blocks
        if request.include_reasoning or not isinstance(block, Reasoning)
    ]
    candidate = {
        "content": {"parts": parts or [{"text": ""}], "role": "model"},
        "finishReason": _finish_reason(turn),
        "index": 0,
    }
    return json_bytes(
        {
            "candidates": [candidate],
            "usageMetadata": _usage(turn.usage),
            "modelVersion": request.model,
            "responseId": turn.completion_id,
        }
    )


def _answer_part(block: Block, signature: str) -> dict[str, Any]:
    match block:
        case Reasoning(text=text):
            return {"text": text, "thought": True, "thoughtSignature": signature}
        case Text(text=text):
            return {"text": text, "thoughtSignature": signature}
        case Call():
            call = {
                "id": block.id,
                "name": block.name,
                "args": shared.object_of_arguments(block.arguments),
            }
            return {"functionCall": call, "thoughtSignature": signature}


def _finish_reason(turn: Turn) -> str:
    return "MAX_TOKENS" if turn.finish_reason == "length" else "STOP"


def _usage(usage: Usage) -> dict[str, int]:
    """This API counts thoughts beside the rest of the answer."""
    counts = {
        "promptTokenCount": usage.prompt_tokens,
        "candidatesTokenCount": usage.completion_tokens - usage.reasoning_tokens,
        "totalTokenCount": usage.prompt_tokens + usage.completion_tokens,
    }
    if usage.reasoning_tokens:
        counts["thoughtsTokenCount"] = usage.reasoning_tokens
    if usage.cached_tokens:
        counts["cachedContentTokenCount"] = usage.cached_tokens
    return counts


_PART = b'{"candidates":[{"content":{"parts":[%b],"role":"model"},"index":0}],%b}'
_NO_TEXT = b'{"text":""}'


class _Streamer:
    """The first part of each block names the answer: harnesses that join the pieces of a text keep
    only what the first of them says beside it."""

    def __init__(self, request: ModelRequest, completion_id: str) -> None:
        self._include_reasoning = request.include_reasoning
        self._sse = request.framing == "sse"
        self.content_type = EVENT_STREAM if self._sse else "application/json; charset=utf-8"
        self._separator = b""
        self._signature = signature_of(completion_id)
        self._tail = b'"modelVersion":%b,"responseId":%b' % (
            json_bytes(request.model),
            json_bytes(completion_id),
        )
        self._block = BlockStart(kind="text")
        self._begun = False
        self._arguments: list[str] = []

    def _framed(self, payload: bytes) -> bytes:
        if self._sse:
            return b"data: %b\n\n" % payload
        separator, self._separator = self._separator, b",\n"
        return separator + payload

    def _part(self, part: bytes) -> bytes:
        return self._framed(_PART % (part, self._tail))

    def open(self, prompt_tokens: int) -> bytes:
        return b"" if self._sse else b"["

    def event(self, event: TurnEvent) -> bytes:
        match event:
            case BlockDelta(text=text):
                return self._delta(text)
            case BlockStart():
                self._block = event
                self._begun = False
                self._arguments.clear()
                return b""
            case BlockEnd(cut=cut):
                return b"" if cut or self._block.kind != "call" else self._call()
            case TurnEnd(turn=turn):
                return self._end(turn)

    def _delta(self, text: str) -> bytes:
        kind = self._block.kind
        if kind == "call":
            self._arguments.append(text)
            return b""
        if kind == "reasoning" and not self._include_reasoning:
            return b""
        thought = b',"thought":true' if kind == "reasoning" else b""
        signature = b""
        if not self._begun:
            self._begun = True
            signature = b',"thoughtSignature":"%b"' % self._signature.encode()
        return self._part(b'{"text":%b%b%b}' % (json_bytes(text), thought, signature))

    def _call(self) -> bytes:
        """A call comes whole: its arguments are an object."""
        call = Call(id=self._block.id, name=self._block.name, arguments="".join(self._arguments))
        return self._part(json_bytes(_answer_part(call, self._signature)))

    def _end(self, turn: Turn) -> bytes:
        candidate = {
            "content": {"parts": [{"text": ""}], "role": "model"},
            "finishReason": _finish_reason(turn),
            "index": 0,
        }
        payload = b'{"candidates":[%b],"usageMetadata":%b,%b}' % (
            json_bytes(candidate),
            json_bytes(_usage(turn.usage)),
            self._tail,
        )
        return self._framed(payload) + (b"" if self._sse else b"]")

    def keep_alive(self) -> bytes:
        """An empty text. A comment would do for other harnesses, but breaks Gemini CLI."""
        return self._part(_NO_TEXT)

    def error(self, error: ErrorKind) -> bytes:
        """No event: Google's SDKs look for a bare object, and take an event for a part without
        content, after which Gemini CLI goes on with half an answer as if it were whole."""
        return error_body(error) if self._sse else self._framed(error_body(error)) + b"]"


def streamer(request: ModelRequest, completion_id: str, created: int) -> _Streamer:
    return _Streamer(request, completion_id)


_STATUSES = {
    "invalid_request": "INVALID_ARGUMENT",
    "authentication": "UNAUTHENTICATED",
    "not_found": "NOT_FOUND",
    "too_large": "INVALID_ARGUMENT",
    "context_overflow": "INVALID_ARGUMENT",
    "rate_limit": "RESOURCE_EXHAUSTED",
    "overloaded": "UNAVAILABLE",
    "session_closed": "FAILED_PRECONDITION",
    "internal": "INTERNAL",
}

_OVERFLOW = "The input token count exceeds the maximum number of tokens allowed"


def error_status(error: ErrorKind) -> int:
    return 503 if error.code == "overloaded" else error.status


def error_body(error: ErrorKind) -> bytes:
    message = error.message
    if error.code == "context_overflow" and "exceeds the maximum" not in message:
        # The words by which harnesses that speak this API know an overflow.
        message = f"{_OVERFLOW}: {message}"
    payload: dict[str, Any] = {
        "code": error_status(error),
        "message": message,
        "status": _STATUSES[error.code],
    }
    if error.retry_after is not None:
        retry = "type.googleapis.com/google.rpc.RetryInfo"
        payload["details"] = [{"@type": retry, "retryDelay": f"{error.retry_after}s"}]
    return json_bytes({"error": payload})


def _model(model: str) -> dict[str, Any]:
    return {
        "name": f"models/{model}",
        "version": "1",
        "displayName": model,
        "supportedGenerationMethods": ["generateContent", "countTokens"],
    }


def model_body(model: str) -> bytes:
    return json_bytes(_model(model))


def models_body(models: list[str]) -> bytes:
    return json_bytes({"models": [_model(model) for model in models]})


def count_body(tokens: int) -> bytes:
    return json_bytes({"totalTokens": tokens})
