"""What the scripted servers of all protocols share: words, tokens, weights, pauses and faults.

A server of a protocol says what its routes are and how its documents look. Answers are planned as
soon as they are asked for and told token by token; what is left of them is planned anew when the
weights change.
"""

import random
import re
import zlib
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import anyio
import msgspec
from starlette.applications import Starlette

from polar_gateway.testing.calls import Call, Fault, VersionOf
from polar_gateway.testing.generation import Generation, Token, generate
from polar_gateway.testing.policy import SeededPolicy
from polar_gateway.testing.script import Line, Script, ScriptFile
from polar_gateway.testing.serve import Service, service
from polar_gateway.testing.tokenizer import ChatTokenizer

MODEL = "tiny"
VERSION = "scripted-1"
DESCRIPTION = "a scripted engine for tests and demos: no model, it says what its script says"
FIRST_WEIGHTS = "default"

Pause = Literal["wait", "keep", "abort"]


class Wanted(NamedTuple):
    """What decides on the tokens of an answer, beside the prompt."""

    limit: int
    temperature: float
    seed: int | None
    stop: list[str]
    single_call: bool = False
    """The turn ends behind its first tool call."""
    only: Sequence[int] = ()
    """The tokens that are allowed, if not all."""


class _TransferParams(msgspec.Struct):
    prompt_token_ids: list[int] = []


class _Prompted(msgspec.Struct):
    """The places in which a request of any protocol may hold its prompt as ids."""

    kv_transfer_params: _TransferParams = msgspec.field(default_factory=_TransferParams)
    token_ids: list[int] = []
    input_ids: list[int] = []


class ScriptedServer:
    """A server, and the context manager that runs it on a port."""

    app: Starlette

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
        keep_calls: int = 256,
        template_arguments: dict[str, Any] | None = None,
        processed_logprobs: bool = False,
        ignores_token_ids: bool = False,
        accepts_images: bool = False,
    ) -> None:
        self._script = script or Script()
        self._address = (host, port)
        self.model = model
        self.max_model_len = max_model_len
        self.token_delay = token_delay
        """Seconds from one token to the next."""
        self.faults = list(faults)
        self.template_arguments = template_arguments or {}
        """For every rendering, below what a request says. `{"history_thinking": "none"}` is a
        template that forgets the thinking of all earlier turns, "all" one that forgets none and
        "empty" one that puts an empty block where there was none."""
        self.processed_logprobs = processed_logprobs
        """Whether log probabilities are those at the request's temperature."""
        self.ignores_token_ids = ignores_token_ids
        """Whether a prompt's ids are dropped where it also gets messages."""
        self.accepts_images = accepts_images
        self.calls: deque[Call] = deque(maxlen=keep_calls)
        """The latest calls, oldest first."""
        self.total_calls = 0
        self.url = ""
        self.tokenizer = ChatTokenizer()
        self.policy = SeededPolicy(self.tokenizer.size, seed)
        self.weight_version = FIRST_WEIGHTS
        self.policies = {FIRST_WEIGHTS: self.policy}
        """What each version of the weights samples by, since it was named."""
        self.paused: Pause | None = None
        self._seed = seed
        self._held_after: int | None = None
        self._changed = anyio.Event()
        self.in_flight: set[Answer] = set()
        self._chance = random.Random(seed)
        self._service: Service | None = None
        self._stack = AsyncExitStack()

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

    @property
    def _running(self) -> Service:
        assert self._service is not None, "the engine is run by `async with`"
        return self._service

    def hang_up(self, client: tuple[str, int]) -> None:
        """Cut the connection of the client at this address."""
        self._running.cut(client)

    # What is said when.

    def hold(self, after: int = 0) -> None:
        """Say no more than `after` tokens of any answer, and no error's status, until `release`."""
        self._held_after = after
        self._change()

    def release(self) -> None:
        """Go on with all that is held."""
        self._held_after = None
        self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    def _holds(self, number: int) -> bool:
        held = self._held_after is not None and number >= self._held_after
        return held or self.paused == "keep"

    async def allowed(self, number: int) -> None:
        """Wait until the token of this number, counted from 0, may be said."""
        while self._holds(number):
            await self._changed.wait()

    async def pause(self, mode: Pause) -> None:
        """As vLLM's: answers in flight are finished first, stand still, or end where they are. What
        is asked for meanwhile waits."""
        self.paused = mode
        self._change()
        if mode == "abort":
            self.abort()
        while mode != "keep" and any(answer.begun for answer in self.in_flight):
            await self._changed.wait()

    def resume(self) -> None:
        self.paused = None
        self._change()

    def abort(self, request_ids: Iterable[str] | None = None) -> int:
        """End answers where they are, those that have begun if none are named; their number."""
        named = None if request_ids is None else set(request_ids)
        ended = [
            answer
            for answer in self.in_flight
            if (answer.begun if named is None else answer.call.request_id in named)
        ]
        for answer in ended:
            answer.abort()
        self._change()
        return len(ended)

    # By which weights.

    def load_weights(self, path: str | None) -> None:
        """Sample by other weights from now on: those that this path stands for, or the first."""
        seed = self._seed if path is None else zlib.crc32(path.encode())
        self.policy = SeededPolicy(self.tokenizer.size, seed)
        for answer in self.in_flight:
            answer.replan()

    def name_weights(self, version: str) -> None:
        self.weight_version = version
        self.policies[version] = self.policy

    # Which words.

    @property
    def script(self) -> Script:
        return self._script.current() if isinstance(self._script, ScriptFile) else self._script

    def next_fault(self, request: bytes) -> Fault:
        """The fault of the call that begins now, which counts as used."""
        said = self._said(request) if any(fault.match for fault in self.faults) else ""
        for fault in self.faults:
            if fault.match and not re.search(fault.match, said):
                continue
            if fault.skip > 0:
                fault.skip -= 1
                return Fault()
            if fault.times > 0:
                fault.times -= 1
                return fault
        return Fault()

    def _said(self, request: bytes) -> str:
        """A request as text, with the prompt's where that is sent as ids."""
        text = request.decode("utf-8", "replace")
        try:
            body = msgspec.json.decode(request, type=_Prompted)
        except msgspec.DecodeError:
            return text
        ids = body.kv_transfer_params.prompt_token_ids or body.token_ids or body.input_ids
        return text + self.tokenizer.decode([id for id in ids if id < self.tokenizer.size])

    def set_faults(self, document: bytes) -> int:
        """Raises msgspec.DecodeError."""
        self.faults = msgspec.json.decode(document, type=list[Fault])
        return len(self.faults)

    def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, **arguments: Any
    ) -> str:
        """The prompt as text. Raises RenderError when the template refuses."""
        return self.tokenizer.render(
            messages, tools, images=self.accepts_images, **{**self.template_arguments, **arguments}
        )

    def answer(self, call: Call, wanted: Wanted, fault: Fault) -> "Answer":
        """What will be said to the prompt of a call."""
        line = self.script.rest(self.tokenizer.spelled(call.prompt_token_ids))
        if wanted.single_call:  # a grammar ends the turn there
            text, end, _ = line.text.partition("</tool_call>")
            line = line._replace(text=text + end)
        return Answer(self, call, line, wanted, fault)

    def plan(self, call: Call, line: Line, wanted: Wanted, begun: list[Token]) -> Generation:
        return generate(
            line,
            call.prompt_token_ids,
            self.tokenizer,
            self.policy,
            limit=wanted.limit,
            temperature=wanted.temperature,
            stop=wanted.stop,
            source=self._chance if wanted.seed is None else random.Random(wanted.seed),
            processed=self.processed_logprobs,
            only=wanted.only,
            begun=begun,
        )

    @contextmanager
    def telling(self, answer: "Answer") -> Iterator[None]:
        """Count the answer among those in flight."""
        self.in_flight.add(answer)
        try:
            yield
        finally:
            self.in_flight.discard(answer)
            self._change()

    async def admit(self, answer: "Answer") -> None:
        while self.paused is not None and not answer.aborted:
            await self._changed.wait()
        answer.begun = True

    async def until(self, answer: "Answer", number: int, due: float | None) -> None:
        """Wait until the answer may say its token of this number, or is aborted."""
        while not answer.aborted:
            changed = self._changed
            if self._holds(number):
                await changed.wait()
            elif due is not None and anyio.current_time() < due:
                with anyio.CancelScope(deadline=due):
                    await changed.wait()
            else:
                return


