"""How many cases a property is tried on."""

import math

from hypothesis import settings

USUAL = 100


def examples(usually: int) -> settings:
    """So many where the profile tries the usual hundred, and in proportion where it tries fewer."""
    return settings(max_examples=math.ceil(usually * settings().max_examples / USUAL))
