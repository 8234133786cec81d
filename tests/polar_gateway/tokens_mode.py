"""Conversations in tokens mode with an engine that renders, samples and parses: a scripted one, or a
real vLLM. What is said is spelled at random, so a rendering seldom has the ids of what was said."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from builders.records import Completion
from polar_gateway.backends import Backends, open_backends
from polar_gateway.capture.session import SessionCapture
from polar_gateway.config import InferenceConfig
from polar_gateway.dialects.turn import ModelRequest
from polar_gateway.model_listener import ModelListener
from polar_gateway.prompts import Prompter
from polar_gateway.proxy import Proxy
from polar_gateway.sessions import Session, Sessions
from polar_gateway.testing.script import Rule, Script, ScriptedCall, Step
from polar_gateway.testing.tokenizer import ChatTokenizer

Message = dict[str, Any]

SH: Message = {
    "type": "function",
    "function": {"name": "sh", "description": "Run it.", "parameters": {"type": "object"}},
}
MORE: Message = {"role": "user", "content": "And then?"}
NEXT = "<|im_start|>assistant\n"
MORE_TEXT = f"<|im_start|>user\nAnd then?<|im_end|>\n{NEXT}"
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def sh(command: str) -> ScriptedCall:
    return ScriptedCall(name="sh", arguments={"command": command})


def says(*steps: Step | str) -> Script:
    return Script(rules=[Rule(match="GO", steps=list(steps))])


class Talk:
    """A harness that keeps what it was told, in one session."""

    def __init__(self, session: Session, backends: Backends, tokenizer: ChatTokenizer) -> None:
        self.session = session
        self.backends = backends
        self.tokenizer = tokenizer
        self.messages: list[Message] = []
        self.tools = [SH]
        self.url = ""
        self.http: aiohttp.ClientSession

    async def ask(self, *new: Message, **fields: Any) -> Message:
        """Say more, and keep the answer, without the reasoning as most harnesses do."""
        self.messages += new
        body = {"model": "m", "messages": self.messages, "tools": self.tools, **fields}
        async with self.http.post(
            f"{self.url}/v1/chat/completions",
            data=json.dumps(body),
            headers={"authorization": "Bearer k1"},
        ) as response:
            text = await response.text()
            assert response.status == 200, text
        if fields.get("stream"):
            answer = assembled(text)
        else:
            message = json.loads(text)["choices"][0]["message"]
            kept = {name: message.get(name) for name in ("role", "content", "tool_calls")}
            answer = {name: value for name, value in kept.items() if value}
        self.messages.append(answer)
        return answer

    async def act(self, *, result: str = "ok", **fields: Any) -> Message:
        """Answer all calls of the last answer."""
        calls = self.messages[-1]["tool_calls"]
        return await self.ask(
            *({"role": "tool", "tool_call_id": call["id"], "content": result} for call in calls),
            **fields,
        )

    @property
    def completions(self) -> list[Completion]:
        return self.session.capture.completion_session().completions

    @property
    def last(self) -> Completion:
        return self.completions[-1]

    @property
    def modes(self) -> list[str]:
        return [completion.mode for completion in self.completions]

    @property
    def new(self) -> str:
        """What the last prompt adds to the whole context before it, as text."""
        last = self.last
        assert last.previous is not None
        assert (last.mode, last.findings) == ("tokens", []), last.notes
        known = last.previous.context_ids
        assert last.prompt_ids[: len(known)] == known
        return self.tokenizer.decode(last.prompt_ids[len(known) :].tolist())

    @property
    def canonical(self) -> list[int]:
        """The last prompt with every answer in it as the record says that the engine renders it."""
        first, *others = self.completions
        ids = first.prompt_ids
        for each in others:
            assert each.previous is not None
            assert each.previous.canonical_ids is not None
            ids = ids + each.previous.canonical_ids
            ids += each.prompt_ids[len(each.previous.context_ids) :]
        return ids.tolist()

    async def rendered(self, **fields: Any) -> list[int]:
        """What the engine would have made of the messages of the last call."""
        engine = self.backends.first.engine
        last = self.last
        request = ModelRequest(model="m", messages=last.messages, tools=last.tools, **fields)
        return (await engine.render(request)).ids.tolist()


def assembled(stream: str) -> Message:
    content, calls = "", []
    for line in stream.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            for part in delta.get("tool_calls") or []:
                while len(calls) <= part["index"]:
                    calls.append({"type": "function", "function": {"name": "", "arguments": ""}})
                call = calls[part["index"]]
                call["id"] = part.get("id") or call["id"]
                for name in ("name", "arguments"):
                    call["function"][name] += part.get("function", {}).get(name) or ""
    answer: Message = {"role": "assistant", "content": content}
    return {**answer, "tool_calls": calls} if calls else answer


@asynccontextmanager
async def talking(folder: Path, url: str, **config: Any) -> AsyncIterator[Talk]:
    inference = InferenceConfig(base_url=url, **config)
    async with open_backends(inference, model="", patience=10) as backends:
        probe = backends.first.probe
        capture = SessionCapture(
            session_id="s1",
            task_id="t1",
            journal_path=folder / "journal",
            end_of_turn_ids=probe.end_of_turn_ids,
        )
        session = Session(
            session_id="s1",
            task_id="t1",
            attempt_id="a1",
            key="k1",
            capture=capture,
            prompter=Prompter(inference),
        )
        sessions = Sessions()
        sessions.add(session)
        talk = Talk(session, backends, ChatTokenizer())
        async with ModelListener(Proxy(sessions=sessions, backends=backends), "127.0.0.1", 0) as at:
            talk.url = f"http://127.0.0.1:{at.port}"
            async with aiohttp.ClientSession() as talk.http:
                yield talk
        capture.close()


# ---- what happens, whichever engine it is ----


class Scenario(NamedTuple):
    script: Script
    play: Callable[[Talk], Awaitable[None]]
    config: dict[str, Any] = {}


def result_text(*results: str) -> str:
    inner = "".join(f"\n<tool_response>\n{each}\n</tool_response>" for each in results)
    return f"<|im_start|>user{inner}<|im_end|>\n{NEXT}"


THINKING = Step(think="I should look.", say="Let me see.", calls=[sh("ls -la"), sh("pwd")])


async def many_turns(talk: Talk) -> None:
    await talk.ask(user("GO"))
    for turn in range(4):
        await talk.act(stream=turn % 2 == 1)
        assert talk.new == "\n" + result_text("ok", "ok")
        assert talk.last.prompt_ids.tolist() != await talk.rendered()
    assert talk.modes == ["messages"] + 4 * ["tokens"]
    assert talk.canonical == await talk.rendered()


async def truncated(talk: Talk) -> None:
    await talk.ask(user("GO"), max_tokens=6)
    assert talk.last.finish_reason == "length"
    await talk.ask(MORE, **NO_THINKING)
    await talk.ask(MORE, max_tokens=4, **NO_THINKING)
    assert talk.last.finish_reason == "length"
    await talk.ask(MORE, **NO_THINKING)
    assert talk.new == f"<|im_end|>\n{MORE_TEXT}<think>\n\n</think>\n\n"


async def other_end(talk: Talk) -> None:
    await talk.ask(user("GO"), **NO_THINKING)
    assert talk.last.stop_reason == talk.tokenizer.id_of("<|endoftext|>")
    await talk.ask(MORE, **NO_THINKING)
    assert talk.new == f"<|im_end|>\n{MORE_TEXT}<think>\n\n</think>\n\n"


async def stop_string(talk: Talk) -> None:
    await talk.ask(user("GO"), stop=["tw"], **NO_THINKING)
    assert (talk.last.stop_reason, talk.messages[-1]["content"]) == ("tw", "one ")
    await talk.ask(MORE, **NO_THINKING)
    assert talk.new == f"<|im_end|>\n{MORE_TEXT}<think>\n\n</think>\n\n"


async def thinking_dropped(talk: Talk) -> None:
    await talk.ask(user("GO"))
    await talk.act()
    await talk.ask(MORE)
    assert (talk.last.mode, talk.last.findings) == ("messages", ["history_rewritten"])
    assert talk.last.prompt_ids.tolist() == await talk.rendered()
    await talk.act()
    assert talk.new == "\n" + result_text("ok", "ok")


async def thinking_kept(talk: Talk) -> None:
    await talk.ask(user("GO"))
    await talk.act()
    await talk.ask(MORE)
    assert talk.last.findings == ["history_kept"]
    before = talk.completions[-2].context_ids
    assert talk.last.prompt_ids[: len(before)] == before
    kept = talk.tokenizer.decode(talk.last.prompt_ids.tolist())
    assert kept.count("I should look.") == 2
    assert kept.endswith(f"<|im_end|>\n{MORE_TEXT}")
    await talk.act()
    assert talk.new == "\n" + result_text("ok", "ok")


async def empty_thinking(talk: Talk) -> None:
    await talk.ask(user("GO"), **NO_THINKING)
    await talk.act(**NO_THINKING)
    assert talk.new == "\n" + result_text("ok", "ok") + "<think>\n\n</think>\n\n"
    assert talk.last.prompt_ids.tolist().count(talk.tokenizer.id_of("<think>")) == 2


async def more_tools(talk: Talk) -> None:
    await talk.ask(user("GO"))
    talk.tools = [SH, {**SH, "function": {**SH["function"], "name": "read"}}]
    await talk.act()
    assert (talk.last.mode, talk.last.previous) == ("messages", None)
    assert talk.last.prompt_ids.tolist() == await talk.rendered()
    await talk.act()
    assert talk.new == "\n" + result_text("ok", "ok")


async def ends_in_results(talk: Talk) -> None:
    await talk.ask(user("GO"))
    await talk.act(result="so <|im_end|> it ends")
    assert talk.new == "\n" + result_text(*2 * ["so <|im_end|> it ends"])
    await talk.act()
    assert talk.new == "\n" + result_text("ok", "ok")


async def malformed_arguments(talk: Talk) -> None:
    garbled = {"name": "sh", "arguments": '{"command": ls'}
    call = {"id": "call_9", "type": "function", "function": garbled}
    await talk.ask(
        user("GO"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_9", "content": "What?"},
    )
    await talk.act()
    assert talk.new == "\n" + result_text("ok", "ok")


async def parallel_siblings(talk: Talk) -> None:
    await talk.ask(user("GO"))
    common = talk.messages[:]
    for result in ("one", "two"):
        talk.messages = common[:]
        await talk.act(result=result)
        assert talk.new == "\n" + result_text(result, result)
    first, *siblings = talk.completions
    assert [sibling.previous for sibling in siblings] == [first, first]


async def compacted(talk: Talk) -> None:
    await talk.ask(user("GO"))
    await talk.act()
    talk.messages = []
    await talk.ask(user("GO. So far: you looked."))
    assert (talk.last.mode, talk.last.previous) == ("messages", None)
    await talk.act()
    assert talk.new == "\n" + result_text("ok", "ok")


DONE = Step(say="one two three four five six seven eight nine")
SCENARIOS = {
    "many turns": Scenario(says(THINKING), many_turns),
    "truncated": Scenario(says(DONE), truncated),
    "another end of turn": Scenario(
        says(Step(say="one", end="<|endoftext|>"), Step(say="two")), other_end
    ),
    "a stop string inside a token": Scenario(says(DONE), stop_string),
    "thinking dropped": Scenario(says(THINKING), thinking_dropped),
    "thinking kept": Scenario(says(THINKING), thinking_kept, {"history": "keep"}),
    "empty thinking": Scenario(says(THINKING), empty_thinking),
    "more tools": Scenario(says(THINKING), more_tools),
    "ends of turns in results": Scenario(says(THINKING), ends_in_results),
    "malformed arguments": Scenario(says(THINKING), malformed_arguments),
    "parallel siblings": Scenario(says(THINKING), parallel_siblings),
    "compacted": Scenario(says(THINKING), compacted),
    "the generate route": Scenario(says(THINKING), many_turns, {"token_route": "generate"}),
}
