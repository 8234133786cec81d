import json
from typing import Any

import pytest

from polar_gateway.dialects.turn import (
    Call,
    ModelRequest,
)
from tests.polar_gateway.dialects.responses_items import (
    AGENTS,
    PARAMETERS,
    PATCH,
    RUN,
    SHELL,
    answer_items,
    call,
    message,
    normalise,
    output,
)


def test_a_namespace_is_expanded_and_put_back() -> None:
    history = [
        message("user", "Go."),
        call("a", name="spawn", namespace="agents"),
        output("a"),
    ]
    request = normalise(*history, tools=[RUN, AGENTS])
    assert [tool["function"]["name"] for tool in request.tools or []] == ["run", "agents__spawn"]
    assert request.messages[1]["tool_calls"][0]["function"]["name"] == "agents__spawn"
    assert normalise(*history).messages == request.messages  # compaction asks without tools
    [item] = answer_items(request, Call(id="b", name="agents__spawn", arguments="{}"))
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "agents", "spawn")
    [plain] = answer_items(request, Call(id="b", name="run", arguments="{}"))
    assert "namespace" not in plain


def test_a_plain_tool_keeps_its_name_beside_a_namespace_that_would_take_it() -> None:
    plain = {**RUN, "name": "agents__spawn"}
    request = normalise(
        call("a", name="spawn", namespace="agents"), output("a"), tools=[AGENTS, plain]
    )
    assert [tool["function"]["name"] for tool in request.tools or []] == [
        "agents__spawn_",
        "agents__spawn",
    ]
    assert request.messages[0]["tool_calls"][0]["function"]["name"] == "agents__spawn_"
    [spawn] = answer_items(request, Call(id="b", name="agents__spawn_", arguments="{}"))
    assert (spawn["namespace"], spawn["name"]) == ("agents", "spawn")


def test_a_custom_tool_is_a_function_of_one_text_and_put_back() -> None:
    item = {"type": "custom_tool_call", "call_id": "a", "name": "patch", "input": "+é\n"}
    done = {"type": "custom_tool_call_output", "call_id": "a", "output": "ok"}
    request = normalise(item, done, tools=[PATCH])
    [tool] = request.tools or []
    assert tool["function"]["parameters"]["required"] == ["input"]
    assert tool["function"]["description"].startswith("Edit files.")
    assert tool["function"]["description"].endswith("lark grammar:\nstart: line+")
    assert request.messages[0]["tool_calls"][0]["function"]["arguments"] == '{"input":"+é\\n"}'
    assert request.messages[1] == {"role": "tool", "tool_call_id": "a", "content": "ok"}
    for spelled, text in (
        ('{"input": "+a"}', "+a"),
        ("+a", "+a"),
        ('{"patch": 1}', '{"patch": 1}'),
    ):
        [back] = answer_items(request, Call(id="b", name="patch", arguments=spelled))
        assert (back["type"], back["input"], back["call_id"]) == ("custom_tool_call", text, "b")


def test_a_local_shell_is_a_function_and_put_back() -> None:
    action: dict[str, Any] = {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": None}
    item = {"type": "local_shell_call", "call_id": "a", "action": action}
    done = {"type": "local_shell_call_output", "id": "a", "output": "ok"}
    request = normalise(item, done, tools=[SHELL])
    assert request.messages[0]["tool_calls"][0]["function"]["arguments"] == '{"command":["ls"]}'
    assert request.messages[1]["role"] == "tool"
    [back] = answer_items(
        request, Call(id="b", name="local_shell", arguments='{"command": ["pwd"]}')
    )
    assert back["action"] == {"type": "exec", "command": ["pwd"], "env": {}}
    [broken] = answer_items(request, Call(id="b", name="local_shell", arguments="pwd"))
    assert broken["action"]["command"] == []


def test_tools_may_come_among_the_items() -> None:
    request = normalise({"type": "additional_tools", "tools": [AGENTS]}, message("user", "Hi"))
    assert [tool["function"]["name"] for tool in request.tools or []] == ["agents__spawn"]
    assert [each["role"] for each in request.messages] == ["user"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", "auto"),
        ("required", "required"),
        ("none", "none"),
        ({"type": "function", "name": "run"}, {"type": "function", "function": {"name": "run"}}),
        ({"type": "custom", "name": "patch"}, {"type": "function", "function": {"name": "patch"}}),
        (
            {"type": "function", "name": "spawn", "namespace": "agents"},
            {"type": "function", "function": {"name": "agents__spawn"}},
        ),
        (None, None),
    ],
)
def test_a_tool_choice_is_the_engines(choice: Any, expected: Any) -> None:
    tools = [RUN, AGENTS, PATCH]
    assert normalise(tools=tools, tool_choice=choice).tool_choice == expected
    without = normalise(tools=[], tool_choice=choice, parallel_tool_calls=True)
    assert (without.tools, without.tool_choice, without.parallel_tool_calls) == (None, None, None)


