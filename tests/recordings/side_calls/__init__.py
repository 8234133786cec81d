"""Recorded side calls, with turns of the same runs: `<harness>/<scenario>.json.xz`, whose exchanges
are in the form of `tests.recordings`, without the answers. The label is the kind of call, given by
who wrote the run's script and not by the rules that are tested.

`unlucky` scenarios are conversations whose instruction and whose files say what side calls say.
"""

import json
import lzma
from pathlib import Path

from tests.recordings import Exchange

FOLDER = Path(__file__).parent


def load() -> list[Exchange]:
    return [
        Exchange(
            path.parent.name,
            f"side_calls/{path.name.removesuffix('.json.xz')}",
            number,
            entry["label"],
            entry["request"],
            entry["response"],
            bool(entry["client_disconnected"]),
        )
        for path in sorted(FOLDER.glob("*/*.json.xz"))
        for number, entry in enumerate(json.loads(lzma.decompress(path.read_bytes())))
    ]
