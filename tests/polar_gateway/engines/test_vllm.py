import asyncio
import json
import math
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
import pytest

from polar_gateway.dialects.turn import (
    BlockDelta,
    BlockEnd,
    BlockStart,
    Call,
    ModelRequest,
    Reasoning,
    Text,
    TurnEvent,
)
from polar_gateway.engines.base import EngineError, EngineReply
from polar_gateway.engines.vllm import Vllm
from polar_gateway.testing.engine import Fault, ScriptedEngine
from polar_gateway.testing.serve import serve
from tests.polar_gateway.engines.servers import PAUSE, Answers, recording, sse

T = TypeVar("T")

HI = ModelRequest(model="anything", messages=[{"role": "user", "content": "hi"}])


@asynccontextmanager
async def vllm_at(app: Any, **options: Any) -> AsyncIterator[Vllm]:
    async with serve(app) as url:
        engine = Vllm(url, **{"model": "tiny", **options})
        try:
            yield engine
        finally:
            await engine.aclose()


async def completed(app: Any) -> EngineReply:
    """The reply to one whole call; raises what the call raised."""

    async def ask(engine: Vllm) -> EngineReply:
        return await engine.complete(HI, "msg_1")

    return await outcome(app, ask)


async def streamed(app: Any) -> tuple[list[TurnEvent], EngineReply]:
    """The events of one streamed call, and its reply; raises what the call raised."""

    async def ask(engine: Vllm) -> tuple[list[TurnEvent], EngineReply]:
        stream = await engine.stream(HI, "msg_1")
        try:
            events = [event async for batch in stream for event in batch]
        finally:
            await stream.aclose()
        return events, stream.reply

    return await outcome(app, ask)


async def outcome(app: Any, ask: Callable[[Vllm], Awaitable[T]]) -> T:
    # A server that runs in a task group would wrap what is raised while it runs.
    async with vllm_at(app) as engine:
        try:
            return await ask(engine)
        except EngineError as error:
            raised = error
    raise raised


def changed(name: str, **choice: Any) -> Answers:
    """A recorded whole answer with some of its choice's fields replaced."""
    answer = recording(name)["response"]
    answer["choices"][0].update(choice)
    return Answers((200, answer))


# ---- reading answers ----


async def test_ids_and_logprobs_are_the_engines_own() -> None:
    recorded = recording("tool_auto_regex_two")["response"]
    reply = await completed(Answers.recorded("tool_auto_regex_two"))
    choice = recorded["choices"][0]
    assert list(reply.prompt_ids) == recorded["prompt_token_ids"]
    assert list(reply.sampled_ids) == choice["token_ids"]
    said = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert reply.logprobs == array("f", said)
    assert reply.findings == []
    assert reply.usage.prompt_tokens == recorded["usage"]["prompt_tokens"]
    assert reply.finish_reason == "tool_calls"
    arguments = '{"command": "echo hi > out.txt && ls -la"}'
    assert [(b.name, b.arguments) for b in reply.blocks if isinstance(b, Call)] == [
        ("bash", arguments),
        ("bash", arguments),
    ]


async def test_text_before_a_call_is_a_block_of_its_own() -> None:
    reply = await completed(Answers.recorded("tool_text_before"))
    assert [type(block) for block in reply.blocks] == [Text, Call]
    assert reply.turn("msg_1", 1).finish_reason == "tool_calls"


async def test_a_stop_string_and_a_second_end_of_turn_id_are_kept_as_the_stop_reason() -> None:
    stopped = await completed(Answers.recorded("stop_string_midtoken"))
    assert stopped.stop_reason == "mpo"
    assert stopped.turn("msg_1", 1).stop_sequence == "mpo"
    assert len(stopped.sampled_ids) == 5
    ended = await completed(Answers.recorded("eos_second_id"))
    assert ended.stop_reason == 4087
    assert ended.turn("msg_1", 1).stop_sequence is None
    assert ended.blocks == []


async def test_a_recorded_stream_adds_up_to_its_ids() -> None:
    events = recording("scripted_stream")["events"]
    chunks = [event for event in events if event != "[DONE]"]
    ids = [i for chunk in chunks for c in chunk["choices"] for i in c.get("token_ids") or ()]
    _, reply = await streamed(Answers.recorded("scripted_stream"))
    assert list(reply.sampled_ids) == ids
    assert list(reply.prompt_ids) == chunks[0]["prompt_token_ids"]
    assert reply.logprobs is not None
    assert len(reply.logprobs) == len(ids)
    assert reply.findings == []
    assert (reply.usage.completion_tokens, reply.usage.reasoning_tokens) == (len(ids), 14)
    assert reply.finish_reason == "tool_calls"


