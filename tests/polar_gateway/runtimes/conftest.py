import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest

from polar_gateway.protocol import RuntimeSpec
from polar_gateway.runtimes.base import Runtime, RuntimeRequest
from polar_gateway.runtimes.docker import DockerRuntime
from polar_gateway.runtimes.local import LocalRuntime
from polar_gateway.testing import images
from tests.requirements import require

BACKENDS = [pytest.param("docker", marks=pytest.mark.docker), "local"]

OpenPlace = Callable[..., Awaitable[Runtime]]


@pytest.fixture(scope="session")
async def busybox_image() -> str:
    missing = await DockerRuntime.unavailable()
    require("docker", missing is None, missing or "")
    try:
        return await images.busybox()
    except LookupError as error:
        require("docker", False, str(error))
        raise


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def image(backend: str, request: pytest.FixtureRequest) -> str | None:
    if backend == "local":
        return None
    image: str = request.getfixturevalue("busybox_image")
    return image


@pytest.fixture
def new_place(backend: str, image: str | None, tmp_path: Path) -> Callable[..., Runtime]:
    """A runtime of the backend under test, not started."""

    def new(*, spec: dict[str, Any] | None = None, **request: Any) -> Runtime:
        name = f"test-{uuid.uuid4().hex[:8]}"
        scratch = tmp_path / name
        scratch.mkdir()
        # No network is the quickest to start; local has no say in it.
        defaults = {"image": image, "network": "none"} if image else {}
        fields: dict[str, Any] = {
            "session_id": name,
            "attempt_id": "1",
            "owner": name,
            "spec": RuntimeSpec(backend=backend, **{**defaults, **(spec or {})}),
            "scratch_dir": scratch,
            "model_port": None,
            **request,
        }
        runtime = {"docker": DockerRuntime, "local": LocalRuntime}[backend]
        return runtime(RuntimeRequest(**fields))

    return new


@pytest.fixture
async def open_place(new_place: Callable[..., Runtime]) -> AsyncIterator[OpenPlace]:
    """Opens places of the backend under test, and stops them after the test."""
    async with AsyncExitStack() as places:

        async def open_one(**request: Any) -> Runtime:
            place = new_place(**request)
            places.push_async_callback(place.stop)
            await place.start()
            return place

        yield open_one


@pytest.fixture
async def place(open_place: OpenPlace) -> Runtime:
    return await open_place()


@pytest.fixture
def token() -> str:
    """A number of seconds to sleep for, by which processes are recognised."""
    return f"9{uuid.uuid4().int % 10**9:09}"


def alive(token: str) -> list[int]:
    """Processes of this host, also those in containers, with `token` among their arguments."""
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            arguments = (process / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if token.encode() in arguments:
            found.append(int(process.name))
    return found


async def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    with anyio.fail_after(seconds):
        while not condition():
            await anyio.sleep(0.02)
