import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness_adapters import ADAPTERS, events
from harness_adapters.base import HarnessEnd


def test_the_last_event_of_a_kind_is_found_among_other_output() -> None:
    tail = b'cut"}\n{"type":"a","n":1}\n[1]\nnoise\n{"type":"a","n":2}\n{"type":"b"}\n{"ty'
    assert events.last_event(tail, ("a",)) == {"type": "a", "n": 2}
    assert events.last_event(tail, ("c",)) is None


def test_an_event_quoted_inside_another_does_not_count() -> None:
    tail = b'{"type":"item","text":"\\n{\\"type\\":\\"done\\"}\\n"}\n'
    assert events.last_event(tail, ("done",)) is None


def test_bytes_that_are_no_text_are_passed_over() -> None:
    assert events.last_event(b'\xff\xfe{"type":"a"}\n{"type":"a","ok":1}', ("a",)) == {
        "type": "a",
        "ok": 1,
    }
    assert events.last_line(b"fine\n\xff\n\n") == "\ufffd"


def test_a_harness_is_not_quoted_at_length() -> None:
    reason = events.quote("it failed", "word\n" * 1000)
    assert reason.startswith("it failed: word word ")
    assert len(events.quote("it failed" * 1000, "word\n" * 1000)) == len(reason) == 500


def test_what_has_no_place_in_a_sentence_is_replaced() -> None:
    assert events.quote("it failed", "half \ud83d, nul \0") == "it failed: half \ufffd, nul \ufffd"
    assert events.quote("it failed", " \n") == "it failed"


ENDLESS = b"[" * 5000


@pytest.mark.parametrize(
    ("harness", "line", "reason"),
    [
        ("codex", ENDLESS, "codex ended with status 1: why"),
        ("claude_code", ENDLESS, "claude_code ended with status 1: why"),
        ("codex", b'{"type":["turn.failed"]}', "codex ended with status 1: why"),
        ("codex", b'{"type":"turn.failed"}', "codex reported that its turn failed"),
        (
            "codex",
            b'{"type":"turn.failed","error":{"message":"{\\"error\\":[]}"}}',
            'codex reported that its turn failed: {"error":[]}',
        ),
        ("claude_code", b'{"type":["result"]}', "claude_code ended with status 1: why"),
        ("claude_code", b'{"type":"result","subtype":{}}', "claude_code ended with status 1: why"),
        (
            "claude_code",
            b'{"type":"result","is_error":true,"errors":5}',
            "claude_code reported an error",
        ),
        (
            "claude_code",
            b'{"type":"result","is_error":true,"result":{},"errors":[1,"two",[3]]}',
            "claude_code reported an error: two",
        ),
        (
            "claude_code",
            b'{"type":"result","is_error":true,"result":"cut \\ud83d"}',
            "claude_code reported an error: cut \ufffd",
        ),
    ],
)
def test_events_of_a_wrong_shape_are_judged_by_what_is_left_of_them(
    harness: str, line: bytes, reason: str
) -> None:
    end = ADAPTERS[harness].ended(1, line + b"\n", b"why\n")
    assert (end.outcome, end.reason) == ("failed", reason)


def test_an_explanation_nested_without_end_is_quoted_as_text() -> None:
    line = b'{"type":"turn.failed","error":{"message":"' + ENDLESS + b'"}}\n'
    end = ADAPTERS["codex"].ended(1, line, b"")
    assert end.reason.startswith("codex reported that its turn failed: [[[")


def judged(return_code: int | None, stdout: bytes, stderr: bytes) -> None:
    for adapter in ADAPTERS.values():
        end = adapter.ended(return_code, stdout, stderr)
        assert len(end.reason) <= 500
        assert msgspec.json.decode(msgspec.json.encode(end), type=HarnessEnd) == end


@given(st.none() | st.integers(-64, 255), st.binary(), st.binary())
def test_any_bytes_are_judged(return_code: int | None, stdout: bytes, stderr: bytes) -> None:
    judged(return_code, stdout, stderr)


# Every code point, lone surrogates too, as JSON's escapes can spell them.
Text = st.text(st.characters(codec=None, exclude_categories=()), max_size=20)
Foreign = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | Text | st.sampled_from(["success"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(Text, inner, max_size=3),
    max_leaves=5,
)
Types = st.sampled_from(["result", "turn.failed", "turn.completed", "error"])
Fields = st.sampled_from(["subtype", "is_error", "result", "errors", "error", "message"])
Errors = st.dictionaries(Fields, Foreign | Foreign.map(json.dumps), max_size=3)
Events = st.builds(
    lambda kind, fields: {**fields, "type": kind},
    Types | Foreign,
    st.dictionaries(Fields, Foreign | Errors, max_size=6),
)


@given(st.integers(0, 1), st.lists(Events | Foreign, max_size=3))
def test_any_events_are_judged(return_code: int, said: list[Any]) -> None:
    judged(return_code, "\n".join(map(json.dumps, said)).encode(), b"")
