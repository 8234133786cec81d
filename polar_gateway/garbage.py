"""How often a node looks for garbage."""

import gc

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
