"""One generation, from the engine to its record: asked for, kept, and what goes wrong with it."""

import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import anyio
import msgspec

from polar_gateway.capture.journal import CaptureError
from polar_gateway.dialects.turn import BlockEnd, BlockStart, ErrorKind, ModelRequest, Turn
from polar_gateway.engines.base import Engine, EngineError, EngineReply
from polar_gateway.errors import Failure
from polar_gateway.generations import Generation, Listener
from polar_gateway.protocol import Sampling
from polar_gateway.sessions import Session

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

SEALED = ErrorKind(status=400, code="session_closed", message="this session has ended")
"""400, because that is what command-line agents ask again least: most never, Claude Code 6 times
within seconds, whereas 401, 404 and 5xx are asked again for minutes."""

UNRECORDED = ErrorKind(
    status=500, code="internal", message="the gateway could not record this call"
)
"""Why not is for the operator; it names files of the host."""

INTERNAL = ErrorKind(status=500, code="internal", message="the gateway failed at this request")
"""For what must not happen; its traceback is in the log."""

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
"""Seconds between the tries of a call that the engine failed; they double."""

OVERLOAD_SECONDS = 3
"""After which a harness may ask an overloaded engine again."""


async def ask(once: Callable[[], Awaitable[_T]], patience: float) -> _T:
    """Ask the engine until it answers, as long as that may help and `patience` (seconds) lasts."""
    give_up = time.monotonic() + patience
    pause = FIRST_PAUSE
    while True:
        try:
            return await once()
        except EngineError as error:
            wait = max(pause * random.uniform(0.8, 1.2), error.kind.retry_after or 0.0)
            if not error.again or time.monotonic() + wait > give_up:
                raise
            logger.info("the engine is asked again in %.1f s: %s", wait, error)
        await anyio.sleep(wait)
        pause = min(2 * pause, LONGEST_PAUSE)


class Sampler:
    """Samples one generation and keeps its record."""

    def __init__(
        self,
        engine: Engine,
        patience: float,
        session: Session,
        generation: Generation,
        listener: Listener,
        request: ModelRequest,
    ) -> None:
        self._engine = engine
        self._patience = patience
        self._session = session
        self._generation = generation
        self._listener = listener
        self._request = request
        self._record = generation.record
        self._streaming = False
        self.before_the_end: Callable[[Turn], None] | None = None
        """What else must know the turn before the harness does."""

    @contextmanager
    def keeping_record(self) -> Iterator[None]:
        """Leaves the generation with a turn or a refusal, and its record ended accordingly."""
        generation = self._generation
        try:
            yield
            if generation.turn is None and generation.refusal is None:
                generation.refuse(self._abandoned())
        except Exception as error:
            generation.refuse(self._broken(error))
        finally:
            if generation.turn is not None and not generation.delivered:
                self._undelivered()

    async def run(self) -> None:
        generation, request = self._generation, self._request
        try:
            reply = await (self._streamed() if request.stream else self._whole())
            self._keep(reply)
        except (EngineError, CaptureError) as error:
            generation.refuse(self._failed(error))
            return
        turn = generation.turn = reply.turn(self._record.completion_id, generation.created)
        if self.before_the_end is not None:
            self.before_the_end(turn)
        await generation.conclude(turn, self._listener)

    async def _whole(self) -> EngineReply:
        record, request = self._record, self._request
        return await ask(
            lambda: self._engine.complete(request, record.completion_id, record.after),
            self._patience,
        )

    async def _streamed(self) -> EngineReply:
        """Hand a generation on as it comes, each part when its record allows it."""
        record, request = self._record, self._request
        stream = await ask(
            lambda: self._engine.stream(request, record.completion_id, record.after),
            self._patience,
        )
        self._streaming = True
        try:
            record.follow(stream, sent_sampling(request))
            in_call = False
            async for events in stream:
                ends_call = False
                for event in events:
                    if isinstance(event, BlockStart):
                        in_call = event.kind == "call"
                    elif isinstance(event, BlockEnd) and in_call:
                        ends_call = True
                if ends_call:
                    record.append()
                await self._generation.say(events, stream, self._listener)
            return stream.reply
        finally:
            await stream.aclose()

    def _keep(self, reply: EngineReply) -> None:
        """Make the record durable."""
        self._record.close(reply, sent_sampling(self._request))
        self._session.engine_failure = None

    def _failed(self, error: EngineError | CaptureError) -> ErrorKind:
        """Note why there is no answer; returns what the harness shall hear."""
        session = self._session
        if isinstance(error, CaptureError):
            if session.sealed:
                return SEALED
            session.refused = error.failure
            logger.error("session %s: %s", session.session_id, error)
            return UNRECORDED
        kind = error.kind
        if kind.code == "overloaded" and kind.retry_after is None:
            # Without it codex does not try as often as it is told to.
            kind = msgspec.structs.replace(kind, retry_after=OVERLOAD_SECONDS)
        overflow = kind.code == "context_overflow"
        session.engine_failure = Failure(
            boundary="harness" if overflow else "engine",
            message=str(error),
            infra=error.infra,
            detail=error.detail,
            code=kind.code if overflow else "",
        )
        logger.warning("session %s: %s", session.session_id, error)
        code = "engine_broke_off" if self._streaming else "call_failed"
        return self._end(code, str(error)) or kind

    def _abandoned(self) -> ErrorKind:
        """The generation was cancelled, by the session's seal or because its harness went."""
        return self._end("call_abandoned", "the harness went away") or SEALED

    def _broken(self, error: Exception) -> ErrorKind:
        """There is a fault in the gateway's own code."""
        session = self._session
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        said = f"{type(error).__name__}: {error}"
        message = f"the gateway failed at call {self._record.completion_id}: {said}"
        logger.exception("session %s: %s", session.session_id, message)
        session.engine_failure = Failure(boundary="capture", message=message, infra=True)
        return self._end("gateway_failed", message) or INTERNAL

    def _end(self, code: str, message: str) -> ErrorKind | None:
        try:
            self._record.fail(message, code)
        except CaptureError as error:
            return self._failed(error)
        return None

    def _undelivered(self) -> None:
        try:
            self._record.undelivered()
        except CaptureError as error:
            self._failed(error)


def with_overrides(
    request: ModelRequest, sampling: Sampling | None, max_model_len: int | None
) -> ModelRequest:
    """The request with the task's sampling parameters in place of the harness's, each one noted.

    An output limit beyond the model's length is cut to it: agents ask for as much on purpose, and
    not every engine takes it.
    """
    overrides = {} if sampling is None else msgspec.to_builtins(sampling)
    limit = overrides.pop("max_tokens", request.max_tokens)
    if limit is not None and max_model_len is not None:
        limit = min(limit, max_model_len)
    if limit == request.max_tokens and not overrides:
        return request
    given = {**request.sampling, "max_tokens": request.max_tokens}
    wanted = {**overrides, "max_tokens": limit}
    notes = [
        f"{name}: {value} instead of {given.get(name)}"
        for name, value in wanted.items()
        if given.get(name) != value
    ]
    return msgspec.structs.replace(
        request,
        sampling={**request.sampling, **overrides},
        max_tokens=limit,
        notes=[*request.notes, *notes],
    )


def sent_sampling(request: ModelRequest) -> dict[str, Any]:
    """The sampling parameters that the engine is sent, for the record."""
    if request.max_tokens is None:
        return request.sampling
    return {**request.sampling, "max_tokens": request.max_tokens}
