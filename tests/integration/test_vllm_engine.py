"""What the gateway asks of a vLLM, asked of a real one."""

import json
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import anyio
import httpx2
import msgspec
import pytest

from builders.records import Ids
from polar_gateway.dialects.turn import Block, BlockEnd, Call, ModelRequest, Reasoning, Text
from polar_gateway.engines.base import EngineError, EngineReply, TokenRoute
from polar_gateway.engines.vllm import Vllm
from polar_gateway.testing.script import Rule, Script, ScriptedCall, Step
from tests.integration.vllm_server import CACHE, VllmServer, metric

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]

TOOLS = [
    {
        "type": "function",
        "function": {"name": "bash", "description": "Run it.", "parameters": {"type": "object"}},
    }
]
LOOK = Step(
    think="I should look.",
    say="Let me see.",
    calls=[
        ScriptedCall(name="bash", arguments={"command": "ls"}),
        ScriptedCall(name="bash", arguments={"command": "pwd"}),
    ],
)
PLAY = "all work and no play " * 160
THINK_LONG = f"<think>\n{PLAY}\n</think>\n\nThat was it."
CALL_LONG = (
    '<think>\nhm\n</think>\n\nLook.\n<tool_call>\n{"name": "bash", "arguments": {"command": "'
    f'{PLAY}"}}}}\n</tool_call>'
)
SCRIPT = Script(
    rules=[
        Rule(match="THINK", steps=[THINK_LONG]),
        Rule(match="CALL", steps=[CALL_LONG]),
        Rule(match="LONG", steps=["</think>\n\n" + "all work and no play " * 2000]),
        Rule(match="GO", steps=[LOOK]),
    ]
)


def ask(text: str, **fields: Any) -> ModelRequest:
    return ModelRequest(model="any", messages=[{"role": "user", "content": text}], **fields)


@pytest.fixture
async def engine(vllm: VllmServer) -> AsyncIterator[Vllm]:
    vllm.speak(SCRIPT)
    running = Vllm(vllm.url)
    yield running
    await running.aclose()


async def test_a_probe_finds_all_that_training_needs_streamed_too(engine: Vllm) -> None:
    probe = await engine.probe()
    assert (probe.model, probe.max_model_len) == ("tiny", 131_072)
    assert (probe.token_ids, probe.stream_ids) == (True, True)
    assert probe.problems == []
    assert probe.end_of_turn_ids == [4089, 4087]
    assert probe.end_of_turn_texts == ["<|im_end|>", "<|endoftext|>"]
    assert probe.token_routes == ["chat", "generate"]
    assert (probe.renders, probe.logprob_kind) == ("full", "raw")
    assert (probe.reasoning_parser, probe.tool_parser) == (True, True)
    assert (probe.weight_versions, probe.resumes) == (True, True)
    assert probe.controls == ["pause", "abort", "update"]
    assert any("--logprobs-mode processed_logprobs" in note for note in probe.notes)