async def test_a_stream_opens_and_closes_one_block_after_the_other() -> None:
    events, reply = await streamed(Answers.recorded("scripted_stream"))
    kinds = [event.kind for event in events if isinstance(event, BlockStart)]
    assert kinds == ["reasoning", "text", "call"]
    is_open = False
    texts: list[str] = []
    for event in events:
        if isinstance(event, BlockStart):
            assert not is_open
            is_open = True
            texts.append("")
        elif isinstance(event, BlockDelta):
            assert is_open
            texts[-1] += event.text
        elif isinstance(event, BlockEnd):
            is_open = False
    assert not is_open
    said = [b.arguments if isinstance(b, Call) else b.text for b in reply.blocks]
    assert texts == said
    call = reply.blocks[-1]
    start = next(e for e in events if isinstance(e, BlockStart) and e.kind == "call")
    assert isinstance(call, Call)
    assert (start.id, start.name) == (call.id, call.name)
    assert json.loads(call.arguments)


async def test_a_second_call_closes_the_first() -> None:
    def chunk(*calls: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": {"tool_calls": list(calls)}, **more}]}

    chunks = [
        chunk({"index": 0, "id": "a", "function": {"name": "one", "arguments": ""}}),
        chunk({"index": 0, "function": {"arguments": "{}"}}),
        chunk({"index": 1, "id": "b", "function": {"name": "two", "arguments": "[]"}}),
        chunk(finish_reason="tool_calls"),
        "[DONE]",
    ]
    events, _ = await streamed(Answers([sse(chunks)]))
    assert events == [
        BlockStart(kind="call", id="a", name="one"),
        BlockDelta(text="{}"),
        BlockEnd(),
        BlockStart(kind="call", id="b", name="two"),
        BlockDelta(text="[]"),
        BlockEnd(),
    ]


async def test_a_call_that_goes_on_after_text_has_ended_it_is_an_error_and_no_nameless_call() -> (
    None
):
    def chunk(**delta: Any) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": delta}]}

    chunks = [
        chunk(tool_calls=[{"index": 0, "id": "a", "function": {"name": "one"}}]),
        chunk(tool_calls=[{"index": 0, "function": {"arguments": '{"a":'}}]),
        chunk(content="\n"),
        chunk(tool_calls=[{"index": 0, "function": {"arguments": "1}"}}]),
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
        "[DONE]",
    ]
    app = Answers([sse(chunks[:2]), PAUSE, sse(chunks[2:])])
    with pytest.raises(EngineError, match="tool call 0 goes on after its end") as raised:
        await streamed(app)
    assert raised.value.infra


@pytest.mark.parametrize("size", [1, 7, 100, 5000])
async def test_a_stream_may_be_cut_into_any_pieces_with_comments_between_events(size: int) -> None:
    whole = b": keep-alive\n\n: keep-alive\n\n" + sse(recording("tool_auto_regex_stream")["events"])
    pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
    _, reply = await streamed(Answers(pieces))
    _, at_once = await streamed(Answers([whole]))
    assert reply == at_once
    assert reply.findings == []


async def test_ids_count_also_where_a_token_is_half_a_character() -> None:
    _, reply = await streamed(Answers.recorded("invalid_utf8_stream"))
    assert (
        len(reply.sampled_ids) == reply.usage.completion_tokens
        or reply.usage.completion_tokens == 0
    )
    assert reply.findings == []


async def test_sampled_so_far_gives_each_token_once() -> None:
    async with vllm_at(Answers.recorded("scripted_stream")) as engine:
        stream = await engine.stream(HI, "msg_1")
        assert stream.prompt_tokens == 225
        ids, logprobs = array("i"), array("f")
        async for _ in stream:
            more_ids, more_logprobs = stream.sampled_so_far()
            assert len(more_ids) == len(more_logprobs)
            ids += more_ids
            logprobs += more_logprobs
        rest = stream.sampled_so_far()
        assert ids + rest[0] == stream.reply.sampled_ids
        assert logprobs + rest[1] == stream.reply.logprobs
        assert len(stream.sampled_so_far()[0]) == 0


async def test_only_tokens_whose_events_were_handed_out_count_as_such() -> None:
    chunks = [
        [FIRST, said("a", 1, 2), said("", 3)],
        [said("b", 4), said("c", 5, 6)],
        [said("", 7, finish_reason="stop"), "[DONE]"],
    ]
    app = Answers([piece for chunk in chunks for piece in (sse(chunk), PAUSE)])
    async with vllm_at(app) as engine:
        stream = await engine.stream(HI, "msg_1")
        counts = [stream.sampled_tokens]
        counts += [stream.sampled_tokens async for _ in stream]
        counts.append(stream.sampled_tokens)
        await stream.aclose()
    # The third token may be markup, of which nobody has seen anything when "a" is there.
    assert counts == [0, 2, 6, 7, 7]


@pytest.mark.parametrize("reason", ["stop", "length"])
async def test_a_block_knows_whether_the_output_limit_cut_it(reason: str) -> None:
    thought = {"choices": [{"delta": {"reasoning": "hm"}, "token_ids": [1]}]}
    events, _ = await streamed(
        Answers([sse([FIRST, thought, said("a", 2, finish_reason=reason), "[DONE]"])])
    )
    ends = [event.cut for event in events if isinstance(event, BlockEnd)]
    assert ends == [False, reason == "length"]


async def test_tokens_that_come_with_reasoning_are_counted_where_the_engine_does_not_say() -> None:
    chunks = [
        FIRST,
        {"choices": [{"delta": {"reasoning": "hm"}, "token_ids": [1, 2]}]},
        {"choices": [{"delta": {}, "token_ids": [3]}]},
        said("a", 4, finish_reason="stop"),
        {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 4}},
        "[DONE]",
    ]
    _, reply = await streamed(Answers([sse(chunks)]))
    assert (reply.usage.completion_tokens, reply.usage.reasoning_tokens) == (4, 2)


