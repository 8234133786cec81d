"""A plain OpenAI-compatible server, played by one that knows OpenAI's fields and refuses others."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polar_gateway.dialects.turn import BlockDelta, ModelRequest, Text
from polar_gateway.engines.base import EngineError
from polar_gateway.engines.openai import OpenAI
from polar_gateway.testing.engine import ScriptedEngine
from polar_gateway.testing.script import Rule, Script, Step
from polar_gateway.testing.serve import serve

HI = ModelRequest(model="any", messages=[{"role": "user", "content": "hi"}])


class Plain:
    """Says "yes" and knows neither the fields that it refuses nor any ids."""

    def __init__(self, *refuses: str) -> None:
        self.refuses = refuses
        self.asked: list[dict[str, Any]] = []
        self.app = Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ]
        )

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"data": [{"id": "teacher"}]})

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(body)
        for field in self.refuses:
            if field in body:
                said = f"Unrecognized request argument supplied: {field}"
                return JSONResponse({"error": {"message": said, "code": None}}, 400)
        message = {"role": "assistant", "content": "yes"}
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        usage = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}
        if not body["stream"]:
            return JSONResponse({"choices": [{**choice, "message": message}], "usage": usage})
        chunks = [{"choices": [{**choice, "delta": message}]}, {"choices": [], "usage": usage}]
        events = [b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks]
        return Response(b"".join(events) + b"data: [DONE]\n\n", media_type="text/event-stream")


@asynccontextmanager
async def openai_at(app: Any) -> AsyncIterator[OpenAI]:
    async with serve(app) as url:
        engine = OpenAI(url)
        try:
            yield engine
        finally:
            await engine.aclose()


async def test_a_server_without_ids_serves_and_is_refused_for_training_in_words() -> None:
    async with openai_at(Plain().app) as engine:
        found = await engine.probe()
        assert (found.engine, found.model, found.token_ids) == ("openai", "teacher", False)
        [problem] = found.problems
        assert "harnesses can be served" in problem
        assert "cannot be trained on" in problem
        reply = await engine.complete(HI, "msg_1")
        assert reply.blocks == [Text(text="yes")]
        assert {"ids_missing", "logprobs_missing"} & set(reply.findings)
        stream = await engine.stream(HI, "msg_2")
        events = [event async for batch in stream for event in batch]
        assert BlockDelta(text="yes") in events
        assert await engine.count_tokens(HI) == 9


async def test_a_strict_server_is_asked_for_no_more_than_it_takes() -> None:
    plain = Plain("return_token_ids", "logprobs")
    async with openai_at(plain.app) as engine:
        found = await engine.probe()
        assert any("refuses to be asked for token ids" in note for note in found.notes)
        assert any("refuses to be asked for log probabilities" in note for note in found.notes)
        plain.asked.clear()
        assert (await engine.complete(HI, "msg_1")).blocks == [Text(text="yes")]
        [body] = plain.asked
        assert not {"return_token_ids", "logprobs", "top_logprobs"} & set(body)


async def test_a_server_that_refuses_what_all_take_is_a_problem() -> None:
    async with openai_at(Plain("messages").app) as engine:
        [problem] = (await engine.probe()).problems
        assert "does not answer chat completions" in problem


async def test_ids_are_taken_where_a_server_sends_them() -> None:
    script = Script(rules=[Rule(match="hi", steps=[Step(say="yes")])])
    async with ScriptedEngine(script) as server:
        engine = OpenAI(server.url)
        found = await engine.probe()
        assert found.problems == []
        assert (found.token_ids, found.stream_ids) == (True, True)
        assert (found.token_routes, found.renders, found.controls) == ([], "none", [])
        reply = await engine.complete(HI, "msg_1")
        assert reply.sampled_ids.tolist() == server.calls[-1].token_ids
        assert reply.logprob_kind == "unknown"
        await engine.aclose()


async def test_what_it_cannot_do_it_says() -> None:
    engine = OpenAI("http://127.0.0.1:1", model="m")
    with pytest.raises(EngineError, match="cannot tell how it renders"):
        await engine.render(HI)
    with pytest.raises(EngineError, match="cannot pause"):
        await engine.pause("keep")
    with pytest.raises(EngineError, match="cannot resume"):
        await engine.unpause()
    with pytest.raises(EngineError, match="cannot change its weights"):
        await engine.update("step-1", None)


async def test_a_parameter_beyond_openais_own_is_sent_only_where_it_does_something() -> None:
    plain = Plain()
    nothing = {"temperature": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    async with openai_at(plain.app) as engine:
        await engine.complete(msgspec.structs.replace(HI, sampling=nothing), "msg_1")
        await engine.complete(msgspec.structs.replace(HI, sampling={"top_k": 5}), "msg_2")
    sent = [{name: body[name] for name in nothing if name in body} for body in plain.asked]
    assert sent == [{"temperature": 1.0}, {"top_k": 5}]
