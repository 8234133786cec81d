"""One model call, top to bottom: who asks, in which dialect, for what; record, ask, record, answer.

The order is the promise: the intent is journalled before the engine is asked, and the record is
durable before the harness gets anything that it can act on, which is the end of a tool call and
the end of the turn. Text and reasoning flow as they come.
"""

import logging
import secrets
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl

import anyio
import msgspec

from polar_gateway import dialects
from polar_gateway.backends import Backends, Lease
from polar_gateway.capture.journal import CaptureError
from polar_gateway.capture.side_calls import classify
from polar_gateway.config import ModelCallConfig
from polar_gateway.dialects import Route, anthropic, chat, responses
from polar_gateway.dialects.turn import (
    Dialect,
    ErrorKind,
    ModelRequest,
    UnsupportedRequestError,
)
from polar_gateway.engines.base import EngineError
from polar_gateway.errors import Failure
from polar_gateway.exchange import Exchange, Intake, Receive, Send
from polar_gateway.generations import Asked, Generation, Listener, is_marked
from polar_gateway.request_body import (
    RefusedError,
    decoded,
    headers_too_large,
    inflated,
    invalid,
    too_large,
)
from polar_gateway.sampling import (
    INTERNAL,
    SEALED,
    UNRECORDED,
    Sampler,
    ask,
    made_explicit,
    with_overrides,
)
from polar_gateway.sessions import Session, Sessions

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]

TWIN_SECONDS = 0.05
"""How long a call that equals one in flight waits for that one's harness to turn out to be gone:
the end of its connection may come in behind the next one's beginning."""


