import tomllib
from typing import Any

import pytest

from harness_adapters.base import AgentSpec, LaunchContext
from harness_adapters.codex import Codex, toml
from tests.harness_adapters.samples import CONTEXT, KEY, agent, context

CONFIG = "/polar/session/home/.codex/config.toml"

STARTED = b'{"type":"thread.started","thread_id":"01a1"}\n{"type":"turn.started"}\n'
RECONNECTING = b'{"type":"error","message":"Reconnecting... 1/2 (connection closed)"}\n'
MESSAGE = b'{"type":"item.completed","item":{"id":"i","type":"agent_message","text":"Done."}}\n'
COMPLETED = b'{"type":"turn.completed","usage":{"input_tokens":100,"output_tokens":5}}\n'
REFUSED = (
    b'{"type":"turn.failed","error":{"message":"{\\"type\\": \\"error\\", \\"error\\": '
    b'{\\"type\\": \\"invalid_request_error\\", \\"message\\": \\"too long\\"}}"}}\n'
)
CUT = b'{"type":"turn.failed","error":{"message":"stream disconnected before completion"}}\n'


def config(spec: AgentSpec, where: LaunchContext = CONTEXT) -> dict[str, Any]:
    return tomllib.loads(Codex().plan(spec, where).files[CONFIG])


def test_the_plan_runs_the_packs_binary_with_the_prompt_on_stdin() -> None:
    plan = Codex().plan(agent("codex"), CONTEXT)
    assert plan.command == (
        "/polar/packs/x/bin/codex exec --json --skip-git-repo-check "
        "--dangerously-bypass-approvals-and-sandbox -"
    )
    assert plan.cwd == "/testbed"
    assert plan.env == {"HOME": "/polar/session/home", "POLAR_MODEL_KEY": KEY}
    assert plan.native_logs == ["/polar/session/home/.codex/sessions"]


def test_without_a_pack_the_command_comes_from_path() -> None:
    assert Codex().plan(agent("codex"), context(pack_dir=None)).command.startswith("codex exec ")


def test_the_configuration_names_the_gateway_and_tells_the_context_window() -> None:
    found = config(agent("codex"))
    assert found["model"] == "Qwen/Qwen3.5-4B"
    assert found["model_provider"] == "gateway"
    assert found["model_context_window"] == 40960
    assert found["model_auto_compact_token_limit"] == 34406
    assert found["model_providers"]["gateway"] == {
        "name": "gateway",
        "base_url": "http://127.0.0.1:8100/v1",
        "env_key": "POLAR_MODEL_KEY",
        "wire_api": "responses",
        "request_max_retries": 2,
        "stream_max_retries": 2,
        "stream_idle_timeout_ms": 1_800_000,
        "supports_websockets": False,
    }
    assert found["approval_policy"] == "never"
    assert found["analytics"] == found["feedback"] == {"enabled": False}


def test_nothing_that_calls_home_or_needs_a_person_is_switched_on() -> None:
    found = config(agent("codex"))
    on = [name for name, value in found["features"].items() if value]
    assert on == ["multi_agent"]
    assert found["web_search"] == "disabled"
    assert found["check_for_update_on_startup"] is False
    assert found["tools"] == {"experimental_request_user_input": {"enabled": False}}


def test_settings_reach_the_configuration() -> None:
    settings = {"multi_agent": False, "reasoning_effort": "high", "compact_at_tokens": 9000}
    found = config(agent("codex", settings=settings))
    assert found["features"]["multi_agent"] is False
    assert found["model_reasoning_effort"] == "high"
    assert found["model_auto_compact_token_limit"] == 9000
    assert "model_reasoning_effort" not in config(agent("codex"))


def test_mcp_servers_become_required_tables() -> None:
    servers = [
        {"name": "my.tool", "command": "/bin/x", "args": ["-a", 'say "hi"']},
        {"name": "web", "transport": "streamable-http", "url": "http://h/mcp"},
    ]
    found = config(agent("codex", mcp_servers=servers))["mcp_servers"]
    assert found["my.tool"] == {
        "command": "/bin/x",
        "args": ["-a", 'say "hi"'],
        "required": True,
        "startup_timeout_sec": 60,
    }
    assert found["web"]["url"] == "http://h/mcp"


def test_an_sse_server_is_refused_by_name() -> None:
    servers = [{"name": "old", "transport": "sse", "url": "http://h/sse"}]
    with pytest.raises(ValueError, match=r"agent\.mcp_servers: codex .* not sse \(old\)"):
        Codex().plan(agent("codex", mcp_servers=servers), CONTEXT)


def test_skills_are_linked_into_the_home() -> None:
    command = Codex().plan(agent("codex", skills_path="/opt/my skills"), CONTEXT).command
    assert command.startswith("ln -sfn '/opt/my skills' /polar/session/home/.codex/skills && ")


def test_the_tasks_environment_wins() -> None:
    plan = Codex().plan(agent("codex", env={"HOME": "/h", "A": "1"}), CONTEXT)
    assert plan.env["HOME"] == "/h"
    assert plan.env["A"] == "1"


@pytest.mark.parametrize(
    "text",
    ["plain", 'a "quoted" \\ name', "line\nbreak\ttab", "\x00\x1f\x7f", "ünï 漢 😀", "''' # ="],
)
def test_any_string_survives_toml(text: str) -> None:
    assert tomllib.loads(toml({text: {text: text, "list": [text]}})) == {
        text: {text: text, "list": [text]}
    }


@pytest.mark.parametrize(
    ("return_code", "stdout", "stderr", "outcome", "reason"),
    [
        (0, STARTED + MESSAGE + COMPLETED, b"", "completed", ""),
        (0, STARTED + RECONNECTING + COMPLETED, b"", "completed", ""),
        (1, STARTED + REFUSED, b"", "failed", "codex reported that its turn failed: too long"),
        (
            1,
            STARTED + RECONNECTING + CUT,
            b"",
            "failed",
            "codex reported that its turn failed: stream disconnected before completion",
        ),
        (0, REFUSED, b"", "failed", "codex reported that its turn failed: too long"),
        (
            -9,
            STARTED + RECONNECTING,
            b"",
            "failed",
            "codex was ended by signal 9: Reconnecting... 1/2 (connection closed)",
        ),
        (
            1,
            b"",
            b"WARNING: x\nError loading config.toml: bad\n",
            "failed",
            "codex ended with status 1: Error loading config.toml: bad",
        ),
        (
            127,
            b"",
            b"",
            "failed",
            "codex ended with status 127: a command was not found",
        ),
        (None, STARTED, b"", "failed", "codex ended without an exit status"),
    ],
)
def test_the_last_turn_event_decides_and_else_the_exit_status(
    return_code: int | None, stdout: bytes, stderr: bytes, outcome: str, reason: str
) -> None:
    end = Codex().ended(return_code, stdout, stderr)
    assert (end.outcome, end.reason, end.return_code) == (outcome, reason, return_code)
