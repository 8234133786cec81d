"""Sessions made up at random, of which every token is known: a toy harness calls a toy engine
through the real capture and the real composing of prompts.

The engine knows what it read and what it sampled, the harness knows which answer it went on from.
Neither ever looks into the record; what that says must agree with them.
"""

import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import msgspec

from builders.records import Mode
from polar_gateway.capture.session import OpenCall, SessionCapture
from polar_gateway.config import InferenceConfig
from polar_gateway.dialects.messages import assistant_message, message_of
from polar_gateway.dialects.turn import Block, Call, ModelRequest, Reasoning, Text, Usage
from polar_gateway.engines.base import EngineProbe, EngineReply, Renders
from polar_gateway.engines.rendering import JsonRendering
from polar_gateway.engines.whole import WholeAsStream, events_of
from polar_gateway.prompts import Prompter
from tests.builders.world import (
    END,
    END_TEXT,
    OTHER_END,
    START,
    Message,
    World,
    body,
    decode,
    encode,
    render,
)

SYSTEM: Message = {"role": "system", "content": "You are an agent."}
EDIT = {
    "type": "function",
    "function": {
        "name": "edit",
        "parameters": {
            "type": "object",
            "properties": {"replace_all": {"type": "boolean", "default": False}},
        },
    },
}
OPENING = [START, *encode("assistant\n")]


class Asked(NamedTuple):
    """A call that the engine has been asked for."""

    record: OpenCall
    request: ModelRequest
    """As the engine is sent it."""
    prompt: list[int]
    """As the engine reads it."""


class Answered(NamedTuple):
    """What the engine did in one call, and what became of it."""

    completion_id: str
    request: ModelRequest
    prompt: list[int]
    sampled: list[int]
    logprobs: list[float]
    message: Message
    sound: bool
    """Whether its tokens may be trained on, as far as they were received."""
    delivered: bool
    told: int
    """How many of the tokens the harness was told."""
    durable: int
    """Length of the journal once its record was written."""


class Mark(NamedTuple):
    """So many leading messages of a conversation end with this answer, or with what was told of it."""

    messages: int
    answer: Answered
    continued: int | None


class Thread(NamedTuple):
    """A conversation as the harness has it."""

    messages: list[Message]
    marks: tuple[Mark, ...] = ()
    headers: tuple[tuple[str, str], ...] = ()

    def and_then(self, *messages: Message) -> "Thread":
        return self._replace(messages=[*self.messages, *messages])


class ToyEngine:
    """As much of an engine as composing prompts needs."""

    def __init__(self, *, forgets_thinking: bool) -> None:
        self._forgets = forgets_thinking

    def read(self, request: ModelRequest) -> list[int]:
        """The canonical rendering."""
        return render(request.messages, request.tools, forgets_thinking=self._forgets)

    async def render(self, request: ModelRequest, *, closed: bool = False) -> JsonRendering:
        ids = self.read(request)
        return JsonRendering(msgspec.json.encode(ids[: -len(OPENING)] if closed else ids))


