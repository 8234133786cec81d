"""Errors are named after the boundary that broke, classified here, and recorded once, as data.

A failing session is data (`Failure`); a failing service is an exception. Plug-ins raise plain
exceptions; `boundary` names the place where they crossed into our code.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import msgspec

Boundary = Literal[
    "runtime",
    "prepare",
    "harness",
    "engine",
    "capture",
    "builder",
    "evaluator",
    "delivery",
    "cancelled",
    "lost_node",
]

INFRA: frozenset[str] = frozenset(
    {"runtime", "prepare", "capture", "evaluator", "delivery", "lost_node"}
)
"""Boundaries whose failure says nothing about the agent, so that another attempt makes sense."""


class Failure(msgspec.Struct, kw_only=True, frozen=True):
    """One ending as data. `detail` is the tail of what was said (stderr, an engine's answer)."""

    boundary: Boundary
    message: str
    infra: bool = False
    """Worth another attempt: the infrastructure failed, not the agent."""
    detail: str = ""
    code: str = ""
    """For programs, where the boundary alone does not say enough: context_overflow."""


class BoundaryError(Exception):
    """Something behind a named boundary broke; carries what becomes the session's `Failure`."""

    def __init__(
        self, boundary: Boundary, message: str, *, detail: str = "", infra: bool | None = None
    ) -> None:
        super().__init__(message)
        self.failure = Failure(
            boundary=boundary,
            message=message,
            infra=boundary in INFRA if infra is None else infra,
            detail=detail[-8192:],
        )


@contextmanager
def boundary(name: Boundary, what: str) -> Iterator[None]:
    """Classify whatever is raised inside as a failure of `name`, unless it already has a name."""
    try:
        yield
    except BoundaryError:
        raise
    except Exception as error:
        said = str(error) or type(error).__name__
        raise BoundaryError(name, f"{what}: {said}") from error
