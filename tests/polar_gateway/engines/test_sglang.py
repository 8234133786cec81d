from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import msgspec
import pytest

from builders.records import Floats, VersionSpan
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
from polar_gateway.engines.base import EngineError, EngineProbe, EngineReply
from polar_gateway.engines.sglang import Sglang
from polar_gateway.policy_versions import UNNAMED
from polar_gateway.testing.calls import Fault
from polar_gateway.testing.engine import ScriptedEngine
from polar_gateway.testing.policy import SeededPolicy
from polar_gateway.testing.script import Rule, Script, ScriptedCall, Step
from polar_gateway.testing.sglang import ScriptedSglang

T = TypeVar("T")

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
LOOK = Step(
    think="I look first.",
    say="One moment.",
    calls=[ScriptedCall(name="bash", arguments={"command": "ls -la"})],
)
DONE = Step(think="That is all.", say="Done ✓.")
SCRIPT = Script(rules=[Rule(match="Look around", steps=[LOOK, DONE])])
USER = {"role": "user", "content": "Look around."}
ASK = ModelRequest(model="m", messages=[USER], tools=TOOLS, sampling={"seed": 5})


@asynccontextmanager
async def both(**options: Any) -> AsyncIterator[tuple[ScriptedSglang, Sglang]]:
    """A server and an engine that has not probed it."""
    async with ScriptedSglang(SCRIPT, **options) as server:
        engine = Sglang(server.url, model="tiny")
        try:
            yield server, engine
        finally:
            await engine.aclose()


async def outcome(ask: Callable[[ScriptedSglang, Sglang], Awaitable[T]], **options: Any) -> T:
    # A server that runs in a task group would wrap what is raised while it runs.
    async with both(**options) as (server, engine):
        try:
            return await ask(server, engine)
        except EngineError as error:
            raised = error
    raise raised


async def completed(request: ModelRequest = ASK, **options: Any) -> EngineReply:
    return await outcome(lambda _, engine: engine.complete(request, "msg_1"), **options)


async def probed(**options: Any) -> EngineProbe:
    return await outcome(lambda _, engine: engine.probe(), **options)


async def streamed(
    engine: Sglang, request: ModelRequest = ASK
) -> tuple[list[TurnEvent], EngineReply]:
    stream = await engine.stream(request, "msg_1")
    try:
        events = [event async for batch in stream for event in batch]
    finally:
        await stream.aclose()
    return events, stream.reply


def spelled(server: ScriptedSglang, reply: EngineReply) -> str:
    return server.tokenizer.decode(reply.sampled_ids.tolist())


def recomputed(policies: list[SeededPolicy], reply: EngineReply) -> Floats:
    """The log probabilities that policies, one a token, give to what was sampled."""
    context = policies[0].context(reply.prompt_ids)
    logprobs = array("f")
    for policy, token_id in zip(policies, reply.sampled_ids, strict=True):
        logprobs.append(policy.logprob(context, token_id))
        context = policy.context([token_id], context)
    return logprobs


# ---- reading answers ----


async def test_a_whole_answer_has_the_engines_own_ids_and_logprobs() -> None:
    async with both() as (server, engine):
        reply = await engine.complete(ASK, "msg_1")
        [call] = server.calls
        assert reply.findings == []
        assert reply.prompt_ids.tolist() == call.prompt_token_ids
        assert reply.sampled_ids.tolist() == call.token_ids
        assert reply.logprobs == array("f", call.logprobs)
        assert reply.logprobs == recomputed([server.policy] * len(call.token_ids), reply)
        assert spelled(server, reply) == LOOK.text + "<|im_end|>"
        assert [type(block) for block in reply.blocks] == [Reasoning, Text, Call]
        assert reply.finish_reason == "tool_calls"
        assert reply.usage.completion_tokens == len(call.token_ids)
        assert reply.versions == [VersionSpan(version=UNNAMED, start=0, end=len(call.token_ids))]


async def test_a_stream_adds_up_to_the_whole_answer() -> None:
    async with both() as (_, engine):
        whole = await engine.complete(ASK, "msg_1")
        events, reply = await streamed(engine)
        assert reply.findings == []
        assert reply.prompt_ids == whole.prompt_ids
        assert reply.sampled_ids == whole.sampled_ids
        assert reply.logprobs == whole.logprobs
        assert reply.finish_reason == whole.finish_reason
        text = "".join(event.text for event in events if isinstance(event, BlockDelta))
        assert "I look first." in text
        assert '"ls -la"' in text


