"""What vLLM says in its answers, as pieces of one. Pure."""

from collections.abc import Iterator
from typing import Literal

import msgspec

from polar_gateway.engines.answers import Counts, Message, Piece
from polar_gateway.engines.http_client import as_logprob, decoded
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


class _Answer(msgspec.Struct):
    """A whole answer or one event of a stream."""

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


def chat_answer(data: bytes) -> Piece:
    """A whole chat answer. Raises EngineError when it is none."""
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
    )
