"""The demo: Codex, Claude Code and Pi, unmodified, each repair a small repository twice.

Run it with `make demo`. It starts an engine and `polar up`, submits one task per harness, shows how
they go, and stops all that it started. The last line of stdout is a JSON object; the exit status is
0 only if every session was graded 1.0.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import httpx2
import msgspec
import yaml
from rich.console import Console

from polar_client.cli.show import Progress, SessionSummary, output, result_table, summarize
from polar_client.client import RolloutClient, RolloutError, session_results
from polar_gateway.runtimes.docker import DockerRuntime
from polar_gateway.testing import images
from polar_server.protocol import TaskStatus

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
BIN = Path(sys.executable).parent
HARNESSES = ("codex", "claude_code", "pi")
ENGINES = {
    "scripted": "the scripted engine, which is no model: it says what examples/demo/script.json tells it to",
    "vllm": "vLLM on CPU with a tiny random model that is made to speak examples/demo/script.json",
}

say = Console(stderr=True, highlight=False, soft_wrap=True).print


class DemoError(Exception):
    """The demo cannot go on; the message says why, for people."""


class Ready(msgspec.Struct):
    """What `polar up --json` says when it serves."""

    url: str
    token_file: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=sorted(ENGINES), default="scripted")
    parser.add_argument("--setup-began", type=float, default=time.time(), help="seconds since the epoch")
    options = parser.parse_args()
    return anyio.run(_demo, options.engine, options.setup_began)


async def _demo(engine: str, setup_began: float) -> int:
    """The whole show; its outcome goes to stdout however it ends. Returns the exit status."""
    outcome: dict[str, Any] = {"ok": False, "engine": engine, "runtime": None, "tasks": []}
    interrupted = True
    async with anyio.create_task_group() as group:
        group.start_soon(_cancel_on_signal, group.cancel_scope)
        try:
            image = await _install(engine)
            setup_seconds = time.time() - setup_began
            began = time.monotonic()
            outcome = await _run(engine, image)
            say(f"set-up and downloads {setup_seconds:.0f} s, run {time.monotonic() - began:.0f} s")
        except* (DemoError, RolloutError) as errors:
            say(f"demo: {_sentences(errors)}", style="red")
        interrupted = False
        group.cancel_scope.cancel()
    if interrupted:
        say("demo: interrupted; everything is stopped")
    sys.stdout.write(msgspec.json.encode(outcome).decode() + "\n")
    return 130 if interrupted else 0 if outcome["ok"] else 1


def _sentences(errors: BaseExceptionGroup[Exception]) -> str:
    return "; ".join(
        _sentences(error) if isinstance(error, BaseExceptionGroup) else str(error)
        for error in errors.exceptions
    )


async def _cancel_on_signal(scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            scope.cancel()


async def _install(engine: str) -> str | None:
    """Whatever has to be downloaded or made once. Returns the image to run in; None: no Docker."""
    await _step([str(BIN / "polar"), "harness", "install", *HARNESSES])
    if engine == "vllm":
        await _step([str(REPOSITORY / "scripts/vllm.sh"), "install"])
        await _step([str(REPOSITORY / "scripts/vllm.sh"), "model"])
    if (missing := await DockerRuntime.unavailable()) is None:
        try:
            return await images.agent()
        except LookupError as error:
            missing = str(error)
    say(f"not in Docker: {missing}")
    return None


async def _step(command: list[str]) -> None:
    done = await anyio.run_process(command, stdout=subprocess.DEVNULL, stderr=None, check=False)
    if done.returncode:
        raise DemoError(f"`{' '.join(command)}` failed")


async def _run(engine: str, image: str | None) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="polar-demo-"))
    console = Console(stderr=True)
    say(f"engine: {ENGINES[engine]}")
    async with _engine(engine, folder) as engine_url, _polar(engine_url, folder) as ready:
        runtime = "docker" if image else "local"
        where = "in Docker containers" if image else "on this machine, which isolates nothing"
        say(f"server: {ready.url}, one node; harnesses run {where}\n")
        async with RolloutClient(ready.url, token_file=Path(ready.token_file)) as client:
            tasks = await _tasks(client, console, runtime, image)
    rows = [
        (harness, summarize(result))
        for harness, task in tasks.items()
        for result in session_results(task.results)
    ]
    say()
    output().print(result_table(rows))
    for harness, row in rows:
        if row.error:
            say(f"[red]{harness}: {row.error}[/red]")
    results = folder / "results.json"
    results.write_bytes(msgspec.json.encode(tasks))
    say(f"\nresults with all traces: {results}\nlogs, artifacts and journals: {folder}")
    return _outcome(engine, runtime, tasks)


def _outcome(engine: str, runtime: str, tasks: dict[str, TaskStatus]) -> dict[str, Any]:
    rows = {
        harness: [summarize(result) for result in session_results(task.results)]
        for harness, task in tasks.items()
    }
    return {
        "ok": all(
            len(rows[harness]) == task.total_sessions and all(row.reward == 1.0 for row in rows[harness])
            for harness, task in tasks.items()
        ),
        "engine": engine,
        "runtime": runtime,
        "tasks": [
            {"task_id": task.task_id, "harness": harness, "sessions": [_told(row) for row in rows[harness]]}
            for harness, task in tasks.items()
        ],
    }


def _told(row: SessionSummary) -> dict[str, Any]:
    return {
        "status": row.status,
        "reward": row.reward,
        "completions": row.completions,
        "traces": row.traces,
        "trainable_tokens": row.trainable_tokens,
    }


async def _tasks(
    client: RolloutClient, console: Console, runtime: str, image: str | None
) -> dict[str, TaskStatus]:
    """Submit one task per harness and follow all of them to their ends."""
    ended: dict[str, TaskStatus] = {}
    ids = {harness: f"demo-{harness.replace('_', '-')}" for harness in HARNESSES}
    for harness, task_id in ids.items():
        document = yaml.safe_load((HERE / "task.yaml").read_text())
        document["task_id"] = task_id
        document["agent"]["harness"] = harness
        document["runtime"] |= {"backend": runtime, "image": image, "allow_internet": image is None}
        await client.submit(document)

    async def follow(harness: str, task_id: str, progress: Progress) -> None:
        async for task in client.watch(task_id):
            progress.update(task)
        ended[harness] = await client.status(task_id)

    with Progress(console, {task_id: harness for harness, task_id in ids.items()}) as progress:
        async with anyio.create_task_group() as group:
            for harness, task_id in ids.items():
                group.start_soon(follow, harness, task_id, progress)
    return {harness: ended[harness] for harness in HARNESSES}


@asynccontextmanager
async def _engine(engine: str, folder: Path) -> AsyncIterator[str]:
    """A running engine of that kind; yields its URL."""
    script = str(HERE / "script.json")
    port = _free_port()
    command = {
        "scripted": [sys.executable, "-m", "polar_gateway.testing.engine", "--port", str(port), "--script", script],
        "vllm": [str(REPOSITORY / "scripts/vllm.sh"), "serve", str(port), script],
    }[engine]
    log = folder / "engine.log"
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as log_file:
        async with _process(command, stdout=log_file, stderr=subprocess.STDOUT) as process:
            await _healthy(url, process, log)
            yield url


async def _healthy(url: str, process: anyio.abc.Process, log: Path, seconds: float = 180.0) -> None:
    with anyio.move_on_after(seconds):
        async with httpx2.AsyncClient(base_url=url, trust_env=False) as http:
            while process.returncode is None:
                try:
                    if (await http.get("/health")).is_success:
                        return
                except httpx2.TransportError:
                    pass
                await anyio.sleep(0.1)
    raise DemoError(f"the engine did not start; {log} ends with:\n{_tail(log)}")


@asynccontextmanager
async def _polar(engine_url: str, folder: Path) -> AsyncIterator[Ready]:
    """A running `polar up` on that engine."""
    command = [str(BIN / "polar"), "up", "--json", "--port", "0", "--data-dir", str(folder)]
    command += ["--engine-url", engine_url, "--allow-unisolated", "--run-workers", "2"]
    # A deployment that is configured for this shell is not the demo's.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("POLAR_")}
    kept |= {name: os.environ[name] for name in ("POLAR_CACHE", "POLAR_DEBUG") if name in os.environ}
    log = folder / "polar.log"
    with log.open("wb") as log_file:
        async with _process(command, stdout=subprocess.PIPE, stderr=log_file, env=kept) as process:
            assert process.stdout is not None
            said = b""
            while not said.endswith(b"\n"):
                try:
                    said += await process.stdout.receive()
                except anyio.EndOfStream:
                    raise DemoError(f"`polar up` did not start; it said:\n{_tail(log)}") from None
            yield msgspec.json.decode(said, type=Ready)


@asynccontextmanager
async def _process(command: list[str], **streams: Any) -> AsyncIterator[anyio.abc.Process]:
    """A child in a session of its own, so that Ctrl-C reaches the demo alone, which then stops it."""
    async with await anyio.open_process(
        command, stdin=subprocess.DEVNULL, start_new_session=True, **streams
    ) as process:
        try:
            yield process
        finally:
            with anyio.CancelScope(shield=True):
                if process.returncode is None:
                    process.terminate()
                with anyio.move_on_after(75):
                    await process.wait()
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:].strip()


if __name__ == "__main__":
    sys.exit(main())