# ---- what cannot be trusted ----


def logprob(value: float | None) -> dict[str, Any]:
    return {"token": "x", "logprob": value}


@pytest.mark.parametrize(
    ("choice", "finding"),
    [
        ({"token_ids": None}, "ids_missing"),
        ({"token_ids": [1, 2, 3]}, "ids_usage_mismatch"),
        ({"logprobs": None}, "logprobs_missing"),
        ({"logprobs": {"content": []}}, "logprobs_missing"),
        ({"logprobs": {"content": [logprob(-1)] * 4}}, "logprobs_misaligned"),
        ({"logprobs": {"content": [logprob(-1)] * 4 + [logprob(0.5)]}}, "logprobs_positive"),
        (
            {"logprobs": {"content": [logprob(-1)] * 4 + [logprob(-9999.0)]}},
            "logprobs_minus_infinity",
        ),
        ({"logprobs": {"content": [logprob(-1)] * 4 + [logprob(None)]}}, "logprobs_null"),
        ({"logprobs": {"content": [logprob(-1)] * 4 + [logprob(math.nan)]}}, "logprobs_non_finite"),
    ],
)
async def test_what_does_not_align_is_a_finding_and_never_repaired(
    choice: dict[str, Any], finding: str
) -> None:
    reply = await completed(changed("stop_string_midtoken", **choice))
    assert finding in reply.findings
    if finding.startswith("logprobs"):
        assert reply.logprobs is None
        assert list(reply.sampled_ids) == [64, 65, 66, 220, 890]


async def test_a_prompt_without_ids_is_a_finding() -> None:
    answer = recording("stop_string_midtoken")["response"]
    del answer["prompt_token_ids"]
    reply = await completed(Answers((200, answer)))
    assert reply.findings == ["prompt_ids_missing"]
    assert len(reply.prompt_ids) == 0


async def test_certain_tokens_have_a_logprob_of_zero() -> None:
    content = {"content": [logprob(0.0)] * 5}
    reply = await completed(changed("stop_string_midtoken", logprobs=content))
    assert reply.logprobs == array("f", [0.0] * 5)


# ---- what is no turn ----


async def test_an_abort_is_an_error_and_not_a_turn() -> None:
    with pytest.raises(EngineError, match="aborted the generation") as raised:
        await completed(Answers.recorded("abort_inflight"))
    assert raised.value.infra
    assert raised.value.again
    assert raised.value.kind.code == "overloaded"


def said(text: str, *ids: int, **choice: Any) -> dict[str, Any]:
    """A chunk with a piece of text and its tokens."""
    entries = [{"logprob": -1.0} for _ in ids]
    return {
        "choices": [
            {
                "delta": {"content": text},
                "token_ids": list(ids),
                "logprobs": {"content": entries},
                **choice,
            }
        ]
    }


FIRST = {"prompt_token_ids": [7, 8], "choices": [{"delta": {"role": "assistant"}}]}
FAILED = {"error": {"message": "EngineCore encountered an issue", "code": 500}}


