"""Where results are stored: one folder, one file a session, by keys that the server chose.

A result is written in two steps, so that the transaction which accepts it decides whether it is
ever seen: `stage` makes the bytes durable under a name nobody reads, `publish` gives them their
key in one atomic step. Results are never parsed here. All calls block; run them in a thread.
"""

import os
import re
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

from polar_gateway.protocol import valid_id

Part: TypeAlias = bytes | Path
"""A piece of a spliced document: bytes as they are, or a file's content."""

BLOCK_BYTES = 256 * 1024

_STAGING = "incoming"
_KEY = re.compile(r"(?:task_(?P<task>[^/]+)|unclaimed)/ses_(?P<session>[^/]+)\.json", re.DOTALL)


class ResultKeyError(ValueError):
    """A key or an id is not one that may become a path."""


class ResultStore:
    """Results below `root`, as task_<task_id>/ses_<session_id>.json."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._staging = root / _STAGING
        self._staging.mkdir(parents=True, exist_ok=True, mode=0o700)

    def key(self, task_id: str, session_id: str) -> str:
        """The key of a session's result. Raises ResultKeyError for an invalid id."""
        if not valid_id(task_id) or not valid_id(session_id):
            raise ResultKeyError(f"no result can be stored for task {task_id!r}, session {session_id!r}")
        return f"task_{task_id}/ses_{session_id}.json"

    def unclaimed_key(self, session_id: str) -> str:
        """The key of a result whose session the server does not know."""
        if not valid_id(session_id):
            raise ResultKeyError(f"no result can be stored for session {session_id!r}")
        return f"unclaimed/ses_{session_id}.json"

    def path(self, key: str) -> Path:
        """The file of a key. Raises ResultKeyError if it is none of ours."""
        parts = _KEY.fullmatch(key)
        if parts is None or not all(valid_id(i) for i in parts.groups() if i is not None):
            raise ResultKeyError(f"{key!r} is not the key of a result")
        return self.root / key

    def stage(self, body: bytes | bytearray) -> Path:
        """Write `body` and sync it; returns what `publish` or `discard` takes."""
        staged = self._staging / uuid.uuid4().hex
        with staged.open("xb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        return staged

    def publish(self, staged: Path, key: str) -> None:
        """Make a staged result durable and visible under `key`, replacing what is there."""
        target = self.path(key)
        if not target.parent.is_dir():
            target.parent.mkdir(exist_ok=True)
            _sync_folder(self.root)
        staged.replace(target)
        _sync_folder(target.parent)

    def discard(self, staged: Path) -> None:
        staged.unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove what a crash left between staging and publishing; its sender sends it again."""
        for staged in self._staging.iterdir():
            staged.unlink(missing_ok=True)


def spliced_length(parts: Iterable[Part]) -> int:
    """Bytes of the document that `splice` yields. Raises FileNotFoundError for a missing part."""
    return sum(part.stat().st_size if isinstance(part, Path) else len(part) for part in parts)


def splice(parts: Iterable[Part]) -> Iterator[bytes]:
    """The parts one after the other, in blocks of about BLOCK_BYTES, so that small ones share one."""
    block = bytearray()
    for part in parts:
        if isinstance(part, bytes):
            block += part
        else:
            with part.open("rb") as file:
                while chunk := file.read(BLOCK_BYTES):
                    block += chunk
                    if len(block) >= BLOCK_BYTES:
                        yield bytes(block)
                        block.clear()
        if len(block) >= BLOCK_BYTES:
            yield bytes(block)
            block.clear()
    if block:
        yield bytes(block)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
