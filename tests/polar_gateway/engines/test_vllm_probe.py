import json
from typing import Any

import pytest

from polar_gateway.dialects.turn import BlockDelta, BlockEnd, BlockStart, ModelRequest
from polar_gateway.engines.base import EngineError, EngineProbe, TokenRoute
from polar_gateway.engines.vllm import Vllm
from polar_gateway.engines.vllm_api import CHAT, DERENDER, GENERATE, RENDER
from polar_gateway.testing.engine import ScriptedEngine
from polar_gateway.testing.serve import serve
from tests.polar_gateway.engines.servers import Answers, Instead

HI = ModelRequest(model="anything", messages=[{"role": "user", "content": "hi"}])


async def probed(app: Any, **options: Any) -> EngineProbe:
    async with serve(app) as url:
        engine = Vllm(url, **options)
        probe = await engine.probe()
        await engine.aclose()
        return probe


async def changed(path: str, change: Any, **options: Any) -> EngineProbe:
    """The probe of a server that is like any other but for one path."""
    return await probed(Instead(ScriptedEngine().app, {path: change}), **options)


async def test_a_probe_says_all_that_the_engine_can_do() -> None:
    async with ScriptedEngine(max_model_len=4096) as scripted:
        engine = Vllm(scripted.url + "/v1/")
        probe = await engine.probe()
        await engine.aclose()
    assert (probe.engine, probe.model, probe.version) == ("vllm", "tiny", "scripted-1")
    assert probe.max_model_len == 4096
    assert (probe.token_ids, probe.stream_ids) == (True, True)
    assert probe.token_routes == ["chat", "generate"]
    assert (probe.renders, probe.logprob_kind) == ("full", "raw")
    assert probe.end_of_turn_ids == scripted.tokenizer.encode("<|im_end|><|endoftext|>")
    assert probe.end_of_turn_texts == ["<|im_end|>", "<|endoftext|>"]
    assert (probe.reasoning_parser, probe.tool_parser) == (True, True)
    assert (probe.kv_connector, probe.weight_versions, probe.resumes) == (False, True, True)
    assert probe.controls == ["pause", "abort", "update"]
    assert probe.problems == []
    [note] = probe.notes
    assert note.startswith("its log probabilities are the model's own")


async def test_without_scale_out_there_is_one_token_route_and_no_resuming() -> None:
    probe = await probed(ScriptedEngine(renders=False).app)
    assert (probe.token_routes, probe.renders) == (["chat"], "suffix")
    assert (probe.resumes, probe.weight_versions, probe.reasoning_parser) == (False, False, None)
    assert probe.problems == []
    assert sum("--enable-scale-out" in note for note in probe.notes) == 2


async def test_without_development_mode_it_takes_no_orders() -> None:
    probe = await probed(ScriptedEngine(controls=False).app)
    assert (probe.controls, probe.kv_connector) == ([], None)
    assert any("VLLM_SERVER_DEV_MODE=1" in note for note in probe.notes)


async def test_a_kv_connector_is_named_where_the_server_tells() -> None:
    assert (await probed(ScriptedEngine(kv_connector="NixlConnector").app)).kv_connector
    untold = await changed("/server_info", (500, {"error": {"message": "no pip"}}))
    assert untold.kv_connector is None
    assert any("KV connector is not known" in note for note in untold.notes)


async def test_the_preferred_token_route_comes_first_and_has_to_be_there() -> None:
    preferred: TokenRoute = "generate"
    assert (await probed(ScriptedEngine().app, token_route=preferred)).token_routes == [
        "generate",
        "chat",
    ]
    missing = await probed(ScriptedEngine(renders=False).app, token_route=preferred)
    assert missing.token_routes == ["chat"]
    assert missing.problems == [
        "token_route is 'generate', which it cannot be asked by; --enable-scale-out is needed"
    ]


async def test_an_engine_that_drops_the_ids_it_is_sent_is_asked_with_messages() -> None:
    probe = await probed(ScriptedEngine(renders=False, ignores_token_ids=True).app)
    assert probe.token_routes == []
    assert "token route chat: it did not read the ids that were sent" in probe.notes
    assert "it takes no prompts as ids, so it is asked with messages" in probe.notes
    assert probe.problems == []


