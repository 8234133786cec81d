"""Imports point one way; what each package may know is the table below."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("polar_client", "polar_server", "polar_gateway", "harness_adapters", "builders", "evaluators")

MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "builders": (),
    "harness_adapters": (),
    "evaluators": ("builders",),
    "polar_gateway": ("evaluators", "builders", "harness_adapters"),
    # Of a gateway the server knows the documents, and nothing that runs.
    "polar_server": (
        "polar_gateway.protocol",
        "polar_gateway.results",
        "polar_gateway.errors",
        "polar_gateway.config",
        "evaluators",
        "builders",
        "harness_adapters",
    ),
    "polar_client": (
        "polar_server.protocol",
        "polar_server.config",
        "polar_gateway.protocol",
        "polar_gateway.config",
        "builders.records",
        "harness_adapters",
    ),
}
IMPORT_NAMES = {"pyyaml": "yaml"}
"""Of dependencies that are imported under another name."""
NEW_IN_PYTHON = "compression"
"""Of the standard library from 3.14 on; before, a backport is a dependency."""
COMPOSITION_ROOT = "polar_client.cli"
STARTED_BY_IT = ("polar_server", "polar_gateway")
"""What the composition root may import beyond its package's row, and only when a command runs."""


class Import(NamedTuple):
    importer: str
    imported: str
    line: int
    lazy: bool
    """Inside a function, so that it happens when that is called."""

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def modules() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


@cache
def imports() -> list[Import]:
    found: list[Import] = []
    for name, path in modules():
        _collect(name, ast.parse(path.read_text(), str(path)), False, found)
    return found


def _collect(importer: str, node: ast.AST, lazy: bool, found: list[Import]) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            found += [Import(importer, alias.name, child.lineno, lazy) for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{importer}:{child.lineno} uses a relative import"
            found += [
                Import(importer, _imported(child.module or "", alias.name), child.lineno, lazy)
                for alias in child.names
            ]
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            _collect(importer, ast.Module(child.body, []), True, found)
        else:
            _collect(importer, child, lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef), found)


def _imported(module: str, name: str) -> str:
    """`from a import b` imports the module a.b if there is one, else something of a."""
    inner = ROOT.joinpath(*module.split("."), name)
    return f"{module}.{name}" if inner.is_dir() or inner.with_suffix(".py").exists() else module


def within(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def ours() -> list[Import]:
    return [one for one in imports() if one.imported.split(".")[0] in PACKAGES]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_it_may_know(package: str) -> None:
    allowed = (package, *MAY_IMPORT[package])
    wrong = [
        str(one)
        for one in ours()
        if within(one.importer, (package,))
        and not within(one.imported, allowed)
        and not (within(one.importer, (COMPOSITION_ROOT,)) and one.lazy and within(one.imported, STARTED_BY_IT))
    ]
    assert not wrong


def test_helpers_for_tests_are_imported_by_nothing_that_is_served() -> None:
    testing = ("polar_gateway.testing",)
    wrong = [
        str(one) for one in ours() if within(one.imported, testing) and not within(one.importer, testing)
    ]
    assert not wrong


def test_third_parties_are_declared_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[^a-z0-9]", requirement.lower())[0] for requirement in project["dependencies"]}
    declared = {IMPORT_NAMES.get(name, name) for name in names} | {"yarl"}  # aiohttp's URLs are yarl's
    optional = {
        # Only inside vLLM's own environment, where the tiny model is made and served.
        "polar_gateway.testing.tiny_model": {"numpy", "torch", "transformers", "vllm"},
    }
    wrong = [
        str(one)
        for one in imports()
        if (top := one.imported.split(".")[0]) not in {*declared, *sys.stdlib_module_names, NEW_IN_PYTHON, *PACKAGES}
        and not any(within(one.importer, (home,)) and top in names for home, names in optional.items())
    ]
    assert not wrong
