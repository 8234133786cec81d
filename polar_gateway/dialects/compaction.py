"""`POST …/responses/compact`: a conversation to a shorter one that stands for it.

The answer holds the user's messages as they were and one item with a summary, which the model is
asked for. In everything else this is the Responses API, whose requests it translates by; an item of
a summary in a later request is read there.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from polar_gateway.dialects import responses
from polar_gateway.dialects.responses import (
    count_body,
    error_body,
    error_status,
    model_body,
    models_body,
    name,
    request_id_header,
    streamer,
)
from polar_gateway.dialects.responses_answers import compaction_item, usage
from polar_gateway.dialects.sse import json_bytes
from polar_gateway.dialects.turn import Match, ModelRequest, Turn

__all__ = [
    "answer",
    "count_body",
    "error_body",
    "error_status",
    "match",
    "model_body",
    "models_body",
    "name",
    "normalise",
    "request_id_header",
    "streamer",
]


def match(
    method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str]
) -> Match | None:
    if method == "POST" and path.rstrip("/").endswith("/responses/compact"):
        return Match("call")
    return None


def normalise(body: dict[str, Any]) -> ModelRequest:
    items = responses.input_items(body.get("input") or [])
    request = responses.normalise(
        {**body, "input": [*items, {"type": "compaction_trigger"}], "stream": False}
    )
    kept = [item for item in items if item.get("role") == "user"]
    return msgspec.structs.replace(request, echo={"kept": kept})


def answer(request: ModelRequest, turn: Turn) -> bytes:
    base = turn.completion_id.removeprefix("msg_")
    kept = [
        {"id": f"msg_{base}_in{index}", "status": "completed", **item, "type": "message"}
        for index, item in enumerate(request.echo["kept"])
    ]
    for item in kept:
        content = item.get("content") or []
        if isinstance(content, str):
            content = [{"type": "input_text", "text": content}]
        item["content"] = content
    return json_bytes(
        {
            "id": f"resp_{base}",
            "object": "response.compaction",
            "created_at": turn.created,
            "output": [*kept, compaction_item(turn)],
            "usage": usage(turn.usage),
        }
    )
