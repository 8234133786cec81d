"""Real parts that integration tests share: installed harness packs, a Docker image, a real vLLM."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from harness_adapters import npm
from polar_gateway.runtimes.docker import DockerRuntime
from polar_gateway.testing import images
from polar_gateway.testing.script import Script
from tests.requirements import require

DEMO = Path(__file__).parent.parent.parent / "examples" / "demo"
HARNESSES = ("codex", "claude_code", "pi")
"""Those for which the demo's script has a part."""
SHELL_TOOL = {
    "pi_old": "bash",
    "gemini_cli": "run_shell_command",
    "qwen_code": "run_shell_command",
    "opencode": "bash",
}
"""The tool that runs commands in the harnesses for which the demo's script has no part."""


def part_of(tool: str) -> Script:
    """The part that the demo's script has for Codex, said with another name for its tool."""
    document = json.loads((DEMO / "script.json").read_text())
    (part,) = (rule for rule in document["rules"] if '"name": "exec_command"' in rule["match"])
    words = (
        json.dumps({"rules": [part]}).replace("exec_command", tool).replace('"cmd"', '"command"')
    )
    return msgspec.json.decode(words, type=Script)


@pytest.fixture(scope="session")
def packs() -> Path:
    """The folder of the installed packs of all CLIs."""
    cache = npm.default_cache()
    missing = set(npm.PACKS) - {pack.name for pack in npm.installed(cache)}
    require(
        "clis", not missing, f"run `polar harness install {' '.join(sorted(missing))}` to have them"
    )
    return cache


@pytest.fixture
async def agent_image() -> str:
    """A Docker image with a shell, git and Python, made from this machine's own packages."""
    missing = await DockerRuntime.unavailable()
    require("docker", missing is None, missing or "")
    return await images.agent()


@pytest.fixture(scope="session")
def demo_task() -> dict[str, Any]:
    """The demo's task: a repository with a mistake in it, graded by its own tests."""
    task: dict[str, Any] = yaml.safe_load((DEMO / "task.yaml").read_text())
    return task
