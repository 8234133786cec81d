from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import builders
from builders.base import StrategySpec
from builders.findings import DISQUALIFYING, REGISTRY
from builders.records import Completion, CompletionSession, Trajectory, VersionSpan
from polar_gateway.errors import Failure
from polar_gateway.protocol import Finding, Verdict
from polar_gateway.sampling import sent_sampling
from polar_gateway.verdicts import masked, nothing_trainable, verdict
from tests.recordings import load, routed

START, END = 1, 2
TOOLS = [{"type": "function", "function": {"name": "bash"}}]
CALL = [{"id": "c", "type": "function", "function": {"name": "bash", "arguments": "{}"}}]


def answer(text: str = "x", **parts: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **parts}


def call(index: int, prompt: list[int], sampled: list[int], **changes: Any) -> Completion:
    fields: dict[str, Any] = {
        "completion_id": f"msg_{index}",
        "index": index,
        "tail": array("i", prompt),
        "sampled_ids": array("i", sampled),
        "logprobs": array("f", [-0.5] * len(sampled)),
        "messages_tail": [{"role": "user", "content": f"task {index}"}],
        "response_message": answer(),
        "finish_reason": "stop",
    }
    return Completion(**{**fields, **changes})


def side_call(index: int, **changes: Any) -> Completion:
    return call(index, [START, 50 + index], [60, END], kind="title", **changes)


def chat(
    turns: int, *, rendered: Callable[[list[int]], list[int]] = list, **changes: Any
) -> list[Completion]:
    """Calls that each continue the one before; `rendered` makes the template's ids of sampled ones."""
    calls: list[Completion] = []
    for index in range(turns):
        if calls:
            *_, last = calls
            prompt = [*last.prompt_ids, *rendered(last.sampled_ids.tolist()), START, 30 + index]
            messages = [
                *last.messages,
                last.response_message,
                {"role": "user", "content": f"result {index}"},
            ]
            changes |= {"previous": last, "attached": "exact", "messages_tail": messages}
        else:
            prompt = [START, 10]
        calls.append(call(index, prompt, [20, 21, END], **changes))
    return calls


def last_changed(calls: list[Completion], **changes: Any) -> list[Completion]:
    for name, value in changes.items():
        setattr(calls[-1], name, value)
    return calls


def judge(
    completions: list[Completion],
    *,
    builder: str = "prefix_merging",
    strict: tuple[str, ...] = (),
    ends: tuple[int, ...] = (END,),
    captured: tuple[str, ...] = (),
    notes: tuple[Finding, ...] = (),
    failure: Failure | None = None,
    max_tokens: int | None = None,
) -> tuple[Verdict, Trajectory]:
    """As the pipeline does: built, judged, masked."""
    session = CompletionSession(
        session_id="s",
        completions=completions,
        end_of_turn_ids=list(ends),
        findings=list(captured),
    )
    config = {"strict": list(strict), "max_tokens": max_tokens}
    spec = StrategySpec(strategy=builder, config=config)
    trajectory = builders.make(spec).build(session)
    said = verdict(
        session, trajectory, failure=failure, graded=True, notes=list(notes), strict=strict
    )
    return said, masked(trajectory, said)


def found(code: str, said: Verdict) -> Finding | None:
    return next((one for one in said.findings if one.code == code), None)


def codes(said: Verdict) -> set[str]:
    return {one.code for one in said.findings}


Case = tuple[str, dict[str, Any], dict[str, Any], dict[str, float]]


def two(version: str, other: str) -> list[Completion]:
    return last_changed(chat(2, policy_version=version), policy_version=other)


def marked(turns: int, text: str, **parts: Any) -> list[Completion]:
    return last_changed(chat(turns, tools=TOOLS), response_message=answer(text, **parts))


def stored_as_a_difference(*, shared: int) -> list[Completion]:
    first = call(0, [START, 10], [20, END])
    tail = array("i", [10][: 2 - shared])
    return [first, call(1, [], [9], parent=first, shared=shared, tail=tail)]


