"""Answers in the chat-completions form, whole or in pieces, whichever engine gave them.

Engines differ in where the ids and log probabilities stand. Each has a reader of its own that makes
`Piece`s of what it sends; what the pieces add up to is one matter.
"""

import math
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from builders.records import Floats, Ids, LogprobKind, VersionSpan
from polar_gateway.dialects.turn import (
    Block,
    BlockDelta,
    BlockEnd,
    BlockStart,
    Call,
    Reasoning,
    Text,
    TurnEvent,
    Usage,
)
from polar_gateway.engines.base import EngineError, EngineReply, Tensor
from polar_gateway.engines.id_cache import PromptReader
from polar_gateway.engines.refusals import aborted, broke_off
from polar_gateway.engines.tokens import Tokens, checked_tokens

ABORTED = "abort"
NOT_A_TURN = frozenset({ABORTED, "error"})
"""Finish reasons of answers that the engine gave up."""

# What is decoded holds no cycles; hidden from the garbage collector, hundreds of entries a call
# do not make it run.


class Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct, gc=False):
    index: int = 0
    id: str | None = None
    function: Function = msgspec.field(default_factory=Function)


class Message(msgspec.Struct, gc=False):
    """A whole message or a delta; the two have the same fields."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None

    @property
    def thought(self) -> str | None:
        return self.reasoning or self.reasoning_content


class PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class CompletionDetails(msgspec.Struct, gc=False):
    reasoning_tokens: int | None = None


class Counts(msgspec.Struct, gc=False):
    """The usage object."""

    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None


class Piece(msgspec.Struct, gc=False):
    """A whole answer, or what one event of a stream adds to it."""

    message: Message = msgspec.field(default_factory=Message)
    prompt: msgspec.Raw = msgspec.Raw()
    """The prompt's ids as a JSON array; empty or null where it does not say them."""
    ids: list[int] | None = None
    logprobs: Sequence[float | None] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    counts: Counts | None = None
    model: str = ""
    versions: list[VersionSpan] | None = None
    tensors: list[Tensor] = []


def whole_reply(
    piece: Piece, prompt: PromptReader, logprob_kind: LogprobKind = "unknown"
) -> EngineReply:
    """A whole answer as a reply. Raises EngineError when it is not a turn; that of an answer which
    was aborted carries what there was."""
    if piece.finish_reason is None:
        raise broke_off("the answer has no finish reason")
    prompt.read(piece.prompt)
    tokens = checked_tokens(prompt.ids, piece.ids, piece.logprobs, _sampled(piece.counts))
    reply = EngineReply(
        prompt_ids=tokens.prompt_ids,
        sampled_ids=tokens.sampled_ids,
        logprobs=tokens.logprobs,
        blocks=blocks_of(piece.message),
        finish_reason=piece.finish_reason,
        stop_reason=piece.stop_reason,
        usage=usage_of(piece.counts, tokens, 0),
        model=piece.model,
        logprob_kind=logprob_kind,
        versions=piece.versions or [],
        tensors=piece.tensors,
        findings=tokens.findings,
    )
    if piece.finish_reason in NOT_A_TURN:
        raise ended_early(piece.finish_reason, reply)
    prompt.remember(tokens.sampled_ids)
    return reply


def ended_early(finish_reason: str, reply: EngineReply) -> EngineError:
    """What an answer that the engine gave up is worth: only an abort leaves one to go on with."""
    if finish_reason != ABORTED:
        return aborted()
    reply.finish_reason = None
    return aborted(reply)


def blocks_of(message: Message) -> list[Block]:
    blocks: list[Block] = []
    if message.thought:
        blocks.append(Reasoning(text=message.thought))
    if message.content:
        blocks.append(Text(text=message.content))
    blocks += [
        Call(
            id=call.id or "",
            name=call.function.name or "",
            arguments=call.function.arguments or "",
        )
        for call in message.tool_calls or ()
    ]
    return blocks


def _sampled(counts: Counts | None) -> int | None:
    return None if counts is None else counts.completion_tokens


def usage_of(counts: Counts | None, tokens: Tokens, reasoning_tokens: int) -> Usage:
    """`reasoning_tokens` are those that came with reasoning, for engines that do not say it."""
    if counts is None:
        return Usage(
            prompt_tokens=len(tokens.prompt_ids),
            completion_tokens=len(tokens.sampled_ids),
            reasoning_tokens=reasoning_tokens,
        )
    prompt, completion = counts.prompt_tokens_details, counts.completion_tokens_details
    return Usage(
        prompt_tokens=counts.prompt_tokens,
        completion_tokens=counts.completion_tokens or 0,
        cached_tokens=(prompt.cached_tokens if prompt else None) or 0,
        reasoning_tokens=(
            reasoning_tokens
            if completion is None or completion.reasoning_tokens is None
            else completion.reasoning_tokens
        ),
    )


