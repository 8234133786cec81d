"""Container images without a registry, from what is installed on this host.

    python -m polar_gateway.testing.images agent      a place to work: shell, git, Python, Node
    python -m polar_gateway.testing.images busybox    the smallest place with a shell

Each prints the image's name. The image is made once: its tag says what went into it. An agent image
holds the files of a few Debian packages and of all they depend on, as the package manager lists them.
"""

import argparse
import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import IO, NamedTuple

import aiodocker
import anyio
import anyio.to_thread

from polar_gateway.runtimes.docker import connected

RECIPE = "1"
"""Raised when an image is put together differently, so that tags of old ones do not match."""

WANTED = (
    *("base-files", "base-passwd", "bash", "coreutils", "dash", "debianutils", "diffutils"),
    *("findutils", "grep", "sed", "gzip", "tar", "mawk", "util-linux", "procps", "hostname"),
    *("libc-bin", "ncurses-bin", "ncurses-base", "sysvinit-utils", "perl-base", "patch", "less"),
    *("git", "python3", "curl", "ca-certificates", "jq", "ripgrep", "nodejs", "libstdc++6"),
)
"""Packages that go into an agent image where the host has them."""

NEEDED = frozenset({"bash", "coreutils", "git", "python3"})
"""Those without which it would not be one."""

LEFT_OUT = frozenset({"perl", "liberror-perl", "git-man", "tzdata"})
"""Dependencies that no agent's work needs."""

_UNREAD = re.compile(
    r"/usr/(include|lib/node_modules|share/(doc|man|locale|info|lintian|bug|i18n|zoneinfo))/"
)
_FOLDERS = ("dev", "etc", "home", "mnt", "opt", "proc", "root", "run", "srv", "sys", "workspace")
_SHARED_FOLDERS = ("tmp", "var/tmp")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"


class Package(NamedTuple):
    """An installed Debian package; `needs` are its dependencies, each a list of alternatives."""

    name: str
    version: str
    architecture: str
    needs: tuple[tuple[str, ...], ...]
    provides: tuple[str, ...]


def parse_status(text: str) -> dict[str, Package]:
    """The installed packages of dpkg's status file, by name."""
    packages = {}
    for paragraph in text.split("\n\n"):
        fields = dict(re.findall(r"^(\S+): ?((?:.*)(?:\n[ \t].*)*)", paragraph, re.MULTILINE))
        if not fields.get("Status", "").endswith(" installed"):
            continue
        needs = [fields[key] for key in ("Pre-Depends", "Depends") if key in fields]
        packages[fields["Package"]] = Package(
            name=fields["Package"],
            version=fields["Version"],
            architecture=fields["Architecture"],
            needs=tuple(_names(one, "|") for one in ",".join(needs).split(",") if one.strip()),
            provides=_names(fields.get("Provides", ""), ","),
        )
    return packages


def _names(text: str, separator: str) -> tuple[str, ...]:
    """Package names of a list, without versions and architectures."""
    return tuple(
        re.split(r"[ (:\[]", one.strip())[0] for one in text.split(separator) if one.strip()
    )


def closure(packages: dict[str, Package], wanted: Iterable[str]) -> list[Package]:
    """The wanted packages that are installed, and all that they need, by name.

    Raises LookupError when one of NEEDED is not installed.
    """
    if missing := sorted(NEEDED - packages.keys()):
        raise LookupError(f"an agent image needs the Debian packages {', '.join(missing)}")
    providers: dict[str, list[str]] = {}
    for package in packages.values():
        for name in (package.name, *package.provides):
            providers.setdefault(name, []).append(package.name)
    found: set[str] = set()
    waiting = [name for name in wanted if name in packages]
    while waiting:
        name = waiting.pop()
        if name in found or name in LEFT_OUT:
            continue
        found.add(name)
        for alternatives in packages[name].needs:
            waiting += next((providers[one] for one in alternatives if one in providers), [])
    return [packages[name] for name in sorted(found)]


def files_of(packages: Iterable[Package], dpkg: Path = Path("/var/lib/dpkg")) -> set[str]:
    """What the packages installed, as paths whose folders are no links."""
    paths = set()
    for package in packages:
        lists = (
            dpkg / f"info/{package.name}{arch}.list" for arch in ("", f":{package.architecture}")
        )
        for line in next(one for one in lists if one.exists()).read_text().splitlines():
            path = os.path.join(os.path.realpath(os.path.dirname(line)), os.path.basename(line))
            if os.path.lexists(path) and not _UNREAD.match(os.path.realpath(path) + "/"):
                paths.add(path)
    return paths - {"/."}


def alternatives(installed: set[str], dpkg: Path = Path("/var/lib/dpkg")) -> set[str]:
    """The links, such as /usr/bin/awk, by which programs among `installed` go by general names."""
    links = set()
    for record in (dpkg / "alternatives").iterdir():
        link = record.read_text().splitlines()[1]
        if os.path.realpath(link) in installed:
            links |= {link, f"/etc/alternatives/{record.name}"}
    return links


