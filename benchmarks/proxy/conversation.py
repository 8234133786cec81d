"""The agent's side and the model's side of a benchmark session, turn by turn, as bytes.

Every turn extends the one before it: the messages by the answer and a tool's result, the prompt's
ids by the sampled ones and an interstitial. All sessions say the same, so everything is made once.
"""

import json
from functools import cache
from random import Random
from typing import Any, NamedTuple

_WORDS = ["file", "path", "error", "module", "return", "value", "test", "function", "import"]


class Size(NamedTuple):
    """How big the calls of a session are; figures are the mean over its turns."""

    name: str
    request_bytes: int
    prompt_tokens: int
    sampled_tokens: int
    interstitial_tokens: int
    history: int
    """Tool calls that the first turn's request already holds."""


SMALL = Size("small", 6_000, 500, 100, 10, 1)
LARGE = Size("large", 126_000, 30_000, 300, 100, 40)
SIZES = (SMALL, LARGE)


class Turn(NamedTuple):
    """One call: what each dialect's client sends, and what the engine answers."""

    requests: dict[str, bytes]
    """By dialect and mode, such as "chat/stream"."""
    answer: bytes
    events: list[bytes]
    """The same answer streamed: one token an event, after one for the prompt."""


@cache
def turns(size: Size, count: int) -> list[Turn]:
    return [_turn(size, number, count) for number in range(count)]


def turn_number(body: bytes) -> int:
    """Which turn a request is, whatever dialect it is in."""
    at = body.rfind(b"turn-")
    return int(body[at + 5 : at + 8])


def _turn(size: Size, number: int, count: int) -> Turn:
    growth = size.sampled_tokens + size.interstitial_tokens
    prompt_length = size.prompt_tokens + (2 * number - (count - 1)) * growth // 2
    prompt = _ids(0, prompt_length)
    sampled = _ids(prompt_length, prompt_length + size.sampled_tokens)
    chat = _chat_request(size, number, count)
    requests = {}
    for mode in ("plain", "stream"):
        streamed = {**chat, "stream": mode == "stream"}
        if mode == "stream":
            streamed["stream_options"] = {"include_usage": True}
        requests[f"chat/{mode}"] = _json(streamed)
        requests[f"messages/{mode}"] = _json(_as_messages(streamed))
    return Turn(requests, *_answers(size, number, prompt, sampled))


