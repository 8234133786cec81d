"""A toy engine and a toy harness that know the truth: what was sampled, after what, and its fate.

What a real capture finds out about a request (what it continues, how far, how surely) is known here.

Text is cut into tokens canonically (two characters each) when the template renders it and at random
when the model samples it, so a rendering seldom has the ids of what was said.
"""

import json
import random
from array import array
from collections.abc import Collection
from typing import Any, NamedTuple

from builders.records import Completion, CompletionSession, Ids, Mode, VersionSpan

START, END, OTHER_END = 1, 2, 3
END_TEXT = "<|im_end|>"
"""How the end of a turn looks as text: the template's spelling of END, whoever wrote it."""
Message = dict[str, Any]

_vocabulary: dict[str, int] = {}


def token(text: str) -> int:
    return _vocabulary.setdefault(text, len(_vocabulary) + 10)


def spell(text: str) -> list[int]:
    """The canonical ids of `text`, control markup in it spelled out in ordinary tokens."""
    return [token(text[at : at + 2]) for at in range(0, len(text), 2)]


def encode(text: str) -> list[int]:
    """The ids of rendered `text`: as tokenizers have it, markup in it becomes the control token."""
    first, *rest = (spell(part) for part in text.split(END_TEXT))
    return [*first, *(number for part in rest for number in (END, *part))]


def decode(ids: list[int]) -> str:
    """The text of `ids`, control tokens too."""
    return "".join(_texts(ids))


def body(message: Message) -> str:
    """An assistant turn as text, in the form in which the model writes it."""
    text = f"<think>{thought}</think>" if (thought := message.get("reasoning_content")) else ""
    text += message.get("content") or ""
    for call in _calls(message):
        text += f"<call>{call['function']['name']} {call['function']['arguments']}</call>"
    return text


def _calls(message: Message) -> list[Message]:
    return message.get("tool_calls") or []


def _rewritten(call: Message) -> Message:
    """The call as templates write it: arguments are decoded and encoded anew."""
    try:
        arguments = json.dumps(json.loads(call["function"]["arguments"]), ensure_ascii=False)
    except ValueError:
        return call
    return {**call, "function": {**call["function"], "arguments": arguments}}


def render(
    messages: list[Message], tools: list[Message] | None, *, forgets_thinking: bool
) -> list[int]:
    """The chat template. It may drop the thinking of turns before the last user message."""
    ids = [START, *encode("tools" + json.dumps(tools)), END] if tools else []
    last_user = max(
        (at for at, message in enumerate(messages) if message["role"] == "user"), default=-1
    )
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            if forgets_thinking and at < last_user:
                message = {**message, "reasoning_content": None}
            text = body({**message, "tool_calls": [_rewritten(call) for call in _calls(message)]})
        else:
            text = message["content"]
        ids += [START, *encode(message["role"] + "\n"), *encode(text), END, *encode("\n")]
    return [*ids, START, *encode("assistant\n")]


class Sample(NamedTuple):
    """What the engine did in one call, kept apart from the record that builders read."""

    completion_id: str
    prompt: list[int]
    sampled: list[int]
    logprobs: list[float]
    kind: str
    findings: frozenset[str]
    """What is to be known of it; undelivered, budget_cut and ambiguous_attachment, too."""


class Mark(NamedTuple):
    """In a conversation: so many leading messages end with this answer."""

    messages: int
    completion: Completion
    continued: int | None
    """How many of its sampled tokens the harness has; None: all."""


