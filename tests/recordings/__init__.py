"""Recorded traffic of real harnesses: `<harness>/<scenario>.json.xz`, a list of exchanges in order
of arrival. Long texts were replaced by invented words of the same length; structure, ids, sizes,
equalities and prefixes are as they were.
"""

import json
import lzma
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from polar_gateway.dialects import Route, route

FOLDER = Path(__file__).parent


class Exchange(NamedTuple):
    """One request of a harness and what it was answered."""

    harness: str
    scenario: str
    number: int
    label: str
    """The chain it belongs to and its place there, as the recorder saw it: main0, sub1, ..."""
    request: dict[str, Any]
    """method, path, query, headers (lower-case), body (parsed)."""
    response: dict[str, Any]
    """status, headers, and body or sse."""
    cut: bool
    """The connection broke before the answer's end."""

    @property
    def id(self) -> str:
        return f"{self.harness}/{self.scenario}/{self.number}"

    @property
    def chain(self) -> str:
        """Tells apart the conversations of one recording."""
        headers = self.request["headers"]
        named = (headers.get(name) for name in ("x-claude-code-agent-id", "thread-id"))
        return " ".join([self.label.rstrip("0123456789"), *filter(None, named)])


def load(harness: str, scenario: str) -> list[Exchange]:
    raw = json.loads(lzma.decompress((FOLDER / harness / f"{scenario}.json.xz").read_bytes()))
    return [
        Exchange(
            harness,
            scenario,
            number,
            entry["label"],
            entry["request"],
            entry["response"],
            bool(entry["client_disconnected"]),
        )
        for number, entry in enumerate(raw)
    ]


def recordings() -> list[tuple[str, str]]:
    """Every (harness, scenario) there is."""
    return sorted(
        (path.parent.name, path.name.removesuffix(".json.xz")) for path in FOLDER.glob("*/*.xz")
    )


def routed(exchange: Exchange) -> Route:
    """Where the request goes."""
    request = exchange.request
    query = dict(parse_qsl(request["query"] or ""))
    found = route(request["method"], request["path"], query, request["headers"])
    assert found is not None
    return found
