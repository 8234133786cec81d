import json
import os
import stat
import subprocess
import tempfile
import threading
from pathlib import Path

import msgspec
import pytest

from harness_adapters import ADAPTERS, npm
from tests.requirements import require

CODEX = "node_modules/@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl"

NPM = f"""#!/bin/sh
echo "$@" >> "$NPM_CALLS"
umask 077
mkdir -p {CODEX}/bin {CODEX}/codex-resources/voice node_modules/@openai/codex
echo big > {CODEX}/codex-resources/voice/model
printf '#!/bin/sh\\necho codex-cli %s\\n' "$NPM_VERSION" > {CODEX}/bin/codex
chmod 700 {CODEX}/bin/codex
"""


@pytest.fixture
def scripted_npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An `npm` that unpacks a tiny Codex; returns the file that lists how it was called."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "npm").write_text(NPM)
    (programs / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("NPM_VERSION", npm.PACKS["codex"].version)
    monkeypatch.setenv("NPM_CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls"


def quiet(line: str) -> None:
    pass


def test_every_adapter_that_needs_a_pack_has_one() -> None:
    assert {adapter.pack for adapter in ADAPTERS.values() if adapter.pack} == set(npm.PACKS)


@pytest.mark.parametrize("name", npm.PACKS)
def test_the_lock_file_pins_what_the_table_says_and_names_no_host(name: str) -> None:
    pack = npm.PACKS[name]
    assert pack.name == name
    assert pack.program in pack.links | pack.node_scripts
    packages = npm.locked_packages(name)
    assert packages[f"node_modules/{pack.package}"]["version"] == pack.version
    assert packages[""]["dependencies"] == {pack.package: pack.version}
    wanted = json.loads((npm.LOCK_FILES / name / "package.json").read_bytes())
    assert wanted["dependencies"] == packages[""]["dependencies"]
    installed = {path.rpartition("node_modules/")[2] for path in packages}
    for path, locked in packages.items():
        # npm would look for what is named and not pinned, and not every registry has the same.
        for kind in ("dependencies", "optionalDependencies"):
            assert set(locked.get(kind, {})) <= installed, path
    del packages[""]
    for path, locked in packages.items():
        assert locked["integrity"].startswith("sha512-"), path
        assert "resolved" not in locked, path


def test_the_cache_folder_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("POLAR_CACHE", str(tmp_path))
    assert npm.default_cache() == tmp_path / "packs"
    monkeypatch.setenv("POLAR_CACHE", "")
    monkeypatch.setenv("HOME", "/home/x")
    assert npm.default_cache() == Path("/home/x/.cache/polar/packs")


def test_an_installed_pack_is_complete_pruned_and_open_to_every_user(
    scripted_npm: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    path = npm.install("codex", cache, quiet)
    assert path == cache / f"codex-{npm.PACKS['codex'].version}"
    assert os.readlink(path / "bin/codex") == f"../{CODEX}/bin/codex"
    assert not (path / CODEX / "codex-resources/voice").exists()
    assert not (path / "node_modules/@openai/codex").exists()
    for inside in (path, *path.rglob("*")):
        assert inside.stat().st_mode & stat.S_IROTH, inside
    (found,) = npm.installed(cache)
    assert (found.name, found.version, found.path) == ("codex", npm.PACKS["codex"].version, path)
    assert found.files == 4
    manifest = msgspec.json.decode((path / npm.MANIFEST).read_bytes(), type=npm.Manifest)
    assert manifest.integrity.startswith("sha512-")
    assert "--ignore-scripts" in scripted_npm.read_text()


def test_a_second_install_does_nothing(scripted_npm: Path, tmp_path: Path) -> None:
    said: list[str] = []
    first = npm.install("codex", tmp_path / "cache", said.append)
    second = npm.install("codex", tmp_path / "cache", said.append)
    assert first == second
    assert len(scripted_npm.read_text().splitlines()) == 1
    assert "is installed in" in said[-1]


def test_installs_at_the_same_time_do_the_work_once(scripted_npm: Path, tmp_path: Path) -> None:
    said: list[str] = []
    threads = [
        threading.Thread(target=npm.install, args=("codex", tmp_path / "cache", said.append))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(scripted_npm.read_text().splitlines()) == 1
    assert len(npm.installed(tmp_path / "cache")) == 1
    assert sum("is installed in" in line for line in said) == 3


def test_leftovers_of_a_killed_install_are_replaced(scripted_npm: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    target = npm.pack_path("codex", cache)
    for leftover in (target, cache / f".{target.name}.new"):
        leftover.mkdir(parents=True)
        (leftover / "half").write_text("")
    assert npm.installed(cache) == []
    npm.install("codex", cache, quiet)
    assert not (target / "half").exists()
    assert sorted(path.name for path in cache.iterdir()) == [".codex.lock", target.name]


def test_a_cli_of_another_version_is_refused_and_leaves_nothing(
    scripted_npm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPM_VERSION", "0.1.0")
    with pytest.raises(npm.PackError, match=r"instead of saying 0\.169\.0[\s\S]*codex-cli 0\.1\.0"):
        npm.install("codex", tmp_path / "cache", quiet)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".codex.lock"]


def test_what_npm_said_is_in_the_error(scripted_npm: Path, tmp_path: Path) -> None:
    (tmp_path / "programs/npm").write_text("#!/bin/sh\necho 'npm error network is down'; exit 7\n")
    with pytest.raises(npm.PackError) as caught:
        npm.install("codex", tmp_path / "cache", quiet)
    assert "npm could not install @openai/codex 0.169.0 (status 7)" in str(caught.value)
    assert "npm error network is down" in str(caught.value)


def test_a_platform_without_a_binary_is_named(scripted_npm: Path, tmp_path: Path) -> None:
    (tmp_path / "programs/npm").write_text("#!/bin/sh\n")
    with pytest.raises(npm.PackError, match=r"has 0 files .* on this platform"):
        npm.install("codex", tmp_path / "cache", quiet)


def test_a_missing_npm_is_said_in_plain_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(npm.PackError, match="npm was not found on PATH"):
        npm.install("codex", tmp_path / "cache", quiet)


def test_a_folder_that_cannot_be_written_is_said_in_plain_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(npm.PackError, match="the pack codex could not be written"):
        npm.install("codex", tmp_path / "file" / "cache", quiet)


def test_other_versions_and_broken_folders_are_not_listed(tmp_path: Path) -> None:
    for folder, content in (
        (
            "codex-0.1",
            '{"name":"codex","version":"0.1","package":"p","integrity":"i","files":1,"bytes":1}',
        ),
        (
            "mine-1",
            '{"name":"mine","version":"1","package":"p","integrity":"i","files":1,"bytes":1}',
        ),
        ("broken-1", "{"),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / npm.MANIFEST).write_text(content)
    assert [pack.name for pack in npm.installed(tmp_path)] == ["mine"]
    assert npm.installed(tmp_path / "nowhere") == []


@pytest.mark.clis
@pytest.mark.parametrize("name", npm.PACKS)
def test_a_real_pack_starts_wherever_it_is_moved(name: str) -> None:
    packs = {pack.name: pack.path for pack in npm.installed(npm.default_cache())}
    require("clis", name in packs, f"run: polar harness install {name}")
    pack = npm.PACKS[name]
    with tempfile.TemporaryDirectory(dir=npm.default_cache().parent) as folder:
        # Hard links and a rename: another path, at once, whatever the size.
        moved = Path(folder) / "else where"
        subprocess.run(["cp", "-al", packs[name], moved], check=True)
        run = subprocess.run(
            [moved / "bin" / pack.program, "--version"],
            env={"PATH": "/usr/bin:/bin", "HOME": folder},
            capture_output=True,
            text=True,
            check=True,
        )
    assert pack.version in run.stdout + run.stderr
