"""Reading how a harness ended: the last events of a JSON-lines stream, and the exit status.

The harness is hostile and its events are its own words: nothing here raises, whatever they hold,
and a reason is always short, on one line and encodable.
"""

import json
import re
from collections.abc import Collection
from typing import Any

from harness_adapters.base import HarnessEnd

REASON_LIMIT = 500
"""Characters of a reason, most of which are a harness's own words."""

_UNFIT = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters, and lone surrogates (half an emoji that a harness cut), which have no UTF-8."""


def last_event(stdout_tail: bytes, types: Collection[str]) -> dict[str, Any] | None:
    """The last line that is a JSON object whose `type` is one of `types`.

    The first line of a tail may be cut and anything may have been printed between the events, so
    what is no JSON object is passed over.
    """
    for line in reversed(stdout_tail.splitlines()):
        event = decoded(line)
        if isinstance(event, dict) and text(event, "type") in types:
            return event
    return None


def decoded(document: bytes | str) -> Any:
    """The JSON value that `document` holds; None for what is no JSON or nested without end."""
    try:
        return json.loads(document)
    except (ValueError, RecursionError):
        return None


def text(value: Any, *path: str) -> str:
    """The string at `path` below a foreign JSON value; empty when there is none."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else ""


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


def turn_limit(return_code: int | None) -> HarnessEnd:
    """The end of a run that did as many turns as its task allowed."""
    return HarnessEnd(outcome="completed", reason="stopped at max_turns", return_code=return_code)


def quote(how: str, heard: str) -> str:
    """`how: heard`, on one line, of bounded length and fit for UTF-8."""
    words = " ".join((f"{how}: {heard}" if heard.strip() else how).split())
    if len(words) > REASON_LIMIT:
        words = words[: REASON_LIMIT - 3] + "..."
    return _UNFIT.sub("\ufffd", words)


def last_line(tail: bytes) -> str:
    lines = tail.decode("utf-8", "replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