@pytest.mark.parametrize(
    ("rest", "why"),
    [
        ([said("", 3, finish_reason="abort"), "[DONE]"], "aborted the generation"),
        ([said("", 3, finish_reason="error"), "[DONE]"], "aborted the generation"),
        ([said("", 3), FAILED, "[DONE]"], "EngineCore encountered an issue"),
        ([said("", 3)], "broke off"),
        ([said("", 3), "[DONE]"], "broke off"),
        ([said("", 3), "{oops"], "cannot be read"),
    ],
    ids=["abort", "error", "in-band", "cut", "no reason", "garbled"],
)
async def test_what_breaks_off_in_mid_stream_is_no_turn_and_leaves_what_there_was(
    rest: list[Any], why: str
) -> None:
    app = Answers([sse([FIRST, said("Half", 1, 2)]), PAUSE, sse(rest)])
    async with vllm_at(app) as engine:
        stream = await engine.stream(HI, "msg_1")
        events: list[TurnEvent] = []
        try:
            async for batch in stream:
                events += batch
        except EngineError as error:
            raised = error
        await stream.aclose()
        reply = stream.reply
    assert why in str(raised)
    assert (raised.again, raised.infra) == (True, True)
    assert events == [BlockStart(kind="text"), BlockDelta(text="Half")]
    assert stream.sampled_tokens == 2
    assert reply.prompt_ids == array("i", [7, 8])
    assert reply.sampled_ids == array("i", [1, 2, 3])
    assert reply.finish_reason is None
    assert len(app.requests) == 1, "text was handed on, so it must not be sampled again"


@pytest.mark.parametrize("reason", ["abort", "error"])
async def test_a_stream_that_is_aborted_before_its_first_event_is_not_begun(reason: str) -> None:
    app = Answers([sse([FIRST, said("", 1, finish_reason=reason), "[DONE]"])])
    with pytest.raises(EngineError, match="aborted the generation") as raised:
        await streamed(app)
    assert raised.value.again


async def test_a_refusal_that_comes_inside_a_stream_is_the_requests_fault() -> None:
    app = Answers.recorded("err_bad_regex_stream")
    with pytest.raises(EngineError, match="Grammar error") as raised:
        await streamed(app)
    assert (raised.value.kind.status, raised.value.kind.code) == (400, "invalid_request")
    assert not raised.value.infra
    assert len(app.requests) == 1


async def test_a_stream_without_a_finish_reason_is_no_turn() -> None:
    chunk = {"choices": [{"index": 0, "delta": {"content": "half"}}]}
    for events in ([chunk], [chunk, "[DONE]"]):
        with pytest.raises(EngineError, match="broke off"):
            await streamed(Answers([sse(events)]))


@pytest.mark.parametrize("said", [b"", b"<html>", b"[]", b'{"choices":[]}', b'{"choices":7}'])
async def test_an_answer_that_is_none_is_an_error_of_the_engine(said: bytes) -> None:
    with pytest.raises(EngineError) as raised:
        await completed(Answers((200, said)))
    assert raised.value.infra


# ---- errors and retries ----


TOO_LONG = (400, recording("err_ctx_chat")["response"])


@pytest.mark.parametrize(
    ("counted", "length"),
    [((200, {"count": 200_000, "tokens": [1] * 200_000}), 200_000), ((500, {}), 131_073)],
    ids=["a server that counts on", "a server that does not"],
)
@pytest.mark.parametrize("ask", [completed, streamed])
async def test_overflow_is_said_with_its_numbers_in_words_that_agents_compact_by(
    ask: Callable[[Any], Awaitable[Any]], counted: tuple[int, Any], length: int
) -> None:
    app = Answers(TOO_LONG, counted)
    with pytest.raises(EngineError) as raised:
        await ask(app)
    kind = raised.value.kind
    assert (kind.status, kind.code) == (400, "context_overflow")
    said = TOO_LONG[1]["error"]["message"]
    assert kind.message == f"prompt is too long: {length} tokens > 131072 maximum. {said}"
    assert not raised.value.infra
    assert not raised.value.again
    assert app.paths == ["/v1/chat/completions", "/tokenize"]


async def test_other_refusals_are_the_requests_fault() -> None:
    app = Answers.recorded("err_empty_tools")
    with pytest.raises(EngineError, match="must not be an empty array") as raised:
        await completed(app)
    assert raised.value.kind.code == "invalid_request"
    assert len(app.requests) == 1


async def test_a_key_that_the_engine_refuses_is_not_the_harnesss_fault() -> None:
    with pytest.raises(EngineError, match="the engine answered 401: Unauthorized") as raised:
        await completed(Answers.recorded("err_bad_api_key"))
    assert raised.value.infra
    assert raised.value.kind.code == "internal"