def _ids(start: int, end: int) -> list[int]:
    return [(position * 7919 + 13) % 151_000 for position in range(start, end)]


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _prose(seed: object, length: int) -> str:
    chance = Random(str(seed))
    return " ".join(chance.choices(_WORDS, k=length // 4 + 1))[:length]


def _arguments(number: int) -> str:
    return json.dumps({"command": f"grep -rn turn-{number:03d} src | head"})


def _said(size: Size, number: int) -> str:
    return _prose(("said", size.name, number), size.sampled_tokens * 3)


def _chat_request(size: Size, number: int, count: int) -> dict[str, Any]:
    """Padded so that the middle turn has the size's bytes."""

    def request(padding: int, calls: int) -> dict[str, Any]:
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": _prose("system", size.request_bytes // 6 + padding // 2)},
            {"role": "user", "content": _prose("user", 400 + padding - padding // 2)},
        ]
        for call in range(calls):
            messages += _exchange(size, call)
        return {"model": "bench", "messages": messages, "tools": _tools(size), "max_tokens": 4096}

    middle = size.history + (count - 1) // 2
    padding = max(0, size.request_bytes - len(_json(request(0, middle))))
    return request(padding, size.history + number)


def _exchange(size: Size, call: int) -> list[dict[str, Any]]:
    """An answer of the model and what the agent's tool made of it."""
    number = call - size.history
    return [
        {
            "role": "assistant",
            "content": _said(size, number),
            "tool_calls": [
                {
                    "id": f"call-{number}",
                    "type": "function",
                    "function": {"name": "bash", "arguments": _arguments(number)},
                }
            ],
        },
        {
            "role": "tool",
            "tool_call_id": f"call-{number}",
            "content": f"{_prose(('result', number), size.interstitial_tokens * 4)} turn-{number + 1:03d}",
        },
    ]


def _tools(size: Size) -> list[dict[str, Any]]:
    schema = {
        "type": "object",
        "properties": {"command": {"type": "string"}},
        "required": ["command"],
    }
    names = ["bash", "read", "write", "edit", "glob", "grep", "agent"]
    return [
        {
            "type": "function",
            "function": {
                "name": tool,
                "description": _prose(tool, size.request_bytes // 50),
                "parameters": schema,
            },
        }
        for tool in names
    ]


def _as_messages(chat: dict[str, Any]) -> dict[str, Any]:
    """The same request in Anthropic's words."""
    messages: list[dict[str, Any]] = []
    for message in chat["messages"][1:]:
        if message["role"] == "tool":
            block = {
                "type": "tool_result",
                "tool_use_id": message["tool_call_id"],
                "content": message["content"],
            }
            messages.append({"role": "user", "content": [block]})
        elif message["role"] == "assistant":
            call = message["tool_calls"][0]
            blocks = [
                {"type": "text", "text": message["content"]},
                {
                    "type": "tool_use",
                    "id": call["id"],
                    "name": call["function"]["name"],
                    "input": json.loads(call["function"]["arguments"]),
                },
            ]
            messages.append({"role": "assistant", "content": blocks})
        else:
            messages.append({"role": "user", "content": message["content"]})
    return {
        "model": chat["model"],
        "system": [{"type": "text", "text": chat["messages"][0]["content"]}],
        "messages": messages,
        "tools": [
            {
                "name": tool["function"]["name"],
                "description": tool["function"]["description"],
                "input_schema": tool["function"]["parameters"],
            }
            for tool in chat["tools"]
        ],
        "max_tokens": chat["max_tokens"],
        "stream": chat["stream"],
    }


def _answers(
    size: Size, number: int, prompt: list[int], sampled: list[int]
) -> tuple[bytes, list[bytes]]:
    usage = {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(sampled),
        "total_tokens": len(prompt) + len(sampled),
    }
    common = {"id": "chatcmpl-bench", "created": 1_800_000_000, "model": "bench"}
    call = {"name": "bash", "arguments": _arguments(number)}
    whole = {
        **common,
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": _said(size, number),
                    "tool_calls": [{"id": f"call-{number}", "type": "function", "function": call}],
                },
                "logprobs": {"content": [_logprob(token) for token in sampled]},
                "finish_reason": "tool_calls",
                "stop_reason": None,
                "token_ids": sampled,
            }
        ],
        "usage": usage,
        "prompt_token_ids": prompt,
    }

    def chunk(delta: dict[str, Any], tokens: list[int], **more: Any) -> bytes:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": {"content": [_logprob(token) for token in tokens]} if tokens else None,
            "finish_reason": more.pop("finish_reason", None),
            "token_ids": tokens or None,
        }
        return _event({**common, "object": "chat.completion.chunk", "choices": [choice], **more})

    events = [chunk({"role": "assistant", "content": ""}, [], prompt_token_ids=prompt)]
    deltas = _deltas(size, number, len(sampled), call)
    for token, delta in zip(sampled[:-1], deltas, strict=True):
        events.append(chunk(delta, [token]))
    events.append(chunk({}, sampled[-1:], finish_reason="tool_calls"))
    last = {**common, "object": "chat.completion.chunk", "choices": [], "usage": usage}
    events[-1] += _event(last) + b"data: [DONE]\n\n"
    return _json(whole), events


def _deltas(size: Size, number: int, tokens: int, call: dict[str, str]) -> list[dict[str, Any]]:
    """The answer in one piece for each token but the last: text first, a tool call at the end."""
    in_call = 12
    text, texts = _said(size, number), tokens - 1 - in_call
    step = -(-len(text) // texts)
    deltas: list[dict[str, Any]] = [
        {"content": text[start * step : (start + 1) * step]} for start in range(texts)
    ]
    head = {"index": 0, "id": f"call-{number}", "type": "function", "function": {"name": "bash"}}
    deltas.append({"tool_calls": [head]})
    arguments, pieces = call["arguments"], in_call - 1
    step = -(-len(arguments) // pieces)
    deltas += [
        {
            "tool_calls": [
                {"index": 0, "function": {"arguments": arguments[at * step : (at + 1) * step]}}
            ]
        }
        for at in range(pieces)
    ]
    return deltas


def _event(payload: dict[str, Any]) -> bytes:
    return b"data: " + _json(payload) + b"\n\n"


def _logprob(token: int) -> dict[str, Any]:
    text = f" t{token % 1000}"
    return {
        "token": text,
        "logprob": -(token % 997) / 500,
        "bytes": list(text.encode()),
        "top_logprobs": [],
    }
