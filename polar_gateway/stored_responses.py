"""The responses that a session asked to be stored, and what may be asked about them. Pure.

A response keeps its own new input and the id of the one it goes on from, so that a conversation
costs its length and not the square of it. What is forgotten (the oldest, when there are too many
or too large ones) or deleted can no longer be continued: a chain with a gap would be another
conversation.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from polar_gateway.dialects.openai import error_body
from polar_gateway.dialects.sse import json_bytes
from polar_gateway.dialects.turn import ErrorKind
from polar_gateway.request_body import RefusedError, invalid, too_large

MOST = 256
MAX_BYTES = 16 << 20
"""Of all that one session stores."""

_ROUTE = re.compile(r"/responses/([^/]+)(/input_items|/cancel)?/?$")


class Said(NamedTuple):
    """An answer about a stored response."""

    status: int
    body: bytes


class _Answered(msgspec.Struct):
    """What is read of a response."""

    id: str
    object: str
    output: list[dict[str, Any]]


class _Stored(msgspec.Struct):
    previous: str | None
    input: bytes
    """A list of items, as JSON."""
    response: bytes
    item_ids: list[str]

    @property
    def size(self) -> int:
        return len(self.input) + len(self.response)

    def items(self) -> list[dict[str, Any]]:
        """Input and output, in their order."""
        given: list[dict[str, Any]] = msgspec.json.decode(self.input)
        return given + _read(self.response).output


class StoredResponses:
    """Of one session."""

    def __init__(self, most: int = MOST, max_bytes: int = MAX_BYTES) -> None:
        self._most = most
        self._max_bytes = max_bytes
        self._stored: dict[str, _Stored] = {}
        """By id, the oldest first."""
        self._bytes = 0
        self._owners: dict[str, str] = {}
        """Id of an item -> the response that holds it."""

    def expand(self, body: dict[str, Any]) -> dict[str, Any]:
        """The body with all that it refers to in its `input`; the body itself is left as it is.

        `previous_response_id` stays, as the answer names it again. Instructions of earlier
        responses are not carried over. Raises RefusedError when something is not stored.
        """
        previous = body.get("previous_response_id")
        if previous is None and not _refers(body):
            return body
        if not isinstance(previous, str | None):
            raise RefusedError(invalid("previous_response_id: must be a string"))
        items = self._history(previous) + _items(body.get("input"))
        return {**body, "input": self._resolved(items)}

    @staticmethod
    def wanted(body: dict[str, Any]) -> bool:
        """Whether the answer to this request is to be stored: yes, unless it says no."""
        return body.get("store") is not False

    def keep(self, body: dict[str, Any], response: bytes) -> None:
        """Store a whole response under its id if that is wanted; `body` as it came, not expanded."""
        if not self.wanted(body):
            return
        answered = _read(response)
        if answered.object != "response":
            return
        given = _items(body.get("input"))
        stored = _Stored(
            previous=body.get("previous_response_id"),
            input=json_bytes(_named(given, answered.id)),
            response=response,
            item_ids=[
                str(item["id"])
                for item in given + answered.output
                if item.get("id") and not _is_reference(item)
            ],
        )
        if stored.size > self._max_bytes:
            return
        if answered.id in self._stored:
            self._forget(answered.id)
        self._stored[answered.id] = stored
        self._bytes += stored.size
        self._owners.update(dict.fromkeys(stored.item_ids, answered.id))
        while len(self._stored) > self._most or self._bytes > self._max_bytes:
            self._forget(next(iter(self._stored)))

    def answer(self, method: str, path: str, query: Mapping[str, str]) -> Said:
        """The answer to a `stored` request: a response, its input, its deletion, its cancelling."""
        found = _ROUTE.search(path)
        response_id, what = found.groups() if found else ("", None)
        stored = self._stored.get(response_id)
        if stored is None:
            message = f"Response with id '{response_id}' not found."
            return _refusal(ErrorKind(status=404, code="not_found", message=message))
        if what == "/cancel":
            return _refusal(invalid("Cannot cancel a synchronous response."))
        if what == "/input_items":
            try:
                return Said(200, json_bytes(_page(self._resolved(self._input(stored)), query)))
            except RefusedError as error:
                return _refusal(error.kind)
        if method == "DELETE":
            self._forget(response_id)
            deleted = {"id": response_id, "object": "response", "deleted": True}
            return Said(200, json_bytes(deleted))
        return Said(200, stored.response)

    def _input(self, stored: _Stored) -> list[dict[str, Any]]:
        own: list[dict[str, Any]] = msgspec.json.decode(stored.input)
        return self._history(stored.previous) + own

    def _history(self, response_id: str | None) -> list[dict[str, Any]]:
        """All items up to the response's last, from the first of its chain on."""
        chain = list(self._chain(response_id))
        return [item for stored in reversed(chain) for item in stored.items()]

    def _chain(self, response_id: str | None) -> Iterator[_Stored]:
        while response_id is not None:
            stored = self._stored.get(response_id)
            if stored is None:
                message = f"Previous response with id '{response_id}' not found."
                raise RefusedError(
                    ErrorKind(
                        status=400,
                        code="not_found",
                        message=message,
                        param="previous_response_id",
                    )
                )
            yield stored
            response_id = stored.previous

    def _resolved(self, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The items with what they refer to in place of references. Raises RefusedError when one
        is not stored, or when they come to more than may be stored: a reference is short."""
        found: dict[str, tuple[dict[str, Any], int]] = {}
        size = 0
        resolved = []
        for item in items:
            if _is_reference(item):
                item_id = str(item.get("id"))
                if item_id not in found:
                    found |= self._beside(item_id)
                item, length = found[item_id]
                size += length
                if size > self._max_bytes:
                    raise RefusedError(too_large("refers to too much"))
            resolved.append(item)
        return resolved

    def _beside(self, item_id: str) -> dict[str, tuple[dict[str, Any], int]]:
        """The item and all that its response holds, by id, each with its length."""
        owner = self._stored.get(self._owners.get(item_id, ""))
        if owner is None:
            message = f"Item with id '{item_id}' not found."
            kind = ErrorKind(status=404, code="not_found", message=message, param="input")
            raise RefusedError(kind)
        return {
            str(item["id"]): (item, len(json_bytes(item)))
            for item in owner.items()
            if item.get("id") and not _is_reference(item)
        }

    def _forget(self, response_id: str) -> None:
        stored = self._stored.pop(response_id)
        self._bytes -= stored.size
        for item_id in stored.item_ids:
            if self._owners.get(item_id) == response_id:
                del self._owners[item_id]


def _read(response: bytes) -> _Answered:
    return msgspec.json.decode(response, type=_Answered)


def _items(given: Any) -> list[dict[str, Any]]:
    """A request's input as items. Raises RefusedError."""
    if isinstance(given, str):
        content = [{"type": "input_text", "text": given}]
        return [{"type": "message", "role": "user", "content": content}]
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise RefusedError(invalid("input: must be a list of objects"))
    return given


def _named(items: list[dict[str, Any]], response_id: str) -> list[dict[str, Any]]:
    """The items with an id each, in a form that no item of an answer has."""
    return [
        item if item.get("id") else {**item, "id": f"in_{response_id}_{index}"}
        for index, item in enumerate(items)
    ]


def _is_reference(item: dict[str, Any]) -> bool:
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "id" in item and "role" not in item)


def _refers(body: dict[str, Any]) -> bool:
    given = body.get("input")
    return isinstance(given, list) and any(
        isinstance(item, dict) and _is_reference(item) for item in given
    )


def _page(items: list[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """A page of a list, newest first unless asked otherwise. Raises RefusedError."""
    limit, after, order = query.get("limit", "20"), query.get("after"), query.get("order", "desc")
    if not limit.isdecimal() or not 1 <= int(limit) <= 100:
        raise RefusedError(invalid("limit: must be an integer from 1 to 100"))
    if order not in ("asc", "desc"):
        raise RefusedError(invalid("order: must be asc or desc"))
    ordered = items if order == "asc" else items[::-1]
    ids = [item.get("id") for item in ordered]
    if after is not None and after not in ids:
        raise RefusedError(invalid(f"after: there is no item with id '{after}'"))
    start = 0 if after is None else ids.index(after) + 1
    page = ordered[start : start + int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0].get("id") if page else None,
        "last_id": page[-1].get("id") if page else None,
        "has_more": start + len(page) < len(ordered),
    }


def _refusal(kind: ErrorKind) -> Said:
    return Said(kind.status, error_body(kind))
