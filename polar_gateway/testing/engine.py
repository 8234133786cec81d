"""A model server without a model: vLLM's chat API, real tokenizer, real template, scripted words.

    python -m polar_gateway.testing.engine --port 0 --script FILE

or, in a test, `async with ScriptedEngine(script) as engine: ...  engine.url`. It answers as vLLM 0.32
with the hermes and qwen3 parsers does, ids and log probabilities included, and says in `/v1/models`,
in `/version` and in each answer's `system_fingerprint` that it is scripted. What it was asked and
what it said stays in `engine.calls` and under `GET /scripted/calls`; `engine.faults` and
`POST /scripted/faults` make the next calls fail, `engine.die()` all until `engine.revive()`, and
between `engine.hold()` and `engine.release()` it keeps silent.
"""

import os
import random
import re
import secrets
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import anyio
import click
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from polar_gateway.testing.chat_request import ApiError, ChatRequest, checked, decoded, refused
from polar_gateway.testing.generation import Generation, Token, generate
from polar_gateway.testing.parsing import TurnParser
from polar_gateway.testing.policy import SeededPolicy
from polar_gateway.testing.script import THINKING_CLOSED, Script, ScriptFile
from polar_gateway.testing.serve import Service, service
from polar_gateway.testing.tokenizer import ChatTokenizer, RenderError

