"""Tools of Anthropic's Messages API as functions for the engine.

What the harness executes becomes a function, also where only the provider's models know the
parameters (bash, text editor, memory). What the provider would execute is dropped with a note, and
so are the tools that use a screen: their parameters are not published.
"""

from typing import Any, NamedTuple

from polar_gateway.dialects import messages as shared
from polar_gateway.dialects.messages import note, string


class _Known(NamedTuple):
    """A tool that the API knows by its type."""

    description: str
    parameters: dict[str, Any]


_TEXT: dict[str, Any] = {"type": "string"}
_INTEGER: dict[str, Any] = {"type": "integer"}
_RANGE: dict[str, Any] = {
    "type": "array",
    "items": _INTEGER,
    "description": "First and last line, counted from 1; a last line of -1 is the file's.",
}


def _commands(usage: dict[str, str], **fields: dict[str, Any]) -> dict[str, Any]:
    """Parameters of a tool whose field `command` decides which of the others it needs."""
    command = {
        "type": "string",
        "enum": list(usage),
        "description": "; ".join(f"{each} needs {needs}" for each, needs in usage.items()),
    }
    return {"type": "object", "properties": {"command": command, **fields}, "required": ["command"]}


_BASH = _Known(
    "Run a command in a bash session, which keeps its state; `restart` begins a new session.",
    {"type": "object", "properties": {"command": _TEXT, "restart": {"type": "boolean"}}},
)
_FILES = {"path": _TEXT, "file_text": _TEXT, "old_str": _TEXT, "new_str": _TEXT}
_EDITS = {
    "view": "path, and may have view_range",
    "create": "path and file_text",
    "str_replace": "path, old_str and new_str",
}
_LINES = {"insert_line": _INTEGER, "view_range": _RANGE}

_OLD_EDITOR = _Known(
    "View and edit text files.",
    _commands(
        {**_EDITS, "insert": "path, insert_line and new_str", "undo_edit": "path"},
        **_FILES,
        **_LINES,
    ),
)
_EDITOR = _Known(
    "View and edit text files.",
    _commands(
        {**_EDITS, "insert": "path, insert_line and insert_text"},
        **_FILES,
        **_LINES,
        insert_text=_TEXT,
    ),
)
_MEMORY = _Known(
    "Keep notes in files under /memories.",
    _commands(
        {
            **_EDITS,
            "insert": "path, insert_line and insert_text",
            "delete": "path",
            "rename": "old_path and new_path",
        },
        **_FILES,
        **_LINES,
        insert_text=_TEXT,
        old_path=_TEXT,
        new_path=_TEXT,
    ),
)

_KNOWN = {
    "bash_20241022": _BASH,
    "bash_20250124": _BASH,
    "text_editor_20241022": _OLD_EDITOR,
    "text_editor_20250124": _OLD_EDITOR,
    "text_editor_20250429": _EDITOR,
    "text_editor_20250728": _EDITOR,
    "memory_20250818": _MEMORY,
}


def as_function(tool: dict[str, Any], field: str, notes: list[str]) -> dict[str, Any] | None:
    """The tool as a function; None for one that is dropped."""
    kind, name = tool.get("type"), string(tool.get("name"), f"{field}.name")
    description = string(tool.get("description"), f"{field}.description")
    parameters = tool.get("input_schema")
    if parameters is None and kind not in (None, "custom"):
        known = _KNOWN.get(str(kind))
        if known is None:
            note(notes, f"tool {name} of type {kind} ignored")
            return None
        description, parameters = known
    if tool.get("input_examples"):
        note(notes, "input_examples ignored")
    return shared.function_tool(name, description, parameters, strict=bool(tool.get("strict")))
