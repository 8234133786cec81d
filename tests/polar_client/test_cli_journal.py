import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from builders.records import Trajectory
from polar_client.cli.journal import HEADINGS, journal
from tests.polar_gateway.capture.test_session import END, Stream, capture_in, reply, start, user

MAIN = "from polar_client.cli import main; main()"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Two turns of a conversation, and a third that is not finished."""
    capture = capture_in(tmp_path)
    first = reply([1, 2], [3, 4, END])
    start(capture, [user("hi")]).close(first, {})
    on = [user("hi"), first.message, user("go on")]
    second = reply([1, 2, 3, 4, END, 9], [5, END])
    start(capture, on).close(second, {})
    third = start(capture, [*on, second.message, user("more")])
    third.follow(Stream([1, 2, 3, 4, END, 9, 5, END, 8]).say(6), {})
    third.append()
    capture.close()
    return tmp_path / "journal"


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(journal, [str(each) for each in arguments])


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def damaged(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_a_whole_journal_is_said_to_be_whole(file: Path) -> None:
    result = run("verify", file)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{file}: whole; 7 records, 2 calls to the end\n"


def test_a_journal_that_is_not_whole_is_status_1_and_words(file: Path) -> None:
    cut_short(file)
    result = run("verify", file)
    assert result.exit_code == 1
    assert result.stdout == f"{file}: not whole; 6 records, 2 calls to the end\n"
    assert "the last record is cut off" in result.stderr
    damaged(file)
    result = run("verify", file)
    assert result.exit_code == 1
    assert "is not what was written, at byte" in result.stderr


def test_the_calls_are_shown_in_order_with_what_they_go_on_from(file: Path) -> None:
    result = run("show", file)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "session s1"
    [heading] = [number for number, line in enumerate(lines) if line.startswith("#")]
    assert lines[heading].split() == " ".join(HEADINGS).split()
    rows = [line.split() for line in lines[heading + 1 :]]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert rows[0][2:] == ["turn", "messages", "12", "2", "2", "3", "stop"]
    assert rows[1][2:] == ["turn", "0", "exact", "messages", "12", "6", "1", "2", "stop"]
    assert rows[2][3:5] == ["1", "exact"]
    assert rows[2][-1] == "call_unfinished"


def test_the_records_are_shown_as_json_one_a_line(file: Path) -> None:
    result = run("show", "--json", file)
    records = [msgspec.json.decode(line) for line in result.stdout.splitlines()]
    assert [record["kind"] for record in records] == [
        "open",
        "intent",
        "completion",
        "intent",
        "completion",
        "intent",
        "append",
    ]
    assert records[2]["sampled"] == [3, 4, END]


def test_what_is_whole_of_a_broken_journal_is_shown_and_the_rest_is_told(file: Path) -> None:
    cut_short(file)
    result = run("show", "--json", file)
    assert (result.exit_code, len(result.stdout.splitlines())) == (0, 6)
    assert "the last record is cut off" in result.stderr


def test_traces_are_built_from_a_journal(file: Path, tmp_path: Path) -> None:
    result = run("build", file)
    assert result.exit_code == 0
    [trace] = msgspec.json.decode(result.stdout, type=Trajectory).traces
    assert trace.prompt_ids == [1, 2]
    assert trace.response_ids == [3, 4, END, 9, 5, END]
    assert trace.loss_mask == [1, 1, 1, 0, 1, 1]
    assert result.stderr == ""
    written = tmp_path / "trajectory.json"
    assert run("build", file, "-o", written).stdout == ""
    assert written.read_bytes() + b"\n" == result.stdout_bytes
    cut_short(file)
    problem, *findings = run("build", file).stderr.splitlines()
    assert problem.startswith(f"{file}: the last record is cut off")
    assert findings == [f"{file}: call_unfinished", f"{file}: journal_cut_short"]


@pytest.mark.parametrize("content", [b"", b"hello\n"])
@pytest.mark.parametrize("command", ["verify", "show", "build"])
def test_what_is_no_journal_is_refused(tmp_path: Path, command: str, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    result = run(command, tmp_path / "file")
    assert result.exit_code == 1
    assert f"{tmp_path / 'file'}: " in result.stderr
    assert "COMPLETED" not in result.stdout


def test_the_builder_and_its_configuration_can_be_chosen(file: Path) -> None:
    result = run("build", file, "--builder", "per_request", "--config", '{"max_tokens": 7}')
    first, second = msgspec.json.decode(result.stdout, type=Trajectory).traces
    assert (first.response_ids, second.response_ids) == ([3, 4, END], [5])
    assert run("build", file, "--config", "[]").exit_code == 2


def test_the_command_says_in_one_sentence_what_is_wrong(file: Path) -> None:
    def said(*arguments: Any) -> tuple[int, str]:
        command = [sys.executable, "-c", MAIN, "journal", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr.splitlines()[-1]

    status, sentence = said("build", file, "--builder", "nope")
    assert (status, sentence.split(",")[0]) == (
        1,
        "polar: builder nope: builder.strategy: 'nope' is none of lineage",
    )
    status, sentence = said("verify", file.with_name("gone"))
    assert status == 2
    assert "does not exist" in sentence
