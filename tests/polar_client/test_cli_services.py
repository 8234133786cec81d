"""The services as people start them: processes that say where they listen, and end when told."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
POLAR = str(Path(sys.executable).with_name("polar"))
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if not name.startswith("POLAR_") or name == "POLAR_CACHE"
} | {"DOCKER_HOST": "unix:///nonexistent/docker.sock"}


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=60)


def said(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What a service with --json says when it is ready."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate(timeout=60)[1]
    document: dict[str, Any] = json.loads(line)
    return document


def polar(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [POLAR, *arguments],
        cwd=ROOT, env=ENVIRONMENT | environment, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def engine_url() -> Iterator[str]:
    script = str(ROOT / "examples/demo/script.json")
    command = (sys.executable, "-m", "polar_gateway.testing.engine", "--port", "0", "--script", script)
    with running(*command) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[0]


@pytest.fixture(scope="module")
def up(engine_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A running `polar up`: what it said."""
    folder = tmp_path_factory.mktemp("up")
    options = ("--port", "0", "--data-dir", str(folder), "--engine-url", engine_url, "--allow-unisolated")
    with running(POLAR, "up", "--json", *options) as process:
        yield said(process)


def test_up_says_where_it_listens_and_where_its_token_is(up: dict[str, Any]) -> None:
    token_file = Path(up["token_file"])
    assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
    assert "local" in up["runtimes"]
    assert "shell" in up["harnesses"]
    status = polar("status", "--json", "--url", up["url"], POLAR_TOKEN_FILE=str(token_file))
    (node,) = json.loads(status.stdout)["nodes"]
    assert node["node_id"] == up["node_id"]
    assert node["healthy"] is True


@pytest.mark.skipif(shutil.which("curl") is None, reason="the example asks with curl")
def test_a_task_goes_the_whole_way_from_the_command_line(up: dict[str, Any]) -> None:
    environment = {"POLAR_URL": up["url"], "POLAR_TOKEN_FILE": up["token_file"]}
    done = polar("submit", "examples/tasks/shell.yaml", "--wait", **environment)
    assert done.returncode == 0, done.stderr
    assert "shell 1: COMPLETED, 1 model call, reward 1.0" in done.stderr
    assert "graded, all tokens" in done.stdout
    (result,) = json.loads(polar("status", "ask-with-curl", "--json", **environment).stdout)["results"]
    (trace,) = result["trajectory"]["traces"]
    assert trace["response_ids"]
    assert trace["loss_mask"] == [1] * len(trace["response_ids"])


def test_waiting_with_json_prints_the_tasks_document_alone(up: dict[str, Any], tmp_path: Path) -> None:
    task = yaml.safe_load((ROOT / "examples/tasks/shell.yaml").read_text())
    task["task_id"] = "fails"
    task["agent"]["custom_shell"]["command"] = "exit 7"
    (tmp_path / "task.json").write_text(json.dumps(task))
    done = polar(
        "submit", str(tmp_path / "task.json"), "--wait", "--json", "--url", up["url"],
        POLAR_TOKEN_FILE=up["token_file"],
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    assert [result["status"] for result in document["results"]] == ["ERROR"]
    assert document["results"][0]["failure"]["boundary"] == "harness"


@pytest.mark.parametrize("file", ["swegym.json", "fix-the-mean.json", "shell.yaml"])
def test_the_example_tasks_are_accepted_at_submit(
    file: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """By a server that has no nodes yet, which checks against what is installed."""
    folder = tmp_path_factory.mktemp("server")
    config = folder / "topology.yaml"
    config.write_text("rollout: {port: 0}\n")
    with running(POLAR, "server", "--json", "-c", str(config), "--data-dir", str(folder)) as process:
        server = said(process)
        done = polar(
            "submit", f"examples/tasks/{file}", "--url", server["url"], POLAR_TOKEN_FILE=server["token_file"]
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("is running\n")


def test_a_refused_document_exits_1_with_the_fields_path(up: dict[str, Any], tmp_path: Path) -> None:
    task = json.loads((ROOT / "examples/tasks/fix-the-mean.json").read_text())
    task["evaluator"]["config"]["test_comand"] = "x"
    (tmp_path / "task.json").write_text(json.dumps(task))
    done = polar("submit", str(tmp_path / "task.json"), "--url", up["url"], POLAR_TOKEN_FILE=up["token_file"])
    assert done.returncode == 1
    assert "evaluator.config.test_comand" in done.stderr


def test_a_caller_without_the_token_is_told_how_to_give_it(up: dict[str, Any]) -> None:
    done = polar("status", "--url", up["url"])
    assert done.returncode == 1
    assert "POLAR_TOKEN_FILE" in done.stderr


def test_server_and_gateway_are_two_processes_that_find_each_other(engine_url: str, tmp_path: Path) -> None:
    config = tmp_path / "topology.yaml"
    document = {
        "rollout": {"port": 0, "data_dir": str(tmp_path / "server")},
        "gateway": {
            "nodes": [
                {"id": name, "port": 0, "data_dir": str(tmp_path / name), "inference": {"base_url": engine_url}}
                for name in ("node-a", "node-b")
            ]
        },
    }
    config.write_text(yaml.safe_dump(document))
    with running(POLAR, "server", "--json", "-c", str(config)) as first:
        server = said(first)
        document["gateway"]["rollout_server_url"] = server["url"]
        config.write_text(yaml.safe_dump(document))
        without_id = polar("gateway", "-c", str(config))
        assert without_id.returncode == 2
        assert "node-a, node-b" in without_id.stderr
        with running(POLAR, "gateway", "--json", "-c", str(config), "--node-id", "node-b") as second:
            assert said(second)["node_id"] == "node-b"
            status = polar("status", "--url", server["url"], POLAR_TOKEN_FILE=server["token_file"])
            assert "node-b" in status.stdout


def test_up_serves_one_node(tmp_path: Path) -> None:
    config = tmp_path / "topology.yaml"
    config.write_text("gateway: {nodes: [{id: a}, {id: b, port: 0}]}\n")
    done = polar("up", "-c", str(config))
    assert done.returncode == 2
    assert "serves one" in done.stderr


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_a_service_that_is_told_to_stop_stops(tmp_path: Path, how: signal.Signals) -> None:
    config = tmp_path / "topology.yaml"
    config.write_text("rollout: {port: 0}\n")
    with running(POLAR, "server", "--json", "-c", str(config), "--data-dir", str(tmp_path)) as process:
        said(process)
        process.send_signal(how)
        assert process.wait(timeout=30) == 0


def test_a_port_that_is_taken_is_named(up: dict[str, Any], tmp_path: Path) -> None:
    port = up["url"].rpartition(":")[2]
    done = polar("up", "--port", port, "--data-dir", str(tmp_path), "--engine-url", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert port in done.stderr
    assert "Traceback" not in done.stderr
