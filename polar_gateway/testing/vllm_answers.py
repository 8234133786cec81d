"""Answers in vLLM's documents: of the chat endpoint and of the one that knows tokens alone."""

import base64
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from polar_gateway.engines.npy import array_file
from polar_gateway.testing.calls import Fault
from polar_gateway.testing.chat_request import ApiError, ChatRequest
from polar_gateway.testing.generate_request import GenerateRequest
from polar_gateway.testing.generation import Token
from polar_gateway.testing.parsing import TurnParser
from polar_gateway.testing.policy import Sample
from polar_gateway.testing.server import Answer, ScriptedServer

_NOTHING_YET = {"logprobs": None, "finish_reason": None}
EXPERTS = 8
LAYERS = 2
EXPERTS_OF_TOKEN = 2


class ChatAnswer:
    """As /v1/chat/completions tells it, by the hermes and qwen3 parsers."""

    def __init__(
        self,
        server: ScriptedServer,
        answer: Answer,
        request: ChatRequest,
        *,
        thinking: bool,
        lossy: bool,
        routed_experts: bool,
        fingerprint: str,
    ) -> None:
        self.answer = answer
        self.streamed = request.stream
        self._server = server
        self._call = answer.call
        self._request = request
        self._shows = _shows(answer.fault, ids=request.return_token_ids, logprobs=request.logprobs)
        self._parser = TurnParser(thinking=thinking, tools=request.parse_tools)
        self._lossy = lossy
        self._routed_experts = routed_experts
        self._fingerprint = fingerprint

    async def document(self) -> dict[str, Any]:
        tokens = [token async for token in self.answer.tokens()]
        for token in tokens:
            self._parse(token)
        message = self._conclude(called=None)
        call = self._call
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(tokens),
            "finish_reason": call.finish_reason,
            "stop_reason": self.answer.stop_reason,
            "token_ids": call.token_ids if "token_ids" in self._shows else None,
            "routed_experts": experts_of(self.answer) if self._routed_experts else None,
        }
        return {
            "id": call.request_id,
            "object": "chat.completion",
            "created": int(call.received_at),
            "model": self._server.model,
            "choices": [choice],
            "service_tier": None,
            "system_fingerprint": self._fingerprint,
            "usage": {**self._usage(), "prompt_tokens_details": None},
            "prompt_logprobs": None,
            "prompt_token_ids": self._prompt_ids(),
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    async def events(self) -> AsyncIterator[bytes]:
        """A first chunk with the prompt's ids, then a chunk a token, then usage if it was asked
        for, then the mark of the end."""
        yield self._chunk(
            [{"index": 0, "delta": {"role": "assistant", "content": ""}, **_NOTHING_YET}],
            prompt_token_ids=self._prompt_ids(),
            prompt_text=None,
        )
        ended = False
        async for token in self.answer.tokens():
            delta = self._parse(token)
            logprobs = self._logprobs([token])
            ended = self.answer.complete
            shown = delta or (not self._lossy and (logprobs or "token_ids" in self._shows))
            if shown or ended:
                ids = [token.token_id]
                yield self._piece(delta, ids, logprobs, ended=ended)
        if self.answer.cut_off:
            return
        if self.answer.failed:
            error = ApiError(500, self.answer.fault.message, "InternalServerError")
            yield msgspec.json.encode(error.document)
        else:
            if not ended:  # aborted before its next token
                yield self._piece({}, [], None, ended=True)
            if self._request.include_usage:
                fingerprint = self._fingerprint
                yield self._chunk([], usage=self._usage(), system_fingerprint=fingerprint)
        yield b"[DONE]"

    def _piece(
        self,
        delta: dict[str, Any],
        ids: list[int],
        logprobs: dict[str, Any] | None,
        *,
        ended: bool,
    ) -> bytes:
        choice: dict[str, Any] = {
            "index": 0,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": None,
            "token_ids": ids if "token_ids" in self._shows else None,
        }
        more: dict[str, Any] = {}
        if ended:
            self._conclude(called=self._parser.called)
            choice["finish_reason"] = self._call.finish_reason
            choice["stop_reason"] = self.answer.stop_reason
            if not self._request.include_usage:
                more["system_fingerprint"] = self._fingerprint
        return self._chunk([choice], **more)

    def _parse(self, token: Token) -> dict[str, Any]:
        return self._parser.feed(self._server.tokenizer.bytes_of[token.token_id], token.text)

    def _conclude(self, *, called: bool | None) -> dict[str, Any]:
        """Record how it ended. `called` says whether calls went out, None that the message will."""
        message = self._parser.message()
        if called is None:
            called = "tool_calls" in message
        reason = self.answer.finish_reason
        self._call.finish_reason = "tool_calls" if called and reason == "stop" else reason
        self._call.message = message
        return message

    def _prompt_ids(self) -> list[int] | None:
        return self._call.prompt_token_ids if "prompt_token_ids" in self._shows else None

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        if "logprobs" not in self._shows:
            return None
        top = self._request.top_logprobs
        return {"content": [spelled_entry(self._server, token, top) for token in tokens]}

    def _usage(self) -> dict[str, Any]:
        return {
            **usage_of(self.answer),
            "completion_tokens_details": {"reasoning_tokens": self._parser.reasoning_tokens},
        }

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return msgspec.json.encode(
            {
                "id": self._call.request_id,
                "object": "chat.completion.chunk",
                "created": int(self._call.received_at),
                "model": self._server.model,
                "choices": choices,
                **more,
            }
        )


class GenerateAnswer:
    """As /inference/v1/generate tells it: tokens, and which weights sampled them."""

    def __init__(
        self,
        server: ScriptedServer,
        answer: Answer,
        request: GenerateRequest,
        *,
        routed_experts: bool,
        sampling_mask: bool,
    ) -> None:
        self.answer = answer
        self.streamed = request.stream
        self._server = server
        self._call = answer.call
        self._request = request
        self._shows = _shows(answer.fault, ids=True, logprobs=request.logprobs is not None)
        self._routed_experts = routed_experts
        self._sampling_mask = sampling_mask

    async def document(self) -> dict[str, Any]:
        tokens = [token async for token in self.answer.tokens()]
        self._call.finish_reason = self.answer.finish_reason
        return {
            "request_id": self._call.request_id,
            "model": self._server.model,
            "created": int(self._call.received_at),
            "usage": self._usage(),
            "prompt_logprobs": None,
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": self._prompt_ids(),
            "mm_placeholders": None,
            "metrics": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "output_mode": "tokens",
            "choices": [self._choice(tokens, ended=True)],
        }

    async def events(self) -> AsyncIterator[bytes]:
        first: dict[str, Any] = {"prompt_token_ids": self._prompt_ids()}
        ended = False
        async for token in self.answer.tokens():
            ended = self.answer.complete
            yield self._chunk([self._choice([token], ended=ended)], **first)
            first = {}
        if self.answer.cut_off:
            return
        if self.answer.failed:
            error = ApiError(500, self.answer.fault.message, "InternalServerError")
            yield msgspec.json.encode(error.document)
        else:
            if not ended:
                yield self._chunk([self._choice([], ended=True)], **first)
            if self._request.include_usage:
                yield self._chunk([], usage=self._usage())
        yield b"[DONE]"

    def _choice(self, tokens: list[Token], *, ended: bool) -> dict[str, Any]:
        if ended:
            self._call.finish_reason = self.answer.finish_reason
        shows_experts = ended and self._routed_experts
        return {
            "index": 0,
            "finish_reason": self.answer.finish_reason if ended else None,
            "stop_reason": self.answer.stop_reason if ended else None,
            "token_ids": [t.token_id for t in tokens] if "token_ids" in self._shows else None,
            "routed_experts": experts_of(self.answer) if shows_experts else None,
            "sampling_mask": self._masks(tokens) if self._sampling_mask else None,
            "weight_versions": self._call.weight_versions if ended else None,
            "logprobs": self._logprobs(tokens),
        }

    def _masks(self, tokens: list[Token]) -> list[list[int]]:
        """Of each token, among which it was sampled."""
        policy = self._server.policy
        return [
            sorted({t.token_id, *(s.token_id for s in policy.top(t.context, 4))}) for t in tokens
        ]

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        if "logprobs" not in self._shows:
            return None
        return {"content": [self._entry(token) for token in tokens]}

    def _entry(self, token: Token) -> dict[str, Any]:
        policy = self._server.policy
        sampled = {"token_id": token.token_id, "logprob": token.logprob, "rank": 1}
        top = policy.top(token.context, self._request.logprobs or 0, token.scale)
        others = [
            {"token_id": s.token_id, "logprob": s.logprob, "rank": rank}
            for rank, s in enumerate(top, start=1)
        ]
        return {**sampled, "top_logprobs": others or [sampled]}

    def _prompt_ids(self) -> list[int] | None:
        shown = self._request.return_token_ids and "prompt_token_ids" in self._shows
        return self._call.prompt_token_ids if shown else None

    def _usage(self) -> dict[str, Any]:
        return {**usage_of(self.answer), "completion_tokens_details": None}

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        chunk = {"request_id": self._call.request_id, "usage": None, "output_mode": "tokens"}
        return msgspec.json.encode({**chunk, "choices": choices, **more})


def _shows(fault: Fault, *, ids: bool, logprobs: bool) -> set[str]:
    """Which token data an answer has."""
    shown = {"prompt_token_ids", "token_ids"} if ids else set()
    return (shown | ({"logprobs"} if logprobs else set())) - set(fault.omit)


def usage_of(answer: Answer) -> dict[str, Any]:
    prompt, sampled = len(answer.call.prompt_token_ids), len(answer.call.token_ids)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + sampled,
        "completion_tokens": sampled,
    }


