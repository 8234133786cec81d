import os
import subprocess
from pathlib import Path

import pytest

from harness_adapters.shell import Shell
from tests.harness_adapters.samples import CONTEXT, agent, context

NASTY = 'It\'s "$HOME" and `id`; $(id) \\ *\nsecond line {instruction}'


def run(
    command: str, tmp_path: Path, instruction: str = NASTY, file: str = "the instruction.md"
) -> str:
    """Run the plan of a shell harness as a gateway would; what it printed."""
    path = tmp_path / file
    path.write_text(instruction)
    where = context(instruction=instruction, instruction_path=str(path), workdir=str(tmp_path))
    plan = Shell().plan(agent("shell", custom_shell={"command": command}), where)
    done = subprocess.run(
        ["bash", "-c", plan.command],
        cwd=plan.cwd,
        env={"PATH": os.environ["PATH"], **plan.env},
        input=instruction,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_the_placeholder_becomes_one_word_whatever_the_instruction_holds(tmp_path: Path) -> None:
    assert run("printf '<%s>' {instruction} end", tmp_path) == f"<{NASTY}><end>"


def test_the_placeholder_works_inside_a_nested_shell(tmp_path: Path) -> None:
    nested = "bash -c 'printf \"%s\" {instruction}'"
    assert run(nested, tmp_path, file="instruction.md") == NASTY


def test_the_instruction_also_comes_as_a_file_and_on_stdin(tmp_path: Path) -> None:
    assert run('cat "$POLAR_INSTRUCTION_FILE"; cat', tmp_path) == NASTY * 2


def test_a_huge_instruction_arrives_whole(tmp_path: Path) -> None:
    huge = "x" * 1_000_000
    assert run("printf '%s' {instruction} | wc -c", tmp_path, huge).strip() == "1000000"


def test_a_variable_of_that_name_is_left_to_the_shell(tmp_path: Path) -> None:
    assert run('instruction=mine; printf "%s" "${instruction}"', tmp_path) == "mine"


@pytest.mark.parametrize("command", ['agent "{instruction}"', "agent -p '{instruction}'"])
def test_quotes_around_the_placeholder_are_refused(command: str) -> None:
    with pytest.raises(ValueError, match=r"agent\.custom_shell\.command: .* without quotes"):
        Shell().plan(agent("shell", custom_shell={"command": command}), CONTEXT)


def test_environment_and_folder_come_from_the_document_and_home_is_left_alone() -> None:
    spec = agent(
        "shell",
        custom_shell={"command": "true", "cwd": "/app", "env": {"A": "1", "B": "1"}},
        env={"B": "2"},
    )
    plan = Shell().plan(spec, CONTEXT)
    assert plan.cwd == "/app"
    assert plan.env == {
        "POLAR_INSTRUCTION_FILE": "/polar/session/instruction.md",
        "POLAR_MODEL_NAME": "Qwen/Qwen3.5-4B",
        "A": "1",
        "B": "2",
    }


def test_without_a_folder_of_its_own_it_runs_in_the_sessions() -> None:
    assert Shell().plan(agent("shell", custom_shell={"command": "true"}), CONTEXT).cwd == "/testbed"


def test_only_the_exit_status_decides() -> None:
    assert Shell().ended(0, b'{"type":"turn.failed"}', b"oops").outcome == "completed"
    end = Shell().ended(3, b"", b"warning\nno such model\n")
    assert (end.outcome, end.reason) == ("failed", "shell ended with status 3: no such model")
