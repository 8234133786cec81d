import subprocess
import sys
import time
from pathlib import Path

import pytest

from evaluators import test_status
from evaluators.test_status import MAX_LINE, MAX_LINES, Parser, Status, canonical_name

PYTEST_CASES = """
import pytest

def test_ok(): pass
def test_fail(): assert [1] == [2], "a - b"

@pytest.fixture
def bad(): raise ValueError("x - [y]")

@pytest.fixture
def late():
    yield
    raise ValueError

def test_err(bad): pass
def test_late(late): pass

@pytest.mark.skip(reason="why (not)")
def test_skip(): pass

@pytest.mark.xfail
def test_expected(): assert 0

@pytest.mark.xfail
def test_unexpected(): pass

@pytest.mark.parametrize("s", ["a b", "c - d", "e[f]", "x] - y"])
def test_p(s): assert s != "c - d"

class TestC:
    def test_m(self): print("FAILED test_it.py::test_ok")
"""
PYTEST_STATUSES = {
    "test_it.py::test_ok": "PASSED",
    "test_it.py::test_fail": "FAILED",
    "test_it.py::test_err": "ERROR",
    "test_it.py::test_late": "ERROR",
    "test_it.py::test_skip": "SKIPPED",
    "test_it.py::test_expected": "PASSED",
    "test_it.py::test_unexpected": "PASSED",
    "test_it.py::test_p[a b]": "PASSED",
    "test_it.py::test_p[c - d]": "FAILED",
    "test_it.py::test_p[e[f]]": "PASSED",
    "test_it.py::test_p[x] - y]": "PASSED",
    "test_it.py::TestC::test_m": "PASSED",
}

UNITTEST_CASES = '''
import unittest

class Case(unittest.TestCase):
    def test_ok(self): pass
    def test_documented(self):
        """A line about it."""
    def test_talks(self): print("loading (data)\\nhello")
    def test_fail(self): self.fail("x")
    def test_err(self): raise ValueError
    @unittest.skip("why not")
    def test_skip(self): pass
    @unittest.expectedFailure
    def test_expected(self): self.fail()
    @unittest.expectedFailure
    def test_unexpected(self): pass
    def test_parts(self):
        for part in range(2):
            with self.subTest(part=part):
                self.assertEqual(part, 0)

class Broken(unittest.TestCase):
    @classmethod
    def setUpClass(cls): raise RuntimeError("setup")
    def test_never(self): pass
'''
UNITTEST_STATUSES = {
    "cases.Case.test_ok": "PASSED",
    "cases.Case.test_documented": "PASSED",
    "cases.Case.test_talks": "PASSED",
    "cases.Case.test_fail": "FAILED",
    "cases.Case.test_err": "ERROR",
    "cases.Case.test_skip": "SKIPPED",
    "cases.Case.test_expected": "PASSED",
    "cases.Case.test_unexpected": "FAILED",
    "cases.Case.test_parts": "FAILED",
    "cases.Broken.setUpClass": "ERROR",
}


def parse(output: str, parser: Parser = "auto") -> dict[str, Status]:
    return test_status.parse(output, parser).statuses


