"""What people install: all six packages, the command, and the registries that plug-ins extend."""

import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("polar_client", "polar_server", "polar_gateway", "harness_adapters", "builders", "evaluators")
PLUGIN_KINDS = ("polar.harness_adapters", "polar.builders", "polar.evaluators", "polar.runtimes")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT, check=True, capture_output=True, timeout=100,
    )  # fmt: skip
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        yield archive


def _entry_points(wheel: zipfile.ZipFile) -> ConfigParser:
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    parser = ConfigParser(delimiters=("=",))
    parser.read_string(wheel.read(name).decode())
    return parser


def test_the_wheel_holds_every_module_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    packed = {name for name in wheel.namelist() if name.endswith(".py")}
    there = {
        str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")
    }
    assert packed == there


def test_the_wheel_holds_the_tiny_models_files(wheel: zipfile.ZipFile) -> None:
    folder = "polar_gateway/testing/tiny_model"
    assert {f"{folder}/tokenizer.json", f"{folder}/chat_template.jinja"} <= set(wheel.namelist())


def test_the_wheel_carries_the_licence(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("LICENSE"))
    assert "Apache License" in wheel.read(name).decode()


def test_the_command_is_installed(wheel: zipfile.ZipFile) -> None:
    assert dict(_entry_points(wheel)["console_scripts"]) == {"polar": "polar_client.cli:main"}


def test_every_plug_in_kind_has_its_entry_point_group() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert set(declared) == set(PLUGIN_KINDS)


def test_constraints_pin_every_dependency_and_name_no_address() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all("==" in pin and "/" not in pin for pin in pins)
    pinned = {pin.partition("==")[0] for pin in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    names = {requirement.split(";")[0].split("[")[0].split(">")[0].strip().lower() for requirement in wanted}
    assert names <= pinned
