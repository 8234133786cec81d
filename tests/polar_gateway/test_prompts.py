"""What the engine is sent, told from the tiny model's own template and tokenizer."""

import random
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from builders.records import Ids
from polar_gateway.capture.session import OpenCall, SessionCapture
from polar_gateway.config import InferenceConfig
from polar_gateway.dialects.turn import (
    Block,
    Call,
    ErrorKind,
    ModelRequest,
    Reasoning,
    Text,
    Usage,
)
from polar_gateway.engines.base import EngineError, EngineProbe, EngineReply
from polar_gateway.engines.id_cache import spelling
from polar_gateway.prompts import Prompter, unable
from polar_gateway.protocol import Prompting
from polar_gateway.testing.tokenizer import TINY_MODEL, ChatTokenizer, RenderError

Message = dict[str, Any]

TOOLS = [{"type": "function", "function": {"name": "sh", "description": "", "parameters": {}}}]
ASK: Message = {"role": "user", "content": "Fix it."}
MORE: Message = {"role": "user", "content": "And then?"}
NEXT = "<|im_start|>assistant\n"
MORE_TEXT = f"<|im_start|>user\nAnd then?<|im_end|>\n{NEXT}"


class Rendered:
    def __init__(self, ids: list[int]) -> None:
        self.ids: Ids = array("i", ids)
        self.text = spelling(self.ids)

    def __len__(self) -> int:
        return len(self.ids)

    def last(self, count: int) -> Ids:
        return self.ids[len(self.ids) - count :]

    def after(self, earlier: "Rendered", *, less: int = 0) -> Ids | None:
        known = earlier.ids[: len(earlier.ids) - less]
        return self.ids[len(known) :] if self.ids[: len(known)] == known else None


