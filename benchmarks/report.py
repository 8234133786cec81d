"""A measured line, and where it goes."""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

import msgspec

RESULTS = Path(__file__).with_name("results")


class Line(msgspec.Struct, kw_only=True):
    """One figure. `ratio` is to what the same work costs at least, where that was measured."""

    bench: str
    value: float
    unit: str
    ratio: float | None = None
    bound: float | None = None
    """What the value, or the ratio where there is one, must not be above."""


class BrokenBenchError(Exception):
    """A figure that would mean nothing, because the work was not done as it should have been."""


class Report:
    """Writes lines to stdout and to a dated file as they come."""

    def __init__(self) -> None:
        RESULTS.mkdir(exist_ok=True)
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H%M%SZ")
        self._copy: TextIO = (RESULTS / f"{stamp}.jsonl").open("w")

    def __enter__(self) -> "Report":
        return self

    def __exit__(self, *_: object) -> None:
        self._copy.close()

    def add(self, line: Line) -> None:
        text = msgspec.json.encode(line).decode()
        print(text, flush=True)
        print(text, file=self._copy, flush=True)


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
