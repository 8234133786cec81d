from pathlib import Path
from typing import Any

import pytest

from polar_gateway.capture.answers import AnswerCache
from polar_gateway.capture.journal import CaptureError, Completed, Journal, Opened, Place


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def written(path: Path, *texts: str) -> tuple[Journal, list[Place]]:
    journal = Journal(path)
    return journal, [
        journal.append(Completed(completion_id=f"msg_{text}", response_message=answer(text)))
        for text in texts
    ]


def test_an_answer_is_read_from_the_journal_once(tmp_path: Path) -> None:
    journal, [place] = written(tmp_path / "j", "a")
    cache = AnswerCache()
    assert cache.answer(journal, place) == answer("a")
    journal.close()
    assert cache.answer(journal, place) == answer("a")


def test_what_is_changed_of_an_answer_stays_with_who_changed_it(tmp_path: Path) -> None:
    journal, [place] = written(tmp_path / "j", "a")
    cache = AnswerCache()
    cache.answer(journal, place)["content"] = "b"
    cache.answer(journal, place)["content"] = "c"
    assert cache.answer(journal, place) == answer("a")
    journal.close()


def test_those_that_were_asked_for_longest_ago_make_room(tmp_path: Path) -> None:
    journal, places = written(tmp_path / "j", "a", "b", "c")
    cache = AnswerCache(max_bytes=60)  # two of them
    for place in (*places[:2], places[0], places[2]):
        cache.answer(journal, place)
    journal.close()
    assert cache.answer(journal, places[0]) == answer("a")
    assert cache.answer(journal, places[2]) == answer("c")
    with pytest.raises(CaptureError):
        cache.answer(journal, places[1])


def test_a_session_that_has_ended_leaves_nothing(tmp_path: Path) -> None:
    ended, [place] = written(tmp_path / "1", "a")
    other, [elsewhere] = written(tmp_path / "2", "b")
    cache = AnswerCache()
    assert (cache.answer(ended, place), cache.answer(other, elsewhere)) == (
        answer("a"),
        answer("b"),
    )
    ended.close()
    other.close()
    cache.forget(ended)
    assert cache.answer(other, elsewhere) == answer("b")
    with pytest.raises(CaptureError):
        cache.answer(ended, place)


def test_a_place_that_holds_no_answer_is_an_error_that_names_the_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    place = journal.append(Opened(session_id="s1"))
    with pytest.raises(CaptureError, match=r"the journal .*/j holds no completion at byte 16"):
        AnswerCache().answer(journal, place)
    journal.close()
