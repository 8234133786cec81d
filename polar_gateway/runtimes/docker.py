"""Containers of a Docker daemon on this host, through its API.

A container lives on a lifeline: its first process reads a standard input that this process holds
open, so that the container goes when the gateway does, however that dies. Its network is none or a
bridge, never the host's; the model is answered on a loopback port inside its own network namespace,
which takes root here and nothing there. Files are copied, not mounted: a folder of the host that the
agent may write would have to be writable for the agent's user, and would survive it.
"""

import base64
import json
import os
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import IO, Annotated, Any, ClassVar, NamedTuple

import aiodocker
import aiohttp
import anyio
import anyio.to_thread
import msgspec
from yarl import URL

from evaluators.base import ExecResult
from polar_gateway.protocol import SESSION_DIR, RuntimeSpec
from polar_gateway.runtimes import archive, netns, processes
from polar_gateway.runtimes.base import Runtime, RuntimeRequest, RuntimeUnavailableError, to_the_end
from polar_gateway.runtimes.streams import Output

MODEL_PORT = 8100
"""Where the model answers on the container's loopback."""

DEFAULT_MEMORY_MB = 8192
DEFAULT_SOCKET = "/var/run/docker.sock"

_MARKER = "POLAR_EXEC"
_SWEEP_ROUNDS = 50
_CONNECT_SECONDS = 10.0
_CREATE_SECONDS = 60.0
_REMOVE_SECONDS = 60.0
_THAW_SECONDS = 5.0
_CLEAR_SECONDS = 300.0
_START_SECONDS = 600.0
"""Past this age, a container that was made and never started is not about to be."""

_VIRTUAL = ("/dev", "/proc", "/sys")
"""Where an upload would be written below a mount, and never be seen."""

# Arguments: the owner for new folders, or "", and the folders. Says which shell commands get, then
# lives until its standard input ends.
_LIFELINE = """
owner=$1; shift
for folder in "$@"; do
  [ -d "$folder" ] && continue
  mkdir -p "$folder" || exit 1
  [ -z "$owner" ] || chown "$owner" "$folder" || exit 1
done
if command -v bash >/dev/null 2>&1; then echo ready bash; else echo ready sh; fi
while read -r line; do :; done
"""

# Empties a folder and says which one that is, with nothing that a small image may lack; a pattern
# that matches nothing names nothing to remove either.
_CLEAR = """
mkdir -p "$TARGET" && cd "$TARGET" || exit 1
for entry in ..?* .[!.]* *; do rm -rf -- "$entry" || exit 1; done
pwd -P
"""

_WITH_STDIN = 'exec <"$1" && rm -f "$1"; exec "$0" -c "$2"'


class DockerOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What `RuntimeSpec.kwargs` may hold for this runtime."""

    user: str = ""
    """A user of the image, by name or number, with or without group; empty: root."""
    volumes: list[str] = []
    """`/host/folder:/folder` or `/host/folder:/folder:ro`, where the node's mount_roots allow it."""
    pids_limit: Annotated[int, msgspec.Meta(ge=1)] = 4096
    """How many processes and threads at once."""


class Network(NamedTuple):
    mode: str
    note: str | None


def network(spec: RuntimeSpec) -> Network:
    """The network that a container gets, and what has to be said about it.

    Raises ValueError for one that this runtime does not know.
    """
    if spec.network not in ("none", "bridge", "host", None):
        raise ValueError(
            f"runtime.network {spec.network!r} is unknown to docker; it knows none, bridge and host"
        )
    if spec.network == "none" or not spec.allow_internet:
        return Network("none", None)
    if spec.network == "host":
        return Network("bridge", "network host is run as a bridge: the host's own is not shared")
    return Network("bridge", None)


def volumes(specs: list[str], roots: tuple[Path, ...]) -> list[str]:
    """Bind mounts for the daemon, each with its source resolved and known to lie below a root.

    Raises ValueError naming the entry that is malformed or not allowed.
    """
    binds = []
    for spec in specs:
        where = f"runtime.kwargs.volumes: {spec!r}"
        source, _, rest = spec.partition(":")
        target, _, mode = rest.partition(":")
        if not source.startswith("/") or not target.startswith("/") or mode not in ("", "ro", "rw"):
            raise ValueError(f"{where} is not of the form /host/folder:/folder[:ro]")
        real = Path(os.path.realpath(source))
        if not any(real.is_relative_to(os.path.realpath(root)) for root in roots):
            raise ValueError(f"{where} lies below none of the node's mount_roots")
        if not real.exists():
            raise ValueError(f"{where} does not exist on the node")
        binds.append(f"{real}:{target}:{mode or 'rw'}")
    return binds


