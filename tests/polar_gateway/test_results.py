from pathlib import Path

import pytest

from polar_gateway.results import BLOCK_BYTES, ResultKeyError, ResultStore, splice, spliced_length


@pytest.fixture
def store(tmp_path: Path) -> ResultStore:
    return ResultStore(tmp_path)


def test_a_published_result_lies_where_third_party_scripts_look_for_it(
    store: ResultStore, tmp_path: Path
):
    key = store.key("task-1", "ses-1")
    store.publish(store.stage(b'{"a":1}'), key)
    assert (tmp_path / "task_task-1" / "ses_ses-1.json").read_bytes() == b'{"a":1}'
    assert store.path(key) == tmp_path / "task_task-1" / "ses_ses-1.json"


def test_a_staged_result_is_not_seen_before_it_is_published(store: ResultStore, tmp_path: Path):
    store.stage(b"{}")
    assert list(tmp_path.glob("task_*")) == []


def test_publishing_again_replaces(store: ResultStore):
    key = store.key("t", "s")
    store.publish(store.stage(b"old"), key)
    store.publish(store.stage(b"new"), key)
    assert store.path(key).read_bytes() == b"new"


def test_discarded_and_swept_results_leave_nothing(store: ResultStore, tmp_path: Path):
    kept = store.stage(b"published")
    store.publish(kept, store.unclaimed_key("s"))
    store.discard(kept)  # published already: nothing to do
    store.discard(store.stage(b"discarded"))
    store.stage(b"left by a crash")
    ResultStore(tmp_path).sweep()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["ses_s.json"]


@pytest.mark.parametrize("bad", ["", "..", "../x", "a/b", "a\n", "-a", "a" * 129, "ä", "a\0"])
def test_an_id_that_is_none_becomes_no_path(store: ResultStore, bad: str):
    for make in (
        lambda: store.key(bad, "s"),
        lambda: store.key("t", bad),
        lambda: store.unclaimed_key(bad),
        lambda: store.path(f"task_{bad}/ses_s.json"),
        lambda: store.path(f"task_t/ses_{bad}.json"),
    ):
        with pytest.raises(ResultKeyError):
            make()


@pytest.mark.parametrize("key", ["", "/etc/passwd", "incoming/x", "task_t/ses_s.json/..", "task_t"])
def test_only_keys_of_results_become_paths(store: ResultStore, key: str):
    with pytest.raises(ResultKeyError, match="is not the key of a result"):
        store.path(key)


def test_splicing_yields_all_parts_in_blocks(tmp_path: Path):
    small = tmp_path / "small"
    small.write_bytes(b"[1]")
    large = tmp_path / "large"
    large.write_bytes(b"x" * (3 * BLOCK_BYTES + 7))
    parts = [b'{"a":', small, b",", large, b"y" * BLOCK_BYTES, small, b"}"]
    blocks = list(splice(parts))
    whole = b"".join(blocks)
    assert whole == b'{"a":[1],' + large.read_bytes() + b"y" * BLOCK_BYTES + b"[1]}"
    assert spliced_length(parts) == len(whole)
    assert all(len(block) >= BLOCK_BYTES for block in blocks[:-1])


def test_small_parts_share_a_block():
    assert list(splice([b"a", b"b", b"c"])) == [b"abc"]
    assert list(splice([])) == []


def test_a_part_that_is_gone_is_noticed_before_anything_is_sent(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        spliced_length([b"{", tmp_path / "gone"])
