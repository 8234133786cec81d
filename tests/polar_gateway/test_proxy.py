import asyncio
import gzip
import json
import random
import re
import time
import zlib
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import brotli
import pytest

from builders.eligible import Options, split
from builders.records import Completion
from polar_gateway.backend import Backend
from polar_gateway.backends import Backends
from polar_gateway.capture.journal import Appended, Completed, Intent, Syncer, read_journal
from polar_gateway.capture.reading import read_session
from polar_gateway.capture.session import SessionCapture
from polar_gateway.config import ModelCallConfig
from polar_gateway.dialects.turn import ModelRequest, Usage
from polar_gateway.engines.base import Engine, EngineProbe, EngineReply
from polar_gateway.engines.vllm import Vllm
from polar_gateway.engines.whole import WholeAsStream
from polar_gateway.errors import Failure
from polar_gateway.model_listener import ModelListener
from polar_gateway.protocol import Sampling
from polar_gateway.proxy import Proxy
from polar_gateway.request_body import LONE_SURROGATE_NOTE, RefusedError, zstd
from polar_gateway.sampling import SEALED, with_overrides
from polar_gateway.sessions import Session, Sessions
from polar_gateway.testing.engine import Fault, ScriptedEngine
from polar_gateway.testing.script import Rule, Script, ScriptedCall, Step
from polar_gateway.testing.serve import serve
from tests.polar_gateway.capture.test_journal import CountedJournal, files_limited_to
from tests.recordings import load

TALK = Script(
    rules=[
        Rule(
            match="tool please",
            steps=[
                Step(
                    think="A tool.",
                    say="I call it.",
                    calls=[
                        ScriptedCall(name="bash", arguments={"command": "ls"}),
                        ScriptedCall(name="bash", arguments={"command": "pwd"}),
                    ],
                ),
                Step(say="It is done."),
            ],
        )
    ],
    otherwise=Step(think="Hm.", say="Hello there, this is an answer of some length."),
)
BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}


class Asked:
    """A question on its way; the answer is there once its `async with` block has ended."""

    status = 0
    answer: Any = None


class Bench:
    """A proxy on a real port before a scripted engine, with one session."""

    def __init__(
        self,
        engine: ScriptedEngine,
        session: Session,
        sessions: Sessions,
        backends: Backends,
    ) -> None:
        self.engine = engine
        self.backends = backends
        self.session = session
        self.sessions = sessions
        self.url = ""
        self.http: aiohttp.ClientSession
        self.proxy: Proxy

    @property
    def completions(self) -> list[Completion]:
        return self.session.capture.completion_session([]).completions

    @property
    def journal(self) -> Path:
        return self.session.capture.journal_path

    def chat(self, text: str = "hi", *, stream: bool = False, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        return {"model": "m", "messages": messages, "stream": stream, "tools": [BASH], **fields}

    def post(self, path: str, body: Any, key: str = "k1", **options: Any) -> Any:
        headers = {"authorization": f"Bearer {key}", **options.pop("headers", {})}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.http.post(self.url + path, data=data, headers=headers, **options)

    async def ask(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        async with self.post(path, body, **options) as response:
            text = await response.text()
            whole = response.content_type == "application/json" and text
            return response.status, json.loads(text) if whole else text

    @asynccontextmanager
    async def asking(self, path: str, body: Any, **options: Any) -> AsyncIterator[Asked]:
        asked = Asked()

        async def ask() -> None:
            asked.status, asked.answer = await self.ask(path, body, **options)

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            yield asked


@asynccontextmanager
async def bench(
    tmp_path: Path,
    script: Script = TALK,
    *,
    sampling: Sampling | None = None,
    token_delay: float = 0.0,
    faults: list[Fault] | None = None,
    max_model_len: int | None = None,
    engine: Engine | None = None,
    probed: bool = False,
    served: dict[str, Any] | None = None,
    syncer: Syncer | None = None,
    **options: Any,
) -> AsyncIterator[Bench]:
    """`probed` lets the gateway know all that the engine can do; `served` are the engine's own
    options, all others the configuration's."""
    async with ScriptedEngine(
        script, token_delay=token_delay, faults=faults or [], **served or {}
    ) as scripted:
        vllm = Vllm(scripted.url, model="tiny")
        sessions = Sessions()
        capture = SessionCapture(
            session_id="s1", task_id="t1", journal_path=tmp_path / "journal", syncer=syncer
        )
        session = Session(
            session_id="s1",
            task_id="t1",
            attempt_id="a1",
            key="k1",
            capture=capture,
            sampling=sampling,
        )
        sessions.add(session)
        quick = {"retry_grace_seconds": 0.2, "engine_patience_seconds": 1.0}
        config = ModelCallConfig(**{**quick, **options})
        probe = EngineProbe(engine="vllm", model="tiny", max_model_len=max_model_len)
        if probed:
            probe = await vllm.probe()
            scripted.calls.clear()
            scripted.total_calls = 0
        backends = Backends([Backend("backend-1", scripted.url, engine or vllm, probe)])
        proxy = Proxy(sessions=sessions, backends=backends, config=config)
        parts = Bench(scripted, session, sessions, backends)
        parts.proxy = proxy
        async with ModelListener(proxy, "127.0.0.1", 0) as listener:
            parts.url = f"http://127.0.0.1:{listener.port}"
            async with aiohttp.ClientSession() as parts.http:
                yield parts
        await vllm.aclose()
        capture.close()


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        await asyncio.sleep(0.005)


CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    "anthropic": (
        "/v1/messages?beta=true",
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 500},
    ),
    "responses": ("/v1/responses", {"input": "hi"}),
}


def error_of(dialect: str, body: Any) -> tuple[str, str]:
    """Type and message of an error in the dialect's shape."""
    if dialect == "anthropic":
        assert body["type"] == "error"
    return body["error"]["type"], body["error"]["message"]


# ---- a call ----


@pytest.mark.parametrize("dialect", CALLS)
@pytest.mark.parametrize("stream", [False, True])
async def test_every_dialect_is_answered_and_captured_token_for_token(
    tmp_path: Path, dialect: str, stream: bool
) -> None:
    path, body = CALLS[dialect]
    async with bench(tmp_path) as b:
        status, answer = await b.ask(path, {"model": "asked", "stream": stream, **body})
        assert status == 200
        if not stream:
            assert "an answer of some length" in json.dumps(answer)
        [said] = b.engine.calls
        [completion] = b.completions
    assert said.request_id == f"chatcmpl-{completion.completion_id}"
    assert list(completion.prompt_ids) == said.prompt_token_ids
    assert list(completion.sampled_ids) == said.token_ids
    assert completion.findings == []
    assert completion.delivered
    assert completion.dialect == dialect
    assert (completion.model_requested, completion.model_used) == ("asked", "tiny")
    assert completion.usage["prompt_tokens"] == len(said.prompt_token_ids)
    [read] = read_session(b.journal).completions
    assert read.sampled_ids == completion.sampled_ids


