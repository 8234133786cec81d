"""One generation, from the engine to its record: asked for, kept, and what goes wrong with it."""

import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import anyio
import msgspec

from builders.records import Floats, Ids, VersionSpan
from polar_gateway.backend import Backend
from polar_gateway.backends import Admitted, Lease
from polar_gateway.capture.journal import CaptureError
from polar_gateway.continuation import OtherwiseToldError, rest_of
from polar_gateway.dialects.turn import (
    BlockEnd,
    BlockStart,
    ErrorKind,
    ModelRequest,
    Turn,
    TurnEvent,
)
from polar_gateway.engines.base import Engine, EngineError, EngineReply, EngineStream
from polar_gateway.engines.base import Generation as EngineGeneration
from polar_gateway.engines.whole import WholeAsStream
from polar_gateway.errors import Failure
from polar_gateway.generations import Generation, Listener
from polar_gateway.policy_versions import Leg, versions_of
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


RETOLD = ErrorKind(
    status=500, code="internal", message="an answer went on otherwise than it had begun"
)
"""An answer was aborted and resumed, and its parsers made something else of the whole."""


class OpenLeg:
    """One call of an engine, whose tokens were sampled under weights that may have changed since."""

    def __init__(self, backend: Backend, partial: EngineReply | None) -> None:
        self._backend = backend
        self._before = backend.weights
        self._start = self._sure = 0 if partial is None else len(partial.sampled_ids)

    def has_brought(self, tokens: int) -> None:
        """So many tokens of the answer were there by now."""
        if self._backend.weights.changes == self._before.changes:
            self._sure = tokens

    def until(self, end: int, said: Sequence[VersionSpan] = ()) -> Leg:
        """Up to that token of the answer. `said` is what the engine says of the versions."""
        return Leg(self._start, end, self._before, self._backend.weights, self._sure, said)


class Stamped:
    """A generation in flight as its record sees it, with policy versions."""

    def __init__(
        self,
        generation: EngineGeneration,
        stamp: Callable[[int, Sequence[VersionSpan]], Sequence[VersionSpan]],
    ) -> None:
        self._generation = generation
        self._stamp = stamp
        self._appended = 0

    @property
    def prompt_ids(self) -> Ids | None:
        return self._generation.prompt_ids

    def sampled_so_far(self) -> tuple[Ids, Floats]:
        ids, logprobs = self._generation.sampled_so_far()
        self._appended += len(ids)
        self._stamp(self._appended, ())
        return ids, logprobs

    @property
    def reply(self) -> EngineReply:
        reply = self._generation.reply
        versions = self._stamp(len(reply.sampled_ids), reply.versions)
        return msgspec.structs.replace(reply, versions=list(versions))


class Patience:
    """How long a call that the engine failed is tried again, in seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._give_up = time.monotonic() + seconds
        self._pause = FIRST_PAUSE

    def forgive(self, seconds: float) -> None:
        """Time that passed for no fault of the engine's does not count."""
        self._give_up += seconds

    async def wait(self, error: EngineError, *, moved: bool = False) -> None:
        """Wait until it makes sense to try again. Raises the error where it makes none, or where
        there is no time left. `moved` says that another backend will be asked, which need not have
        the time that this one asked for."""
        asked_for = 0.0 if moved else error.kind.retry_after or 0.0
        wait = max(self._pause * random.uniform(0.8, 1.2), asked_for)
        if not error.again or time.monotonic() + wait > self._give_up:
            raise error
        logger.info("the engine is asked again in %.1f s: %s", wait, error)
        await anyio.sleep(wait)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)


async def ask(lease: Lease, once: Callable[[Engine], Awaitable[_T]], patience: float) -> _T:
    """Ask the session's backend what samples nothing, until it answers, as long as that may help
    and `patience` (seconds) lasts."""
    left = Patience(patience)
    while True:
        backend = lease.backend
        try:
            return await once(backend.engine)
        except EngineError as error:
            await left.wait(error, moved=error.again and lease.failed(backend, error))


