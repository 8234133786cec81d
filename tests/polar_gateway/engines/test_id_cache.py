import json
from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders.records import TokenNode
from polar_gateway.engines.base import EngineError
from polar_gateway.engines.id_cache import IdCache, PromptReader, Spelling

Numbers = st.lists(st.integers(0, 120), max_size=5)


def spelled(ids: list[int], spaces: bool = False) -> bytes:
    return json.dumps(ids, separators=(", " if spaces else ",", ":")).encode()


def call(prompt: list[int], sampled: list[int], completion_id: str = "one") -> TokenNode:
    return TokenNode(
        completion_id=completion_id, tail=array("i", prompt), sampled_ids=array("i", sampled)
    )


def remembered(cache: IdCache, text: bytes, sampled: list[int], completion_id: str = "one") -> None:
    reader = PromptReader(cache, completion_id, None)
    reader.read(msgspec.Raw(text))
    reader.remember(array("i", sampled))


def read(cache: IdCache, text: bytes, after: TokenNode | None) -> list[int]:
    reader = PromptReader(cache, "two", after)
    reader.read(msgspec.Raw(text))
    assert reader.ids is not None
    return reader.ids.tolist()


@given(Numbers, Numbers, Numbers, st.sampled_from(["one", "none", None]), st.booleans())
def test_the_ids_are_those_of_the_text_whatever_came_before(
    prompt: list[int], sampled: list[int], more: list[int], name: str | None, spaces: bool
) -> None:
    cache = IdCache()
    remembered(cache, spelled(prompt), sampled)
    after = None if name is None else call(prompt, sampled, name)
    for ids in (prompt, prompt + sampled, prompt + sampled + more, prompt + more, more):
        assert read(cache, spelled(ids, spaces), after) == ids


@given(st.lists(st.tuples(Numbers, Numbers), min_size=1, max_size=6))
def test_a_conversation_is_read_turn_by_turn(turns: list[tuple[list[int], list[int]]]) -> None:
    cache = IdCache()
    after, context = None, [7]
    for number, (new, sampled) in enumerate(turns):
        prompt = context + new
        reader = PromptReader(cache, str(number), after)
        reader.read(msgspec.Raw(spelled(prompt)))
        assert reader.ids == array("i", prompt)
        reader.remember(array("i", sampled))
        after, context = call(prompt, sampled, str(number)), prompt + sampled


def test_a_number_that_goes_on_is_not_taken_for_the_earlier_one() -> None:
    cache = IdCache()
    remembered(cache, b"[1,2]", [3])
    assert read(cache, b"[1,2,34]", call([1, 2], [3])) == [1, 2, 34]


def test_only_what_follows_the_earlier_context_is_read() -> None:
    cache = IdCache()
    # The text says 7 where the record says 1: what comes back shows which of the two was used.
    remembered(cache, b"[7,7]", [2])
    record = call([1, 1], [2])
    assert read(cache, b"[7,7,2,5]", record) == [1, 1, 2, 5]
    assert read(cache, b"[7,7,2]", record) == [1, 1, 2]
    assert read(cache, b"[7,7,2,5]", None) == [7, 7, 2, 5]
    assert record.tail == array("i", [1, 1]), "what is read is a copy"


@pytest.mark.parametrize(
    "text", [b"[1,2,x]", b"[1,2,3.5]", b"[1,2,3", b"{}", b'["1"]', b"[1,2,99999999999]"]
)
def test_what_is_no_array_of_ids_is_an_error(text: bytes) -> None:
    cache = IdCache()
    remembered(cache, b"[1]", [2])
    for after in (call([1], [2]), None):
        with pytest.raises(EngineError, match="cannot be read"):
            read(cache, text, after)


def test_what_the_engine_does_not_say_is_not_there() -> None:
    for text in (b"", b"null"):
        reader = PromptReader(IdCache(), "one", None)
        reader.read(msgspec.Raw(text))
        reader.remember(array("i", [1]))
        assert reader.ids is None


@pytest.mark.parametrize("echo", [b"[4,5,6]", b"[4,5,7]", b"[4, 5, 6]"])
def test_an_echo_of_what_was_sent_is_what_was_sent(echo: bytes) -> None:
    sent = array("i", [4, 5, 6])
    reader = PromptReader(IdCache(), "one", None, sent=sent)
    reader.read(msgspec.Raw(echo))
    assert (reader.ids is sent) == (echo == b"[4,5,6]")
    assert reader.ids == array("i", json.loads(echo))


@pytest.mark.parametrize(
    ("rendering", "taken"),
    [
        (b"[1,1,2,5]", True),
        (b"[1,1,2]", False),
        (b"[1,1,3,5]", False),
        (b"[1,1,2,6]", False),
        (b"[1,1,25]", False),
        (b"[1,1", False),
        (b"", False),
    ],
)
def test_a_rendering_spells_what_is_sent_where_it_is_known_to(
    rendering: bytes, taken: bool
) -> None:
    cache = IdCache()
    remembered(cache, b"[1,1]", [2])
    sent = array("i", [1, 1, 2, 5])
    reader = PromptReader(cache, "two", call([1, 1], [2]), sent, rendering)
    assert reader.sent_text == b"[1,1,2,5]"
    assert (reader.sent_text is rendering) == taken
    reader.read(msgspec.Raw(b"[1,1,2,5]"))
    assert reader.ids is sent
    reader.remember(array("i", [7]))
    third = PromptReader(
        cache,
        "three",
        call([1, 1, 2, 5], [7], "two"),
        array("i", [1, 1, 2, 5, 7, 8]),
        b"[1,1,2,5,7,8]",
    )
    third.read(msgspec.Raw(b"[1,1,2,5,7,9]"))
    assert third.ids == array("i", [1, 1, 2, 5, 7, 9]), "what was read is what counts"


def test_the_oldest_contexts_make_room() -> None:
    cache = IdCache(max_entries=2)
    for name in ("one", "two", "one", "three"):
        cache.keep(name, Spelling(1, b""))
    assert [name for name in ("one", "two", "three") if cache.get(name)] == ["one", "three"]
