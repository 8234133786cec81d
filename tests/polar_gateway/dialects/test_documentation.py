"""docs/dialects.md says what becomes of each field; this holds it to the code and the recordings."""

import re
from pathlib import Path

import pytest

from polar_gateway.dialects import DIALECTS, anthropic, chat, google, responses, route
from tests.recordings import load, recordings

DOCUMENT = Path(__file__).parents[3] / "docs" / "dialects.md"
MODULES = {module.name: module for module in (anthropic, chat, google, responses)}


def documented(dialect: str) -> dict[str, str]:
    """Field to treatment, as the document's table for this dialect has it."""
    section = re.search(rf"^### {dialect}\n(.*?)(?=^##)", DOCUMENT.read_text(), re.M | re.S)
    assert section is not None
    return dict(re.findall(r"^\| `([\w.]+)` \| (\w+) \|", section[1], re.M))


def test_every_dialect_has_a_table() -> None:
    assert {dialect.name for dialect in DIALECTS} == set(MODULES)
    assert all(documented(name) for name in MODULES)


@pytest.mark.parametrize("dialect", sorted(MODULES))
def test_the_table_is_what_the_code_does(dialect: str) -> None:
    module = MODULES[dialect]
    treated = {**module.FIELDS, **dict.fromkeys(module.REFUSED, "refused")}
    assert documented(dialect) == treated


def test_every_field_that_a_harness_sends_is_in_its_table() -> None:
    sent: dict[str, set[str]] = {name: set() for name in MODULES}
    for harness, scenario in recordings():
        for exchange in load(harness, scenario):
            found = route("POST", exchange.request["path"], {}, exchange.request["headers"])
            if found is not None:
                body = exchange.request["body"]
                sent[found.dialect.name] |= set(body) | {
                    f"generationConfig.{field}" for field in body.get("generationConfig", {})
                }
    for name, fields in sent.items():
        assert len(fields) >= 8
        assert fields <= set(documented(name))
