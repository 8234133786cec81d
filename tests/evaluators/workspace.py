"""A workspace that is a folder of this machine: commands run in it for real."""

import signal
import subprocess
import sys
from pathlib import Path

import anyio

from builders.records import Trajectory
from evaluators.base import EvaluationContext, ExecResult, Workspace


class FolderWorkspace:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def exec(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout: float | None = None,
    ) -> ExecResult:
        process = await anyio.open_process(
            ["bash", "-c", command],
            cwd=cwd or self.folder,
            env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        said: dict[str, bytes] = {"stdout": b"", "stderr": b""}

        async def read(name: str) -> None:
            stream = getattr(process, name)
            async for chunk in stream:
                said[name] += chunk

        async with process:
            with anyio.move_on_after(timeout) as scope:
                async with anyio.create_task_group() as readers:
                    readers.start_soon(read, "stdout")
                    readers.start_soon(read, "stderr")
                await process.wait()
            if scope.cancelled_caught:
                process.send_signal(signal.SIGKILL)
        code = -1 if scope.cancelled_caught else process.returncode
        assert code is not None
        return ExecResult(
            stdout=said["stdout"].decode(), stderr=said["stderr"].decode(), return_code=code
        )

    async def upload(self, source: Path, target: str) -> None:
        raise NotImplementedError

    async def download(self, source: str, target: Path) -> None:
        raise NotImplementedError


def context(
    tmp_path: Path,
    *,
    workspace: Workspace | None = None,
    harness_completed: bool = True,
    env: dict[str, str] | None = None,
    seconds_left: float = 300.0,
) -> EvaluationContext:
    return EvaluationContext(
        session_id="session-1",
        task_id="task-1",
        trajectory=Trajectory(),
        workspace=workspace,
        harness_completed=harness_completed,
        env=env or {},
        artifacts_dir=tmp_path / "artifacts",
        seconds_left=seconds_left,
    )
