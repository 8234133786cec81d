import io
from pathlib import Path

import pytest

from polar_client.cli.tasks import TaskFileError, read_task


def test_a_task_may_be_json_or_yaml(tmp_path: Path) -> None:
    (tmp_path / "task.json").write_text('{"task_id": "t",\t"num_samples": 2}')
    (tmp_path / "task.yaml").write_text("task_id: t\nnum_samples: 2\n")
    expected = {"task_id": "t", "num_samples": 2}
    assert read_task(tmp_path / "task.json") == read_task(tmp_path / "task.yaml") == expected


def test_a_dash_reads_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("task_id: t"))
    assert read_task(Path("-")) == {"task_id": "t"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"task_id": }', "is neither JSON nor YAML: JSON is malformed"),
        ("task_id: [", "is neither JSON nor YAML: while parsing"),
        ("- task_id: t", "must hold one task, a mapping"),
        ("", "must hold one task, a mapping"),
        (b"\xff\xfe", "is not UTF-8 text"),
    ],
    ids=["broken-json", "broken-yaml", "a-list", "empty", "binary"],
)
def test_what_is_no_task_is_refused_with_the_name_of_its_file(
    tmp_path: Path, content: str | bytes, said: str
) -> None:
    file = tmp_path / "task.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TaskFileError, match=r"task\.json") as refused:
        read_task(file)
    assert said in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match=r"none\.json: No such file"):
        read_task(tmp_path / "none.json")