class Proxy:
    """The ASGI application of the model listener."""

    def __init__(
        self,
        *,
        sessions: Sessions,
        backends: Backends,
        config: ModelCallConfig | None = None,
    ) -> None:
        self._sessions = sessions
        self._backends = backends
        self._config = config or ModelCallConfig()
        self._intake = Intake(self._config.max_unread_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        raw_query = scope["query_string"]
        query = dict(parse_qsl(raw_query.decode("latin-1"))) if raw_query else {}
        exchange = Exchange(receive, send)
        route = dialects.route(scope["method"], scope["path"], query, headers)
        dialect = chat if route is None else route.dialect
        try:
            most = self._config.max_header_bytes
            if sum(len(name) + len(value) for name, value in scope["headers"]) > most:
                refused = headers_too_large(most)
            elif route is None:
                message = f"nothing is served at {scope['method']} {scope['path']}"
                refused = ErrorKind(status=404, code="not_found", message=message)
            elif route.kind == "probe":
                await exchange.answer(200, b"{}")
                return
            elif route.kind == "websocket":
                message = "no WebSocket is served here; use HTTP"
                refused = ErrorKind(status=426, code="invalid_request", message=message)
            else:
                session = self._session(headers, query)
                await self._serve(exchange, session, route, scope, query, headers)
                return
        except RefusedError as error:
            refused = error.kind
        except Exception:
            if exchange.started:
                raise
            logger.exception("%s %s failed", scope["method"], scope["path"])
            refused = INTERNAL
        exchange.identify(dialect, f"req_{secrets.token_hex(6)}")
        await exchange.refuse(dialect, refused)

    def _session(self, headers: Mapping[str, str], query: Mapping[str, str]) -> Session:
        key = dialects.api_key(headers, query)
        session = self._sessions.by_key(key) if key else None
        if session is None:
            message = "no live session has this API key" if key else "an API key is needed"
            raise RefusedError(ErrorKind(status=401, code="authentication", message=message))
        if session.sealed:
            raise RefusedError(SEALED)
        return session

    async def _serve(
        self,
        exchange: Exchange,
        session: Session,
        route: Route,
        scope: Scope,
        query: Mapping[str, str],
        headers: Mapping[str, str],
    ) -> None:
        """Answer what a session's harness may ask. Raises RefusedError before any answer began."""
        dialect = route.dialect
        if route.kind in ("models", "model", "stored"):
            exchange.identify(dialect, f"req_{secrets.token_hex(6)}")
        match route.kind:
            case "models":
                await exchange.answer(200, dialect.models_body([self._backends.model]))
                return
            case "model":
                await exchange.answer(200, dialect.model_body(route.fields["model"]))
                return
            case "stored":
                said = session.responses.answer(scope["method"], scope["path"], query)
                await exchange.answer(said.status, said.body)
                return
        if len(session.calls) >= self._config.max_calls:
            message = f"this session has {self._config.max_calls} model calls in flight"
            raise RefusedError(
                ErrorKind(status=429, code="rate_limit", message=message, retry_after=1)
            )
        tokens: int | None = None
        with anyio.CancelScope() as asking, in_flight(session, asking):
            body, notes = await self._read(exchange, session, headers)
            body.update(route.fields)
            whole = session.responses.expand(body) if dialect.name == "responses" else body
            try:
                request = dialect.normalise(whole)
            except UnsupportedRequestError as error:
                if route.kind == "call" and dialect is anthropic and not error.optional:
                    # Claude Code answers a 400 by asking for something else, with other tools; what
                    # it would then do is no longer the task, so the session fails for this reason.
                    session.refused = Failure(
                        boundary="harness",
                        message=f"the harness asked for what is not supported: {error}",
                        code="unsupported_request",
                    )
                raise RefusedError(invalid(str(error), error.field)) from error
            if notes:
                request = msgspec.structs.replace(request, notes=[*request.notes, *notes])
            if route.kind == "count_tokens":
                tokens = await self._count(session, request)
        if asking.cancelled_caught:
            raise RefusedError(SEALED)
        if tokens is not None:
            exchange.identify(dialect, f"req_{secrets.token_hex(6)}")
            await exchange.answer(200, dialect.count_body(tokens))
        else:
            await self._call(exchange, session, dialect, body, request, headers)

    async def _read(
        self, exchange: Exchange, session: Session, headers: Mapping[str, str]
    ) -> tuple[dict[str, Any], list[str]]:
        """The request's body, and notes of what was changed to read it."""
        limit = self._config.max_body_bytes
        if int(headers.get("content-length") or 0) > limit:
            raise RefusedError(too_large(f"is larger than {limit} bytes"))
        with self._intake.of(session.session_id) as take:
            data = await exchange.body(limit, take)
        if "content-encoding" in headers:
            data = inflated(data, headers["content-encoding"], self._config.max_decompressed_bytes)
        return decoded(data)

    def _lease(self, session: Session) -> Lease:
        if session.sealed:  # nobody would give it back any more
            raise RefusedError(SEALED)
        if session.lease is None:
            session.lease = self._backends.lease()
        return session.lease

    async def _count(self, session: Session, request: ModelRequest) -> int:
        try:
            return await ask(
                self._lease(session),
                lambda engine: engine.count_tokens(request),
                self._config.engine_patience_seconds,
            )
        except EngineError as error:
            logger.warning("tokens could not be counted: %s", error)
            raise RefusedError(error.kind) from error

    async def _call(
        self,
        exchange: Exchange,
        session: Session,
        dialect: Dialect,
        body: dict[str, Any],
        request: ModelRequest,
        headers: Mapping[str, str],
    ) -> None:
        call = Asked(dialect.name, headers, request)
        earlier = await self._made_before(session, call, marked=is_marked(headers))
        if session.sealed:
            raise RefusedError(SEALED)
        if earlier is not None:
            await self._join(session, earlier, exchange, dialect, request)
            return
        request = session.capture.restored(request, headers)
        lease = self._lease(session)
        request = with_overrides(request, session.sampling, lease.backend.probe.max_model_len)
        request = made_explicit(request)
        try:
            record = session.capture.open(
                request,
                completion_id=f"msg_{secrets.token_hex(6)}",
                dialect=dialect.name,
                headers=headers,
                kind=classify(request, dialect.name, headers),
            )
        except CaptureError as error:
            session.refused = error.failure
            logger.exception("session %s has no journal", session.session_id)
            raise RefusedError(UNRECORDED) from error
        generation = Generation(call, record)
        listener = generation.listener(exchange, dialect, request)
        sampler = Sampler(
            lease,
            self._config.engine_patience_seconds,
            session,
            generation,
            listener,
            request,
        )
        if dialect is responses and session.responses.wanted(body):
            sampler.before_the_end = lambda turn: session.responses.keep(
                body, dialect.answer(request, turn)
            )
        with session.generations.living(generation), sampler.keeping_record():
            async with anyio.create_task_group() as group:
                generation.scope = group.cancel_scope
                with in_flight(session, group.cancel_scope):
                    group.start_soon(self._attend, generation, listener)
                    await sampler.run()
                group.cancel_scope.cancel()
        if generation.refusal is not None:
            await listener.refuse(generation.refusal)

    async def _made_before(
        self, session: Session, call: Asked, *, marked: bool
    ) -> Generation | None:
        """The same call as it was made before, if this one only repeats it: one in flight whose
        harness is gone, or a finished one whose answer nobody received.

        While the other's harness is there, the repetition is a wish for another sample, unless it
        is marked as a repetition.
        """
        twin = session.generations.twin(call)
        if twin is not None and twin.attended and not marked:
            await anyio.sleep(TWIN_SECONDS)
            twin = session.generations.twin(call)
        return twin if twin is not None and (marked or not twin.attended) else None

    async def _join(
        self,
        session: Session,
        generation: Generation,
        exchange: Exchange,
        dialect: Dialect,
        request: ModelRequest,
    ) -> None:
        """Give a harness that has asked again the answer that is on its way, or was not received."""
        listener = generation.listener(exchange, dialect, request)
        received = False
        async with anyio.create_task_group() as group:
            with in_flight(session, group.cancel_scope):
                group.start_soon(self._attend, generation, listener)
                received = await generation.follow(listener)
            group.cancel_scope.cancel()
        if generation.turn is None or generation.refusal is not None:
            await listener.refuse(generation.refusal or SEALED)
        elif received and session.generations.claim(generation):
            try:
                session.capture.redelivered(generation.record.completion_id)
            except CaptureError as error:
                session.refused = error.failure
                logger.exception("session %s: a delivery was not recorded", session.session_id)

    async def _attend(self, generation: Generation, listener: Listener) -> None:
        """Give a waiting harness signs of life, and cancel a generation that nobody waits for:
        not at once, as harnesses come back and ask again."""
        exchange = listener.exchange
        pause = self._config.header_delay_seconds
        while not exchange.gone:
            with anyio.move_on_after(pause):
                await exchange.wait_gone()
                break
            pause = exchange.last_write + self._config.keep_alive_seconds - time.monotonic()
            if not exchange.started or pause <= 0:
                await listener.show_life()
                pause = self._config.keep_alive_seconds
        generation.left()
        while not generation.attended and generation.turn is None:
            remaining = generation.grace(self._config.retry_grace_seconds)
            if remaining <= 0:
                generation.scope.cancel()
                return
            await anyio.sleep(remaining)


@contextmanager
def in_flight(session: Session, generation: anyio.CancelScope) -> Iterator[None]:
    """Let the session's seal cancel the generation."""
    session.calls.add(generation)
    try:
        yield
    finally:
        session.calls.discard(generation)