COMMANDS = {"type": "shell", "environment": {"type": "local"}}
EDITS = {"type": "apply_patch"}
SEARCH = {
    "type": "tool_search",
    "execution": "client",
    "description": "Find tools.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
}
DEFERRED = {**RUN, "name": "mail", "defer_loading": True}
CRM = {
    "type": "namespace",
    "name": "crm",
    "tools": [
        {"type": "function", "name": "find", "defer_loading": True, "parameters": PARAMETERS},
        {"type": "function", "name": "list", "parameters": PARAMETERS},
    ],
}


def names(request: ModelRequest) -> list[str]:
    return [tool["function"]["name"] for tool in request.tools or []]


def searched(call_id: str, *tools: Any) -> list[dict[str, Any]]:
    """A search by the model, and what it brought."""
    asked = {"type": "tool_search_call", "call_id": call_id, "execution": "client"}
    found = {"type": "tool_search_output", "call_id": call_id, "execution": "client"}
    return [{**asked, "arguments": {"query": "x"}}, {**found, "tools": list(tools)}]


def test_a_shell_is_a_function_and_put_back() -> None:
    action = {"commands": ["ls", "pwd"], "timeout_ms": 9, "max_output_length": None}
    outputs = [
        {"stdout": "a\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
        {"stdout": "", "stderr": "slow\n", "outcome": {"type": "timeout"}},
    ]
    request = normalise(
        {"type": "shell_call", "call_id": "a", "action": action},
        {"type": "shell_call_output", "call_id": "a", "output": outputs},
        tools=[COMMANDS],
    )
    [spelled] = request.messages[0]["tool_calls"]
    assert spelled["function"] == {
        "name": "shell",
        "arguments": '{"commands":["ls","pwd"],"timeout_ms":9}',
    }
    assert request.messages[1]["content"] == "a\n[exit code: 0]\nslow\n[timed out]"
    [back] = answer_items(request, Call(id="b", name="shell", arguments='{"commands": ["id"]}'))
    assert (back["type"], back["call_id"], back["action"]) == (
        "shell_call",
        "b",
        {"commands": ["id"]},
    )


def test_a_patch_of_the_apis_own_kind_is_a_function_and_put_back() -> None:
    operation = {"type": "create_file", "path": "a", "diff": "+x"}
    request = normalise(
        {"type": "apply_patch_call", "call_id": "a", "operation": operation},
        {"type": "apply_patch_call_output", "call_id": "a", "status": "failed"},
        {"type": "apply_patch_call", "call_id": "b", "operation": operation},
        {"type": "apply_patch_call_output", "call_id": "b", "status": "completed", "output": "ok"},
        tools=[EDITS],
    )
    [spelled] = request.messages[0]["tool_calls"]
    assert json.loads(spelled["function"]["arguments"]) == operation
    assert [each["content"] for each in request.messages if each["role"] == "tool"] == [
        "failed",
        "ok",
    ]
    [back] = answer_items(
        request, Call(id="b", name="apply_patch", arguments='{"type":"delete_file","path":"a"}')
    )
    assert (back["type"], back["operation"]) == (
        "apply_patch_call",
        {"type": "delete_file", "path": "a"},
    )


def test_a_tool_of_the_apis_own_kind_leaves_a_plain_one_its_name() -> None:
    plain = {**RUN, "name": "shell"}
    request = normalise(
        {"type": "shell_call", "call_id": "a", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "a", "output": []},
        tools=[COMMANDS, plain],
    )
    assert names(request) == ["shell_", "shell"]
    assert request.messages[0]["tool_calls"][0]["function"]["name"] == "shell_"
    [back] = answer_items(request, Call(id="b", name="shell_", arguments='{"commands":[]}'))
    assert back["type"] == "shell_call"


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "shell", "environment": {"type": "container_auto"}},
        {"type": "tool_search"},
        {"type": "tool_search", "execution": "server"},
        {"type": "mcp", "server_label": "x"},
        {"type": "code_interpreter"},
    ],
)
def test_what_the_provider_would_execute_is_dropped_and_noted(tool: dict[str, Any]) -> None:
    request = normalise(tools=[tool, RUN])
    assert names(request) == ["run"]
    assert request.notes == [f"tool of type {tool['type']} ignored"]


