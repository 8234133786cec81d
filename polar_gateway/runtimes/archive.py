"""Trees travel between the gateway and a runtime as tar archives; those that come out are hostile.

What is unpacked here was written by an agent: it may hold links out of the tree, chains of links that
defeat a check, devices, or be endless. So links are made last, when nothing is written any more that
could go through one, and only if their text alone shows that they stay inside.

What only passes through on its way into another place of the same kind keeps its links wherever they
point (`move`, `unpack_verbatim`): out there they were the agent's too.
"""

import io
import os
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple, Protocol

MAX_BYTES = 4 << 30
"""Bytes of one archive that may come out of a runtime."""

MAX_ENTRIES = 500_000
"""Files, folders and links of one archive."""


_UNTRUSTED_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""A file that became a link or a pipe since it was looked at is neither followed nor waited for."""


class Owner(NamedTuple):
    """Numeric user and group that uploaded files belong to."""

    uid: int
    gid: int


class Writable(Protocol):
    """As much of a file as an archive is written to."""

    def write(self, data: bytes, /) -> object: ...


def pack(source: Path, name: str, owner: Owner | None, into: Writable) -> None:
    """Write `source`, a file or a folder with its content, as the entry `name` and below.

    Links stay links, except `source` itself; sockets, pipes and devices are left out.
    Raises FileNotFoundError when there is no `source`, ValueError when it has too many entries.
    """
    top = source.resolve(strict=True)
    # A stream: nothing but `write` is asked of what it goes to.
    with tarfile.open(fileobj=into, mode="w|", format=tarfile.PAX_FORMAT) as archive:  # type: ignore[call-overload]
        for count, (path, inner) in enumerate(_tree(str(top), _relative(name))):
            if count > MAX_ENTRIES:
                raise ValueError(f"{str(source)!r} holds more than {MAX_ENTRIES} entries")
            entry = archive.gettarinfo(path, inner)
            # There is none for a socket.
            if entry is None or entry.isdev():
                continue
            if entry.isreg():
                with open(os.open(path, _UNTRUSTED_FILE), "rb") as content:
                    archive.addfile(_owned(entry, owner), content)
            else:
                archive.addfile(_owned(entry, owner))


def _tree(top: str, name: str) -> Iterator[tuple[str, str]]:
    """`top` and all below it, with their names in an archive, parents first. Does not recurse: an
    agent's folders may be nested deeper than Python's stack."""
    yield top, name
    folders = [(top, name)] if os.path.isdir(top) else []
    while folders:
        folder, outer = folders.pop()
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            yield entry.path, f"{outer}/{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                folders.append((entry.path, f"{outer}/{entry.name}"))


def pack_content(name: str, content: bytes, mode: int, owner: Owner | None) -> IO[bytes]:
    """An archive of one file `name` that holds `content`."""
    entry = tarfile.TarInfo(_relative(name))
    entry.size = len(content)
    entry.mode = mode
    entry.mtime = int(time.time())
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(_owned(entry, owner), io.BytesIO(content))
    buffer.seek(0)
    return buffer


def unpack(archive: IO[bytes], target: Path) -> list[str]:
    """Unpack the one file or folder in `archive` as `target`, which may be a file or an empty folder.

    Returns the entries left out because they would reach out of `target` or are no plain files.
    Raises ValueError when the archive is empty, too large, or is itself such an entry, and
    FileExistsError when `target` is a folder with something in it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=archive, mode="r:") as source:
        top = source.next()
        if top is None:
            raise ValueError("the runtime sent an empty archive")
        if top.isreg():
            _unpack_file(source, top, target)
            return []
        if not top.isdir():
            raise ValueError(f"{top.name!r} is neither a file nor a folder")
        return _unpack_folder(source, top, target)


def unpack_verbatim(archive: IO[bytes], target: Path) -> None:
    """Unpack an archive of a folder's content into the empty folder `target`, just as it was, links
    wherever they point.

    Raises ValueError for an entry that is named to lie elsewhere or is no plain file.
    """
    with tarfile.open(fileobj=archive, mode="r:") as source:
        if refused := _unpack_below(source, "", target, verbatim=True):
            raise ValueError(f"the archive's entry {refused[0]!r} is no plain file or lies outside")


def move(content: IO[bytes], folder: str, into: Writable) -> None:
    """Write an archive of a folder's content again, with all of it below `folder`.

    Links keep what they point to; devices and pipes are left out.
    """
    prefix = _relative(folder)
    with (
        tarfile.open(fileobj=content, mode="r:") as source,
        tarfile.open(fileobj=into, mode="w|", format=tarfile.PAX_FORMAT) as target,  # type: ignore[call-overload]
    ):
        for count, entry in enumerate(source):
            if count > MAX_ENTRIES:
                raise ValueError(f"the archive holds more than {MAX_ENTRIES} entries")
            if entry.isdev():
                continue
            entry.name = f"{prefix}/{entry.name}"
            if entry.islnk():
                entry.linkname = f"{prefix}/{entry.linkname}"
            # Its long names, which would be written in place of these.
            names = ("path", "linkpath")
            entry.pax_headers = {k: v for k, v in entry.pax_headers.items() if k not in names}
            target.addfile(entry, source.extractfile(entry) if entry.isreg() else None)


