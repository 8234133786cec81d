"""The launch plans, run for real: each CLI from its pack against a loopback model endpoint."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import harness_adapters
from harness_adapters import npm
from harness_adapters.base import AgentSpec, HarnessEnd
from tests.harness_adapters.samples import agent, context
from tests.harness_adapters.stub_model import REPLY, StubModel, stub_model
from tests.requirements import require

pytestmark = pytest.mark.clis

CLIS = tuple(npm.PACKS)

KEY = "key-of-this-session"

MODEL = "org/some-model:4b"

CHAT = ("/v1/chat/completions", "authorization", f"Bearer {KEY}")

AUTH = {
    "codex": ("/v1/responses", "authorization", f"Bearer {KEY}"),
    "claude_code": ("/v1/messages", "x-api-key", KEY),
    "pi": CHAT,
    "pi_old": CHAT,
    "gemini_cli": (f"/v1beta/models/{MODEL}:streamGenerateContent", "x-goog-api-key", KEY),
    "qwen_code": CHAT,
    "opencode": CHAT,
}


class Ran(NamedTuple):
    end: HarnessEnd
    stdout: str
    logs: list[Path]


@pytest.fixture
def stub() -> Iterator[StubModel]:
    with stub_model() as serving:
        yield serving


def run(
    spec: AgentSpec,
    url: str,
    folder: Path,
    instruction: str = "Say hello.",
    context_length: int = 40960,
) -> Ran:
    """Carry out the plan as the local runtime would."""
    adapter = harness_adapters.get(spec)
    packs = {pack.name: pack.path for pack in npm.installed(npm.default_cache())}
    require("clis", adapter.pack in packs, f"run: polar harness install {adapter.pack}")
    workdir = folder / "work"
    workdir.mkdir()
    (workdir / "app.py").write_text("print('a file of the workspace')\n")
    where = context(
        instruction=instruction,
        model_name=MODEL,
        model_url=url,
        api_key=KEY,
        home_dir=str(folder / "home"),
        workdir=str(workdir),
        pack_dir=str(packs[adapter.pack or ""]),
        context_length=context_length,
    )
    harness_adapters.check_settings(spec)
    plan = adapter.plan(spec, where)
    for path, text in plan.files.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    # Codex says by this flag which keys of its configuration it does not know.
    command = plan.command.replace(" exec --json", " exec --strict-config --json")
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=plan.cwd,
        env={"PATH": os.environ["PATH"], **plan.env},
        input=instruction.encode(),
        capture_output=True,
        timeout=90,
        check=False,
    )
    end = adapter.ended(done.returncode, done.stdout, done.stderr)
    logs = [
        file
        for path in plan.native_logs
        for file in (Path(path), *Path(path).rglob("*"))
        if file.is_file()
    ]
    return Ran(end, done.stdout.decode(), logs)


@pytest.mark.parametrize("harness", CLIS)
def test_it_calls_the_gateway_with_the_sessions_key_and_completes(
    harness: str, stub: StubModel, tmp_path: Path
) -> None:
    ran = run(agent(harness), stub.url, tmp_path)
    assert (ran.end.outcome, ran.end.return_code) == ("completed", 0)
    assert REPLY in ran.stdout
    (call,) = stub.calls
    path, header, value = AUTH[harness]
    assert call.path == path
    assert call.headers[header] == value
    assert call.path.startswith("/v1beta/") or call.body["model"] == MODEL
    assert call.path.startswith("/v1beta/") or call.body["stream"] is True
    assert "Say hello." in json.dumps(call.body)
    assert ran.logs


@pytest.mark.parametrize("harness", CLIS)
def test_a_refused_model_call_is_a_failure_that_says_why(harness: str, tmp_path: Path) -> None:
    with stub_model(refuses=True) as refusing:
        ran = run(agent(harness), refusing.url, tmp_path)
    assert refusing.calls
    assert ran.end.outcome == "failed"
    assert "the stub refuses this request" in ran.end.reason


@pytest.mark.parametrize("harness", CLIS)
def test_an_instruction_of_a_megabyte_arrives_whole(
    harness: str, stub: StubModel, tmp_path: Path
) -> None:
    instruction = "begin " + "word " * 200_000 + "end"
    ran = run(agent(harness), stub.url, tmp_path, instruction, context_length=1_000_000)
    assert ran.end == HarnessEnd(outcome="completed", return_code=0)
    assert instruction in json.dumps(stub.calls[0].body)


@pytest.mark.parametrize(
    "instruction",
    [
        pytest.param("/clear the cache\n\n  in app.py\n!ls", id="slash"),
        pytest.param(
            "-p is no flag:\n@app.py and\t@src/x are files, 'a' \"b\" $HOME", id="mention"
        ),
    ],
)
@pytest.mark.parametrize("harness", CLIS)
def test_an_instruction_that_looks_like_a_command_reaches_the_model_as_it_is(
    harness: str, instruction: str, stub: StubModel, tmp_path: Path
) -> None:
    run(agent(harness), stub.url, tmp_path, instruction)
    (call,) = stub.calls
    assert instruction in {text.strip() for text in texts(call.body)}
    # Claude Code puts a file that is mentioned beside the instruction, as its users know it.
    if harness != "claude_code":
        assert "a file of the workspace" not in json.dumps(call.body)


def texts(value: Any) -> Iterator[str]:
    """Every string in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for inside in value.values() if isinstance(value, dict) else value:
            yield from texts(inside)