class CapturedWorld:
    """One harness session, all of whose calls go through `capture`."""

    def __init__(
        self,
        words: World,
        folder: Path,
        *,
        prompts: Mode,
        history: Any = "template",
        renders: Renders = "full",
        deaf: float = 0.0,
        refers: bool = False,
        counts_calls: bool = True,
    ) -> None:
        """`deaf`: how often the engine reads its own rendering in place of the ids it is sent;
        `refers`: the harness says of each answer whose it is; `counts_calls`: no two calls of the
        session have the same id."""
        self.words = words
        self.random = words.random
        self.journal = folder / "session.journal"
        self.capture = SessionCapture(
            session_id="s1",
            task_id="t1",
            journal_path=self.journal,
            policy_version="v1",
            end_of_turn_ids=[END, OTHER_END],
        )
        self._engine = ToyEngine(forgets_thinking=words.forgets_thinking)
        self._prompter = Prompter(InferenceConfig(prompts=prompts, history=history))
        self._probe = EngineProbe(
            engine="toy",
            model="toy",
            token_ids=True,
            token_routes=["chat"],
            renders=renders,
            end_of_turn_ids=[END, OTHER_END],
            end_of_turn_texts=[END_TEXT, "<|other_end|>"],
        )
        self.tools = [EDIT]
        self.asked = 0
        self.answers: dict[str, Answered] = {}
        self.continues: dict[str, Mark | None] = {}
        """Completion -> what its request truly goes on from."""
        self._deaf = deaf
        self._refers = refers
        self._counts_calls = counts_calls

    # One call

    def ask(self, thread: Thread, *, kind: str = "turn") -> Asked:
        """Make a call; it is in flight until it is answered."""
        name = f"msg_{self.asked:012x}"
        self.asked += 1
        request = ModelRequest(
            model="toy", messages=[dict(each) for each in thread.messages], tools=self.tools
        )
        if self._refers:
            request.answers = {
                mark.messages - 1: mark.answer.completion_id for mark in thread.marks
            }
        request = self.capture.restored(request, dict(thread.headers))
        record = self.capture.open(
            request,
            completion_id=name,
            dialect="chat",
            headers=dict(thread.headers),
            kind=kind,
        )
        heads = (mark for mark in reversed(thread.marks) if mark.answer.request.tools == self.tools)
        self.continues[name] = next(heads, None)
        engine: Any = self._engine
        request = anyio.run(self._prompter.compose, request, record, engine, self._probe)
        if request.prompt_ids is not None and self.random.random() >= self._deaf:
            return Asked(record, request, request.prompt_ids.tolist())
        read = self._engine.read(request)
        request = self._prompter.instead(request, array("i", read), record) or request
        return Asked(record, request, read)

    def answer(
        self,
        asked: Asked,
        *,
        end: int = END,
        cut: bool = False,
        breaks: bool = False,
        told: float = 1.0,
        findings: tuple[str, ...] = (),
    ) -> Answered:
        """Sample an answer and record it. `cut`: it ends at its limit of tokens; `breaks`: the
        engine fails in the middle of it; `told`: the share of it that the harness receives."""
        number = int(asked.record.completion_id.removeprefix("msg_"), 16)
        said = self.words.say(number)
        if not self._counts_calls:
            said["tool_calls"] = [{**call, "id": "call_0"} for call in said.get("tool_calls", ())]
        sampled = [*self.words._cut(body(said)), end]
        if cut or breaks:
            sampled = sampled[: max(1, self.random.randrange(len(sampled)))]
        blocks = parsed(sampled, said.get("tool_calls") or [])
        reply = EngineReply(
            prompt_ids=array("i", asked.prompt),
            sampled_ids=array("i", sampled),
            logprobs=array("f", [-self.random.random() - number for _ in sampled]),
            blocks=blocks,
            finish_reason="length" if cut else "stop",
            usage=Usage(prompt_tokens=len(asked.prompt), completion_tokens=len(sampled)),
            logprob_kind="processed",
            findings=list(findings),
        )
        logprobs = reply.logprobs or array("f")
        if "logprobs_missing" in findings:
            reply.logprobs = None
        record = asked.record
        if breaks or self.random.random() < 0.5:
            record.follow(WholeAsStream(reply), {"temperature": 1.0})
            if self.random.random() < 0.5:
                record.append()
        heard = len(sampled)
        if told < 1.0 or breaks:
            heard = told_tokens(sampled, told)
            events = events_of(parsed(sampled[:heard]), cut=False) if heard else []
            record.heard(heard, events, len(events))
        if breaks:
            record.fail("the engine broke off", "engine_broke_off")
        else:
            record.close(reply, {"temperature": 1.0})
            if told < 1.0:
                record.undelivered()
        answered = Answered(
            completion_id=record.completion_id,
            request=asked.request,
            prompt=asked.prompt,
            sampled=sampled,
            logprobs=logprobs.tolist(),
            message=message_of(blocks),
            sound=not findings,
            delivered=told == 1.0 and not breaks,
            told=heard,
            durable=self.journal.stat().st_size,
        )
        self.answers[answered.completion_id] = answered
        return answered

    def call(self, thread: Thread, *, kind: str = "turn", **how: Any) -> Answered:
        return self.answer(self.ask(thread, kind=kind), **how)

    # What a harness makes of an answer

    def follow(self, thread: Thread, answer: Answered, *, partly: bool = False) -> Thread:
        """The conversation after the harness acted on an answer, or on what it was told of it."""
        if partly:
            echo, continued = message_of(parsed(answer.sampled[: answer.told])), answer.told
            results = []
        else:
            echo, continued = self._echo(answer.message), None
            results = [
                {
                    "role": "tool",
                    "tool_call_id": call["id"],
                    "content": f"result {self.asked}{self.words._aside()}",
                }
                for call in echo.get("tool_calls", ())
            ]
        nudge = {"role": "user", "content": f"go on {self.asked}{self.words._aside()}"}
        mark = Mark(len(thread.messages) + 1, answer, continued)
        gone_on = thread.and_then(echo, *(results or [nudge]))
        return gone_on._replace(marks=(*thread.marks, mark))

    def _echo(self, answer: Message) -> Message:
        """The answer as some harness sends it back: in other words that mean the same."""
        if self.words.faithful:
            return answer
        style = self.random.choice(["verbatim", "verbatim", "stripped", "thoughtless"])
        content = answer["content"].strip() if style == "stripped" else answer["content"]
        thought = "" if style == "thoughtless" else answer.get("reasoning_content", "")
        calls = [
            {**call, "function": self._respelt(call["function"])}
            for call in answer.get("tool_calls", ())
        ]
        return assistant_message(content, thought, calls)

    def _respelt(self, function: Message) -> Message:
        try:
            arguments = json.loads(function["arguments"])
        except ValueError:
            return function
        spelling = self.random.choice(["verbatim", "compact", "defaults"])
        if spelling == "verbatim":
            return function
        if spelling == "defaults":
            arguments = {"replace_all": False, **arguments}
        return {**function, "arguments": json.dumps(arguments, separators=(",", ":"))}


