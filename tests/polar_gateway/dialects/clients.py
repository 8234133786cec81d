"""What a harness does with an answer: read the stream, keep the blocks, send them back."""

import base64
import json
from typing import Any, NamedTuple, assert_never

from polar_gateway.dialects.turn import (
    Block,
    BlockDelta,
    BlockEnd,
    BlockStart,
    Call,
    Dialect,
    ModelRequest,
    Reasoning,
    Text,
    Turn,
    TurnEnd,
    TurnEvent,
    Usage,
)

COMPLETION_ID = "msg_0123456789ab"
CREATED = 1_700_000_000


class Event(NamedTuple):
    name: str | None
    data: dict[str, Any]


def parse_sse(stream: bytes | str) -> list[Event]:
    """Events in order, comments left out; `[DONE]` must be the last."""
    text = stream.decode() if isinstance(stream, bytes) else stream
    events = []
    chunks = [chunk for chunk in text.replace("\r\n", "\n").split("\n\n") if chunk.strip()]
    for index, chunk in enumerate(chunks):
        lines = [line.partition(": ") for line in chunk.split("\n") if not line.startswith(":")]
        fields = {key: value for key, _, value in lines if key}
        if not fields:
            continue
        if fields["data"] == "[DONE]":
            assert index == len(chunks) - 1
            continue
        events.append(Event(fields.get("event"), json.loads(fields["data"])))
    return events


def turn(blocks: list[Block], finish_reason: Any = "stop", **usage: int) -> Turn:
    counts = {"prompt_tokens": 1000, "completion_tokens": 50} | usage
    return Turn(
        completion_id=COMPLETION_ID,
        created=CREATED,
        blocks=blocks,
        finish_reason=finish_reason,
        usage=Usage(**counts),
    )


def events_of(block: Block, size: int = 5, *, cut: bool = False) -> list[TurnEvent]:
    """The block as an engine streams it, its text in pieces."""
    match block:
        case Reasoning(text=text):
            start = BlockStart(kind="reasoning")
        case Text(text=text):
            start = BlockStart(kind="text")
        case Call(id=call_id, name=name, arguments=text):
            start = BlockStart(kind="call", id=call_id, name=name)
        case _:
            assert_never(block)
    deltas = [BlockDelta(text=text[at : at + size]) for at in range(0, len(text), size)]
    return [start, *deltas, BlockEnd(cut=cut)]


def stream(
    dialect: Dialect, request: ModelRequest, answered: Turn, *, haltingly: bool = False
) -> bytes:
    """`haltingly` is with signs of life and pieces of no text in between."""
    streamer = dialect.streamer(request, answered.completion_id, answered.created)
    parts = [streamer.open(answered.usage.prompt_tokens)]
    for block in answered.blocks:
        cut = answered.finish_reason == "length" and block is answered.blocks[-1]
        for event in events_of(block, cut=cut):
            if haltingly:
                parts.append(streamer.keep_alive())
            if haltingly and isinstance(event, BlockDelta):
                parts.append(streamer.event(BlockDelta(text="")))
            parts.append(streamer.event(event))
    if haltingly:
        parts.append(streamer.keep_alive())
    parts.append(streamer.event(TurnEnd(turn=answered)))
    return b"".join(parts)


class Received(NamedTuple):
    """An answer as the harness holds it: blocks, and what it appends to its history for them."""

    blocks: list[Block]
    history: list[dict[str, Any]]


def receive(dialect: Dialect, answer: bytes) -> Received:
    return _WHOLE[dialect.name](json.loads(answer))


def receive_stream(dialect: Dialect, answer: bytes | str) -> Received:
    return _STREAMED[dialect.name](parse_sse(answer))


def _anthropic_whole(message: dict[str, Any]) -> Received:
    blocks: list[Block] = []
    for block in message["content"]:
        match block["type"]:
            case "thinking":
                blocks.append(Reasoning(text=block["thinking"]))
            case "text":
                blocks.append(Text(text=block["text"]))
            case "tool_use":
                spelled = json.dumps(block["input"], ensure_ascii=False, separators=(",", ":"))
                blocks.append(Call(id=block["id"], name=block["name"], arguments=spelled))
    return Received(blocks, [{"role": "assistant", "content": message["content"]}])


def _anthropic_streamed(events: list[Event]) -> Received:
    content: list[dict[str, Any]] = []
    arguments = ""
    open_index = None
    for name, data in events:
        assert name == data["type"]
        match name:
            case "content_block_start":
                assert open_index is None
                assert data["index"] == len(content)
                open_index = data["index"]
                content.append(data["content_block"])
                arguments = ""
            case "content_block_delta":
                assert data["index"] == open_index
                match data["delta"]:
                    case {"type": "text_delta", "text": text}:
                        content[-1]["text"] += text
                    case {"type": "thinking_delta", "thinking": text}:
                        content[-1]["thinking"] += text
                    case {"type": "signature_delta", "signature": signature}:
                        content[-1]["signature"] = signature
                    case {"type": "input_json_delta", "partial_json": text}:
                        arguments += text
            case "content_block_stop":
                assert data["index"] == open_index
                open_index = None
                if content[-1]["type"] == "tool_use":
                    content[-1]["input"] = json.loads(arguments or "{}")
    assert open_index is None
    return _anthropic_whole({"content": content})