@pytest.mark.parametrize("harness", sorted({*CLIS} - {"pi_old"}))
def test_the_tools_of_an_mcp_server_reach_the_model(
    harness: str, stub: StubModel, tmp_path: Path
) -> None:
    server = {
        "name": "widgets",
        "command": sys.executable,
        "args": [str(Path(__file__).parent / "mcp_server.py")],
    }
    ran = run(agent(harness, mcp_servers=[server]), stub.url, tmp_path)
    assert ran.end.outcome == "completed"
    assert "frobnicate" in json.dumps(stub.calls[0].body["tools"])


@pytest.mark.parametrize("harness", CLIS)
def test_skills_reach_the_model(harness: str, stub: StubModel, tmp_path: Path) -> None:
    skill = tmp_path / "my skills" / "frob"
    skill.mkdir(parents=True)
    (skill / "SKILL.md").write_text(
        "---\nname: frob\ndescription: Frobnicates widgets well.\n---\nTurn the knob.\n"
    )
    ran = run(agent(harness, skills_path=str(skill.parent)), stub.url, tmp_path)
    assert ran.end.outcome == "completed"
    assert "Frobnicates widgets well." in json.dumps(stub.calls[0].body)


def test_codex_settings_are_seen_on_the_wire(stub: StubModel, tmp_path: Path) -> None:
    settings = {"multi_agent": False, "reasoning_effort": "high"}
    run(agent("codex", settings=settings), stub.url, tmp_path)
    body = stub.calls[0].body
    assert body["reasoning"] == {"effort": "high"}
    assert [tool["name"] for tool in body["tools"]] == ["exec_command", "write_stdin"]


def test_claude_code_settings_are_seen_on_the_wire(stub: StubModel, tmp_path: Path) -> None:
    settings = {
        "tools": ["Bash", "Read"],
        "max_turns": 3,
        "append_system_prompt": "Answer in verse.",
        "disable_thinking": True,
    }
    ran = run(agent("claude_code", settings=settings), stub.url, tmp_path)
    assert ran.end.outcome == "completed"
    body = stub.calls[0].body
    assert [tool["name"] for tool in body["tools"]] == ["Bash", "Read"]
    assert "Answer in verse." in json.dumps(body["system"])
    assert "thinking" not in body
    assert body["max_tokens"] == 8192


def test_a_bare_claude_code_says_little(stub: StubModel, tmp_path: Path) -> None:
    run(agent("claude_code", settings={"bare": True}), stub.url, tmp_path)
    assert len(json.dumps(stub.calls[0].body)) < 6000


@pytest.mark.parametrize("harness", ["pi", "pi_old"])
def test_pi_settings_are_seen_on_the_wire(harness: str, stub: StubModel, tmp_path: Path) -> None:
    settings = {
        "reasoning": True,
        "thinking": "high",
        "tools": ["read", "bash"],
        "append_system_prompt": "Answer in verse.",
    }
    run(agent(harness, settings=settings), stub.url, tmp_path)
    body = stub.calls[0].body
    assert body["reasoning_effort"] == "high"
    assert body["messages"][0]["role"] == "developer"
    assert "Answer in verse." in json.dumps(body["messages"][0])
    assert [tool["function"]["name"] for tool in body["tools"]] == ["read", "bash"]
    assert body["max_completion_tokens"] == 8192


def test_gemini_cli_settings_are_seen_on_the_wire(stub: StubModel, tmp_path: Path) -> None:
    run(agent("gemini_cli", settings={"tools": ["read_file", "glob"]}), stub.url, tmp_path)
    (tools,) = stub.calls[0].body["tools"]
    assert [tool["name"] for tool in tools["functionDeclarations"]] == ["read_file", "glob"]


def test_qwen_code_settings_are_seen_on_the_wire(stub: StubModel, tmp_path: Path) -> None:
    settings = {
        "exclude_tools": ["glob"],
        "reasoning_effort": "high",
        "append_system_prompt": "Answer in verse.",
    }
    run(agent("qwen_code", settings=settings), stub.url, tmp_path)
    body = stub.calls[0].body
    assert body["reasoning"] == {"effort": "high"}
    assert "Answer in verse." in json.dumps(body["messages"][0])
    names = {tool["function"]["name"] for tool in body["tools"]}
    assert names >= {"run_shell_command", "edit", "agent"}
    assert "glob" not in names
    assert body["max_tokens"] == 8192


def test_opencode_settings_are_seen_on_the_wire(stub: StubModel, tmp_path: Path) -> None:
    settings = {
        "exclude_tools": ["webfetch", "task"],
        "append_system_prompt": "Answer in verse.",
    }
    run(agent("opencode", settings=settings), stub.url, tmp_path)
    body = stub.calls[0].body
    assert "Answer in verse." in json.dumps(body["messages"][0])
    names = {tool["function"]["name"] for tool in body["tools"]}
    assert names >= {"bash", "edit", "read"}
    assert not names & {"webfetch", "task"}
    assert body["max_tokens"] == 8192


def test_a_codex_whose_mcp_server_does_not_start_fails_and_names_it(
    stub: StubModel, tmp_path: Path
) -> None:
    server = {"name": "widgets", "command": "/nonexistent/server"}
    ran = run(agent("codex", mcp_servers=[server]), stub.url, tmp_path)
    assert ran.end.outcome == "failed"
    assert "widgets" in ran.end.reason
    assert stub.calls == []
