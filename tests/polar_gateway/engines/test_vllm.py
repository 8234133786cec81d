import asyncio
import json
import math
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
import pytest

from builders.records import Ids, VersionSpan
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
from polar_gateway.engines.base import EngineError, EngineReply, TokenRoute
from polar_gateway.engines.vllm import Vllm
from polar_gateway.engines.vllm_api import CHAT, DERENDER, RENDER
from polar_gateway.testing.engine import Fault, ScriptedEngine
from polar_gateway.testing.script import Rule, Script, ScriptedCall, Step
from polar_gateway.testing.serve import serve
from tests.polar_gateway.engines.servers import PAUSE, Answers, Instead, recording, sse

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


# ---- a server with a real template ----


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


async def test_tokens_are_counted_as_the_engine_renders_them() -> None:
    tools = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
    request = ModelRequest(model="m", messages=HI.messages, tools=tools)
    async with ScriptedEngine() as scripted:
        engine = Vllm(scripted.url)
        counted = await engine.count_tokens(request)
        reply = await engine.complete(request, "msg_1")
        await engine.aclose()
    assert counted == len(reply.prompt_ids) == reply.usage.prompt_tokens


LONG = ModelRequest(model="m", messages=[{"role": "user", "content": "word " * 300}])


@pytest.mark.parametrize(
    ("renders", "request_", "path"),
    [
        (True, HI, RENDER),
        (True, LONG, "/tokenize"),
        (False, HI, CHAT),
        (False, LONG, "/tokenize"),
    ],
    ids=["rendered", "too long to render", "asked", "too long to ask"],
)
async def test_tokens_are_counted_by_the_chat_endpoint_itself_as_long_as_they_fit(
    renders: bool, request_: ModelRequest, path: str
) -> None:
    scripted = ScriptedEngine(max_model_len=200, renders=renders)
    asked = msgspec.structs.replace(
        request_, template_kwargs={"enable_thinking": True}, sampling={"min_tokens": 5}
    )
    seen: list[tuple[str, dict[str, Any]]] = []

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        async def listen() -> Any:
            message = await receive()
            if message.get("body"):
                seen.append((scope["path"], json.loads(message["body"])))
            return message

        await scripted.app(scope, listen, send)

    async with vllm_at(watched) as engine:
        await engine.probe()
        seen.clear()
        counted = await engine.count_tokens(asked)
    if request_ is HI:
        assert 5 < counted < 30
    else:
        assert counted > 300
    assert seen[-1][0] == path
    first = seen[0][1]
    assert first["chat_template_kwargs"] == {"enable_thinking": True}
    assert first["max_tokens"] == 1, "what is counted is the prompt alone"
    assert "min_tokens" not in first


async def test_what_cannot_be_rendered_for_another_reason_cannot_be_counted() -> None:
    refusal = (400, recording("err_empty_tools")["response"])
    changes: dict[str, Any] = {}
    async with vllm_at(Instead(ScriptedEngine().app, changes)) as engine:
        await engine.probe()
        changes[RENDER] = refusal
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


# ---- prompts as ids ----


TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
LOOK = Step(
    think="hm", say="Look.", calls=[ScriptedCall(name="bash", arguments={"command": "ls -la"})]
)
GO = ModelRequest(model="m", messages=[{"role": "user", "content": "GO"}], tools=TOOLS)


def looking() -> ScriptedEngine:
    return ScriptedEngine(Script(rules=[Rule(match="GO", steps=[LOOK])]))


async def prompt_of(engine: Vllm, request: ModelRequest) -> Ids:
    return (await engine.rendered(request)).ids


def unspelled(prompt: Ids) -> Ids:
    """A prompt as no tokenizer would spell it: "ss" in two tokens."""
    return array("i", [*prompt[:3], 82, 82, *prompt[3:]])


@pytest.mark.parametrize("route", ["chat", "generate"])
async def test_a_prompt_of_ids_is_read_as_it_is_and_answered_as_any_other(
    route: TokenRoute,
) -> None:
    async with looking() as scripted:
        engine = Vllm(scripted.url, token_route=route)
        sent = unspelled(await prompt_of(engine, GO))
        request = msgspec.structs.replace(GO, prompt_ids=sent)
        whole = await engine.complete(request, "msg_1")
        stream = await engine.stream(request, "msg_2")
        async for _ in stream:
            pass
        await stream.aclose()
        assert await engine.count_tokens(request) == len(sent)
        await engine.aclose()
        calls = list(scripted.calls)
    assert [call.prompt_token_ids for call in calls] == [sent.tolist()] * 2
    for reply in (whole, stream.reply):
        assert reply.prompt_ids is sent
        assert reply.findings == []
        assert [type(block) for block in reply.blocks] == [Reasoning, Text, Call]
        assert reply.finish_reason == "tool_calls"
    assert [call.request_id for call in calls] == (
        ["chatcmpl-msg_1", "chatcmpl-msg_2"]
        if route == "chat"
        else ["generate-tokens-msg_1", "generate-tokens-msg_2"]
    )