CASES: list[Case] = [
    (
        "duplicated",
        {"completions": stored_as_a_difference(shared=2)},
        {"completions": stored_as_a_difference(shared=3)},
        {"tokens": 1},
    ),
    (
        "tail_lost",
        {"completions": last_changed(chat(2), delivered=False, findings=["call_cut_by_seal"])},
        {"completions": last_changed(chat(2), delivered=False)},
        {"tokens": 3},
    ),
    (
        "tail_lost",
        {"completions": last_changed(chat(2), finish_reason="abort")},
        {"completions": [*last_changed(chat(1), finish_reason="abort"), call(1, [START, 10], [9])]},
        {"tokens": 3},
    ),
    (
        "tail_lost",
        {"completions": last_changed(chat(1), findings=["engine_broke_off"], delivered=False)},
        {"completions": last_changed(chat(1), findings=["engine_broke_off"], kind="title")},
        {"tokens": 3},
    ),
    (
        "abort_in_chain",
        {"completions": chat(2, finish_reason="abort")},
        {"completions": last_changed(chat(2), finish_reason="abort")},
        {"tokens": 3},
    ),
    (
        "duplicated",
        {"completions": [*chat(1), call(1, [START, 10], [9])]},
        {"completions": [*chat(1, delivered=False), call(1, [START, 10], [9])]},
        {"tokens": 1},
    ),
    (
        "duplicated",
        {"completions": [*chat(1), call(1, [START, 10], [9])]},
        {"completions": [*chat(1), call(1, [START, 11], [9])]},
        {"tokens": 1},
    ),
    (
        "side_call_share",
        {"completions": [*chat(3), *map(side_call, range(3, 7))]},
        {"completions": [*chat(4), *map(side_call, range(4, 8))]},
        {"calls": 4, "tokens": 8, "share": 4 / 7},
    ),
    (
        "side_call_share",
        {"completions": [*chat(3), *map(side_call, range(3, 7))]},
        {"completions": [*chat(1), *map(side_call, range(1, 4))]},
        {"calls": 4, "tokens": 8, "share": 4 / 7},
    ),
    (
        "tools_never_called",
        {"completions": chat(8, tools=TOOLS)},
        {"completions": chat(7, tools=TOOLS)},
        {"offered": 8},
    ),
    (
        "tools_never_called",
        {"completions": chat(8, tools=TOOLS)},
        {"completions": marked(8, "", tool_calls=CALL)},
        {"offered": 8},
    ),
    (
        "calls_not_parsed",
        {"completions": marked(2, '<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>')},
        {"completions": marked(2, "I would call bash(ls), <b>but</b> if a < function > b.")},
        {"offered": 2, "looks_like_calls": 1},
    ),
    (
        "calls_not_parsed",
        {"completions": marked(2, "", reasoning_content="<function=bash>")},
        {"completions": marked(2, "<tool_call>", tool_calls=CALL)},
        {"offered": 2, "looks_like_calls": 1},
    ),
    (
        "calls_not_parsed",
        {"completions": marked(1, "[TOOL_CALLS][{")},
        {"completions": chat(1, response_message=answer("[TOOL_CALLS][{"))},
        {"offered": 1, "looks_like_calls": 1},
    ),
    ("end_of_turn_unknown", {"completions": chat(1), "ends": ()}, {"completions": chat(1)}, {}),
    (
        "context_drift",
        {"completions": chat(2, rendered=lambda ids: [29, *ids[1:]])},
        {"completions": chat(2)},
        {"tokens": 1, "turns": 1, "share": 1 / 6},
    ),
    (
        "one_turn_traces",
        {"completions": chat(4, rendered=lambda _: [29])},
        {"completions": chat(3, rendered=lambda _: [29])},
        {"traces": 4, "continuing": 3},
    ),
    (
        "one_turn_traces",
        {"completions": chat(4, rendered=lambda _: [29])},
        {"completions": chat(4, rendered=lambda _: [29]), "builder": "per_request"},
        {"traces": 4, "continuing": 3},
    ),
    (
        "one_turn_traces",
        {"completions": chat(4, rendered=lambda _: [29])},
        {"completions": chat(4)},
        {"traces": 4, "continuing": 3},
    ),
    (
        "mixed_policy_versions",
        {"completions": two("a", "b")},
        {"completions": two("a", "a")},
        {"versions": 2, "tokens": 3, "share": 0.5},
    ),
    (
        "mixed_policy_versions",
        {
            "completions": chat(
                1,
                versions=[
                    VersionSpan(version="a", start=0, end=1),
                    VersionSpan(version="b", start=1, end=3),
                ],
            )
        },
        {"completions": [*chat(1, policy_version="a"), side_call(1, policy_version="b")]},
        {"versions": 2, "tokens": 1, "share": 1 / 3},
    ),
    (
        "left_out",
        {"completions": [*chat(1), side_call(1)]},
        {"completions": chat(1)},
        {"kind_title": 2, "tokens": 2, "share": 0.4},
    ),
    (
        "trace_cut",
        {"completions": chat(2), "max_tokens": 9},
        {"completions": chat(2), "max_tokens": 10},
        {"tokens": 1, "share": 1 / 6},
    ),
    ("no_completions", {"completions": []}, {"completions": [side_call(0)]}, {}),
    (
        "context_overflow",
        {
            "completions": chat(1),
            "failure": Failure(boundary="harness", message="full", code="context_overflow"),
        },
        {"completions": chat(1), "failure": Failure(boundary="harness", message="full")},
        {},
    ),
    (
        "logprob_not_behaviour",
        {
            "completions": last_changed(
                chat(2, logprob_kind="raw", sampling={"temperature": 1, "top_p": 1.0}),
                sampling={"temperature": 1, "top_p": 0.95, "top_k": 64},
            )
        },
        {"completions": chat(2, logprob_kind="processed", sampling={"top_p": 0.95, "top_k": 64})},
        {"tokens": 3, "share": 0.5},
    ),
    (
        "budget_cut",
        {"completions": chat(2, finish_reason="length")},
        {"completions": chat(2)},
        {"tokens": 6, "share": 1},
    ),
    (
        "undelivered",
        {"completions": last_changed(chat(2), delivered=False, delivered_tokens=1)},
        {"completions": chat(2)},
        {"tokens": 3, "share": 0.5, "delivered_tokens": 1},
    ),
    (
        "journal_cut_short",
        {"completions": chat(1), "captured": ("journal_cut_short",)},
        {"completions": chat(1)},
        {},
    ),
]


