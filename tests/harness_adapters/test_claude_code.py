import json

import pytest

from harness_adapters.claude_code import ClaudeCode
from tests.harness_adapters.samples import CONTEXT, KEY, agent, context

RUN = (
    "/polar/packs/x/bin/claude -p --output-format stream-json --verbose "
    "--dangerously-skip-permissions --tools Agent,Bash,Edit,Read,Write,Glob,Grep"
)
INIT = b'{"type":"system","subtype":"init","cwd":"/w","tools":["Bash"]}\n'
SAID = b'{"type":"assistant","message":{"content":[{"type":"text","text":"{\\"type\\":\\"result\\"}"}]}}\n'
SUCCESS = b'{"stop_reason":"end_turn","is_error":false,"subtype":"success","result":"Done.","type":"result"}\n'
API_ERROR = (
    b'{"terminal_reason":"api_error","is_error":true,"subtype":"success",'
    b'"result":"API Error: 400 refused","type":"result"}\n'
)
MAX_TURNS = (
    b'{"terminal_reason":"max_turns","is_error":true,"subtype":"error_max_turns",'
    b'"errors":["Reached maximum number of turns (2)"],"type":"result"}\n'
)
BROKE = (
    b'{"is_error":true,"subtype":"error_during_execution","errors":["first","second"],'
    b'"type":"result"}\n'
)


def test_the_plan_runs_the_packs_binary_with_the_prompt_on_stdin() -> None:
    plan = ClaudeCode().plan(agent("claude_code"), CONTEXT)
    assert plan.command == RUN
    assert plan.files == {}
    assert plan.cwd == "/testbed"
    assert plan.native_logs == ["/polar/session/home/.claude/projects"]


def test_without_a_pack_the_command_comes_from_path() -> None:
    plan = ClaudeCode().plan(agent("claude_code"), context(pack_dir=None))
    assert plan.command.startswith("claude -p ")


def test_the_environment_points_every_model_name_at_the_gateway() -> None:
    env = ClaudeCode().plan(agent("claude_code"), CONTEXT).env
    assert env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8100"
    assert env["ANTHROPIC_API_KEY"] == KEY
    models = {name: value for name, value in env.items() if name.endswith("_MODEL")}
    assert len(models) == 5
    assert set(models.values()) == {"Qwen/Qwen3.5-4B"}
    assert env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "40960"
    assert env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "8192"


def test_the_environment_keeps_it_quiet_and_its_prompt_stable() -> None:
    env = ClaudeCode().plan(agent("claude_code"), CONTEXT).env
    assert env["HOME"] == "/polar/session/home"
    assert env["IS_SANDBOX"] == "1"
    assert env["ENABLE_TOOL_SEARCH"] == "false"
    assert env["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert env["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] == "1"
    assert env["CLAUDE_CODE_DISABLE_BACKGROUND_TASKS"] == "1"
    assert env["API_TIMEOUT_MS"] == "3600000"
    assert "CLAUDE_CODE_DISABLE_THINKING" not in env


def test_settings_reach_the_command_line_and_long_ones_a_file() -> None:
    settings = {
        "tools": ["Bash", "Read"],
        "max_turns": 7,
        "append_system_prompt": "Be 'brief'.",
        "disable_thinking": True,
        "bare": True,
    }
    plan = ClaudeCode().plan(agent("claude_code", settings=settings), CONTEXT)
    path = "/polar/session/home/.claude/append-system-prompt.txt"
    assert plan.command.endswith(
        f"--tools Bash,Read --max-turns 7 --bare --append-system-prompt-file {path}"
    )
    assert plan.files == {path: "Be 'brief'."}
    assert plan.env["CLAUDE_CODE_DISABLE_THINKING"] == "1"


def test_mcp_servers_go_into_a_file_and_no_others_are_used() -> None:
    servers = [
        {"name": "a", "command": "/bin/x", "args": ["-v"]},
        {"name": "b", "transport": "streamable-http", "url": "http://h/mcp"},
        {"name": "c", "transport": "sse", "url": "http://h/sse"},
    ]
    plan = ClaudeCode().plan(agent("claude_code", mcp_servers=servers), CONTEXT)
    path = "/polar/session/home/.claude/mcp-servers.json"
    assert plan.command.endswith(f"--mcp-config {path} --strict-mcp-config")
    assert json.loads(plan.files[path]) == {
        "mcpServers": {
            "a": {"type": "stdio", "command": "/bin/x", "args": ["-v"]},
            "b": {"type": "http", "url": "http://h/mcp"},
            "c": {"type": "sse", "url": "http://h/sse"},
        }
    }


def test_skills_are_linked_into_the_home_and_the_model_gets_the_skill_tool() -> None:
    command = ClaudeCode().plan(agent("claude_code", skills_path="/opt/skills"), CONTEXT).command
    assert command == (
        "mkdir -p /polar/session/home/.claude && "
        "ln -sfn /opt/skills /polar/session/home/.claude/skills && " + RUN + ",Skill"
    )


def test_a_bare_run_refuses_skills_that_its_model_would_not_see() -> None:
    spec = agent("claude_code", skills_path="/opt/skills", settings={"bare": True})
    with pytest.raises(ValueError, match=r"agent\.settings\.bare"):
        ClaudeCode().plan(spec, CONTEXT)


def test_an_instruction_that_looks_like_a_command_of_the_cli_is_shielded_by_a_space() -> None:
    plan = ClaudeCode().plan(
        agent("claude_code"), context(instruction="/clear the cache of app.py")
    )
    assert plan.command == "{ printf ' '; cat; } | " + RUN


def test_the_tasks_environment_wins() -> None:
    spec = agent("claude_code", env={"ANTHROPIC_BASE_URL": "http://mine"})
    assert ClaudeCode().plan(spec, CONTEXT).env["ANTHROPIC_BASE_URL"] == "http://mine"


@pytest.mark.parametrize(
    ("return_code", "stdout", "stderr", "outcome", "reason"),
    [
        (0, INIT + SAID + SUCCESS, b"", "completed", ""),
        (143, INIT + SAID + SUCCESS, b"", "completed", ""),
        (
            1,
            INIT + API_ERROR,
            b"",
            "failed",
            "claude_code reported an error: API Error: 400 refused",
        ),
        (1, INIT + MAX_TURNS, b"", "completed", "stopped at max_turns"),
        (
            1,
            INIT + BROKE,
            b"",
            "failed",
            "claude_code reported an error (error_during_execution): first; second",
        ),
        (
            1,
            b"",
            b"error: unknown option '--nope'\n",
            "failed",
            "claude_code ended with status 1: error: unknown option '--nope'",
        ),
        (143, INIT + SAID, b"", "failed", "claude_code ended with status 143 (signal 15)"),
    ],
)
def test_the_result_event_decides_and_else_the_exit_status(
    return_code: int | None, stdout: bytes, stderr: bytes, outcome: str, reason: str
) -> None:
    end = ClaudeCode().ended(return_code, stdout, stderr)
    assert (end.outcome, end.reason, end.return_code) == (outcome, reason, return_code)