async def test_a_tool_call_ends_only_once_its_ids_are_there_while_text_flows() -> None:
    async with both() as (server, engine), anyio.create_task_group() as tasks:
        whole = await engine.complete(ASK, "msg_1")
        server.hold(after=len(whole.sampled_ids) - 1)  # all but the end of the turn
        seen: list[TurnEvent] = []
        called, ended = anyio.Event(), anyio.Event()

        async def listen() -> None:
            stream = await engine.stream(ASK, "msg_2")
            async for batch in stream:
                for event in batch:
                    if isinstance(event, BlockEnd) and seen_call():
                        assert stream.prompt_ids is not None
                        assert len(stream.reply.sampled_ids) == len(whole.sampled_ids)
                    seen.append(event)
                if "ls -la" in "".join(e.text for e in seen if isinstance(e, BlockDelta)):
                    called.set()
            ended.set()
            await stream.aclose()

        def seen_call() -> bool:
            return any(isinstance(e, BlockStart) and e.kind == "call" for e in seen)

        tasks.start_soon(listen)
        await called.wait()
        assert not isinstance(seen[-1], BlockEnd)
        assert [e.kind for e in seen if isinstance(e, BlockStart)] == ["reasoning", "text", "call"]
        server.release()
        await ended.wait()
        assert isinstance(seen[-1], BlockEnd)


@pytest.mark.parametrize(
    ("field", "findings"),
    [
        ("prompt_token_ids", ["prompt_ids_missing"]),
        ("logprobs", ["logprobs_missing"]),
    ],
)
async def test_what_an_answer_lacks_is_said(field: Any, findings: list[str]) -> None:
    reply = await completed(faults=[Fault(omit=[field])])
    assert reply.findings == findings


async def test_a_server_that_knows_no_fields_for_ids_gives_none() -> None:
    reply = await completed(returns_ids=False)
    assert not reply.sampled_ids
    assert {"prompt_ids_missing", "ids_missing"} <= set(reply.findings)


async def test_ids_are_also_read_from_where_older_versions_have_them() -> None:
    """Beside the log probabilities."""
    reply = await completed(faults=[Fault(omit=["token_ids"])])
    assert reply.findings == []
    assert len(reply.sampled_ids) == reply.usage.completion_tokens


async def test_streams_that_lose_ids_are_given_up() -> None:
    async with both(streams_ids=False) as (server, engine):
        await engine.complete(ASK, "msg_1")
        _, lost = await streamed(engine)
        assert "ids_missing" in lost.findings
        events, reply = await streamed(engine)
        assert reply.findings == []
        assert isinstance(events[-1], BlockEnd)
        assert "stream" not in server.calls[-1].request or not server.calls[-1].request["stream"]


async def test_routed_experts_come_as_a_file() -> None:
    async with both(routed_experts=True) as (_, engine):
        await engine.probe()
        reply = await engine.complete(ASK, "msg_1")
        [tensor] = reply.tensors
        assert tensor.name == "routed_experts"
        tokens = len(reply.prompt_ids) + len(reply.sampled_ids) - 1
        assert tensor.data.startswith(b"\x93NUMPY")
        assert f"'shape': ({tokens * 2 * 2},)".encode() in tensor.data


@pytest.mark.parametrize(
    ("sampling", "kind"),
    [({}, "processed"), ({"temperature": 0.5}, "processed"), ({"top_p": 0.9}, "unknown")],
)
async def test_logprobs_know_the_temperature_and_nothing_that_is_cut_off(
    sampling: dict[str, Any], kind: str
) -> None:
    async with both() as (_, engine):
        await engine.probe()
        request = msgspec.structs.replace(ASK, sampling=sampling)
        assert (await engine.complete(request, "msg_1")).logprob_kind == kind


# ---- prompts of ids ----


