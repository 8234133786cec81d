"""How many cases a property is tried on."""

from hypothesis import settings


def examples(most: int) -> settings:
    """At most so many, and no more than the chosen profile allows: the quick loop tries fewer."""
    return settings(max_examples=min(most, settings().max_examples))
