"""Items and tools of the Responses API, for its tests."""

import json
from typing import Any

from polar_gateway.dialects import responses
from polar_gateway.dialects.turn import ModelRequest
from tests.polar_gateway.dialects.clients import turn

PARAMETERS = {"type": "object", "properties": {}}
RUN = {
    "type": "function",
    "name": "run",
    "description": "Run.",
    "strict": False,
    "parameters": PARAMETERS,
}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [{"type": "function", "name": "spawn", "parameters": PARAMETERS}],
}
FILE = {
    "type": "input_file",
    "filename": "a.txt",
    "file_data": "data:text/plain;charset=utf-8;base64,w6k=",
}
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: line+"},
}
SHELL = {"type": "local_shell"}


def normalise(*items: Any, **fields: Any) -> ModelRequest:
    return responses.normalise({"model": "m", "input": list(items) or "Hi", **fields})


def message(role: str, content: Any, **extra: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content, **extra}


def call(call_id: str, **extra: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "run", "arguments": "{}", **extra}


def output(call_id: str, content: Any = "done") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": content}


def answer_items(request: ModelRequest, *blocks: Any) -> list[dict[str, Any]]:
    items = json.loads(responses.answer(request, turn(list(blocks))))["output"]
    assert isinstance(items, list)
    return items
