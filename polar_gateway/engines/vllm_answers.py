"""What vLLM says in its answers, as pieces of one. Pure."""

import base64
import binascii
from array import array
from collections.abc import Iterator
from itertools import accumulate, chain
from typing import Literal

import msgspec

from builders.records import VersionSpan
from polar_gateway.engines.answers import Counts, Message, Piece
from polar_gateway.engines.base import Tensor
from polar_gateway.engines.http_client import as_logprob, decoded
from polar_gateway.engines.npy import int32_file
from polar_gateway.engines.refusals import broke_off, error_of


class _Logprob(msgspec.Struct, gc=False):
    logprob: float | Literal["NaN", "Infinity", "-Infinity"] | None = None


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Logprob] | None = None


class _Choice(msgspec.Struct, gc=False):
    message: Message | None = None
    delta: Message | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    routed_experts: str | None = None
    """base64 of a .npy file."""
    sampling_mask: list[list[int]] | None = None
    weight_versions: list[VersionSpan] | None = None


class _Answer(msgspec.Struct):
    """A whole answer or one event of a stream, of the chat or of the generate endpoint."""

    model: str = ""
    choices: list[_Choice] = []
    usage: Counts | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    error: msgspec.Raw = msgspec.Raw()


_answers = msgspec.json.Decoder(_Answer)


def chat_pieces(data: bytes) -> Iterator[Piece]:
    """What an event of a chat stream says. Raises EngineError for one that says what went wrong."""
    answer = decoded(_answers, data)
    if answer.error:
        raise error_of(None, b'{"error":' + bytes(answer.error) + b"}")
    if answer.choices:
        for choice in answer.choices:
            yield _piece(answer, choice)
    else:
        yield Piece(
            prompt=answer.prompt_token_ids,
            model=answer.model,
            counts=answer.usage,
        )


def whole_answer(data: bytes) -> Piece:
    """A whole answer. Raises EngineError when it is none."""
    answer = decoded(_answers, data)
    if answer.error:
        raise error_of(None, b'{"error":' + bytes(answer.error) + b"}")
    if not answer.choices:
        raise broke_off("the answer has no choices")
    return _piece(answer, answer.choices[0])


def _piece(answer: _Answer, choice: _Choice) -> Piece:
    entries = choice.logprobs.content if choice.logprobs is not None else None
    return Piece(
        message=choice.message or choice.delta or Message(),
        prompt=answer.prompt_token_ids,
        ids=choice.token_ids,
        logprobs=[as_logprob(entry.logprob) for entry in entries or ()],
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        counts=answer.usage,
        model=answer.model,
        versions=choice.weight_versions,
        tensors=_tensors(choice),
    )


def _tensors(choice: _Choice) -> list[Tensor]:
    tensors = []
    if choice.routed_experts is not None:
        try:
            data = base64.b64decode(choice.routed_experts, validate=True)
        except binascii.Error as error:
            raise broke_off(f"routed_experts are no base64: {error}") from error
        tensors.append(Tensor("routed_experts", data))
    if choice.sampling_mask is not None:
        # Sets of different sizes: all of them in a row, and where each one ends.
        ids = array("i", chain.from_iterable(choice.sampling_mask))
        ends = array("i", accumulate(map(len, choice.sampling_mask)))
        for name, values in (("sampling_mask", ids), ("sampling_mask_ends", ends)):
            tensors.append(Tensor(name, int32_file(values)))
    return tensors