class Renderer:
    """An engine that only renders."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.tokenizer = tokenizer
        self.asked: list[tuple[int, bool]] = []
        """How many messages, and whether closed."""
        self.error: EngineError | None = None

    async def render(self, request: ModelRequest, *, closed: bool = False) -> Rendered:
        self.asked.append((len(request.messages), closed))
        assert request.prompt_ids is None
        if self.error is not None:
            raise self.error
        return Rendered(self.ids(request, closed=closed))

    def ids(self, request: ModelRequest, *, closed: bool = False) -> list[int]:
        try:
            text = self.tokenizer.render(
                request.messages,
                request.tools,
                add_generation_prompt=not closed,
                **request.template_kwargs,
            )
        except RenderError as error:
            kind = ErrorKind(status=400, code="invalid_request", message=str(error))
            raise EngineError(kind, infra=False) from error
        return self.tokenizer.encode(text)


class Talk:
    """A session whose model says what it is told to, in a spelling of its own."""

    def __init__(self, path: Path, tokenizer: ChatTokenizer, seed: int = 0, **config: Any) -> None:
        self.tokenizer = tokenizer
        self.engine = Renderer(tokenizer)
        self.capture = SessionCapture(session_id="s1", journal_path=path / "journal")
        self.prompter = Prompter(InferenceConfig(**config))
        self.probe = EngineProbe(
            engine="vllm",
            model="tiny",
            token_routes=["chat"],
            renders="full",
            end_of_turn_ids=[tokenizer.end_of_turn],
            end_of_turn_texts=["<|im_end|>"],
        )
        self.tools: list[Message] | None = TOOLS
        self.kwargs: dict[str, Any] = {}
        self.asked = 0
        self._chance = random.Random(seed)

    async def ask(self, messages: list[Message]) -> tuple[OpenCall, ModelRequest]:
        """Up to the engine: the open call, and what the engine would be sent."""
        request = ModelRequest(
            model="m", messages=messages, tools=self.tools, template_kwargs=self.kwargs
        )
        request = self.capture.restored(request)
        self.asked += 1
        record = self.capture.open(
            request, completion_id=f"msg_{self.asked}", dialect="chat", headers={}
        )
        sent = await self.prompter.compose(request, record, self.engine, self.probe)
        return record, sent

    async def say(
        self,
        messages: list[Message],
        raw: str,
        *blocks: Block,
        end: list[int] | None = None,
        finish: str = "stop",
        read: Callable[[Ids], Ids] = lambda ids: ids,
    ) -> "Said":
        """A whole call; `raw` is what the model writes, `blocks` what is parsed of it (just text if
        there are none), `end` the ids that follow, `read` what the engine reads of ids."""
        record, sent = await self.ask(messages)
        if sent.prompt_ids is not None:
            sent = self.prompter.instead(sent, read(sent.prompt_ids), record) or sent
        prompt = sent.prompt_ids
        if prompt is None:
            prompt = array("i", self.engine.ids(sent))
        sampled = self.spelled(raw) + array(
            "i", [self.tokenizer.end_of_turn] if end is None else end
        )
        reply = EngineReply(
            prompt_ids=prompt,
            sampled_ids=sampled,
            logprobs=array("f", [-1.0] * len(sampled)),
            blocks=list(blocks) or [Text(text=raw)],
            finish_reason=finish,
            usage=Usage(),
        )
        record.close(reply, {})
        self.last = self.capture.completion_session().completions[-1]
        return Said(messages, reply.message, prompt + sampled)

    def spelled(self, text: str) -> Ids:
        """The text in tokens, rarely as a tokenizer would have it."""
        rest, ids = text.encode(), array("i")
        while rest:
            token = self._chance.choice(self.tokenizer.continuations(rest))
            ids.append(token)
            rest = rest[len(self.tokenizer.bytes_of[token]) :]
        return ids

    def new(self, sent: ModelRequest, said: "Said") -> str:
        """What the prompt adds to the recorded context, as text."""
        assert sent.prompt_ids is not None
        assert sent.prompt_ids[: len(said.context)] == said.context
        return self.tokenizer.decode(sent.prompt_ids[len(said.context) :].tolist())

    @property
    def records(self) -> list[Any]:
        return self.capture.completion_session().completions


class Said:
    def __init__(self, messages: list[Message], answer: Message, context: Ids) -> None:
        self.messages = messages
        self.answer = answer
        self.context = context

    def then(self, *new: Message) -> list[Message]:
        return [*self.messages, self.answer, *new]


def tool(call_id: str, content: str = "ok") -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def sh(call_id: str, arguments: str = '{"command": "ls"}') -> Call:
    return Call(id=call_id, name="sh", arguments=arguments)


def call_text(arguments: str = '{"command": "ls"}') -> str:
    return f'<tool_call>\n{{"name": "sh", "arguments": {arguments}}}\n</tool_call>'


RESULT_TEXT = f"<|im_start|>user\n<tool_response>\nok\n</tool_response><|im_end|>\n{NEXT}"


@pytest.fixture(scope="session")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer()


@pytest.fixture
def talk(tmp_path: Path, tokenizer: ChatTokenizer) -> Talk:
    return Talk(tmp_path, tokenizer)


def changed_template(tmp_path: Path, old: str, new: str) -> ChatTokenizer:
    """The tiny model with another template."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").symlink_to(TINY_MODEL / "tokenizer.json")
    text = (TINY_MODEL / "chat_template.jinja").read_text()
    assert old in text
    (folder / "chat_template.jinja").write_text(text.replace(old, new))
    return ChatTokenizer(folder)


# ---- what is sent ----


async def test_a_conversation_begins_with_messages(talk: Talk) -> None:
    record, sent = await talk.ask([ASK])
    assert sent.prompt_ids is None
    assert talk.engine.asked == []
    assert record.previous is None


async def test_what_was_sampled_is_sent_back_with_what_is_new_behind_it(talk: Talk) -> None:
    said = await talk.say([ASK], "I look at it and see.")
    _, sent = await talk.ask(said.then(MORE))
    assert talk.new(sent, said) == f"\n{MORE_TEXT}"
    canonical = array("i", talk.engine.ids(ModelRequest(model="m", messages=said.then(MORE))))
    assert sent.prompt_ids != canonical