MODEL = "tiny"
VERSION = "scripted-1"
DESCRIPTION = "a scripted engine for tests and demos: no model, it says what its script says"

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Fault(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How the next calls go wrong; what is unset goes as usual."""

    times: int = 1
    """How many calls it spoils before it is used up."""
    skip: int = 0
    """How many calls it lets pass first."""
    match: str = ""
    """Regular expression: only calls whose request, as JSON, has it are spoiled or let pass."""
    status: int | None = None
    """Answer with this status and an error document."""
    message: str = "scripted fault"
    headers: dict[str, str] = {}
    """Of the answer with `status`, such as retry-after."""
    delay: float = 0.0
    """Seconds before the first token, before the status or before hanging up."""
    token_delay: float | None = None
    """Seconds between tokens, instead of the engine's own."""
    stall_after: int | None = None
    """Fall silent after this many tokens, for `stall` seconds."""
    stall: float = 0.0
    hang_up: bool = False
    """Cut the connection without an answer."""
    disconnect_after: int | None = None
    """Cut the connection after the headers and this many tokens."""
    error_after: int | None = None
    """Streamed: an error inside the stream after this many tokens. Whole: status 500."""
    abort_after: int | None = None
    """End with finish_reason "abort" after this many tokens."""
    omit: list[Literal["prompt_token_ids", "token_ids", "logprobs"]] = []
    """What the answer leaves out."""


class Call(msgspec.Struct, kw_only=True):
    """One chat completion that was asked for."""

    request_id: str
    request: dict[str, Any] = {}
    received_at: float
    """Seconds since the epoch."""
    status: int = 200
    prompt: str = ""
    """As rendered."""
    prompt_token_ids: list[int] = []
    token_ids: list[int] = []
    logprobs: list[float] = []
    finish_reason: str | None = None
    message: dict[str, Any] | None = None
    """The answer as the whole, unstreamed one would have it."""
    sent_tokens: int = 0
    finished: bool = False
    """False while it runs, and for ever when the client went away."""


class ScriptedEngine:
    """The server, and the context manager that runs it on a port."""

    def __init__(
        self,
        script: Script | ScriptFile | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        model: str = MODEL,
        max_model_len: int = 131_072,
        token_delay: float = 0.0,
        seed: int = 0,
        faults: Iterable[Fault] = (),
        renders: bool = True,
        strict_limits: bool = False,
        lossy_streams: bool = False,
        keep_calls: int = 256,
    ) -> None:
        self._script = script or Script()
        self._address = (host, port)
        self.model = model
        self.max_model_len = max_model_len
        self.token_delay = token_delay
        """Seconds from one token to the next."""
        self.faults = list(faults)
        self.renders = renders
        """Whether it says how it renders requests, as vLLM does with --enable-scale-out."""
        self.strict_limits = strict_limits
        """Whether it refuses to be asked for more output than there is room for, as vLLM 0.20."""
        self.lossy_streams = lossy_streams
        """Whether tokens without text are left out of streams, as vLLM 0.10 did."""
        self.calls: deque[Call] = deque(maxlen=keep_calls)
        """The latest calls, oldest first."""
        self.total_calls = 0
        self.url = ""
        self.tokenizer = ChatTokenizer()
        self.policy = SeededPolicy(self.tokenizer.size, seed)
        self.fingerprint = f"scripted-{seed}"
        self._held_after: int | None = None
        self._held_anew = anyio.Event()
        self._chance = random.Random(seed)
        self._service: Service | None = None
        self._stack = AsyncExitStack()
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", _ChatEndpoint(self), methods=["POST"]),
                Route("/v1/chat/completions/render", self._render, methods=["POST"]),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/version", self._version),
                Route("/health", self._health),
                Route("/scripted/calls", self._list_calls),
                Route("/scripted/faults", self._set_faults, methods=["POST"]),
            ]
        )

    async def __aenter__(self) -> Self:
        host, port = self._address
        running = service(self.app, host=host, port=port)
        self._service = await self._stack.enter_async_context(running)
        self.url = self._service.url
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    async def die(self) -> None:
        """Break every answer off and answer nothing more."""
        await self._running.die()

    async def revive(self) -> None:
        """Answer again at the same URL."""
        await self._running.start()

    def hold(self, after: int = 0) -> None:
        """Say no more than `after` tokens of any answer, and no error's status, until `release`."""
        self._hold(after)

    def release(self) -> None:
        """Go on with all that is held."""
        self._hold(None)

    def _hold(self, after: int | None) -> None:
        self._held_after = after
        self._held_anew.set()
        self._held_anew = anyio.Event()

    async def allowed(self, number: int) -> None:
        """Wait until the token of this number, counted from 0, may be said."""
        while self._held_after is not None and number >= self._held_after:
            await self._held_anew.wait()

    @property
    def _running(self) -> Service:
        assert self._service is not None, "the engine is run by `async with`"
        return self._service

    def hang_up(self, client: tuple[str, int]) -> None:
        """Cut the connection of the client at this address."""
        self._running.cut(client)

    @property
    def script(self) -> Script:
        return self._script.current() if isinstance(self._script, ScriptFile) else self._script

    def next_fault(self, request: str) -> Fault:
        """The fault of the call that begins now, which counts as used."""
        for fault in self.faults:
            if fault.match and not re.search(fault.match, request):
                continue
            if fault.skip > 0:
                fault.skip -= 1
                return Fault()
            if fault.times > 0:
                fault.times -= 1
                return fault
        return Fault()

    def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, **arguments: Any
    ) -> str:
        """The prompt as text. Raises ApiError when the template refuses."""
        try:
            return self.tokenizer.render(messages, tools, **arguments)
        except RenderError as error:
            raise refused(str(error)) from error

    def room(self, prompt_ids: list[int], request: ChatRequest) -> int:
        """How many tokens an answer may have. Raises ApiError when there is no room for one."""
        room = self.max_model_len - len(prompt_ids)
        asked = request.max_tokens
        if self.strict_limits and asked is not None and asked > room:
            least = self.max_model_len - asked + 1
            raise refused(
                f"This model's maximum context length is {self.max_model_len} tokens. However, "
                f"you requested {asked} output tokens and your prompt contains at least {least} "
                f"input tokens, for a total of at least {self.max_model_len + 1} tokens. Please "
                "reduce the length of the input prompt or the number of requested output tokens. "
                f"(parameter=input_tokens, value={least})",
                "input_tokens",
            )
        if room < 1:
            least = self.max_model_len + 1
            raise refused(
                f"This model's maximum context length is {self.max_model_len} tokens. However, "
                f"your prompt contains at least {least} input tokens, which exceeds this limit "
                "even without any output tokens. Please reduce the length of the input prompt. "
                f"(parameter=input_tokens, value={least})",
                "input_tokens",
            )
        return room if asked is None else min(room, asked)

    def say(self, prompt: str, prompt_ids: list[int], request: ChatRequest) -> Generation:
        """All that will be said to a prompt. Raises ApiError when there is no room for a token."""
        limit = self.room(prompt_ids, request)
        line = self.script.line(prompt)
        if request.parse_tools and not request.parallel_tool_calls:
            # vLLM's grammar then ends the turn after the first call.
            call, end, _ = line.text.partition("</tool_call>")
            line = line._replace(text=call + end)
        return generate(
            line,
            prompt_ids,
            self.tokenizer,
            self.policy,
            limit=limit,
            temperature=request.temperature,
            stop=request.stop,
            source=self._chance if request.seed is None else random.Random(request.seed),
        )

    async def _render(self, request: Request) -> Response:
        if not self.renders:
            disabled = ApiError(403, "Scale-out endpoints are disabled.", "PermissionDeniedError")
            return _response(disabled.document, disabled.status)
        try:
            asked = checked(decoded(await request.body()), self.model, self.max_model_len)
            ids = self.tokenizer.encode(
                self.render(asked.messages, asked.tools, **asked.template_arguments)
            )
            limit = self.room(ids, asked)
        except ApiError as error:
            return _response(error.document, error.status)
        return _response(
            {
                "request_id": f"chatcmpl-{secrets.token_hex(8)}",
                "token_ids": ids,
                "sampling_params": {
                    "temperature": asked.temperature,
                    "stop": asked.stop,
                    "max_tokens": limit,
                },
                "model": self.model,
                "stream": asked.stream,
            }
        )

    async def _tokenize(self, request: Request) -> Response:
        """As in vLLM, tools reach the template as they came, which the chat endpoint's do not."""
        try:
            body = decoded(await request.body())
            prompt = body.get("prompt")
            if prompt is None:
                prompt = self.render(
                    body["messages"],
                    body.get("tools"),
                    add_generation_prompt=body.get("add_generation_prompt", True),
                    **body.get("chat_template_kwargs") or {},
                )
        except ApiError as error:
            return _response(error.document, error.status)
        ids = self.tokenizer.encode(prompt)
        return _response(
            {
                "count": len(ids),
                "max_model_len": self.max_model_len,
                "tokens": ids,
                "token_strs": None,
            }
        )

    async def _models(self, _: Request) -> Response:
        card = {
            "id": self.model,
            "object": "model",
            "created": 0,
            "owned_by": "scripted",
            "description": DESCRIPTION,
            "root": self.model,
            "parent": None,
            "max_model_len": self.max_model_len,
            "permission": [],
        }
        return _response({"object": "list", "data": [card]})

    async def _version(self, _: Request) -> Response:
        return _response({"version": VERSION})

    async def _health(self, _: Request) -> Response:
        return Response()

    async def _list_calls(self, _: Request) -> Response:
        return _response({"total": self.total_calls, "calls": list(self.calls)})

    async def _set_faults(self, request: Request) -> Response:
        try:
            self.faults = msgspec.json.decode(await request.body(), type=list[Fault])
        except msgspec.DecodeError as error:
            return _response(refused(str(error)).document, 400)
        return _response({"faults": len(self.faults)})


