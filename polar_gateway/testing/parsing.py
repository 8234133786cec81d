"""What vLLM's qwen3 reasoning parser and hermes tool parser make of sampled tokens.

A turn begins inside its reasoning, which `</think>` or a `<tool_call>` ends. Of a call the name goes
out as soon as it is complete and the arguments piece by piece, in the model's own spelling; only a
whole answer spells them anew. Text between and after calls is dropped.
"""

import json
import re
import secrets
from typing import Any, Literal

import msgspec

State = Literal["reasoning", "content", "call"]
_NAME = re.compile(r'"name"\s*:\s*"([^"]+)"')
_ARGUMENTS = re.compile(r'"arguments"\s*:\s*')


def new_call_id() -> str:
    return f"chatcmpl-tool-{secrets.token_hex(8)}"


class _Call(msgspec.Struct):
    """One `<tool_call>` and what of it has gone out."""

    id: str
    text: str = ""
    named: bool = False
    sent: str = ""
    """The argument text so far."""


class TurnParser:
    """Fed one token at a time; `delta` values are those of a streamed chunk."""

    def __init__(self, *, thinking: bool, tools: bool) -> None:
        self._state: State = "reasoning" if thinking else "content"
        self._tools = tools
        self._calls: list[_Call] = []
        self._reasoning = ""
        self._content = ""
        self._markup = ""
        """The content as it would read if no call in it could be parsed."""
        self.reasoning_tokens = 0
        """Without markup and the end of the turn."""

    def feed(self, token: bytes, text: str) -> dict[str, Any]:
        """The next token: its bytes, by which markup is known, and the text that it completes."""
        if token == b"<think>" and self._state == "reasoning":
            return {}
        if token == b"</think>" and self._state == "reasoning":
            self._state = "content"
            return {}
        if token == b"</think>" and self._state == "content":
            return {"content": text}  # a whole answer drops it
        if self._tools and token == b"<tool_call>" and self._state != "call":
            self._state = "call"
            self._calls.append(_Call(id=new_call_id()))
            self._markup += text
            return {}
        if self._state == "reasoning":
            self.reasoning_tokens += token != b"<|im_end|>"
            self._reasoning += text
            return {"reasoning": text} if text else {}
        self._markup += text
        if self._state == "content":
            if self._calls or not text:
                return {}
            self._content += text
            return {"content": text}
        if token == b"</tool_call>":
            self._state = "content"
            return {}
        return self._call_delta(text)

    def _call_delta(self, text: str) -> dict[str, Any]:
        index, call = len(self._calls) - 1, self._calls[-1]
        call.text += text
        deltas: list[dict[str, Any]] = []
        if not call.named:
            name = _NAME.search(call.text)
            if name is None:
                return {}
            call.named = True
            function = {"name": name.group(1)}
            deltas.append({"id": call.id, "type": "function", "index": index, "function": function})
        arguments = _argument_text(call.text)
        if len(arguments) > len(call.sent):
            piece, call.sent = arguments[len(call.sent) :], arguments
            deltas.append({"index": index, "function": {"arguments": piece}})
        return {"content": None, "tool_calls": deltas} if deltas else {}

    @property
    def called(self) -> bool:
        return any(call.named for call in self._calls)

    def message(self) -> dict[str, Any]:
        """The whole answer, `tool_calls` only where there are some."""
        calls = self._parsed_calls()
        content = self._content if calls else self._markup
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content.strip() or (content and not calls) else None,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": self._reasoning or None,
        }
        if calls:
            message["tool_calls"] = calls
        return message

    def _parsed_calls(self) -> list[dict[str, Any]]:
        """All calls, or none when one of them is not valid."""
        parsed = []
        for call in self._calls:
            try:
                document = json.loads(call.text)
                function = {
                    "name": document["name"],
                    "arguments": json.dumps(document["arguments"], ensure_ascii=False),
                }
            except (json.JSONDecodeError, KeyError, TypeError):
                return []
            parsed.append({"id": call.id, "type": "function", "function": function})
        return parsed


def thinking_open(prompt: str) -> bool:
    """Whether an answer to the prompt begins inside its reasoning."""
    return "</think>" not in prompt.rpartition("<|im_start|>assistant\n")[2]


def _argument_text(call: str) -> str:
    """The arguments in the text of an unfinished call; without the brace that closes the call."""
    begin = _ARGUMENTS.search(call)
    if begin is None:
        return ""
    arguments = call[begin.end() :]
    try:
        json.loads(call)
    except json.JSONDecodeError:
        return arguments.rstrip()
    return arguments.rstrip().removesuffix("}").rstrip()