async def test_each_turn_goes_on_from_the_one_before(talk: Talk) -> None:
    said = await talk.say([ASK], call_text(), sh("c0"))
    for number in range(1, 5):
        record, sent = await talk.ask(said.then(tool(f"c{number - 1}")))
        assert talk.new(sent, said) == f"\n{RESULT_TEXT}"
        record.fail("never mind")
        messages = said.then(tool(f"c{number - 1}"))
        said = await talk.say(
            messages, f"Hm {number}." + call_text(), Text(text=f"Hm {number}."), sh(f"c{number}")
        )
        assert talk.last.mode == "tokens"
        assert talk.last.notes == talk.last.findings == []


async def test_two_renderings_are_asked_for_and_small_ones_once_a_session(talk: Talk) -> None:
    said = await talk.say([ASK], "One.")
    said = await talk.say(said.then(MORE), "Two.")
    assert sorted(talk.engine.asked) == [(2, True), (2, True), (2, True), (3, False)]
    talk.engine.asked.clear()
    await talk.say(said.then(MORE), "Three.")
    assert sorted(talk.engine.asked) == [(4, True), (5, False)]


@pytest.mark.parametrize(
    "arguments", ['{"command": ls}', "not json at all", '["ls"]', '{"a":1,"a":2}']
)
async def test_malformed_arguments_stay_as_they_were_sampled(talk: Talk, arguments: str) -> None:
    said = await talk.say([ASK], call_text(arguments), sh("c1", arguments))
    _, sent = await talk.ask(said.then(tool("c1")))
    assert talk.new(sent, said) == f"\n{RESULT_TEXT}"


async def test_parallel_calls_are_answered_in_one_turn(talk: Talk) -> None:
    said = await talk.say([ASK], call_text() + "\n" + call_text(), sh("c1"), sh("c2"))
    _, sent = await talk.ask(said.then(tool("c1"), tool("c2")))
    assert talk.new(sent, said) == (
        "\n<|im_start|>user\n<tool_response>\nok\n</tool_response>\n<tool_response>\nok\n"
        f"</tool_response><|im_end|>\n{NEXT}"
    )


async def test_siblings_each_go_on_from_their_own_answer(talk: Talk) -> None:
    first, second = await talk.say([ASK], "One."), await talk.say([ASK], "Two.")
    for said in (second, first):
        _, sent = await talk.ask(said.then(MORE))
        assert talk.new(sent, said) == f"\n{MORE_TEXT}"


# ---- answers that did not end as the template ends them ----


async def test_a_truncated_answer_is_closed_in_the_prompt(talk: Talk) -> None:
    said = await talk.say([ASK], "I was about to", end=[], finish="length")
    _, sent = await talk.ask(said.then(MORE))
    assert talk.new(sent, said) == f"<|im_end|>\n{MORE_TEXT}"


async def test_an_answer_cut_off_inside_a_call_is_closed_in_the_prompt(talk: Talk) -> None:
    raw = '<tool_call>\n{"name": "sh", "argu'
    said = await talk.say([ASK], raw, end=[], finish="length")
    _, sent = await talk.ask(said.then(MORE))
    assert talk.new(sent, said) == f"<|im_end|>\n{MORE_TEXT}"


async def test_a_stop_string_that_ends_inside_a_token_leaves_the_tokens_whole(talk: Talk) -> None:
    said = await talk.say([ASK], "abc import", Text(text="abc i"), end=[])
    _, sent = await talk.ask(said.then(MORE))
    assert talk.new(sent, said) == f"<|im_end|>\n{MORE_TEXT}"


async def test_another_end_of_turn_is_kept_and_the_templates_own_put_behind_it(talk: Talk) -> None:
    other = talk.tokenizer.id_of("<|endoftext|>")
    talk.probe.end_of_turn_ids = [talk.tokenizer.end_of_turn, other]
    said = await talk.say([ASK], "Done.", end=[other])
    _, sent = await talk.ask(said.then(MORE))
    assert talk.new(sent, said) == f"<|im_end|>\n{MORE_TEXT}"


