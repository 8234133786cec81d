import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from harness_adapters import npm
from polar_client.cli.harness import harness


def put(cache: Path, name: str) -> Path:
    """A pack as `install` leaves it, without its files."""
    pack = npm.PACKS[name]
    path = npm.pack_path(name, cache)
    path.mkdir(parents=True)
    document = {
        "name": name,
        "version": pack.version,
        "package": pack.package,
        "integrity": "sha512-x",
        "files": 11,
        "bytes": 370_000_000,
    }
    (path / npm.MANIFEST).write_text(json.dumps(document))
    return path


def test_the_list_shows_every_harness_and_what_is_installed(tmp_path: Path) -> None:
    path = put(tmp_path, "codex")
    result = CliRunner().invoke(harness, ["list", "--cache", str(tmp_path)])
    assert result.exit_code == 0
    heading, *lines = result.stdout.splitlines()
    assert heading.split() == ["HARNESS", "VERSION", "STATE", "SIZE", "PATH"]
    rows = {line.split()[0]: line for line in lines}
    assert list(rows) == [*npm.PACKS, "shell"]
    assert rows["codex"].split() == ["codex", "0.169.0", "installed", "370", "MB", str(path)]
    assert rows["pi"].split() == ["pi", "1.5.2", "not", "installed"]
    assert rows["shell"].split() == ["shell", "needs", "no", "pack"]


def test_the_list_as_json_has_the_same_rows(tmp_path: Path) -> None:
    path = put(tmp_path, "pi")
    result = CliRunner().invoke(harness, ["list", "--json", "--cache", str(tmp_path)])
    rows = {row["harness"]: row for row in json.loads(result.stdout)}
    assert rows["pi"] == {
        "harness": "pi",
        "version": "1.5.2",
        "state": "installed",
        "path": str(path),
        "bytes": 370_000_000,
    }
    assert rows["codex"]["state"] == "not installed"
    assert rows["shell"] == {
        "harness": "shell",
        "version": None,
        "state": "needs no pack",
        "path": None,
        "bytes": None,
    }


def test_the_cache_folder_comes_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLAR_CACHE", str(tmp_path))
    path = put(tmp_path / "packs", "codex")
    result = CliRunner().invoke(harness, ["path", "codex"])
    assert result.stdout == f"{path}\n"


def test_the_path_of_a_missing_pack_says_how_to_get_it(tmp_path: Path) -> None:
    result = CliRunner().invoke(harness, ["path", "pi", "--cache", str(tmp_path)])
    assert isinstance(result.exception, npm.PackError)
    assert str(result.exception) == "pi is not installed; run: polar harness install pi"


def test_installing_what_is_there_prints_its_folder(tmp_path: Path) -> None:
    path = put(tmp_path, "codex")
    result = CliRunner().invoke(harness, ["install", "codex", "codex", "--cache", str(tmp_path)])
    assert result.exit_code == 0
    assert result.stdout == f"{path}\n"
    assert result.stderr == f"codex 0.169.0 is installed in {path}\n"


def test_an_unknown_name_is_wrong_usage_and_lists_the_known(tmp_path: Path) -> None:
    result = CliRunner().invoke(harness, ["install", "codx", "--cache", str(tmp_path)])
    assert result.exit_code == 2
    assert "'codx' is not one of 'codex', 'claude_code', 'pi'" in result.stderr