@pytest.mark.parametrize(
    ("name", "code"),
    [("err_admission_queue_full", "overloaded"), ("engine_killed_inflight", "internal")],
)
async def test_a_busy_or_broken_engine_is_asked_once_and_may_be_asked_again(
    name: str, code: str
) -> None:
    app = Answers.recorded(name)
    for asked, ask in enumerate((completed, streamed), start=1):
        with pytest.raises(EngineError) as raised:
            await ask(app)
        assert raised.value.again
        assert raised.value.infra
        assert raised.value.kind.code == code
        assert len(app.requests) == asked


async def test_a_stream_that_fails_before_its_first_event_may_be_asked_for_again() -> None:
    with pytest.raises(EngineError) as raised:
        await streamed(Answers([sse(recording("engine_killed_inflight_stream")["events"][1:])]))
    assert raised.value.again


def tight(limit: int, prompt: int) -> dict[str, Any]:
    message = (
        f"'max_tokens' or 'max_completion_tokens' is too large: 900. This model's maximum context "
        f"length is {limit} tokens and your request has {prompt} input tokens."
    )
    return {"error": {"message": message, "code": 400}}


MUCH = msgspec.structs.replace(HI, max_tokens=900)


async def test_more_output_than_there_is_room_for_is_asked_for_again_as_what_there_is() -> None:
    good = recording("stop_string_midtoken")["response"]
    app = Answers((400, tight(1000, 300)), (200, good))
    async with vllm_at(app) as engine:
        reply = await engine.complete(MUCH, "msg_1")
    assert [asked["max_tokens"] for asked in app.requests] == [900, 700]
    assert reply.notes == ["max_tokens: 700 instead of 900, which is the room left"]
    app = Answers((400, tight(1000, 300)), [sse(recording("scripted_stream")["events"])])
    async with vllm_at(app) as engine:
        stream = await engine.stream(MUCH, "msg_1")
        async for _ in stream:
            pass
        await stream.aclose()
    assert app.requests[1]["max_tokens"] == 700
    assert stream.reply.notes == reply.notes


async def test_it_is_asked_for_less_only_once() -> None:
    app = Answers((400, tight(1000, 300)))
    async with vllm_at(app) as engine:
        try:
            await engine.complete(MUCH, "msg_1")
        except EngineError as error:
            raised = error
    assert raised.kind.code == "context_overflow"
    assert len(app.requests) == 2


@pytest.mark.parametrize("ask", ["complete", "stream"])
async def test_where_the_engine_did_not_count_the_prompt_is_counted(ask: str) -> None:
    async with ScriptedEngine(strict_limits=True, max_model_len=1000) as scripted:
        engine = Vllm(scripted.url, model="tiny")
        counted = await engine.count_tokens(HI)
        asked = msgspec.structs.replace(HI, max_tokens=1000)
        said = await getattr(engine, ask)(asked, "msg_1")
        if ask == "stream":
            async for _ in said:
                pass
            said = said.reply
        await engine.aclose()
    left = 1000 - counted
    assert said.notes == [f"max_tokens: {left} instead of 1000, which is the room left"]
    assert scripted.calls[-1].request["max_tokens"] == left


async def test_a_prompt_that_leaves_no_room_overflows_whatever_output_was_asked_for() -> None:
    words = ModelRequest(
        model="m", messages=[{"role": "user", "content": "word " * 2000}], max_tokens=100
    )
    async with ScriptedEngine(strict_limits=True, max_model_len=1000) as scripted:
        engine = Vllm(scripted.url, model="tiny")
        length = await engine.count_tokens(words)
        try:
            await engine.complete(words, "msg_1")
        except EngineError as error:
            raised = error
        await engine.aclose()
    assert raised.kind.code == "context_overflow"
    assert length > 2000
    assert raised.kind.message.startswith(f"prompt is too long: {length} tokens > 1000 maximum. ")


async def test_an_engine_that_is_not_there_is_said_to_be_unreachable() -> None:
    async with serve(Answers((200, {}))) as url:
        pass
    engine = Vllm(url, model="tiny")
    with pytest.raises(EngineError, match="the engine cannot be reached") as raised:
        await engine.complete(HI, "msg_1")
    await engine.aclose()
    assert raised.value.infra
    assert raised.value.again
    assert "127.0.0.1" not in raised.value.kind.message