async def test_what_was_delivered_of_an_answer_is_gone_on_from(talk: Talk) -> None:
    said = await talk.say([ASK], "Delivered in part.")
    record, _ = await talk.ask(said.then(MORE))
    record.continued_tokens = 2
    request = ModelRequest(model="m", messages=said.then(MORE), tools=TOOLS)
    sent = await talk.prompter.compose(request, record, talk.engine, talk.probe)
    whole = len(said.context) - len(talk.last.sampled_ids)
    part = Said(said.messages, said.answer, said.context[: whole + 2])
    assert talk.new(sent, part) == f"<|im_end|>\n{MORE_TEXT}"


# ---- ends of turn in the text ----

SPELLED = "It ends with <|im_end|> and goes on."


def spelled_out(talk: Talk, text: str) -> Ids:
    """Every letter by itself, markup too."""
    return array("i", [talk.tokenizer.encode(letter)[0] for letter in text])


async def test_an_end_of_turn_in_the_answers_text_is_not_taken_for_its_end(talk: Talk) -> None:
    talk.spelled = lambda text: spelled_out(talk, text)  # type: ignore[method-assign]
    said = await talk.say([ASK], SPELLED)
    _, sent = await talk.ask(said.then({"role": "user", "content": "<|im_end|>?"}))
    assert talk.new(sent, said) == f"\n<|im_start|>user\n<|im_end|>?<|im_end|>\n{NEXT}"


NO_LAST_ANSWER = (
    "{%- if not messages -%}",
    "{%- if not messages or (messages[-1].role == 'assistant' and not add_generation_prompt) -%}",
)


async def test_where_no_conversation_may_end_with_an_answer_its_first_end_of_turn_tells(
    tmp_path: Path,
) -> None:
    talk = Talk(tmp_path, changed_template(tmp_path, *NO_LAST_ANSWER))
    said = await talk.say([ASK], "I look.")
    said = await talk.say(said.then(MORE), "I see.")
    assert talk.last.mode == "tokens"
    _, sent = await talk.ask(said.then(MORE))
    assert talk.new(sent, said) == f"\n{MORE_TEXT}"


async def test_there_an_answer_that_spells_an_end_of_turn_is_never_cut_at_it(
    tmp_path: Path,
) -> None:
    talk = Talk(tmp_path, changed_template(tmp_path, *NO_LAST_ANSWER))
    talk.spelled = lambda text: spelled_out(talk, text)  # type: ignore[method-assign]
    said = await talk.say([ASK], SPELLED)
    await talk.say(said.then(MORE), "I see.")
    assert talk.last.mode == "messages"
    assert talk.last.notes == [
        "asked with messages: the engine does not render where the answer ends"
    ]


def raising(condition: str) -> tuple[str, str]:
    """A template that renders less."""
    return "{%- if not messages -%}", f"{{%- if not messages or ({condition}) -%}}"


NO_SMALL = raising("messages[0].content == 'Go on.'")
NONE_CLOSED = raising("not add_generation_prompt")


@pytest.mark.parametrize(
    ("change", "renders", "why"),
    [
        (NO_SMALL, "full", "the template does not show where an answer ends"),
        (NO_SMALL, "suffix", "the engine does not render what it adds apart from the rest"),
        (NONE_CLOSED, "full", "the engine does not render what comes before the answer"),
    ],
)
async def test_what_a_template_does_not_show_is_not_made_up(
    tmp_path: Path, change: tuple[str, str], renders: Any, why: str
) -> None:
    talk = Talk(tmp_path, changed_template(tmp_path, *change))
    talk.probe.renders = renders
    said = await talk.say([ASK], "I look.")
    await talk.say(said.then(MORE), "I see.")
    assert (talk.last.mode, talk.last.notes) == ("messages", [f"asked with messages: {why}"])


@pytest.mark.parametrize("renders", ["full", "suffix"])
async def test_an_end_of_turn_that_is_not_the_templates_is_not_taken_for_it(
    talk: Talk, renders: Any
) -> None:
    talk.probe.renders = renders
    talk.probe.end_of_turn_ids = [talk.tokenizer.id_of("<|endoftext|>")]
    said = await talk.say([ASK], "I look.")
    await talk.say(said.then(MORE), "I see.")
    assert talk.last.mode == "messages"
    assert talk.last.notes[0].startswith("asked with messages: the ")


