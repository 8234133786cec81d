"""Real parts that a test may need: absent means skipped, unless POLAR_REQUIRE names them."""

import os

import pytest


def require(part: str, available: bool, why: str) -> None:
    """Skip when `part` is not here; fail instead when POLAR_REQUIRE (comma separated) lists it."""
    if available:
        return
    if part in os.environ.get("POLAR_REQUIRE", "").split(","):
        pytest.fail(f"{part} is required here and missing: {why}")
    pytest.skip(f"needs {part}: {why}")
