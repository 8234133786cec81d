"""One running server of an engine: what it is, and the orders of a trainer that it carries out.

A paused backend admits no call: calls wait at its gate, and what the engine aborted comes back there
to be gone on with. Orders reach the engine one after the other.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec

from polar_gateway.engines.base import Engine, EngineError, EngineProbe, PauseMode
from polar_gateway.engines.refusals import unready
from polar_gateway.policy_versions import Weights, named

SILENCE_SECONDS = 2.0
"""Shorter than an engine takes to start."""
ABORT_SECONDS = 2.0
"""How long what an engine has aborted may take to arrive."""


class BackendHealth(msgspec.Struct, kw_only=True):
    """A backend as anybody may see it."""

    name: str
    engine: str
    model: str
    healthy: bool
    draining: bool
    paused: bool
    pause_mode: PauseMode | None
    updating: bool
    sessions: int
    inflight: int
    policy_version: str | None
    version_in_doubt: bool
    """Whether nobody knows which weights it has: an update failed, or it was started anew."""


class BackendStatus(BackendHealth, kw_only=True):
    """The same for those who have the node's token: errors name hosts and folders."""

    failure: str
    """Why it is not healthy, or why it was closed."""


class BackendReport(BackendStatus, kw_only=True):
    """The same with all that is known of the server."""

    base_url: str
    probe: EngineProbe


class WeightUpdate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A trainer's word that the weights are new."""

    policy_version: str
    weights_path: str | None = None
    """A folder that the engine reads them from; None: they are in place already."""
    backend: str | None = None
    """None: all of them."""
    timeout_seconds: float = 600.0


class Backend:
    """One running server of an engine, probed."""

    def __init__(self, name: str, base_url: str, engine: Engine, probe: EngineProbe) -> None:
        self.name = name
        self.base_url = base_url
        self.engine = engine
        self.probe = probe
        version = named(probe.weight_version)
        self.weights = Weights(version, told=version is not None)
        self.healthy = True
        self.failure = ""
        self.draining = False
        self.removed = False
        self.pause_mode: PauseMode | None = None
        """Set while no calls are admitted."""
        self.engine_paused = False
        """Whether the engine itself was told to pause."""
        self.updating = False
        self.sessions = 0
        """How many have it."""
        self.in_flight = 0
        """How many calls the engine is working on; those that wait here are not among them."""
        self.unanswered: set[anyio.CancelScope] = set()
        """The calls in flight of which nothing was heard yet."""
        self.used = 0
        """When it was last used, on a clock that counts uses."""
        self._heard = time.monotonic()
        """When it last showed that it is the engine that was given its weights."""
        self._changed = anyio.Event()
        self._ordering = anyio.Lock()

    @property
    def open(self) -> bool:
        return self.pause_mode is None and not self.updating

    def close(self, mode: PauseMode, why: str = "") -> None:
        """Admit no more calls until it is resumed."""
        self.pause_mode = mode
        self.failure = why or self.failure
        self.change()

    def change(self) -> None:
        """Let all who wait for it look again."""
        self._changed.set()
        self._changed = anyio.Event()

    async def changed(self) -> None:
        await self._changed.wait()

    async def idle(self) -> None:
        """Return when no call is in flight, or when it was opened meanwhile."""
        while self.in_flight and self.pause_mode is not None:
            await self.changed()

    def heard(self) -> None:
        """It has answered a call."""
        self._heard = time.monotonic()

    async def confirm(self) -> None:
        """Before a call: see that it has the weights that it was given, after a failure or a silence
        in which it may have been started anew. Raises EngineError where it has others."""
        weights = self.weights
        if weights.in_doubt or not weights.told or "update" not in self.probe.controls:
            return
        if self.healthy and time.monotonic() - self._heard < SILENCE_SECONDS:
            return
        version = await self.engine.weight_version()
        if version == weights.version:
            self.heard()
        elif weights == self.weights:
            self.weights = weights.mistaken()
            said = f"its weights are {version!r}, not {weights.version!r}, as after a restart"
            raise unready(f"{said}; update it")

    # Orders

    async def settle(self, mode: PauseMode) -> None:
        """Once it is closed: return when nothing is sampled any more, or when it was opened
        meanwhile. Raises EngineError; it stays closed then."""
        if mode != "wait":
            async with self._ordering:
                if self.pause_mode is None:
                    return
                self.engine_paused = True
                await self.engine.pause(mode)
        if mode == "abort":
            # What reached the engine when it was paused already is held there until it resumes; it
            # is taken back, and asked anew then.
            with anyio.move_on_after(ABORT_SECONDS):
                await self.idle()
            if self.pause_mode is not None:
                for call in list(self.unanswered):
                    call.cancel()
        if mode != "keep":
            await self.idle()

    async def resume(self) -> None:
        """Let the engine go on, and admit calls. Raises EngineError; it stays closed then."""
        async with self._ordering:
            if self.engine_paused:
                await self.engine.unpause()
            self.engine_paused = False
            self.pause_mode = None
            self.change()

    def begin_update(self, update: WeightUpdate) -> None:
        """From now on nobody knows which weights sample. Has to be followed by `update`."""
        if update.weights_path is None and self.open and self.in_flight:
            self.weights = self.weights.mistaken()  # who knows since when they are in place
        self.weights = self.weights.doubted()
        self.updating = True
        self.change()

    async def update(self, update: WeightUpdate) -> None:
        """Name the weights, after loading them where a folder is given. Where that fails, the
        weights are in doubt and it is closed."""
        why = f"it took longer than {update.timeout_seconds:g} s"
        try:
            with anyio.move_on_after(update.timeout_seconds):
                told = "update" in self.probe.controls
                async with self._ordering:
                    if told:
                        async with self._standing_still():
                            await self.engine.update(update.policy_version, update.weights_path)
                    self.weights = self.weights.updated(update.policy_version, told=told)
                    self.failure = "" if self.healthy else self.failure
                return
        except EngineError as error:
            why = str(error)
        finally:
            self.updating = False
            if self.weights.in_doubt:
                self.weights = self.weights.mistaken()
                why = f"the update to {update.policy_version} failed: {why}"
                self.close(self.pause_mode or "wait", why)
            self.change()

    @asynccontextmanager
    async def _standing_still(self) -> AsyncIterator[None]:
        """Nothing is sampled meanwhile: what is in flight would be sampled by new weights that the
        engine still calls by the name of the old ones. Where it fails, the engine stays paused."""
        if self.engine_paused or not self.in_flight or "pause" not in self.probe.controls:
            yield
            return
        self.engine_paused = True
        await self.engine.pause("keep")
        yield
        await self.engine.unpause()
        self.engine_paused = False

    # As it is seen

    def health(self) -> BackendHealth:
        return BackendHealth(**self._health())

    def status(self) -> BackendStatus:
        return BackendStatus(**self._health(), failure=self.failure)

    def report(self) -> BackendReport:
        return BackendReport(
            **self._health(), failure=self.failure, base_url=self.base_url, probe=self.probe
        )

    def _health(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "engine": self.probe.engine,
            "model": self.probe.model,
            "healthy": self.healthy,
            "draining": self.draining,
            "paused": self.pause_mode is not None,
            "pause_mode": self.pause_mode,
            "updating": self.updating,
            "sessions": self.sessions,
            "inflight": self.in_flight,
            "policy_version": self.weights.version,
            "version_in_doubt": self.weights.in_doubt,
        }