@pytest.mark.parametrize("renders", ["full", "suffix"])
async def test_nothing_new_behind_an_answer_begins_another(talk: Talk, renders: Any) -> None:
    talk.probe.renders = renders
    said = await talk.say([ASK], "I look.")
    _, sent = await talk.ask(said.then())
    assert talk.new(sent, said) == f"\n{NEXT}"


# ---- templates that drop or add reasoning ----


async def thoughtful(talk: Talk) -> Said:
    said = await talk.say(
        [ASK],
        "<think>\nA thought.\n</think>\n\n" + call_text(),
        Reasoning(text="A thought."),
        sh("c1"),
    )
    return await talk.say(
        said.then(tool("c1")),
        "<think>\nAnother.\n</think>\n\nDone.",
        Reasoning(text="Another."),
        Text(text="Done."),
    )


async def test_reasoning_stays_as_long_as_the_template_keeps_it(talk: Talk) -> None:
    await thoughtful(talk)
    assert [each.mode for each in talk.records] == ["messages", "tokens"]
    assert talk.last.findings == []


async def test_a_template_that_leaves_reasoning_out_begins_a_branch_and_that_is_said(
    talk: Talk,
) -> None:
    said = await thoughtful(talk)
    said = await talk.say(said.then(MORE), call_text(), sh("c2"))
    assert (talk.last.mode, talk.last.findings) == ("messages", ["history_rewritten"])
    await talk.say(said.then(tool("c2")), "Yes.")
    assert (talk.last.mode, talk.last.findings) == ("tokens", [])