async def test_of_what_is_sent_as_ids_the_messages_are_not_sent_again() -> None:
    app = Answers.recorded("stop_string_midtoken")
    sent = array("i", [5, 6])
    history = ModelRequest(model="m", messages=[*HI.messages, *LONG.messages], prompt_ids=sent)
    async with vllm_at(app) as engine:
        reply = await engine.complete(history, "msg_1")
    assert app.requests[0]["kv_transfer_params"] == {"prompt_token_ids": [5, 6]}
    assert app.requests[0]["messages"] == [{"role": "user", "content": ""}]
    assert reply.prompt_ids != sent, "what the engine says it has read, and it read another prompt"


async def test_both_routes_make_the_same_of_the_same_tokens() -> None:
    requests = [
        GO,
        msgspec.structs.replace(GO, max_tokens=9),
        msgspec.structs.replace(GO, sampling={"stop": ["ook"]}),
    ]
    async with looking() as scripted:
        chat, generate = Vllm(scripted.url), Vllm(scripted.url, token_route="generate")
        for request in requests:
            fixed = msgspec.structs.replace(request, sampling={**request.sampling, "seed": 3})
            one, other = [await each.complete(fixed, "msg_1") for each in (chat, generate)]
            for block in (*one.blocks, *other.blocks):
                if isinstance(block, Call):
                    block.id = ""  # made up at each parsing
            assert other.versions
            other.versions = []
            one.usage.reasoning_tokens = 0  # which the generate route does not count
            assert one == other
        await chat.aclose()
        await generate.aclose()


async def test_overflow_of_a_prompt_of_ids_needs_no_counting() -> None:
    app = Answers(TOO_LONG)
    sent = array("i", [1]) * 131_080
    async with vllm_at(app) as engine:
        try:
            await engine.complete(msgspec.structs.replace(HI, prompt_ids=sent), "msg_1")
        except EngineError as error:
            raised = error
    assert raised.kind.message.startswith("prompt is too long: 131080 tokens > 131072 maximum.")
    assert app.paths == ["/v1/chat/completions"]


async def test_what_is_new_is_what_a_rendering_adds_to_a_closed_one() -> None:
    answer = {"role": "assistant", "content": "Hello."}
    later = [*HI.messages, answer, {"role": "user", "content": "and now?"}]
    for renders in (True, False):
        async with ScriptedEngine(renders=renders) as scripted:
            engine = Vllm(scripted.url)
            await engine.probe()
            closed = await engine.render(ModelRequest(model="m", messages=later[:2]), closed=True)
            whole = await engine.render(ModelRequest(model="m", messages=later))
            await engine.aclose()
            added = whole.after(closed, less=1)
            assert added is not None
            assert closed.ids[:-1] + added == whole.ids
            assert scripted.tokenizer.decode(closed.ids.tolist()).endswith("<|im_end|>\n")
            assert scripted.tokenizer.decode(added.tolist()) == (
                "\n<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n"
            )


# ---- aborts, weights ----


async def aborted_after(
    engine: Vllm, scripted: ScriptedEngine, tokens: int, request: ModelRequest = GO
) -> EngineReply:
    """What there is of an answer that was aborted after so many tokens."""
    scripted.faults = [Fault(abort_after=tokens)]
    with pytest.raises(EngineError, match="aborted") as raised:
        await engine.complete(request, "msg_1")
    assert raised.value.again
    assert raised.value.partial is not None
    return raised.value.partial


@pytest.mark.parametrize("route", ["chat", "generate"])
@pytest.mark.parametrize("tokens", [1, 3, 12, 25])
async def test_an_aborted_answer_goes_on_and_is_parsed_as_one(
    tokens: int, route: TokenRoute
) -> None:
    async with looking() as scripted:
        engine = Vllm(scripted.url, token_route=route)
        partial = await aborted_after(engine, scripted, tokens)
        assert (len(partial.sampled_ids), partial.finish_reason) == (tokens, None)
        whole = await engine.resume(GO, "msg_1", partial)
        await engine.aclose()
        rest = scripted.calls[-1]
    assert whole.prompt_ids == partial.prompt_ids
    assert whole.sampled_ids == partial.sampled_ids + array("i", rest.token_ids)
    assert whole.logprobs is not None
    assert partial.logprobs is not None
    assert whole.logprobs == partial.logprobs + array("f", rest.logprobs)
    assert [type(block) for block in whole.blocks] == [Reasoning, Text, Call]
    assert (whole.finish_reason, whole.findings) == ("tool_calls", [])
    assert whole.usage.completion_tokens == len(whole.sampled_ids)
    assert whole.usage.prompt_tokens == len(whole.prompt_ids)
    assert whole.notes == [f"resumed: aborted after {tokens} tokens"]


