"""The agent's side and the model's side of a benchmark session, turn by turn, as bytes.

Every turn extends the one before it: the messages by the answer and a tool's result, the prompt's
ids by the sampled ones and an interstitial. All sessions say the same, so everything is made once.
"""

import json
import struct
from functools import cache
from random import Random
from typing import Any, NamedTuple

END_OF_TURN, LINE_BREAK = 151_645, 198
"""What every answer ends with, and what the template writes behind that."""
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


class Said(NamedTuple):
    """One answer: text, and a call of the tool `bash`."""

    content: str
    call_id: str
    arguments: str
    sampled: list[int]


class Turn(NamedTuple):
    """One call: what each dialect's client sends, and what the engine answers."""

    requests: dict[str, bytes]
    """By dialect and mode, such as "chat/stream"."""
    answer: bytes
    events: list[bytes]
    """The same answer streamed: one token an event, after one for the prompt."""
    prompt_ids: bytes
    """The rendering of the request's messages, a JSON array."""
    closed_ids: bytes
    """The rendering of its messages and the answer, without the beginning of another one."""


@cache
def turns(size: Size, count: int) -> list[Turn]:
    growth = size.sampled_tokens + size.interstitial_tokens
    prompt = _ids(0, size.prompt_tokens - (count - 1) * growth // 2)
    made = []
    for number in range(count):
        end = len(prompt) + size.sampled_tokens
        sampled = [*_ids(len(prompt), end - 1), END_OF_TURN]
        said = Said(_said(size, number), f"call-{number}", _arguments(size, number), sampled)
        made.append(turn(_chat_request(size, number, count), prompt, said))
        prompt = [*prompt, *sampled, LINE_BREAK, *_ids(end + 1, end + size.interstitial_tokens)]
    return made


def turn(chat: dict[str, Any], prompt: list[int], said: Said) -> Turn:
    """The turn whose request is `chat`, in the words of chat completions."""
    requests = {}
    for mode in ("plain", "stream"):
        streamed = {**chat, "stream": mode == "stream"}
        if mode == "stream":
            streamed["stream_options"] = {"include_usage": True}
        requests[f"chat/{mode}"] = _json(streamed)
        requests[f"messages/{mode}"] = _json(_as_messages(streamed))
    return Turn(
        requests,
        *_answers(prompt, said),
        prompt_ids=_json(prompt),
        closed_ids=_json([*prompt, *said.sampled, LINE_BREAK]),
    )


def mark(conversation: str, number: int) -> str:
    """Stands in the last message of a turn's request, and in the call that answers it."""
    return f"turn-{conversation}-{number:03d}"


def marked(body: bytes) -> tuple[str, int] | None:
    """Conversation and turn of a request, whatever dialect it is in; None of one that is no turn."""
    at = body.rfind(b"turn-") + 5
    if at < 5:
        return None
    conversation, rest = body[at : at + 20].split(b"-", 1)
    return conversation.decode(), int(rest[:3])


def _ids(start: int, end: int) -> list[int]:
    return [(position * 7919 + 13) % 151_000 for position in range(start, end)]


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _prose(seed: object, length: int) -> str:
    chance = Random(str(seed))
    return " ".join(chance.choices(_WORDS, k=length // 4 + 1))[:length]


def _arguments(size: Size, number: int) -> str:
    return json.dumps({"command": f"grep -rn {mark(size.name, number)} src | head"})


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
                    "function": {"name": "bash", "arguments": _arguments(size, number)},
                }
            ],
        },
        {
            "role": "tool",
            "tool_call_id": f"call-{number}",
            "content": f"{_prose(('result', number), size.interstitial_tokens * 4)} {mark(size.name, number + 1)}",
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


def _answers(prompt: list[int], said: Said) -> tuple[bytes, list[bytes]]:
    """Whole and streamed."""
    sampled = said.sampled
    usage = {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(sampled),
        "total_tokens": len(prompt) + len(sampled),
    }
    common = {"id": "chatcmpl-bench", "created": 1_800_000_000, "model": "bench"}
    logprobs = [_logprob(token, len(prompt) + number) for number, token in enumerate(sampled)]
    call = {"name": "bash", "arguments": said.arguments}
    whole = {
        **common,
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": said.content,
                    "tool_calls": [{"id": said.call_id, "type": "function", "function": call}],
                },
                "logprobs": {"content": logprobs},
                "finish_reason": "tool_calls",
                "stop_reason": None,
                "token_ids": sampled,
            }
        ],
        "usage": usage,
        "prompt_token_ids": prompt,
    }

    def chunk(delta: dict[str, Any], number: int | None, **more: Any) -> bytes:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": None if number is None else {"content": [logprobs[number]]},
            "finish_reason": more.pop("finish_reason", None),
            "token_ids": None if number is None else [sampled[number]],
        }
        return _event({**common, "object": "chat.completion.chunk", "choices": [choice], **more})

    events = [chunk({"role": "assistant", "content": ""}, None, prompt_token_ids=prompt)]
    events += [chunk(delta, number) for number, delta in enumerate(_deltas(said))]
    events.append(chunk({}, len(sampled) - 1, finish_reason="tool_calls"))
    last = {**common, "object": "chat.completion.chunk", "choices": [], "usage": usage}
    events[-1] += _event(last) + b"data: [DONE]\n\n"
    return _json(whole), events


def _deltas(said: Said) -> list[dict[str, Any]]:
    """The answer in one piece for each token but the last: text first, a tool call at the end."""
    in_call = 12
    text, texts = said.content, len(said.sampled) - 1 - in_call
    step = -(-len(text) // texts)
    deltas: list[dict[str, Any]] = [
        {"content": text[start * step : (start + 1) * step]} for start in range(texts)
    ]
    head = {"index": 0, "id": said.call_id, "type": "function", "function": {"name": "bash"}}
    deltas.append({"tool_calls": [head]})
    arguments, pieces = said.arguments, in_call - 1
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


def _logprob(token: int, position: int) -> dict[str, Any]:
    """As engines write a float32: with all the digits that it has as a double."""
    text = f" t{token % 1000}"
    (logprob,) = struct.unpack("f", struct.pack("f", -Random(token * position).expovariate(1.0)))
    return {
        "token": text,
        "logprob": logprob,
        "bytes": list(text.encode()),
        "top_logprobs": [],
    }
