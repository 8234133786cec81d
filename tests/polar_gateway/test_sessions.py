from pathlib import Path

import pytest

from polar_gateway.capture.session import SessionCapture
from polar_gateway.lifecycle import IllegalTransitionError, Stage
from polar_gateway.sessions import Session, Sessions, new_key


def session(tmp_path: Path, session_id: str = "s1", key: str = "k1") -> Session:
    capture = SessionCapture(
        session_id=session_id, task_id="t1", journal_path=tmp_path / f"{session_id}.journal"
    )
    return Session(
        session_id=session_id, task_id="t1", attempt_id="att-1", key=key, capture=capture
    )


def test_a_key_opens_its_session_and_no_other(tmp_path: Path) -> None:
    sessions = Sessions()
    first, second = session(tmp_path, "s1", "k1"), session(tmp_path, "s2", "k2")
    sessions.add(first)
    sessions.add(second)
    assert sessions.by_key("k1") is first
    assert sessions.by_key("k2") is second
    for wrong in ("", "s1", "k", "K1", "k1 ", "\udcff"):
        assert sessions.by_key(wrong) is None


def test_a_removed_session_is_opened_by_nothing(tmp_path: Path) -> None:
    sessions = Sessions()
    only = session(tmp_path)
    sessions.add(only)
    sessions.remove(only)
    assert sessions.by_key("k1") is None
    assert sessions.get("s1") is None
    assert len(sessions) == 0


def test_an_id_can_be_live_only_once(tmp_path: Path) -> None:
    sessions = Sessions()
    sessions.add(session(tmp_path / "first"))
    with pytest.raises(KeyError, match="s1 is live already"):
        sessions.add(session(tmp_path / "second", key="k9"))


def test_keys_are_random_and_long() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert min(map(len, keys)) > 40


def test_a_session_moves_only_along_the_table(tmp_path: Path) -> None:
    one = session(tmp_path)
    one.advance(Stage.INIT)
    assert one.status == "INITIALIZING"
    with pytest.raises(IllegalTransitionError):
        one.advance(Stage.EVALUATING)