def write_agent_root(layer: IO[bytes], packages: list[Package]) -> None:
    """Write an agent image's file system as a tar archive."""
    installed = files_of(packages)
    merged = {path for path in ("/bin", "/lib", "/lib64", "/sbin") if os.path.islink(path)}
    paths = installed | alternatives(installed) | merged | {_CERTIFICATES}
    sources = {path[1:]: path for path in paths if os.path.lexists(path)}
    for name in ("passwd", "group"):
        sources[f"etc/{name}"] = f"/usr/share/base-passwd/{name}.master"
    node = shutil.which("node")
    if node and not any(package.name == "nodejs" for package in packages):
        sources["usr/local/bin/node"] = os.path.realpath(node)
    with tarfile.open(fileobj=layer, mode="w|", format=tarfile.PAX_FORMAT) as root:
        _add_folders(root, without=sources.keys())
        # Sorted, a folder comes before what is in it.
        for name, path in sorted(sources.items()):
            root.add(path, arcname=name, recursive=False, filter=_anonymous)


def write_busybox_root(layer: IO[bytes], busybox: Path) -> None:
    """Write the file system of the smallest image as a tar archive."""
    applets = subprocess.run([busybox, "--list"], check=True, capture_output=True, text=True)
    with tarfile.open(fileobj=layer, mode="w|", format=tarfile.PAX_FORMAT) as root:
        _add_folders(root, without=())
        root.add(busybox, arcname="bin/busybox", filter=_anonymous)
        for applet in applets.stdout.split():
            link = tarfile.TarInfo(f"bin/{applet}")
            link.type = tarfile.SYMTYPE
            link.linkname = "busybox"
            if applet != "busybox":
                root.addfile(link)
        for name, line in (
            ("passwd", b"root:x:0:0:root:/root:/bin/sh\n"),
            ("group", b"root:x:0:\n"),
        ):
            _add_text(root, f"etc/{name}", line)


def _add_folders(root: tarfile.TarFile, without: Collection[str]) -> None:
    for name in (*_FOLDERS, *_SHARED_FOLDERS):
        if name in without:
            continue
        folder = tarfile.TarInfo(name)
        folder.type = tarfile.DIRTYPE
        folder.mode = 0o1777 if name in _SHARED_FOLDERS else 0o755
        root.addfile(folder)


def _add_text(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uname = entry.gname = ""
    return entry


def write_image(whole: IO[bytes], write_root: Callable[[IO[bytes]], None], tag: str) -> None:
    """Write an image of one layer in the form that a daemon loads."""
    with tempfile.TemporaryFile() as layer:
        write_root(layer)
        size = layer.tell()
        layer.seek(0)
        digest = hashlib.file_digest(layer, "sha256").hexdigest()
        layer.seek(0)
        machine = platform.machine()
        config = {
            "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine),
            "os": "linux",
            "config": {"Env": [f"PATH={_PATH}"], "Cmd": ["/bin/sh"], "WorkingDir": "/workspace"},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        }
        manifest = [{"Config": "config.json", "RepoTags": [tag], "Layers": ["layer.tar"]}]
        with tarfile.open(fileobj=whole, mode="w") as archive:
            entry = tarfile.TarInfo("layer.tar")
            entry.size = size
            archive.addfile(entry, layer)
            _add_text(archive, "config.json", json.dumps(config).encode())
            _add_text(archive, "manifest.json", json.dumps(manifest).encode())


async def _ensure(name: str, ingredients: str, write_root: Callable[[IO[bytes]], None]) -> str:
    """Make the image unless the daemon has it; return its name with the tag."""
    content = hashlib.sha256(f"{RECIPE}\n{ingredients}".encode()).hexdigest()
    tag = f"{name}:{content[:12]}"
    async with connected() as docker:
        try:
            await docker.images.inspect(tag)
        except aiodocker.DockerError as error:
            if error.status != 404:
                raise
            with tempfile.TemporaryFile() as image:
                await anyio.to_thread.run_sync(write_image, image, write_root, tag)
                image.seek(0)
                await docker.images.import_image(image)
    return tag


async def agent() -> str:
    """The name of an agent image, made of this host's Debian packages.

    Raises LookupError when the host is no Debian or lacks a package of NEEDED.
    """
    status = Path("/var/lib/dpkg/status")
    if not await anyio.Path(status).exists():
        raise LookupError("an agent image is made of Debian packages, and this host has none")
    packages = closure(parse_status(await anyio.Path(status).read_text()), WANTED)
    ingredients = "\n".join(f"{package.name} {package.version}" for package in packages)
    return await _ensure(
        "polar-agent", ingredients, lambda layer: write_agent_root(layer, packages)
    )


async def busybox() -> str:
    """The name of the smallest image. Raises LookupError without the package busybox-static."""
    binary = shutil.which("busybox")
    if binary is None:
        raise LookupError("the busybox image needs the Debian package busybox-static")
    content = await anyio.Path(binary).read_bytes()
    return await _ensure(
        "polar-busybox",
        hashlib.sha256(content).hexdigest(),
        lambda layer: write_busybox_root(layer, Path(binary)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a container image without a registry.")
    parser.add_argument("image", choices=["agent", "busybox"])
    made = anyio.run({"agent": agent, "busybox": busybox}[parser.parse_args().image])
    print(made)  # noqa: T201 - its output


if __name__ == "__main__":
    main()
