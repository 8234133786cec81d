"""A toy engine and a toy harness that know the truth: what was sampled, after what, and its fate.

Text is cut into tokens canonically (two characters each) when the template renders it and at random
when the model samples it, so a rendering seldom has the ids of what was said.
"""

import json
import random
from array import array
from typing import Any, NamedTuple

from builders.records import Completion, CompletionSession, Ids

START, END = 1, 2
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
    trainable: bool


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
        self.samples: list[Sample] = []
        self.completions: list[Completion] = []
        self.truly_after: dict[str, str] = {}
        """Completion -> the one whose answer its conversation goes on from, where there is one."""
        self._followed: dict[int, tuple[list[Message], str]] = {}
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
        """One model call."""
        number = len(self.completions)
        tools = self.tools
        prompt = render(messages, tools, forgets_thinking=self.forgets_thinking)
        answer = answer or self.say(number)
        sampled = self._cut(body(answer))
        if truncated:
            sampled = sampled[: max(1, len(sampled) // 2)]
            text = "".join(_texts(sampled))
            answer = {"role": "assistant", "content": text}
        else:
            sampled.append(END)
        logprobs = array("f", [-self.random.random() - number for _ in sampled])
        completion = Completion(
            completion_id=f"msg_{number}",
            index=number,
            sampled_ids=array("i", sampled),
            logprobs=logprobs,
            response_message=answer,
            finish_reason="length"
            if truncated
            else "tool_calls"
            if answer.get("tool_calls")
            else "stop",
            tools=tools,
            kind=kind,
            delivered=delivered,
            findings=list(findings),
            policy_version=f"v{number // 3}",
            sampling={"temperature": 1.0},
            **{**self._stored(array("i", prompt), messages), **fields},
        )
        self.completions.append(completion)
        if id(messages) in self._followed:
            self.truly_after[completion.completion_id] = self._followed[id(messages)][1]
        trainable = delivered and not findings and kind in ("turn", "compaction")
        self.samples.append(
            Sample(completion.completion_id, prompt, sampled, logprobs.tolist(), trainable)
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

    def follow(self, messages: list[Message], completion: Completion) -> list[Message]:
        """The conversation after the harness acted on an answer."""
        answer = completion.response_message
        results = [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "content": f"result {len(self.completions)}{self._aside()}",
            }
            for call in answer.get("tool_calls") or []
        ]
        nudge = {"role": "user", "content": f"go on {len(self.completions)}{self._aside()}"}
        thread = [*messages, self.echo(answer), *(results or [nudge])]
        self._followed[id(thread)] = (thread, completion.completion_id)
        return thread

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
        shared, known = _common(parent.context_ids, prompt), _common(parent.thread, messages)
        return {
            "parent": parent,
            "shared": shared,
            "tail": prompt[shared:],
            "messages_shared": known,
            "messages_tail": messages[known:],
        }


def _common(a: Any, b: Any) -> int:
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length


def _texts(ids: list[int]) -> list[str]:
    texts = {START: "<|im_start|>", END: END_TEXT}
    texts |= {number: text for text, number in _vocabulary.items()}
    return [texts[number] for number in ids]


SYSTEM = {"role": "system", "content": "You are an agent."}

ACTIONS = (
    "turn",
    "turn",
    "turn",
    "truncated",
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
                said = world.ask(asked, kind="compaction").response_message["content"]
                threads[at] = [SYSTEM, {"role": "user", "content": f"so far: {said}"}]
            case "compact_in_place":
                last = {**thread[-1], "content": f"{thread[-1]['content']} (summarise)"}
                said = world.ask([*thread[:-1], last], kind="compaction").response_message[
                    "content"
                ]
                threads[at] = [SYSTEM, {"role": "user", "content": f"so far: {said}"}]
            case "edit":
                spot = world.random.randrange(1, len(thread))
                changed = {**thread[spot], "content": f"edited {number}"}
                threads[at] = [*thread[:spot], changed, *thread[spot + 1 :]]
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