async def test_the_record_is_kept_where_that_is_asked_for_and_that_is_said(
    tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    talk = Talk(tmp_path, tokenizer, history="keep")
    said = await thoughtful(talk)
    record, sent = await talk.ask(said.then(MORE))
    assert talk.new(sent, said) == f"\n{MORE_TEXT}"
    record.fail("never mind")
    said = await talk.say(said.then(MORE), call_text(), sh("c2"))
    assert (talk.last.mode, talk.last.findings) == ("tokens", ["history_kept"])
    _, sent = await talk.ask(said.then(tool("c2")))
    assert talk.new(sent, said) == f"\n{RESULT_TEXT}"


async def test_an_empty_block_before_the_next_answer_alone_changes_nothing(talk: Talk) -> None:
    talk.kwargs = {"enable_thinking": False}
    said = await talk.say([ASK], call_text(), sh("c1"))
    _, sent = await talk.ask(said.then(tool("c1")))
    assert talk.new(sent, said) == f"\n{RESULT_TEXT}<think>\n\n</think>\n\n"


async def test_an_empty_block_in_every_earlier_turn_changes_nothing(talk: Talk) -> None:
    talk.kwargs = {"history_thinking": "empty"}
    said = await talk.say([ASK], call_text(), sh("c1"))
    _, sent = await talk.ask(said.then(tool("c1")))
    assert talk.new(sent, said) == f"\n{RESULT_TEXT}"


LAST_MARKED = (
    "{%- if thinking and (shown == 'all' or (shown != 'none' and loop.index0 > last.user)) -%}",
    "{%- if loop.index0 > last.user and (loop.last or thinking) -%}",
)
"""As Qwen3's: the last turn of a conversation has a block of reasoning even if it is empty."""


@pytest.mark.parametrize("history", ["template", "keep"])
async def test_markup_of_the_last_turn_alone_is_no_rewriting(tmp_path: Path, history: str) -> None:
    talk = Talk(tmp_path, changed_template(tmp_path, *LAST_MARKED), history=history)
    said = await talk.say([ASK], call_text(), sh("c1"))
    said = await talk.say(said.then(tool("c1")), call_text(), sh("c2"))
    assert (talk.last.mode, talk.last.findings) == ("tokens", [])
    record, sent = await talk.ask(said.then(tool("c2")))
    assert talk.new(sent, said) == f"\n{RESULT_TEXT}"
    record.fail("never mind")
    said = await talk.say(said.then(tool("c2")), "Done.")
    _, sent = await talk.ask(said.then(MORE))
    assert talk.new(sent, said) == f"\n{MORE_TEXT}"


async def test_reasoning_that_is_left_out_beside_such_markup_is_rewriting(tmp_path: Path) -> None:
    talk = Talk(tmp_path, changed_template(tmp_path, *LAST_MARKED))
    said = await thoughtful(talk)
    assert talk.last.mode == "tokens"
    await talk.say(said.then(MORE), "Yes.")
    assert (talk.last.mode, talk.last.findings) == ("messages", ["history_rewritten"])


# ---- where only new messages can be rendered ----


async def test_new_messages_are_rendered_behind_a_small_conversation(talk: Talk) -> None:
    talk.probe.renders = "suffix"
    said = await talk.say([ASK], call_text(), sh("c1"))
    record, sent = await talk.ask(said.then(tool("c1")))
    assert talk.new(sent, said) == f"\n{RESULT_TEXT}"
    assert max(talk.engine.asked) == (3, False)
    record.fail("never mind")
    said = await talk.say(said.then(tool("c1")), "Cut off", end=[], finish="length")
    _, sent = await talk.ask(said.then(MORE))
    assert talk.new(sent, said) == f"<|im_end|>\n{MORE_TEXT}"


@pytest.mark.parametrize(("history", "mode"), [("template", "messages"), ("keep", "tokens")])
async def test_there_nobody_knows_whether_reasoning_is_left_out(
    tmp_path: Path, tokenizer: ChatTokenizer, history: str, mode: str
) -> None:
    talk = Talk(tmp_path, tokenizer, history=history)
    talk.probe.renders = "suffix"
    said = await thoughtful(talk)
    assert talk.last.mode == "tokens"
    await talk.say(said.then(MORE), "Yes.")
    assert talk.last.mode == mode
    assert talk.last.findings == (["history_kept"] if mode == "tokens" else [])


async def test_a_history_that_the_template_chokes_on_is_gone_on_with(tmp_path: Path) -> None:
    """With messages the call would fail, and so would all that follow it."""
    strict = changed_template(
        tmp_path,
        "{{- '<tool_call>\\n{\"name\": '",
        "{%- if call.function.arguments.choke -%}{{- raise_exception('No.') -}}{%- endif -%}"
        "{{- '<tool_call>\\n{\"name\": '",
    )
    talk = Talk(tmp_path, strict)
    said = await talk.say([ASK], call_text('{"choke": 1}'), sh("c1", '{"choke": 1}'))
    with pytest.raises(EngineError):
        await talk.engine.render(ModelRequest(model="m", messages=said.then(MORE), tools=TOOLS))
    record, sent = await talk.ask(said.then(tool("c1")))
    assert talk.new(sent, said) == f"\n{RESULT_TEXT}"
    record.fail("never mind")
    said = await talk.say(said.then(tool("c1")), "I see.")
    _, sent = await talk.ask(said.then(MORE))
    assert talk.new(sent, said) == f"\n{MORE_TEXT}"


# ---- where ids are not sent ----


@pytest.mark.parametrize(
    "lacking",
    [
        {"token_routes": []},
        {"renders": "none"},
        {"kv_connector": True},
        {"end_of_turn_ids": []},
    ],
)
async def test_an_engine_that_cannot_take_ids_is_asked_with_messages(
    talk: Talk, lacking: dict[str, Any]
) -> None:
    assert unable(talk.probe) == ""
    for name, value in lacking.items():
        setattr(talk.probe, name, value)
    assert unable(talk.probe)
    said = await talk.say([ASK], "One.")
    await talk.say(said.then(MORE), "Two.")
    assert talk.last.mode == "messages"
    assert talk.engine.asked == []


async def test_messages_are_sent_where_they_are_asked_for(
    tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    talk = Talk(tmp_path, tokenizer, prompts="messages")
    said = await talk.say([ASK], "One.")
    await talk.say(said.then(MORE), "Two.")
    assert (talk.last.mode, talk.last.notes) == ("messages", [])


async def test_a_task_may_ask_otherwise_than_its_node(
    tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    talk = Talk(tmp_path, tokenizer, prompts="messages", history="keep")
    talk.prompter = Prompter(
        InferenceConfig(prompts="messages", history="keep"), Prompting(prompts="tokens")
    )
    said = await thoughtful(talk)
    await talk.say(said.then(MORE), "Yes.")
    assert (talk.last.mode, talk.last.findings) == ("tokens", ["history_kept"])


async def test_tokens_that_are_insisted_on_and_cannot_be_had_are_missed_aloud(talk: Talk) -> None:
    talk.prompter = Prompter(wanted=Prompting(prompts="tokens"))
    talk.probe.token_routes = []
    said = await talk.say([ASK], "One.")
    await talk.say(said.then(MORE), "Two.")
    assert talk.last.notes == ["asked with messages: the engine takes no prompts as ids"]


async def test_other_tools_begin_a_branch(talk: Talk) -> None:
    said = await talk.say([ASK], "One.")
    talk.tools = [*TOOLS, {"type": "function", "function": {"name": "more", "parameters": {}}}]
    said = await talk.say(said.then(MORE), "Two.")
    assert (talk.last.mode, talk.last.previous) == ("messages", None)
    _, sent = await talk.ask(said.then(MORE))
    assert talk.new(sent, said) == f"\n{MORE_TEXT}"


async def test_a_session_goes_on_after_compaction(talk: Talk) -> None:
    await talk.say([ASK], "One.")
    said = await talk.say([{"role": "user", "content": "So far: one."}], "Two.")
    assert talk.last.mode == "messages"
    _, sent = await talk.ask(said.then(MORE))
    assert talk.new(sent, said) == f"\n{MORE_TEXT}"


async def test_images_are_sent_as_messages(talk: Talk) -> None:
    said = await talk.say([ASK], "One.")
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    _, sent = await talk.ask(said.then({"role": "user", "content": [image]}))
    assert sent.prompt_ids is None
    assert talk.engine.asked == []


async def test_an_answer_without_ids_is_not_gone_on_from(talk: Talk) -> None:
    said = await talk.say([ASK], "", end=[])
    _, sent = await talk.ask(said.then(MORE))
    assert sent.prompt_ids is None


async def test_a_prompt_that_was_not_read_as_sent_is_asked_again_and_its_branch_with_messages(
    talk: Talk,
) -> None:
    fork = await talk.say([ASK], "One.")
    said = await talk.say(fork.then(MORE), "Two.", read=lambda ids: ids[:-3])
    assert (talk.last.mode, talk.last.findings) == ("messages", ["token_in_ignored"])
    for _ in range(2):
        said = await talk.say(said.then(MORE), "On.")
        assert (talk.last.mode, talk.last.findings) == ("messages", [])
    _, sent = await talk.ask(fork.then({"role": "user", "content": "Otherwise?"}))
    assert sent.prompt_ids is not None


async def test_an_engine_that_may_render_later_is_asked_again(talk: Talk) -> None:
    said = await talk.say([ASK], "One.")
    busy = ErrorKind(status=503, code="overloaded", message="busy")
    talk.engine.error = EngineError(busy, infra=True, again=True)
    with pytest.raises(EngineError, match="busy"):
        await talk.ask(said.then(MORE))


async def test_what_the_engine_refuses_to_render_it_is_asked_with_messages(talk: Talk) -> None:
    said = await talk.say([ASK], "One.")
    wrong = ErrorKind(status=400, code="invalid_request", message="no")
    talk.engine.error = EngineError(wrong, infra=False)
    await talk.say(said.then(MORE), "Two.")
    assert talk.last.mode == "messages"
    assert talk.last.notes == [
        "asked with messages: the engine does not render what it adds apart from the rest"
    ]