def test_a_choice_of_a_dropped_tool_is_dropped_with_it() -> None:
    search = {"type": "web_search"}
    request = normalise(tools=[search, RUN], tool_choice=search)
    assert (names(request), request.tool_choice) == (["run"], None)
    assert request.notes[-1] == "tool_choice of web_search ignored, as the tool is"


def test_a_search_for_tools_is_a_function_and_put_back() -> None:
    request = normalise(*searched("a", CRM), tools=[SEARCH])
    [function, *_] = request.tools or []
    assert function["function"] == {
        "name": "tool_search",
        "description": "Find tools.",
        "parameters": SEARCH["parameters"],
    }
    assert request.messages[0]["tool_calls"][0]["function"]["arguments"] == '{"query":"x"}'
    assert request.messages[1]["content"] == "Found, and ready to be called: crm__find, crm__list"
    [back] = answer_items(request, Call(id="b", name="tool_search", arguments='{"query": "y"}'))
    assert (back["type"], back["execution"]) == ("tool_search_call", "client")
    assert back["arguments"] == {"query": "y"}


def test_deferred_tools_are_offered_once_a_search_has_found_them_behind_the_others() -> None:
    tools = [DEFERRED, SEARCH, CRM, RUN]
    first = normalise(message("user", "Hi"), tools=tools)
    assert names(first) == ["tool_search", "crm__list", "run"]
    history = [message("user", "Hi"), *searched("a", DEFERRED)]
    second = normalise(*history, tools=tools)
    third = normalise(*history, *searched("b", CRM, DEFERRED), *searched("c"), tools=tools)
    assert names(second) == [*names(first), "mail"]
    assert names(third) == [*names(second), "crm__find"]
    assert third.messages[: len(second.messages)] == second.messages
    assert third.messages[-1]["content"] == "Nothing was found."


def test_a_tool_that_is_found_never_changes_the_name_of_an_earlier_one() -> None:
    late = {**RUN, "name": "agents__spawn"}
    tools = [AGENTS, SEARCH]
    request = normalise(*searched("a", late), tools=tools)
    assert names(request) == ["agents__spawn", "tool_search", "agents__spawn_"]
    [back] = answer_items(request, Call(id="b", name="agents__spawn_", arguments="{}"))
    assert (back["type"], back["name"]) == ("function_call", "agents__spawn")
    assert "namespace" not in back


def test_deferred_tools_are_offered_at_once_where_nobody_searches() -> None:
    assert names(normalise(tools=[DEFERRED, {"type": "tool_search"}])) == ["mail"]


def test_a_search_of_the_providers_is_dropped_from_the_history() -> None:
    call, found = searched("a", DEFERRED)
    request = normalise(
        {**call, "execution": "server"},
        {**found, "execution": "server"},
        message("user", "Hi"),
        tools=[DEFERRED],
    )
    assert [each["role"] for each in request.messages] == ["user"]
    assert names(request) == ["mail"]


@pytest.mark.parametrize(
    ("mode", "tools", "offered", "expected"),
    [
        ("auto", [{"type": "function", "name": "run"}], ["run"], "auto"),
        (
            "required",
            [{"type": "custom", "name": "patch"}, SHELL],
            ["patch", "local_shell"],
            "required",
        ),
        ("auto", [{"type": "web_search"}], [], None),
    ],
)
def test_only_allowed_tools_are_offered(
    mode: str, tools: list[Any], offered: list[str], expected: str | None
) -> None:
    choice = {"type": "allowed_tools", "mode": mode, "tools": tools}
    request = normalise(
        call("a", name="spawn", namespace="agents"),
        output("a"),
        tools=[RUN, AGENTS, PATCH, SHELL],
        tool_choice=choice,
    )
    assert (names(request), request.tool_choice) == (offered, expected)
    assert request.messages[0]["tool_calls"][0]["function"]["name"] == "agents__spawn"