@pytest.mark.parametrize(
    ("code", "earning", "not_quite", "numbers"),
    CASES,
    ids=[f"{code}-{number}" for number, (code, *_) in enumerate(CASES)],
)
def test_a_session_has_the_findings_that_it_earns(
    code: str, earning: dict[str, Any], not_quite: dict[str, Any], numbers: dict[str, float]
) -> None:
    earned = found(code, judge(**earning)[0])
    assert earned is not None
    assert earned.numbers == pytest.approx(numbers)
    assert earned.level == REGISTRY[code].level
    assert earned.message
    assert found(code, judge(**not_quite)[0]) is None


@pytest.mark.parametrize(
    ("harness", "flagged"),
    [("gemini_cli", True), ("claude_code", False), ("codex", False), ("opencode", False)],
)
def test_raw_log_probabilities_are_those_of_what_clis_sample_but_not_of_gemini(
    harness: str, flagged: bool
) -> None:
    sampling = [
        sent_sampling(found.dialect.normalise({**one.request["body"], **found.fields}))
        for one in load(harness, "rec_basic")
        if (found := routed(one)) and one.label.startswith("main")
    ]
    asked = [
        call(number, [number], [9], sampling=given, logprob_kind="raw")
        for number, given in enumerate(sampling)
    ]
    counts = {one.code: one.count for one in judge(asked)[0].findings}
    assert counts.get("logprob_not_behaviour", 0) == (len(asked) if flagged else 0)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<function=bash>",
        '<invoke name="Bash">',
        "<\uff5ctool\u2581calls\u2581begin\uff5c>",
        "<|python_tag|>{",
        "<|tool_calls_section_begin|>",
        "[TOOL_CALLS]",
        "<|start|>assistant to=functions.bash",
    ],
)
def test_calls_are_told_by_the_markup_of_model_families(text: str) -> None:
    assert "calls_not_parsed" in codes(judge(marked(1, f"Let me see. {text}"))[0])


