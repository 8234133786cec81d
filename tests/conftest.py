import pytest

pytest_plugins = ["tests.integration.vllm_server"]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
