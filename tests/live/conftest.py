import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The test that waits longest begins first, so that the others run beside it."""
    items.sort(key=lambda item: "150_silent_seconds" not in item.nodeid)