def container_config(
    request: RuntimeRequest, options: DockerOptions, *, host_cpus: int
) -> dict[str, Any]:
    """The create request's body: a place that does nothing but stay until its stdin ends."""
    spec = request.spec
    memory = (spec.memory_mb or DEFAULT_MEMORY_MB) << 20
    folders = [SESSION_DIR] + ([spec.workdir] if spec.workdir else [])
    mounts = [f"{mount.source}:{mount.target}:ro" for mount in request.mounts]
    host: dict[str, Any] = {
        "AutoRemove": True,
        "Init": True,
        "NetworkMode": network(spec).mode,
        "Binds": mounts + volumes(options.volumes, request.mount_roots),
        "Memory": memory,
        "MemorySwap": memory,
        "PidsLimit": options.pids_limit,
        "SecurityOpt": ["no-new-privileges"],
        # Forged packets would let containers on one bridge pose as each other.
        "CapDrop": ["NET_RAW"],
        "LogConfig": {"Type": "none"},
    }
    if spec.cpus is not None:
        host["NanoCpus"] = min(spec.cpus, host_cpus) * 1_000_000_000
    if spec.gpus:
        host["DeviceRequests"] = [{"Count": spec.gpus, "Capabilities": [["gpu"]]}]
    return {
        "Image": spec.image,
        "Entrypoint": ["/bin/sh", "-c", _LIFELINE, "polar"],
        "Cmd": [options.user, *folders],
        "User": "0",
        "WorkingDir": "/",
        "Healthcheck": {"Test": ["NONE"]},
        "OpenStdin": True,
        "StdinOnce": True,
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "Labels": {
            "polar.owner": request.owner,
            "polar.session": request.session_id,
            "polar.attempt": request.attempt_id,
            "polar.purpose": request.purpose,
        },
        "HostConfig": host,
    }


def limits_not_met(spec: RuntimeSpec, host_cpus: int) -> list[str]:
    """What the spec asks of this host and does not get."""
    notes = []
    if spec.cpus is not None and spec.cpus > host_cpus:
        notes.append(f"cpus {spec.cpus} is run as {host_cpus}: this host has no more")
    if spec.storage_mb is not None:
        notes.append(f"storage_mb {spec.storage_mb} is not enforced by docker on this host")
    return notes


def orphaned(state: str, age: float) -> bool:
    """Whether a container in this state, `age` seconds after its creation, is nobody's any more.

    One that runs has a live process at its lifeline. One that never started may be about to, for
    another node that goes by the same name; until it is too old for that.
    """
    return state in ("exited", "dead") or (state == "created" and age > _START_SECONDS)


