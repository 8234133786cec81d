"""A server in a process of its own, pinned to a core, whose CPU time is read from outside."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import psutil

from polar_gateway.model_listener import ModelListener

MEASURED_CORE, OTHER_CORE = 0, 1


class Server(NamedTuple):
    url: str
    process: psutil.Process

    def cpu_seconds(self) -> float:
        """User and system time of its threads so far, to the nanosecond where the kernel keeps
        such accounts; else its resolution is 10 ms."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        if ran := [int(task.read_text().split()[0]) for task in tasks]:
            return sum(ran) / 1e9
        times = self.process.cpu_times()
        return float(times.user + times.system)


def pin(core: int) -> None:
    """Stay on one core, where there are two to choose from."""
    if {MEASURED_CORE, OTHER_CORE} <= os.sched_getaffinity(0):
        os.sched_setaffinity(0, {core})


@contextmanager
def started(module: str, core: int, *arguments: object) -> Iterator[Server]:
    """Run `module` until the block ends."""
    command = [sys.executable, "-m", module, str(core), *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            port = process.stdout.readline()
            if not port:
                raise RuntimeError(f"{module} did not start")
            yield Server(f"http://127.0.0.1:{int(port)}", psutil.Process(process.pid))
        finally:
            process.stdin.close()


def serve_until_told(opened: Callable[[list[str]], AbstractAsyncContextManager[Any]]) -> None:
    """The other side of `started`: say the port, serve the application until stdin ends.

    All servers are uvicorn's HTTP protocol on uvloop, as the gateway's own listener is, so that
    they differ in their applications only.
    """
    core, *arguments = sys.argv[1:]
    pin(int(core))

    async def serve() -> None:
        async with (
            opened(arguments) as app,
            ModelListener(app, "127.0.0.1", 0) as listener,
        ):
            print(listener.port, flush=True)
            await anyio.to_thread.run_sync(sys.stdin.read)

    anyio.run(serve, backend_options={"use_uvloop": True})
