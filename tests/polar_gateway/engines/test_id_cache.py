import json
from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_gateway.engines.id_cache import IdCache

Numbers = st.lists(st.integers(0, 120), max_size=5)


def spelled(ids: list[int], spaces: bool = False) -> bytes:
    return json.dumps(ids, separators=(", " if spaces else ",", ":")).encode()


def cache_with(prompt: list[int], sampled: list[int], *, max_bytes: int = 1 << 20) -> IdCache:
    cache = IdCache(max_bytes)
    cache.remember("one", spelled(prompt), array("i", prompt), array("i", sampled))
    return cache


@given(Numbers, Numbers, Numbers, st.sampled_from(["one", "none", None]), st.booleans())
def test_the_ids_are_those_of_the_text_whatever_came_before(
    prompt: list[int], sampled: list[int], more: list[int], after: str | None, spaces: bool
) -> None:
    cache = cache_with(prompt, sampled)
    for ids in (prompt, prompt + sampled, prompt + sampled + more, prompt + more, more):
        assert list(cache.decode(spelled(ids, spaces), after)) == ids


def test_a_number_that_goes_on_is_not_taken_for_the_earlier_one() -> None:
    assert list(cache_with([1, 2], [3]).decode(b"[1,2,34]", "one")) == [1, 2, 34]


def test_only_what_follows_the_earlier_context_is_read() -> None:
    cache = IdCache()
    # The text says 7 where the ids say 1: what comes back shows which of the two was used.
    cache.remember("one", b"[7,7]", array("i", [1, 1]), array("i", [2]))
    assert list(cache.decode(b"[7,7,2,5]", "one")) == [1, 1, 2, 5]
    assert list(cache.decode(b"[7,7,2]", "one")) == [1, 1, 2]
    assert list(cache.decode(b"[7,7,2,5]", None)) == [7, 7, 2, 5]


@pytest.mark.parametrize("text", [b"[1,2,x]", b"[1,2,3.5]", b"[1,2,3", b"{}", b'["1"]'])
def test_what_is_no_array_of_integers_is_an_error(text: bytes) -> None:
    cache = cache_with([1], [2])
    for after in ("one", None):
        with pytest.raises(msgspec.DecodeError):
            cache.decode(text, after)


def test_the_oldest_contexts_make_room() -> None:
    prompt = list(range(100))
    cache = cache_with(prompt, [1], max_bytes=2000)
    for name in ("two", "three"):
        cache.remember(name, b"[7]" + b" " * 290, array("i", prompt), array("i", [1]))
        cache.remember(name, b"[7]" + b" " * 290, array("i", prompt), array("i", [1]))
    assert list(cache.decode(spelled([*prompt, 1, 5]), "one")) == [*prompt, 1, 5]
    assert set(cache._contexts) == {"two", "three"}