def _chat_whole(response: dict[str, Any]) -> Received:
    message = response["choices"][0]["message"]
    blocks: list[Block] = []
    if message.get("reasoning_content"):
        blocks.append(Reasoning(text=message["reasoning_content"]))
    if message["content"]:
        blocks.append(Text(text=message["content"]))
    for call in message.get("tool_calls", []):
        function = call["function"]
        blocks.append(Call(id=call["id"], name=function["name"], arguments=function["arguments"]))
    return Received(blocks, [message])


def _chat_streamed(events: list[Event]) -> Received:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: list[dict[str, Any]] = []
    for _, data in events:
        for choice in data["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            if delta.get("reasoning_content"):
                message["reasoning_content"] = (
                    message.get("reasoning_content", "") + delta["reasoning_content"]
                )
            for part in delta.get("tool_calls", []):
                if part["index"] == len(calls):
                    calls.append(
                        {"id": part["id"], "type": part["type"], "function": {**part["function"]}}
                    )
                else:
                    assert part["index"] == len(calls) - 1
                    calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    if calls:
        message["tool_calls"] = calls
    return _chat_whole({"choices": [{"message": message}]})


def _responses_items(items: list[dict[str, Any]]) -> Received:
    blocks: list[Block] = []
    for item in items:
        match item["type"]:
            case "reasoning":
                blocks.append(Reasoning(text=item["summary"][0]["text"]))
            case "message":
                blocks.append(Text(text=item["content"][0]["text"]))
            case "function_call":
                name = "__".join(filter(None, [item.get("namespace"), item["name"]]))
                blocks.append(Call(id=item["call_id"], name=name, arguments=item["arguments"]))
            case "custom_tool_call":
                spelled = json.dumps(
                    {"input": item["input"]}, ensure_ascii=False, separators=(",", ":")
                )
                blocks.append(Call(id=item["call_id"], name=item["name"], arguments=spelled))
    return Received(blocks, items)


def _responses_whole(response: dict[str, Any]) -> Received:
    return _responses_items(response["output"])


def _responses_streamed(events: list[Event]) -> Received:
    """As codex reads it: finished items only, and only before the closing event."""
    items: list[dict[str, Any]] = []
    for at, (name, data) in enumerate(events):
        assert name == data["type"]
        assert data["sequence_number"] == at
        if name == "response.output_item.done":
            assert data["output_index"] == len(items)
            items.append(data["item"])
    assert events[-1].name in ("response.completed", "response.incomplete")
    assert events[-1].data["response"]["output"] == items
    return _responses_items(items)


def _google_whole(response: dict[str, Any]) -> Received:
    content = response["candidates"][0]["content"]
    blocks: list[Block] = []
    for part in content["parts"]:
        match part:
            case {"functionCall": call}:
                spelled = json.dumps(call["args"], ensure_ascii=False, separators=(",", ":"))
                blocks.append(Call(id=call.get("id", ""), name=call["name"], arguments=spelled))
            case {"text": "", **rest} if not rest:
                pass
            case {"text": text, "thought": True}:
                blocks.append(Reasoning(text=text))
            case {"text": text}:
                blocks.append(Text(text=text))
    return Received(blocks, [content])


def _google_streamed(events: list[Event]) -> Received:
    """As Gemini CLI reads it: pieces of a text are joined, and what the first of them says beside
    the text stays; empty ones are dropped. (The CLI drops thoughts as well; others keep them.)"""
    parts: list[dict[str, Any]] = []
    for name, data in events:
        assert name is None
        for part in data["candidates"][0]["content"]["parts"]:
            last = parts[-1] if parts else {}
            if part == {"text": ""}:
                continue
            if "text" in part and "text" in last and part.get("thought") == last.get("thought"):
                last["text"] += part["text"]
            else:
                parts.append(part)
    assert "finishReason" in events[-1].data["candidates"][0]
    content = {"parts": parts or [{"text": ""}], "role": "model"}
    return _google_whole({"candidates": [{"content": content}]})


_WHOLE = {
    "anthropic": _anthropic_whole,
    "chat": _chat_whole,
    "google": _google_whole,
    "responses": _responses_whole,
}
_STREAMED = {
    "anthropic": _anthropic_streamed,
    "chat": _chat_streamed,
    "google": _google_streamed,
    "responses": _responses_streamed,
}


def sealed(item: dict[str, Any]) -> str:
    """The reasoning inside `encrypted_content`, for a test that drops everything else."""
    return base64.b64decode(item["encrypted_content"].rpartition(".")[2]).decode()