class Answer:
    """One answer in the making."""

    def __init__(
        self, server: ScriptedServer, call: Call, line: Line, wanted: Wanted, fault: Fault
    ) -> None:
        self.call = call
        self.fault = fault
        self.begun = False
        """Whether it is being sampled, and not still waiting for a pause to end."""
        self.aborted = False
        self.cut_off = False
        """Set when the fault closed its connection before its end."""
        self.failed = False
        """Set when the fault ended it with an error."""
        self._server = server
        self._line = line
        self._wanted = wanted
        self._use(server.plan(call, line, wanted, []))

    @property
    def stop_reason(self) -> int | str | None:
        return self._plan.stop_reason

    @property
    def finish_reason(self) -> str:
        return self._plan.finish_reason

    @property
    def complete(self) -> bool:
        """Whether the latest token was the last."""
        return self.call.sent_tokens == len(self._plan.tokens)

    def _use(self, plan: Generation) -> None:
        after = self.fault.abort_after
        if after is not None and len(plan.tokens) > after:
            plan = Generation(plan.tokens[:after], "abort")
        self._plan = plan
        self.call.token_ids = [token.token_id for token in plan.tokens]
        self.call.logprobs = [token.logprob for token in plan.tokens]

    def replan(self) -> None:
        if not self.aborted:
            said = self._plan.tokens[: self.call.sent_tokens]
            if not self.complete:
                self._use(self._server.plan(self.call, self._line, self._wanted, said))

    def abort(self) -> None:
        if not self.complete:
            self.aborted = True
            self._use(Generation(self._plan.tokens[: self.call.sent_tokens], "abort"))

    async def tokens(self) -> AsyncIterator[Token]:
        """The tokens, each when it is due, as far as the fault lets them come."""
        await self._server.admit(self)
        fault, delay = self.fault, self._server.token_delay
        if fault.token_delay is not None:
            delay = fault.token_delay
        timed = bool(fault.delay or delay or fault.stall)
        due = anyio.current_time() + fault.delay
        while not self.complete:
            number = self.call.sent_tokens
            await self._server.until(self, number, None)
            if number == fault.error_after:
                self.failed = True
                return
            if number == fault.disconnect_after:
                self.cut_off = True
                return
            if number == fault.stall_after:
                due = max(due, anyio.current_time()) + fault.stall
            if timed:
                await self._server.until(self, number, due)
            due += delay
            if self.complete:
                return  # aborted meanwhile
            self.call.sent_tokens += 1
            self._stamp(number)
            yield self._plan.tokens[number]

    def _stamp(self, number: int) -> None:
        spans = self.call.weight_versions
        if spans and spans[-1].version == self._server.weight_version:
            spans[-1].end = number + 1
        else:
            spans.append(VersionOf(self._server.weight_version, number, number + 1))
