"""The backends of a node: which session has which, how they come and go, and orders to several.

A session keeps its backend, whose cache knows its prompts; it moves when that one fails or is
removed. All state is this process's own; the loop that serves sessions is the only one that changes
it.
"""

import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, NamedTuple

import anyio
import msgspec

from polar_gateway.backend import Backend, WeightUpdate
from polar_gateway.config import BackendConfig, InferenceConfig
from polar_gateway.engines import open_engine
from polar_gateway.engines.base import Engine, EngineError, PauseMode
from polar_gateway.likeness import behind, other_ids, restarted, unlike
from polar_gateway.prompts import unable

logger = logging.getLogger(__name__)

CHECK_SECONDS = 2.0
"""Between two looks at a backend that failed."""
CHECK_TIMEOUT = 20.0
"""How long it may take to show that it is well again."""
START_PAUSE = 0.5
"""Between two tries of a backend that is not there yet."""

FIRST_NAME = "backend-1"


class BackendRefusedError(Exception):
    """An order about backends that cannot be carried out; `status` is what it means in HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def chosen(backends: Iterable[Backend]) -> Backend:
    """Who a session shall have: of those that are well the one that fewest sessions have, and of
    several of these the one whose last use is longest ago."""
    return min(
        backends,
        key=lambda each: (
            each.draining,
            not each.healthy,
            not each.open,
            each.sessions,
            each.used,
        ),
    )


class Admitted(NamedTuple):
    """A call that a backend works on."""

    backend: Backend
    scope: anyio.CancelScope

    def begun(self) -> None:
        """The engine has begun to answer: from now on it is for it alone to end that."""
        self.backend.unanswered.discard(self.scope)


class Lease:
    """A session's claim on one backend at a time; `release` ends it."""

    def __init__(self, backends: "Backends") -> None:
        self._backends = backends
        self._held: Backend | None = None
        self._released = False

    @property
    def backend(self) -> Backend:
        """The one that the session has; another one when that was removed, or when it failed and
        another is well."""
        held = self._held
        if held is None or held.removed or (not held.healthy and self._backends.any_healthy):
            self._let_go()
            held = self._held = self._backends.choose()
            if not self._released:
                held.sessions += 1
        return held

    @asynccontextmanager
    async def call(self) -> AsyncIterator["Admitted"]:
        """One call of the backend, which counts as in flight; waits until it admits calls. Ends
        early, without an error, where a pause takes the call back."""
        while not (backend := self.backend).open:
            await backend.changed()
        backend.in_flight += 1
        backend.used = self._backends.tick()
        try:
            with anyio.CancelScope() as scope:
                backend.unanswered.add(scope)
                yield Admitted(backend, scope)
        finally:
            backend.unanswered.discard(scope)
            backend.in_flight -= 1
            backend.change()
            if backend.removed and not backend.in_flight:
                with anyio.CancelScope(shield=True):
                    await backend.engine.aclose()

    def failed(self, backend: Backend, error: EngineError) -> bool:
        """The backend failed at a call that may succeed later; whether the session has another
        one now."""
        self._backends.suspect(backend, str(error))
        return self.backend is not backend

    def release(self) -> None:
        """The session has ended; what is still in flight counts no more for it."""
        self._let_go()
        self._released = True

    def _let_go(self) -> None:
        if self._held is not None and not self._released:
            self._held.sessions -= 1
        self._held = None