def spelled_entry(server: ScriptedServer, token: Token, top: int) -> dict[str, Any]:
    """A token's log probability beside its text."""
    likeliest: Sequence[Sample] = server.policy.top(token.context, top, token.scale)
    return {
        **_spelled(server, token.token_id, token.logprob, token.text),
        "top_logprobs": [_spelled(server, *sample) for sample in likeliest],
    }


def _spelled(
    server: ScriptedServer, token_id: int, logprob: float, completes: str = ""
) -> dict[str, Any]:
    """A part of a UTF-8 sequence has no text, but for the last, which has the character that it
    `completes`."""
    spelled = server.tokenizer.bytes_of[token_id]
    try:
        text = spelled.decode()
    except UnicodeDecodeError:
        text, spelled = completes, completes.encode()
    return {"token": text, "logprob": logprob, "bytes": list(spelled)}


def routing_of(answer: Answer) -> tuple[tuple[int, int, int], bytes]:
    """Shape and values of the experts that each token but the last went through."""
    ids = [*answer.call.prompt_token_ids, *answer.call.token_ids][:-1]
    routed = [(i + layer + k) % EXPERTS for i in ids for layer in range(LAYERS) for k in range(2)]
    return (len(ids), LAYERS, EXPERTS_OF_TOKEN), bytes(routed)


def experts_of(answer: Answer) -> str:
    return base64.b64encode(array_file("|u1", *routing_of(answer))).decode()
