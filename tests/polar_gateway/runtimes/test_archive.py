import io
import tarfile
from pathlib import Path

import pytest

from polar_gateway.runtimes import archive


def tar(*entries: tarfile.TarInfo) -> io.BytesIO:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as writer:
        for one in entries:
            writer.addfile(one, io.BytesIO(b"x" * one.size))
    buffer.seek(0)
    return buffer


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = link
    info.size = 1 if kind == tarfile.REGTYPE else 0
    info.mode = 0o700
    return info


FOLDER = entry("d", tarfile.DIRTYPE)


@pytest.mark.parametrize(
    ("link", "points_to", "inside"),
    [
        ("a", "b", True),
        ("a", "b/c", True),
        ("a", ".", True),
        ("a", "", True),
        ("x/a", "../b", True),
        ("x/y/a", "../../b/c", True),
        ("a", "..", False),
        ("x/a", "../..", False),
        ("a", "/etc", False),
        ("a", "b/..", False),
        ("a", "./b/../../c", False),
        ("x/a", "../b/../../c", False),
    ],
)
def test_a_link_stays_inside_if_its_text_alone_shows_it(
    link: str, points_to: str, inside: bool
) -> None:
    assert archive.stays_inside(link, points_to) is inside


@pytest.mark.parametrize(
    "bad",
    [
        entry("d/../../out"),
        entry("d/link", tarfile.SYMTYPE, "/etc/passwd"),
        entry("d/link", tarfile.SYMTYPE, "../.."),
        entry("d/hard", tarfile.LNKTYPE, "../../etc/passwd"),
        entry("d/device", tarfile.CHRTYPE),
        entry("d/pipe", tarfile.FIFOTYPE),
    ],
    ids=lambda one: f"{one.name} {one.linkname}",
)
def test_what_reaches_out_is_left_out_and_the_rest_unpacked(
    tmp_path: Path, bad: tarfile.TarInfo
) -> None:
    refused = archive.unpack(tar(FOLDER, bad, entry("d/good")), tmp_path / "t" / "d")
    assert refused == [bad.name.removeprefix("d/")]
    assert [path.name for path in tmp_path.rglob("*")] == ["t", "d", "good"]


def test_nothing_is_written_through_a_link_of_the_archive(tmp_path: Path) -> None:
    trap = tar(
        FOLDER,
        entry("d/a", tarfile.SYMTYPE, "."),
        entry("d/b", tarfile.SYMTYPE, "a/a/../.."),
        entry("d/b/file"),
    )
    archive.unpack(trap, tmp_path / "t")
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_setuid_bits_and_owners_do_not_come_along(tmp_path: Path) -> None:
    program = entry("d/program")
    program.mode = 0o6755
    archive.unpack(tar(FOLDER, program), tmp_path / "d")
    assert (tmp_path / "d" / "program").stat().st_mode & 0o7777 == 0o755


def test_an_archive_of_a_link_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'l' is neither a file nor a folder"):
        archive.unpack(tar(entry("l", tarfile.SYMTYPE, "x")), tmp_path / "l")


def test_an_empty_archive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="empty"):
        archive.unpack(tar(), tmp_path / "x")


def test_a_file_does_not_replace_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder"):
        archive.unpack(tar(entry("f")), tmp_path)


def test_a_file_replaces_a_link_and_not_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "f").symlink_to("kept")
    archive.unpack(tar(entry("f")), tmp_path / "f")
    assert (tmp_path / "kept").read_text() == "kept"
    assert (tmp_path / "f").read_text() == "x"


def test_hard_links_within_the_tree_are_kept(tmp_path: Path) -> None:
    twice = tar(FOLDER, entry("d/one"), entry("d/two", tarfile.LNKTYPE, "d/one"))
    assert archive.unpack(twice, tmp_path / "d") == []
    assert (tmp_path / "d" / "two").read_text() == "x"


def test_too_much_is_refused() -> None:
    taken = io.BytesIO()
    bounded = archive.Bounded(taken, "'/big'", limit=10)
    bounded.write(b"12345")
    with pytest.raises(ValueError, match="'/big' is larger than 10 bytes"):
        bounded.write(b"678901")
    assert taken.getvalue() == b"12345"


def test_too_many_entries_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_ENTRIES", 3)
    with pytest.raises(ValueError, match="more than 3 entries"):
        archive.unpack(tar(FOLDER, *(entry(f"d/{n}") for n in range(5))), tmp_path / "d")


def test_a_hard_link_is_no_way_around_what_is_left_out(tmp_path: Path) -> None:
    trap = tar(
        FOLDER,
        entry("d/a", tarfile.SYMTYPE, "/etc/passwd"),
        entry("d/b", tarfile.LNKTYPE, "d/a"),
        entry("d/pipe", tarfile.FIFOTYPE),
        entry("d/pipe2", tarfile.LNKTYPE, "d/pipe"),
        entry("d/fine", tarfile.SYMTYPE, "good"),
        entry("d/fine2", tarfile.LNKTYPE, "d/fine"),
    )
    assert sorted(archive.unpack(trap, tmp_path / "d")) == ["a", "b", "pipe", "pipe2"]
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == ["fine", "fine2"]


def test_a_folder_is_not_laid_over_another(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    with pytest.raises(FileExistsError, match="is not empty"):
        archive.unpack(tar(FOLDER, entry("d/x")), tmp_path)


def test_a_verbatim_copy_has_its_links_and_nothing_is_written_through_them(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    trap = tar(entry("./link", tarfile.SYMTYPE, str(tmp_path)), entry("./link/out"))
    with pytest.raises(FileExistsError):
        archive.unpack_verbatim(trap, tmp_path / "t")
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


@pytest.mark.parametrize(
    "bad",
    [
        entry("../out"),
        entry("/out"),
        entry("hard", tarfile.LNKTYPE, "../out"),
        entry("pipe", tarfile.FIFOTYPE),
    ],
)
def test_a_verbatim_copy_is_of_plain_files_in_its_folder(
    tmp_path: Path, bad: tarfile.TarInfo
) -> None:
    (tmp_path / "t").mkdir()
    with pytest.raises(ValueError, match="no plain file or lies outside"):
        archive.unpack_verbatim(tar(bad), tmp_path / "t")
