from pathlib import Path
from typing import Any

import msgspec
import pytest

import evaluators
from builders.base import SpecError
from evaluators.base import Evaluation, Evaluator, EvaluatorSpec, ExecResult
from evaluators.test_on_output import MAX_MISMATCHES, MAX_STREAM, grade
from evaluators.test_on_output import TestOnOutputConfig as Config
from tests.evaluators.workspace import FolderWorkspace, context


def evaluator(command: str, **config: Any) -> Evaluator:
    config = {"test_command": command, "expected": {"adds": "PASSED"}, **config}
    return evaluators.make(EvaluatorSpec(strategy="test_on_output", config=config))


async def run(tmp_path: Path, command: str, **config: Any) -> Evaluation:
    return await evaluator(command, **config).evaluate(
        context(tmp_path, workspace=FolderWorkspace(tmp_path))
    )


async def test_the_expected_statuses_earn_the_reward(tmp_path: Path) -> None:
    evaluation = await run(tmp_path, "echo 'adds PASSED'; echo 'other FAILED'; exit 1")
    assert evaluation.outcome_reward == 1.0
    assert evaluation.validity == "graded"
    assert evaluation.report == {
        "counts": {"PASSED": 1, "FAILED": 1, "ERROR": 0, "SKIPPED": 0},
        "mismatches": {},
        "more_mismatches": 0,
        "skipped_lines": 0,
        "exit_code": 1,
        "timed_out": False,
        "output": "test_output.txt",
    }


async def test_any_mismatch_costs_the_reward_and_is_named(tmp_path: Path) -> None:
    evaluation = await run(
        tmp_path, "echo 'adds FAILED'", expected={"adds": "PASSED", "gone": "PASSED"}
    )
    assert evaluation.outcome_reward == 0.0
    assert evaluation.report["mismatches"] == {
        "adds": {"expected": "PASSED", "found": "FAILED"},
        "gone": {"expected": "PASSED", "found": None},
    }


async def test_exact_allows_no_other_test(tmp_path: Path) -> None:
    command = "echo 'adds PASSED'; echo 'more PASSED'"
    assert (await run(tmp_path, command)).outcome_reward == 1.0
    evaluation = await run(tmp_path, command, match="exact")
    assert evaluation.outcome_reward == 0.0
    assert evaluation.report["mismatches"] == {"more": {"expected": None, "found": "PASSED"}}


async def test_a_failure_may_be_what_is_expected(tmp_path: Path) -> None:
    evaluation = await run(tmp_path, "echo FAILED adds; false", expected={"adds": "FAILED"})
    assert evaluation.outcome_reward == 1.0


async def test_both_streams_are_read_and_kept(tmp_path: Path) -> None:
    await run(tmp_path, "echo out; echo 'adds PASSED' >&2")
    assert (tmp_path / "artifacts" / "test_output.txt").read_text() == "out\n\nadds PASSED\n"


async def test_a_report_names_some_of_many_mismatches_and_counts_the_rest(tmp_path: Path) -> None:
    count = MAX_MISMATCHES + 50
    evaluation = await run(
        tmp_path,
        f'for i in $(seq {count}); do echo "FAILED t$i"; done; echo PASSED adds',
        match="exact",
    )
    assert evaluation.outcome_reward == 0.0
    assert evaluation.report["counts"]["FAILED"] == count
    assert len(evaluation.report["mismatches"]) == MAX_MISMATCHES
    assert evaluation.report["more_mismatches"] == 50


async def test_lines_without_end_are_counted(tmp_path: Path) -> None:
    evaluation = await run(tmp_path, "printf 'PASSED adds\n%05000d FAILED\n' 1")
    assert evaluation.outcome_reward == 1.0
    assert evaluation.report["skipped_lines"] == 1


async def test_tests_may_have_any_names(tmp_path: Path) -> None:
    names = ["ünï 漢 😀", "nul \0 and \x1b", 'a "quoted" \\ name', "a\u2028b"]
    (tmp_path / "said").write_text("".join(f"PASSED {name}\n" for name in names))
    evaluation = await run(tmp_path, "cat said", expected=dict.fromkeys(names, "PASSED"))
    assert evaluation.outcome_reward == 1.0
    evaluation = await run(tmp_path, "cat said", match="exact")
    assert set(evaluation.report["mismatches"]) == {"adds", *names}
    assert msgspec.json.decode(msgspec.json.encode(evaluation), type=Evaluation) == evaluation


class Runtime(FolderWorkspace):
    """A runtime whose commands all end with one result."""

    def __init__(self, folder: Path, result: ExecResult) -> None:
        super().__init__(folder)
        self.result = result

    async def exec(self, *arguments: Any, **options: Any) -> ExecResult:
        return self.result


async def graded(tmp_path: Path, **result: Any) -> Evaluation:
    workspace = Runtime(tmp_path, ExecResult(return_code=0, **result))
    return await evaluator("x", match="exact").evaluate(context(tmp_path, workspace=workspace))


