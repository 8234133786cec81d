"""One model call, top to bottom: who asks, in which dialect, for what; record, ask, record, answer.

The order is the promise: the intent is journalled before the engine is asked, and the record is
durable before the harness gets anything that it can act on, which is the end of a tool call and
the end of the turn. Text and reasoning flow as they come.
"""

import logging
import secrets
import time
from asyncio import sleep
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl

import anyio
import msgspec

from polar_gateway import dialects
from polar_gateway.capture.journal import CaptureError
from polar_gateway.capture.session import OpenCall
from polar_gateway.dialects import Route, anthropic, chat
from polar_gateway.dialects.turn import (
    BlockEnd,
    BlockStart,
    Dialect,
    ErrorKind,
    ModelRequest,
    TurnEnd,
    UnsupportedRequestError,
)
from polar_gateway.engines.base import Engine, EngineError, EngineReply, EngineStream
from polar_gateway.errors import Failure
from polar_gateway.protocol import Sampling
from polar_gateway.request_body import (
    MAX_BODY_BYTES,
    RefusedError,
    decoded,
    inflated,
    invalid,
    too_large,
)
from polar_gateway.sessions import Session, Sessions

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_UNREAD_BYTES = 128 << 20
"""Of the request bodies that one session is sending at a time."""
MAX_CALLS = 256
"""Of one session at a time; harnesses with parallel sub-agents make a few dozen."""

SEALED = ErrorKind(status=400, code="session_closed", message="this session has ended")
"""400, because that is what command-line agents ask again least: most never, Claude Code 6 times
within seconds, whereas 401, 404 and 5xx are asked again for minutes."""

UNRECORDED = ErrorKind(
    status=500, code="internal", message="the gateway could not record this call"
)
"""Why not is for the operator; it names files of the host."""

_JSON = (b"content-type", b"application/json")
_SSE = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Intake:
    """How much of their unfinished request bodies the sessions have sent, each bounded."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: Counter[str] = Counter()

    @contextmanager
    def of(self, session_id: str) -> Iterator[Callable[[int], None]]:
        """Yields what to call with the size of each piece; raises RefusedError past the limit."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            taken += size
            self._held[session_id] += size
            if self._held[session_id] > self._limit:
                message = f"this session is sending more than {self._limit} bytes at once"
                raise RefusedError(ErrorKind(status=429, code="rate_limit", message=message))

        try:
            yield take
        finally:
            self._held[session_id] -= taken
            if not self._held[session_id]:
                del self._held[session_id]


class Client:
    """The harness's end of one exchange; writes nothing more once it is gone."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._starting = anyio.Lock(fast_acquire=True)
        self.gone = False
        self.started = False
        self._ending = False
        self.last_write = 0.0

    async def body(self, limit: int, take: Callable[[int], None]) -> bytes:
        """The whole request body; `take` hears of its pieces. Raises RefusedError past `limit`."""
        message = await self._receive()
        whole: bytes = message.get("body", b"")
        if message.get("more_body"):
            parts, size = [whole], len(whole)
            take(size)
            while message.get("more_body"):
                message = await self._receive()
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                take(len(parts[-1]))
                if size > limit:
                    break
            whole = b"".join(parts)
        if message["type"] == "http.disconnect":
            raise RefusedError(invalid("the request ended in the middle of its body"))
        if len(whole) > limit:
            raise RefusedError(too_large(f"is larger than {limit} bytes"))
        return whole

    async def wait_gone(self) -> None:
        """Return when the harness has closed its connection, which it is heard to do only here."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True

    async def answer(self, status: int, body: bytes) -> bool:
        """Send a whole answer; False when the harness was gone before it was written."""
        headers = [_JSON, (b"content-length", b"%d" % len(body))]
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
        return await self._finish()

    async def write(self, data: bytes) -> None:
        """Send a piece of a streamed answer, headers first."""
        self.last_write = time.monotonic()
        if self.gone or self._ending:
            return
        if not self.started:
            async with self._starting:
                if not self.started:
                    start = {"type": "http.response.start", "status": 200, "headers": _SSE}
                    await self._send(start)
                    self.started = True
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> bool:
        """End a streamed answer; False when the harness was gone before the last piece."""
        self._ending = True
        return await self._finish()

    async def _finish(self) -> bool:
        if not self.gone:
            # The server drops what is written to a lost connection without a word. One turn of
            # the loop lets `wait_gone` say so first.
            await sleep(0)
        delivered = not self.gone
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        return delivered


