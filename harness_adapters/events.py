"""Reading how a harness ended: the last events of a JSON-lines stream, and the exit status."""

import json
from collections.abc import Collection
from typing import Any

from harness_adapters.base import HarnessEnd

REASON_LIMIT = 500
"""Characters of a harness's own words that a reason repeats."""


def last_event(stdout_tail: bytes, types: Collection[str]) -> dict[str, Any] | None:
    """The last line that is a JSON object whose `type` is one of `types`.

    The first line of a tail may be cut and anything may have been printed between the events, so
    what is no JSON object is passed over.
    """
    for line in reversed(stdout_tail.splitlines()):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and event.get("type") in types:
            return event
    return None


def by_status(
    harness: str, return_code: int | None, stderr_tail: bytes, heard: str = ""
) -> HarnessEnd:
    """Judge by the exit status alone; `heard` is the harness's explanation, else stderr's last line."""
    if return_code == 0:
        return HarnessEnd(outcome="completed", return_code=return_code)
    if return_code is None:
        how = f"{harness} ended without an exit status"
    elif return_code < 0:
        how = f"{harness} was ended by signal {-return_code}"
    elif return_code > 128:
        how = f"{harness} ended with status {return_code} (signal {return_code - 128})"
    elif return_code == 127:
        how = f"{harness} ended with status 127: a command was not found"
    else:
        how = f"{harness} ended with status {return_code}"
    return HarnessEnd(
        outcome="failed",
        reason=quote(how, heard or last_line(stderr_tail)),
        return_code=return_code,
    )


def quote(how: str, heard: str) -> str:
    """`how: heard`, on one line and of bounded length."""
    words = " ".join(heard.split())
    if len(words) > REASON_LIMIT:
        words = words[:REASON_LIMIT] + "..."
    return f"{how}: {words}" if words else how


def last_line(tail: bytes) -> str:
    lines = tail.decode("utf-8", "replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