async def test_a_pooled_connection_that_was_closed_meanwhile_costs_nothing() -> None:
    answer = json.dumps(recording("stop_string_midtoken")["response"]).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    connections = 0

    async def answers_once_then_hangs_up(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head % len(answer) + answer)
        await writer.drain()
        # Kept alive, as far as the client knows: gone when the next request comes.
        await reader.read(1)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answers_once_then_hangs_up, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        engine = Vllm(f"http://127.0.0.1:{port}", model="tiny")
        for _ in range(3):
            assert len((await engine.complete(HI, "msg_1")).sampled_ids) == 5
        await engine.aclose()
    assert connections == 3


async def test_a_connection_that_ends_without_a_word_is_worth_one_more_at_once() -> None:
    async with ScriptedEngine(faults=[Fault(hang_up=True)]) as scripted:
        engine = Vllm(scripted.url, model="tiny")
        assert not (await engine.complete(HI, "msg_1")).findings
        scripted.faults = [Fault(hang_up=True, times=2)]
        try:
            await engine.complete(HI, "msg_2")
        except EngineError as error:
            raised = error
        await engine.aclose()
    assert scripted.total_calls == 4
    assert raised.again
    assert "127.0.0.1" not in raised.kind.message


async def test_an_engine_that_died_is_asked_again_once_it_is_back() -> None:
    async with ScriptedEngine() as scripted:
        engine = Vllm(scripted.url, model="tiny")
        await engine.complete(HI, "msg_1")
        await scripted.die()
        try:
            await engine.complete(HI, "msg_2")
        except EngineError as error:
            raised = error
        await scripted.revive()
        assert not (await engine.complete(HI, "msg_2")).findings
        await engine.aclose()
    assert raised.again


async def test_closing_a_stream_tells_the_engine_to_stop() -> None:
    async with ScriptedEngine(token_delay=0.05) as scripted:
        engine = Vllm(scripted.url, model="tiny")
        stream = await engine.stream(HI, "msg_1")
        await stream.aclose()
        for _ in range(100):
            if not scripted.calls[-1].finished:
                break
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert not scripted.calls[-1].finished
        await engine.aclose()


# ---- what is asked ----


async def test_the_engine_is_asked_for_ids_under_the_completions_id() -> None:
    app = Answers.recorded("stop_string_midtoken")
    request = ModelRequest(
        model="claude-9",
        messages=HI.messages,
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=True,
        max_tokens=99,
        sampling={"temperature": 0.25, "top_k": 5},
        response_format={"type": "json_object"},
        template_kwargs={"enable_thinking": False},
    )
    async with vllm_at(app, api_key="secret") as engine:
        await engine.complete(request, "msg_0123456789ab")
    assert app.headers[0]["x-request-id"] == "msg_0123456789ab"
    assert app.headers[0]["authorization"] == "Bearer secret"
    assert app.requests[0] == {
        "model": "tiny",
        "messages": HI.messages,
        "stream": False,
        "logprobs": True,
        "top_logprobs": 0,
        "return_token_ids": True,
        "max_tokens": 99,
        "temperature": 0.25,
        "top_k": 5,
        "response_format": {"type": "json_object"},
        "chat_template_kwargs": {"enable_thinking": False},
    }


async def test_tools_go_with_their_choice_and_streams_with_usage() -> None:
    app = Answers.recorded("scripted_stream")
    tools = [{"type": "function", "function": {"name": "bash"}}]
    request = ModelRequest(
        model="m", messages=[], tools=tools, tool_choice="required", parallel_tool_calls=False
    )
    async with vllm_at(app) as engine:
        await (await engine.stream(request, "msg_1")).aclose()
    asked = app.requests[0]
    assert (asked["tools"], asked["tool_choice"], asked["parallel_tool_calls"]) == (
        tools,
        "required",
        False,
    )
    assert asked["stream_options"] == {"include_usage": True}
    assert "max_tokens" not in asked


async def test_without_a_name_the_first_model_listed_is_asked() -> None:
    models = (200, {"data": [{"id": "first", "max_model_len": 10}, {"id": "second"}]})
    app = Answers(models, (200, recording("stop_string_midtoken")["response"]))
    async with vllm_at(app, model="") as engine:
        await engine.complete(HI, "msg_1")
        await engine.complete(HI, "msg_2")
    assert app.paths == ["/v1/models", "/v1/chat/completions", "/v1/chat/completions"]
    assert [asked.get("model") for asked in app.requests] == [None, "first", "first"]


# ---- probing, and a server with a real template ----

