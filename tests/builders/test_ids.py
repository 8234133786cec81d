from array import array

from hypothesis import given
from hypothesis import strategies as st

from builders.ids import common_end, common_start, difference

Few = st.lists(st.integers(0, 2), max_size=12)


@given(Few, Few)
def test_beginnings_and_ends_are_common_as_far_as_they_are_equal(
    a: list[int], b: list[int]
) -> None:
    one, other = array("i", a), array("i", b)
    equal = [x == y for x, y in zip(a, b, strict=False)] + [False]
    from_behind = [x == y for x, y in zip(a[::-1], b[::-1], strict=False)] + [False]
    assert common_start(one, other) == equal.index(False)
    assert common_end(one, other) == from_behind.index(False)


@given(Few, Few)
def test_what_differs_stands_between_what_does_not(a: list[int], b: list[int]) -> None:
    one, other = array("i", a), array("i", b)
    first, second = difference(one, other)
    start = common_start(one, other)
    behind = len(one) - start - len(first)
    assert one[:start] + first + one[len(one) - behind :] == one
    assert one[:start] + second + one[len(one) - behind :] == other
    assert (one == other) == (not first and not second)
