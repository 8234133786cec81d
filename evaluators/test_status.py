"""Test statuses read from the output of test runners. Pure: text in, name -> status out.

The last word on a test is its worst: a test that passed and then broke in its teardown is an ERROR.

The output is hostile: whoever wrote it may wish to stop the reader. Lines are taken apart at words,
and each expression is anchored or ends within a few characters, so that the work is proportional
to the text.
"""

import re
from typing import Literal, NamedTuple

Status = Literal["PASSED", "FAILED", "ERROR", "SKIPPED"]
Parser = Literal["auto", "pytest", "unittest", "lines"]

_SEVERITY: dict[Status, int] = {"PASSED": 0, "SKIPPED": 1, "FAILED": 2, "ERROR": 3}

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

_LINES: dict[str, Status] = {status: status for status in _SEVERITY}

MAX_LINE = 4096
"""Characters; longer lines are not looked at."""

MAX_LINES = 200_000
"""More than the 16 MiB that a runtime keeps of a run hold of ordinary lines; of more, the last."""

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

_PYTEST_STATUS = re.compile(rf" ({'|'.join(_PYTEST)})(?= \(|$)")
"""Behind a test's name, with or without a reason."""

_PYTEST_WORKER = re.compile(r"\[gw\d+\] \[\s*\d+%\] ")
_PYTEST_CAPTURED = frozenset(
    {"FAILURES", "ERRORS", "PASSES", "XFAILURES", "XPASSES", "warnings summary"}
)
"""Sections that hold what the tests themselves printed."""

_UNITTEST_TEST = re.compile(r"\w+")
_UNITTEST_PATH = re.compile(r"[\w.<>]+")
_UNITTEST_VERDICT = re.compile(rf"({'|'.join(_UNITTEST)})(?: ['\"].*['\"])?")


class Parsed(NamedTuple):
    """What was read of an output."""

    statuses: dict[str, Status]
    """By test name."""
    skipped_lines: int
    """Lines that were not looked at: too long, or before the last MAX_LINES."""


def parse(output: str, parser: Parser = "auto") -> Parsed:
    """Read the statuses; `auto` takes the first of pytest, unittest, lines that finds any."""
    lines, skipped_lines = _lines_of(output)
    for name in _PARSERS if parser == "auto" else (parser,):
        if statuses := _PARSERS[name](lines):
            return Parsed(statuses, skipped_lines)
    return Parsed({}, skipped_lines)


def canonical_name(name: str) -> str:
    """unittest's "test_x (mod.Class.test_x)", or "(mod.Class)" before 3.11, as "mod.Class.test_x"."""
    return _unittest_name(name) or name


def _lines_of(output: str) -> tuple[list[str], int]:
    """The lines to look at, without colours and trailing space, and the number of the others."""
    lines = output.replace("\r\n", "\n").replace("\r", "\n").rsplit("\n", MAX_LINES)
    skipped = 0
    if len(lines) > MAX_LINES:
        skipped = lines.pop(0).count("\n") + 1
    kept = []
    for line in lines:
        if len(line) > MAX_LINE:
            skipped += 1
        else:
            kept.append(_ESCAPE.sub("", line).rstrip() if "\x1b" in line else line.rstrip())
    return kept, skipped


def _pytest(lines: list[str]) -> dict[str, Status]:
    statuses: dict[str, Status] = {}
    skipped_places: dict[str, Status] = {}
    reading = True
    for line in lines:
        if line.startswith("="):
            title = line.strip("=")
            if title[:1] == title[-1:] == " ":
                reading = title.strip(" ") not in _PYTEST_CAPTURED
        if not reading:
            continue
        if found := _pytest_line(line):
            _note(statuses, *found)
        elif place := _skipped_place(line):
            skipped_places[place] = "SKIPPED"
    # Where -v has named the skipped tests, their places would count them twice.
    return statuses if "SKIPPED" in statuses.values() else {**statuses, **skipped_places}


def _pytest_line(line: str) -> tuple[str, Status] | None:
    """The test and the status that one line names.

    -rA: "PASSED tests/test_a.py::test_x[a - b]", "FAILED tests/test_a.py::test_x[a b] - message";
    -v under xdist: "[gw0] [ 50%] PASSED tests/test_a.py::test_x".
    """
    worker = _PYTEST_WORKER.match(line)
    word, _, rest = line[worker.end() if worker else 0 :].partition(" ")
    if word not in _PYTEST:
        return None if worker else _pytest_verbose(line)
    is_all_name = worker or (word == "PASSED" and _is_node(rest))
    name = rest if is_all_name else _before_message(rest)
    return (name, _PYTEST[word]) if _is_node(name) else None