class Sampler:
    """Samples one generation and keeps its record."""

    def __init__(
        self,
        lease: Lease,
        patience: float,
        session: Session,
        generation: Generation,
        listener: Listener,
        request: ModelRequest,
    ) -> None:
        self._lease = lease
        self._patience = patience
        self._session = session
        self._generation = generation
        self._listener = listener
        self._request = request
        self._record = generation.record
        self._composed = False
        self._streaming = False
        self._partial: EngineReply | None = None
        """What there is of an answer that the engine aborted and that is to be gone on with."""
        self._legs: list[Leg] = []
        self._leg_now: OpenLeg | None = None
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
            if self._record.counts_as_delivered and not generation.delivered:
                self._undelivered()

    async def run(self) -> None:
        generation = self._generation
        unsaid: list[TurnEvent] | None = None
        try:
            reply = await self._answer()
            if self._partial is not None and generation.said:
                unsaid = self._untold(reply)
            await self._keep(reply)
        except (EngineError, CaptureError) as error:
            generation.refuse(self._failed(error))
            return
        turn = generation.turn = reply.turn(self._record.completion_id, generation.created)
        if self.before_the_end is not None:
            self.before_the_end(turn)
        await generation.conclude(turn, self._listener, unsaid)

    async def _answer(self) -> EngineReply:
        """The whole answer, however many tries, backends and pauses it takes."""
        patience = Patience(self._patience)
        while True:
            failure: EngineError | None = None
            came = time.monotonic()
            async with self._lease.call() as call:
                patience.forgive(time.monotonic() - came)
                try:
                    return await self._leg(call)
                except EngineError as error:
                    failure = error
            if failure is None:
                continue
            known, self_ended = self._known_tokens, call.backend.open
            if failure.partial is not None and failure.partial.sampled_ids:
                self._go_on_with(failure.partial)
                if not call.backend.probe.resumes:
                    raise failure
                if self._known_tokens > known:
                    patience = Patience(self._patience)
                elif self_ended:
                    await patience.wait(failure)
            elif self._streaming:
                raise failure
            elif failure.partial is None:
                moved = failure.again and self._lease.failed(call.backend, failure)
                await patience.wait(failure, moved=moved)
            elif self_ended:
                await patience.wait(failure)

    async def _leg(self, call: Admitted) -> EngineReply:
        """What one call of the engine brings, up to the end of the answer."""
        backend, engine = call.backend, call.backend.engine
        request = await self._prompted(backend)
        await backend.confirm()
        request_id, after = self._record.completion_id, self._record.after
        self._record.backend = backend.name
        self._leg_now = OpenLeg(backend, self._partial)
        if self._partial is not None:
            reply = await engine.resume(request, request_id, self._partial)
            self._misread(reply.prompt_ids)
        elif request.stream:
            stream = await engine.stream(request, request_id, after)
            if self._misread(stream.prompt_ids):
                await stream.aclose()
                return await self._leg(call)
            call.begun()
            self._streaming = True
            try:
                reply = await self._streamed(stream, self._leg_now)
            finally:
                await stream.aclose()
            self._misread(reply.prompt_ids)  # of engines that say only then what they have read
        else:
            reply = await engine.complete(request, request_id, after)
            if self._misread(reply.prompt_ids):
                return await self._leg(call)
        backend.heard()
        return self._stamped(reply)

    async def _prompted(self, backend: Backend) -> ModelRequest:
        """The request as the engine is sent it, the same at every try."""
        if not self._composed:
            self._request = await self._session.prompter.compose(
                self._request, self._record, backend.engine, backend.probe
            )
            self._composed = True
        return self._request

    @property
    def _known_tokens(self) -> int:
        """How many tokens of an aborted answer there are to go on from."""
        return 0 if self._partial is None else len(self._partial.sampled_ids)

    def _misread(self, read: Ids | None) -> bool:
        """Whether the answer is one to another prompt than was sent."""
        instead = self._session.prompter.instead(self._request, read, self._record)
        if instead is not None:
            self._request = instead
        return instead is not None

    async def _streamed(self, stream: EngineStream, leg: "OpenLeg") -> EngineReply:
        """Hand a generation on as it comes, each part when its record allows it."""
        record = self._record
        record.follow(Stamped(stream, self._stamp), sent_sampling(self._request))
        in_call = False
        async for events in stream:
            leg.has_brought(stream.sampled_tokens)
            ends_call = False
            for event in events:
                if isinstance(event, BlockStart):
                    in_call = event.kind == "call"
                elif isinstance(event, BlockEnd) and in_call:
                    ends_call = True
            if ends_call:
                record.append()
                await record.durable()
            await self._generation.say(events, stream, self._listener)
        return stream.reply

    def _stamp(self, end: int, said: Sequence[VersionSpan]) -> list[VersionSpan]:
        """Note the policy versions of the answer's tokens up to there; returns their spans."""
        legs = (
            self._legs if self._leg_now is None else [*self._legs, self._leg_now.until(end, said)]
        )
        versions = versions_of(legs, self._session.policy_version)
        self._record.policy_version, self._record.versions = versions.first, versions.spans
        return versions.spans

    def _stamped(self, reply: EngineReply) -> EngineReply:
        versions = self._stamp(len(reply.sampled_ids), reply.versions)
        return msgspec.structs.replace(reply, versions=versions)

    def _go_on_with(self, partial: EngineReply) -> None:
        """Keep what an answer had sampled when the engine aborted it. It counts, also where it is
        not gone on with."""
        stamped = self._stamped(partial)
        if self._leg_now is not None:
            self._legs.append(self._leg_now.until(len(partial.sampled_ids), partial.versions))
        self._leg_now = None
        self._partial = stamped
        self._streaming = False
        self._record.follow(WholeAsStream(stamped), sent_sampling(self._request))

    def _untold(self, reply: EngineReply) -> list[TurnEvent]:
        """What is left to be told of an answer that was told in part before it was aborted."""
        cut = reply.finish_reason == "length"
        try:
            reply.blocks, events = rest_of(self._generation.said, reply.blocks, cut=cut)
        except OtherwiseToldError as error:
            self._record.follow(WholeAsStream(reply), sent_sampling(self._request))
            raise EngineError(RETOLD, infra=True, message=f"{RETOLD.message}: {error}") from error
        return events

    async def _keep(self, reply: EngineReply) -> None:
        """Make the record durable."""
        await self._record.keep(reply.tensors)
        self._record.close(reply, sent_sampling(self._request))
        await self._record.durable()
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
        if self._partial is not None:
            code = "aborted"
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


ENGINES_OWN = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""What engines take from the model's own generation_config.json where a request does not say it, and
the values at which the policy is sampled from as it is."""


def made_explicit(request: ModelRequest) -> ModelRequest:
    """The request with every parameter that would else be the engine's to choose: what a token was
    sampled with is then what the record says."""
    return msgspec.structs.replace(request, sampling={**ENGINES_OWN, **request.sampling})


def sent_sampling(request: ModelRequest) -> dict[str, Any]:
    """The sampling parameters that the engine is sent, for the record."""
    if request.max_tokens is None:
        return request.sampling
    return {**request.sampling, "max_tokens": request.max_tokens}