SHORT = {
    "prompt_token_ids": [4, 5, 6],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1},
    "choices": [
        {
            "message": {"content": "x"},
            "finish_reason": "length",
            "token_ids": [1],
            "logprobs": {"content": [{"logprob": -1.0}]},
        }
    ],
}
STREAMED = [
    {"prompt_token_ids": [4, 5, 6], "choices": [{"delta": {"role": "assistant"}}]},
    {"choices": [{**SHORT["choices"][0], "delta": {"content": "x"}}]},
    {"choices": [], "usage": SHORT["usage"]},
    "[DONE]",
]
TOKENIZED = (200, {"count": 2, "tokens": [7, 8]})


def probed(
    *later: Any, whole: Any = SHORT, streamed: Any = STREAMED, rendered: Any = (404, {})
) -> Answers:
    """A vLLM through a probe, and then the answers to what is asked of it."""
    return Answers(
        (200, {"version": "0.32"}),
        (200, {"data": [{"id": "tiny"}]}),
        whole if isinstance(whole, tuple) else (200, whole),
        streamed if isinstance(streamed, tuple) else [sse(streamed)],
        rendered,
        TOKENIZED,
        TOKENIZED,
        *later,
    )


async def test_a_probe_says_what_the_engine_is() -> None:
    async with ScriptedEngine(max_model_len=4096) as scripted:
        engine = Vllm(scripted.url + "/v1/")
        probe = await engine.probe()
        im_end = await engine.count_tokens(HI)
        await engine.aclose()
    assert (probe.engine, probe.model, probe.version) == ("vllm", "tiny", "scripted-1")
    assert probe.max_model_len == 4096
    assert probe.token_ids
    assert probe.stream_ids
    assert probe.problems == []
    assert probe.notes == []
    assert probe.end_of_turn_ids == [scripted.tokenizer.encode("<|im_end|>")[0]]
    assert im_end > 0


async def test_a_probe_names_what_training_cannot_do_without() -> None:
    async with ScriptedEngine() as scripted:
        engine = Vllm(scripted.url, model="other")
        missing = await engine.probe()
        await engine.aclose()
    assert missing.problems == ["it does not serve 'other' but tiny"]
    no_ids = {"choices": [{"message": {"content": "x"}, "finish_reason": "length"}]}
    app = Answers(
        (200, {"version": "0.6"}), (200, {"data": [{"id": "tiny"}]}), (200, no_ids), (404, {})
    )
    async with vllm_at(app) as engine:
        blind = await engine.probe()
    assert not blind.token_ids
    assert "without trustworthy tokens (prompt_ids_missing, ids_missing)" in blind.problems[0]
    assert blind.end_of_turn_ids == []
    async with vllm_at(Answers((404, b"nothing here"))) as engine:
        stranger = await engine.probe()
    assert stranger.problems == [
        "it does not answer as a vLLM would: the engine answered 404: nothing here"
    ]