def certain(request: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """As with --logprobs-mode processed_logprobs."""
    if "allowed_token_ids" in request:
        for entry in answer["choices"][0]["logprobs"]["content"]:
            entry["logprob"] = 0.0
    return answer


async def test_processed_log_probabilities_are_known_by_a_token_without_alternative() -> None:
    probe = await changed(CHAT, certain)
    assert probe.logprob_kind == "processed"
    assert probe.notes == []

    def disobeyed(request: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        if "allowed_token_ids" in request:
            answer["choices"][0]["token_ids"] = [1] * len(answer["choices"][0]["token_ids"])
        return answer

    probe = await changed(CHAT, disobeyed)
    assert probe.logprob_kind == "unknown"
    assert probe.notes == ["whether its log probabilities are the model's own is not known"]
    assert len(probe.end_of_turn_ids) == 1, "what the template closes with is known all the same"


async def test_a_rendering_that_is_not_what_a_call_reads_is_not_relied_on() -> None:
    def otherwise(_: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        return {**answer, "token_ids": [*answer["token_ids"], 5]}

    probe = await changed(RENDER, otherwise)
    assert probe.renders == "suffix"


async def test_a_server_that_tells_no_renderings_says_so() -> None:
    app = Instead(ScriptedEngine().app, {RENDER: (404, {}), "/tokenize": (404, {})})
    probe = await probed(app)
    assert (probe.renders, probe.end_of_turn_ids) == ("none", [])
    assert "it tells nothing of how it renders messages" in probe.notes
    assert any("with which id its template closes" in note for note in probe.notes)


def unparsed(_: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """As without parsers: markup and all in the text."""
    message = answer["choices"][0]["message"]
    message["content"] = json.dumps(message)
    message.update(tool_calls=[], reasoning=None)
    return answer


async def test_parsers_that_do_not_read_their_templates_own_words_are_named() -> None:
    probe = await changed(DERENDER, unparsed)
    assert (probe.reasoning_parser, probe.tool_parser) == (False, False)
    assert any("--reasoning-parser" in note for note in probe.notes)
    assert any("--tool-call-parser" in note for note in probe.notes)


class Refusing:
    """A scripted engine that refuses chat requests which `wrong` is true of."""

    def __init__(self, wrong: Any, message: str) -> None:
        self._app = ScriptedEngine().app
        self._wrong = wrong
        self._refusal = (400, {"error": {"message": message}})

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        messages = []
        while not messages or messages[-1].get("more_body"):
            messages.append(await receive())
        body = b"".join(message.get("body", b"") for message in messages)

        async def again() -> Any:
            return messages.pop(0) if messages else await receive()

        if scope["path"] in (CHAT, RENDER) and self._wrong(json.loads(body or b"{}")):
            await Answers(self._refusal)(scope, again, send)
        else:
            await self._app(scope, again, send)


async def test_an_engine_that_cannot_parse_calls_is_probed_without_tools() -> None:
    message = "tool choice requires --enable-auto-tool-choice"
    probe = await probed(Refusing(lambda body: "tools" in body, message))
    assert (probe.token_ids, probe.stream_ids, probe.problems) == (True, True, [])
    assert (probe.tool_parser, probe.reasoning_parser) == (False, True)
    assert probe.notes[0] == f"it refuses calls that offer tools: {message}"


async def test_a_template_that_chokes_on_malformed_arguments_is_named() -> None:
    probe = await probed(
        Refusing(lambda body: '"{\\"word\\": "' in json.dumps(body), "not valid JSON")
    )
    assert probe.problems == []
    assert any("malformed tool arguments" in note for note in probe.notes)


async def test_a_probe_names_what_training_cannot_do_without() -> None:
    missing = await probed(ScriptedEngine().app, model="other")
    assert missing.problems == ["it does not serve 'other' but tiny"]

    def without_ids(_: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        answer["choices"][0].pop("token_ids")
        return {**answer, "prompt_token_ids": None}

    blind = await changed(CHAT, without_ids)
    assert not blind.token_ids
    assert "(prompt_ids_missing, ids_missing, logprobs_misaligned)" in blind.problems[0]
    nameless = await changed("/v1/models", (200, {"data": []}))
    assert nameless.problems == ["it serves no model"]
    stranger = await probed(Answers((404, b"nothing here")))
    assert stranger.problems == [
        "it does not answer as a vLLM would: the engine answered 404: nothing here"
    ]


def without_logprobs(_: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    for entry in answer["choices"][0]["logprobs"]["content"]:
        entry["logprob"] = None
    return answer


async def test_log_probabilities_that_are_null_are_a_problem() -> None:
    probe = await changed(CHAT, without_logprobs)
    assert probe.token_ids
    assert "logprobs_null" in probe.problems[0]


async def test_where_streams_lose_ids_whole_answers_are_asked_for() -> None:
    async with ScriptedEngine(lossy_streams=True) as scripted:
        engine = Vllm(scripted.url)
        probe = await engine.probe()
        stream = await engine.stream(HI, "msg_1")
        events = [event async for batch in stream for event in batch]
        await stream.aclose()
        await engine.aclose()
        assert scripted.calls[-1].request["stream"] is False
    assert (probe.token_ids, probe.stream_ids, probe.problems) == (True, False, [])
    assert "streamed answers are asked for whole" in probe.notes[0]
    assert "ids_usage_mismatch" in probe.notes[0]
    assert [type(event) for event in events[:3]] == [BlockStart, BlockDelta, BlockEnd]


async def test_a_probe_of_a_server_that_is_not_there_yet_raises() -> None:
    async with serve(Answers((200, {}))) as url:
        pass
    engine = Vllm(url)
    with pytest.raises(EngineError, match="cannot be reached"):
        await engine.probe()
    await engine.aclose()


async def test_a_generate_route_that_is_out_of_order_is_not_one() -> None:
    probe = await changed(GENERATE, (405, {"detail": "no"}))
    assert probe.token_routes == ["chat"]
    assert any(note.startswith("token route generate: ") for note in probe.notes)
