"""Provider wire formats, pure: which dialect a request is in, and whose key it carries.

A dialect is a module with the functions of `turn.Dialect`; a new one is a module and an entry in
`DIALECTS`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

# Spelled twice: mypy takes a package that imports its own modules for one that re-exports them.
from polar_gateway.dialects import anthropic as anthropic
from polar_gateway.dialects import chat as chat
from polar_gateway.dialects import compaction as compaction
from polar_gateway.dialects import google as google
from polar_gateway.dialects import responses as responses
from polar_gateway.dialects.turn import Dialect, RouteKind

DIALECTS: tuple[Dialect, ...] = (anthropic, google, responses, chat)
"""One a wire format."""

_ENDPOINTS: tuple[Dialect, ...] = (compaction, *DIALECTS)
"""In the order in which they are asked whether a request is theirs: `compaction` is an endpoint of
responses whose answers have another shape."""


class Route(NamedTuple):
    """What a request on the model listener is."""

    dialect: Dialect
    kind: RouteKind
    fields: dict[str, Any]
    """What the URL says that other dialects say in the body; update the body with it."""


def route(
    method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str]
) -> Route | None:
    """Method, path, query and lower-case headers to a dialect and what it is asked; None is a 404.

    A path counts from its end, so that any prefix (a base URL with or without `/v1`, a path before
    it) is accepted.
    """
    for dialect in _ENDPOINTS:
        match = dialect.match(method, path, query, headers)
        if match is not None:
            return Route(dialect, match.kind, match.fields)
    return None


def api_key(headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
    """The key of a request, wherever its provider's clients put it; None when there is none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key") or headers.get("x-goog-api-key") or query.get("key") or None
