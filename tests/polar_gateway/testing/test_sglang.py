"""The server's documents, in SGLang's shapes; what an engine makes of them is tested beside it."""

from collections.abc import AsyncIterator
from typing import Any

import anyio
import anyio.lowlevel
import httpx2
import msgspec
import pytest

from polar_gateway.testing.script import Rule, Script, ScriptedCall, Step
from polar_gateway.testing.sglang import ScriptedSglang

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
LOOK = Step(
    think="I look first.",
    say="One moment.",
    calls=[ScriptedCall(name="bash", arguments={"command": "ls"})],
)
SCRIPT = Script(rules=[Rule(match="Look around", steps=[LOOK])])
ASK: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Look around."}],
    "tools": TOOLS,
    "logprobs": True,
    "seed": 5,
}


@pytest.fixture(scope="module")
async def running(anyio_backend: str) -> AsyncIterator[ScriptedSglang]:
    async with ScriptedSglang(SCRIPT) as server:
        yield server


@pytest.fixture
async def http(running: ScriptedSglang) -> AsyncIterator[httpx2.AsyncClient]:
    running.calls.clear()
    async with httpx2.AsyncClient(base_url=running.url) as client:
        yield client


async def chat(http: httpx2.AsyncClient, **fields: Any) -> dict[str, Any]:
    reply = await http.post("/v1/chat/completions", json={**ASK, **fields})
    assert reply.status_code == 200, reply.text
    document: dict[str, Any] = reply.json()
    return document


async def events(http: httpx2.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    reply = await http.post("/v1/chat/completions", json={**ASK, "stream": True, **fields})
    *data, end = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert end == "[DONE]"
    return [msgspec.json.decode(document) for document in data]


async def test_ids_and_meta_information_stand_in_the_choice_if_they_are_asked_for(
    running: ScriptedSglang, http: httpx2.AsyncClient
) -> None:
    [plain] = (await chat(http))["choices"]
    assert not {"prompt_token_ids", "response_token_ids", "meta_info"} & set(plain)
    [choice] = (await chat(http, return_token_ids=True, return_meta_info=True))["choices"]
    call = running.calls[-1]
    assert choice["prompt_token_ids"] == call.prompt_token_ids
    assert choice["response_token_ids"] == call.token_ids
    assert [i for _, i, _ in choice["meta_info"]["output_token_logprobs"]] == call.token_ids
    assert choice["meta_info"]["weight_versions"] == [
        {"version": "default", "start": 0, "end": len(call.token_ids)}
    ]
    assert choice["message"]["reasoning_content"] == "\nI look first.\n"
    assert choice["matched_stop"] == running.tokenizer.end_of_turn


async def test_a_stream_has_its_ids_in_an_extension_behind_the_finish_reason(
    running: ScriptedSglang, http: httpx2.AsyncClient
) -> None:
    asked = {"return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True}
    told = await events(http, **asked)
    call = running.calls[-1]
    assert told[-1]["sglext"] == {
        "input_ids": call.prompt_token_ids,
        "output_ids": [call.token_ids],
    }
    assert told[-2]["choices"][0]["finish_reason"] == "tool_calls"
    entries = [
        entry
        for event in told
        for choice in event["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert [entry["logprob"] for entry in entries] == call.logprobs


async def test_a_stream_refuses_the_fields_of_whole_answers(http: httpx2.AsyncClient) -> None:
    body = {**ASK, "stream": True, "return_token_ids": True}
    reply = await http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert reply.json()["object"] == "error"
    assert "not supported with streaming" in reply.json()["message"]


async def test_a_prompt_may_come_as_ids(running: ScriptedSglang, http: httpx2.AsyncClient) -> None:
    ids = running.tokenizer.encode("<|im_start|>user\nLook around.<|im_end|>\n")
    [choice] = (await chat(http, input_ids=ids, return_prompt_token_ids=True))["choices"]
    assert choice["prompt_token_ids"] == ids
    running.ignores_token_ids = True
    [choice] = (await chat(http, input_ids=ids, return_prompt_token_ids=True))["choices"]
    assert choice["prompt_token_ids"] != ids
    running.ignores_token_ids = False


async def test_tokenize_renders_messages_with_and_without_the_beginning_of_an_answer(
    running: ScriptedSglang, http: httpx2.AsyncClient
) -> None:
    body = {"messages": ASK["messages"], "tools": TOOLS}
    rendered = (await http.post("/tokenize", json=body)).json()
    closed = (await http.post("/tokenize", json={**body, "add_generation_prompt": False})).json()
    await chat(http)
    assert rendered["tokens"] == running.calls[-1].prompt_token_ids
    opening = running.tokenizer.encode("<|im_start|>assistant\n")
    assert rendered["tokens"] == closed["tokens"] + opening
    text = (await http.post("/detokenize", json={"tokens": closed["tokens"]})).json()["text"]
    assert text.endswith("<|im_end|>\n")


async def test_parsers_can_be_asked_by_themselves(http: httpx2.AsyncClient) -> None:
    body = {"text": LOOK.text, "reasoning_parser": "qwen3"}
    separated = (await http.post("/separate_reasoning", json=body)).json()
    assert separated["reasoning_text"] == "\nI look first.\n"
    calls = {"text": separated["text"], "tools": TOOLS, "tool_call_parser": "qwen25"}
    parsed = (await http.post("/parse_function_call", json=calls)).json()
    assert parsed["calls"] == [{"tool_index": 0, "name": "bash", "parameters": '{"command": "ls"}'}]
    assert parsed["normal_text"] == "\n\nOne moment.\n"


@pytest.mark.parametrize(
    ("options", "ending"), [({}, "abort"), ({"abort_all_requests": False}, "tool_calls")]
)
async def test_a_new_version_aborts_what_is_in_flight_unless_told_not_to(
    running: ScriptedSglang, http: httpx2.AsyncClient, options: dict[str, Any], ending: str
) -> None:
    endings: list[str] = []

    async def ask() -> None:
        endings.append((await chat(http))["choices"][0]["finish_reason"])

    running.hold(after=3)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        while not running.calls or running.calls[-1].sent_tokens < 3:
            await anyio.lowlevel.checkpoint()
        assert (await http.get("/v1/loads")).json()["loads"][0]["num_running_reqs"] == 1
        assert (await http.post("/flush_cache")).status_code == 400
        version = {"new_version": "step-1", **options}
        assert (await http.post("/update_weight_version", json=version)).json()["success"]
        running.release()
    assert endings == [ending]
    assert (await http.get("/model_info")).json()["weight_version"] == "step-1"
    assert (await http.post("/flush_cache")).status_code == 200
    running.name_weights("default")