async def test_the_answer_has_true_usage_and_the_requested_model(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        _, answer = await b.ask("/v1/chat/completions", b.chat())
        [said] = b.engine.calls
    assert answer["model"] == "m"
    assert answer["usage"]["prompt_tokens"] == len(said.prompt_token_ids)
    assert answer["usage"]["completion_tokens"] == len(said.token_ids)


async def test_turns_of_a_session_extend_each_other(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        first = b.chat("tool please")
        _, answer = await b.ask("/v1/chat/completions", first)
        message = answer["choices"][0]["message"]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "x"}
            for call in message["tool_calls"]
        ]
        await b.ask(
            "/v1/chat/completions", {**first, "messages": [*first["messages"], message, *results]}
        )
        one, two = b.completions
    assert two.parent is one
    assert two.shared >= one.prompt_length
    assert two.messages_shared == 2
    assert len(two.messages_tail) == 2


async def test_the_intent_is_in_the_journal_while_the_engine_works(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        b.engine.hold()
        async with b.asking("/v1/chat/completions", b.chat()):
            await until(lambda: len(b.engine.calls) == 1)
            assert isinstance(read_journal(b.journal).records[-1], Intent)
            assert b.completions == []
            b.engine.release()


async def test_a_whole_answer_leaves_after_its_record(tmp_path: Path) -> None:
    async with bench(tmp_path) as b, b.post("/v1/chat/completions", b.chat()) as response:
        assert isinstance(read_journal(b.journal).records[-1], Completed)
        await response.read()


@pytest.mark.parametrize("dialect", ["anthropic", "responses"])
async def test_a_tool_call_ends_only_after_its_tokens_are_in_the_journal(
    tmp_path: Path, dialect: str
) -> None:
    path, body = CALLS[dialect]
    body = json.loads(json.dumps(body).replace('"hi"', '"tool please"'))
    tool = {"name": "bash", "type": "function", "input_schema": {"type": "object"}}
    body["tools"] = [tool if dialect == "responses" else {**tool, "type": "custom"}]
    seen: list[tuple[str, int]] = []
    async with bench(tmp_path, token_delay=0.004) as b:
        async with b.post(path, {"model": "m", "stream": True, **body}) as response:
            kind, in_call = "", False
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                kind = event["type"]
                if kind in ("content_block_start", "response.output_item.added"):
                    block = event.get("content_block") or event["item"]
                    in_call = block["type"] in ("tool_use", "function_call")
                if in_call and kind in ("content_block_stop", "response.output_item.done"):
                    records = read_journal(b.journal).records
                    appended = [r for r in records if isinstance(r, Appended)]
                    sampled = b"".join(record.sampled for record in appended)
                    seen.append((type(records[-1]).__name__, len(sampled) // 4))
                if kind in ("message_stop", "response.completed"):
                    assert isinstance(read_journal(b.journal).records[-1], Completed)
        [said] = b.engine.calls
        [completion] = b.completions
    assert len(seen) == 2, "two calls ended"
    text = b.engine.tokenizer
    first = seen[0][1]
    assert 0 < first <= seen[1][1] <= len(said.token_ids)
    assert '"ls"' in text.decode(said.token_ids[:first])
    assert list(completion.sampled_ids) == said.token_ids


async def test_text_flows_while_the_model_still_speaks(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        b.engine.hold(after=8)
        async with b.post("/v1/chat/completions", b.chat(stream=True)) as response:
            async for line in response.content:
                if b'"content"' in line or b'"reasoning_content"' in line:
                    break
            assert b.completions == []
            b.engine.release()
            await response.read()
        await until(lambda: len(b.completions) == 1)


# ---- who asks ----


@pytest.mark.parametrize("dialect", CALLS)
async def test_an_unknown_key_is_refused_in_the_dialects_shape(
    tmp_path: Path, dialect: str
) -> None:
    path, body = CALLS[dialect]
    async with bench(tmp_path) as b:
        for key in ("wrong", "s1", "K1"):
            status, answer = await b.ask(path, {"model": "m", **body}, key=key)
            assert status == 401
            kind, message = error_of(dialect, answer)
            assert kind == (
                "authentication_error" if dialect == "anthropic" else "invalid_request_error"
            )
            assert message == "no live session has this API key"
            assert key not in json.dumps(answer)
        async with b.http.post(b.url + path, data=b"{}") as response:
            assert response.status == 401
        assert list(b.engine.calls) == []
        assert len(read_journal(b.journal).records) == 1


async def test_a_key_may_come_in_any_providers_place(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        body = json.dumps(b.chat()).encode()
        path = b.url + "/v1/chat/completions"
        for headers, query in [
            ({"x-api-key": "k1"}, ""),
            ({"x-goog-api-key": "k1"}, ""),
            ({}, "?key=k1"),
        ]:
            async with b.http.post(path + query, data=body, headers=headers) as response:
                assert response.status == 200


@pytest.mark.parametrize("dialect", CALLS)
async def test_a_sealed_session_refuses_in_a_way_that_is_not_asked_again(
    tmp_path: Path, dialect: str
) -> None:
    path, body = CALLS[dialect]
    async with bench(tmp_path) as b:
        b.session.seal()
        status, answer = await b.ask(path, {"model": "m", **body})
        assert status == 400
        assert error_of(dialect, answer)[1] == "this session has ended"
        assert list(b.engine.calls) == []


@pytest.mark.parametrize("stream", [False, True])
async def test_the_seal_cancels_what_is_in_flight_at_once(tmp_path: Path, stream: bool) -> None:
    async with bench(tmp_path, retry_grace_seconds=60.0) as b:
        b.engine.hold(after=4)
        async with b.asking("/v1/chat/completions", b.chat(stream=stream)) as asked:
            await has_said(b, 4)
            began = time.monotonic()
            b.session.seal()
        assert time.monotonic() - began < 30, "the grace of a harness that left is not for the seal"
        assert "this session has ended" in str(asked.answer)
        assert asked.status == (200 if stream else 400)
        assert b.session.calls == set()
        session = b.session.capture.completion_session([])
        if stream:
            assert session.findings == []
            [cut] = session.completions
            assert 0 < len(cut.sampled_ids) < len(b.engine.calls[0].token_ids)
            assert (cut.delivered, cut.findings) == (False, ["call_cut_by_seal"])
        else:
            assert (session.completions, session.findings) == ([], ["call_cut_by_seal"])
        assert b.session.engine_failure is None
        assert not b.engine.calls[0].finished


# ---- what is asked ----


@pytest.mark.parametrize(
    ("body", "said"),
    [(b"{", "the body is not JSON"), (b"[]", "the body must be a JSON object"), (b"", "not JSON")],
)
async def test_a_body_that_is_no_request_is_a_400(tmp_path: Path, body: bytes, said: str) -> None:
    async with bench(tmp_path) as b:
        status, answer = await b.ask("/v1/chat/completions", body)
    assert status == 400
    assert said in answer["error"]["message"]


async def test_a_body_that_is_too_large_is_a_413_said_or_not(tmp_path: Path) -> None:
    async with bench(tmp_path, max_body_bytes=2000) as b:
        large = b.chat("x" * 3000)
        status, answer = await b.ask("/v1/chat/completions", large)
        assert status == 413
        assert "larger than 2000 bytes" in answer["error"]["message"]

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(30):
                yield b"x" * 100

        async with b.http.post(
            b.url + "/v1/chat/completions", data=pieces(), headers={"x-api-key": "k1"}
        ) as response:
            assert response.status == 413
        assert (await b.ask("/v1/chat/completions", b.chat()))[0] == 200


@pytest.mark.parametrize(
    ("encoding", "compress"),
    [
        ("gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("zstd", zstd.compress),
        ("br", brotli.compress),
        ("gzip, ZSTD", lambda data: zstd.compress(gzip.compress(data))),
    ],
)
async def test_a_compressed_body_is_read(
    tmp_path: Path, encoding: str, compress: Callable[[bytes], bytes]
) -> None:
    async with bench(tmp_path) as b:
        data = compress(json.dumps(b.chat("compressed words")).encode())
        status, _ = await b.ask(
            "/v1/chat/completions", data, headers={"content-encoding": encoding}
        )
        assert status == 200
        assert "compressed words" in b.engine.calls[0].prompt


@pytest.mark.parametrize("dialect", CALLS)
async def test_a_body_nested_without_end_is_a_400_in_the_dialects_shape(
    tmp_path: Path, dialect: str
) -> None:
    path, body = CALLS[dialect]
    start = json.dumps({"model": "m", **body})[:-1].encode()
    deep = start + b', "x": ' + b'{"a":' * 900 + b"1" + b"}" * 901
    async with bench(tmp_path) as b:
        status, answer = await b.ask(path, deep)
        assert status == 400
        assert error_of(dialect, answer)[1] == "the body is nested too deeply"


@pytest.mark.parametrize("dialect", CALLS)
async def test_half_an_emoji_is_replaced_and_noted(tmp_path: Path, dialect: str) -> None:
    path, body = CALLS[dialect]
    asked = json.dumps({"model": "m", **body}).replace('"hi"', '"cut \\ud83d..."')
    async with bench(tmp_path) as b:
        status, _ = await b.ask(path, asked.encode())
        assert status == 200
        assert "cut \ufffd..." in b.engine.calls[0].prompt
        assert b.completions[0].notes == [LONE_SURROGATE_NOTE]
        assert b.session.engine_failure is None


@pytest.mark.parametrize("dialect", CALLS)
async def test_what_cannot_be_honoured_is_a_400_that_names_it(tmp_path: Path, dialect: str) -> None:
    path, body = CALLS[dialect]
    broken = {"model": 7, **body}
    async with bench(tmp_path) as b:
        status, answer = await b.ask(path, broken)
        assert status == 400
        assert "model: must be a string" in error_of(dialect, answer)[1]
        assert list(b.engine.calls) == []
        if dialect != "anthropic":
            assert answer["error"]["param"] == "model"
            assert b.session.refused is None
            return
        # Claude Code goes on by asking for something else, so its session fails for the reason.
        failure = b.session.refused
        assert failure is not None
        assert failure.boundary == "harness"
        assert "model: must be a string" in failure.message
        assert (await b.ask(path, {"model": "m", **body}))[0] == 200
        assert b.session.refused is failure


async def test_what_clients_do_without_when_refused_does_not_fail_their_session(
    tmp_path: Path,
) -> None:
    path, body = CALLS["anthropic"]
    threaded = {"model": "m", **body, "thread": {"type": "create"}}
    async with bench(tmp_path) as b:
        status, answer = await b.ask(path, threaded)
        assert status == 400
        assert answer["error"]["details"]["error_code"] == "thread_unsupported_request"
        assert b.session.refused is None


async def test_what_cannot_be_counted_fails_no_session(tmp_path: Path) -> None:
    path, body = CALLS["anthropic"]
    async with bench(tmp_path) as b:
        status, _ = await b.ask(f"{path.partition('?')[0]}/count_tokens", {"model": 7, **body})
        assert status == 400
        assert b.session.refused is None


async def test_the_tasks_sampling_replaces_the_harnesss_and_is_recorded(tmp_path: Path) -> None:
    sampling = Sampling(temperature=0.5, top_p=0.9)
    async with bench(tmp_path, sampling=sampling, max_model_len=400) as b:
        await b.ask("/v1/chat/completions", b.chat(temperature=0.0, top_k=3, max_tokens=128_000))
        asked = b.engine.calls[0].request
        [completion] = b.completions
    expected = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "max_tokens": 400}
    expected |= {"min_p": 0.0, "repetition_penalty": 1.0}
    assert {name: asked[name] for name in expected} == expected
    assert completion.sampling == expected
    assert completion.notes == [
        "temperature: 0.5 instead of 0.0",
        "top_p: 0.9 instead of None",
        "max_tokens: 400 instead of 128000",
    ]


async def test_what_nobody_sets_is_not_left_to_the_engines_own_defaults(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.ask("/v1/chat/completions", b.chat(temperature=0.0))
        asked = b.engine.calls[0].request
        [completion] = b.completions
    nothing = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert {name: asked[name] for name in nothing} == nothing
    assert completion.sampling == {"temperature": 0.0, **nothing}


def test_a_request_without_anything_to_override_stays_as_it_is() -> None:
    request = ModelRequest(model="m", messages=[], max_tokens=5)
    assert with_overrides(request, None, 100) is request
    assert with_overrides(request, Sampling(), None) is request
    assert with_overrides(request, Sampling(max_tokens=3), 100).max_tokens == 3


async def test_only_chain_headers_are_kept(tmp_path: Path) -> None:
    headers = {"thread-id": "T1", "x-claude-code-agent-id": "A1", "x-other": "no"}
    async with bench(tmp_path) as b:
        await b.ask("/v1/chat/completions", b.chat(), headers=headers)
        assert b.completions[0].chain == {"thread-id": "T1", "x-claude-code-agent-id": "A1"}


# ---- auxiliary routes ----


async def test_auxiliary_requests_are_answered_and_never_recorded(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        auth = {"authorization": "Bearer k1"}
        async with b.http.get(b.url + "/v1/models", headers=auth) as response:
            assert [model["id"] for model in (await response.json())["data"]] == ["tiny"]
        async with b.http.get(b.url + "/v1/models") as response:
            assert response.status == 401
        for method, path in [("HEAD", "/"), ("HEAD", "/api/hello"), ("GET", "/")]:
            async with b.http.request(method, b.url + path) as response:
                assert response.status == 200
        path, body = CALLS["anthropic"]
        status, counted = await b.ask("/v1/messages/count_tokens", {"model": "m", **body})
        assert status == 200
        assert b.completions == []
        await b.ask(path, {"model": "m", **body})
        assert counted["input_tokens"] == len(b.completions[0].prompt_ids)
        assert len(b.completions) == 1
        status, answer = await b.ask("/v1/embeddings", {})
        assert (status, answer["error"]["code"]) == (404, "not_found")


# ---- an engine in trouble ----


async def test_side_calls_and_compactions_are_recorded_as_such(tmp_path: Path) -> None:
    recorded = load("opencode", "thinking_api_anthropic")
    [title] = [exchange.request for exchange in recorded if exchange.label == "side"]
    headers = {name: title["headers"][name] for name in ("user-agent", "anthropic-version")}
    async with bench(tmp_path) as b:
        for path, body, said in (
            (title["path"], title["body"], headers),
            ("/v1/responses/compact", {"model": "m", "input": "hi"}, {}),
            ("/v1/responses", {"model": "m", "input": "hi"}, {}),
        ):
            assert (await b.ask(path, body, headers=said))[0] == 200
        assert [each.kind for each in b.completions] == ["title", "compaction", "turn"]
        kept, left_out = split(b.session.capture.completion_session([]), Options())[:2]
        assert [completion.kind for completion in kept] == ["compaction", "turn"]
        assert set(left_out) == {"kind_title"}


@pytest.mark.parametrize("stream", [False, True])
async def test_two_failures_of_the_engine_are_not_heard(tmp_path: Path, stream: bool) -> None:
    async with bench(tmp_path, faults=[Fault(status=500, times=2)]) as b:
        status, _ = await b.ask("/v1/chat/completions", b.chat(stream=stream))
        assert status == 200
        assert b.engine.total_calls == 3
        assert len(b.completions) == 1
        assert b.session.engine_failure is None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_lasting_failure_is_a_status_and_noted_until_a_call_succeeds(
    tmp_path: Path, stream: bool
) -> None:
    async with bench(
        tmp_path,
        faults=[Fault(status=500, times=99, message="no luck")],
        engine_patience_seconds=0.2,
    ) as b:
        status, answer = await b.ask("/v1/chat/completions", b.chat(stream=stream))
        assert status == 500
        assert answer["error"]["message"] == "the engine failed"
        assert b.session.engine_failure == Failure(
            boundary="engine",
            message="the engine answered 500: no luck",
            infra=True,
            detail=b.session.engine_failure.detail if b.session.engine_failure else "",
        )
        assert b.session.capture.completion_session([]).findings == ["call_failed"]
        b.engine.faults.clear()
        await b.ask("/v1/chat/completions", b.chat(stream=stream))
        assert b.session.engine_failure is None


@pytest.mark.parametrize("dialect", CALLS)
async def test_an_error_in_mid_stream_is_said_in_band_and_what_came_before_is_counted(
    tmp_path: Path, dialect: str
) -> None:
    path, body = CALLS[dialect]
    async with bench(tmp_path, faults=[Fault(error_after=5)]) as b:
        b.engine.hold(after=5)
        async with b.asking(path, {"model": "m", "stream": True, **body}) as asked:
            await has_said(b, 5)
            b.engine.release()
        status, text = asked.status, asked.answer
        assert status == 200
        assert '"error"' in text
        assert '"finish_reason":"stop"' not in text
        assert "message_stop" not in text
        assert "response.completed" not in text
        session = b.session.capture.completion_session([])
        [broken] = session.completions
        assert list(broken.sampled_ids) == b.engine.calls[0].token_ids[:5]
        assert (broken.finish_reason, broken.findings) == (None, ["engine_broke_off"])
        counts = {"completions": 1, "tokens": 5}
        assert split(session, Options())[:2] == ([], {"undelivered": counts})
        assert b.session.engine_failure is not None
        assert b.engine.total_calls == 1, "a part was handed on, so it must not be sampled again"


async def test_what_an_engine_that_cannot_resume_had_aborted_counts_and_the_harness_backs_off(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path, faults=[Fault(abort_after=3, times=99)]) as b:
        async with b.post("/v1/chat/completions", b.chat()) as response:
            assert response.status == 503
            assert response.headers["retry-after"] == "3"
            answer = await response.json()
        assert "aborted the generation" in answer["error"]["message"]
        [partial] = b.completions
        assert list(partial.sampled_ids) == b.engine.calls[0].token_ids[:3]
        assert (partial.delivered, partial.finish_reason) == (False, None)
        assert partial.findings == ["aborted"]
        assert b.session.engine_failure is not None
        assert b.engine.total_calls == 1, "a part counts, so it must not be sampled again for it"


async def test_what_was_handed_on_of_an_aborted_generation_is_counted(tmp_path: Path) -> None:
    async with bench(tmp_path, faults=[Fault(abort_after=5)]) as b:
        b.engine.hold(after=4)
        async with b.asking("/v1/chat/completions", b.chat(stream=True)) as asked:
            await has_said(b, 4)
            b.engine.release()
        assert "aborted the generation" in asked.answer
        [broken] = b.completions
        assert len(broken.sampled_ids) == 5
        assert (broken.finish_reason, broken.delivered) == (None, False)
        assert b.session.engine_failure is not None


async def test_overflow_is_told_in_the_dialects_own_words(tmp_path: Path) -> None:
    said = "This model's maximum context length is 100 tokens. However, your prompt contains at least 101 input tokens"
    for dialect, (path, body) in CALLS.items():
        async with bench(tmp_path / dialect, faults=[Fault(status=400, message=said)]) as b:
            status, answer = await b.ask(path, {"model": "m", **body})
            assert status == 400
            kind, message = error_of(dialect, answer)
            if dialect == "anthropic":
                assert kind == "invalid_request_error"
                assert re.match(r"prompt is too long: \d+ tokens > 100 maximum", message)
            else:
                assert answer["error"]["code"] == "context_length_exceeded"
                assert said in message
            assert b.engine.total_calls == 1


async def test_what_the_engine_leaves_out_is_a_finding(tmp_path: Path) -> None:
    async with bench(tmp_path, faults=[Fault(omit=["logprobs"])]) as b:
        await b.ask("/v1/chat/completions", b.chat())
        [completion] = b.completions
    assert completion.logprobs is None
    assert completion.findings == ["logprobs_missing"]


async def test_a_harness_learns_nothing_of_where_the_engine_is(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        engine = b.engine.url
        await b.engine.__aexit__(None, None, None)
        status, answer = await b.ask("/v1/chat/completions", b.chat())
        assert status == 503
        assert answer["error"]["message"] == "the engine cannot be reached"
        failure = b.session.engine_failure
        assert failure is not None
        assert engine.rsplit(":", 1)[1] in failure.message


async def test_a_full_disk_fails_the_call_and_is_noted(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        with files_limited_to(b.journal.stat().st_size):
            status, answer = await b.ask("/v1/chat/completions", b.chat())
            assert status == 500
            assert answer["error"]["message"] == "the gateway could not record this call"
            assert list(b.engine.calls) == [], "without a durable intent nothing is asked"
        assert b.session.refused is not None
        assert b.session.refused.boundary == "capture"
        assert b.session.refused.infra


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_cannot_be_recorded_is_not_given(tmp_path: Path, stream: bool) -> None:
    async with bench(tmp_path, faults=[Fault(delay=0.15)]) as b:
        with ExitStack() as disk:
            async with b.asking("/v1/chat/completions", b.chat(stream=stream)) as asked:
                await until(lambda: len(b.engine.calls) == 1)
                disk.enter_context(files_limited_to(b.journal.stat().st_size))
        assert asked.status == (200 if stream else 500)
        assert "could not record this call" in str(asked.answer)
        assert str(b.journal) not in str(asked.answer)
        assert '"finish_reason":"stop"' not in str(asked.answer)
        assert b.completions == []
        session = b.session.capture.completion_session([])
        assert session.findings == ["call_unfinished"]
        assert b.session.refused is not None
        assert str(b.journal) in b.session.refused.message


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_was_recorded_and_not_given_is_undelivered(
    tmp_path: Path, stream: bool, sealed: bool
) -> None:
    syncer, slow = Syncer(), CountedJournal(tmp_path / "slow")
    slow.may_end.clear()
    data = json.dumps({"model": "m", "stream": stream, **CALLS["chat"][1]}).encode()
    async with (
        bench(tmp_path, syncer=syncer, retry_grace_seconds=0.0) as b,
        anyio.create_task_group() as group,
    ):
        group.start_soon(syncer.flushed, slow)
        await anyio.to_thread.run_sync(slow.begun.wait)
        _, writer = await connected(b, "/v1/chat/completions", data, len(data))
        await until(lambda: len(b.completions) == 1)
        if sealed:
            b.session.seal()
        else:
            writer.close()
        await all_ended(b)
        [completion] = b.completions
        slow.may_end.set()
        writer.close()
    assert not completion.delivered
    assert completion.finish_reason == "stop"
    slow.close()


# ---- time ----


@pytest.mark.parametrize("dialect", CALLS)
async def test_headers_leave_before_the_engine_speaks_and_silence_is_filled(
    tmp_path: Path, dialect: str
) -> None:
    path, body = CALLS[dialect]
    async with bench(tmp_path, header_delay_seconds=0.1, keep_alive_seconds=0.1) as b:
        b.engine.hold()
        began = time.monotonic()
        async with b.post(path, {"model": "m", "stream": True, **body}) as response:
            for _ in range(3):
                assert await response.content.readany()
            assert time.monotonic() - began > 0.2
            b.engine.release()
            await response.read()
        assert len(b.completions) == 1


async def test_what_fails_after_the_headers_is_said_in_band(tmp_path: Path) -> None:
    faults = [Fault(status=500, times=99)]
    async with bench(
        tmp_path, faults=faults, header_delay_seconds=0.05, engine_patience_seconds=0.1
    ) as b:
        b.engine.hold()
        async with b.post("/v1/chat/completions", b.chat(stream=True)) as response:
            b.engine.release()
            text = await response.text()
    assert response.status == 200
    assert "the engine failed" in text


async def test_a_stream_that_speaks_needs_no_sign_of_life(tmp_path: Path) -> None:
    path, body = CALLS["anthropic"]
    async with bench(
        tmp_path, token_delay=0.06, header_delay_seconds=0.1, keep_alive_seconds=1.0
    ) as b:
        _, text = await b.ask(path, {"model": "m", "stream": True, **body})
    assert "event: ping" not in text.split("content_block_delta", 1)[1]


# ---- a harness that goes away ----


async def loop_turns() -> None:
    """Let what was sent within this process arrive and be taken up."""
    for _ in range(20):
        await asyncio.sleep(0.005)


async def has_said(b: Bench, tokens: int) -> None:
    """Until the engine has said so many tokens of its latest answer, and they have arrived."""
    await until(lambda: bool(b.engine.calls) and b.engine.calls[-1].sent_tokens >= tokens)
    await loop_turns()


async def all_ended(b: Bench) -> None:
    """Until no call is in flight, and how each has ended is recorded."""
    await until(lambda: not b.session.calls)
    await loop_turns()


async def leave(
    b: Bench, body: dict[str, Any], *, path: str = "/v1/chat/completions", after: int = 4
) -> None:
    """Ask over a connection of our own and end it, so that the listener has noticed. The engine is
    held `after` the first tokens of its answers, and has said that many of one that is streamed."""
    b.engine.hold(after)
    data = json.dumps(body).encode()
    reader, writer = await connected(b, path, data, len(data))
    await has_said(b, after if body.get("stream") else 0)
    writer.write_eof()
    while await reader.read(1 << 16):
        pass
    writer.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_whose_harness_left_is_kept_as_undelivered(
    tmp_path: Path, stream: bool
) -> None:
    async with bench(tmp_path, retry_grace_seconds=30.0) as b:
        await leave(b, b.chat(stream=stream))
        b.engine.release()
        await until(lambda: len(b.completions) == 1)
        await all_ended(b)
        [completion] = b.completions
        assert list(completion.sampled_ids) == b.engine.calls[0].token_ids
        assert b.engine.calls[0].finished
    assert not completion.delivered
    assert not read_session(b.journal).completions[0].delivered


async def test_a_generation_outlives_its_harness_by_the_grace_and_no_longer(tmp_path: Path) -> None:
    async with bench(tmp_path, retry_grace_seconds=0.3) as b:
        began = time.monotonic()
        await leave(b, b.chat(stream=True))
        await all_ended(b)
        assert time.monotonic() - began >= 0.3
        [completion] = b.completions
        assert not completion.delivered
        assert completion.finish_reason is None
        assert list(completion.sampled_ids) == b.engine.calls[0].token_ids[:4]
        assert len(completion.logprobs or ()) == 4
        await loop_turns()
        b.engine.release()
        await loop_turns()
        assert not b.engine.calls[0].finished


async def test_a_whole_call_that_is_given_up_is_no_completion(tmp_path: Path) -> None:
    async with bench(tmp_path, retry_grace_seconds=0.05) as b:
        await leave(b, b.chat())
        await until(
            lambda: b.session.capture.completion_session([]).findings != ["call_unfinished"]
        )
        session = b.session.capture.completion_session([])
        assert (session.completions, session.findings) == ([], ["call_abandoned"])


async def test_a_harness_that_leaves_in_mid_request_leaves_nothing(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        host, port = b.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: k1\r\n"
            b"content-length: 1000\r\n\r\n{"
        )
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()
        assert (await b.ask("/v1/chat/completions", b.chat()))[0] == 200
        assert len(b.completions) == 1


async def test_a_session_may_have_many_calls_but_not_any_number(tmp_path: Path) -> None:
    async with bench(tmp_path, max_calls=2) as b:
        b.engine.hold()
        asking = partial(b.asking, "/v1/chat/completions", b.chat())
        async with asking() as first, asking() as second:
            await until(lambda: len(b.session.calls) == 2)
            status, answer = await b.ask("/v1/chat/completions", b.chat())
            b.engine.release()
        assert status == 429
        assert "2 model calls in flight" in answer["error"]["message"]
        assert (first.status, second.status) == (200, 200)


async def sending(b: Bench, path: str, sent: bytes, size: int) -> asyncio.StreamWriter:
    """A connection on which a request of `size` bytes has begun, of which `sent` is sent."""
    _, writer = await connected(b, path, sent, size)
    return writer


async def connected(
    b: Bench, path: str, sent: bytes, size: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = b.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nx-api-key: k1\r\ncontent-length: {size}\r\n\r\n"
    writer.write(head.encode() + sent)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages/count_tokens"])
async def test_a_request_counts_from_its_first_byte(tmp_path: Path, path: str) -> None:
    async with bench(tmp_path, max_calls=2) as b:
        writers = [await sending(b, path, b"{", 1000) for _ in range(2)]
        await until(lambda: len(b.session.calls) == 2)
        status, answer = await b.ask("/v1/chat/completions", b.chat())
        assert status == 429
        assert "2 model calls in flight" in answer["error"]["message"]
        for writer in writers:
            writer.transport.abort()
        await until(lambda: not b.session.calls)
        assert (await b.ask("/v1/chat/completions", b.chat()))[0] == 200


async def test_unfinished_bodies_of_a_session_are_bounded_together(tmp_path: Path) -> None:
    path = "/v1/chat/completions"
    async with bench(tmp_path, max_unread_bytes=250_000) as b:
        writer = await sending(b, path, b"x" * 200_000, 300_000)
        await until(lambda: len(b.session.calls) == 1)
        await asyncio.sleep(0.1)
        await loop_turns()
        status, answer = await b.ask(path, b"x" * 1_000_000)
        assert status == 429
        assert "more than 250000 bytes at once" in answer["error"]["message"]
        writer.transport.abort()
        await until(lambda: not b.session.calls)
        status, _ = await b.ask(path, b.chat("x" * 100_000))
        assert status == 200


async def test_the_seal_ends_a_request_that_is_still_coming(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        writer = await sending(b, "/v1/chat/completions", b"{", 1000)
        await until(lambda: len(b.session.calls) == 1)
        b.session.seal()
        await until(lambda: not b.session.calls)
        writer.close()


async def test_a_harness_that_sent_its_next_request_and_left_has_not_got_its_answer(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path, retry_grace_seconds=0.1) as b:
        b.engine.hold(after=4)
        data = json.dumps(b.chat(stream=True)).encode()
        writer = await sending(b, "/v1/chat/completions", data, len(data))
        await until(lambda: len(b.engine.calls) == 1)
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-api-key: k1\r\n\r\n")
        await loop_turns()
        writer.transport.abort()
        await all_ended(b)
        assert not b.engine.calls[0].finished
        assert [c.delivered for c in b.completions] == [False]


def test_the_refusal_of_a_sealed_session_is_one_that_is_rarely_asked_again() -> None:
    assert SEALED.status == 400


async def test_the_proxy_needs_no_listener_of_ours(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        probe = EngineProbe(engine="vllm", model="tiny")
        backend = Backend("backend-1", b.engine.url, Vllm(b.engine.url), probe)
        proxy = Proxy(sessions=b.sessions, backends=Backends([backend]))
        async with (
            serve(proxy) as url,
            b.http.get(url + "/v1/models", headers={"x-api-key": "k1"}) as response,
        ):
            assert response.status == 200


# ---- one turn, one sample ----


async def test_a_harness_that_lost_its_connection_joins_the_answer_on_its_way(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path, retry_grace_seconds=30.0) as b:
        body = b.chat(stream=True)
        await leave(b, body)
        async with b.asking("/v1/chat/completions", body) as asked:
            await until(lambda: len(b.session.calls) == 2)
            await loop_turns()
            b.engine.release()
        assert asked.status == 200
        assert said_in(asked.answer) == said_by(b.engine)
        [completion] = b.completions
        assert (completion.delivered, completion.delivered_tokens) == (True, None)
        assert b.engine.total_calls == 1


async def test_an_answer_that_nobody_received_is_given_to_who_asks_again(tmp_path: Path) -> None:
    async with bench(tmp_path, retry_grace_seconds=30.0) as b:
        body = b.chat(stream=True)
        await leave(b, body)
        b.engine.release()
        await all_ended(b)
        assert not b.completions[0].delivered
        _, text = await b.ask("/v1/chat/completions", body)
        assert said_in(text) == said_by(b.engine)
        assert b.engine.total_calls == 1
        await until(lambda: b.completions[0].delivered)
        assert b.completions[0].delivered_tokens is None
        [read] = read_session(b.journal).completions
        assert (read.delivered, read.delivered_tokens) == (True, None)
        # It has its answer now: who asks a third time wants another.
        await b.ask("/v1/chat/completions", body)
        assert b.engine.total_calls == 2


@pytest.mark.parametrize("first", [True, False])
async def test_the_second_time_may_be_whole_where_the_first_was_streamed_and_the_other_way(
    tmp_path: Path, first: bool
) -> None:
    path, body = "/v1/messages", {**CALLS["anthropic"][1], "model": "m"}
    async with bench(tmp_path, retry_grace_seconds=30.0) as b:
        one = {**body, "stream": first}
        await leave(b, one, path=path)
        b.engine.release()
        _, answer = await b.ask(path, {**body, "stream": not first, "max_tokens": 64_000})
        said = said_by(b.engine)
        assert b.engine.total_calls == 1
        if first:
            assert [block.get("thinking") or block.get("text") for block in answer["content"]] == [
                said["reasoning"],
                said["content"],
            ]
        else:
            assert json.dumps(said["content"])[1:-1] in answer
            assert "message_stop" in answer


async def test_an_identical_call_while_the_first_is_listened_to_is_a_sample_of_its_own(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path) as b:
        b.engine.hold()
        asking = partial(b.asking, "/v1/chat/completions", b.chat())
        async with asking() as first, asking() as second:
            await until(lambda: len(b.engine.calls) == 2)
            b.engine.release()
        assert (first.status, second.status) == (200, 200)
        assert b.engine.total_calls == 2
        assert [c.delivered for c in b.completions] == [True, True]


async def test_a_call_marked_as_a_retry_joins_even_where_the_first_seems_to_be_heard(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path) as b:
        b.engine.hold()
        asking = partial(b.asking, "/v1/chat/completions", b.chat())
        async with asking() as first, asking(headers={"x-stainless-retry-count": "1"}) as second:
            await until(lambda: len(b.session.calls) == 2)
            await loop_turns()
            b.engine.release()
        assert (second.status, second.answer) == (200, first.answer)
        assert b.engine.total_calls == 1


async def test_a_mark_does_not_bring_back_an_answer_that_was_received(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.ask("/v1/chat/completions", b.chat())
        await b.ask("/v1/chat/completions", b.chat(), headers={"x-stainless-retry-count": "2"})
        assert b.engine.total_calls == 2


async def test_calls_of_different_conversations_are_never_taken_for_each_other(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path, retry_grace_seconds=30.0) as b:
        await leave(b, b.chat())
        b.engine.release()
        await all_ended(b)
        await b.ask("/v1/chat/completions", b.chat(), headers={"thread-id": "other"})
        assert b.engine.total_calls == 2


async def test_how_much_of_a_broken_answer_was_handed_on_is_recorded(tmp_path: Path) -> None:
    async with bench(tmp_path, retry_grace_seconds=30.0) as b:
        await leave(b, b.chat(stream=True), after=6)
        b.engine.release()
        await all_ended(b)
        [completion] = b.completions
        assert not completion.delivered
        assert completion.delivered_tokens is not None
        assert 4 <= completion.delivered_tokens <= 6 < len(completion.sampled_ids)


async def test_the_grace_counts_from_when_the_last_one_left(tmp_path: Path) -> None:
    async with bench(tmp_path, retry_grace_seconds=1.5) as b:
        body = b.chat(stream=True)
        await leave(b, body)
        await asyncio.sleep(0.8)
        await leave(b, body)
        await asyncio.sleep(0.8)
        # 1.6 s after the first one left, and 0.8 after the second.
        assert b.session.calls
        b.engine.release()
        _, text = await b.ask("/v1/chat/completions", body)
        assert said_in(text) == said_by(b.engine)
        assert b.engine.total_calls == 1


class Stuck:
    """A harness that takes the first `takes` parts of its answer and leaves the rest unread, or
    on whose connection the server `fails` then."""

    def __init__(
        self,
        b: Bench,
        body: dict[str, Any],
        *,
        takes: int,
        marked: bool = False,
        fails: bool = False,
    ) -> None:
        self._fails = fails
        self._b = b
        self._body = json.dumps(body).encode()
        self._takes = takes
        self._headers = [(b"x-api-key", b"k1"), (b"x-stainless-retry-count", b"%d" % marked)]
        self.got = b""

    async def ask(self) -> None:
        scope = {"method": "POST", "path": "/v1/chat/completions", "query_string": b""}
        with suppress(RuntimeError):
            await self._b.proxy({**scope, "headers": self._headers}, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if not self._body:
            await anyio.sleep_forever()
        body, self._body = self._body, b""
        return {"type": "http.request", "body": body, "more_body": False}

    async def _send(self, message: Any) -> None:
        if not self._takes:
            if self._fails:
                raise RuntimeError("the server failed")
            await anyio.sleep_forever()
        self._takes -= 1
        self.got += message.get("body", b"")


async def test_one_who_joined_and_does_not_read_holds_up_nobody(tmp_path: Path) -> None:
    async with bench(tmp_path) as b, anyio.create_task_group() as group:
        b.engine.hold(after=4)
        body = b.chat(stream=True)
        async with b.asking("/v1/chat/completions", body) as first:
            await until(lambda: len(b.engine.calls) == 1)
            for takes in (0, 1, 3):
                group.start_soon(Stuck(b, body, takes=takes, marked=True).ask)
            await until(lambda: len(b.session.calls) == 4)
            await loop_turns()
            b.engine.release()
        assert said_in(first.answer) == said_by(b.engine)
        assert b.engine.total_calls == 1
        [completion] = b.completions
        assert completion.delivered
        b.session.seal()
        await until(lambda: not b.session.calls)
        group.cancel_scope.cancel()


@pytest.mark.parametrize(("stream", "takes"), [(False, 0), (True, 4)])
async def test_an_answer_that_the_seal_cuts_off_was_not_received(
    tmp_path: Path, stream: bool, takes: int
) -> None:
    async with bench(tmp_path) as b, anyio.create_task_group() as group:
        stuck = Stuck(b, b.chat(stream=stream), takes=takes)
        group.start_soon(stuck.ask)
        await until(lambda: len(b.completions) == 1)
        b.session.seal()
        await all_ended(b)
        assert [c.delivered for c in b.completions] == [False]
        assert [c.delivered for c in read_session(b.journal).completions] == [False]
        group.cancel_scope.cancel()


async def test_who_wants_the_whole_got_nothing_of_an_answer_that_broke_off(tmp_path: Path) -> None:
    async with bench(tmp_path, retry_grace_seconds=30.0) as b:
        await leave(b, b.chat(stream=True))
        async with b.asking("/v1/chat/completions", b.chat()):
            await until(lambda: len(b.session.calls) == 2)
            b.engine.hold(after=12)
            await has_said(b, 12)
            b.session.seal()
        [completion] = b.completions
        assert len(completion.sampled_ids) > 8
        assert completion.delivered_tokens is not None
        assert completion.delivered_tokens <= 4


class Unreadable:
    """An engine whose answers hold what no part of ours can read."""

    async def complete(self, *_: Any) -> EngineReply:
        nothing: Any = None
        return EngineReply(
            prompt_ids=array("i", [1, 2]),
            sampled_ids=array("i", [3]),
            logprobs=array("f", [-1.0]),
            blocks=[nothing],
            finish_reason="stop",
            usage=Usage(prompt_tokens=2, completion_tokens=1),
        )

    async def stream(self, *_: Any) -> WholeAsStream:
        return WholeAsStream(await self.complete())


@pytest.mark.parametrize("dialect", CALLS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_of_our_own_is_told_logged_and_recorded(
    tmp_path: Path, dialect: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path, body = CALLS[dialect]
    engine: Any = Unreadable()
    async with bench(tmp_path, engine=engine) as b:
        for _ in range(2):
            status, answer = await b.ask(path, {"model": "m", "stream": stream, **body})
            assert status == 500
            assert error_of(dialect, answer)[1] == "the gateway failed at this request"
        failure = b.session.engine_failure
        assert failure is not None
        assert (failure.boundary, failure.infra) == ("capture", True)
        assert re.search("AttributeError|ValidationError", failure.message)
        assert b.session.calls == set()
        session = b.session.capture.completion_session([])
        failed = [c for c in session.completions if not c.delivered]
        assert len(session.findings + failed) == 2
        assert "call_unfinished" not in session.findings
    assert caplog.text.count("Traceback") >= 2


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_could_not_be_told_was_not_received(
    tmp_path: Path, stream: bool
) -> None:
    async with bench(tmp_path) as b:
        harness = Stuck(b, b.chat(stream=stream), takes=1, fails=True)
        await harness.ask()
        assert [c.delivered for c in b.completions] == [False]
        assert b.session.engine_failure is not None
        assert b.session.calls == set()
        assert (await b.ask("/v1/chat/completions", b.chat()))[0] == 200
        assert b.engine.total_calls == 2


class Visit:
    """One asking of a harness that may leave before it has its answer."""

    def __init__(self, b: Bench, body: dict[str, Any], *, marked: bool) -> None:
        self._b = b
        self._body = body
        self._headers = {"x-stainless-retry-count": str(int(marked)), "connection": "close"}
        self.scope = anyio.CancelScope()
        self.completion_id = ""
        """Of the turn that it received whole."""
        self.message: dict[str, Any] = {}
        self.ended = ""

    async def make(self) -> None:
        try:
            with self.scope:
                await self._make()
        except aiohttp.ClientError:
            self.ended = "broken off"
        self.ended = self.ended or "left"

    async def _make(self) -> None:
        async with self._b.post(
            "/v1/chat/completions", self._body, headers=self._headers
        ) as response:
            text = await response.text()
        self.ended = "refused"
        if '"error"' in text:
            assert "the gateway failed" not in text
            return
        assert response.status == 200
        if self._body["stream"]:
            assert text.endswith("data: [DONE]\n\n")
            self.message = said_in(text)
        else:
            self.message = json.loads(text)["choices"][0]["message"]
        self.ended = "answered"
        self.completion_id = response.headers["x-request-id"]


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_happens_in_whatever_order_each_turn_is_sampled_told_and_recorded_once(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    faults: list[dict[str, Any]] = [
        {"status": 500},
        {"hang_up": True},
        {"error_after": 3},
        {"abort_after": 4},
        {"disconnect_after": 5},
        {"status": 400},
        {"stall_after": 3, "stall": 0.3},
    ]
    visits: list[Visit] = []
    quick = {"engine_patience_seconds": 0.3, "header_delay_seconds": 0.1, "keep_alive_seconds": 0.1}
    delay = chance.choice([0.0, 0.003, 0.01])
    async with bench(tmp_path, token_delay=delay, retry_grace_seconds=0.1, **quick) as b:
        async with anyio.create_task_group() as group:
            for _ in range(25):
                match chance.choice(["ask", "ask", "leave", "leave", "fault", "wait"]):
                    case "ask":
                        text = chance.choice(["hi", "hi", "tool please"])
                        body = b.chat(text, stream=chance.random() < 0.5)
                        visits.append(Visit(b, body, marked=chance.random() < 0.2))
                        group.start_soon(visits[-1].make)
                    case "leave":
                        if there := [visit for visit in visits if not visit.ended]:
                            chance.choice(there).scope.cancel()
                    case "fault":
                        b.engine.faults.append(Fault(**chance.choice(faults)))
                await asyncio.sleep(chance.choice([0.0, 0.001, 0.01, 0.05, 0.1]))
            if seed % 3 == 0:
                b.session.seal()
            with anyio.fail_after(10):
                while not all(visit.ended for visit in visits):
                    await asyncio.sleep(0.01)
        await all_ended(b)
        b.session.seal()
        session = b.session.capture.completion_session([])
        said = {completion.completion_id: completion for completion in session.completions}
        for visit in visits:
            assert visit.ended != "broken off" or not visit._body["stream"] or seed % 3 == 0
            if visit.completion_id:
                completion = said[visit.completion_id]
                assert completion.delivered
                told, recorded = visit.message, completion.response_message
                assert (told.get("content") or "") == (recorded.get("content") or "")
                thought = told.get("reasoning") or told.get("reasoning_content")
                assert thought == recorded["reasoning_content"]
        received = {visit.completion_id for visit in visits}
        left = sum(visit.ended == "left" for visit in visits)
        assert sum(c.delivered and name not in received for name, c in said.items()) <= left
        assert "call_unfinished" not in session.findings
        read = read_session(b.journal)
        assert [c.sampled_ids for c in read.completions] == [
            c.sampled_ids for c in session.completions
        ]
        assert [(c.delivered, c.delivered_tokens, c.findings) for c in read.completions] == [
            (c.delivered, c.delivered_tokens, c.findings) for c in session.completions
        ]


def said_by(engine: ScriptedEngine) -> dict[str, Any]:
    """What the engine said first, as `said_in` reads it from a stream."""
    message = engine.calls[0].message or {}
    return {name: value for name, value in message.items() if value}


def said_in(stream: str) -> dict[str, Any]:
    """The message that a chat stream adds up to, as the engine reports its own."""
    message: dict[str, Any] = {"role": "assistant"}
    texts = {"content": "content", "reasoning_content": "reasoning"}
    for line in stream.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                for field, name in texts.items():
                    if choice["delta"].get(field):
                        message[name] = message.get(name, "") + choice["delta"][field]
    return message


# ---- limits ----


async def test_a_body_that_swells_is_a_413(tmp_path: Path) -> None:
    async with bench(tmp_path, max_decompressed_bytes=5000) as b:
        for encoding, compress in (("gzip", gzip.compress), ("zstd", zstd.compress)):
            data = compress(b" " * 100_000_000)
            assert len(data) < 200_000
            headers = {"content-encoding": encoding}
            status, answer = await b.ask("/v1/chat/completions", data, headers=headers)
            assert status == 413
            assert "larger than 5000 bytes" in answer["error"]["message"]


@pytest.mark.parametrize("dialect", CALLS)
async def test_headers_that_are_too_large_are_a_431(tmp_path: Path, dialect: str) -> None:
    path, body = CALLS[dialect]
    async with bench(tmp_path, max_header_bytes=2000) as b:
        headers = {"x-long": "a" * 3000}
        status, answer = await b.ask(path, {"model": "m", **body}, headers=headers)
        assert status in (413, 431)
        assert error_of(dialect, answer)[1] == "the headers are larger than 2000 bytes"


# ---- an engine that comes back ----


async def test_an_engine_that_restarts_is_waited_for(tmp_path: Path) -> None:
    async with bench(tmp_path, engine_patience_seconds=20.0, header_delay_seconds=0.1) as b:
        port = int(b.engine.url.rsplit(":", 1)[1])
        await b.engine.__aexit__(None, None, None)
        async with b.asking("/v1/chat/completions", b.chat(stream=True)) as asked:
            await asyncio.sleep(0.5)
            async with ScriptedEngine(TALK, port=port) as again:
                await until(lambda: bool(asked.status), seconds=15)
                assert again.total_calls == 1
        assert asked.status == 200
        assert "[DONE]" in asked.answer
        assert b.session.engine_failure is None


async def test_an_overflow_that_nothing_follows_is_what_the_session_failed_of(
    tmp_path: Path,
) -> None:
    said = "This model's maximum context length is 100 tokens. However, your prompt contains at least 101 input tokens"
    async with bench(tmp_path, faults=[Fault(status=400, message=said, skip=1)]) as b:
        await b.ask("/v1/chat/completions", b.chat())
        await b.ask("/v1/chat/completions", b.chat("more"))
        failure = b.session.engine_failure
        assert failure is not None
        assert (failure.boundary, failure.code, failure.infra) == (
            "harness",
            "context_overflow",
            False,
        )
        await b.ask("/v1/chat/completions", b.chat("less"))
        assert b.session.engine_failure is None


# ---- a whole answer that takes its time ----


async def test_a_whole_answer_that_takes_long_begins_with_signs_of_life(tmp_path: Path) -> None:
    async with bench(tmp_path, header_delay_seconds=0.1, keep_alive_seconds=0.1) as b:
        b.engine.hold()
        async with b.post("/v1/chat/completions", b.chat()) as response:
            signs = await response.content.readexactly(2)
            assert b.completions == []
            b.engine.release()
            text = (signs + await response.read()).decode()
        assert text.startswith("  ")
        assert json.loads(text)["choices"][0]["finish_reason"] == "stop"


async def test_a_whole_answer_that_fails_after_its_headers_breaks_off(tmp_path: Path) -> None:
    faults = [Fault(status=500, times=99)]
    async with bench(
        tmp_path, faults=faults, header_delay_seconds=0.05, engine_patience_seconds=0.1
    ) as b:
        b.engine.hold()
        async with b.post("/v1/chat/completions", b.chat()) as response:
            b.engine.release()
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()


@pytest.mark.parametrize("dialect", CALLS)
async def test_every_answer_names_its_request(tmp_path: Path, dialect: str) -> None:
    path, body = CALLS[dialect]
    name = "request-id" if dialect == "anthropic" else "x-request-id"
    async with bench(tmp_path) as b:
        async with b.post(path, {"model": "m", **body}) as response:
            assert response.headers[name] == b.completions[0].completion_id
        async with b.post(path, {"model": 7, **body}) as response:
            assert response.headers[name].startswith("req_")


async def test_a_session_that_ended_while_its_request_came_in_takes_no_backend(
    tmp_path: Path,
) -> None:
    """Nobody would give it back."""
    async with bench(tmp_path) as b:
        b.session.seal()
        with pytest.raises(RefusedError):
            b.proxy._lease(b.session)
        assert b.session.lease is None
