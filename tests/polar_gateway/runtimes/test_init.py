from importlib.metadata import EntryPoint
from typing import Any

import pytest

from polar_gateway import runtimes
from polar_gateway.runtimes.local import LocalRuntime


class Fenced(LocalRuntime):
    name = "fenced"


class Unfinished(runtimes.Runtime):
    name = "unfinished"
    isolated = True


class Nameless(LocalRuntime):
    pass


def test_ours_are_offered_by_name() -> None:
    for name, runtime in runtimes.RUNTIMES.items():
        assert runtime.name == name


def test_plug_ins_are_found_and_broken_ones_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    plugged = {
        "fenced": "Fenced",
        "unfinished": "Unfinished",
        "nameless": "Nameless",
        "docker": "Fenced",
        "function": "test_ours_are_offered_by_name",
        "missing": "NoSuchThing",
    }
    found = [
        EntryPoint(name, f"{__name__}:{value}", runtimes.GROUP) for name, value in plugged.items()
    ]
    found.append(EntryPoint("absent", "no_such_module_anywhere:X", runtimes.GROUP))

    def entry_points(**_: Any) -> list[EntryPoint]:
        return found

    monkeypatch.setattr("polar_gateway.runtimes.entry_points", entry_points)
    loaded, problems = runtimes.load_runtimes()
    assert loaded == {**runtimes.RUNTIMES, "fenced": Fenced}
    assert [problem.split()[2] for problem in problems] == [
        "unfinished",
        "nameless",
        "docker",
        "function",
        "missing",
        "absent",
    ]
    assert "lacks cancel, download" in problems[0]
    assert "calls itself 'local'" in problems[1]
