import io
import json
import shutil
import tarfile
from pathlib import Path

import pytest

from polar_gateway.protocol import RuntimeSpec
from polar_gateway.runtimes.base import RuntimeRequest
from polar_gateway.runtimes.docker import DockerRuntime
from polar_gateway.testing import images
from tests.requirements import require

STATUS = """\
Package: git
Status: install ok installed
Architecture: amd64
Version: 1:2.39
Depends: libc6 (>= 2.34), perl, awk, liberror-perl, git-man (>> 1:2.39), ssh-client | other
Description: a text
 over lines, with a
 Depends: not-a-dependency

Package: libc6
Status: install ok installed
Architecture: amd64
Multi-Arch: same
Version: 2.36

Package: mawk
Status: install ok installed
Architecture: amd64
Version: 1.3
Provides: awk
Pre-Depends: libc6:any

Package: other
Status: install ok installed
Architecture: all
Version: 1

Package: ssh-client
Status: deinstall ok config-files
Architecture: amd64
Version: 9

Package: bash
Status: install ok installed
Architecture: amd64
Version: 5

Package: coreutils
Status: install ok installed
Architecture: amd64
Version: 9

Package: python3
Status: install ok installed
Architecture: amd64
Version: 3.11

Package: unwanted
Status: install ok installed
Architecture: amd64
Version: 1
"""


def test_installed_packages_are_read_with_what_they_need() -> None:
    packages = images.parse_status(STATUS)
    assert "ssh-client" not in packages
    assert packages["git"].version == "1:2.39"
    assert packages["git"].needs[0] == ("libc6",)
    assert packages["git"].needs[-1] == ("ssh-client", "other")
    assert packages["mawk"].needs == (("libc6",),)


def test_an_image_holds_what_is_wanted_and_what_that_needs() -> None:
    chosen = images.closure(images.parse_status(STATUS), images.WANTED)
    names = [package.name for package in chosen]
    assert names == ["bash", "coreutils", "git", "libc6", "mawk", "other", "python3"]


def test_a_host_without_the_essentials_is_told_which() -> None:
    packages = images.parse_status(STATUS)
    del packages["git"]
    with pytest.raises(LookupError, match="needs the Debian packages git"):
        images.closure(packages, images.WANTED)


def test_files_are_listed_under_their_real_folders_and_manuals_left_out(tmp_path: Path) -> None:
    (tmp_path / "usr" / "bin").mkdir(parents=True)
    (tmp_path / "usr" / "bin" / "git").touch()
    (tmp_path / "bin").symlink_to("usr/bin")
    (tmp_path / "info").mkdir()
    listed = ["/.", f"{tmp_path}/bin/git", f"{tmp_path}/bin/gone", "/usr/share/doc"]
    (tmp_path / "info" / "git:amd64.list").write_text("\n".join(listed))
    git = images.parse_status(STATUS)["git"]
    assert images.files_of([git], tmp_path) == {f"{tmp_path}/usr/bin/git"}


def test_an_image_names_its_layer_by_content() -> None:
    whole = io.BytesIO()
    images.write_image(whole, lambda layer: layer.write(b"content"), "some:tag")
    whole.seek(0)
    with tarfile.open(fileobj=whole) as archive:
        (manifest,) = json.load(archive.extractfile("manifest.json") or io.BytesIO())
        config = json.load(archive.extractfile(manifest["Config"]) or io.BytesIO())
        layer = archive.extractfile(manifest["Layers"][0])
        assert layer is not None
        assert layer.read() == b"content"
    assert manifest["RepoTags"] == ["some:tag"]
    assert config["rootfs"]["diff_ids"] == [
        "sha256:ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73"
    ]


@pytest.mark.docker
async def test_an_agent_finds_its_tools_in_the_agent_image(tmp_path: Path) -> None:
    missing = await DockerRuntime.unavailable()
    require("docker", missing is None, missing or "")
    image = await images.agent()
    assert await images.agent() == image
    place = DockerRuntime(
        RuntimeRequest(
            session_id="images",
            attempt_id="1",
            owner="images",
            spec=RuntimeSpec(image=image, network="none"),
            scratch_dir=tmp_path,
            model_port=None,
        )
    )
    try:
        await place.start()
        script = """
            set -e
            git init -q repository && cd repository
            printf 'one\\ntwo\\n' > file && git add file
            git -c user.name=a -c user.email=a@b commit -qm first
            sed -i s/two/three/ file && git diff --stat | grep -q file
            awk '{print $1}' file | tail -1
            python3 -c 'import ssl, sqlite3, json, subprocess; print("python")'
            ps -e >/dev/null && find . -name file | xargs grep -c one
            tar cz file | tar tz
            curl --version >/dev/null && id -un
        """
        result = await place.exec(script)
        assert result.stderr == ""
        assert result.stdout.split() == ["three", "python", "1", "file", "root"]
        if shutil.which("node"):
            assert (await place.exec("node -p 40+2")).stdout == "42\n"
    finally:
        await place.stop()
