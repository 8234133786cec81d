"""What a runtime is: an isolated place with a file system in which commands run and can be killed."""

import contextlib
import socket
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import IO, ClassVar

import anyio
import msgspec

from evaluators.base import ExecResult
from polar_gateway.protocol import RuntimeSpec

ServeSocket = Callable[[socket.socket], Awaitable[Callable[[], None]]]
"""Answers model calls on a listening socket, besides the model listener's own, until the returned
function is called; the socket stays its giver's to close."""


class PackMount(msgspec.Struct, kw_only=True, frozen=True):
    """A folder of the gateway's host, read-only at `target` where the runtime can mount."""

    source: Path
    target: str


class RuntimeRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Everything a runtime needs to know to open one session's place."""

    session_id: str
    attempt_id: str
    owner: str
    """The node id, for labels by which orphans are found."""
    spec: RuntimeSpec
    mounts: tuple[PackMount, ...] = ()
    scratch_dir: Path
    """A private, empty folder of the gateway's host for the runtime's own use."""
    model_port: int | None
    """The port on the gateway's loopback where the model listener answers; None for a runtime
    that needs no model (a fresh one for evaluation)."""
    purpose: str = "agent"
    """"agent" or "eval"."""
    serve_socket: ServeSocket | None = None
    """How a runtime with a network of its own gets the model answered inside it; needed by those
    unless `model_port` is None."""
    mount_roots: tuple[Path, ...] = ()
    """Folders of the gateway's host below which `spec.kwargs` may mount; empty: none."""


STOP_SECONDS = 20.0
"""How long a runtime may take to kill, and how long to remove; less than who asks for it waits."""


@contextlib.contextmanager
def to_the_end(what: str, seconds: float = STOP_SECONDS) -> Iterator[None]:
    """What must be done also when it is cancelled, though not for ever.

    Raises TimeoutError, saying `what` was not done, after `seconds`.
    """
    with anyio.move_on_after(seconds, shield=True) as scope:
        yield
    if scope.cancelled_caught:
        raise TimeoutError(f"{what} was not done within {seconds:g} s")


class RuntimeUnavailableError(Exception):
    """This backend cannot run here (no daemon, no root); the message says what is missing."""


class Runtime(ABC):
    """One open place. `start` is called once, first; `stop` exactly once, last, also after a failed
    start; everything may be cancelled. Errors are plain exceptions with a sentence in them."""

    name: ClassVar[str]
    isolated: ClassVar[bool]

    def __init__(self, request: RuntimeRequest) -> None:
        self.request = request
        self.notes: list[str] = []
        """What was changed or could not be granted, for the session's findings."""

    @classmethod
    async def unavailable(cls) -> str | None:
        """None where this runtime can run, else what is missing, in words."""
        return None

    @classmethod
    async def reap_orphans(cls, owner: str) -> int:
        """Remove what earlier, killed processes of the node `owner` left behind, and nothing that a
        live one uses; return how many places that were."""
        return 0

    @abstractmethod
    async def start(self) -> None: ...

    @property
    @abstractmethod
    def session_dir(self) -> str:
        """The session's folder as the inside sees it."""

    @property
    @abstractmethod
    def model_url(self) -> str:
        """Root of the model endpoint as the inside reaches it, no trailing slash."""

    @abstractmethod
    def inside(self, path: str) -> str:
        """Map a path of a document (below /polar/session, or a mount's target) to the inside's."""

    @abstractmethod
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
        """Run a shell command to its end. Past `timeout` seconds its whole process tree is killed
        and return_code is -1; a cancelled exec is killed likewise. Output goes to the callbacks as
        it comes, or, without them, into the result (the last 8 MiB of each stream)."""

    @abstractmethod
    async def upload(self, source: Path, target: str) -> None:
        """Copy a file or a folder's content to `target` inside; parents are made."""

    @abstractmethod
    async def download(self, source: str, target: Path) -> None:
        """Copy a file or folder from inside; links are not followed out of it."""

    @abstractmethod
    async def export(self, source: str, file: IO[bytes]) -> None:
        """Write the content of the folder `source` to `file`, for `import_` of another place of this
        kind. Links stay as they are, wherever they point: only an isolated place may unpack it.
        Raises ValueError when it is too large."""

    @abstractmethod
    async def import_(self, target: str, file: IO[bytes]) -> None:
        """Replace all that the folder `target` holds by what `export` wrote to `file`, which is read
        from its beginning. Raises ValueError for a folder that is not this place's own to empty."""

    @abstractmethod
    async def write(self, path: str, content: bytes, mode: int = 0o600) -> None:
        """Write one file inside; parents are made."""

    @abstractmethod
    async def cancel(self) -> None:
        """Kill every process that any exec started, however it tried to escape; the place lives."""

    @abstractmethod
    async def stop(self) -> None:
        """Kill everything and remove the place. Idempotent."""
