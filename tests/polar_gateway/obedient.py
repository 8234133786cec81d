"""Backends whose engines sample nothing and do as they are told, and backends that answer."""

from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio

from builders.records import TokenNode
from polar_gateway.backend import Backend
from polar_gateway.backends import Backends, open_backends
from polar_gateway.config import BackendConfig, InferenceConfig
from polar_gateway.dialects.turn import ErrorKind, ModelRequest, Usage
from polar_gateway.engines.base import (
    EngineError,
    EngineProbe,
    EngineReply,
    EngineStream,
    PauseMode,
    Rendering,
)
from polar_gateway.testing.engine import ScriptedEngine

FAILED = EngineError(
    ErrorKind(status=500, code="internal", message="the engine failed"), infra=True, again=True
)


class ObedientEngine:
    """Samples nothing; does as it is told, and remembers it."""

    def __init__(self, found: EngineProbe) -> None:
        self.found = found
        self.orders: list[object] = []
        self.fails = False
        self.obeys: anyio.Event | None = None
        """When it does what it is told; None: at once."""
        self.closed = False

    async def _obey(self, *order: object) -> None:
        self.orders.append(order if len(order) > 1 else order[0])
        if self.obeys is not None:
            await self.obeys.wait()
        if self.fails:
            raise FAILED

    async def probe(self) -> EngineProbe:
        await self._obey("probe")
        return self.found

    async def complete(
        self, request: ModelRequest, request_id: str, after: TokenNode | None = None
    ) -> EngineReply:
        ids = array("i", [1])
        return EngineReply(
            prompt_ids=ids,
            sampled_ids=ids,
            logprobs=None,
            blocks=[],
            finish_reason="stop",
            usage=Usage(),
        )

    async def stream(
        self, request: ModelRequest, request_id: str, after: TokenNode | None = None
    ) -> EngineStream:
        raise FAILED

    async def resume(
        self, request: ModelRequest, request_id: str, partial: EngineReply
    ) -> EngineReply:
        raise FAILED

    async def count_tokens(self, request: ModelRequest) -> int:
        return 1

    async def render(self, request: ModelRequest, *, closed: bool = False) -> Rendering:
        raise FAILED

    async def pause(self, mode: PauseMode) -> None:
        await self._obey("pause", mode)

    async def unpause(self) -> None:
        await self._obey("unpause")

    async def update(self, policy_version: str, weights_path: str | None) -> None:
        await self._obey("update", policy_version, weights_path)

    async def weight_version(self) -> str | None:
        await self._obey("weight_version")
        return self.found.weight_version

    async def aclose(self) -> None:
        self.closed = True


def backend(name: str, *, controls: list[str] | None = None, **probe: Any) -> Backend:
    known = ["pause", "abort", "update"] if controls is None else controls
    found = EngineProbe(engine="obedient", model="tiny", controls=known, **probe)
    return Backend(name, f"http://{name}", ObedientEngine(found), found)


def engine_of(backend: Backend) -> ObedientEngine:
    assert isinstance(backend.engine, ObedientEngine)
    return backend.engine


def three() -> tuple[Backends, list[Backend]]:
    made = [backend(name) for name in "abc"]
    return Backends(made), made


@asynccontextmanager
async def serving(*engines: ScriptedEngine, **options: Any) -> AsyncIterator[Backends]:
    servers = [BackendConfig(base_url=engine.url) for engine in engines]
    inference = InferenceConfig(backends=servers)
    async with open_backends(inference, **{"model": "", "patience": 0.0, **options}) as backends:
        yield backends
