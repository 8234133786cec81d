"""Runs every benchmark whose name begins with one of the prefixes, or all of them.

One JSON object a line on stdout and nothing else; progress on stderr; exit status 1 when a run did
not do what it should have measured.
"""

import argparse
import sys
from collections.abc import Callable, Iterator

from benchmarks.proxy import bench as proxy
from benchmarks.report import BrokenBenchError, Line, Report, progress
from benchmarks.tokens import bench as tokens

BENCHES: dict[str, Callable[[Callable[[str], bool]], Iterator[Line]]] = {
    "proxy": proxy.run,
    "tokens": tokens.run,
}
"""By the first part of their lines' names; each is given the filter for whole names."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only", default="", metavar="PREFIX,PREFIX", help="lines whose names begin like this"
    )
    prefixes = tuple(parser.parse_args().only.split(","))
    broken: list[str] = []
    with Report() as report:
        try:
            for run in BENCHES.values():
                for line in run(lambda name: name.startswith(prefixes)):
                    report.add(line)
        except* BrokenBenchError as group:
            broken = [str(error) for error in group.exceptions]
    for said in broken:
        progress(f"broken: {said}")
    return 1 if broken else 0


sys.exit(main())
