import json
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_gateway.engines.base import EngineError
from polar_gateway.engines.rendering import JsonRendering

Numbers = st.lists(st.integers(0, 120), max_size=6)


def rendering(ids: list[int]) -> JsonRendering:
    return JsonRendering(json.dumps(ids, separators=(",", ":")).encode())


@given(Numbers, Numbers, st.integers(0, 7))
def test_what_follows_is_what_the_ids_say(earlier: list[int], more: list[int], less: int) -> None:
    kept = earlier[: max(0, len(earlier) - less)]
    before = rendering(earlier)
    for whole in (kept + more, earlier + more, more):
        begins = whole[: len(kept)] == kept
        expected = array("i", whole[len(kept) :]) if begins else None
        after = rendering(whole)
        assert after.after(before, less=less) == expected
        assert len(after) == len(whole)


@given(Numbers)
def test_the_last_ids_are_read_without_those_before_them(ids: list[int]) -> None:
    whole = rendering(ids)
    assert len(whole) == len(ids)
    for count in range(len(ids) + 1):
        assert whole.last(count).tolist() == ids[len(ids) - count :]


def test_a_number_that_goes_on_is_another() -> None:
    assert rendering([1, 23]).after(rendering([1, 2])) is None
    assert rendering([1, 2, 3]).after(rendering([1, 2])) == array("i", [3])


def test_only_what_follows_is_read() -> None:
    text = JsonRendering(b"[1,x,3]")
    assert text.after(JsonRendering(b"[1,x]")) == array("i", [3])
    with pytest.raises(EngineError, match="cannot be read"):
        text.after(JsonRendering(b"[1]"))
    with pytest.raises(EngineError, match="cannot be read"):
        _ = text.ids
