import ast
import math
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import findings
from builders.findings import DISQUALIFYING, REGISTRY, Found
from builders.records import Completion, VersionSpan

ROOT = Path(__file__).parent.parent.parent
SOURCES = [
    file
    for package in (
        "builders",
        "evaluators",
        "harness_adapters",
        "polar_gateway",
        "polar_server",
        "polar_client",
    )
    for file in sorted((ROOT / package).rglob("*.py"))
]
HOLDERS = {"findings", "_findings", "finding"}
"""Names of what holds codes."""
MAKERS = {"Finding": 0, "Found": 0, "_finding": 0, "fail": 1, "_ending": 0, "_end": 0}
"""Calls that are handed a code, and at which place."""


def completion(**changes: Any) -> Completion:
    fields: dict[str, Any] = {
        "completion_id": "msg_1",
        "index": 0,
        "tail": array("i", [1, 2]),
        "sampled_ids": array("i", [3, 4]),
        "logprobs": array("f", [-0.5, -0.25]),
        "messages_tail": [],
        "response_message": {"role": "assistant", "content": "x"},
        "finish_reason": "stop",
    }
    return Completion(**{**fields, **changes})


def codes(one: Completion) -> list[str]:
    return [found.code for found in findings.of(one)]


def logprobs(*values: float) -> dict[str, Any]:
    return {"logprobs": array("f", values)}


def raw(**sampling: Any) -> dict[str, Any]:
    return {"logprob_kind": "raw", "sampling": sampling}


SPANS = [VersionSpan(version="a", start=0, end=1), VersionSpan(version="b", start=1, end=2)]
HALF_KNOWN = [SPANS[0], VersionSpan(version=None, start=1, end=2)]

EARNED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("ids_missing", {"sampled_ids": array("i")}, {"sampled_ids": array("i", [3]), **logprobs(-1)}),
    ("prompt_ids_missing", {"tail": array("i")}, {"tail": array("i", [1])}),
    ("logprobs_missing", {"logprobs": None}, logprobs(-1, -1)),
    ("logprobs_misaligned", logprobs(-1), logprobs(-1, -1)),
    ("logprobs_misaligned", logprobs(-1, -1, -1), logprobs(-1, -1)),
    ("logprobs_misaligned", logprobs(), logprobs(-1, -1)),
    ("logprobs_non_finite", logprobs(-1, math.nan), logprobs(-1, -9998)),
    ("logprobs_non_finite", logprobs(-math.inf, -1), logprobs(-9998, -1)),
    ("logprobs_non_finite", logprobs(math.inf, -1), logprobs(0.0, -1)),
    ("logprobs_positive", logprobs(1e-6, -1), logprobs(0.0, -1)),
    ("logprobs_positive", logprobs(math.nan, 0.5), logprobs(math.nan, 0.0)),
    ("logprobs_minus_infinity", logprobs(-9999, -1), logprobs(-9998, -1)),
    ("logprob_not_behaviour", raw(temperature=0.7), raw(temperature=1)),
    ("logprob_not_behaviour", raw(temperature=0), raw(temperature=1.0)),
    ("logprob_not_behaviour", raw(temperature=1, top_p=0.95, top_k=64), raw(top_p=1.0, top_k=-1)),
    ("logprob_not_behaviour", raw(top_k=1), raw(top_k=0)),
    ("logprob_not_behaviour", raw(min_p=0.1), raw(min_p=0.0)),
    ("logprob_not_behaviour", raw(presence_penalty=-0.5), raw(presence_penalty=0)),
    ("logprob_not_behaviour", raw(frequency_penalty=1), raw(frequency_penalty=0.0)),
    ("logprob_not_behaviour", raw(repetition_penalty=1.1), raw(repetition_penalty=1)),
    ("logprob_not_behaviour", raw(logit_bias={"7": 1}), raw(logit_bias={})),
    ("logprob_not_behaviour", raw(min_tokens=2), raw(min_tokens=0, stop=["x"], seed=1)),
    (
        "logprob_not_behaviour",
        {"logprob_kind": "unknown", "sampling": {"temperature": 0.7}},
        {"logprob_kind": "processed", "sampling": {"temperature": 0.7}},
    ),
    ("logprob_not_behaviour", raw(temperature=0.7), {**raw(temperature=0.7), "logprobs": None}),
    ("undelivered", {"delivered": False}, {"delivered": True}),
    ("ambiguous_attachment", {"ambiguous": True}, {"ambiguous": False}),
    ("budget_cut", {"finish_reason": "length"}, {"finish_reason": "stop"}),
    ("aborted", {"finish_reason": "abort"}, {"finish_reason": None}),
    ("aborted", {"findings": ["aborted"]}, {"findings": ["engine_broke_off"]}),
    ("policy_version_unknown", {"versions": HALF_KNOWN}, {"versions": SPANS}),
]


@pytest.mark.parametrize(
    ("code", "earning", "not_quite"),
    EARNED,
    ids=[f"{code}-{n}" for n, (code, *_) in enumerate(EARNED)],
)
def test_a_completion_has_the_findings_that_it_earns(
    code: str, earning: dict[str, Any], not_quite: dict[str, Any]
) -> None:
    assert code in codes(completion(**earning))
    assert code not in codes(completion(**not_quite))


def test_nothing_is_found_of_a_sound_completion() -> None:
    assert findings.of(completion()) == []


