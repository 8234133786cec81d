import json
from typing import Any

import pytest

from harness_adapters.base import AgentSpec, LaunchPlan
from harness_adapters.qwen_code import QwenCode
from tests.harness_adapters.samples import CONTEXT, KEY, agent, context

CONFIG_DIR = "/polar/session/home/.qwen"


def settings_of(spec: AgentSpec) -> dict[str, Any]:
    plan = QwenCode().plan(spec, CONTEXT)
    parsed: dict[str, Any] = json.loads(plan.files[f"{CONFIG_DIR}/settings.json"])
    return parsed


def with_instruction(text: str) -> LaunchPlan:
    return QwenCode().plan(agent("qwen_code"), context(instruction=text))


def test_the_plan_runs_the_packs_launcher_with_the_instruction_on_stdin() -> None:
    plan = QwenCode().plan(agent("qwen_code"), CONTEXT)
    assert plan.command == (
        "/polar/packs/x/bin/qwen --auth-type openai --yolo --output-format stream-json"
    )
    assert plan.cwd == "/testbed"
    assert plan.native_logs == [f"{CONFIG_DIR}/projects"]
    assert list(plan.files) == [f"{CONFIG_DIR}/settings.json"]


def test_the_endpoint_the_key_and_the_model_are_in_the_environment() -> None:
    env = QwenCode().plan(agent("qwen_code", env={"A": "b"}), CONTEXT).env
    assert env["OPENAI_BASE_URL"] == "http://127.0.0.1:8100/v1"
    assert env["OPENAI_API_KEY"] == KEY
    assert env["OPENAI_MODEL"] == "Qwen/Qwen3.5-4B"
    assert env["QWEN_CODE_MAX_OUTPUT_TOKENS"] == "8192"
    assert env["A"] == "b"


def test_without_a_pack_the_command_comes_from_path() -> None:
    plan = QwenCode().plan(agent("qwen_code"), context(pack_dir=None))
    assert plan.command.startswith("qwen --auth-type ")


def test_what_asks_the_model_beside_the_task_is_off_and_the_window_is_told() -> None:
    settings = settings_of(agent("qwen_code"))
    assert set(settings["memory"].values()) == {False}
    assert settings["model"] == {
        "skipLoopDetection": True,
        "skipNextSpeakerCheck": True,
        "generationConfig": {"contextWindowSize": 40960},
    }
    assert settings["tools"] == {
        "shell": {"enableInteractiveShell": True},
        "disabled": ["web_fetch"],
    }
    assert settings["agents"] == {"crossSessionMessaging": False}


def test_settings_reach_the_configuration_and_the_command_line() -> None:
    spec = agent(
        "qwen_code",
        settings={
            "exclude_tools": ["glob"],
            "max_turns": 7,
            "reasoning_effort": "high",
            "append_system_prompt": "Be brief.",
        },
    )
    settings = settings_of(spec)
    assert settings["tools"]["disabled"] == ["glob"]
    assert settings["model"]["maxSessionTurns"] == 7
    assert settings["model"]["reasoningEffort"] == "high"
    command = QwenCode().plan(spec, CONTEXT).command
    assert command.endswith(" --append-system-prompt 'Be brief.'")


def test_mcp_servers_are_declared_by_transport() -> None:
    servers = [
        {"name": "a", "command": "/bin/a", "args": ["-x"]},
        {"name": "b", "transport": "streamable-http", "url": "http://b"},
        {"name": "c", "transport": "sse", "url": "http://c"},
    ]
    common = {"trust": True, "alwaysLoadTools": True}
    assert settings_of(agent("qwen_code", mcp_servers=servers))["mcpServers"] == {
        "a": {"command": "/bin/a", "args": ["-x"], **common},
        "b": {"httpUrl": "http://b", **common},
        "c": {"url": "http://c", **common},
    }


def test_skills_are_linked_into_the_home() -> None:
    plan = QwenCode().plan(agent("qwen_code", skills_path="/opt/my skills"), CONTEXT)
    assert plan.command.startswith(f"ln -sfn '/opt/my skills' {CONFIG_DIR}/skills && ")


def test_an_instruction_that_mentions_a_file_is_a_custom_command_hidden_from_the_model() -> None:
    plan = with_instruction("Fix @app.py\n---\nnow")
    assert plan.files[f"{CONFIG_DIR}/commands/instruction.md"] == (
        "---\ndisable-model-invocation: true\n---\nFix @app.py\n---\nnow"
    )
    assert plan.command.startswith("{ cat > /dev/null; printf /instruction; } | ")


def test_an_instruction_that_begins_with_a_slash_is_shielded() -> None:
    assert with_instruction("/clear it").command.startswith("{ printf ' '; cat; } | ")


def result(**fields: Any) -> bytes:
    return json.dumps({"type": "result", **fields}).encode() + b"\n"


@pytest.mark.parametrize(
    ("return_code", "stdout", "outcome", "reason"),
    [
        pytest.param(0, result(subtype="success", is_error=False), "completed", "", id="success"),
        pytest.param(
            1,
            result(is_error=True, error={"message": "[API Error: 400 too long]"}),
            "failed",
            "qwen_code reported an error: [API Error: 400 too long]",
            id="refused",
        ),
        pytest.param(
            1,
            result(is_error=True, error={"message": "Loop detection halted the run (same)."}),
            "completed",
            "qwen_code stopped: Loop detection halted the run (same).",
            id="the same call over and over",
        ),
        pytest.param(53, b"", "completed", "stopped at max_turns", id="turn limit"),
        pytest.param(
            -9, b"", "failed", "qwen_code was ended by signal 9: said on stderr", id="killed"
        ),
        pytest.param(
            1,
            result(is_error="?"),
            "failed",
            "qwen_code ended with status 1: said on stderr",
            id="an event of another shape",
        ),
    ],
)
def test_the_result_event_decides(
    return_code: int, stdout: bytes, outcome: str, reason: str
) -> None:
    end = QwenCode().ended(return_code, stdout, b"said on stderr\n")
    assert (end.outcome, end.reason, end.return_code) == (outcome, reason, return_code)
