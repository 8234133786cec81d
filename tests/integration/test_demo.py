"""The demo as people run it: one command, and then nothing of it is left running."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from harness_adapters import npm
from polar_gateway.runtimes.docker import DockerRuntime
from tests.requirements import require

ROOT = Path(__file__).parent.parent.parent
NO_DOCKER = {"DOCKER_HOST": "unix:///nonexistent/docker.sock"}


def demo(tmp_path: Path, *options: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "examples/demo/demo.py", *options],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome(run: subprocess.Popen[str], timeout: float) -> tuple[dict[str, Any], str]:
    try:
        said, told = run.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        run.send_signal(signal.SIGINT)
        said, told = run.communicate(timeout=90)
        pytest.fail(f"the demo took longer than {timeout} s; it said:\n{told}")
    document: dict[str, Any] = json.loads(said.splitlines()[-1])
    return document, told


def processes_of(folder: Path) -> list[str]:
    """Command lines that name the folder: what a run in it started and left behind."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it ended meanwhile
            continue
        if str(folder) in line:
            found.append(line)
    return found


def assert_everything_was_graded(document: dict[str, Any], engine: str, runtime: str) -> None:
    assert document["ok"] is True
    assert (document["engine"], document["runtime"]) == (engine, runtime)
    assert [task["harness"] for task in document["tasks"]] == ["codex", "claude_code", "pi"]
    for task in document["tasks"]:
        assert len(task["sessions"]) == 2
        for session in task["sessions"]:
            assert session["status"] == "COMPLETED"
            assert session["reward"] == 1.0
            assert session["completions"] >= 4
            assert session["traces"] == 1
            assert session["trainable_tokens"] > 0


@pytest.fixture
def clis() -> None:
    missing = {"codex", "claude_code", "pi"} - {
        pack.name for pack in npm.installed(npm.default_cache())
    }
    require("clis", not missing, f"run `polar harness install {' '.join(sorted(missing))}`")


@pytest.mark.clis
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("clis")
def test_without_docker_the_demo_runs_on_this_machine_and_says_so(tmp_path: Path) -> None:
    run = demo(tmp_path, **NO_DOCKER)
    document, told = outcome(run, 240)
    assert run.returncode == 0, told
    assert_everything_was_graded(document, "scripted", "local")
    assert "isolates nothing" in told
    assert "no model" in told
    (folder,) = tmp_path.glob("polar-demo-*")
    results = json.loads((folder / "results.json").read_text())
    trace = results["codex"]["results"][0]["trajectory"]["traces"][0]
    assert len(trace["response_ids"]) == len(trace["loss_mask"]) == len(trace["response_logprobs"])
    assert not processes_of(tmp_path)


@pytest.mark.docker
@pytest.mark.clis
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("clis")
async def test_with_docker_the_demo_runs_in_containers(tmp_path: Path) -> None:
    missing = await DockerRuntime.unavailable()
    require("docker", missing is None, missing or "")
    run = demo(tmp_path)
    document, told = outcome(run, 240)
    assert run.returncode == 0, told
    assert_everything_was_graded(document, "scripted", "docker")


@pytest.mark.vllm
@pytest.mark.clis
@pytest.mark.timeout(540)
@pytest.mark.usefixtures("clis")
def test_the_demo_is_the_same_on_a_real_vllm(tmp_path: Path) -> None:
    cache = Path(os.environ.get("POLAR_CACHE") or Path.home() / ".cache/polar")
    require("vllm", (cache / "vllm/installed").exists(), "run `scripts/vllm.sh install`")
    run = demo(tmp_path, "--engine", "vllm", **NO_DOCKER)
    document, told = outcome(run, 480)
    assert run.returncode == 0, told
    assert_everything_was_graded(document, "vllm", "local")


@pytest.mark.clis
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("clis")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_an_interrupted_demo_leaves_nothing_running(tmp_path: Path, how: signal.Signals) -> None:
    run = demo(tmp_path, **NO_DOCKER)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("polar-demo-*/node/attempts/*")):
        assert run.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    run.send_signal(how)
    document, told = outcome(run, 90)
    assert run.returncode == 130, told
    assert document["ok"] is False
    assert "everything is stopped" in told
    assert not processes_of(tmp_path)
