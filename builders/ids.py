"""Token ids compared: what two runs of them have in common at their beginnings and ends."""

from builders.records import Ids


def common_start(a: Ids, b: Ids) -> int:
    """Length of the common beginning; by halving, since comparing slices is fast."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_end(a: Ids, b: Ids) -> int:
    """Length of the common end."""
    return common_start(a[::-1], b[::-1])


def difference(a: Ids, b: Ids) -> tuple[Ids, Ids]:
    """What is left of each without their common beginning and then their common end."""
    start = common_start(a, b)
    a, b = a[start:], b[start:]
    end = common_end(a, b)
    return a[: len(a) - end], b[: len(b) - end]
