"""Processes of this host in a folder of their own, for development. It isolates nothing.

A command runs as the gateway's user and sees the whole host; only its environment, its HOME and its
temporary folder are its own. What can be kept is the promise that nothing outlives the session: each
command has a supervisor to which its orphans return (see `supervise`), and which kills them all when
this process asks or dies; one that does not answer is killed from here with all below it. A command
that kills its supervisor breaks that promise too.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import IO, ClassVar

import anyio
import anyio.abc
import anyio.to_thread
import msgspec

from evaluators.base import ExecResult
from polar_gateway.protocol import SESSION_DIR, RuntimeSpec
from polar_gateway.runtimes import archive, supervise, trees
from polar_gateway.runtimes.base import Runtime, RuntimeRequest, to_the_end
from polar_gateway.runtimes.streams import Output

ISOLATES_NOTHING = (
    "local isolates nothing: the agent runs as the gateway's user and sees this host's files,"
    " processes and network"
)

_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


_GRACE_SECONDS = 3.0
"""How long a supervisor may take to kill, and its output to end thereafter."""

_ROUNDS = 200


class LocalOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What `RuntimeSpec.kwargs` may hold for this runtime: nothing."""


class Supervised:
    """One command's supervisor, and our end of its control channel."""

    def __init__(self, process: anyio.abc.Process, control: socket.socket) -> None:
        self.process = process
        self.control = control
        self.stays = False
        """The command is over, and something that it left in the background lives."""

    async def kill(self) -> None:
        """Kill all that came of the command, and wait for the end: by its supervisor or, when that
        does not answer, over its head. The command could have stopped it."""
        self._hang_up()
        with anyio.move_on_after(_GRACE_SECONDS):
            await self.process.wait()
            return
        await anyio.to_thread.run_sync(kill_tree, self.process.pid, abandon_on_cancel=True)
        await self.process.wait()

    def _hang_up(self) -> None:
        try:
            self.control.shutdown(socket.SHUT_WR)
        except OSError:  # the supervisor has ended, or does so this moment
            pass

    async def free(self) -> None:
        """Close what was held for a command that has ended."""
        self.control.close()
        await self.process.aclose()


def kill_tree(supervisor: int) -> None:
    """Kill all below a supervisor, then it: without it, nobody would know what was below.

    Blocks for about `_ROUNDS` times 10 ms where something cannot be killed.
    """
    for _ in range(_ROUNDS):
        supervise.strike(supervisor)
        if not supervise.descendants(supervisor):
            break
        time.sleep(0.01)
    supervise.send(supervisor, signal.SIGKILL)


def check(spec: RuntimeSpec) -> None:
    """Raise ValueError for what this runtime would have to break its word on."""
    msgspec.convert(spec.kwargs, LocalOptions)
    if not spec.allow_internet or spec.network == "none":
        field = "allow_internet false" if not spec.allow_internet else "network none"
        raise ValueError(
            f"runtime.{field} cannot be kept by local, which shares the host's network"
        )


def limits_not_met(spec: RuntimeSpec) -> list[str]:
    """What the spec asks for and does not get."""
    asked = {"cpus": spec.cpus, "memory_mb": spec.memory_mb, "storage_mb": spec.storage_mb}
    notes = [f"{name} {value} is not enforced by local" for name, value in asked.items() if value]
    if spec.image:
        notes.append(f"image {spec.image} is not used by local")
    return notes


