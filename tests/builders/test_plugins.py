"""Plug-ins are real installed packages here: a module and its entry points in a folder on the path."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import builders
import evaluators
from builders.base import StrategySpec
from builders.records import CompletionSession

Install = Callable[[str, str], None]

GOOD = """
import msgspec
from builders.eligible import Options
from builders.records import Trajectory

class Nothing:
    name = "nothing"
    class Config(Options, kw_only=True, frozen=True, forbid_unknown_fields=True):
        pass
    def __init__(self, config):
        self.options = config
    def build(self, session):
        return Trajectory()

class Nameless(Nothing):
    name = "another"

class Lenient(Nothing):
    name = "lenient"
    class Config(msgspec.Struct):
        pass

class Unconfigured(Nothing):
    name = "unconfigured"
    Config = None

class Idle:
    name = "idle"
    Config = Nothing.Config

class PerRequest(Nothing):
    name = "per_request"
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a package: its module `polar_test_plugin` and the text of its entry points."""
    monkeypatch.syspath_prepend(tmp_path)
    known = dict(builders.BUILDERS), dict(evaluators.EVALUATORS)

    def do(module: str, entry_points: str) -> None:
        info = tmp_path / "polar_test_plugin-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: polar-test-plugin\nVersion: 1.0\n"
        )
        (info / "entry_points.txt").write_text(entry_points)
        (tmp_path / "polar_test_plugin.py").write_text(module)

    yield do
    sys.modules.pop("polar_test_plugin", None)
    registries: tuple[dict[str, Any], dict[str, Any]] = (builders.BUILDERS, evaluators.EVALUATORS)
    for registry, before in zip(registries, known, strict=True):
        registry.clear()
        registry.update(before)


def test_an_installed_builder_can_be_named_after_loading(install: Install) -> None:
    install(GOOD, "[polar.builders]\nnothing = polar_test_plugin:Nothing\n")
    assert builders.load_builders() == (builders.BUILDERS, [])
    assert builders.load_builders()[1] == []
    builder = builders.make(StrategySpec(strategy="nothing"))
    assert builder.build(CompletionSession(session_id="s")).traces == []


def test_a_broken_plugin_is_reported_and_the_others_load(install: Install) -> None:
    install(
        GOOD,
        "[polar.builders]\n"
        "absent = polar_test_plugin:Absent\n"
        "nothing = polar_test_plugin:Nothing\n"
        "nameless = polar_test_plugin:Nameless\n"
        "lenient = polar_test_plugin:Lenient\n"
        "unconfigured = polar_test_plugin:Unconfigured\n"
        "idle = polar_test_plugin:Idle\n"
        "per_request = polar_test_plugin:PerRequest\n",
    )
    loaded, problems = builders.load_builders()
    assert set(loaded) == {"per_request", "prefix_merging", "lineage", "nothing"}
    assert loaded["per_request"].__module__ == "builders.per_request"
    told = {problem.split()[2]: problem for problem in problems}
    assert "does not import: AttributeError" in told["absent"]
    assert told["nameless"].endswith("calls itself 'another'")
    assert told["lenient"].endswith("has a Config that lets unknown fields pass")
    assert told["unconfigured"].endswith("has no Config that is a msgspec.Struct")
    assert told["idle"].endswith("has no method build")
    assert told["per_request"].endswith("has the name of another strategy, which stays")
    assert len(problems) == 6


def test_evaluators_have_a_group_of_their_own(install: Install) -> None:
    install(
        "raise RuntimeError('out of order')", "[polar.evaluators]\nbad = polar_test_plugin:Bad\n"
    )
    loaded, problems = evaluators.load_evaluators()
    assert set(loaded) == {"session_completion", "test_on_output"}
    (problem,) = problems
    assert problem.startswith("polar.evaluators plug-in bad (polar_test_plugin:Bad)")
    assert problem.endswith("does not import: RuntimeError: out of order")
    assert builders.load_builders()[1] == []