def _pytest_verbose(line: str) -> tuple[str, Status] | None:
    """-v: "tests/test_a.py::test_x[a b] SKIPPED (why)   [ 50%]"."""
    if line.endswith("%]"):
        before, _, percent = line.rpartition("[")
        if before[-1:].isspace() and percent[:-2].strip().isdecimal():
            line = before.rstrip()
    head = line.partition("[")[0].partition(" ")[0]
    if not _is_node(head):
        return None
    for match in _PYTEST_STATUS.finditer(line):
        end = match.start()
        is_name = end == len(head) or (line[len(head)] == "[" and line[end - 1] == "]")
        if is_name and (match.end() == len(line) or line.endswith(")")):
            return line[:end], _PYTEST[match[1]]
    return None


def _is_node(text: str) -> bool:
    """Whether `text` is a file or test of pytest's: one word, then perhaps parameters in brackets."""
    head, bracket, _ = text.partition("[")
    return (
        ("::" in head or ".py" in head)
        and head.split() == [head]
        and (not bracket or text.endswith("]"))
    )


def _before_message(text: str) -> str:
    """What stands before " - message", which parameters in brackets may hold too."""
    head, bracket, _ = text.partition("[")
    if not bracket or " " in head:
        return text.partition(" - ")[0]
    end = text.find("] - ", len(head))
    return text if end < 0 else text[: end + 1]


def _skipped_place(line: str) -> str | None:
    """-rA names the place of what was skipped, not the test: "SKIPPED [1] tests/test_a.py:10: why"."""
    match line.split(" ", 3):
        case ["SKIPPED", count, place, _] if count[:1] + count[-1:] == "[]":
            path, _, number = place.removesuffix(":").rpartition(":")
            if path and number.isdecimal() and count[1:-1].isdecimal() and place.endswith(":"):
                return f"{path}:{number}"
    return None


def _unittest(lines: list[str]) -> dict[str, Status]:
    """`name ... verdict`; a docstring's or the test's own output may stand in between."""
    statuses: dict[str, Status] = {}
    running: str | None = None
    for line in lines:
        if broken := _unittest_heading(line):
            _note(statuses, *broken)
            continue
        running = _unittest_name(line.partition(" ...")[0]) or running
        if running is not None:
            verdict = _UNITTEST_VERDICT.fullmatch(line.rpartition(" ... ")[2])
            if verdict is not None:
                _note(statuses, running, _UNITTEST[verdict[1]])
                running = None
    return statuses


def _unittest_heading(line: str) -> tuple[str, Status] | None:
    """ "FAIL: test_x (mod.Class.test_x) (part=0)" of a part, or without one."""
    word, _, rest = line.partition(": ")
    if word not in ("FAIL", "ERROR"):
        return None
    end = rest.find(")") + 1
    name = _unittest_name(rest[:end])
    return (name, _UNITTEST[word]) if name and rest[end : end + 1] in ("", " ") else None


def _unittest_name(text: str) -> str | None:
    """The dotted name of "test_x (mod.Class.test_x)" or "test_x (mod.Class)"; None for other text."""
    test, _, path = text.partition(" (")
    path, closing, rest = path.partition(")")
    parent, _, last = path.rpartition(".")
    if not closing or rest or not parent or not last:
        return None
    if not _UNITTEST_TEST.fullmatch(test) or not _UNITTEST_PATH.fullmatch(path):
        return None
    return path if last == test else f"{path}.{test}"


def _plain(lines: list[str]) -> dict[str, Status]:
    statuses: dict[str, Status] = {}
    for line in map(str.strip, lines):
        word, _, name = line.partition(" ")
        status = _LINES.get(word.removesuffix(":"))
        if status is None or not name:
            name, _, word = line.rpartition(" ")
            name, status = name.rstrip(" ").removesuffix(":"), _LINES.get(word)
        if status is not None and name:
            _note(statuses, name.lstrip(), status)
    return statuses


def _note(statuses: dict[str, Status], name: str, status: Status) -> None:
    if _SEVERITY[status] >= _SEVERITY[statuses.get(name, status)]:
        statuses[name] = status


_PARSERS = {"pytest": _pytest, "unittest": _unittest, "lines": _plain}
