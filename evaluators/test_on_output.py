"""Run a test command in the workspace and compare the statuses it prints with the expected ones.

What is graded is text that a process in the workspace wrote. In the agent's own runtime the agent
may have replaced the tests, the runner or the shell, and can forge every line of it; asking for a
fresh runtime (`refresh_runtime`) is the answer where that matters.
"""

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import ClassVar, Literal

import anyio.to_thread
import msgspec

from evaluators.base import Evaluation, EvaluationContext, ExecResult
from evaluators.test_status import Parser, Status, canonical_name, parse

TIMED_OUT = -1
NOT_RUN = (126, 127)
"""The shell's exit statuses for a command that could not be executed or was not found."""

OUTPUT_NAME = "test_output.txt"
"""The artifact that holds what the command wrote."""

MAX_STREAM = 8 << 20
"""Bytes of each of the command's streams that are kept and read, from the end."""

MAX_MISMATCHES = 200
"""Mismatches that a report names; of the others it has the number."""

MARGIN_SECONDS = 30.0
"""For writing and reading beside the command's own time."""


class TestOnOutputConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    test_command: str
    cwd: str | None = None
    env: dict[str, str] = {}
    timeout_seconds: float = 600.0
    expected: dict[str, Status]
    """Test name -> status."""
    match: Literal["subset", "exact"] = "subset"
    """"subset": every expected test has its status; "exact": and there is no other test."""
    parser: Parser = "auto"

    def __post_init__(self) -> None:
        if not self.test_command.strip():
            raise ValueError("test_command must not be empty")
        if not self.expected:
            raise ValueError("expected must name at least one test")
        if not 0 < self.timeout_seconds < float("inf"):
            raise ValueError("timeout_seconds must be positive and finite")


class TestOnOutput:
    """1.0 when the statuses match, 0.0 when they do not or the tests ran past their time."""

    __test__ = False  # not a test case of ours, whatever pytest makes of the name

    name: ClassVar[str] = "test_on_output"
    needs_workspace: ClassVar[bool] = True
    Config: ClassVar[type[msgspec.Struct]] = TestOnOutputConfig

    def __init__(self, config: TestOnOutputConfig) -> None:
        self.config = config
        self.seconds_needed = config.timeout_seconds + MARGIN_SECONDS

    async def evaluate(self, context: EvaluationContext) -> Evaluation:
        """Grade what the tests say; raises only where that says nothing about the agent.

        RuntimeError when the session has no runtime left, or the command could not be run at all
        (an agent can bring that about in its own runtime, but so can a mistake in the task, and
        a test run that did not take place is no 0.0); TimeoutError when the session left the
        tests less than their own time and that ran out; and whatever the workspace raises.
        """
        config = self.config
        if context.workspace is None:
            raise RuntimeError(f"session {context.session_id} has no runtime left to run tests in")
        timeout = min(config.timeout_seconds, context.seconds_left)
        result = await context.workspace.exec(
            config.test_command, cwd=config.cwd, env={**context.env, **config.env}, timeout=timeout
        )
        if result.return_code == TIMED_OUT and timeout < config.timeout_seconds:
            await anyio.to_thread.run_sync(_keep, context.artifacts_dir, result)
            raise TimeoutError(
                f"the tests of session {context.session_id} had {timeout:g} s left of their "
                f"{config.timeout_seconds:g} s and did not finish"
            )
        return await anyio.to_thread.run_sync(self._grade, context.artifacts_dir, result)

    def _grade(self, artifacts_dir: Path, result: ExecResult) -> Evaluation:
        return grade(self.config, result, _keep(artifacts_dir, result))


def _keep(artifacts_dir: Path, result: ExecResult) -> str:
    """Write what the tests said to the artifacts and return it, both no more than can be encoded."""
    streams = [_tail(result.stdout), _tail(result.stderr)]
    artifacts_dir.mkdir(parents=True, exist_ok=True)
    (artifacts_dir / OUTPUT_NAME).write_bytes(b"\n".join(streams))
    return "\n".join(stream.decode("utf-8", "ignore") for stream in streams)


def _tail(text: str) -> bytes:
    """The last MAX_STREAM bytes of `text`, with "?" for a lone surrogate, which has no UTF-8."""
    return text[-MAX_STREAM:].encode("utf-8", "replace")[-MAX_STREAM:]


def grade(config: TestOnOutputConfig, result: ExecResult, output: str) -> Evaluation:
    """The evaluation of a finished (or timed out) test run. Raises RuntimeError if none took place."""
    statuses, skipped_lines = parse(output, config.parser)
    if result.return_code in NOT_RUN and not statuses:
        raise RuntimeError(
            f"the test command could not be run (exit status {result.return_code}): {output[-500:].strip()}"
        )
    expected = {canonical_name(name): status for name, status in config.expected.items()}
    mismatches = {
        name: {"expected": status, "found": statuses.get(name)}
        for name, status in expected.items()
        if statuses.get(name) != status
    }
    if config.match == "exact":
        mismatches |= {
            name: {"expected": None, "found": status}
            for name, status in statuses.items()
            if name not in expected
        }
    timed_out = result.return_code == TIMED_OUT
    counts = Counter(statuses.values())
    return Evaluation(
        outcome_reward=0.0 if mismatches or timed_out else 1.0,
        report={
            "counts": {
                status: counts[status] for status in ("PASSED", "FAILED", "ERROR", "SKIPPED")
            },
            "mismatches": dict(islice(mismatches.items(), MAX_MISMATCHES)),
            "more_mismatches": max(0, len(mismatches) - MAX_MISMATCHES),
            "skipped_lines": skipped_lines,
            "exit_code": result.return_code,
            "timed_out": timed_out,
            "output": OUTPUT_NAME,
        },
    )