@pytest.mark.parametrize("text", ["std::function<int>", "a <function> tag", "to=functions", "<b>"])
def test_text_that_only_speaks_of_functions_is_no_call(text: str) -> None:
    assert "calls_not_parsed" not in codes(judge(marked(1, text))[0])


def test_a_clean_graded_session_may_be_trained_on_whole() -> None:
    said, trajectory = judge(chat(3))
    assert (said.reward, said.tokens, said.findings) == ("graded", "all", [])
    assert [sum(trace.loss_mask) for trace in trajectory.traces] == [9]


def test_a_session_without_calls_has_nothing_to_train_on() -> None:
    said, _ = judge([])
    assert said.tokens == "none"
    failure = nothing_trainable(said)
    assert failure is not None
    assert "no_completions" in failure.message


@pytest.mark.parametrize("code", sorted(DISQUALIFYING))
def test_a_call_whose_tokens_are_not_true_leaves_a_prefix(code: str) -> None:
    said, trajectory = judge(last_changed(chat(2), findings=[code]))
    assert said.tokens == "prefix"
    assert sum(sum(trace.loss_mask) for trace in trajectory.traces) == 3
    one = found(code, said)
    assert one is not None
    assert (one.level, one.count, one.numbers["tokens"]) == ("fatal", 1, 3)
    assert nothing_trainable(said) is None


@pytest.mark.parametrize("code", sorted(DISQUALIFYING))
def test_if_no_call_is_true_there_is_nothing_to_train_on(code: str) -> None:
    said, trajectory = judge(chat(2, findings=[code]))
    assert (said.tokens, trajectory.traces) == ("none", [])
    failure = nothing_trainable(said)
    assert failure is not None
    assert code in failure.message


def test_a_side_call_that_is_not_true_costs_nothing() -> None:
    said, _ = judge([*chat(1), side_call(1, findings=["ids_missing"])])
    assert said.tokens == "all"


@pytest.mark.parametrize("code", sorted(code for code, one in REGISTRY.items() if one.cuts))
def test_what_is_lost_leaves_a_prefix_and_masks_nothing(code: str) -> None:
    said, trajectory = judge(chat(2), notes=(Finding(code=code),))
    assert said.tokens == "prefix"
    assert sum(trajectory.traces[0].loss_mask) == 6


def test_a_trainer_may_have_a_finding_of_a_call_count_as_fatal() -> None:
    said, trajectory = judge(last_changed(chat(2), finish_reason="length"), strict=("budget_cut",))
    assert said.tokens == "prefix"
    assert sum(trajectory.traces[0].loss_mask) == 3
    one = found("budget_cut", said)
    assert one is not None
    assert one.level == "fatal"


def test_a_fatal_finding_of_the_session_masks_every_trace_and_says_why() -> None:
    mixed = [*two("a", "b"), call(2, [START, 77], [9])]
    said, trajectory = judge(mixed, strict=("mixed_policy_versions",))
    assert said.tokens == "none"
    assert len(trajectory.traces) == 2
    for trace in trajectory.traces:
        assert set(trace.loss_mask) == {0}
        assert set(trace.response_logprobs or ()) == {0.0}
        assert len(trace.loss_mask) == len(trace.response_ids) == len(trace.response_logprobs or ())
        assert trace.metadata["trainable"] is False
        assert trace.metadata["mask_reason"] == "mixed_policy_versions"
    stats = trajectory.metadata["reconstruction_stats"]
    assert stats["trainable_tokens"] == 0
    assert stats["left_out"]["mixed_policy_versions"] == {"completions": 3, "tokens": 7}
    failure = nothing_trainable(said)
    assert failure is not None
    assert "mixed_policy_versions" in failure.message


