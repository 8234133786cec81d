"""Requests with something in them that should not be there, as a hostile harness would send them."""

import copy
from typing import Any

from hypothesis import strategies as st

ROLES = {"system", "user", "assistant", "tool"}

_OTHERS: list[Any] = [None, True, 0, -1.5, "", "text", [], {}, [[]], [{}], {"type": "text"}]


def spoiled(data: st.DataObject, body: dict[str, Any]) -> dict[str, Any]:
    """The body with up to three of its values, at any depth, replaced by others or taken away."""
    body = copy.deepcopy(body)
    for _ in range(data.draw(st.integers(1, 3))):
        inside: Any = body
        while True:
            keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
            key = data.draw(st.sampled_from(keys))
            deeper = isinstance(inside[key], dict | list) and inside[key]
            if not deeper or data.draw(st.integers(0, 3)) == 0:
                break
            inside = inside[key]
        if data.draw(st.booleans()):
            inside[key] = copy.deepcopy(data.draw(st.sampled_from(_OTHERS)))
        else:
            del inside[key]
        if not body:
            break
    return body
