import json
from typing import Any

import pytest

from harness_adapters.base import AgentSpec
from harness_adapters.opencode import Opencode
from tests.harness_adapters.samples import CONTEXT, KEY, agent, context

CONFIG_DIR = "/polar/session/home/.config/opencode"


def config_of(spec: AgentSpec) -> dict[str, Any]:
    plan = Opencode().plan(spec, CONTEXT)
    parsed: dict[str, Any] = json.loads(plan.files[f"{CONFIG_DIR}/opencode.json"])
    return parsed


def test_the_plan_runs_the_binary_with_a_title_and_the_instruction_on_stdin() -> None:
    plan = Opencode().plan(agent("opencode"), CONTEXT)
    assert plan.command == (
        "/polar/packs/x/bin/opencode run --format json --model gateway/Qwen/Qwen3.5-4B --title task"
    )
    assert plan.cwd == "/testbed"
    data = "/polar/session/home/.local/share/opencode"
    assert plan.native_logs == [f"{data}/opencode.db", f"{data}/opencode.db-wal", f"{data}/log"]


def test_without_a_pack_the_command_comes_from_path() -> None:
    plan = Opencode().plan(agent("opencode"), context(pack_dir=None))
    assert plan.command.startswith("opencode run ")


def test_the_provider_takes_the_key_from_the_environment_and_tells_the_window() -> None:
    plan = Opencode().plan(agent("opencode", env={"A": "b"}), CONTEXT)
    assert plan.env["POLAR_MODEL_KEY"] == KEY
    assert plan.env["A"] == "b"
    provider = config_of(agent("opencode"))["provider"]["gateway"]
    assert provider["options"] == {
        "baseURL": "http://127.0.0.1:8100/v1",
        "apiKey": "{env:POLAR_MODEL_KEY}",
    }
    assert provider["models"]["Qwen/Qwen3.5-4B"]["limit"] == {"context": 40960, "output": 8192}


def test_its_npm_is_offline_and_the_agents_is_not() -> None:
    plan = Opencode().plan(agent("opencode"), CONTEXT)
    assert plan.files[f"{CONFIG_DIR}/.npmrc"] == "offline=true\n"
    assert not [name for name in plan.env if name.lower().startswith("npm_")]


def test_settings_and_skills_reach_the_configuration() -> None:
    settings = {"exclude_tools": ["webfetch"], "append_system_prompt": "Be brief."}
    spec = agent("opencode", settings=settings, skills_path="/opt/my skills")
    config = config_of(spec)
    assert config["permission"]["webfetch"] == "deny"
    assert config["permission"]["bash"] == "allow"
    assert config["skills"] == {"paths": ["/opt/my skills"]}
    (path,) = config["instructions"]
    assert Opencode().plan(spec, CONTEXT).files[path] == "Be brief."


def test_mcp_servers_are_declared_by_transport() -> None:
    servers = [
        {"name": "a", "command": "/bin/a", "args": ["-x"]},
        {"name": "b", "transport": "streamable-http", "url": "http://b"},
        {"name": "c", "transport": "sse", "url": "http://c"},
    ]
    assert config_of(agent("opencode", mcp_servers=servers))["mcp"] == {
        "a": {"type": "local", "command": ["/bin/a", "-x"], "enabled": True},
        "b": {"type": "remote", "url": "http://b", "enabled": True, "oauth": False},
        "c": {"type": "remote", "url": "http://c", "enabled": True, "oauth": False},
    }


def lines(*events: dict[str, Any]) -> bytes:
    return "".join(json.dumps(event) + "\n" for event in events).encode()


DONE = {"type": "step_finish", "part": {"type": "step-finish", "reason": "stop"}}
CALLED = {"type": "step_finish", "part": {"type": "step-finish", "reason": "tool-calls"}}
ERROR = {"type": "error", "error": {"name": "APIError", "data": {"message": "too long"}}}


@pytest.mark.parametrize(
    ("return_code", "stdout", "outcome", "reason"),
    [
        pytest.param(0, lines(CALLED, DONE), "completed", "", id="done"),
        pytest.param(
            1, lines(CALLED, ERROR), "failed", "opencode reported an error: too long", id="refused"
        ),
        pytest.param(
            0,
            lines({"type": "error", "error": {"name": "UnknownError"}}),
            "failed",
            "opencode reported an error: UnknownError",
            id="an error without words, with a status that lies",
        ),
        pytest.param(1, lines(ERROR, CALLED, DONE), "completed", "", id="got over an error"),
        pytest.param(
            1,
            lines(CALLED),
            "failed",
            "opencode ended with status 1: said on stderr",
            id="stopped in the middle",
        ),
        pytest.param(
            -15,
            lines(DONE),
            "failed",
            "opencode was ended by signal 15: said on stderr",
            id="killed",
        ),
    ],
)
def test_the_last_event_decides(return_code: int, stdout: bytes, outcome: str, reason: str) -> None:
    end = Opencode().ended(return_code, stdout, b"said on stderr\n")
    assert (end.outcome, end.reason, end.return_code) == (outcome, reason, return_code)