def test_findings_of_the_stages_get_the_level_that_they_are_registered_with() -> None:
    said, _ = judge(
        chat(1), notes=(Finding(code="runtime", message="m"), Finding(code="unknown_one"))
    )
    assert [(one.code, one.level, one.message) for one in said.findings] == [
        ("runtime", "note", "m"),
        ("unknown_one", "warning", ""),
    ]
    strict, _ = judge(chat(1), notes=(Finding(code="unisolated"),), strict=("unisolated",))
    assert strict.tokens == "none"


def test_a_reward_lost_to_infrastructure_is_not_a_missing_evaluator() -> None:
    session = CompletionSession(session_id="s", completions=chat(1))
    broken = Failure(boundary="runtime", message="gone", infra=True)
    told = [
        verdict(session, None, failure=failure, graded=graded, notes=[]).reward
        for failure in (broken, None)
        for graded in (False, True)
    ]
    assert told == ["infra", "graded", "ungraded", "graded"]


FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "findings": st.lists(st.sampled_from([*sorted(REGISTRY), "of_the_future"]), max_size=2),
        "delivered": st.booleans(),
        "finish_reason": st.sampled_from(["stop", "length", "abort", None]),
        "kind": st.sampled_from(["turn", "compaction", "title"]),
        "policy_version": st.sampled_from(["a", "b", None]),
        "ambiguous": st.booleans(),
        "tools": st.sampled_from([None, TOOLS]),
        "logprob_kind": st.sampled_from(["raw", "processed", "unknown"]),
        "sampling": st.sampled_from([{}, {"temperature": 0.5}]),
        "logprobs": st.sampled_from([None, array("f", [-1, float("nan"), -1]), array("f", [-1])]),
    },
)
OPTIONS = st.fixed_dictionaries(
    {
        "builder": st.sampled_from(["per_request", "prefix_merging", "lineage"]),
        "strict": st.lists(st.sampled_from(sorted(REGISTRY)), max_size=2, unique=True).map(tuple),
        "max_tokens": st.none() | st.integers(min_value=1, max_value=30),
    }
)


@given(st.lists(FIELDS, max_size=5), OPTIONS, st.booleans())
def test_a_verdict_is_what_the_masks_say(
    changes: list[dict[str, Any]], options: dict[str, Any], keeps: bool
) -> None:
    completions = chat(len(changes), rendered=list if keeps else lambda _: [29])
    for one, changed in zip(completions, changes, strict=True):
        last_changed([one], **changed)
    before = [msgspec.structs.asdict(one) for one in completions]
    said, trajectory = judge(completions, **options)
    trained = sum(sum(trace.loss_mask) for trace in trajectory.traces)
    fatal = {one.code for one in said.findings if one.level == "fatal"}

    assert (said.tokens == "none") == (trained == 0)
    if said.tokens == "all":
        # Nothing that was sampled in a turn, and heard, is missing.
        left_out = trajectory.metadata["reconstruction_stats"]["left_out"]
        assert set(left_out) <= {"undelivered", "kind_title"}
    if any(REGISTRY[code].scope == "session" for code in fatal):
        assert trained == 0
    for code in options["strict"]:
        assert code not in codes(said) or code in fatal
    for one in said.findings:
        assert one.count > 0
        assert 0 <= one.numbers.get("share", 0) <= 1
    stats = trajectory.metadata["reconstruction_stats"]
    assert stats["trainable_tokens"] == trained
    lost = sum(counts["tokens"] for counts in stats["left_out"].values())
    assert trained + lost == stats["sampled_tokens"]
    assert before == [msgspec.structs.asdict(one) for one in completions]
    assert msgspec.json.decode(msgspec.json.encode(said), type=Verdict) == said
    assert judge(completions, **options)[0] == said