def notes(source: str, left_out: list[str]) -> list[str]:
    """What has to be said about a download of `source` that left entries out."""
    if not left_out:
        return []
    # As they print: names made by an agent need not be text.
    examples = ", ".join(map(repr, left_out[:3]))
    count = len(left_out)
    what = f"{count} entries that point out of it or are no plain files: {examples}"
    return [f"the download of {source} left out {what}"]


def stays_inside(link: str, points_to: str) -> bool:
    """Whether a link at the relative path `link` stays in the tree, whatever other links are in it.

    True when the target goes up first, no higher than the tree's root, and then only down.
    """
    if points_to.startswith("/"):
        return False
    parts = [part for part in points_to.split("/") if part not in ("", ".")]
    ups = next((i for i, part in enumerate(parts) if part != ".."), len(parts))
    depth = len(os.path.normpath(link).split("/")) - 1
    return ups <= depth and ".." not in parts[ups:]


def _unpack_folder(source: tarfile.TarFile, top: tarfile.TarInfo, target: Path) -> list[str]:
    target.mkdir(exist_ok=True)
    if any(target.iterdir()):
        raise FileExistsError(f"{target} is not empty")
    return _unpack_below(source, top.name.rstrip("/") + "/", target, verbatim=False)


def _unpack_below(source: tarfile.TarFile, root: str, target: Path, *, verbatim: bool) -> list[str]:
    """Unpack what is named below `root` into the empty folder `target`; returns what was left out.

    Entries are judged by their names alone: asking the file system where each leads would take
    longer the deeper it lies, and an agent may lay it deep. Symbolic links are made last. So a hard
    link to one is another one, and a hard link to what was left out is left out.
    """
    refused: list[str] = []
    links: dict[str, str] = {}
    files: set[str] = set()
    folders: list[tarfile.TarInfo] = []
    for count, entry in enumerate(source):
        if count > MAX_ENTRIES:
            raise ValueError(f"the archive holds more than {MAX_ENTRIES} entries")
        if not entry.name.startswith(root):
            continue
        name = entry.name = os.path.normpath(entry.name.removeprefix(root))
        if name.startswith(("/", "../")) or name == "..":
            refused.append(name)
        elif entry.issym():
            links[name] = entry.linkname
        elif entry.islnk():
            twin = os.path.normpath(entry.linkname.removeprefix(root))
            if twin in files:
                os.link(target / twin, target / name)
                files.add(name)
            elif twin in links:
                links[name] = links[twin]
            else:
                refused.append(name)
        elif entry.isdir():
            folders.append(entry if verbatim else _plain(entry))
            _extract(source, folders[-1], target, finished=False)
        elif entry.isreg():
            _extract(source, entry if verbatim else _plain(entry), target)
            files.add(name)
        else:
            refused.append(name)
    for name, points_to in links.items():
        if verbatim or stays_inside(name, points_to):
            os.symlink(points_to, target / name)
        else:
            refused.append(name)
    # Their times and permissions, now that nothing is written into them any more.
    for folder in reversed(folders):
        _extract(source, folder, target)
    return refused


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """A file or folder as the gateway would have made it: its own, and open to no one else's writing."""
    mode = None if entry.isdir() else entry.mode & 0o755 | 0o600
    return entry.replace(mode=mode, uid=None, gid=None, uname=None, gname=None, deep=False)  # type: ignore[arg-type]


def _extract(
    source: tarfile.TarFile, entry: tarfile.TarInfo, target: Path, *, finished: bool = True
) -> None:
    source.extract(entry, target, set_attrs=finished, numeric_owner=True, filter="fully_trusted")


def _unpack_file(source: tarfile.TarFile, entry: tarfile.TarInfo, target: Path) -> None:
    if target.is_dir():
        raise ValueError(f"{entry.name!r} is a file, but {target} is a folder")
    if target.is_symlink():
        target.unlink()
    entry.name = target.name
    source.extract(entry, target.parent, filter="data")


class Bounded:
    """Passes what is written on to `into`; raises ValueError once it is more than `limit` bytes."""

    def __init__(self, into: Writable, what: str, limit: int | None = None) -> None:
        self._into = into
        self._what = what
        self._limit = self._left = MAX_BYTES if limit is None else limit

    def write(self, chunk: bytes, /) -> None:
        self._left -= len(chunk)
        if self._left < 0:
            raise ValueError(f"{self._what} is larger than {self._limit} bytes")
        self._into.write(chunk)


def _relative(name: str) -> str:
    """`name` as archives spell it: normalised, without the leading slash."""
    return os.path.normpath(name).lstrip("/") or "."


def _owned(entry: tarfile.TarInfo, owner: Owner | None) -> tarfile.TarInfo:
    if owner is not None:
        entry.uid, entry.gid = owner
        entry.uname = entry.gname = ""
    return entry