class Backends:
    """All backends of a node; there is always one that takes sessions. Made with the first ones,
    by `open_backends` from a configuration."""

    def __init__(
        self, backends: Sequence[Backend], *, inference: InferenceConfig | None = None
    ) -> None:
        self._backends = {backend.name: backend for backend in backends}
        self._inference = inference or InferenceConfig()
        self._uses = 0
        self._suspected = anyio.Event()

    def __iter__(self) -> Iterator[Backend]:
        return iter(list(self._backends.values()))

    @property
    def first(self) -> Backend:
        return next(iter(self._backends.values()))

    @property
    def model(self) -> str:
        """The name of the weights, which is the same everywhere."""
        return self.first.probe.model

    def lease(self) -> Lease:
        return Lease(self)

    def choose(self) -> Backend:
        backend = chosen(self._backends.values())
        backend.used = self.tick()
        return backend

    def tick(self) -> int:
        self._uses += 1
        return self._uses

    @property
    def any_healthy(self) -> bool:
        return any(each.healthy and not each.draining for each in self._backends.values())

    # Coming and going

    async def add(self, config: BackendConfig, *, patience: float = 0.0) -> Backend:
        """Probe a backend, and let it serve. Raises BackendRefusedError when it does not answer
        within `patience` seconds, or cannot do what the others can. Where they have been given
        weights that it has not, it is closed until it is updated and resumed."""
        self._check_free(config.name)
        try:
            engine = opened(self._inference, config, self.model)
        except ValueError as error:
            raise BackendRefusedError(422, str(error)) from error
        async with closed_unless_kept(engine):
            backend = await probed(config, engine, patience)
            problems = unlike(backend.probe, self.first.probe) or await self._other_ids(backend)
            refuse_for(problems, f"the engine at {config.base_url} cannot serve here")
            self._check_free(config.name)
        backend.name = config.name or self._free_name()
        if why := behind(backend, list(self)):
            logger.warning("backend %s admits no calls until it is resumed: %s", backend.name, why)
            backend.weights = backend.weights.doubted()
            backend.close("wait", why)
        self._backends[backend.name] = backend
        return backend

    def _check_free(self, name: str | None) -> None:
        if name in self._backends:
            raise BackendRefusedError(409, f"there is a backend {name} already")

    def _free_name(self) -> str:
        taken = self._backends
        return next(name for n in count(1) if (name := f"backend-{n}") not in taken)

    async def _other_ids(self, newcomer: Backend) -> list[str]:
        """Why its tokenizer or template is not that of the others."""
        known = next((each for each in self if each.open and each.healthy), None)
        if known is None:
            raise BackendRefusedError(
                409,
                "it is compared with a backend that answers, and none does now; resume one first",
            )
        try:
            return await other_ids(newcomer, known)
        except EngineError as error:
            raise BackendRefusedError(502, f"a prompt could not be compared: {error}") from error

    def drain(self, name: str) -> Backend:
        """Give it to no more sessions; those that have it keep it to their end."""
        backend = self._leaving(name)
        backend.draining = True
        backend.change()
        return backend

    async def remove(self, name: str) -> Backend:
        """Let no call begin there any more; sessions move at their next one, and what is in flight
        is finished."""
        backend = self._leaving(name)
        if backend.updating:
            raise BackendRefusedError(409, f"backend {name} is being updated")
        if backend.pause_mode is not None and backend.healthy:
            raise BackendRefusedError(409, f"backend {name} is paused; resume it first")
        del self._backends[name]
        backend.removed = True
        backend.change()
        if not backend.in_flight:
            await backend.engine.aclose()
        return backend

    def _leaving(self, name: str) -> Backend:
        backend = self.named(name)
        if all(each.draining for each in self._backends.values() if each is not backend):
            raise BackendRefusedError(
                409, f"backend {name} is the last that takes sessions; register another one first"
            )
        return backend

    def named(self, name: str) -> Backend:
        """Raises BackendRefusedError."""
        backend = self._backends.get(name)
        if backend is None:
            raise BackendRefusedError(
                404, f"there is no backend {name}, but {', '.join(self._backends)}"
            )
        return backend

    # Health

    def suspect(self, backend: Backend, why: str) -> None:
        """It failed at a call: others are preferred until it has shown that it is well."""
        backend.healthy = False
        backend.failure = why
        backend.change()
        self._suspected.set()
        self._suspected = anyio.Event()

    async def watch(self, period: float = CHECK_SECONDS) -> None:
        """Look at backends that failed, once in so many seconds, until they are well again; returns
        never."""
        while True:
            async with anyio.create_task_group() as group:
                for backend in self:
                    if not backend.healthy and backend.open:
                        group.start_soon(self._check, backend)
            if all(each.healthy for each in self):
                await self._suspected.wait()
            else:
                await anyio.sleep(period)

    async def _check(self, backend: Backend) -> None:
        why, weights = f"it did not answer within {CHECK_TIMEOUT:g} s", backend.weights
        with anyio.move_on_after(CHECK_TIMEOUT):
            try:
                probe = await backend.engine.probe()
                why = "; ".join(unlike(probe, backend.probe))
                if weights == backend.weights and (other := restarted(probe, backend)):
                    why = why or other
                    backend.weights = backend.weights.mistaken()
            except EngineError as error:
                why = str(error)
        if why != backend.failure:
            logger.info("backend %s: %s", backend.name, why or "it is well again")
        backend.failure, backend.healthy = why, not why
        backend.change()

    # Pausing, and new weights

    async def pause(self, mode: PauseMode, *, timeout: float, name: str | None = None) -> None:
        """Admit no more calls, and return when nothing is sampled any more.

        Raises BackendRefusedError; where the time was too short, they stay paused.
        """
        backends = self._meant(name)
        for backend in backends:
            lacking = {"wait": set(), "keep": {"pause"}, "abort": {"pause", "abort"}}[mode]
            lacking -= set(backend.probe.controls)
            if lacking:
                raise BackendRefusedError(
                    409,
                    f"backend {backend.name} takes no orders to {' and '.join(sorted(lacking))}: "
                    "it can be paused with mode=wait",
                )
        for backend in backends:
            backend.close(mode)
        with anyio.move_on_after(timeout) as scope:
            await self._order(backends, lambda each: each.settle(mode), "pause")
        if scope.cancelled_caught:
            busy = ", ".join(f"{each.name}: {each.in_flight}" for each in backends)
            raise BackendRefusedError(
                504,
                f"calls are still in flight after {timeout:g} s ({busy}); no more are admitted until "
                "resume",
            )
        opened_again = [each.name for each in backends if each.pause_mode is None]
        if opened_again:
            raise BackendRefusedError(409, f"resumed meanwhile: {', '.join(opened_again)}")

    async def resume(self, name: str | None = None) -> None:
        """Admit calls again, and let the engine go on. Raises BackendRefusedError."""
        await self._order(self._meant(name), Backend.resume, "resume")

    async def update(self, update: WeightUpdate) -> None:
        """Name the weights from now on, after loading them where a folder is given.

        A backend that is not paused admits no call meanwhile. One that fails stays closed: nobody
        knows what it would sample with. Raises BackendRefusedError.
        """
        backends = self._meant(update.backend)
        for backend in backends:
            if backend.updating:
                raise BackendRefusedError(409, f"backend {backend.name} is being updated already")
            if update.weights_path is not None and "update" not in backend.probe.controls:
                raise BackendRefusedError(
                    409, f"backend {backend.name} takes no orders to load weights"
                )
        for backend in backends:
            backend.begin_update(update)
        await self._order(backends, lambda each: each.update(update), "update")
        failed = [f"{each.name}: {each.failure}" for each in backends if each.weights.in_doubt]
        if failed:
            raise BackendRefusedError(
                502, f"the weights were not updated, and no calls are admitted: {'; '.join(failed)}"
            )

    async def _order(
        self,
        backends: Iterable[Backend],
        order: Callable[[Backend], Coroutine[Any, Any, None]],
        what: str,
    ) -> None:
        """All of them at once, each to its end whatever becomes of the others. Raises
        BackendRefusedError, which names those that did not obey."""
        disobeyed: list[str] = []

        async def carry_out(backend: Backend) -> None:
            try:
                await order(backend)
            except EngineError as error:
                self.suspect(backend, f"it did not {what}: {error}")
                disobeyed.append(f"backend {backend.name} did not {what}: {error}")

        async with anyio.create_task_group() as group:
            for backend in backends:
                group.start_soon(carry_out, backend)
        if disobeyed:
            raise BackendRefusedError(502, f"no calls are admitted there: {'; '.join(disobeyed)}")

    def _meant(self, name: str | None) -> list[Backend]:
        return list(self) if name is None else [self.named(name)]

    async def aclose(self) -> None:
        for backend in self:
            await backend.engine.aclose()