async def said_by(engine: Vllm) -> None:
    """Raises what the stream raises, or the engine where all of it came at once."""
    stream = await engine.stream(GO, "msg_1")
    try:
        async for _ in stream:
            pass
    finally:
        await stream.aclose()


async def test_an_aborted_stream_leaves_what_can_be_gone_on_with() -> None:
    async with looking() as scripted:
        engine = Vllm(scripted.url)
        scripted.faults = [Fault(abort_after=12)]
        with pytest.raises(EngineError, match="aborted") as raised:
            await said_by(engine)
        partial = raised.value.partial
        assert partial is not None
        whole = await engine.resume(GO, "msg_1", partial)
        await engine.aclose()
    assert len(partial.sampled_ids) == 12
    assert [type(block) for block in whole.blocks] == [Reasoning, Text, Call]


async def test_what_is_aborted_twice_has_both_parts() -> None:
    async with looking() as scripted:
        engine = Vllm(scripted.url, token_route="generate")
        await engine.update("a", None)
        partial = await aborted_after(engine, scripted, 4)
        await engine.update("b", None)
        scripted.faults = [Fault(abort_after=5)]
        try:
            await engine.resume(GO, "msg_1", partial)
        except EngineError as error:
            partial_again = error.partial
        assert partial_again is not None
        assert len(partial_again.sampled_ids) == 9
        whole = await engine.resume(GO, "msg_1", partial_again)
        await engine.aclose()
    assert [type(block) for block in whole.blocks] == [Reasoning, Text, Call]
    assert [(span.version, span.start, span.end) for span in whole.versions] == [
        ("a", 0, 4),
        ("b", 4, 9),
        ("b", 9, len(whole.sampled_ids)),
    ]


async def test_a_resumed_answer_has_no_more_tokens_than_were_asked_for() -> None:
    async with looking() as scripted:
        engine = Vllm(scripted.url)
        partial = await aborted_after(engine, scripted, 6)
        for limit, calls in ((6, 1), (8, 2)):
            request = msgspec.structs.replace(GO, max_tokens=limit, sampling={"min_tokens": 7})
            whole = await engine.resume(request, "msg_1", partial)
            assert (len(whole.sampled_ids), whole.finish_reason) == (limit, "length")
            assert scripted.total_calls == calls
        await engine.aclose()


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "required"},
        {"sampling": {"structured_outputs": {"choice": ["a"]}}},
    ],
    ids=["response format", "forced call", "grammar"],
)
async def test_what_a_grammar_holds_is_not_gone_on_with(fields: dict[str, Any]) -> None:
    async with looking() as scripted:
        engine = Vllm(scripted.url)
        partial = await aborted_after(engine, scripted, 3)
        try:
            await engine.resume(msgspec.structs.replace(GO, **fields), "msg_1", partial)
        except EngineError as error:
            raised = error
        await engine.aclose()
    assert not raised.again
    assert raised.kind.code == "overloaded"


async def test_an_engine_that_goes_on_from_elsewhere_has_not_gone_on() -> None:
    async with looking() as scripted:
        engine = Vllm(scripted.url)
        partial = await aborted_after(engine, scripted, 3)
        scripted.ignores_token_ids = True
        try:
            await engine.resume(GO, "msg_1", partial)
        except EngineError as error:
            raised = error
        await engine.aclose()
    assert "did not go on with the tokens" in str(raised)


async def test_weights_change_under_an_answer_that_stands_still() -> None:
    async with looking() as scripted:
        engine = Vllm(scripted.url, token_route="generate")
        assert {span.version for span in (await engine.complete(GO, "msg_1")).versions} == {
            "default"
        }
        await engine.pause("keep")
        await engine.update("step-2", "/weights/2")
        await engine.unpause()
        reply = await engine.complete(GO, "msg_2")
        await engine.aclose()
    assert reply.versions == [VersionSpan(version="step-2", start=0, end=len(reply.sampled_ids))]


async def test_an_update_loads_drops_and_names_in_that_order() -> None:
    app = Answers((200, {"success": True}))
    async with vllm_at(app) as engine:
        await engine.update("step-2", "/weights/2")
        await engine.update("step-3", None)
    assert app.paths == [
        "/collective_rpc",
        "/reset_prefix_cache",
        "/update_weight_version",
        "/reset_prefix_cache",
        "/update_weight_version",
    ]
    assert app.requests[0] == {
        "method": "reload_weights",
        "kwargs": {"weights_path": "/weights/2"},
    }
    assert app.requests[-1] == {"new_version": "step-3"}


async def test_a_generated_answer_that_cannot_be_parsed_is_an_error() -> None:
    app = Instead(looking().app, {DERENDER: (400, {"error": {"message": "no parser"}})})
    async with vllm_at(app, token_route="generate") as engine:
        try:
            await engine.complete(GO, "msg_1")
        except EngineError as error:
            raised = error
    assert "no parser" in str(raised)