class Assembly:
    """What the pieces of a stream add up to, and the turn events that each of them means."""

    def __init__(self, prompt: PromptReader, logprob_kind: LogprobKind = "unknown") -> None:
        self.prompt = prompt
        self._logprob_kind = logprob_kind
        self._ids: Ids = array("i")
        self._has_ids = False
        self._logprobs: list[float | None] = []
        self._seen = 0
        self._model = ""
        self._counts: Counts | None = None
        self._finished = False
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None
        self._blocks: list[Block] = []
        self._parts: list[str] = []
        self._call: int | None = None
        """Index of the open tool call."""
        self._reasoning_tokens = 0
        self._versions: list[VersionSpan] = []
        self._tensors: list[Tensor] = []
        self._reply: EngineReply | None = None
        self.told_tokens = 0
        """How many tokens had come when the latest event was made of them."""

    def add(self, piece: Piece) -> list[TurnEvent]:
        if piece.prompt:
            self.prompt.read(piece.prompt)
        if piece.model:
            self._model = piece.model
        if piece.counts is not None:
            self._counts = piece.counts
        if piece.ids is not None:
            self._has_ids = True
            self._ids.extend(piece.ids)
        self._logprobs += piece.logprobs
        if piece.versions is not None:
            self._versions = piece.versions
        self._tensors += piece.tensors
        events: list[TurnEvent] = []
        delta = piece.message
        if thought := delta.thought:
            self._reasoning_tokens += len(piece.ids or ())
            self._more(Reasoning, "reasoning", thought, events)
        if delta.content:
            self._more(Text, "text", delta.content, events)
        for call in delta.tool_calls or ():
            self._more_call(call, events)
        if piece.finish_reason is not None:
            self._finish_reason = piece.finish_reason
            self._stop_reason = piece.stop_reason
        if events:
            self.told_tokens = len(self._ids)
        return events

    def finish(self) -> list[TurnEvent]:
        """The stream is over: the last block ends. Raises when the answer is not a turn."""
        if self._finish_reason is None:
            raise broke_off("the stream ended without a finish reason")
        if self._finish_reason in NOT_A_TURN:
            raise ended_early(self._finish_reason, self.reply())
        self._finished = True
        events: list[TurnEvent] = []
        self._end_block(events, cut=self._finish_reason == "length")
        self.told_tokens = len(self._ids)
        return events

    def unseen(self) -> tuple[Ids, Floats]:
        since, self._seen = self._seen, len(self._ids)
        logprobs = [math.nan if value is None else value for value in self._logprobs[since:]]
        return self._ids[since:], array("f", logprobs)

    def reply(self) -> EngineReply:
        """What there is so far; all of it once `finish` was called."""
        if self._reply is None:
            self._reply = self._made()
        return self._reply

    def _made(self) -> EngineReply:
        self._end_block([])
        tokens = checked_tokens(
            self.prompt.ids,
            self._ids if self._has_ids else None,
            self._logprobs,
            _sampled(self._counts),
        )
        if self._finished:
            self.prompt.remember(tokens.sampled_ids)
        return EngineReply(
            prompt_ids=tokens.prompt_ids,
            sampled_ids=tokens.sampled_ids,
            logprobs=tokens.logprobs,
            blocks=self._blocks,
            finish_reason=self._finish_reason if self._finished else None,
            stop_reason=self._stop_reason if self._finished else None,
            usage=usage_of(self._counts, tokens, self._reasoning_tokens),
            model=self._model,
            logprob_kind=self._logprob_kind,
            versions=self._versions,
            tensors=self._tensors,
            findings=tokens.findings,
        )

    def _more(
        self, block: type[Reasoning] | type[Text], kind: Any, text: str, events: list[TurnEvent]
    ) -> None:
        if not self._parts or not isinstance(self._blocks[-1], block):
            self._end_block(events)
            self._blocks.append(block(text=""))
            events.append(BlockStart(kind=kind))
        self._parts.append(text)
        events.append(BlockDelta(text=text))

    def _more_call(self, call: ToolCall, events: list[TurnEvent]) -> None:
        if call.index != self._call:
            if not call.function.name:
                # More of a call that text has ended: what was handed on of it cannot be taken back.
                raise broke_off(f"tool call {call.index} goes on after its end")
            self._end_block(events)
            self._call = call.index
            block = Call(id=call.id or "", name=call.function.name or "", arguments="")
            self._blocks.append(block)
            self._parts.append("")
            events.append(BlockStart(kind="call", id=block.id, name=block.name))
        if call.function.arguments:
            self._parts.append(call.function.arguments)
            events.append(BlockDelta(text=call.function.arguments))

    def _end_block(self, events: list[TurnEvent], *, cut: bool = False) -> None:
        if not self._parts:
            return
        block = self._blocks[-1]
        if isinstance(block, Call):
            block.arguments = "".join(self._parts)
        else:
            block.text = "".join(self._parts)
        self._parts = []
        self._call = None
        events.append(BlockEnd(cut=cut))
