"""A conversation as the clients of each provider would send it, made from one in the engine's chat
form, in which system messages may be anywhere."""

import base64
import json
from collections.abc import Callable
from typing import Any

from tests.polar_gateway.dialects.clients import COMPLETION_ID

Message = dict[str, Any]
Tool = dict[str, Any]


def body(dialect: str, messages: list[Message], tools: list[Tool]) -> dict[str, Any]:
    """A request that asks for the conversation's next turn. Calls have ids, and arguments are
    spelled compactly."""
    return {"model": "m", **_BODIES[dialect](messages, tools)}


def _split_system(messages: list[Message]) -> tuple[str | None, list[Message]]:
    if messages and messages[0]["role"] == "system":
        return messages[0]["content"], messages[1:]
    return None, messages


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _media_type_and_data(part: dict[str, Any]) -> tuple[str, str]:
    media_type, _, data = part["image_url"]["url"].removeprefix("data:").partition(";base64,")
    return media_type, data


def _anthropic(messages: list[Message], tools: list[Tool]) -> dict[str, Any]:
    system, rest = _split_system(messages)
    sent: list[Message] = []
    for message in rest:
        match message["role"]:
            case "assistant":
                sent.append({"role": "assistant", "content": _anthropic_answer(message)})
            case "system":
                sent.append(message)
            case "tool":
                result = {
                    "type": "tool_result",
                    "tool_use_id": message["tool_call_id"],
                    "content": _anthropic_content(message["content"]),
                }
                sent.append({"role": "user", "content": [result]})
            case _:
                sent.append({"role": "user", "content": _anthropic_content(message["content"])})
    listed = [
        {
            "name": tool["function"]["name"],
            "description": tool["function"].get("description", ""),
            "input_schema": tool["function"]["parameters"],
        }
        for tool in tools
    ]
    opening = {} if system is None else {"system": [{"type": "text", "text": system}]}
    return {"max_tokens": 99, "messages": sent, "tools": listed, **opening}


def _anthropic_answer(message: Message) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if "reasoning_content" in message:
        thought = {"thinking": message["reasoning_content"], "signature": COMPLETION_ID}
        blocks.append({"type": "thinking", **thought})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", []):
        function = call["function"]
        given = json.loads(function["arguments"])
        blocks.append(
            {"type": "tool_use", "id": call["id"], "name": function["name"], "input": given}
        )
    return blocks


def _anthropic_content(content: str | list[dict[str, Any]]) -> Any:
    if isinstance(content, str):
        return content
    blocks = []
    for part in content:
        if part["type"] == "text":
            blocks.append(part)
        else:
            media_type, data = _media_type_and_data(part)
            source = {"type": "base64", "media_type": media_type, "data": data}
            blocks.append({"type": "image", "source": source})
    return blocks


def _chat(messages: list[Message], tools: list[Tool]) -> dict[str, Any]:
    return {"messages": messages, "tools": tools}


def _google(messages: list[Message], tools: list[Tool]) -> dict[str, Any]:
    system, others = _split_system(messages)
    contents: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for message in others:
        match message["role"]:
            case "assistant":
                calls = message.get("tool_calls", [])
                names |= {call["id"]: call["function"]["name"] for call in calls}
                contents.append({"role": "model", "parts": _google_answer(message)})
            case "tool":
                called = message["tool_call_id"]
                first, *rest = _parts(message["content"])
                if first["type"] != "text":
                    first, rest = {"text": ""}, [first, *rest]
                response = {
                    "id": called,
                    "name": names[called],
                    "response": {"output": first["text"]},
                }
                parts = [{"functionResponse": response}, *map(_google_part, rest)]
                contents.append({"role": "user", "parts": parts})
            case "system":
                contents.append({"role": "system", "parts": [{"text": message["content"]}]})
            case _:
                parts = [_google_part(part) for part in _parts(message["content"])]
                contents.append({"role": "user", "parts": parts})
    declared = [
        {
            "name": tool["function"]["name"],
            "description": tool["function"].get("description", ""),
            "parametersJsonSchema": tool["function"]["parameters"],
        }
        for tool in tools
    ]
    opening = {} if system is None else {"systemInstruction": {"parts": [{"text": system}]}}
    return {
        "contents": contents,
        "tools": [{"functionDeclarations": declared}],
        "generationConfig": {"thinkingConfig": {"includeThoughts": True}},
        "stream": True,
        "alt": "sse",
        **opening,
    }


def _google_answer(message: Message) -> list[dict[str, Any]]:
    signature = base64.b64encode(COMPLETION_ID.encode()).decode()
    parts: list[dict[str, Any]] = []
    if "reasoning_content" in message:
        parts.append({"text": message["reasoning_content"], "thought": True})
    if message["content"]:
        parts.append({"text": message["content"]})
    for call in message.get("tool_calls", []):
        function = call["function"]
        given = {"id": call["id"], "name": function["name"]}
        given["args"] = json.loads(function["arguments"])
        parts.append({"functionCall": given})
    if parts:
        parts[-1]["thoughtSignature"] = signature
    return parts


def _google_part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return {"text": part["text"]}
    media_type, data = _media_type_and_data(part)
    return {"inlineData": {"mimeType": media_type, "data": data}}


def _responses(messages: list[Message], tools: list[Tool]) -> dict[str, Any]:
    system, rest = _split_system(messages)
    items: list[dict[str, Any]] = []
    if system is not None:
        items.append({"role": "developer", "content": [{"type": "input_text", "text": system}]})
    for message in rest:
        match message["role"]:
            case "system":
                items.append({"role": "developer", "content": message["content"]})
            case "assistant":
                items += _responses_answer(message, len(items))
            case "tool":
                output = {
                    "call_id": message["tool_call_id"],
                    "output": _responses_content(message["content"]),
                }
                items.append({"type": "function_call_output", **output})
            case _:
                content = _responses_content(message["content"])
                items.append({"type": "message", "role": "user", "content": content})
    listed = [{"type": "function", **tool["function"]} for tool in tools]
    return {"input": items, "tools": listed, "store": False}


def _responses_answer(message: Message, at: int) -> list[dict[str, Any]]:
    """Each answer's items have the ids that we make; two answers in a row are told apart by them."""
    answer = f"{at:012x}"
    items: list[dict[str, Any]] = []
    if "reasoning_content" in message:
        summary = [{"type": "summary_text", "text": message["reasoning_content"]}]
        items.append({"type": "reasoning", "summary": summary})
    if message["content"] or not (items or message.get("tool_calls")):
        content = [{"type": "output_text", "text": message["content"]}]
        items.append({"type": "message", "role": "assistant", "content": content})
    items += [
        {"type": "function_call", "call_id": call["id"], **call["function"]}
        for call in message.get("tool_calls", [])
    ]
    return [{**item, "id": f"x_{answer}_{index}"} for index, item in enumerate(items)]


def _responses_content(content: str | list[dict[str, Any]]) -> Any:
    if isinstance(content, str):
        return content
    return [
        {"type": "input_text", "text": part["text"]}
        if part["type"] == "text"
        else {"type": "input_image", "image_url": part["image_url"]["url"]}
        for part in content
    ]


_BODIES: dict[str, Callable[[list[Message], list[Tool]], dict[str, Any]]] = {
    "anthropic": _anthropic,
    "chat": _chat,
    "google": _google,
    "responses": _responses,
}