async def test_text_that_has_no_encoding_is_replaced(tmp_path: Path) -> None:
    evaluation = await graded(tmp_path, stdout="PASSED adds\n", stderr="FAILED half \ud83d")
    assert set(evaluation.report["mismatches"]) == {"half ?"}
    assert msgspec.json.encode(evaluation)
    kept = (tmp_path / "artifacts" / "test_output.txt").read_text()
    assert kept == "PASSED adds\n\nFAILED half ?"


async def test_of_an_endless_stream_the_end_is_kept(tmp_path: Path) -> None:
    evaluation = await graded(tmp_path, stdout="é" * MAX_STREAM, stderr="\nPASSED adds")
    assert evaluation.outcome_reward == 1.0
    kept = (tmp_path / "artifacts" / "test_output.txt").stat().st_size
    assert kept == MAX_STREAM + len("\n\nPASSED adds")


async def test_unittest_names_may_be_given_as_unittest_prints_them(tmp_path: Path) -> None:
    (tmp_path / "cases.py").write_text(
        "import unittest\nclass C(unittest.TestCase):\n    def test_x(self): pass\n"
    )
    for name in ("test_x (cases.C.test_x)", "cases.C.test_x"):
        evaluation = await run(
            tmp_path, "python -m unittest -v cases", expected={name: "PASSED"}, match="exact"
        )
        assert evaluation.outcome_reward == 1.0


async def test_the_command_runs_where_and_with_what_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    built = evaluator(
        'test "$A$B" = 12 && pwd | grep -q inner && echo PASSED adds',
        cwd=str(tmp_path / "inner"),
        env={"B": "2"},
    )
    evaluation = await built.evaluate(
        context(tmp_path, workspace=FolderWorkspace(tmp_path), env={"A": "1", "B": "9"})
    )
    assert evaluation.outcome_reward == 1.0


async def test_tests_that_run_past_their_time_earn_nothing_and_say_so(tmp_path: Path) -> None:
    evaluation = await run(tmp_path, "echo PASSED adds; sleep 30", timeout_seconds=1.5)
    assert evaluation.outcome_reward == 0.0
    assert evaluation.report["timed_out"] is True
    assert (tmp_path / "artifacts" / "test_output.txt").read_text().startswith("PASSED adds")


async def test_a_session_that_left_the_tests_too_little_time_is_not_graded(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"session-1 had 0\.3 s left of their 600 s"):
        await evaluator("sleep 30").evaluate(
            context(tmp_path, workspace=FolderWorkspace(tmp_path), seconds_left=0.3)
        )
    assert (tmp_path / "artifacts" / "test_output.txt").exists()


@pytest.mark.parametrize("command", ["no-such-command", "/etc/hostname"])
async def test_a_command_that_cannot_run_is_no_zero(tmp_path: Path, command: str) -> None:
    with pytest.raises(RuntimeError, match=r"could not be run \(exit status 12[67]\)"):
        await run(tmp_path, command)


async def test_a_runtime_that_breaks_is_no_zero(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await run(tmp_path, "echo PASSED adds", cwd=str(tmp_path / "gone"))


async def test_without_a_runtime_nothing_is_graded(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="session session-1 has no runtime left"):
        await evaluator("true").evaluate(context(tmp_path))


def test_statuses_seen_before_the_shell_gave_up_are_graded() -> None:
    config = Config(test_command="x", expected={"adds": "PASSED"})
    result = ExecResult(stdout="adds FAILED", return_code=127)
    assert grade(config, result, result.stdout).outcome_reward == 0.0


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({}, "evaluator.config.test_command"),
        ({"test_command": "x"}, "evaluator.config.expected"),
        ({"test_command": "x", "expected": {}}, "evaluator.config"),
        ({"test_command": " ", "expected": {"a": "PASSED"}}, "evaluator.config"),
        ({"test_command": "x", "expected": {"a": "passed"}}, "evaluator.config.expected[...]"),
        (
            {"test_command": "x", "expected": {"a": "PASSED"}, "match": "some"},
            "evaluator.config.match",
        ),
        (
            {"test_command": "x", "expected": {"a": "PASSED"}, "timeout_seconds": 0},
            "evaluator.config",
        ),
        (
            {"test_command": "x", "expected": {"a": "PASSED"}, "timeout": 3},
            "evaluator.config.timeout",
        ),
    ],
)
def test_wrong_settings_are_refused_with_their_path(config: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as refused:
        evaluators.make(EvaluatorSpec(strategy="test_on_output", config=config))
    assert refused.value.field == field


def test_it_declares_the_time_its_tests_may_take() -> None:
    assert evaluator("x").seconds_needed == 630.0
    assert evaluator("x", timeout_seconds=60).seconds_needed == 90.0
    assert evaluators.EVALUATORS["test_on_output"].needs_workspace
