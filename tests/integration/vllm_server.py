"""A real vLLM for tests: one server, on CPU, that says what the script of the moment tells it to.

`scripts/vllm.sh install` and `scripts/vllm.sh model` prepare the machine; the fixture `vllm` starts
the server when the first test asks for it and stops it after the last.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import anyio.to_thread
import httpx2
import msgspec
import pytest

from polar_gateway.testing.script import Script
from tests.requirements import require

COMMAND = Path(__file__).parents[2] / "scripts/vllm.sh"
CACHE = Path(os.environ.get("POLAR_CACHE") or Path.home() / ".cache/polar")
START_SECONDS = 110.0
"""Of which a cold file cache takes 40."""
TOLERANCE = 1e-4
"""Of recorded log probabilities against those that are computed again."""


class VllmServer:
    model = "tiny"

    def __init__(self, url: str, script: Path) -> None:
        self.url = url
        self._script = script

    def speak(self, script: Script) -> None:
        """What it says from the next request on."""
        unfinished = self._script.with_suffix(".part")
        unfinished.write_bytes(msgspec.json.encode(script))
        os.replace(unfinished, self._script)

    @contextlib.contextmanager
    def slow_motion(self) -> Iterator[None]:
        """No answer gets to its end before a test has done to it what it wants to."""
        slow = self._script.with_suffix(".slow")
        slow.touch()
        try:
            yield
        finally:
            slow.unlink()


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[VllmServer]:
    """A vLLM whose script and log lie in `folder`. Raises RuntimeError when it does not start."""
    script, log = folder / "script.json", folder / "vllm.log"
    script.write_bytes(msgspec.json.encode(Script()))
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [COMMAND, "serve", str(port), script],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            _wait_until_healthy(url, process, log)
            yield VllmServer(url, script)
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            finally:  # whatever is left of its workers
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx2.TransportError):
            if httpx2.get(f"{url}/health").status_code == 200:
                return
        time.sleep(0.3)
    raise RuntimeError(f"vLLM did not start: {log.read_text()[-2000:]}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    ready = all((CACHE / "vllm" / part).exists() for part in ("installed", "model.made"))
    require("vllm", ready, "run scripts/vllm.sh install and scripts/vllm.sh model")
    with serving(tmp_path_factory.mktemp("vllm")) as server:
        yield server


async def metric(http: httpx2.AsyncClient, url: str, name: str) -> float:
    """What a vLLM has counted of something, over all its engines. To count is work for it, so that
    who asks often delays what is counted."""
    metrics = (await http.get(f"{url}/metrics", timeout=60)).text
    return sum(map(float, re.findall(rf"^vllm:{name}\{{.*\}} (\S+)$", metrics, re.MULTILINE)))


class Question(NamedTuple):
    """Ids, which of them were sampled, and what was recorded of those."""

    name: str
    ids: list[int]
    sampled: list[int]
    logprobs: list[float]


class Oracle:
    """A process that has the models in transformers, and so says what they say themselves."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    async def confirms(self, questions: list[Question], model: Path = CACHE / "vllm/model") -> None:
        """Raises AssertionError where a model does not say what was recorded."""
        asked = [{"ids": each.ids, "sampled": each.sampled} for each in questions]
        line = msgspec.json.encode({"model": str(model), "questions": asked})
        answers = await anyio.to_thread.run_sync(self._answer, line)
        for question, said in zip(questions, answers, strict=True):
            worst = max(abs(a - b) for a, b in zip(said, question.logprobs, strict=True))
            assert worst <= TOLERANCE, (model.name, question.name, worst)

    def _answer(self, line: bytes) -> list[list[float]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + b"\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._process.stdout.readline(), type=list[list[float]])


@pytest.fixture(scope="session")
def oracle() -> Iterator[Oracle]:
    with subprocess.Popen(
        [CACHE / "vllm/venv/bin/python", Path(__file__).with_name("oracle.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"HF_HUB_OFFLINE": "1"},
    ) as process:
        yield Oracle(process)
