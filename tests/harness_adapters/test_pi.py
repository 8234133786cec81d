import json

import pytest

from harness_adapters.pi import Pi, PiOld
from tests.harness_adapters.samples import CONTEXT, KEY, agent, context

AGENT_DIR = "/polar/session/home/.pi/agent"


def test_the_plan_runs_the_packs_launcher_in_text_mode_with_the_prompt_on_stdin() -> None:
    plan = Pi().plan(agent("pi"), CONTEXT)
    assert plan.command == (
        "/polar/packs/x/bin/pi --provider gateway --model Qwen/Qwen3.5-4B -p --no-extensions"
    )
    assert plan.cwd == "/testbed"
    assert plan.native_logs == [f"{AGENT_DIR}/sessions"]
    assert plan.env == {
        "HOME": "/polar/session/home",
        "POLAR_MODEL_KEY": KEY,
        "PI_OFFLINE": "1",
        "PI_TELEMETRY": "0",
        "PI_SKIP_VERSION_CHECK": "1",
    }


def test_without_a_pack_the_command_comes_from_path() -> None:
    assert Pi().plan(agent("pi"), context(pack_dir=None)).command.startswith("pi --provider ")


def test_the_model_entry_tells_the_window_and_takes_the_key_from_the_environment() -> None:
    plan = Pi().plan(agent("pi"), CONTEXT)
    provider = json.loads(plan.files[f"{AGENT_DIR}/models.json"])["providers"]["gateway"]
    assert provider["baseUrl"] == "http://127.0.0.1:8100/v1"
    assert provider["api"] == "openai-completions"
    assert provider["apiKey"] == "$POLAR_MODEL_KEY"
    (model,) = provider["models"]
    assert model["id"] == "Qwen/Qwen3.5-4B"
    assert (model["contextWindow"], model["maxTokens"]) == (40960, 8192)
    assert model["reasoning"] is False


def test_what_compaction_reserves_fits_the_window() -> None:
    small = json.loads(Pi().plan(agent("pi"), CONTEXT).files[f"{AGENT_DIR}/settings.json"])
    assert small["compaction"] == {"reserveTokens": 10240, "keepRecentTokens": 10240}
    large = Pi().plan(agent("pi"), context(context_length=131072))
    assert json.loads(large.files[f"{AGENT_DIR}/settings.json"])["compaction"] == {
        "reserveTokens": 16384,
        "keepRecentTokens": 20000,
    }


def test_settings_and_skills_reach_the_command_line() -> None:
    settings = {
        "reasoning": True,
        "thinking": "high",
        "tools": ["read", "bash"],
        "append_system_prompt": "Be brief.",
    }
    plan = Pi().plan(agent("pi", settings=settings, skills_path="/opt/skills"), CONTEXT)
    assert plan.command.endswith(
        f"--thinking high --tools read,bash --append-system-prompt "
        f"{AGENT_DIR}/append-system-prompt.txt --skill /opt/skills"
    )
    assert plan.files[f"{AGENT_DIR}/append-system-prompt.txt"] == "Be brief."
    models = json.loads(plan.files[f"{AGENT_DIR}/models.json"])["providers"]["gateway"]["models"]
    assert models[0]["reasoning"] is True


def test_no_tools_at_all_is_a_flag_of_its_own() -> None:
    plan = Pi().plan(agent("pi", settings={"tools": []}), CONTEXT)
    assert plan.command.endswith("-p --no-extensions --no-tools")


def test_mcp_servers_are_declared_like_built_in_tools() -> None:
    servers = [
        {"name": "a", "command": "/bin/a", "args": ["-x"]},
        {"name": "b", "transport": "streamable-http", "url": "http://b"},
    ]
    plan = Pi().plan(agent("pi", mcp_servers=servers), CONTEXT)
    assert json.loads(plan.files[f"{AGENT_DIR}/mcp.json"]) == {
        "mcpServers": {
            "a": {"command": "/bin/a", "args": ["-x"], "exposure": "direct"},
            "b": {"url": "http://b", "exposure": "direct"},
        }
    }
    assert plan.command.endswith("--no-extensions --extension builtin:mcp")


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"name": "a", "transport": "sse", "url": "http://a"}, r"agent\.mcp_servers: .* not sse"),
        ({"name": "a b", "command": "/bin/a"}, r"agent\.mcp_servers: .* not 'a b'"),
    ],
)
def test_mcp_servers_that_pi_cannot_have_are_refused(server: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pi().plan(agent("pi", mcp_servers=[server]), CONTEXT)


def test_an_instruction_that_would_be_its_mcp_command_is_refused_in_words() -> None:
    spec = agent("pi", mcp_servers=[{"name": "a", "command": "/bin/x"}])
    with pytest.raises(ValueError, match="the instruction begins with /mcp"):
        Pi().plan(spec, context(instruction=" /mcp list"))
    Pi().plan(agent("pi"), context(instruction="/mcp list"))


def test_the_old_pi_names_its_key_otherwise_and_knows_no_mcp() -> None:
    plan = PiOld().plan(agent("pi_old"), CONTEXT)
    assert plan.command == "/polar/packs/x/bin/pi --provider gateway --model Qwen/Qwen3.5-4B -p"
    models = json.loads(plan.files[f"{AGENT_DIR}/models.json"])
    assert models["providers"]["gateway"]["apiKey"] == "POLAR_MODEL_KEY"
    spec = agent("pi_old", mcp_servers=[{"name": "a", "command": "/bin/x"}])
    with pytest.raises(ValueError, match=r"agent\.mcp_servers: pi_old has no MCP support"):
        PiOld().plan(spec, CONTEXT)


@pytest.mark.parametrize(
    ("return_code", "stderr", "outcome", "reason"),
    [
        (0, b"", "completed", ""),
        (
            1,
            b"400 prompt is too long\n",
            "failed",
            "pi ended with status 1: 400 prompt is too long",
        ),
        (
            1,
            b"Response was truncated: the model reached its output token limit.\n",
            "completed",
            "the last answer was cut at its output limit",
        ),
        (143, b"", "failed", "pi ended with status 143 (signal 15)"),
        (-2, b"", "failed", "pi was ended by signal 2"),
    ],
)
def test_the_exit_status_decides_and_stderr_says_why(
    return_code: int | None, stderr: bytes, outcome: str, reason: str
) -> None:
    end = Pi().ended(return_code, b"whatever the answer was\n", stderr)
    assert (end.outcome, end.reason) == (outcome, reason)
