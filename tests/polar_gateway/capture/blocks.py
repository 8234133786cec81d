"""Chat messages as the blocks an engine's answer is read into."""

from typing import Any

from polar_gateway.dialects.turn import Block, Call, Reasoning, Text


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