class LocalRuntime(Runtime):
    """One folder, and the processes started in it."""

    name = "local"
    isolated = False
    Options: ClassVar[type[msgspec.Struct]] = LocalOptions

    def __init__(self, request: RuntimeRequest) -> None:
        super().__init__(request)
        self._folders = {
            name: request.scratch_dir.absolute() / name for name in ("session", "home", "tmp")
        }
        self._supervised: list[Supervised] = []
        self._cancels = 0
        self._shell = shutil.which("bash") or "/bin/sh"

    async def start(self) -> None:
        check(self.request.spec)
        self.notes += [ISOLATES_NOTHING, *limits_not_met(self.request.spec)]
        self._make_folders()

    def _make_folders(self) -> None:
        for folder in self._folders.values():
            folder.mkdir(mode=0o700, parents=True)
        workdir = Path(self._workdir)
        if workdir.is_relative_to(self.session_dir):
            workdir.mkdir(parents=True, exist_ok=True)

    @property
    def _workdir(self) -> str:
        return self.inside(self.request.spec.workdir or SESSION_DIR)

    @property
    def session_dir(self) -> str:
        return str(self._folders["session"])

    @property
    def model_url(self) -> str:
        return f"http://127.0.0.1:{self.request.model_port}"

    def inside(self, path: str) -> str:
        asked = PurePosixPath(os.path.normpath(path))
        places = {SESSION_DIR: self.session_dir}
        places |= {mount.target: str(mount.source) for mount in self.request.mounts}
        for outer, here in places.items():
            if asked.is_relative_to(outer):
                return os.path.normpath(os.path.join(here, asked.relative_to(outer)))
        return path

    async def exec(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        stdin: bytes | None = None,
        timeout: float | None = None,
        on_stdout: Callable[[bytes], None] | None = None,
        on_stderr: Callable[[bytes], None] | None = None,
    ) -> ExecResult:
        output = Output(on_stdout, on_stderr)
        environment = {**self._environment(), **self.request.spec.env, **(env or {})}
        where = self.inside(cwd) if cwd else self._workdir
        cancels = self._cancels
        await self._forget_ended()
        supervised = await self._spawn(command, where, environment, reads=stdin is not None)
        try:
            if self._cancels != cancels:  # while it was being started
                await self._kill([supervised])
            return await self._run(supervised, stdin, timeout, output)
        except ExceptionGroup as group:
            # Only a callback of the caller's fails in there.
            raise group.exceptions[0] from None
        finally:
            if not supervised.stays:
                await self._kill([supervised])
                self._supervised.remove(supervised)
                await supervised.free()

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ.get("PATH", _DEFAULT_PATH),
            "HOME": str(self._folders["home"]),
            "TMPDIR": str(self._folders["tmp"]),
            "LANG": "C.UTF-8",
            "SESSION_DIR": self.session_dir,
        }

    async def _forget_ended(self) -> None:
        for supervised in list(self._supervised):
            if supervised.stays and supervised.process.returncode is not None:
                self._supervised.remove(supervised)
                await supervised.free()

    async def _spawn(
        self, command: str, cwd: str, env: dict[str, str], *, reads: bool
    ) -> Supervised:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        arguments = [sys.executable, "-I", "-S", supervise.__file__, str(theirs.fileno())]
        try:
            # A start that is cancelled half-way would leave its pipes open.
            with anyio.CancelScope(shield=True):
                process = await anyio.open_process(
                    [*arguments, self._shell, "-c", command],
                    stdin=subprocess.PIPE if reads else subprocess.DEVNULL,
                    cwd=cwd,
                    env=env,
                    start_new_session=True,
                    pass_fds=[theirs.fileno()],
                )
        except OSError as error:
            ours.close()
            raise RuntimeError(f"the command could not be started in {cwd}: {error}") from error
        finally:
            theirs.close()
        supervised = Supervised(process, ours)
        self._supervised.append(supervised)
        return supervised

    async def _run(
        self, supervised: Supervised, stdin: bytes | None, timeout: float | None, output: Output
    ) -> ExecResult:
        process, control = supervised.process, supervised.control
        assert process.stdout is not None
        assert process.stderr is not None
        async with anyio.create_task_group() as streams:
            streams.start_soon(_copy, process.stdout, output.stdout)
            streams.start_soon(_copy, process.stderr, output.stderr)
            feeding = anyio.CancelScope()
            if stdin is not None:
                assert process.stdin is not None
                streams.start_soon(_feed, process.stdin, stdin, feeding)
            status = b""
            with anyio.move_on_after(timeout) as limit:
                await anyio.wait_readable(control)
                status = control.recv(64)
            feeding.cancel()
            if limit.cancelled_caught:
                await self._kill([supervised])
            # Its end has come, unless something that escaped has got hold of it.
            streams.cancel_scope.deadline = anyio.current_time() + _GRACE_SECONDS
        if limit.cancelled_caught:
            return output.result(-1)
        if not status:
            # The whole tree was killed, by `cancel` or by the command itself.
            return output.result(128 + signal.SIGKILL)
        code, left = status.split()
        supervised.stays = left == b"left"
        return output.result(int(code))

    async def upload(self, source: Path, target: str) -> None:
        await anyio.to_thread.run_sync(_copy_in, source, Path(self.inside(target)))

    async def download(self, source: str, target: Path) -> None:
        left_out = await anyio.to_thread.run_sync(
            _copy_out, self._followed(source), target, self.request.scratch_dir
        )
        self.notes += archive.notes(source, left_out)

    async def export(self, source: str, file: IO[bytes]) -> None:
        folder = self._followed(source)
        if not folder.is_dir():
            raise NotADirectoryError(f"{str(folder)!r} is no folder")
        bounded = archive.Bounded(file, repr(source))
        await anyio.to_thread.run_sync(archive.pack, folder, ".", None, bounded)

    async def import_(self, target: str, file: IO[bytes]) -> None:
        await anyio.to_thread.run_sync(_replace, self._own_folder(target), file)

    def _own_folder(self, target: str) -> Path:
        """The folder `target` means, links followed; ValueError for one outside the session's."""
        folder = Path(self.inside(target)).resolve()
        if not folder.is_relative_to(self._folders["session"].resolve()):
            raise ValueError(
                f"{target!r} cannot be replaced: it is no folder of session"
                f" {self.request.session_id} but of the host, which local would empty"
            )
        return folder

    def _followed(self, source: str) -> Path:
        """The file or folder `source` means, a link followed as far as the session's own folders.

        Raises ValueError for a link that leads out of them: the gateway's user may read more there
        than a reader of its artifacts should.
        """
        path = Path(self.inside(source))
        own = self.request.scratch_dir.resolve()
        real = path.resolve(strict=True)
        if real.is_relative_to(own):
            return real
        if path.is_relative_to(self.request.scratch_dir.absolute()) or path.is_symlink():
            raise ValueError(f"{source!r} leads out of the folders of the session")
        return real

    async def write(self, path: str, content: bytes, mode: int = 0o600) -> None:
        await anyio.to_thread.run_sync(_write, Path(self.inside(path)), content, mode)

    async def cancel(self) -> None:
        self._cancels += 1
        await self._kill(self._supervised)
        await self._forget_ended()

    async def _kill(self, supervised: Iterable[Supervised]) -> None:
        with to_the_end(f"killing the processes of session {self.request.session_id}"):
            async with anyio.create_task_group() as kills:
                for one in supervised:
                    kills.start_soon(one.kill)

    async def stop(self) -> None:
        try:
            await self.cancel()
        finally:
            with to_the_end(f"removing the folders of session {self.request.session_id}"):
                for folder in self._folders.values():
                    await anyio.to_thread.run_sync(
                        trees.remove_tree, folder, abandon_on_cancel=True
                    )


async def _copy(stream: anyio.abc.ByteReceiveStream, write: Callable[[bytes], None]) -> None:
    async for data in stream:
        write(data)


async def _feed(
    stream: anyio.abc.ByteSendStream, content: bytes, feeding: anyio.CancelScope
) -> None:
    """Write all of a command's input and end it; what is not read by its end is dropped."""
    with feeding:
        try:
            await stream.send(content)
            await stream.aclose()
        except (anyio.BrokenResourceError, ConnectionError):
            pass


def _copy_in(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    source = source.resolve(strict=True)
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    else:
        shutil.copy2(source, target)


def _write(file: Path, content: bytes, mode: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as opened:
        opened.write(content)
    file.chmod(mode)


def _copy_out(source: Path, target: Path, scratch: Path) -> list[str]:
    """By way of an archive, so that links and special files fare as from any runtime."""
    with tempfile.TemporaryFile(dir=scratch) as file:
        archive.pack(source, source.name, None, archive.Bounded(file, repr(str(source))))
        file.seek(0)
        return archive.unpack(file, target)


def _replace(folder: Path, content: IO[bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    trees.clear(folder)
    content.seek(0)
    archive.unpack_verbatim(content, folder)
