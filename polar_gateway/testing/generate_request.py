"""Requests of vLLM's token endpoints: tokens in, tokens out, and tokens back into a message. Pure."""

from typing import Any, TypeVar

import msgspec

from polar_gateway.testing.chat_request import invalid

_T = TypeVar("_T")


class _Sampling(msgspec.Struct, kw_only=True):
    max_tokens: int | None = None
    temperature: float = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    logprobs: int | None = None
    allowed_token_ids: list[int] | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class GenerateRequest(msgspec.Struct, kw_only=True):
    token_ids: list[int]
    sampling_params: _Sampling
    model: str | None = None
    request_id: str | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def logprobs(self) -> int | None:
        return self.sampling_params.logprobs

    @property
    def stop(self) -> list[str]:
        stop = self.sampling_params.stop
        return [stop] if isinstance(stop, str) else stop or []


class GeneratedChoice(msgspec.Struct, kw_only=True):
    index: int = 0
    token_ids: list[int] = []
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Generated(msgspec.Struct, kw_only=True):
    request_id: str
    choices: list[GeneratedChoice]


class DerenderRequest(msgspec.Struct, kw_only=True):
    generate_response: Generated
    chat_request: dict[str, Any]
    prompt_token_ids: list[int] | None = None
    prompt_tokens: int = 0


def converted(document: dict[str, Any], kind: type[_T]) -> _T:
    """Raises ApiError where the document has another form."""
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise invalid("type", "body" + path.rstrip("`"), message) from error
