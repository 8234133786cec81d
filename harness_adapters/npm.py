"""Harness packs: pinned, relocatable copies of the CLIs from npm, one folder each.

What is installed is what the lock files in `packs/` say, down to the last dependency's hash; npm's
own configuration decides where it is fetched from, and no package's install script is run. A pack
is read-only in use: mounted into a runtime, or run in place.
"""

import fcntl
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

MANIFEST = "polar-pack.json"

LOCK_FILES = Path(__file__).parent / "packs"

PROGRESS_SECONDS = 5.0

NODE_LAUNCHER = """\
#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
exec "$here/node" "$here/../{script}" "$@"
"""


class PackError(Exception):
    """A pack cannot be installed here; the message says why and what npm said."""


class Pack(msgspec.Struct, kw_only=True, frozen=True):
    """How one CLI becomes a pack; paths are inside the pack, with wildcards for the platform."""

    name: str
    package: str
    version: str
    program: str
    """What of `bin/` is the CLI."""
    links: dict[str, str] = {}
    """Name in `bin/` -> the executable it is a link to."""
    node_scripts: dict[str, str] = {}
    """Name in `bin/` -> the script that it runs with the pack's own Node."""
    executables: tuple[str, ...] = ()
    """What else must be executable and comes without that right."""
    prune: tuple[str, ...] = ()
    """Installed but never used by a headless run."""


class Manifest(msgspec.Struct, kw_only=True, frozen=True):
    """The document `polar-pack.json` of an installed pack; its presence says it is complete."""

    name: str
    version: str
    package: str
    integrity: str
    """npm's hash of the package, from the lock file."""
    files: int
    bytes: int


class InstalledPack(msgspec.Struct, kw_only=True, frozen=True):
    name: str
    version: str
    path: Path
    files: int
    bytes: int


NODE = {"node": "node_modules/node-linux-*/bin/node"}

NODE_UNUSED = (
    "node_modules/.bin",
    "node_modules/node-linux-*/include",
    "node_modules/node-linux-*/lib",
    "node_modules/node-linux-*/share",
)

PACKS: dict[str, Pack] = {
    "codex": Pack(
        name="codex",
        package="@openai/codex",
        version="0.169.0",
        program="codex",
        links={"codex": "node_modules/@openai/codex-linux-*/vendor/*/bin/codex"},
        prune=(
            "node_modules/.bin",
            "node_modules/@openai/codex",
            "node_modules/@openai/codex-linux-*/vendor/*/codex-resources/voice",
        ),
    ),
    "claude_code": Pack(
        name="claude_code",
        package="@anthropic-ai/claude-code",
        version="2.1.329",
        program="claude",
        links={"claude": "node_modules/@anthropic-ai/claude-code-linux-*64/claude"},
        prune=("node_modules/.bin", "node_modules/@anthropic-ai/claude-code"),
    ),
    "pi": Pack(
        name="pi",
        package="@earendil-works/pi-coding-agent",
        version="1.5.2",
        program="pi",
        links=NODE,
        node_scripts={"pi": "node_modules/@earendil-works/pi-coding-agent/dist/bundle/cli.js"},
        prune=NODE_UNUSED,
    ),
    "pi_old": Pack(
        name="pi_old",
        package="@mariozechner/pi-coding-agent",
        version="0.73.1",
        program="pi",
        links=NODE,
        node_scripts={"pi": "node_modules/@mariozechner/pi-coding-agent/dist/cli.js"},
        prune=NODE_UNUSED,
    ),
    "gemini_cli": Pack(
        name="gemini_cli",
        package="@google/gemini-cli",
        version="0.61.0",
        program="gemini",
        links=NODE,
        node_scripts={"gemini": "node_modules/@google/gemini-cli/bundle/gemini.js"},
        prune=NODE_UNUSED,
    ),
    "qwen_code": Pack(
        name="qwen_code",
        package="@qwen-code/qwen-code",
        version="0.24.4",
        program="qwen",
        links=NODE,
        node_scripts={"qwen": "node_modules/@qwen-code/qwen-code/cli-entry.js"},
        executables=("node_modules/@qwen-code/qwen-code/vendor/ripgrep/*-linux/rg",),
        prune=(
            *NODE_UNUSED,
            "node_modules/@qwen-code/qwen-code/vendor/ripgrep/*-darwin",
            "node_modules/@qwen-code/qwen-code/vendor/ripgrep/*-win32",
            "node_modules/@qwen-code/qwen-code/web-shell",
        ),
    ),
    "opencode": Pack(
        name="opencode",
        package="opencode-ai",
        version="1.18.33",
        program="opencode",
        links={"opencode": "node_modules/opencode-linux-*/bin/opencode"},
        prune=("node_modules/.bin", "node_modules/opencode-ai"),
    ),
}


