import os
from pathlib import Path

import pytest

from polar_gateway.runtimes import trees


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").touch()
    return tmp_path / "outside"


def test_a_tree_is_removed_and_its_links_are_not_followed(tmp_path: Path, outside: Path) -> None:
    top = tmp_path / "top"
    (top / "a" / "b").mkdir(parents=True)
    (top / "a" / "b" / "link").symlink_to(outside)
    (top / "a" / "b" / "file").touch()
    (top / "a" / "dangling").symlink_to("nowhere")
    os.mkfifo(top / "pipe")
    trees.remove_tree(top)
    assert not top.exists()
    assert (outside / "kept").exists()


def test_folders_may_be_nested_beyond_the_longest_path(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for _ in range(2500):
        os.mkdir("folder", dir_fd=here)
        below = os.open("folder", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    trees.remove_tree(top)
    assert not top.exists()


def test_a_folder_that_nobody_may_enter_is_removed(tmp_path: Path) -> None:
    closed = tmp_path / "top" / "closed"
    (closed / "in").mkdir(parents=True)
    for folder in (closed / "in", closed, tmp_path / "top"):
        folder.chmod(0)
    trees.remove_tree(tmp_path / "top")
    assert not (tmp_path / "top").exists()


def test_a_file_and_a_link_are_removed_themselves(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(outside)
    for name in ("file", "link", "nothing"):
        trees.remove_tree(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["outside"]
    assert (outside / "kept").exists()


def test_clearing_keeps_the_folder(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "c").touch()
    trees.clear(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_not_cleared(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "link").symlink_to(outside)
    with pytest.raises(NotADirectoryError):
        trees.clear(tmp_path / "link")
    assert (outside / "kept").exists()