class Call:
    """One model call of a session on its way."""

    def __init__(
        self,
        client: Client,
        session: Session,
        dialect: Dialect,
        request: ModelRequest,
        record: OpenCall,
    ) -> None:
        self.client = client
        self.session = session
        self.dialect = dialect
        self.request = request
        self.record = record
        self.created = int(time.time())
        self.streamer = dialect.streamer(request, record.completion_id, self.created)
        self.stream: EngineStream | None = None
        self._opened = False

    def follow(self, stream: EngineStream) -> None:
        self.stream = stream
        self.record.follow(stream, sent_sampling(self.request))

    def opening(self, prompt_tokens: int) -> bytes:
        """What a streamed answer begins with; empty from the second time on."""
        if self._opened:
            return b""
        self._opened = True
        return self.streamer.open(prompt_tokens)

    def keep(self, reply: EngineReply) -> None:
        """Make the record durable."""
        self.record.close(reply, sent_sampling(self.request))
        failure = self.session.engine_failure
        if failure is not None and failure.boundary == "engine":
            self.session.engine_failure = None

    def undelivered(self) -> None:
        try:
            self.record.undelivered()
        except CaptureError as error:
            self.failed(error)

    def failed(self, error: EngineError | CaptureError) -> ErrorKind:
        """Note why there is no answer; returns what the harness shall hear."""
        session = self.session
        if isinstance(error, CaptureError):
            if session.sealed:
                return SEALED
            session.engine_failure = error.failure
            logger.error("session %s: %s", session.session_id, error)
            return UNRECORDED
        session.engine_failure = Failure(
            boundary="engine", message=str(error), infra=error.infra, detail=error.detail
        )
        logger.warning("session %s: %s", session.session_id, error)
        code = "call_failed" if self.stream is None else "engine_broke_off"
        try:
            self.record.fail(str(error), code)
        except CaptureError as lost:
            return self.failed(lost)
        return error.kind

    def abandoned(self) -> ErrorKind:
        """The generation was cancelled, by the session's seal or because its harness went."""
        try:
            self.record.fail("the harness went away", "call_abandoned")
        except CaptureError as error:
            return self.failed(error)
        return SEALED