def default_cache() -> Path:
    """Where packs are kept: `packs` below $POLAR_CACHE, or below ~/.cache/polar."""
    root = os.environ.get("POLAR_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "polar") / "packs"


def pack_path(name: str, cache_dir: Path) -> Path:
    return cache_dir / f"{name}-{PACKS[name].version}"


def installed(cache_dir: Path) -> list[InstalledPack]:
    """The complete packs in `cache_dir`; of ours only the version that is pinned now."""
    found = []
    for path in sorted(cache_dir.glob(f"[!.]*/{MANIFEST}")):
        try:
            manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
        except (msgspec.DecodeError, OSError):
            continue
        pinned = PACKS.get(manifest.name)
        if pinned is None or pinned.version == manifest.version:
            found.append(
                InstalledPack(
                    name=manifest.name,
                    version=manifest.version,
                    path=path.parent,
                    files=manifest.files,
                    bytes=manifest.bytes,
                )
            )
    return found


def install(name: str, cache_dir: Path, report: Callable[[str], None]) -> Path:
    """Install the pack `name` below `cache_dir` unless it is there; returns its folder.

    Safe beside other installs of the same pack: one does the work, the others wait for it. A
    killed install leaves nothing that counts as a pack. Raises PackError.
    """
    pack = PACKS[name]
    target = pack_path(name, cache_dir)
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(
            cache_dir / f".{name}.lock", lambda: report(f"{name}: waiting for another install")
        ):
            if any(found.path == target for found in installed(cache_dir)):
                report(f"{name} {pack.version} is installed in {target}")
                return target
            began = time.monotonic()
            fresh = cache_dir / f".{target.name}.new"
            shutil.rmtree(fresh, ignore_errors=True)
            try:
                manifest = _build(pack, fresh, report)
                shutil.rmtree(target, ignore_errors=True)
                fresh.rename(target)
            finally:
                shutil.rmtree(fresh, ignore_errors=True)
    except OSError as error:
        raise PackError(f"the pack {name} could not be written: {error}") from error
    seconds = time.monotonic() - began
    report(
        f"{name} {pack.version}: {manifest.bytes / 1e6:.0f} MB in {manifest.files} files, "
        f"{seconds:.1f} s, {target}"
    )
    return target


def _build(pack: Pack, folder: Path, report: Callable[[str], None]) -> Manifest:
    report(f"{pack.name} {pack.version}: fetching {pack.package} with npm")
    folder.mkdir()
    for file in ("package.json", "package-lock.json"):
        shutil.copyfile(LOCK_FILES / pack.name / file, folder / file)
    _npm_ci(pack, folder, report)
    for pattern in pack.prune:
        for path in folder.glob(pattern):
            shutil.rmtree(path)
    _write_launchers(pack, folder)
    _open_to_all(folder)
    _verify(pack, folder)
    files, size = _measure(folder)
    manifest = Manifest(
        name=pack.name,
        version=pack.version,
        package=pack.package,
        integrity=locked_packages(pack.name)[f"node_modules/{pack.package}"]["integrity"],
        files=files,
        bytes=size,
    )
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    (folder / MANIFEST).chmod(0o644)
    return manifest


def locked_packages(name: str) -> dict[str, dict[str, Any]]:
    """What the lock file of the pack `name` pins: path below the pack -> version and integrity."""
    lock = json.loads((LOCK_FILES / name / "package-lock.json").read_bytes())
    packages: dict[str, dict[str, Any]] = lock["packages"]
    return packages


def _npm_ci(pack: Pack, folder: Path, report: Callable[[str], None]) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise PackError(
            f"npm was not found on PATH; installing the pack {pack.name} needs Node.js 20 or newer "
            f"with npm (running it does not)"
        )
    command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=said, stderr=said
        )
        try:
            while True:
                try:
                    process.wait(timeout=PROGRESS_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    report(f"{pack.name} {pack.version}: {_measure(folder)[1] / 1e6:.0f} MB so far")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode:
            said.seek(0)
            words = said.read().decode("utf-8", "replace").strip()[-2000:]
            raise PackError(
                f"npm could not install {pack.package} {pack.version} "
                f"(status {process.returncode}). It said:\n{words}"
            )


def _write_launchers(pack: Pack, folder: Path) -> None:
    (folder / "bin").mkdir()
    for name, pattern in pack.links.items():
        found = list(folder.glob(pattern))
        if len(found) != 1:
            raise PackError(
                f"{pack.package} {pack.version} has {len(found)} files {pattern} on this platform "
                f"({os.uname().sysname} {os.uname().machine}), not one"
            )
        (folder / "bin" / name).symlink_to(Path("..") / found[0].relative_to(folder))
        found[0].chmod(0o755)
    for pattern in pack.executables:
        for path in folder.glob(pattern):
            path.chmod(0o755)
    for name, script in pack.node_scripts.items():
        launcher = folder / "bin" / name
        launcher.write_text(NODE_LAUNCHER.format(script=script))
        launcher.chmod(0o755)


def _open_to_all(folder: Path) -> None:
    """Let any user of any runtime read and run it, whatever the umask was."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(mode | (0o555 if mode & 0o100 else 0o444))


def _verify(pack: Pack, folder: Path) -> None:
    """Run `PROGRAM --version` with a bare environment, as a strange image would give it."""
    with tempfile.TemporaryDirectory() as home:
        try:
            run = subprocess.run(
                [folder / "bin" / pack.program, "--version"],
                env={"HOME": home, "PATH": "/usr/bin:/bin"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=60,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PackError(f"{pack.program} of {pack.package} does not start: {error}") from error
    said = (run.stdout + run.stderr).strip()  # pi says its version on stderr
    if run.returncode or not re.search(rf"\b{re.escape(pack.version)}\b", said):
        raise PackError(
            f"{pack.program} --version ended with status {run.returncode} instead of saying "
            f"{pack.version}. It said:\n{said[-2000:]}"
        )


def _measure(folder: Path) -> tuple[int, int]:
    """Files and their bytes below `folder`, which npm may be changing meanwhile."""
    files = size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                size += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
            files += 1
    return files, size


@contextmanager
def _locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
