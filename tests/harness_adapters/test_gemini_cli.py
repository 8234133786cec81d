import json
import tomllib
from typing import Any

import pytest

from harness_adapters.base import AgentSpec, LaunchPlan
from harness_adapters.gemini_cli import GeminiCli
from tests.harness_adapters.samples import CONTEXT, KEY, agent, context

CONFIG_DIR = "/polar/session/home/.gemini"


def settings_of(spec: AgentSpec) -> dict[str, Any]:
    plan = GeminiCli().plan(spec, CONTEXT)
    parsed: dict[str, Any] = json.loads(plan.files[f"{CONFIG_DIR}/settings.json"])
    return parsed


def with_instruction(text: str) -> LaunchPlan:
    return GeminiCli().plan(agent("gemini_cli"), context(instruction=text))


def test_the_plan_runs_the_packs_launcher_with_the_instruction_on_stdin() -> None:
    plan = GeminiCli().plan(agent("gemini_cli"), CONTEXT)
    assert plan.command == (
        "/polar/packs/x/bin/gemini -m Qwen/Qwen3.5-4B --yolo --output-format stream-json"
    )
    assert plan.cwd == "/testbed"
    assert plan.native_logs == [f"{CONFIG_DIR}/tmp"]
    assert list(plan.files) == [f"{CONFIG_DIR}/settings.json"]


def test_the_endpoint_and_the_key_are_in_the_environment() -> None:
    env = GeminiCli().plan(agent("gemini_cli", env={"TERM": "dumb"}), CONTEXT).env
    assert env["GOOGLE_GEMINI_BASE_URL"] == "http://127.0.0.1:8100"
    assert env["GEMINI_API_KEY"] == KEY
    assert env["TERM"] == "dumb"


def test_without_a_pack_the_command_comes_from_path() -> None:
    plan = GeminiCli().plan(agent("gemini_cli"), context(pack_dir=None))
    assert plan.command.startswith("gemini -m ")


def test_what_calls_another_model_is_off() -> None:
    settings = settings_of(agent("gemini_cli"))
    assert settings["model"] == {"disableLoopDetection": True, "skipNextSpeakerCheck": True}
    assert settings["tools"] == {"exclude": ["google_web_search", "web_fetch"]}
    assert settings["telemetry"] == {"enabled": False}


def test_settings_reach_the_configuration() -> None:
    settings = settings_of(
        agent("gemini_cli", settings={"tools": ["run_shell_command"], "max_turns": 7})
    )
    assert settings["tools"] == {"core": ["run_shell_command"]}
    assert settings["model"]["maxSessionTurns"] == 7


def test_mcp_servers_are_declared_by_transport() -> None:
    servers = [
        {"name": "a", "command": "/bin/a", "args": ["-x"]},
        {"name": "b", "transport": "streamable-http", "url": "http://b"},
        {"name": "c", "transport": "sse", "url": "http://c"},
    ]
    assert settings_of(agent("gemini_cli", mcp_servers=servers))["mcpServers"] == {
        "a": {"command": "/bin/a", "args": ["-x"], "trust": True},
        "b": {"httpUrl": "http://b", "trust": True},
        "c": {"url": "http://c", "trust": True},
    }


def test_skills_are_linked_into_the_home() -> None:
    plan = GeminiCli().plan(agent("gemini_cli", skills_path="/opt/my skills"), CONTEXT)
    assert plan.command.startswith(f"ln -sfn '/opt/my skills' {CONFIG_DIR}/skills && ")


@pytest.mark.parametrize(
    "text", ["Fix @app.py", 'a "quote" \\ and\n\ttab \x7f @x \u00e9 \U0001f600', "/clear @src"]
)
def test_an_instruction_that_mentions_a_file_is_submitted_as_a_custom_command(text: str) -> None:
    plan = with_instruction(text)
    command = tomllib.loads(plan.files[f"{CONFIG_DIR}/commands/instruction.toml"])
    assert command == {"prompt": text}
    assert plan.command.startswith("{ cat > /dev/null; printf /instruction; } | ")


def test_an_instruction_that_begins_with_a_slash_is_shielded() -> None:
    assert with_instruction("/clear it").command.startswith("{ printf ' '; cat; } | ")


def lines(*events: dict[str, Any]) -> bytes:
    return "".join(json.dumps(event) + "\n" for event in events).encode()


SAID = {"type": "message", "role": "assistant", "content": "Done.", "delta": True}
SUCCESS = {"type": "result", "status": "success", "stats": {}}
EMPTY = {"type": "error", "severity": "error", "message": "The model returned an empty response."}
REFUSED = {
    "type": "result",
    "status": "error",
    "error": {"type": "unknown", "message": '[API Error: {"error":{"message":"too long"}}]'},
}


@pytest.mark.parametrize(
    ("return_code", "stdout", "outcome", "reason"),
    [
        pytest.param(0, lines(SAID, SUCCESS), "completed", "", id="success"),
        pytest.param(
            144, lines(REFUSED), "failed", "gemini_cli reported an error: too long", id="refused"
        ),
        pytest.param(
            0,
            lines(REFUSED),
            "failed",
            "gemini_cli reported an error: too long",
            id="refused with a status that lies",
        ),
        pytest.param(
            0,
            lines(EMPTY, {"type": "result", "status": "error"}),
            "completed",
            "gemini_cli stopped: The model returned an empty response.",
            id="gave up on empty answers",
        ),
        pytest.param(0, lines(EMPTY, SAID, SUCCESS), "completed", "", id="got over an error"),
        pytest.param(
            53, lines(SAID, REFUSED), "completed", "stopped at max_turns", id="turn limit"
        ),
        pytest.param(
            137, lines(SAID), "failed", "gemini_cli ended with status 137 (signal 9)", id="killed"
        ),
        pytest.param(42, b"", "failed", "gemini_cli ended with status 42: no input", id="no start"),
    ],
)
def test_the_result_event_decides(
    return_code: int, stdout: bytes, outcome: str, reason: str
) -> None:
    stderr = b"no input\n" if not stdout else b""
    end = GeminiCli().ended(return_code, stdout, stderr)
    assert (end.outcome, end.reason, end.return_code) == (outcome, reason, return_code)
