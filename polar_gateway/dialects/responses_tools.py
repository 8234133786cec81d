"""Tools of OpenAI's Responses API, both ways: to functions for the engine, and calls back to items.

The API knows more kinds of tool than engines do. All that a harness executes itself becomes a
function: `function`, `custom` (one text), a `namespace` of those, `local_shell`, `shell`,
`apply_patch`, and `tool_search` where the harness does the searching. What the provider would
execute (web search, code interpreter, ...) is dropped with a note.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from polar_gateway.dialects import messages as shared
from polar_gateway.dialects.custom_tools import custom_arguments, custom_function, custom_input
from polar_gateway.dialects.messages import mapping, note, objects, string
from polar_gateway.dialects.turn import Call, ModelRequest, UnsupportedRequestError


class _BuiltIn(NamedTuple):
    """A tool that the API itself defines and the harness executes."""

    description: str
    parameters: dict[str, Any]
    item_prefix: str
    """Of the ids of its calls."""
    to_item: Callable[[dict[str, Any]], dict[str, Any]]
    """Arguments to the fields of a call item."""
    to_arguments: Callable[[dict[str, Any], str], dict[str, Any]]
    """A call item, and where it stands, to arguments."""


def _object(required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


_TEXT = {"type": "string"}
_TEXTS = {"type": "array", "items": _TEXT}
_INTEGER = {"type": "integer"}

_EXEC = ("command", "working_directory", "timeout_ms")
_COMMANDS = ("commands", "timeout_ms", "max_output_length")
_OPERATION = ("type", "path", "diff")


def _kept(given: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: given[name] for name in names if given.get(name) is not None}


def _local_shell_item(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"action": {"type": "exec", "command": [], "env": {}, **_kept(arguments, _EXEC)}}


def _shell_item(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "action": {"commands": [], **_kept(arguments, _COMMANDS)},
        "environment": {"type": "local"},
    }


def _patch_item(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"operation": {"type": "update_file", "path": "", **_kept(arguments, _OPERATION)}}


def _search_item(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"execution": "client", "arguments": arguments}


def _action_arguments(names: tuple[str, ...]) -> Callable[[dict[str, Any], str], dict[str, Any]]:
    return lambda item, field: _kept(mapping(item.get("action"), f"{field}.action"), names)


_BUILT_IN = {
    "local_shell": _BuiltIn(
        "Run a command.",
        _object(["command"], command=_TEXTS, working_directory=_TEXT, timeout_ms=_INTEGER),
        "lsh",
        _local_shell_item,
        _action_arguments(_EXEC),
    ),
    "shell": _BuiltIn(
        "Run shell commands, one after the other.",
        _object(["commands"], commands=_TEXTS, timeout_ms=_INTEGER, max_output_length=_INTEGER),
        "sh",
        _shell_item,
        _action_arguments(_COMMANDS),
    ),
    "apply_patch": _BuiltIn(
        "Create, update or delete a file. `diff` is the file's unified diff; none to delete it.",
        _object(
            ["type", "path"],
            type={"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
            path=_TEXT,
            diff=_TEXT,
        ),
        "apc",
        _patch_item,
        lambda item, field: _kept(mapping(item.get("operation"), f"{field}.operation"), _OPERATION),
    ),
    "tool_search": _BuiltIn(
        "Search for tools, which can be called once they are found.",
        _object(["query"], query=_TEXT),
        "tsc",
        _search_item,
        lambda item, field: _search_arguments(item.get("arguments"), f"{field}.arguments"),
    ),
}
CALLS = {
    "function_call": "function",
    "custom_tool_call": "custom",
    **{f"{kind}_call": kind for kind in _BUILT_IN},
}
"""Type of a call's item -> kind of its tool."""
OUTPUTS = frozenset(f"{kind}_output" for kind in CALLS) - {"tool_search_call_output"}
SEARCH_OUTPUT = "tool_search_output"
"""Brings tools instead of content."""


def _search_arguments(given: Any, field: str) -> dict[str, Any]:
    """An object by the API's documentation; some harnesses spell it out."""
    return arguments_of(given) if isinstance(given, str) else mapping(given, field)