class World:
    """One harness session. Conversations are message lists; every method is something harnesses do."""

    def __init__(
        self,
        seed: int = 0,
        *,
        forgets_thinking: bool = False,
        drifts: bool = True,
        flat: bool = False,
        repeats_itself: bool = True,
        faithful: bool = False,
        spells_ends: bool = False,
        composes: float = 0.0,
        keeps: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.forgets_thinking = forgets_thinking
        self.drifts = drifts
        self.repeats_itself = repeats_itself
        """Whether two answers may have the same text."""
        self.faithful = faithful
        """Whether the harness sends back every answer as it was."""
        self.spells_ends = spells_ends
        """Whether model, user and tools may write END_TEXT."""
        self.flat = flat
        """Store every prompt whole instead of as the difference to an earlier one."""
        self.composes = composes
        """The share of prompts that are made of the recorded tokens (tokens mode)."""
        self.keeps = keeps
        """Whether that goes for prompts from which the template drops earlier thinking, too."""
        self.samples: list[Sample] = []
        self.completions: list[Completion] = []
        self.truly_after: dict[str, str] = {}
        """Completion -> the one whose answer its conversation goes on from, where there is one."""
        self.heard: dict[str, int] = {}
        """Completion -> the most of its tokens that a harness went on from."""
        self._marks: dict[int, tuple[list[Message], list[Mark]]] = {}
        self.tools: list[Message] | None = [{"type": "function", "function": {"name": "edit"}}]

    def session(
        self, *, ends: tuple[int, ...] = (END,), texts: tuple[str, ...] = (), **metadata: Any
    ) -> CompletionSession:
        return CompletionSession(
            session_id="session-1",
            task_id="task-1",
            completions=self.completions,
            end_of_turn_ids=list(ends),
            end_of_turn_texts=list(texts),
            metadata=metadata,
        )

    def trainable(
        self,
        sample: Sample,
        *,
        kinds: Collection[str] = ("turn", "compaction"),
        strict: Collection[str] = (),
        max_tokens: int | None = None,
        split_on_drift: bool = False,
    ) -> int:
        """How many of the sample's tokens, from the first on, shall be trained on by a builder with
        these options."""
        if sample.kind not in kinds or "logprobs_missing" in sample.findings:
            return 0
        if not sample.findings.isdisjoint(strict):
            return 0
        received = len(sample.sampled)
        if "undelivered" in sample.findings:
            received = self.heard.get(sample.completion_id, 0)
        room = received if max_tokens is None else max(0, max_tokens - len(sample.prompt))
        return min(received, room)

    def ask(
        self,
        messages: list[Message],
        *,
        answer: Message | None = None,
        truncated: bool = False,
        delivered: bool = True,
        kind: str = "turn",
        findings: tuple[str, ...] = (),
        **fields: Any,
    ) -> Completion:
        """One model call; `fields` are set on its record as they are."""
        number = len(self.completions)
        tools = self.tools
        mark, ambiguous = self._continues(messages)
        mode, prompt = self._prompt(messages, mark)
        answer = answer or self.say(number)
        sampled = self._cut(body(answer))
        if truncated:
            sampled = sampled[: max(1, len(sampled) // 2)]
            answer = {"role": "assistant", "content": decode(sampled)}
        else:
            sampled.append(END)
        logprobs = array("f", [-self.random.random() - number for _ in sampled])
        completion = Completion(
            completion_id=f"msg_{number}",
            index=number,
            sampled_ids=array("i", sampled),
            logprobs=logprobs,
            mode=mode,
            response_message=answer,
            finish_reason="length"
            if truncated
            else "tool_calls"
            if answer.get("tool_calls")
            else "stop",
            tools=tools,
            kind=kind,
            delivered=delivered,
            delivered_tokens=None if delivered else 0,
            findings=list(findings),
            policy_version=f"v{number // 3}",
            logprob_kind="processed",
            sampling={"temperature": 1.0},
            **{**self._found(mark, ambiguous), **self._stored(array("i", prompt), messages)},
        )
        for field, value in fields.items():
            setattr(completion, field, value)
        self.completions.append(completion)
        if mark is not None and not ambiguous:
            self.truly_after[completion.completion_id] = mark.completion.completion_id
        if completion.previous is not None and not completion.ambiguous:
            before = completion.previous
            heard = len(before.sampled_ids)
            if completion.continued_tokens is not None:
                heard = completion.continued_tokens
            name = before.completion_id
            self.heard[name] = max(self.heard.get(name, 0), heard)
        told = {
            "undelivered": not delivered,
            "budget_cut": truncated,
            "ambiguous_attachment": completion.ambiguous,
        }
        known = frozenset([*findings, *(code for code, so in told.items() if so)])
        self.samples.append(
            Sample(completion.completion_id, prompt, sampled, logprobs.tolist(), kind, known)
        )
        return completion

    def _continues(self, messages: list[Message]) -> tuple[Mark | None, bool]:
        """What a request with these messages goes on from; and whether that cannot be told.

        Siblings of which the harness got the same words, without a call whose id would tell, are
        the same to whoever sees requests; either may be taken.
        """
        _, marks = self._marks.get(id(messages), ([], []))
        # Another head is another conversation.
        mark = next((mark for mark in reversed(marks) if mark.completion.tools == self.tools), None)
        if mark is None or mark.continued is not None:
            return mark, False
        known = mark.completion
        alike = [
            other
            for other in self.completions
            if other.delivered
            and other.messages == known.messages
            and other.tools == known.tools
            and _wordless(other) == _wordless(known) is not None
        ]
        if len(alike) < 2 or _wordless(known) is None:
            return mark, False
        return mark._replace(completion=self.random.choice(alike)), True

    def _prompt(self, messages: list[Message], mark: Mark | None) -> tuple[Mode, list[int]]:
        """How the engine is asked, and with what."""
        prompt = render(messages, self.tools, forgets_thinking=self.forgets_thinking)
        if mark is None or self.random.random() >= self.composes:
            return "messages", prompt
        kept = render(messages, self.tools, forgets_thinking=False)
        if prompt != kept and not self.keeps:
            return "messages", prompt
        said = len(render(messages[: mark.messages], self.tools, forgets_thinking=False))
        opening = [START, *encode("assistant\n")]
        recorded = mark.completion.prompt_ids.tolist()
        recorded += mark.completion.sampled_ids[: mark.continued].tolist()
        closing = [] if recorded[-1] == END else [END]
        return "tokens", [*recorded, *closing, *encode("\n"), *kept[said - len(opening) :]]

    def _found(self, mark: Mark | None, ambiguous: bool) -> dict[str, Any]:
        if mark is None:
            return {}
        return {
            "previous": mark.completion,
            "attached": "exact" if mark.continued is None else "half_delivered",
            "continued_tokens": mark.continued,
            "ambiguous": ambiguous,
        }

    def ask_at_length(self, messages: list[Message], **fields: Any) -> Completion:
        """A call whose answer is sampled in more tokens than its canonical rendering has."""
        answer = {"role": "assistant", "content": "a long answer in many tokens"}
        completion = self.ask(messages, answer=answer, **fields)
        spelt = [*(token(letter) for letter in body(answer)), END]
        completion.sampled_ids = array("i", spelt)
        completion.logprobs = array("f", [-1.0] * len(spelt))
        self.samples[-1] = self.samples[-1]._replace(
            sampled=spelt, logprobs=completion.logprobs.tolist()
        )
        return completion

    def say(self, number: int) -> Message:
        """Some answer: text, thinking and calls as chance will have it."""
        said = self.random.randrange(4) if self.repeats_itself else number
        answer: Message = {"role": "assistant", "content": f"answer {said}{self._aside()} "}
        if self.random.random() < 0.5:
            answer["reasoning_content"] = f"thought {self.random.randrange(9)}{self._aside()}"
        if self.random.random() < 0.7:
            path = f"a{self._aside()}.py"
            arguments = (
                f'{{"path": "{path}", "line": 1.0}}'
                if self.random.random() < 0.8
                else f'{{"path": {path}'
            )
            call = {"name": "edit", "arguments": arguments}
            answer["tool_calls"] = [{"id": f"call_{number}", "type": "function", "function": call}]
        return answer

    def echo(self, answer: Message) -> Message:
        """The answer as some harness sends it back."""
        echoed = {key: value for key, value in answer.items() if key != "tool_calls"}
        if self.faithful:
            return dict(answer)
        style = self.random.choice(["verbatim", "verbatim", "stripped", "thoughtless"])
        if style == "stripped":
            echoed["content"] = (answer["content"] or "").strip()
        if style == "thoughtless":
            echoed.pop("reasoning_content", None)
        calls = []
        for call in answer.get("tool_calls") or []:
            function = dict(call["function"])
            try:
                arguments = json.loads(function["arguments"])
            except ValueError:
                arguments = {}
            spelling = self.random.choice(["verbatim", "compact", "defaults"])
            if spelling == "defaults":
                arguments = {"replace_all": False, **arguments}
            if spelling != "verbatim":
                function["arguments"] = json.dumps(arguments, separators=(",", ":"))
            calls.append({**call, "function": function})
        if calls:
            echoed["tool_calls"] = calls
        return echoed

    def follow(
        self, messages: list[Message], completion: Completion, *, heard: int | None = None
    ) -> list[Message]:
        """The conversation after the harness acted on an answer, or on its first `heard` tokens."""
        answer = completion.response_message
        if heard is not None:
            answer = {
                "role": "assistant",
                "content": decode(completion.sampled_ids[:heard].tolist()),
            }
        results = [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "content": f"result {len(self.completions)}{self._aside()}",
            }
            for call in answer.get("tool_calls") or []
        ]
        nudge = {"role": "user", "content": f"go on {len(self.completions)}{self._aside()}"}
        echoed = answer if heard is not None else self.echo(answer)
        thread = [*messages, echoed, *(results or [nudge])]
        self.said(thread, [*self.marks(messages), Mark(len(messages) + 1, completion, heard)])
        return thread

    def marks(self, messages: list[Message]) -> list[Mark]:
        """The answers that the conversation is known to hold."""
        return self._marks.get(id(messages), ([], []))[1]

    def said(self, messages: list[Message], marks: list[Mark]) -> list[Message]:
        """Let it be known that the conversation holds these answers."""
        self._marks[id(messages)] = (messages, marks)
        return messages

    def _aside(self) -> str:
        """Nothing, or sometimes a word about how turns end."""
        return f" {END_TEXT} too" if self.spells_ends and self.random.random() < 0.2 else ""

    def _cut(self, text: str) -> list[int]:
        if not self.drifts:
            return spell(text)
        ids, at = [], 0
        while at < len(text):
            width = self.random.choice([1, 2, 2, 2, 3])
            ids.append(token(text[at : at + width]))
            at += width
        return ids

    def _stored(self, prompt: Ids, messages: list[Message]) -> dict[str, Any]:
        """The fields that hold prompt and messages, as the difference to the best earlier call."""
        if self.flat or not self.completions:
            return {"tail": prompt, "messages_tail": messages}
        parent = max(self.completions, key=lambda c: _common(c.context_ids, prompt))
        shared, known = (
            _common(parent.context_ids, prompt),
            _common([*parent.messages, parent.response_message], messages),
        )
        return {
            "parent": parent,
            "shared": shared,
            "tail": prompt[shared:],
            "messages_shared": known,
            "messages_tail": messages[known:],
        }


def _wordless(completion: Completion) -> str | None:
    """What a harness may echo of an answer without a call; None where a call's id tells it apart."""
    answer = completion.response_message
    return None if answer.get("tool_calls") else (answer.get("content") or "").strip()


def _common(a: Any, b: Any) -> int:
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length


def _texts(ids: list[int]) -> list[str]:
    texts = {START: "<|im_start|>", END: END_TEXT, OTHER_END: ""}
    texts |= {number: text for text, number in _vocabulary.items()}
    return [texts[number] for number in ids]


SYSTEM = {"role": "system", "content": "You are an agent."}

ACTIONS = (
    "turn",
    "turn",
    "turn",
    "truncated",
    "ended_otherwise",
    "aborted",
    "half_delivered",
    "half_delivered_twice",
    "retry",
    "sibling",
    "fork",
    "rewind",
    "subagent",
    "compact",
    "compact_in_place",
    "edit",
    "title",
    "tools",
    "broken",
)


def play(world: World, actions: list[str]) -> None:
    """Run a session in which these things happen, each to a conversation picked at random."""
    threads = [[SYSTEM, {"role": "user", "content": "fix it"}]]
    for number, action in enumerate(actions):
        at = world.random.randrange(len(threads))
        thread = threads[at]
        match action:
            case "turn":
                threads[at] = world.follow(thread, world.ask(thread))
            case "truncated":
                threads[at] = world.follow(thread, world.ask(thread, truncated=True))
            case "ended_otherwise":
                done = world.ask(thread)
                done.sampled_ids[-1] = world.samples[-1].sampled[-1] = OTHER_END
                threads[at] = world.follow(thread, done)
            case "aborted":
                done = world.ask(thread)
                swap, end = len(done.sampled_ids) // 2, len(done.sampled_ids)
                done.versions = [
                    VersionSpan(version=done.policy_version, start=0, end=swap),
                    VersionSpan(version="later", start=swap, end=end),
                ]
                threads[at] = world.follow(thread, done)
            case "half_delivered" | "half_delivered_twice":
                done = world.ask(thread, delivered=False)
                heard = sorted(world.random.randrange(1, len(done.sampled_ids)) for _ in range(2))
                done.delivered_tokens = heard[1]
                if action == "half_delivered_twice":
                    threads.append(world.follow(thread, done, heard=heard[0]))
                threads[at] = world.follow(thread, done, heard=heard[1])
            case "retry":
                world.ask(thread, delivered=False)
                threads[at] = world.follow(thread, world.ask(thread))
            case "sibling":
                chosen = world.random.choice([world.ask(thread), world.ask(thread)])
                threads[at] = world.follow(thread, chosen)
            case "fork":
                one, other = world.ask(thread), world.ask(thread)
                threads[at] = world.follow(thread, one)
                threads.append(world.follow(thread, other))
            case "rewind":
                done = world.ask(thread)
                threads[at] = world.follow(thread, done)
                threads.append(world.follow(thread, done))
            case "subagent":
                system = {"role": "system", "content": f"You are helper {number % 2}."}
                threads.append([system, {"role": "user", "content": "look around"}])
            case "compact":
                asked = [*thread, {"role": "user", "content": "summarise"}]
                world.said(asked, world.marks(thread))
                said = world.ask(asked, kind="compaction").response_message["content"]
                threads[at] = [SYSTEM, {"role": "user", "content": f"so far: {said}"}]
            case "compact_in_place":
                last = {**thread[-1], "content": f"{thread[-1]['content']} (summarise)"}
                asked = world.said([*thread[:-1], last], world.marks(thread))
                said = world.ask(asked, kind="compaction").response_message["content"]
                threads[at] = [SYSTEM, {"role": "user", "content": f"so far: {said}"}]
            case "edit":
                spot = world.random.randrange(1, len(thread))
                changed = {**thread[spot], "content": f"edited {number}"}
                intact = [mark for mark in world.marks(thread) if mark.messages <= spot]
                threads[at] = world.said([*thread[:spot], changed, *thread[spot + 1 :]], intact)
            case "title":
                world.ask([{"role": "user", "content": "a title, please"}], kind="title")
            case "tools":
                world.tools = world.random.choice(
                    [None, [{"type": "function", "function": {"name": f"tool{number}"}}]]
                )
            case "broken":
                threads[at] = world.follow(
                    thread, world.ask(thread, findings=("logprobs_missing",))
                )
            case _:
                raise AssertionError(action)