def parsed(sampled: list[int], calls: Sequence[Message] = ()) -> list[Block]:
    """What the engine's parsers make of an answer; `calls` are those that it holds if it is whole.
    A part of a call is text."""
    text = spelt(sampled)
    blocks: list[Block] = []
    if text.startswith("<think>"):
        thought, _, text = text.removeprefix("<think>").partition("</think>")
        blocks.append(Reasoning(text=thought))
    if not text.endswith("</call>"):
        calls = ()
    if calls:
        text = text[: text.index("<call>")]
    if text:
        blocks.append(Text(text=text))
    functions = [(call["id"], call["function"]) for call in calls]
    return blocks + [Call(id=i, name=of["name"], arguments=of["arguments"]) for i, of in functions]


def spelt(sampled: list[int]) -> str:
    """An answer's text, without the id that ended it."""
    return decode(sampled[:-1] if sampled[-1] in (END, OTHER_END) else sampled)


def told_tokens(sampled: list[int], share: float) -> int:
    """About this share of the tokens, and so many that the harness was told some text, but nothing
    of a call: that is not told before it is whole. 0 where there is no such number."""
    for told in range(int(len(sampled) * share), 0, -1):
        text = decode(sampled[:told])
        said = message_of(parsed(sampled[:told]))["content"]
        if said.strip() and "<call>" not in text and "<" not in text[-10:]:
            return told
    return 0


ACTIONS = (
    "turn",
    "turn",
    "turn",
    "cut",
    "ended_otherwise",
    "half_delivered",
    "broken_off",
    "retry",
    "sibling",
    "fork",
    "rewind",
    "edit",
    "subagent",
    "subagents",
    "compaction",
    "title",
    "tools",
    "unsound",
    "failed",
)


def play(world: CapturedWorld, actions: list[str]) -> None:
    """Run a session in which these things happen, each to a conversation picked at random."""
    chance = world.random
    threads = [Thread([SYSTEM, {"role": "user", "content": "fix it"}])]
    for number, action in enumerate(actions):
        at = chance.randrange(len(threads))
        thread = threads[at]
        match action:
            case "turn":
                threads[at] = world.follow(thread, world.call(thread))
            case "cut":
                threads[at] = world.follow(thread, world.call(thread, cut=True))
            case "ended_otherwise":
                threads[at] = world.follow(thread, world.call(thread, end=OTHER_END))
            case "half_delivered" | "broken_off":
                how = {"breaks": action == "broken_off", "told": chance.random()}
                answer = world.call(thread, **how)
                if answer.told:
                    threads[at] = world.follow(thread, answer, partly=True)
            case "retry":
                world.call(thread, told=0.0)
                threads[at] = world.follow(thread, world.call(thread))
            case "sibling":
                both = [world.call(thread), world.call(thread)]
                threads[at] = world.follow(thread, chance.choice(both))
            case "fork":
                one, other = world.ask(thread), world.ask(thread)
                threads.append(world.follow(thread, world.answer(other)))
                threads[at] = world.follow(thread, world.answer(one))
            case "rewind":
                answer = world.call(thread)
                threads[at] = world.follow(thread, answer)
                threads.append(world.follow(thread, answer))
            case "edit":
                spot = chance.randrange(1, len(thread.messages))
                threads[at] = edited(thread, spot, f"edited {number}")
            case "subagent":
                threads.append(helper(number % 2))
            case "subagents":
                pair = [helper(number % 2, f"agent {side}") for side in range(2)]
                asked = [world.ask(each) for each in pair]
                threads += [
                    world.follow(each, world.answer(call))
                    for each, call in zip(pair, asked, strict=True)
                ]
            case "compaction":
                wish = thread.and_then({"role": "user", "content": "summarise"})
                said = world.call(wish, kind="compaction").message["content"]
                threads[at] = Thread([SYSTEM, {"role": "user", "content": f"so far: {said}"}])
            case "title":
                world.call(Thread([{"role": "user", "content": "a title"}]), kind="title")
            case "tools":
                more = {"type": "function", "function": {"name": f"tool{number}"}}
                world.tools = chance.choice([[EDIT], [EDIT, more]])
            case "unsound":
                answer = world.call(thread, findings=("logprobs_missing",))
                threads[at] = world.follow(thread, answer)
            case "open":
                world.ask(thread)
            case "failed":
                world.ask(thread).record.fail("the engine does not answer")
            case _:
                raise AssertionError(action)


def helper(which: int, name: str = "") -> Thread:
    """A sub-agent's conversation; there are only two that helpers begin with."""
    system = {"role": "system", "content": f"You are helper {which}."}
    headers = (("x-claude-code-agent-id", name),) if name else ()
    return Thread([system, {"role": "user", "content": "look around"}], headers=headers)


def edited(thread: Thread, spot: int, text: str) -> Thread:
    """The conversation with another text in one message; what was said after it was said after
    something else."""
    messages = [*thread.messages]
    messages[spot] = {**messages[spot], "content": text}
    intact = tuple(mark for mark in thread.marks if mark.messages <= spot)
    return thread._replace(messages=messages, marks=intact)