class Tools:
    """The engine's function tools, and how the answer must name each.

    `renames` holds only names that the answer changes: engine's name -> the fields of the item.

    Tools that are searched for are left out until a search has brought them, and then come last, in
    the order in which they were found, so that the list of the turn before stays its beginning.
    """

    def __init__(self, notes: list[str], *, searched: bool) -> None:
        self.functions: list[dict[str, Any]] = []
        self.renames: dict[str, Any] = {}
        self._names: dict[tuple[str | None, str], str] = {}
        """(namespace, plain name), the namespace None for built-in tools -> engine's name."""
        self._taken: set[str] = set()
        self._put_names: set[str] = set()
        self._ignored: set[str] = set()
        """Kinds of tools that were dropped."""
        self._notes = notes
        self._searched = searched
        """Whether the harness searches for deferred tools; without, they could never be called."""

    def add(self, tools: Any, field: str, *, found: bool = False) -> None:
        """`found` says that these were brought by a search, whatever they say themselves."""
        if not tools:
            return
        listed = objects(tools, field)
        # Plain names first: they are never changed, whatever a namespace beside them contains.
        for index, tool in enumerate(listed):
            if tool.get("type") in ("function", "custom") and self._offered(tool, found):
                self._claim("", string(tool.get("name"), f"{field}[{index}].name"))
        for index, tool in enumerate(listed):
            self._add_one(tool, "", f"{field}[{index}]", found)

    def _offered(self, tool: dict[str, Any], found: bool) -> bool:
        return found or not (self._searched and tool.get("defer_loading"))

    def _add_one(self, tool: dict[str, Any], namespace: str, field: str, found: bool) -> None:
        kind = string(tool.get("type"), f"{field}.type") or None
        if not self._offered(tool, found):
            return
        if kind == "namespace" and not namespace:
            inner = string(tool.get("name"), f"{field}.name")
            for index, each in enumerate(objects(tool.get("tools"), f"{field}.tools")):
                self._add_one(each, inner, f"{field}.tools[{index}]", found)
        elif kind in ("function", "custom"):
            plain = string(tool.get("name"), f"{field}.name")
            rename = {"type": kind, "name": plain}
            if namespace:
                rename["namespace"] = namespace
            self._put(tool, kind, self._claim(namespace, plain), rename, field)
        elif kind in _BUILT_IN and _executed_by_the_harness(tool):
            self._put(tool, kind, self._claim(None, kind), {"type": kind}, field)
        else:
            self._ignored.add(str(kind))
            note(self._notes, f"tool of type {kind} ignored")

    def _put(
        self, tool: dict[str, Any], kind: str, name: str, rename: dict[str, Any], field: str
    ) -> None:
        if name in self._put_names:
            return  # brought by an earlier search already
        self._put_names.add(name)
        if rename != {"type": "function", "name": name}:
            self.renames[name] = rename
        self.functions.append(_function(tool, kind, name, field))

    def _claim(self, namespace: str | None, plain: str) -> str:
        """The engine's name of a tool, made up so that no two tools share one."""
        known = self._names.get((namespace, plain))
        if known is not None:
            return known
        name = engine_tool_name(namespace, plain)
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        self._names[namespace, plain] = name
        return name

    def engine_name(self, namespace: str | None, plain: str) -> str:
        """What a call of the history was named, also when the request no longer has the tool."""
        return self._names.get((namespace, plain)) or engine_tool_name(namespace, plain)

    def call(self, item: dict[str, Any], field: str) -> dict[str, Any]:
        """A call's item as a tool call of a chat message."""
        kind = CALLS[item["type"]]
        call_id = string(item.get("call_id") or item.get("id"), f"{field}.call_id")
        if kind in _BUILT_IN:
            arguments = shared.compact_json(_BUILT_IN[kind].to_arguments(item, field))
            return shared.tool_call(call_id, self.engine_name(None, kind), arguments)
        if kind == "custom":
            arguments = custom_arguments(string(item.get("input"), f"{field}.input"))
        else:
            arguments = string(item.get("arguments"), f"{field}.arguments")
        namespace = string(item.get("namespace"), f"{field}.namespace")
        plain = string(item.get("name"), f"{field}.name")
        return shared.tool_call(call_id, self.engine_name(namespace, plain), arguments)

    def found(self, tools: Any, field: str) -> str:
        """What the model reads of a search's result, whose tools are `tools`."""
        names = []
        for index, tool in enumerate(objects(tools or [], field)):
            plain = str(tool.get("name") or tool.get("type"))
            if tool.get("type") == "namespace":
                inner = objects(tool.get("tools") or [], f"{field}[{index}].tools")
                names += [self.engine_name(plain, str(each.get("name"))) for each in inner]
            else:
                names.append(self.engine_name("", plain))
        return shared.found_text(names)

    def choose(self, choice: Any) -> Any:
        """The engine's tool choice; tools that may not be called are taken away.

        Raises UnsupportedRequestError for a choice of a tool that is not here.
        """
        if choice is None:
            return None
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            allowed = {
                self._chosen(tool) for tool in objects(choice.get("tools"), "tool_choice.tools")
            }
            self.functions = [f for f in self.functions if f["function"]["name"] in allowed]
            choice = choice.get("mode")
        if not self.functions:
            if choice not in ("auto", "none"):
                note(self._notes, "tool_choice without tools ignored")
            return None
        if choice in ("auto", "none", "required"):
            return choice
        if isinstance(choice, dict):
            name = self._chosen(choice)
            if name is not None:
                return {"type": "function", "function": {"name": name}}
            kind = str(choice.get("type"))
            if kind in self._ignored:
                note(self._notes, f"tool_choice of {kind} ignored, as the tool is")
                return None
        raise UnsupportedRequestError(
            "tool_choice", "must be auto, none, required, or tools that are among the tools"
        )

    def _chosen(self, choice: dict[str, Any]) -> str | None:
        kind, plain = choice.get("type"), choice.get("name")
        if kind in ("function", "custom"):
            return self._names.get((str(choice.get("namespace") or ""), str(plain)))
        return self._names.get((None, str(kind)))