HISTORY = [
    {"role": "system", "content": "You are an agent."},
    {"role": "user", "content": "GO"},
    {
        "role": "assistant",
        "content": "\n\nLet me see.\n",
        "reasoning_content": "\nI should look.\n",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "bash", "arguments": '{"a": 1}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "out.txt"},
]


@pytest.mark.parametrize(
    "request_",
    [
        ask("GO", tools=TOOLS),
        ModelRequest(model="any", messages=HISTORY, tools=TOOLS, max_tokens=5),
        ask("x", template_kwargs={"enable_thinking": False}, sampling={"min_tokens": 3}),
    ],
    ids=["tools", "history", "no thinking"],
)
async def test_tokens_are_counted_exactly_whether_rendered_or_asked(
    engine: Vllm, vllm: VllmServer, request_: ModelRequest
) -> None:
    await engine.probe()
    unprobed = Vllm(vllm.url)  # does not know yet that the server renders
    rendered, asked = await engine.count_tokens(request_), await unprobed.count_tokens(request_)
    reply = await unprobed.complete(request_, "msg_1")
    await unprobed.aclose()
    assert rendered == asked == len(reply.prompt_ids) == reply.usage.prompt_tokens


async def test_an_overflow_says_how_long_the_prompt_really_is(engine: Vllm) -> None:
    long = ask("word " * 140_000, max_tokens=10)
    for once in (engine.complete, engine.stream):
        with pytest.raises(EngineError) as raised:
            await once(long, "msg_1")
        assert raised.value.kind.code == "context_overflow"
        length = await engine.count_tokens(long)
        assert length > 140_000
        assert raised.value.kind.message.startswith(
            f"prompt is too long: {length} tokens > 131072 maximum. "
            "This model's maximum context length is 131072 tokens."
        )


@pytest.mark.parametrize(("asked", "notes"), [(131_072, False), (500_000, True)])
async def test_more_output_than_there_is_room_for_is_answered(
    engine: Vllm, asked: int, notes: bool
) -> None:
    reply = await engine.complete(ask("hi", max_tokens=asked), "msg_1")
    assert reply.finish_reason == "stop"
    left = 131_072 - len(reply.prompt_ids)
    said = [f"max_tokens: {left} instead of {asked}, which is the room left"]
    assert reply.notes == (said if notes else [])


async def test_streamed_and_whole_answers_have_the_same_tokens(engine: Vllm) -> None:
    request = ask("GO", tools=TOOLS, sampling={"seed": 3})
    whole = await engine.complete(request, "msg_1")
    stream = await engine.stream(request, "msg_2")
    counts, ids = [], array("i")
    async for _ in stream:
        counts.append(stream.sampled_tokens)
        ids += stream.sampled_so_far()[0]
    await stream.aclose()
    streamed = stream.reply
    assert whole.findings == streamed.findings == []
    assert streamed.sampled_ids == whole.sampled_ids == ids + stream.sampled_so_far()[0]
    assert streamed.prompt_ids == whole.prompt_ids
    assert streamed.logprobs == whole.logprobs
    assert streamed.usage == whole.usage
    assert whole.usage.reasoning_tokens > 0
    assert counts == sorted(counts)
    assert counts[-1] == len(ids)


async def test_an_answer_that_its_limit_cuts_says_in_which_block(engine: Vllm) -> None:
    stream = await engine.stream(ask("GO", tools=TOOLS, max_tokens=5), "msg_1")
    events = [event async for batch in stream for event in batch]
    await stream.aclose()
    assert events[-1] == BlockEnd(cut=True)
    assert stream.reply.finish_reason == "length"


async def running(http: httpx2.AsyncClient) -> float:
    return await metric(http, "", "num_requests_running")


async def test_closing_a_stream_stops_the_sampling(engine: Vllm, vllm: VllmServer) -> None:
    async with httpx2.AsyncClient(base_url=vllm.url) as http:
        stream = await engine.stream(ask("LONG"), "msg_1")
        await stream.aclose()
        with anyio.fail_after(10):
            while await running(http):
                await anyio.sleep(0.1)


async def test_what_the_engine_aborts_is_no_turn(engine: Vllm, vllm: VllmServer) -> None:
    async with httpx2.AsyncClient(base_url=vllm.url) as http:

        async def abort(when: Callable[[], bool]) -> None:
            while True:
                if when() and await running(http):
                    await http.post("/abort_requests", json={"request_ids": []})
                await anyio.sleep(0.05)

        stream = await engine.stream(ask("LONG"), "msg_1")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(abort, lambda: stream.sampled_tokens > 0)
            raised = await failure(stream_to_the_end(stream))
            tasks.cancel_scope.cancel()
        assert raised.again
        assert "aborted" in str(raised)
        assert stream.reply.finish_reason is None
        assert 0 < len(stream.reply.sampled_ids) == len(stream.reply.logprobs or ())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(abort, lambda: True)
            raised = await failure(engine.complete(ask("LONG"), "msg_2"))
            tasks.cancel_scope.cancel()
        assert raised.again


async def stream_to_the_end(stream: Any) -> None:
    try:
        async for _ in stream:
            pass
    finally:
        await stream.aclose()


async def failure(asking: Any) -> EngineError:
    try:
        await asking
    except EngineError as error:
        return error
    raise AssertionError("the engine answered")


# ---- prompts as ids ----


async def prompt_of(engine: Vllm, request: ModelRequest) -> Ids:
    return (await engine.render(request)).ids


@pytest.mark.parametrize("route", ["chat", "generate"])
async def test_a_prompt_of_ids_is_read_as_it_is_and_answered_as_any_other(
    engine: Vllm, vllm: VllmServer, route: TokenRoute
) -> None:
    await engine.probe()
    asked = ask("GO", tools=TOOLS)
    by_ids = Vllm(vllm.url, token_route=route)
    sent = await prompt_of(engine, asked)
    # "ss" in two tokens, as no tokenizer would spell it.
    [letter] = await engine.api.ids_of("s")
    assert len(await engine.api.ids_of("ss")) == 1
    sent = array("i", [*sent[:3], letter, letter, *sent[3:]])
    request = msgspec.structs.replace(
        asked, messages=[*asked.messages, *HISTORY[2:]], prompt_ids=sent
    )
    reply = await by_ids.complete(request, "msg_1")
    stream = await by_ids.stream(request, "msg_2")
    await stream_to_the_end(stream)
    await by_ids.aclose()
    for each in (reply, stream.reply):
        assert each.prompt_ids is sent
        assert each.findings == []
        assert [type(block) for block in each.blocks] == [Reasoning, Text, Call, Call]
        assert each.finish_reason == "tool_calls"
    assert (len(reply.versions) > 0) == (route == "generate")


async def test_both_routes_make_the_same_of_the_same_tokens(engine: Vllm, vllm: VllmServer) -> None:
    other = Vllm(vllm.url, token_route="generate")
    for request in (
        ask("GO", tools=TOOLS, sampling={"seed": 5}),
        ask("GO", tools=TOOLS, max_tokens=30, sampling={"seed": 5}),
        ask("GO", tools=TOOLS, sampling={"seed": 5, "stop": ["see"]}),
        ask("x", template_kwargs={"enable_thinking": False}, sampling={"seed": 5}),
        ask("x", sampling={"seed": 5, "stop": ["one"]}),
    ):
        chat = await engine.complete(request, "msg_1")
        generated = await other.complete(request, "msg_2")
        assert generated.sampled_ids == chat.sampled_ids
        assert generated.prompt_ids == chat.prompt_ids
        assert generated.logprobs == chat.logprobs
        assert generated.finish_reason == chat.finish_reason
        assert generated.stop_reason == chat.stop_reason
        assert nameless(generated.blocks) == nameless(chat.blocks)
    await other.aclose()


def nameless(blocks: list[Block]) -> list[Block]:
    """Without the names of calls, which are made up at each parsing."""
    return [
        msgspec.structs.replace(block, id="") if isinstance(block, Call) else block
        for block in blocks
    ]


async def test_what_is_new_is_what_a_rendering_adds_to_a_closed_one(engine: Vllm) -> None:
    await engine.probe()
    request = ModelRequest(model="any", messages=HISTORY, tools=TOOLS)
    earlier = msgspec.structs.replace(request, messages=HISTORY[:3])
    closed = await engine.render(earlier, closed=True)
    whole = await engine.render(request)
    added = whole.after(closed, less=1)
    assert added is not None
    assert closed.ids[:-1] + added == whole.ids
    text = await engine.api.detokenize(added.tolist())
    assert text.startswith("\n<|im_start|>user\n<tool_response>\nout.txt")
    assert text.endswith("<|im_start|>assistant\n")


# ---- aborts and weights ----


@pytest.mark.parametrize("route", ["chat", "generate"])
@pytest.mark.parametrize("where", ["THINK", "CALL"])
async def test_an_aborted_answer_goes_on_and_is_parsed_as_one(
    engine: Vllm, vllm: VllmServer, where: str, route: TokenRoute
) -> None:
    request = ask(where, tools=TOOLS, max_tokens=5000)
    async with aclosing(Vllm(vllm.url, token_route=route)) as asking:
        partial = (await aborted(asking, vllm, request)).partial
        assert partial is not None
        assert partial.finish_reason is None
        known = len(partial.sampled_ids)
        assert 20 < known == len(partial.logprobs or ())
        whole = await asking.resume(request, "msg_1", partial)
    assert whole.findings == []
    assert whole.sampled_ids[:known] == partial.sampled_ids
    assert len(whole.logprobs or ()) == len(whole.sampled_ids) > known
    assert whole.usage.completion_tokens == len(whole.sampled_ids)
    if where == "THINK":
        assert [type(block) for block in whole.blocks] == [Reasoning, Text]
        assert isinstance(whole.blocks[0], Reasoning)
        assert whole.blocks[0].text.strip() == PLAY.strip()
        assert whole.finish_reason == "stop"
    else:
        assert [type(block) for block in whole.blocks] == [Reasoning, Text, Call]
        assert isinstance(whole.blocks[2], Call)
        assert json.loads(whole.blocks[2].arguments) == {"command": PLAY}
        assert whole.finish_reason == "tool_calls"


async def test_a_resumed_answer_has_no_more_tokens_than_were_asked_for(
    engine: Vllm, vllm: VllmServer
) -> None:
    partial = (await aborted(engine, vllm, ask("THINK"))).partial
    assert partial is not None
    known = len(partial.sampled_ids)
    for limit, more in ((known, 0), (known + 7, 7)):
        whole = await engine.resume(ask("THINK", max_tokens=limit), "msg_1", partial)
        assert (whole.finish_reason, len(whole.sampled_ids)) == ("length", known + more)
        assert [type(block) for block in whole.blocks] == [Reasoning]


async def aborted(engine: Vllm, vllm: VllmServer, request: ModelRequest) -> EngineError:
    """What a call raises that is aborted when it has sampled some tokens."""
    raised: list[EngineError] = []

    async def call() -> None:
        raised.append(await failure(engine.complete(request, "msg_1")))

    async with under_way(vllm, call) as http:
        await http.post("/abort_requests", json={"request_ids": []})
    return raised[0]


@asynccontextmanager
async def under_way(
    vllm: VllmServer, call: Callable[[], Awaitable[None]]
) -> AsyncIterator[httpx2.AsyncClient]:
    """Some tokens of a call are sampled, and of no other: what came before is over first. On the
    way out the call is waited for."""
    async with httpx2.AsyncClient(base_url=vllm.url) as http, anyio.create_task_group() as tasks:
        before, now = -1.0, await sampled(http)
        while now != before:
            await anyio.sleep(0.5)
            before, now = now, await sampled(http)
        with vllm.slow_motion():
            tasks.start_soon(call)
            while await sampled(http) < before + 60:
                await anyio.sleep(0.05)
            yield http


async def sampled(http: httpx2.AsyncClient) -> float:
    return await metric(http, "", "generation_tokens_total")


async def test_weights_change_under_an_answer_that_stands_still(
    engine: Vllm, vllm: VllmServer
) -> None:
    replies: list[EngineReply] = []

    async def call() -> None:
        replies.append(await asking.complete(ask("THINK", max_tokens=5000), "msg_1"))

    async with aclosing(Vllm(vllm.url, token_route="generate")) as asking:
        await asking.update("step-1", None)
        async with under_way(vllm, call):
            await asking.pause("keep")
            try:
                await asking.update("step-2", str(CACHE / "vllm" / "model"))
                assert not replies
            finally:
                await asking.unpause()
    [reply] = replies
    first, second = reply.versions
    assert (first.version, second.version) == ("step-1", "step-2")
    assert first.start == 0 < first.end == second.start < second.end == len(reply.sampled_ids)


async def test_a_pause_that_aborts_leaves_what_there_was(engine: Vllm, vllm: VllmServer) -> None:
    raised: list[EngineError] = []

    async def call() -> None:
        raised.append(await failure(engine.complete(ask("THINK"), "msg_1")))

    async with under_way(vllm, call):
        await engine.pause("abort")
    await engine.unpause()
    assert raised[0].partial is not None
    assert len(raised[0].partial.sampled_ids) > 20
