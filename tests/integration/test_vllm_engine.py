"""What the gateway asks of a vLLM, asked of a real one."""

from array import array
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import httpx2
import pytest

from polar_gateway.dialects.turn import BlockEnd, ModelRequest
from polar_gateway.engines.base import EngineError
from polar_gateway.engines.vllm import Vllm
from polar_gateway.testing.script import Rule, Script, ScriptedCall, Step
from tests.integration.vllm_server import VllmServer

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
SCRIPT = Script(
    rules=[
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
    assert (probe.problems, probe.notes) == ([], [])
    assert len(probe.end_of_turn_ids) == 1


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
    metrics = (await http.get("/metrics")).text
    lines = [li for li in metrics.splitlines() if li.startswith("vllm:num_requests_running{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


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
