"""Answers in SGLang's documents: those of its chat route, whole and streamed."""

import base64
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from polar_gateway.testing.chat_request import ChatRequest
from polar_gateway.testing.generation import Token
from polar_gateway.testing.parsing import TurnParser
from polar_gateway.testing.server import Answer, ScriptedServer
from polar_gateway.testing.vllm_answers import routing_of, spelled_entry


class Shown(msgspec.Struct):
    """The fields by which a request says what of the tokens it wants to see."""

    return_prompt_token_ids: bool = False
    return_token_ids: bool = False
    return_meta_info: bool = False
    return_input_ids_in_sglext: bool = False
    return_output_ids_in_sglext: bool = False
    return_routed_experts: bool = False


class ChatAnswer:
    """Ids beside the message, or in a stream's last chunks; reasoning as `reasoning_content`."""

    def __init__(
        self,
        server: ScriptedServer,
        answer: Answer,
        request: ChatRequest,
        shown: Shown,
        *,
        parser: TurnParser | None,
        spans: bool,
    ) -> None:
        """Without a `parser` all that is sampled is text."""
        self.answer = answer
        self.streamed = request.stream
        self._server = server
        self._call = answer.call
        self._request = request
        self._shown = shown
        self._spans = spans
        self._parser = parser
        self._text = ""

    async def document(self) -> dict[str, Any]:
        tokens = [token async for token in self.answer.tokens()]
        for token in tokens:
            self._parse(token)
        message = self._conclude()
        call, shown, omitted = self._call, self._shown, self.answer.fault.omit
        choice: dict[str, Any] = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(tokens),
            "finish_reason": call.finish_reason,
            "matched_stop": self._matched_stop(),
        }
        shows_prompt = shown.return_prompt_token_ids or shown.return_token_ids
        if shows_prompt and "prompt_token_ids" not in omitted:
            choice["prompt_token_ids"] = call.prompt_token_ids
        if shown.return_token_ids and "token_ids" not in omitted:
            choice["response_token_ids"] = call.token_ids
        if shown.return_meta_info:
            choice["meta_info"] = self._meta_info(tokens)
        return {
            "id": call.request_id,
            "object": "chat.completion",
            "created": int(call.received_at),
            "model": self._server.model,
            "choices": [choice],
            "usage": self._usage(),
            "metadata": {"weight_version": self._server.weight_version},
        }

    async def events(self) -> AsyncIterator[bytes]:
        """A first chunk with the role, then one a token that says something; the ids at the end."""
        first = True
        withheld: list[Token] = []
        async for token in self.answer.tokens():
            if first:
                yield self._piece({"role": "assistant", "content": ""})
                first = False
            delta = self._parse(token)
            withheld.append(token)
            if delta:
                yield self._piece(delta, self._logprobs(withheld))
                withheld = []
        if self.answer.cut_off:
            return
        if self.answer.failed:
            error = {"object": "error", "message": self.answer.fault.message, "code": 500}
            yield msgspec.json.encode({"error": {**error, "type": "INTERNAL_SERVER_ERROR"}})
            yield b"[DONE]"
            return
        if withheld:
            yield self._piece({}, self._logprobs(withheld))
        self._conclude()
        yield self._piece({}, finish_reason=self._call.finish_reason)
        extension = self._extension()
        if extension:
            yield self._chunk([], sglext=extension)
        if self._request.include_usage:
            yield self._chunk([], usage=self._usage())
        yield b"[DONE]"

    def _parse(self, token: Token) -> dict[str, Any]:
        self._text += token.text
        if self._parser is None:
            return {"content": token.text} if token.text else {}
        spelled = self._server.tokenizer.bytes_of[token.token_id]
        delta = self._parser.feed(spelled, token.text)
        if "reasoning" in delta:
            return {"reasoning_content": delta["reasoning"]}
        return delta

    def _conclude(self) -> dict[str, Any]:
        """Record how it ended; the message as SGLang has it."""
        parsed: dict[str, Any] = {"content": self._text, "reasoning": None}
        if self._parser is not None:
            parsed = self._parser.message()
        calls = parsed.get("tool_calls")
        reason = self.answer.finish_reason
        self._call.finish_reason = "tool_calls" if calls and reason == "stop" else reason
        message = {
            "role": "assistant",
            "content": parsed["content"] or "",
            "reasoning_content": parsed["reasoning"],
            "tool_calls": calls,
        }
        self._call.message = message
        return message

    def _matched_stop(self) -> int | str | None:
        if self.answer.finish_reason != "stop":
            return None
        return self.answer.stop_reason or self._call.token_ids[-1]

    def _meta_info(self, tokens: list[Token]) -> dict[str, Any]:
        call, version = self._call, self._server.weight_version
        reason: dict[str, Any] = {"type": self.answer.finish_reason}
        if reason["type"] == "stop":
            reason["matched"] = self._matched_stop()
        meta: dict[str, Any] = {
            "id": call.request_id,
            "finish_reason": reason,
            "prompt_tokens": len(call.prompt_token_ids),
            "completion_tokens": len(call.token_ids),
            "cached_tokens": 0,
            "weight_version": version,
        }
        if self._spans:
            meta["weight_versions"] = call.weight_versions
        if self._request.logprobs and "logprobs" not in self.answer.fault.omit:
            meta["output_token_logprobs"] = [(t.logprob, t.token_id, t.text) for t in tokens]
        if self._shown.return_routed_experts:
            meta["routed_experts"] = self._routed_experts()
        return meta

    def _routed_experts(self) -> str:
        """Four bytes an expert, without a word on how many layers there are."""
        _, routed = routing_of(self.answer)
        return base64.b64encode(b"".join(i.to_bytes(4, "little") for i in routed)).decode()

    def _extension(self) -> dict[str, Any]:
        call, shown, omitted = self._call, self._shown, self.answer.fault.omit
        extension: dict[str, Any] = {}
        if shown.return_input_ids_in_sglext and "prompt_token_ids" not in omitted:
            extension["input_ids"] = call.prompt_token_ids
        if shown.return_output_ids_in_sglext and "token_ids" not in omitted:
            extension["output_ids"] = [call.token_ids]
        return extension

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        if not self._request.logprobs or "logprobs" in self.answer.fault.omit:
            return None
        top = self._request.top_logprobs
        return {"content": [spelled_entry(self._server, token, top) for token in tokens]}

    def _usage(self) -> dict[str, Any]:
        prompt, sampled = len(self._call.prompt_token_ids), len(self._call.token_ids)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + sampled,
            "completion_tokens": sampled,
            "prompt_tokens_details": None,
            "reasoning_tokens": self._parser.reasoning_tokens if self._parser else 0,
        }

    def _piece(
        self,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        *,
        finish_reason: str | None = None,
    ) -> bytes:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "matched_stop": self._matched_stop() if finish_reason else None,
        }
        return self._chunk([choice])

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
