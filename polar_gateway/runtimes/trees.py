"""Removing folders that an agent filled: as deep as it liked, unreadable, and full of links.

Nothing recurses and no path grows: what lies deeper is moved up next to the rest before it is emptied.
Everything is named from an open folder, so that no link is followed however names change meanwhile.
"""

import contextlib
import os
import uuid
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(path: Path) -> None:
    """Remove `path` and all below it; that there is nothing is fine. Blocks.

    Raises OSError for what cannot be removed, such as a mount or another user's file.
    """
    try:
        clear(path)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        path.unlink()
    else:
        path.rmdir()


def clear(path: Path) -> None:
    """Remove all that the folder `path` holds, and keep the folder. Blocks.

    Raises FileNotFoundError where there is none, NotADirectoryError for anything else, also a link
    to a folder, and OSError for what cannot be removed.
    """
    top = _opened(str(path), None)
    try:
        while folders := _emptied_of_files(top, top):
            for name in folders:
                inner = _opened(name, top)
                try:
                    _emptied_of_files(inner, top)
                finally:
                    os.close(inner)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)


def _emptied_of_files(folder: int, top: int) -> list[str]:
    """Delete the files of `folder` and move its folders to `top`; the names of those it has left."""
    folders = []
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in found:
        if not is_folder:
            os.unlink(name, dir_fd=folder)
        elif folder == top:
            folders.append(name)
        else:
            _make_accessible(name, folder)
            os.rename(name, uuid.uuid4().hex, src_dir_fd=folder, dst_dir_fd=top)
    return folders


def _opened(name: str, folder: int | None) -> int:
    _make_accessible(name, folder)
    return os.open(name, _FOLDER, dir_fd=folder)


def _make_accessible(name: str, folder: int | None) -> None:
    """A folder whose owner may not read or change it would keep its content."""
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    try:
        # Another user's stays as it is; whether that matters is seen when it is opened.
        with contextlib.suppress(PermissionError):
            os.chmod(f"/proc/self/fd/{handle}", 0o700)
    finally:
        os.close(handle)
