"""What Gemini CLI and its descendant Qwen Code have in common."""

import re
from typing import Any

from harness_adapters.base import MCPServerSpec

TURN_LIMIT_STATUS = 53
"""The exit status of a run that reached its turn limit."""

COMMAND = "instruction"
"""Name of the custom command that holds an instruction."""

_MENTION = re.compile(r"@[^\s,;!?()\[\]{}]")

_FILLED_IN = ("{{args}}", "!{", "@{")


def mcp_server(server: MCPServerSpec, **more: Any) -> dict[str, Any]:
    """An entry of `mcpServers` in their settings; `more` goes into it beside."""
    if server.transport == "stdio":
        return {"command": server.command, "args": server.args, "trust": True, **more}
    address = "httpUrl" if server.transport == "streamable-http" else "url"
    return {address: server.url, "trust": True, **more}


def wants_command(instruction: str) -> bool:
    """Whether the instruction gets to the model whole only as a custom command.

    These CLIs look for "@path" in a prompt, and where a path exists they rewrite the prompt and put the
    files' contents after it. The text of a custom command is left alone, but for placeholders of
    its own, so that an instruction with such a placeholder is better off on stdin.
    """
    return bool(_MENTION.search(instruction)) and not any(
        mark in instruction for mark in _FILLED_IN
    )


def as_command(command: str) -> str:
    """`command`, run with the custom command COMMAND as its prompt; its stdin is not read."""
    return f"{{ cat > /dev/null; printf /{COMMAND}; }} | {command}"