async def test_a_prompt_of_ids_is_read_as_it_is_and_answered_as_any_other() -> None:
    async with both() as (server, engine):
        first = await engine.complete(ASK, "msg_1")
        said = "<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
        context = first.prompt_ids + first.sampled_ids
        prompt = context + array("i", server.tokenizer.encode("\n" + said))
        request = msgspec.structs.replace(ASK, prompt_ids=prompt)
        for reply in (
            await engine.complete(request, "msg_2"),
            (await streamed(engine, request))[1],
        ):
            assert reply.prompt_ids == prompt
            assert reply.blocks[-1] == Text(text="\n\nDone ✓.")


async def test_ids_out_of_the_vocabulary_are_refused() -> None:
    request = msgspec.structs.replace(ASK, prompt_ids=array("i", [99_999]))
    with pytest.raises(EngineError, match="99999 is out of vocabulary"):
        await completed(request)


async def test_conversations_are_rendered_as_they_would_be_asked_and_closed() -> None:
    async with both() as (server, engine):
        reply = await engine.complete(ASK, "msg_1")
        rendered = await engine.render(ASK)
        closed = await engine.render(ASK, closed=True)
        assert rendered.ids == reply.prompt_ids
        opening = server.tokenizer.encode("<|im_start|>assistant\n")
        assert rendered.after(closed) == array("i", opening)
        assert await engine.count_tokens(ASK) == len(reply.prompt_ids)


# ---- refusals ----


async def test_a_prompt_that_is_too_long_is_an_overflow_with_its_length() -> None:
    with pytest.raises(EngineError) as raised:
        await completed(max_model_len=20)
    assert raised.value.kind.code == "context_overflow"
    assert raised.value.kind.message.startswith("prompt is too long: ")


async def test_less_output_is_asked_for_where_there_is_no_room_for_as_much() -> None:
    async with both() as (server, engine):
        prompt = await engine.count_tokens(ASK)
        server.max_model_len = prompt + 4
        request = msgspec.structs.replace(ASK, max_tokens=100)
        reply = await engine.complete(request, "msg_1")
        assert len(reply.sampled_ids) == 4
        assert reply.notes == ["max_tokens: 4 instead of 100, which is the room left"]


async def test_an_error_inside_a_stream_is_the_engines() -> None:
    with pytest.raises(EngineError) as raised:
        await outcome(lambda _, engine: streamed(engine), faults=[Fault(error_after=3)])
    assert (raised.value.infra, raised.value.again) == (True, True)


# ---- pauses, aborts and new weights ----


async def test_an_aborted_answer_is_gone_on_with_and_parsed_as_one() -> None:
    async with both() as (server, engine):
        await engine.probe()
        whole = await engine.complete(ASK, "msg_1")
        begun = len(whole.sampled_ids) - 12  # inside the tool call's arguments
        partial = await aborted(server, engine, begun)
        assert len(partial.sampled_ids) == begun
        await engine.update("step-1", "/weights/1")
        await engine.unpause()
        reply = await engine.resume(ASK, "msg_2", partial)
        assert reply.findings == []
        assert reply.sampled_ids[:begun] == partial.sampled_ids
        assert spelled(server, reply) == LOOK.text + "<|im_end|>"
        assert _without_ids(reply) == _without_ids(whole)
        assert reply.finish_reason == "tool_calls"
        sampled = len(reply.sampled_ids)
        assert reply.versions == [
            VersionSpan(version=UNNAMED, start=0, end=begun),
            VersionSpan(version="step-1", start=begun, end=sampled),
        ]
        old, new = server.policies["default"], server.policies["step-1"]
        assert reply.logprobs == recomputed([old] * begun + [new] * (sampled - begun), reply)


async def test_the_rest_of_an_aborted_answer_is_asked_for_with_the_room_that_is_left() -> None:
    async with both() as (server, engine):
        await engine.probe()
        partial = await aborted(server, engine, 8)
        await engine.unpause()
        server.max_model_len = len(partial.prompt_ids) + 12
        request = msgspec.structs.replace(ASK, max_tokens=100)
        reply = await engine.resume(request, "msg_2", partial)
        assert (len(reply.sampled_ids), reply.finish_reason) == (12, "length")


def _without_ids(reply: EngineReply) -> list[Any]:
    return [
        (block.name, block.arguments) if isinstance(block, Call) else block
        for block in reply.blocks
    ]