def test_the_capture_is_believed_and_no_finding_is_said_twice() -> None:
    said = ["logprobs_null", "token_in_ignored", "logprobs_null"]
    assert codes(completion(findings=said, logprobs=None)) == ["logprobs_null", "token_in_ignored"]
    assert codes(completion(findings=["ids_missing"], sampled_ids=array("i"))) == ["ids_missing"]
    assert codes(completion(findings=["aborted"], finish_reason="abort")) == ["aborted"]


def test_findings_say_how_many_values_are_wrong() -> None:
    wrong = completion(
        sampled_ids=array("i", [1] * 4), **logprobs(math.nan, 1.0, -9999.0, math.inf)
    )
    assert findings.of(wrong) == [
        Found("logprobs_non_finite", {"values": 2}),
        Found("logprobs_positive", {"values": 1}),
        Found("logprobs_minus_infinity", {"values": 1}),
    ]
    assert findings.of(completion(versions=HALF_KNOWN)) == [
        Found("policy_version_unknown", {"unknown_tokens": 1})
    ]
    assert findings.of(completion(delivered=False, delivered_tokens=1)) == [
        Found("undelivered", {"delivered_tokens": 1})
    ]


@given(st.lists(st.floats(width=32), min_size=1, max_size=6))
def test_log_probabilities_pass_exactly_when_each_is_one(values: list[float]) -> None:
    judged = completion(sampled_ids=array("i", [1] * len(values)), logprobs=array("f", values))
    sound = all(math.isfinite(value) and -9999.0 < value <= 0.0 for value in values)
    assert (findings.disqualifying(judged) is None) == sound


@pytest.mark.parametrize("code", sorted(DISQUALIFYING))
def test_a_fatal_finding_of_a_completion_disqualifies_it(code: str) -> None:
    assert findings.disqualifying(completion(findings=["budget_cut", code])) == code
    assert findings.level(code) == "fatal"


def test_strict_codes_disqualify_too() -> None:
    hot = completion(**raw(temperature=0.5))
    assert findings.disqualifying(hot) is None
    assert findings.disqualifying(hot, ["logprob_not_behaviour"]) == "logprob_not_behaviour"
    assert findings.level("logprob_not_behaviour") == "warning"
    assert findings.level("logprob_not_behaviour", ["logprob_not_behaviour"]) == "fatal"


def test_a_code_that_is_not_known_is_a_warning_unless_a_trainer_is_strict_about_it() -> None:
    assert findings.level("of_the_future") == "warning"
    assert findings.disqualifying(completion(findings=["of_the_future"])) is None


def test_every_code_says_in_a_sentence_each_what_it_means_and_what_to_do() -> None:
    for code, one in REGISTRY.items():
        assert code == code.lower().strip("_"), code
        for sentence in (one.meaning, one.action):
            assert sentence[0].isupper(), code
            assert sentence.endswith("."), code
            assert "|" not in sentence, code


def test_every_code_that_is_found_is_registered() -> None:
    trees = {file: ast.parse(file.read_text()) for file in SOURCES}
    constants = constants_of(trees)
    found = {
        code: f"{file.relative_to(ROOT)}:{line}"
        for file, tree in trees.items()
        for code, line in codes_in(tree, constants)
    }
    assert {"ids_missing", "call_unfinished", "unisolated", "context_drift"} <= found.keys()
    assert {code: where for code, where in found.items() if code not in REGISTRY} == {}


def test_every_registered_code_is_found_somewhere() -> None:
    said = {
        node.value
        for file in SOURCES
        for node in ast.walk(without_registry(ast.parse(file.read_text())))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert REGISTRY.keys() - said == set()


def without_registry(tree: ast.Module) -> ast.Module:
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "REGISTRY")
    ]
    return tree


def codes_in(tree: ast.Module, constants: dict[str, str]) -> Iterator[tuple[str, int]]:
    """What stands where a finding's code is expected, as a literal or a constant, with its line."""
    ends_calls = any(isinstance(n, ast.Call) and name(n.func) == "_end" for n in ast.walk(tree))
    holders = {*HOLDERS, "code"} if ends_calls else HOLDERS
    for node in ast.walk(tree):
        for part in holding(node, holders):
            for inner in ast.walk(part):
                if isinstance(inner, ast.Constant) and isinstance(inner.value, str) and inner.value:
                    yield inner.value, inner.lineno
                elif isinstance(inner, ast.Name) and inner.id in constants:
                    yield constants[inner.id], inner.lineno


def constants_of(trees: dict[Path, ast.Module]) -> dict[str, str]:
    """The strings that have names."""
    return {
        target.id: node.value.value
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, str)
    }


def holding(node: ast.AST, holders: set[str]) -> Iterator[ast.expr]:
    """The expressions in `node` that become codes."""
    match node:
        case ast.Assign(targets=[target], value=value) | ast.AugAssign(target=target, value=value):
            if name(target) in holders:
                yield from literals(value)
        case ast.keyword(arg=("findings" | "finding"), value=value):
            yield from literals(value)
        case ast.Call(func=ast.Attribute(attr="append", value=holder), args=[value]):
            if name(holder) in holders:
                yield from literals(value)
        case ast.Call(func=func, args=args, keywords=keywords) if name(func) in MAKERS:
            yield from (
                each for word in keywords if word.arg == "code" for each in literals(word.value)
            )
            at = MAKERS[name(func)]
            yield from (each for argument in args[at : at + 1] for each in literals(argument))


def literals(value: ast.expr) -> Iterator[ast.expr]:
    """Where a value is written out: a string, a list of some, or a choice of them."""
    if isinstance(value, ast.IfExp):
        yield from (value.body, value.orelse)
    elif isinstance(value, ast.Constant | ast.List | ast.Tuple | ast.Name):
        yield value


def name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