class Proxy:
    """The ASGI application of the model listener."""

    def __init__(
        self,
        *,
        sessions: Sessions,
        engine: Engine,
        model_served: str,
        max_model_len: int | None = None,
        header_delay: float = 10.0,
        keep_alive: float = 10.0,
        retry_grace: float = 5.0,
        max_body_bytes: int = MAX_BODY_BYTES,
        max_unread_bytes: int = MAX_UNREAD_BYTES,
        max_calls: int = MAX_CALLS,
    ) -> None:
        self._sessions = sessions
        self._engine = engine
        self._model_served = model_served
        self._max_model_len = max_model_len
        self._header_delay = header_delay
        """Seconds after which a stream's headers leave without an event to go with them."""
        self._keep_alive = keep_alive
        """Seconds of silence after which the harness is given a sign of life."""
        self._retry_grace = retry_grace
        """Seconds for which a generation outlives its client."""
        self._max_body_bytes = max_body_bytes
        self._intake = Intake(max_unread_bytes)
        self._max_calls = max_calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        client = Client(receive, send)
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        route = dialects.route(scope["method"], scope["path"], query, headers)
        dialect = chat if route is None else route.dialect
        try:
            if route is None:
                message = f"nothing is served at {scope['method']} {scope['path']}"
                refused = ErrorKind(status=404, code="not_found", message=message)
            elif route.kind == "probe":
                await client.answer(200, b"{}")
                return
            elif route.kind == "websocket":
                message = "no WebSocket is served here; use HTTP"
                refused = ErrorKind(status=426, code="invalid_request", message=message)
            else:
                session = self._session(headers, scope["query_string"])
                await self._serve(client, session, route, headers)
                return
        except RefusedError as error:
            refused = error.kind
        await client.answer(dialect.error_status(refused), dialect.error_body(refused))

    async def _serve(
        self, client: Client, session: Session, route: Route, headers: Mapping[str, str]
    ) -> None:
        """Answer what a session's harness may ask. Raises RefusedError before any answer began."""
        dialect = route.dialect
        if route.kind == "models":
            await client.answer(200, dialect.models_body([self._model_served]))
            return
        if len(session.calls) >= self._max_calls:
            message = f"this session has {self._max_calls} model calls in flight"
            raise RefusedError(ErrorKind(status=429, code="rate_limit", message=message))
        tokens: int | None = None
        with anyio.CancelScope() as asking, in_flight(session, asking):
            body, notes = await self._read(client, session, headers)
            body.update(route.fields)
            request = self._normalise(session, dialect, body, notes)
            if route.kind == "count_tokens":
                tokens = await self._count(request)
        if asking.cancelled_caught:
            raise RefusedError(SEALED)
        if tokens is not None:
            await client.answer(200, dialect.count_body(tokens))
        else:
            await self._call(client, session, dialect, request, headers)

    def _session(self, headers: Mapping[str, str], query_string: bytes) -> Session:
        query = dict(parse_qsl(query_string.decode("latin-1"))) if query_string else {}
        key = dialects.api_key(headers, query)
        session = self._sessions.by_key(key) if key else None
        if session is None:
            message = "no live session has this API key" if key else "an API key is needed"
            raise RefusedError(ErrorKind(status=401, code="authentication", message=message))
        if session.sealed:
            raise RefusedError(SEALED)
        return session

    async def _read(
        self, client: Client, session: Session, headers: Mapping[str, str]
    ) -> tuple[dict[str, Any], list[str]]:
        """The request's body, and notes of what was changed to read it."""
        limit = self._max_body_bytes
        if int(headers.get("content-length") or 0) > limit:
            raise RefusedError(too_large(f"is larger than {limit} bytes"))
        with self._intake.of(session.session_id) as take:
            data = await client.body(limit, take)
        encoding = headers.get("content-encoding", "identity")
        if encoding != "identity":
            data = inflated(data, encoding, limit)
        return decoded(data)

    def _normalise(
        self, session: Session, dialect: Dialect, body: dict[str, Any], notes: list[str]
    ) -> ModelRequest:
        try:
            request = dialect.normalise(body)
        except UnsupportedRequestError as error:
            if dialect is anthropic:
                # Claude Code answers a 400 by asking for something else, with other tools; what
                # it would then do is no longer the task, so the session fails for this reason.
                session.engine_failure = Failure(
                    boundary="harness",
                    message=f"the harness asked for what is not supported: {error}",
                )
            raise RefusedError(invalid(str(error))) from error
        if notes:
            request = msgspec.structs.replace(request, notes=[*request.notes, *notes])
        return with_overrides(request, session.sampling, self._max_model_len)

    async def _count(self, request: ModelRequest) -> int:
        try:
            return await self._engine.count_tokens(request)
        except EngineError as error:
            logger.warning("tokens could not be counted: %s", error)
            raise RefusedError(error.kind) from error

    async def _call(
        self,
        client: Client,
        session: Session,
        dialect: Dialect,
        request: ModelRequest,
        headers: Mapping[str, str],
    ) -> None:
        if session.sealed:
            raise RefusedError(SEALED)
        completion_id = f"msg_{secrets.token_hex(6)}"
        try:
            record = session.capture.open(
                request, completion_id=completion_id, dialect=dialect.name, headers=headers
            )
        except CaptureError as error:
            session.engine_failure = error.failure
            logger.exception("session %s has no journal", session.session_id)
            raise RefusedError(UNRECORDED) from error
        call = Call(client, session, dialect, request, record)
        if request.stream:
            await self._stream(call)
        else:
            await self._whole(call)

    async def _whole(self, call: Call) -> None:
        refusal: ErrorKind | None = None
        answered = False
        async with anyio.create_task_group() as group:
            with in_flight(call.session, group.cancel_scope):
                group.start_soon(self._outlive, call.client, group.cancel_scope)
                try:
                    reply = await self._engine.complete(
                        call.request, call.record.completion_id, call.record.after
                    )
                    call.keep(reply)
                except (EngineError, CaptureError) as error:
                    refusal = call.failed(error)
                else:
                    answered = True
                    turn = reply.turn(call.record.completion_id, call.created)
                    if not await call.client.answer(200, call.dialect.answer(call.request, turn)):
                        call.undelivered()
            group.cancel_scope.cancel()
        if not answered:
            raise RefusedError(refusal or call.abandoned())

    async def _stream(self, call: Call) -> None:
        refusal: ErrorKind | None = None
        answered = False
        stream: EngineStream | None = None
        async with anyio.create_task_group() as group:
            with in_flight(call.session, group.cancel_scope):
                group.start_soon(self._outlive, call.client, group.cancel_scope)
                group.start_soon(self._show_life, call)
                try:
                    stream = await self._engine.stream(
                        call.request, call.record.completion_id, call.record.after
                    )
                    call.follow(stream)
                    await self._forward(call, stream)
                except (EngineError, CaptureError) as error:
                    refusal = call.failed(error)
                else:
                    answered = True
                    if not await call.client.end():
                        call.undelivered()
                finally:
                    if stream is not None:
                        await stream.aclose()
            group.cancel_scope.cancel()
        if answered:
            return
        refusal = refusal or call.abandoned()
        if not call.client.started:
            raise RefusedError(refusal)
        await call.client.write(call.streamer.error(refusal))
        await call.client.end()

    async def _forward(self, call: Call, stream: EngineStream) -> None:
        """Hand a generation on as it comes, each part when its record allows it."""
        client, streamer = call.client, call.streamer
        in_call = False
        async for events in stream:
            data = call.opening(stream.prompt_tokens)
            ends_call = False
            for event in events:
                data += streamer.event(event)
                if isinstance(event, BlockStart):
                    in_call = event.kind == "call"
                elif isinstance(event, BlockEnd) and in_call:
                    ends_call = True
            if ends_call:
                call.record.append()
            await client.write(data)
        reply = stream.reply
        call.keep(reply)
        end = TurnEnd(turn=reply.turn(call.record.completion_id, call.created))
        await client.write(call.opening(stream.prompt_tokens) + streamer.event(end))

    async def _outlive(self, client: Client, generation: anyio.CancelScope) -> None:
        """Cancel a generation some time after its client went: it may come back and ask again."""
        await client.wait_gone()
        await anyio.sleep(self._retry_grace)
        generation.cancel()

    async def _show_life(self, call: Call) -> None:
        """Send headers when they are due, and a sign of life whenever there was long silence."""
        client = call.client
        await anyio.sleep(self._header_delay)
        if opening := call.opening(0):
            await client.write(opening)
        while not client.gone:
            silence = time.monotonic() - client.last_write
            if silence < self._keep_alive:
                await anyio.sleep(self._keep_alive - silence)
            else:
                await client.write(call.streamer.keep_alive())


@contextmanager
def in_flight(session: Session, generation: anyio.CancelScope) -> Iterator[None]:
    """Let the session's seal cancel the generation."""
    session.calls.add(generation)
    try:
        yield
    finally:
        session.calls.discard(generation)


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
    asked = {**request.sampling, "max_tokens": request.max_tokens}
    wanted = {**overrides, "max_tokens": limit}
    notes = [
        f"{name}: {value} instead of {asked.get(name)}"
        for name, value in wanted.items()
        if asked.get(name) != value
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