def _response(document: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(document), status, media_type="application/json")


class _ChatEndpoint:
    """POST /v1/chat/completions as a bare ASGI application, which can cut its connection off."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        raw = await request.body()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_cancel_when_gone, receive, tasks.cancel_scope)
            await self._answer(request, raw, send)
            tasks.cancel_scope.cancel()

    async def _answer(self, request: Request, raw: bytes, send: Send) -> None:
        engine, fault = self._engine, self._engine.next_fault(raw.decode("utf-8", "replace"))
        name = request.headers.get("x-request-id") or secrets.token_hex(8)
        call = Call(
            request_id=f"chatcmpl-{name}",
            received_at=time.time(),
        )
        engine.total_calls += 1
        engine.calls.append(call)
        if fault.hang_up:
            await anyio.sleep(fault.delay)
            engine.hang_up(tuple(request.scope["client"]))
            await anyio.sleep_forever()  # until it is noticed that the client is gone
        try:
            answer = await self._begun(call, raw, fault)
        except ApiError as error:
            call.status, call.finished = error.status, True
            await _start(send, error.status, b"application/json", fault.headers)
            await _finish(send, msgspec.json.encode(error.document))
            return
        if answer.streamed:
            await _start(send, 200, b"text/event-stream; charset=utf-8")
            async for event in answer.events():
                data = b"data: " + event + b"\n\n"
                await send({"type": "http.response.body", "body": data, "more_body": True})
            last = b""
        else:
            last = msgspec.json.encode(await answer.document())
            await _start(send, 200, b"application/json")
        if answer.cut_off:
            return  # the server closes a connection whose answer is unfinished
        await _finish(send, last)
        call.finished = True

    async def _begun(self, call: Call, raw: bytes, fault: Fault) -> "_Answer":
        """Raises ApiError."""
        engine = self._engine
        call.request = decoded(raw)
        request = checked(call.request, engine.model, engine.max_model_len)
        if fault.status is not None:
            await anyio.sleep(fault.delay)
            await engine.allowed(0)
            raise ApiError(fault.status, fault.message, "ScriptedFault")
        call.prompt = engine.render(request.messages, request.tools, **request.template_arguments)
        call.prompt_token_ids = engine.tokenizer.encode(call.prompt)
        generation = engine.say(call.prompt, call.prompt_token_ids, request)
        if fault.error_after is not None and not request.stream:
            raise ApiError(500, fault.message, "InternalServerError")
        if fault.abort_after is not None:
            generation = Generation(generation.tokens[: fault.abort_after], "abort")
        return _Answer(engine, call, request, generation, fault)


async def _cancel_when_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _start(send: Send, status: int, kind: bytes, more: dict[str, str] | None = None) -> None:
    headers = [(b"content-type", kind)]
    headers += [(name.encode(), value.encode()) for name, value in (more or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _finish(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body})


class _Answer:
    """One generation as vLLM's documents, at its pace."""

    def __init__(
        self,
        engine: ScriptedEngine,
        call: Call,
        request: ChatRequest,
        generation: Generation,
        fault: Fault,
    ) -> None:
        self._engine = engine
        self._call = call
        self._request = request
        self._generation = generation
        self._fault = fault
        self._show_ids = request.return_token_ids and "token_ids" not in fault.omit
        self._show_logprobs = request.logprobs and "logprobs" not in fault.omit
        self._parser = TurnParser(
            thinking=not call.prompt.endswith(THINKING_CLOSED),
            tools=request.parse_tools,
        )
        self.streamed = request.stream
        self.cut_off = False
        """Set when the fault ended it before its end."""
        call.token_ids = [token.token_id for token in generation.tokens]
        call.logprobs = [token.logprob for token in generation.tokens]

    async def document(self) -> dict[str, Any]:
        tokens = [token async for token in self._paced()]
        for token in tokens:
            self._parse(token)
        message = self._conclude(called=None)
        return {
            "id": self._call.request_id,
            "object": "chat.completion",
            "created": int(self._call.received_at),
            "model": self._engine.model,
            "choices": [
                {
                    "index": 0,
                    "message": message,
                    "logprobs": self._logprobs(tokens),
                    "finish_reason": self._call.finish_reason,
                    "stop_reason": self._generation.stop_reason,
                    "token_ids": self._call.token_ids if self._show_ids else None,
                    "routed_experts": None,
                }
            ],
            "service_tier": None,
            "system_fingerprint": self._engine.fingerprint,
            "usage": {**self._usage(), "prompt_tokens_details": None},
            "prompt_logprobs": None,
            "prompt_token_ids": self._prompt_ids(),
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    async def events(self) -> AsyncIterator[bytes]:
        """The data of each server-sent event: a first chunk with the prompt's ids, then a chunk a
        token, then usage if it was asked for, then the mark of the end."""
        tokens = self._generation.tokens
        yield self._chunk(
            [{"index": 0, "delta": {"role": "assistant", "content": ""}, **_NOTHING_YET}],
            prompt_token_ids=self._prompt_ids(),
            prompt_text=None,
        )
        async for token in self._paced():
            delta = self._parse(token)
            last = self._call.sent_tokens == len(tokens)
            logprobs = self._logprobs([token])
            shown = delta or (not self._engine.lossy_streams and (logprobs or self._show_ids))
            if not (shown or last):
                continue
            choice: dict[str, Any] = {
                "index": 0,
                "delta": delta,
                "logprobs": logprobs,
                "finish_reason": None,
                "token_ids": [token.token_id] if self._show_ids else None,
            }
            more: dict[str, Any] = {}
            if last:
                self._conclude(called=self._parser.called)
                choice["finish_reason"] = self._call.finish_reason
                choice["stop_reason"] = self._generation.stop_reason
                if not self._request.include_usage:
                    more["system_fingerprint"] = self._engine.fingerprint
            yield self._chunk([choice], **more)
        if self.cut_off:
            return
        if self._call.sent_tokens < len(tokens):
            error = ApiError(500, self._fault.message, "InternalServerError")
            yield msgspec.json.encode(error.document)
        elif self._request.include_usage:
            fingerprint = self._engine.fingerprint
            yield self._chunk([], usage=self._usage(), system_fingerprint=fingerprint)
        yield b"[DONE]"

    async def _paced(self) -> AsyncIterator[Token]:
        """The tokens, each when it is due, as far as the fault lets them come."""
        fault, delay = self._fault, self._engine.token_delay
        if fault.token_delay is not None:
            delay = fault.token_delay
        due = anyio.current_time() + fault.delay
        for number, token in enumerate(self._generation.tokens):
            await self._engine.allowed(number)
            if number == fault.error_after:
                return
            if number == fault.disconnect_after:
                self.cut_off = True
                return
            if number == fault.stall_after:
                due = max(due, anyio.current_time()) + fault.stall
            if fault.delay or delay or fault.stall:
                await anyio.sleep_until(due)
            due += delay
            self._call.sent_tokens += 1
            yield token

    def _parse(self, token: Token) -> dict[str, Any]:
        return self._parser.feed(self._engine.tokenizer.bytes_of[token.token_id], token.text)

    def _conclude(self, *, called: bool | None) -> dict[str, Any]:
        """Record how it ended. `called` says whether calls went out, None that the message will."""
        message = self._parser.message()
        if called is None:
            called = "tool_calls" in message
        reason = self._generation.finish_reason
        self._call.finish_reason = "tool_calls" if called and reason == "stop" else reason
        self._call.message = message
        return message

    def _prompt_ids(self) -> list[int] | None:
        show = self._request.return_token_ids and "prompt_token_ids" not in self._fault.omit
        return self._call.prompt_token_ids if show else None

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        if not self._show_logprobs:
            return None
        return {
            "content": [
                {
                    **self._entry(token.token_id, token.logprob, token.text),
                    "top_logprobs": [
                        self._entry(*sample)
                        for sample in self._engine.policy.top(
                            token.context, self._request.top_logprobs
                        )
                    ],
                }
                for token in tokens
            ]
        }

    def _entry(self, token_id: int, logprob: float, completes: str = "") -> dict[str, Any]:
        """A token by its text. A part of a UTF-8 sequence has none, but for the last, which has
        the character that it `completes`."""
        spelled = self._engine.tokenizer.bytes_of[token_id]
        try:
            text = spelled.decode()
        except UnicodeDecodeError:
            text, spelled = completes, completes.encode()
        return {"token": text, "logprob": logprob, "bytes": list(spelled)}

    def _usage(self) -> dict[str, Any]:
        prompt, sampled = len(self._call.prompt_token_ids), len(self._call.token_ids)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + sampled,
            "completion_tokens": sampled,
            "completion_tokens_details": {"reasoning_tokens": self._parser.reasoning_tokens},
        }

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return msgspec.json.encode(
            {
                "id": self._call.request_id,
                "object": "chat.completion.chunk",
                "created": int(self._call.received_at),
                "model": self._engine.model,
                "choices": choices,
                **more,
            }
        )


