"""The command against a scripted server, which has to be another process: it runs its own loop."""

import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest
from click.testing import CliRunner, Result

from polar_client.cli.engine import engine
from polar_gateway.engines.base import EngineProbe


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, "-m", "polar_gateway.testing.engine", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        yield running.stdout.readline().split()[0]  # said once it answers
        running.terminate()


def probed(*arguments: str) -> Result:
    return CliRunner().invoke(engine, ["probe", *arguments])


def test_the_report_says_what_the_server_can_do(url: str) -> None:
    result = probed(url)
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "model tiny" in lines
    assert "token ids yes" in lines
    assert "<|im_end|>" in result.stdout
    assert result.stdout.splitlines()[-1] == f"What is sampled at {url} can be trained on."


def test_the_report_can_be_read_by_machines(url: str) -> None:
    result = probed(url, "--json")
    found = msgspec.json.decode(result.stdout, type=EngineProbe)
    assert (found.engine, found.model, found.problems) == ("vllm", "tiny", [])
    assert found.token_routes == ["chat", "generate"]


def test_what_training_cannot_do_without_is_said_and_is_the_exit_status(url: str) -> None:
    result = probed(url, "--model", "big")
    assert result.exit_code == 1
    assert "problem  it does not serve 'big' but tiny" in result.stdout
    assert result.stdout.splitlines()[-1] == f"What is sampled at {url} cannot be trained on."
    assert probed(url, "--model", "big", "--json").exit_code == 1


def test_any_kind_of_engine_can_be_probed(url: str) -> None:
    result = probed(url, "--engine", "openai", "--json")
    assert msgspec.json.decode(result.stdout, type=EngineProbe).engine == "openai"
    assert probed(url, "--engine", "magic").exit_code == 2


def test_a_server_that_is_not_there_is_an_error_in_one_sentence() -> None:
    result = probed("http://127.0.0.1:9")
    assert result.exception is not None
    assert str(result.exception).startswith("the engine cannot be reached")