def _executed_by_the_harness(tool: dict[str, Any]) -> bool:
    """Some built-in tools exist in both forms."""
    match tool:
        case {"type": "tool_search"}:
            return tool.get("execution") == "client"
        case {"type": "shell", "environment": {"type": place}}:
            return bool(place == "local")
    return True


def has_search(tools: Any) -> bool:
    """Whether the harness searches for tools itself."""
    return isinstance(tools, list) and any(
        tool == {**tool, "type": "tool_search", "execution": "client"}
        for tool in tools
        if isinstance(tool, dict)
    )


def engine_tool_name(namespace: str | None, plain: str) -> str:
    return f"{namespace}__{plain}" if namespace else plain


def _function(tool: dict[str, Any], kind: str, name: str, field: str) -> dict[str, Any]:
    description = string(tool.get("description"), f"{field}.description")
    if kind in _BUILT_IN:
        built_in = _BUILT_IN[kind]
        parameters = tool.get("parameters") or built_in.parameters
        return shared.function_tool(name, description or built_in.description, parameters)
    if kind == "custom":
        given = mapping(tool.get("format"), f"{field}.format")
        grammar = given if given.get("type") == "grammar" else {}
        return custom_function(name, description, grammar)
    strict = bool(tool.get("strict"))
    return shared.function_tool(name, description, tool.get("parameters"), strict=strict)


def shell_text(output: Any, field: str) -> str:
    """The result of a `shell_call`: what each command wrote, and how it ended."""
    texts = []
    for index, part in enumerate(objects(output or [], field)):
        at = f"{field}[{index}]"
        written = [string(part.get(name), f"{at}.{name}") for name in ("stdout", "stderr")]
        outcome = mapping(part.get("outcome"), f"{at}.outcome")
        ended = "timed out" if outcome.get("type") == "timeout" else "exit code"
        code = outcome.get("exit_code")
        written.append(f"[{ended}]" if code is None else f"[{ended}: {code}]")
        texts.append("\n".join(text.rstrip("\n") for text in written if text))
    return "\n".join(texts)


def call_item(request: ModelRequest, suffix: str, call: Call, status: str) -> dict[str, Any]:
    """A call as an item of the answer; its id ends in `suffix`."""
    rename = request.renames.get(call.name, {})
    kind = rename.get("type", "function")
    item: dict[str, Any] = {
        "id": "",
        "type": "custom_tool_call" if kind == "custom" else f"{kind}_call",
        "status": status,
        "call_id": call.id,
    }
    if kind in _BUILT_IN:
        item["id"] = f"{_BUILT_IN[kind].item_prefix}_{suffix}"
        return item | _BUILT_IN[kind].to_item(arguments_of(call.arguments))
    item["name"] = rename.get("name", call.name)
    if kind == "custom":
        item |= {"id": f"ctc_{suffix}", "input": custom_input(call.arguments)}
    else:
        item |= {"id": f"fc_{suffix}", "arguments": call.arguments}
    if "namespace" in rename:
        item["namespace"] = rename["namespace"]
    return item


def arguments_of(spelled: str) -> dict[str, Any]:
    """The arguments as an object; an empty one when the model spelled none."""
    try:
        value = msgspec.json.decode(spelled)
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}
