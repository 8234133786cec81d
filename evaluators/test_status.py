"""Test statuses read from the output of test runners. Pure: text in, name -> status out.

The last word on a test is its worst: a test that passed and then broke in its teardown is an ERROR.
"""

import re
from typing import Literal

Status = Literal["PASSED", "FAILED", "ERROR", "SKIPPED"]
Parser = Literal["auto", "pytest", "unittest", "lines"]

_WORST_LAST: tuple[Status, ...] = ("PASSED", "SKIPPED", "FAILED", "ERROR")

_PYTEST: dict[str, Status] = {
    "PASSED": "PASSED",
    "XPASS": "PASSED",
    "XFAIL": "PASSED",
    "FAILED": "FAILED",
    "ERROR": "ERROR",
    "SKIPPED": "SKIPPED",
}
"""A strict XPASS is reported as FAILED by pytest itself."""

_UNITTEST: dict[str, Status] = {
    "ok": "PASSED",
    "expected failure": "PASSED",
    "FAIL": "FAILED",
    "unexpected success": "FAILED",
    "ERROR": "ERROR",
    "skipped": "SKIPPED",
}

MAX_LINE = 4096
"""Longer lines hold no status; matching them would only cost time."""

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_WORD = "|".join(_PYTEST)
_NODE = r"(?P<name>[^\s\[]*(?:::|\.py)[^\s\[]*(?:\[.*?\])?)"
_PYTEST_LINES = (
    # -rA: "PASSED tests/test_a.py::test_x[a - b]", which never has a message
    re.compile(rf"(?P<word>PASSED) {_NODE}"),
    # -rA and -rfE: "FAILED tests/test_a.py::test_x[a b] - AssertionError: ..."
    re.compile(rf"(?P<word>{_WORD}) {_NODE}(?: - .*)?"),
    # -v: "tests/test_a.py::test_x PASSED   [ 50%]", "... SKIPPED (why) [ 50%]"
    re.compile(rf"{_NODE} (?P<word>{_WORD})(?: \(.*\))?(?:\s+\[\s*\d+%\])?"),
    # -v under xdist: "[gw0] [ 50%] PASSED tests/test_a.py::test_x"
    re.compile(rf"\[gw\d+\] \[\s*\d+%\] (?P<word>{_WORD}) {_NODE}"),
)
_PYTEST_SKIPPED = re.compile(r"SKIPPED \[\d+\] (?P<place>\S+?:\d+): .*")
"""-rA names the place of what was skipped, not the test: "SKIPPED [1] tests/test_a.py:10: why"."""

_PYTEST_HEADING = re.compile(r"=+ (?P<title>.+?) =+")
_PYTEST_CAPTURED = frozenset(
    {"FAILURES", "ERRORS", "PASSES", "XFAILURES", "XPASSES", "warnings summary"}
)
"""Sections that hold what the tests themselves printed."""

_UNITTEST_NAME = re.compile(r"(?P<test>\w+) \((?P<path>[\w.<>]+\.[\w<>]+)\)")
_UNITTEST_START = re.compile(rf"(?P<name>{_UNITTEST_NAME.pattern})(?: \.\.\..*)?")
_UNITTEST_VERDICT = re.compile(rf"(?P<word>{'|'.join(_UNITTEST)})(?: ['\"].*['\"])?")
_UNITTEST_HEADING = re.compile(rf"(?P<word>FAIL|ERROR): (?P<name>{_UNITTEST_NAME.pattern})(?: .*)?")
_LINES = (
    re.compile(r"(?P<word>PASSED|FAILED|ERROR|SKIPPED):? +(?P<name>\S.*)"),
    re.compile(r"(?P<name>\S.*?):? +(?P<word>PASSED|FAILED|ERROR|SKIPPED)"),
)


def parse(output: str, parser: Parser = "auto") -> dict[str, Status]:
    """Status by test name; `auto` takes the first of pytest, unittest, lines that finds any."""
    lines = [
        line.rstrip() for line in _ESCAPE.sub("", output).splitlines() if len(line) <= MAX_LINE
    ]
    chosen = list(_PARSERS) if parser == "auto" else [parser]
    for name in chosen:
        if statuses := _PARSERS[name](lines):
            return statuses
    return {}


def canonical_name(name: str) -> str:
    """unittest's "test_x (mod.Class.test_x)", or "(mod.Class)" before 3.11, as "mod.Class.test_x"."""
    match = _UNITTEST_NAME.fullmatch(name)
    if match is None:
        return name
    test, path = match["test"], match["path"]
    return path if path.rpartition(".")[2] == test else f"{path}.{test}"


def _pytest(lines: list[str]) -> dict[str, Status]:
    statuses: dict[str, Status] = {}
    skipped_places: dict[str, Status] = {}
    reading = True
    for line in lines:
        if heading := _PYTEST_HEADING.fullmatch(line):
            reading = heading["title"] not in _PYTEST_CAPTURED
        if not reading:
            continue
        if skipped := _PYTEST_SKIPPED.fullmatch(line):
            skipped_places[skipped["place"]] = "SKIPPED"
        for pattern in _PYTEST_LINES:
            if match := pattern.fullmatch(line):
                _note(statuses, match["name"], _PYTEST[match["word"]])
                break
    # Where -v has named the skipped tests, their places would count them twice.
    return statuses if "SKIPPED" in statuses.values() else {**statuses, **skipped_places}


def _unittest(lines: list[str]) -> dict[str, Status]:
    """`name ... verdict`; a docstring's or the test's own output may stand in between."""
    statuses: dict[str, Status] = {}
    running: str | None = None
    for line in lines:
        if match := _UNITTEST_HEADING.fullmatch(line):
            _note(statuses, canonical_name(match["name"]), _UNITTEST[match["word"]])
            continue
        if match := _UNITTEST_START.fullmatch(line):
            running = canonical_name(match["name"])
        verdict = _UNITTEST_VERDICT.fullmatch(line.rpartition(" ... ")[2])
        if running is not None and verdict is not None:
            _note(statuses, running, _UNITTEST[verdict["word"]])
            running = None
    return statuses


def _plain(lines: list[str]) -> dict[str, Status]:
    statuses: dict[str, Status] = {}
    for line in lines:
        for pattern in _LINES:
            if match := pattern.fullmatch(line.strip()):
                _note(statuses, match["name"], _PYTEST[match["word"]])
                break
    return statuses


def _note(statuses: dict[str, Status], name: str, status: Status) -> None:
    known = statuses.get(name, status)
    statuses[name] = max(known, status, key=_WORST_LAST.index)


_PARSERS = {"pytest": _pytest, "unittest": _unittest, "lines": _plain}
