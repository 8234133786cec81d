"""docs/dialects.md says what becomes of each field; this holds it to the code and the recordings."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from polar_gateway.dialects import DIALECTS, anthropic, chat, google, responses, route
from polar_gateway.dialects.turn import ModelRequest, UnsupportedRequestError
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


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON_SCHEMA = {"type": "json_schema", "schema": SCHEMA}
BODIES: dict[str, dict[str, Any]] = {
    "anthropic": {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"name": "run", "input_schema": SCHEMA}],
    },
    "chat": {
        "model": "m",
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": {"name": "run"}}],
    },
    "google": {
        "model": "m",
        "contents": [{"parts": [{"text": "Hi"}]}],
        "tools": [{"functionDeclarations": [{"name": "run"}]}],
    },
    "responses": {
        "model": "m",
        "input": "Hi",
        "tools": [{"type": "function", "name": "run"}],
    },
}
TRANSLATED: dict[str, dict[str, Any]] = {
    "anthropic": {
        "messages": [{"role": "user", "content": "Ho"}],
        "system": "Be kind.",
        "tools": [{"name": "walk"}],
        "tool_choice": {"type": "any"},
        "stop_sequences": ["."],
        "thinking": {"type": "disabled"},
        "output_config": {"format": JSON_SCHEMA},
        "output_format": JSON_SCHEMA,
    },
    "chat": {
        "messages": [{"role": "user", "content": "Ho"}],
        "tools": [],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "stop": ".",
        "logit_bias": {"1": 1},
        "response_format": {"type": "json_object"},
        "chat_template_kwargs": {"a": 1},
        "enable_thinking": False,
        "reasoning_effort": "none",
    },
    "google": {
        "contents": [{"parts": [{"text": "Ho"}]}],
        "systemInstruction": "Be kind.",
        "tools": [],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY"}},
        "generationConfig": {"temperature": 1},
        "generateContentRequest": {"contents": []},
        "stopSequences": ["."],
        "responseMimeType": "application/json",
        "responseSchema": SCHEMA,
        "responseJsonSchema": SCHEMA,
        "thinkingConfig": {"thinkingBudget": 0},
    },
    "responses": {
        "instructions": "Be kind.",
        "input": "Ho",
        "tools": [],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "text": {"format": {**JSON_SCHEMA, "name": "x"}},
        "reasoning": {"effort": "none"},
    },
}
"""Values of fields that are no number and no name."""


def normalised(dialect: str, field: str = "model", value: Any = "m") -> ModelRequest:
    """The request with the field set to the value; without what its answer only says again."""
    outer, _, inner = field.rpartition(".")
    changed = {outer: {inner: value}} if outer else {field: value}
    request = MODULES[dialect].normalise({**BODIES[dialect], **changed})
    return msgspec.structs.replace(request, echo={})


FIELDS = [
    (name, field)
    for name, module in MODULES.items()
    for field in module.FIELDS
    if field != "previous_response_id"  # put into the input before it is normalised
]


@pytest.mark.parametrize(("dialect", "field"), FIELDS)
def test_a_field_is_treated_as_the_table_says(dialect: str, field: str) -> None:
    plain = normalised(dialect)
    match documented(dialect)[field]:
        case "ignored":
            assert normalised(dialect, field, "x") == plain
        case "noted":
            note = f"{field} ignored"
            expected = msgspec.structs.replace(plain, notes=[note])
            assert normalised(dialect, field, 7) == expected
        case "translated":
            value = TRANSLATED[dialect].get(field.rpartition(".")[2], 7)
            asked = normalised(dialect, field, "other" if field == "model" else value)
            assert msgspec.structs.replace(asked, notes=[]) != plain


@pytest.mark.parametrize(
    ("dialect", "field"),
    [(name, field) for name, module in MODULES.items() for field in module.REFUSED],
)
def test_a_field_is_refused_where_the_table_says_so(dialect: str, field: str) -> None:
    with pytest.raises(UnsupportedRequestError) as refused:
        normalised(dialect, field, "x")
    assert refused.value.field == field


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