_NOTHING_YET = {"logprobs": None, "finish_reason": None}


async def _run(engine: ScriptedEngine, ready_file: Path | None) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with engine:
            click.echo(f"{engine.url}  {DESCRIPTION}")
            if ready_file is not None:
                unfinished = ready_file.with_suffix(".part")
                unfinished.write_text(engine.url)
                os.replace(unfinished, ready_file)
            await anext(aiter(signals))


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=8000, show_default=True, help="0 takes a free one.")
@click.option("--script", "path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--model", default=MODEL, show_default=True, help="The name it serves under.")
@click.option("--max-model-len", default=131_072, show_default=True)
@click.option("--token-delay", default=0.0, show_default=True, help="Seconds between tokens.")
@click.option("--keep-calls", default=256, show_default=True, help="How many calls to remember.")
@click.option("--seed", default=0, show_default=True)
@click.option("--ready-file", type=click.Path(path_type=Path), help="Gets the URL once it answers.")
def main(
    host: str,
    port: int,
    path: Path | None,
    model: str,
    max_model_len: int,
    token_delay: float,
    keep_calls: int,
    seed: int,
    ready_file: Path | None,
) -> None:
    """Serve a scripted engine until SIGINT or SIGTERM. It is no model."""
    engine = ScriptedEngine(
        ScriptFile(path) if path else None,
        host=host,
        port=port,
        model=model,
        max_model_len=max_model_len,
        token_delay=token_delay,
        keep_calls=keep_calls,
        seed=seed,
    )
    anyio.run(_run, engine, ready_file)


if __name__ == "__main__":
    main()