def opened(inference: InferenceConfig, config: BackendConfig, model: str) -> Engine:
    """Raises ValueError in words for a secret that is not set."""
    return open_engine(
        msgspec.structs.replace(
            inference, base_url=config.base_url, api_key_env=config.api_key_env, backends=[]
        ),
        model=model,
    )


def refuse_for(problems: list[str], said: str) -> None:
    """Raises BackendRefusedError where there are any."""
    if problems:
        raise BackendRefusedError(422, f"{said}: {'; '.join(problems)}")


@asynccontextmanager
async def closed_unless_kept(engine: Engine) -> AsyncIterator[None]:
    try:
        yield
    except BaseException:
        with anyio.CancelScope(shield=True):
            await engine.aclose()
        raise


async def probed(config: BackendConfig, engine: Engine, patience: float) -> Backend:
    """The backend once it answers, within `patience` seconds.

    Raises BackendRefusedError when it does not, or when training cannot do without what it lacks.
    """
    where = f"the engine at {config.base_url}"
    deadline = anyio.current_time() + patience
    failure = ""
    with anyio.move_on_at(deadline + CHECK_TIMEOUT):
        while True:
            try:
                probe = await engine.probe()
            except EngineError as error:
                failure = str(error)
                if anyio.current_time() >= deadline:
                    break
                await anyio.sleep(START_PAUSE)
                continue
            refuse_for(probe.problems, f"{where} cannot be trained on")
            for note in probe.notes:
                logger.warning("%s: %s", where, note)
            return Backend(config.name or FIRST_NAME, config.base_url, engine, probe)
    said = failure or "it is silent"
    raise BackendRefusedError(502, f"{where} did not answer within {patience:g} s: {said}")


@asynccontextmanager
async def open_backends(
    inference: InferenceConfig, *, model: str, patience: float
) -> AsyncIterator[Backends]:
    """The backends of a configuration, all of which must answer.

    `model` is the name of the weights; empty takes the first that the first backend lists. Raises
    BackendRefusedError.
    """
    first, *others = inference.servers
    try:
        engine = opened(inference, first, model)
    except ValueError as error:
        raise BackendRefusedError(422, str(error)) from error
    async with closed_unless_kept(engine):
        backends = Backends([await probed(first, engine, patience)], inference=inference)
        if inference.prompts == "tokens" and (why := unable(backends.first.probe)):
            refuse_for([why], "prompts: tokens cannot be had")
    try:
        for config in others:
            await backends.add(config, patience=patience)
        yield backends
    finally:
        with anyio.CancelScope(shield=True):
            await backends.aclose()
