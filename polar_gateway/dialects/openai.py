"""What OpenAI's two APIs share: errors and the list of models."""

from typing import Any

from polar_gateway.dialects.sse import json_bytes
from polar_gateway.dialects.turn import ErrorKind

_ERRORS: dict[str, tuple[str, str | None]] = {
    "invalid_request": ("invalid_request_error", None),
    "authentication": ("invalid_request_error", "invalid_api_key"),
    "not_found": ("invalid_request_error", "not_found"),
    "too_large": ("invalid_request_error", "request_too_large"),
    "context_overflow": ("invalid_request_error", "context_length_exceeded"),
    "rate_limit": ("rate_limit_error", "rate_limit_exceeded"),
    "overloaded": ("server_error", "server_is_overloaded"),
    "session_closed": ("invalid_request_error", "session_closed"),
    "internal": ("server_error", None),
}
"""Type and code by which these APIs' clients tell errors apart."""

_STATUSES = {"context_overflow": 400, "rate_limit": 429, "overloaded": 503}
"""Where these APIs have one status for the error, whatever the engine's was: their clients back off
from 503 and 429, and look for the overflow's code in a 400 only."""


def error_status(error: ErrorKind) -> int:
    return _STATUSES.get(error.code, error.status)


def error_body(error: ErrorKind) -> bytes:
    kind, code = _ERRORS[error.code]
    if error.code == "not_found" and error.param == "previous_response_id":
        code = "previous_response_not_found"
    payload: dict[str, Any] = {
        "message": error.message,
        "type": kind,
        "param": error.param,
        "code": code,
    }
    return json_bytes({"error": payload})


def models_body(models: list[str]) -> bytes:
    return json_bytes({"object": "list", "data": [_model(model) for model in models]})


def model_body(model: str) -> bytes:
    return json_bytes(_model(model))


def _model(model: str) -> dict[str, Any]:
    return {"id": model, "object": "model", "created": 0, "owned_by": "polar"}
