import os

import pytest
from hypothesis import settings

pytest_plugins = ["tests.integration.vllm_server"]

if "POLAR_REQUIRE" in os.environ:
    # Where a commit is judged, generated cases are the same each time: it must not fail for a case
    # that the one before it was spared.
    settings.load_profile("ci")
else:
    # How long a case takes is the machine's affair.
    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")

# The quick inner loop: `--hypothesis-profile=quick`.
settings.register_profile("quick", deadline=None, max_examples=15)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