class DockerRuntime(Runtime):
    """One container."""

    name = "docker"
    isolated = True
    Options: ClassVar[type[msgspec.Struct]] = DockerOptions

    def __init__(self, request: RuntimeRequest) -> None:
        super().__init__(request)
        self._open = AsyncExitStack()
        self._shell = "sh"
        self._init_pid = 0
        self._own: frozenset[int] = frozenset()
        """The container's first processes, which no exec started."""
        self._owner = archive.Owner(0, 0)
        self._oom_kills = 0

    @classmethod
    async def unavailable(cls) -> str | None:
        if os.geteuid() != 0:
            return "docker needs root here, to serve the model inside a container's network"
        try:
            async with connected():
                return None
        except RuntimeUnavailableError as error:
            return str(error)

    @classmethod
    async def reap_orphans(cls, owner: str) -> int:
        async with connected() as docker:
            query = json.dumps({"label": [f"polar.owner={owner}"]})
            found = await docker.containers.list(all="1", filters=query)
            now = time.time()
            orphans = [one for one in found if orphaned(one["State"], now - one["Created"])]
            for orphan in orphans:
                await _remove(orphan)
            return len(orphans)

    async def start(self) -> None:
        spec = self.request.spec
        if not spec.image:
            raise ValueError("runtime.image is required by docker")
        self._options = msgspec.convert(spec.kwargs, DockerOptions)
        host_cpus = os.cpu_count() or 1
        config = container_config(self.request, self._options, host_cpus=host_cpus)
        note = network(spec).note
        self.notes += limits_not_met(spec, host_cpus) + ([note] if note else [])
        self._docker = await self._open.enter_async_context(connected())
        await self._have_image(spec.image)
        # A create whose answer is not awaited may still make a container that nobody knows.
        with to_the_end(f"creating {self._place}", _CREATE_SECONDS):
            self._container = await self._docker.containers.create(config)
            self._open.push_async_callback(_remove, self._container)
        await self._begin(spec.image)
        if self._options.user:
            await self._find_user(self._options.user)
        if self.request.model_port is not None:
            await self._serve_model()

    async def _have_image(self, image: str) -> None:
        try:
            await self._docker.images.inspect(image)
        except aiodocker.DockerError as error:
            if error.status != 404:
                raise
        else:
            return
        # Without a tag the daemon would fetch every tag there is.
        named = image if "@" in image or ":" in image.rpartition("/")[2] else f"{image}:latest"
        try:
            await self._docker.images.pull(named)
        except aiodocker.DockerError as error:
            raise RuntimeError(
                f"the image {image!r} is not on this host and could not be pulled: {error.message}"
            ) from error

    async def _begin(self, image: str) -> None:
        """Take hold of the lifeline, start, and wait until the place says that it is ready."""
        lifeline = self._container.attach(stdin=True, stdout=True, stderr=True)
        self._open.push_async_callback(lifeline.close)
        await lifeline.__aenter__()
        try:
            await self._container.start()
        except aiodocker.DockerError as error:
            raise RuntimeError(f"the image {image!r} cannot be run: {error.message}") from error
        said = b""
        while not said.endswith(b"\n") or b"ready " not in said:
            message = await lifeline.read_out()
            if message is None:
                text = said.decode(errors="replace").strip() or "it said nothing"
                raise RuntimeError(f"the image {image!r} cannot hold a session: {text}")
            said = (said + message.data)[-4096:]
        self._shell = said.split()[-1].decode()
        state = (await self._container.show())["State"]
        self._init_pid = state["Pid"]
        if not processes.belongs(self._init_pid, self._container.id):
            raise RuntimeUnavailableError(
                "the Docker daemon's containers are not among this host's processes"
            )
        own = await anyio.to_thread.run_sync(processes.members, self._container.id)
        self._own = frozenset(process.pid for process in own)

    async def _find_user(self, user: str) -> None:
        answer = await self.exec("id -u && id -g", cwd="/")
        if answer.return_code != 0:
            raise RuntimeError(f"runtime.kwargs.user {user!r}: {answer.stderr.strip()}")
        uid, gid = answer.stdout.split()
        self._owner = archive.Owner(int(uid), int(gid))

    async def _serve_model(self) -> None:
        if self.request.serve_socket is None:
            raise ValueError("docker needs serve_socket to answer the model inside its network")
        namespace = os.open(f"/proc/{self._init_pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if not self._lives():
                raise self._gone()
            listener = await anyio.to_thread.run_sync(netns.listen, namespace, MODEL_PORT)
        finally:
            os.close(namespace)
        self._open.callback(listener.close)
        self._open.callback(await self.request.serve_socket(listener))

    def _lives(self) -> bool:
        """Whether its first processes all run; the daemon may learn of a death a little later."""
        return self._own <= {process.pid for process in processes.members(self._container.id)}

    def _gone(self) -> RuntimeError:
        return RuntimeError(f"{self._place} is gone")

    @property
    def _place(self) -> str:
        return f"the container of session {self.request.session_id}"

    @property
    def session_dir(self) -> str:
        return SESSION_DIR

    @property
    def model_url(self) -> str:
        return f"http://127.0.0.1:{MODEL_PORT}"

    def inside(self, path: str) -> str:
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
        return await self._exec(
            command,
            user=self._options.user,
            cwd=cwd,
            env=env,
            stdin=stdin,
            timeout=timeout,
            output=Output(on_stdout, on_stderr),
        )

    async def _exec(
        self,
        command: str,
        *,
        user: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        stdin: bytes | None = None,
        timeout: float | None = None,
        output: Output | None = None,
    ) -> ExecResult:
        output = output or Output(None, None)
        marker = uuid.uuid4().hex
        try:
            with anyio.move_on_after(timeout):
                run = await self._container.exec(
                    await self._words(command, stdin, marker),
                    user=user,
                    environment={
                        "SESSION_DIR": SESSION_DIR,
                        **self.request.spec.env,
                        **(env or {}),
                        _MARKER: marker,
                    },
                    workdir=cwd or self.request.spec.workdir or SESSION_DIR,
                )
                async with run.start() as stream:
                    while (message := await stream.read_out()) is not None:
                        (output.stdout if message.stream == 1 else output.stderr)(message.data)
                return output.result(await self._exit_code(run, output))
        except BaseException as error:
            await self._kill_exec(marker)
            if isinstance(error, aiodocker.DockerError) and not self._lives():
                raise self._gone() from error
            raise
        await self._kill_exec(marker)
        return output.result(-1)

    async def _words(self, command: str, stdin: bytes | None, marker: str) -> list[str]:
        """The command as an argument list. Its input is a file, gone from its folder by then: a
        stream that is not read to its end keeps the daemon waiting long after the command ended."""
        if stdin is None:
            return [self._shell, "-c", command]
        file = f"{SESSION_DIR}/.stdin-{marker}"
        await self._put(file, archive.pack_content(file, stdin, 0o600, self._owner))
        return [self._shell, "-c", _WITH_STDIN, self._shell, file, command]

    async def _exit_code(self, run: aiodocker.execs.Exec, output: Output) -> int:
        """Wait for the end, which may come after the end of the output."""
        pause = 0.005
        while (state := await run.inspect())["Running"]:
            await anyio.sleep(pause)
            pause = min(2 * pause, 0.25)
        if not state["Pid"]:
            if not self._lives():
                raise self._gone()
            raise RuntimeError(f"the command could not be started: {output.said()}")
        code = int(state["ExitCode"])
        if code == 137:
            self._note_memory()
        return code

    def _note_memory(self) -> None:
        kills = processes.out_of_memory_kills(self._init_pid)
        if kills > self._oom_kills:
            limit = self.request.spec.memory_mb or DEFAULT_MEMORY_MB
            self.notes.append(
                f"the kernel killed {kills - self._oom_kills} processes for memory (limit {limit} MB)"
            )
            self._oom_kills = kills

    async def _kill_exec(self, marker: str) -> None:
        await self._kill(lambda found: self._foreign(processes.marked(found, marker)))

    async def cancel(self) -> None:
        await self._kill(self._foreign)

    def _foreign(self, found: list[processes.Process]) -> list[processes.Process]:
        return [process for process in found if process.pid not in self._own]

    async def _kill(self, chosen: processes.Choice) -> None:
        """Kill what `chosen` picks until it picks none. Not to be cancelled, and bounded."""
        with to_the_end(f"killing the processes of {self._place}"):
            if await self._sweep(chosen):
                return
            # Something forks faster than it dies; it cannot while it is frozen.
            await self._container.pause()
            try:
                await self._sweep(chosen, rounds=1)
            finally:
                with to_the_end(f"thawing {self._place}", _THAW_SECONDS):
                    await self._container.unpause()
            if not await self._sweep(chosen):
                raise RuntimeError(
                    f"processes of session {self.request.session_id} could not be killed"
                )

    async def _sweep(self, chosen: processes.Choice, rounds: int = _SWEEP_ROUNDS) -> bool:
        return await anyio.to_thread.run_sync(
            processes.kill, self._container.id, chosen, rounds, abandon_on_cancel=True
        )

    async def upload(self, source: Path, target: str) -> None:
        await self._make_parent(target)
        with _scratch_file(self.request.scratch_dir) as file:
            await anyio.to_thread.run_sync(archive.pack, source, target, self._owner, file)
            file.seek(0)
            await self._put(target, file)

    async def write(self, path: str, content: bytes, mode: int = 0o600) -> None:
        await self._make_parent(path)
        await self._put(path, archive.pack_content(path, content, mode, self._owner))

    async def _make_parent(self, target: str) -> None:
        """The daemon makes missing parents itself, but for root."""
        if not self._options.user:
            return
        parent = str(Path(target).parent)
        made = await self.exec('mkdir -p "$PARENT"', cwd="/", env={"PARENT": parent})
        if made.return_code != 0:
            raise RuntimeError(f"cannot upload to {target!r}: {made.stderr.strip()}")

    async def _put(self, target: str, data: IO[bytes]) -> None:
        """Unpack `data` in the root, from where the daemon takes links to lead out of nothing."""
        if not target.startswith("/"):
            raise ValueError(f"the target {target!r} of an upload is no absolute path")
        if any(Path(target).is_relative_to(folder) for folder in _VIRTUAL):
            raise ValueError(f"docker cannot upload to {target!r}: it is no part of a file system")
        async with self._docker.session.put(
            self._archive_url(), params={"path": "/"}, data=_chunks(data)
        ) as answer:
            await self._raise_for(answer, f"cannot upload to {target!r}")

    async def download(self, source: str, target: Path) -> None:
        with _scratch_file(self.request.scratch_dir) as file:
            await self._get(source, archive.Bounded(file, repr(source)))
            file.seek(0)
            left_out = await anyio.to_thread.run_sync(archive.unpack, file, target)
        self.notes += archive.notes(source, left_out)

    async def export(self, source: str, file: IO[bytes]) -> None:
        # The dot has the daemon name everything from the folder, and not by the folder's own name.
        await self._get(f"{source}/.", archive.Bounded(file, repr(source)))

    async def import_(self, target: str, file: IO[bytes]) -> None:
        mounted = [volume.split(":")[1] for volume in self._options.volumes]
        for folder in map(Path, mounted):
            if folder.is_relative_to(target) or Path(target).is_relative_to(folder):
                raise ValueError(
                    f"{target!r} cannot be replaced: runtime.kwargs.volumes mounts {str(folder)!r}"
                )
        cleared = await self._exec(
            _CLEAR,
            user="0",
            cwd="/",
            env={"TARGET": target},
            timeout=_CLEAR_SECONDS,
        )
        if cleared.return_code != 0:
            raise RuntimeError(f"{target!r} could not be cleared: {cleared.stderr.strip()}")
        place = cleared.stdout.removesuffix("\n")
        file.seek(0)
        with _scratch_file(self.request.scratch_dir) as moved:
            await anyio.to_thread.run_sync(archive.move, file, place, moved)
            moved.seek(0)
            await self._put(target, moved)

    async def _get(self, source: str, into: archive.Writable) -> None:
        for _ in range(2):
            async with self._docker.session.get(
                self._archive_url(), params={"path": source}
            ) as answer:
                await self._raise_for(answer, f"cannot download {source!r}")
                stat = json.loads(base64.b64decode(answer.headers["X-Docker-Container-Path-Stat"]))
                if stat["linkTarget"]:
                    source = stat["linkTarget"]
                    continue
                async for chunk in answer.content.iter_chunked(1 << 18):
                    into.write(chunk)
                return

    async def _raise_for(self, answer: aiohttp.ClientResponse, what: str) -> None:
        if answer.status == 200:
            return
        text = await answer.text()
        if answer.content_type == "application/json":
            text = json.loads(text)["message"]
        if not self._lives():
            raise self._gone()
        kind = FileNotFoundError if answer.status == 404 else RuntimeError
        raise kind(f"{what}: {text}")

    def _archive_url(self) -> URL:
        return URL(
            f"{self._docker.docker_host}/{self._docker.api_version}"
            f"/containers/{self._container.id}/archive"
        )

    async def stop(self) -> None:
        with to_the_end(f"removing {self._place}"):
            await self._open.aclose()


@asynccontextmanager
async def connected() -> AsyncIterator[aiodocker.Docker]:
    """A client of the daemon at DOCKER_HOST or at its usual socket, which answered.

    The client's own connection limit would count every lifeline; so it gets a connector without one.
    """
    address = os.environ.get("DOCKER_HOST") or f"unix://{DEFAULT_SOCKET}"
    if not address.startswith("unix://"):
        raise RuntimeUnavailableError(
            f"DOCKER_HOST is {address!r}; docker must be reached through a socket of this host"
        )
    connector = aiohttp.UnixConnector(address.removeprefix("unix://"), limit=0)
    async with connector, aiodocker.Docker("unix://localhost", connector=connector) as docker:
        try:
            with anyio.fail_after(_CONNECT_SECONDS):
                await docker.version()
        except (aiodocker.DockerError, TimeoutError) as error:
            raise RuntimeUnavailableError(f"no Docker daemon answers at {address}") from error
        yield docker


async def _remove(container: aiodocker.containers.DockerContainer) -> None:
    """Kill and remove, and wait until it is gone; that it is going or gone already is fine."""
    with anyio.fail_after(_REMOVE_SECONDS):
        while True:
            try:
                await container.delete(force=True, v=True)
            except aiodocker.DockerError as error:
                if error.status == 404:
                    return
                if error.status != 409:
                    raise
                await anyio.sleep(0.05)
            else:
                return


async def _chunks(file: IO[bytes]) -> AsyncIterator[bytes]:
    """Read here and not by the client's own thread, which would go on reading a closed file where
    the daemon answers at the archive's last entry and before the file's end."""
    while chunk := file.read(1 << 18):
        yield chunk


def _scratch_file(folder: Path) -> IO[bytes]:
    return tempfile.TemporaryFile(dir=folder)