def run(folder: Path, *arguments: str) -> str:
    """What a test runner says, both streams in order."""
    done = subprocess.run(
        [sys.executable, "-u", "-m", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env={"PYTHONDONTWRITEBYTECODE": "1"},
    )
    return done.stdout


@pytest.mark.parametrize(
    "options",
    [["-v"], ["-v", "-rA", "--color=yes"], ["-v", "-n", "1", "--tb=no"]],
    ids=["verbose", "with a coloured summary", "distributed"],
)
def test_what_pytest_itself_prints_is_understood(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "test_it.py").write_text(PYTEST_CASES)
    output = run(tmp_path, "pytest", "-p", "no:cacheprovider", *options)
    assert parse(output) == PYTEST_STATUSES


def test_the_summary_of_pytest_alone_is_enough(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(PYTEST_CASES)
    statuses = parse(run(tmp_path, "pytest", "-p", "no:cacheprovider", "-q", "-rA"))
    assert statuses.pop("test_it.py:18") == "SKIPPED"
    assert statuses == {
        name: status for name, status in PYTEST_STATUSES.items() if status != "SKIPPED"
    }


def test_what_unittest_itself_prints_is_understood(tmp_path: Path) -> None:
    (tmp_path / "cases.py").write_text(UNITTEST_CASES)
    assert parse(run(tmp_path, "unittest", "-v", "cases")) == UNITTEST_STATUSES


def test_unittest_without_its_list_still_names_what_broke(tmp_path: Path) -> None:
    (tmp_path / "cases.py").write_text(UNITTEST_CASES)
    assert parse(run(tmp_path, "unittest", "cases")) == {
        name: status
        for name, status in UNITTEST_STATUSES.items()
        if status in ("FAILED", "ERROR") and not name.endswith("test_unexpected")
    }


@pytest.mark.parametrize(
    ("line", "name", "status"),
    [
        ("tests/a.py::test_x PASSED", "tests/a.py::test_x", "PASSED"),
        ("tests/a.py::test_x FAILED            [100%]", "tests/a.py::test_x", "FAILED"),
        ("ERROR tests/a.py - ImportError: no", "tests/a.py", "ERROR"),
        ("ERROR tests/a.py", "tests/a.py", "ERROR"),
        ("test_add (mod.Class.test_add) ... ok", "mod.Class.test_add", "PASSED"),
        ("test_add (mod.Class) ... FAIL", "mod.Class.test_add", "FAILED"),
        ('test_add (mod.Class) ... skipped "it\'s late"', "mod.Class.test_add", "SKIPPED"),
        ("PASSED adds numbers", "adds numbers", "PASSED"),
        ("FAILED: adds numbers", "adds numbers", "FAILED"),
        ("adds numbers: SKIPPED", "adds numbers", "SKIPPED"),
        ("  adds numbers ERROR  ", "adds numbers", "ERROR"),
    ],
)
def test_one_line_is_one_status(line: str, name: str, status: str) -> None:
    assert parse(line) == {name: status}


@pytest.mark.parametrize("parser", ["auto", "pytest", "unittest", "lines"])
def test_text_without_statuses_has_none(parser: Parser) -> None:
    assert parse("", parser) == {}
    assert parse("2 passed in 0.1s\nOK\nERROR\nbuild (all) is ok", parser) == {}


def test_a_named_parser_is_the_only_one_asked() -> None:
    both = "a.py::test_x PASSED\ntest_add (mod.Class.test_add) ... ok\nPASSED plain"
    assert set(parse(both)) == {"a.py::test_x"}
    assert set(parse(both, "unittest")) == {"mod.Class.test_add"}
    assert "plain" in parse(both, "lines")


def test_the_worst_of_several_words_on_a_test_counts() -> None:
    assert parse("PASSED a.py::x\nERROR a.py::x - late\nPASSED a.py::x") == {"a.py::x": "ERROR"}
    assert parse("FAILED a.py::x\nSKIPPED a.py::x") == {"a.py::x": "FAILED"}


def test_endless_lines_are_passed_over_and_counted() -> None:
    read = test_status.parse("PASSED " + "x" * MAX_LINE + "\nPASSED y")
    assert read == ({"y": "PASSED"}, 1)


def test_of_endless_many_lines_the_last_are_read_and_the_others_counted() -> None:
    read = test_status.parse("PASSED x\n" * MAX_LINES + "PASSED y\nPASSED z\n")
    assert read == ({"x": "PASSED", "y": "PASSED", "z": "PASSED"}, 3)
    assert test_status.parse("PASSED x" + "\n" * MAX_LINES) == ({}, 1)


def test_every_kind_of_line_end_is_one() -> None:
    assert parse("PASSED x\r\nPASSED y\r50%\rPASSED z") == dict.fromkeys("xyz", "PASSED")


HOSTILE = {
    "colons": "FAILED " + "::" * 2040 + " x",
    "spaces": "x" + " " * 4090 + "y",
    "spaces before a percentage": "a.py" + " " * 4080 + "[1%]",
    "dots": "a (" + "a." * 2040 + "!",
    "names within names": "a (" * 1300 + "a",
    "brackets": "::" * 1000 + "[" + "]" * 2000 + "x",
    "open brackets": ".py[" * 1000 + "x",
    "messages": "FAILED a.py[" + "] - " * 1000,
    "statuses": "a.py[" + "] PASSED" * 500 + " (x",
    "workers": "[gw" + "1" * 4000,
    "quotes": 't (a.b)\nok "' + '"' * 4000 + "x",
    "escapes": "\x1b[m" * 1300,
    "cut escapes": "\x1b[" + "0" * 4000,
    "headings": "= " * 2000,
    "line ends": "\r" * 4000,
    "nothing": "",
    "pytest's own": "tests/a.py::test_x[a b] PASSED [ 50%]",
    "unittest's own": "test_x (m.C.test_x) ... ok",
    "one endless line": "PASSED " * (1 << 20),
}


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("parser", ["pytest", "unittest", "lines"])
def test_hostile_output_is_read_in_the_time_of_its_length(line: str, parser: Parser) -> None:
    output = (line + "\n") * ((8 << 20) // (len(line) + 1))
    began = time.process_time()
    parse(output, parser)
    assert time.process_time() - began < 5  # half a second here, for most a tenth


def test_unittest_names_are_dotted_paths_and_others_stay() -> None:
    assert canonical_name("test_x (m.C.test_x)") == canonical_name("test_x (m.C)") == "m.C.test_x"
    assert canonical_name("a.py::test_x[1]") == "a.py::test_x[1]"