@pytest.mark.parametrize(
    ("streamed", "why"),
    [
        (
            [
                STREAMED[0],
                {"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]},
                "[DONE]",
            ],
            "ids_missing",
        ),
        ([{**STREAMED[0], "prompt_token_ids": [4, 5, 5]}, *STREAMED[1:]], "the prompt's ids"),
        ((400, {"error": {"message": "no streams"}}), "no streams"),
    ],
    ids=["no ids", "another prompt", "refused"],
)
async def test_where_streams_lack_what_whole_answers_have_the_latter_are_asked_for(
    streamed: Any, why: str
) -> None:
    app = probed((200, SHORT), streamed=streamed)
    async with vllm_at(app) as engine:
        probe = await engine.probe()
        stream = await engine.stream(HI, "msg_1")
        events = [event async for batch in stream for event in batch]
        await stream.aclose()
    assert (probe.token_ids, probe.stream_ids, probe.problems) == (True, False, [])
    assert "streamed answers are asked for whole" in probe.notes[0]
    assert why in probe.notes[0]
    assert events == [BlockStart(kind="text"), BlockDelta(text="x"), BlockEnd(cut=True)]
    assert app.requests[-1]["stream"] is False
    assert stream.reply.sampled_ids == array("i", [1])


async def test_an_engine_that_cannot_parse_calls_is_probed_without_tools() -> None:
    refused = (400, {"error": {"message": "tool choice requires --enable-auto-tool-choice"}})
    models = (200, {"data": [{"id": "tiny"}]})
    app = Answers(
        (200, {"version": "0.32"}), models, refused, (200, SHORT), [sse(STREAMED)], (404, {})
    )
    async with vllm_at(app) as engine:
        probe = await engine.probe()
    assert (probe.token_ids, probe.stream_ids, probe.problems) == (True, True, [])
    assert probe.notes == [
        "it refuses calls that offer tools: tool choice requires --enable-auto-tool-choice"
    ]


async def test_a_stream_that_lost_ids_is_the_last_one(caplog: pytest.LogCaptureFixture) -> None:
    async with ScriptedEngine() as scripted:
        engine = Vllm(scripted.url)
        assert (await engine.probe()).stream_ids
        scripted.lossy_streams = True
        replies = []
        for number in range(3):
            stream = await engine.stream(HI, f"msg_{number}")
            async for _ in stream:
                pass
            await stream.aclose()
            replies.append(stream.reply)
        await engine.aclose()
        asked = [call.request["stream"] for call in list(scripted.calls)[-3:]]
    assert asked == [True, False, False]
    assert "ids_usage_mismatch" in replies[0].findings
    assert [reply.findings for reply in replies[1:]] == [[], []]
    assert not engine.stream_ids
    [warning] = [record for record in caplog.records if "loses token data" in record.message]
    assert "ids_usage_mismatch" in warning.message


async def test_a_probe_of_a_server_that_is_not_there_yet_raises() -> None:
    async with serve(Answers((200, {}))) as url:
        pass
    engine = Vllm(url)
    with pytest.raises(EngineError, match="cannot be reached"):
        await engine.probe()
    await engine.aclose()


async def test_tokens_are_counted_as_the_engine_renders_them() -> None:
    tools = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
    request = ModelRequest(model="m", messages=HI.messages, tools=tools)
    async with ScriptedEngine() as scripted:
        engine = Vllm(scripted.url)
        counted = await engine.count_tokens(request)
        reply = await engine.complete(request, "msg_1")
        await engine.aclose()
    assert counted == len(reply.prompt_ids) == reply.usage.prompt_tokens


RENDERED = (200, {"token_ids": [4, 5, 6]})


@pytest.mark.parametrize(
    ("rendered", "answers", "paths", "count"),
    [
        (RENDERED, [(200, {"token_ids": [1] * 5})], ["/v1/chat/completions/render"], 5),
        (RENDERED, [TOO_LONG, TOKENIZED], ["/v1/chat/completions/render", "/tokenize"], 2),
        ((403, {}), [(200, SHORT)], ["/v1/chat/completions"], 3),
        ((403, {}), [TOO_LONG, TOKENIZED], ["/v1/chat/completions", "/tokenize"], 2),
        ((200, {"token_ids": [4, 5, 9]}), [(200, SHORT)], ["/v1/chat/completions"], 3),
    ],
    ids=["rendered", "too long to render", "asked", "too long to ask", "rendered otherwise"],
)
async def test_tokens_are_counted_by_the_chat_endpoint_itself_as_long_as_they_fit(
    rendered: Any, answers: list[Any], paths: list[str], count: int
) -> None:
    app = probed(*answers, rendered=rendered)
    asked = ModelRequest(
        model="m",
        messages=HI.messages,
        template_kwargs={"enable_thinking": True},
        sampling={"min_tokens": 5},
    )
    async with vllm_at(app) as engine:
        assert (await engine.probe()).problems == []
        assert app.requests[4] == app.requests[2], "rendered is what was asked"
        before = len(app.paths)
        assert await engine.count_tokens(asked) == count
    assert app.paths[before:] == paths
    first = app.requests[before]
    assert first["chat_template_kwargs"] == {"enable_thinking": True}
    assert first["max_tokens"] == 1, "what is counted is the prompt alone"
    assert "min_tokens" not in first


async def test_what_cannot_be_rendered_for_another_reason_cannot_be_counted() -> None:
    refusal = (400, recording("err_empty_tools")["response"])
    async with vllm_at(probed(refusal, rendered=RENDERED)) as engine:
        await engine.probe()
        try:
            await engine.count_tokens(HI)
        except EngineError as error:
            raised = error
    assert raised.kind.code == "invalid_request"


async def test_streamed_and_whole_answers_of_one_engine_agree() -> None:
    async with ScriptedEngine() as scripted:
        engine = Vllm(scripted.url)
        whole = await engine.complete(HI, "msg_1")
        stream = await engine.stream(HI, "msg_2")
        async for _ in stream:
            pass
        await stream.aclose()
        await engine.aclose()
        said = list(scripted.calls)
    assert list(whole.sampled_ids) == said[0].token_ids
    assert list(stream.reply.sampled_ids) == said[1].token_ids
    assert whole.prompt_ids == stream.reply.prompt_ids
    assert whole.logprobs == array("f", said[0].logprobs)
    assert (
        [type(b) for b in whole.blocks]
        == [type(b) for b in stream.reply.blocks]
        == [Reasoning, Text]
    )
    assert [call.request_id for call in said] == ["chatcmpl-msg_1", "chatcmpl-msg_2"]
