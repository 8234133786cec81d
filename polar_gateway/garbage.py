"""How a process that serves many sessions looks after its memory."""

import ctypes
import gc
import sys

THRESHOLDS = (50_000, 10, 100)
"""Of allocations, and of collections of the younger generation; Python's own are 700, 10, 10."""


def collect_rarely() -> None:
    """Look for cycles less often than Python does by default.

    A request's history is some thousand objects and the sessions' records are a multiple of that,
    all of them without cycles: to walk through them on every call is a tenth of what the call
    costs. What the process was started with is taken out of the search altogether.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


LARGE = 256 << 10
"""Bytes of a block that goes back to the system as soon as it is free. Half of it would catch the
buffers of connections, too, which cost more to get anew than they are worth."""

_M_MMAP_THRESHOLD = -3


def give_large_blocks_back() -> None:
    """Keep what is large and short-lived apart from what stays, where the C library can be told so.

    A long session's requests and replies are blocks of a megabyte that live for a second, its record
    many small ones that live for hours. Left alone, glibc soon puts both into one heap, in which the
    small ones come to lie where the large ones were, and half of it stays empty.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, LARGE)
