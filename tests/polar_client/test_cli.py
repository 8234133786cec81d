"""The command as people run it: a process, its two streams and its exit status."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

POLAR = Path(sys.executable).with_name("polar")


def polar(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("POLAR_")}
    return subprocess.run(
        [POLAR, *arguments], env=kept | environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_help_lists_the_commands_and_what_the_exit_statuses_mean() -> None:
    done = polar("--help")
    assert done.returncode == 0
    for word in ("up", "server", "gateway", "submit", "status", "cancel", "harness", "Exit status"):
        assert word in done.stdout


def test_help_imports_neither_service_nor_client() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "polar_client.cli"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "click" in imported
    assert not imported & {"httpx2", "rich", "msgspec", "starlette", "polar_server", "polar_gateway"}


@pytest.mark.parametrize("name", ["serve_rollout", "serve_gateway"])
def test_names_that_existing_scripts_use_are_understood(name: str) -> None:
    assert polar(name, "--help").returncode == 0


def test_wrong_usage_exits_2() -> None:
    done = polar("frobnicate")
    assert done.returncode == 2
    assert "No such command" in done.stderr


def test_a_wrong_configuration_exits_2_and_names_the_field(tmp_path: Path) -> None:
    config = tmp_path / "topology.yaml"
    config.write_text("rollout: {prot: 1}\n")
    done = polar("server", "-c", str(config))
    assert done.returncode == 2
    assert "prot" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_server_that_cannot_be_reached_exits_3_in_one_sentence() -> None:
    done = polar("status", "--url", "http://127.0.0.1:9")
    assert done.returncode == 3
    assert done.stderr.startswith("polar: cannot reach http://127.0.0.1:9")
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_tracebacks_are_for_those_who_ask() -> None:
    done = polar("status", "--url", "http://127.0.0.1:9", POLAR_DEBUG="1")
    assert "Traceback" in done.stderr


def test_a_file_that_is_not_there_exits_2() -> None:
    done = polar("submit", "/nonexistent/task.json")
    assert done.returncode == 2
    assert done.stderr == "polar: cannot read /nonexistent/task.json: No such file or directory\n"


def test_a_gateway_without_a_token_says_where_it_looks() -> None:
    done = polar("gateway")
    assert done.returncode == 2
    assert "POLAR_TOKEN_FILE" in done.stderr
