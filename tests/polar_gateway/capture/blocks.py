"""Answers as an engine gives them, and calls as they are in the journal once they have one."""

from typing import Any

from builders.records import Completion
from polar_gateway.capture.session import OpenCall, SessionCapture
from polar_gateway.dialects.turn import Block, Call, Reasoning, Text
from polar_gateway.engines.base import EngineReply


def recorded(capture: SessionCapture, completion_id: str) -> Completion:
    """The completion as the journal tells it now."""
    found = {each.completion_id: each for each in capture.completion_session().completions}
    return found[completion_id]


def closed(
    capture: SessionCapture,
    call: OpenCall,
    reply: EngineReply,
    sampling: dict[str, Any] | None = None,
) -> Completion:
    """Ends the call; returns what the journal has of it."""
    call.close(reply, sampling or {})
    return recorded(capture, call.completion_id)


def blocks_of(message: dict[str, Any]) -> list[Block]:
    blocks: list[Block] = []
    if message.get("reasoning_content"):
        blocks.append(Reasoning(text=message["reasoning_content"]))
    if message["content"]:
        blocks.append(Text(text=message["content"]))
    for call in message.get("tool_calls", ()):
        function = call["function"]
        blocks.append(Call(id=call["id"], name=function["name"], arguments=function["arguments"]))
    return blocks


def parent_of(completion: Completion) -> str | None:
    return None if completion.parent is None else completion.parent.completion_id