async def aborted(server: ScriptedSglang, engine: Sglang, after: int) -> EngineReply:
    """What there is of an answer that a pause ended after some tokens; the pause stays."""
    partial: list[EngineReply | None] = []

    async def ask() -> None:
        with pytest.raises(EngineError) as raised:
            await engine.complete(ASK, "msg_0")
        partial.append(raised.value.partial)

    server.calls.clear()
    server.hold(after=after)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await said(server, after)
        await engine.pause("abort")
    server.release()
    [reply] = partial
    assert reply is not None
    return reply


async def said(server: ScriptedSglang, tokens: int) -> None:
    """Wait until the latest call has said as much."""
    while not server.calls or server.calls[-1].sent_tokens < tokens:
        await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("path", ["/weights/1", None])
async def test_new_weights_abort_nothing_and_leave_spans(path: str | None) -> None:
    async with both() as (server, engine):
        replies: list[EngineReply] = []

        async def ask() -> None:
            replies.append(await engine.complete(ASK, "msg_1"))

        server.hold(after=7)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await said(server, 7)
            await engine.pause("keep")
            await engine.update("step-1", path)
            await engine.unpause()
            server.release()
        [reply] = replies
        assert reply.finish_reason == "tool_calls"
        assert [(span.version, span.start, span.end) for span in reply.versions] == [
            (UNNAMED, 0, 7),
            ("step-1", 7, len(reply.sampled_ids)),
        ]
        policies = [server.policies["default"]] * 7
        policies += [server.policies["step-1"]] * (len(reply.sampled_ids) - 7)
        assert reply.logprobs == recomputed(policies, reply)


async def test_every_answer_comes_whole_where_versions_are_demanded() -> None:
    async with ScriptedSglang(SCRIPT) as server:
        engine = Sglang(server.url, model="tiny", token_route="generate")
        _, reply = await streamed(engine)
        assert reply.versions
        await engine.aclose()


# ---- the probe ----


async def test_a_probe_says_what_the_server_can_do() -> None:
    found = await probed()
    assert found.problems == []
    assert (found.engine, found.model, found.max_model_len) == ("sglang", "tiny", 131_072)
    assert (found.token_ids, found.stream_ids, found.weight_versions) == (True, True, True)
    assert (found.token_routes, found.renders) == (["chat"], "full")
    assert found.logprob_kind == "processed"
    assert found.end_of_turn_texts == ["<|im_end|>", "<|endoftext|>"]
    assert (found.reasoning_parser, found.tool_parser, found.resumes) == (True, True, True)
    assert found.controls == ["pause", "abort", "update"]


async def test_a_probe_refuses_a_server_without_ids_in_words() -> None:
    found = await probed(returns_ids=False)
    assert not found.token_ids
    [problem] = found.problems
    assert "ids_missing" in problem
    assert "return_token_ids" in problem


@pytest.mark.parametrize(
    ("options", "field", "value", "note"),
    [
        ({"streams_ids": False}, "stream_ids", False, "asked for whole"),
        ({"renders": False}, "renders", "none", "nothing of how it renders"),
        ({"ignores_token_ids": True}, "token_routes", [], "does not read prompts as ids"),
        ({"original_logprobs": True}, "logprob_kind", "raw", "SGLANG_RETURN_ORIGINAL_LOGPROB"),
        ({"version_spans": False}, "weight_versions", False, "which weights sampled"),
        ({"parsers": False}, "tool_parser", False, "--tool-call-parser"),
    ],
)
async def test_a_probe_notes_what_a_server_cannot_do(
    options: dict[str, Any], field: str, value: Any, note: str
) -> None:
    found = await probed(**options)
    assert found.problems == []
    assert getattr(found, field) == value
    assert any(note in said for said in found.notes)


async def test_another_model_than_the_one_asked_for_is_a_problem() -> None:
    async with ScriptedSglang(SCRIPT) as server:
        engine = Sglang(server.url, model="big")
        found = await engine.probe()
        assert found.problems == ["it does not serve 'big' but tiny"]
        await engine.aclose()


async def test_a_server_that_is_something_else_is_said_to_be() -> None:
    async with ScriptedEngine(SCRIPT) as server:
        engine = Sglang(server.url)
        [problem] = (await engine.probe()).problems
        assert "without trustworthy tokens" in problem or "as an SGLang would" in problem
        await engine.aclose()
