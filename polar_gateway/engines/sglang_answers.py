"""What SGLang says in its answers, as pieces of one. Pure.

Whole answers hold ids, log probabilities and versions of the weights in their choice, streams hold
the ids in an extension behind everything else.
"""

import base64
import binascii
from collections.abc import Iterator
from typing import Any

import msgspec

from builders.records import VersionSpan
from polar_gateway.engines.answers import CompletionDetails, Counts, Message, Piece, PromptDetails
from polar_gateway.engines.base import Tensor
from polar_gateway.engines.http_client import as_logprob, decoded
from polar_gateway.engines.npy import array_file
from polar_gateway.engines.refusals import broke_off, error_of, unreadable


class _Logprob(msgspec.Struct, gc=False):
    logprob: float | str | None = None


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Logprob] | None = None


class _Meta(msgspec.Struct, gc=False):
    weight_versions: list[VersionSpan] | None = None
    output_token_logprobs: msgspec.Raw = msgspec.Raw()
    """[[log probability, id, text or null], ...]"""
    routed_experts: str | None = None
    """The int32 values of an array, in base64."""


class _Choice(msgspec.Struct, gc=False):
    message: Message | None = None
    delta: Message | None = None
    logprobs: _Logprobs | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    response_token_ids: list[int] | None = None
    meta_info: _Meta | None = None
    finish_reason: str | None = None
    matched_stop: int | str | None = None


class _Extension(msgspec.Struct):
    input_ids: msgspec.Raw = msgspec.Raw()
    output_ids: list[list[int]] = []


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None
    reasoning_tokens: int | None = None


class _Answer(msgspec.Struct):
    """A whole answer or one event of a stream."""

    model: str = ""
    choices: list[_Choice] = []
    usage: _Usage | None = None
    sglext: _Extension | None = None
    error: msgspec.Raw = msgspec.Raw()


_answers = msgspec.json.Decoder(_Answer)
_triples = msgspec.json.Decoder(list[tuple[Any, int, Any]])


def stream_pieces(data: bytes) -> Iterator[Piece]:
    """What an event of a chat stream says. Raises EngineError for one that says what went wrong."""
    answer = decoded(_answers, data)
    if answer.error:
        raise error_of(None, b'{"error":' + bytes(answer.error) + b"}")
    for choice in answer.choices:
        yield _piece(answer, choice)
    if answer.sglext is not None:
        ids = answer.sglext.output_ids
        yield Piece(prompt=answer.sglext.input_ids, ids=ids[0] if ids else None)
    if answer.usage is not None and not answer.choices:
        yield Piece(counts=_counts(answer.usage), model=answer.model)


def whole_answer(data: bytes) -> Piece:
    """A whole chat answer. Raises EngineError when it is none."""
    answer = decoded(_answers, data)
    if answer.error:
        raise error_of(None, b'{"error":' + bytes(answer.error) + b"}")
    if not answer.choices:
        raise broke_off("the answer has no choices")
    return _piece(answer, answer.choices[0])


def _piece(answer: _Answer, choice: _Choice) -> Piece:
    entries = choice.logprobs.content if choice.logprobs is not None else None
    meta = choice.meta_info or _Meta()
    ids = choice.response_token_ids
    if ids is None and meta.output_token_logprobs:  # all that versions before that field say
        ids = _sampled(bytes(meta.output_token_logprobs))
    return Piece(
        message=choice.message or choice.delta or Message(),
        prompt=choice.prompt_token_ids,
        ids=ids,
        logprobs=[as_logprob(entry.logprob) for entry in entries or ()],
        finish_reason=choice.finish_reason,
        stop_reason=choice.matched_stop,
        counts=_counts(answer.usage),
        model=answer.model,
        versions=meta.weight_versions,
        tensors=_tensors(meta.routed_experts),
    )


def _sampled(text: bytes) -> list[int]:
    try:
        return [token_id for _, token_id, _ in _triples.decode(text)]
    except msgspec.DecodeError as error:
        raise unreadable(error, text) from error


def _counts(usage: _Usage | None) -> Counts | None:
    if usage is None:
        return None
    return Counts(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        prompt_tokens_details=usage.prompt_tokens_details,
        completion_tokens_details=CompletionDetails(reasoning_tokens=usage.reasoning_tokens),
    )


def _tensors(routed_experts: str | None) -> list[Tensor]:
    """One-dimensional, since nothing says how many layers and experts a token went through."""
    if routed_experts is None:
        return []
    try:
        data = base64.b64decode(routed_experts, validate=True)
    except binascii.Error as error:
        raise broke_off(f"routed_experts of the answer cannot be read: {error}") from error
    return [Tensor("routed_experts", array_file("<i4", (len(data) // 4,), data))]
