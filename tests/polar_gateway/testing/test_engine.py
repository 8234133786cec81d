import base64
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import httpx2
import msgspec
import pytest

from polar_gateway.testing.engine import Fault, ScriptedEngine
from polar_gateway.testing.script import Rule, Script, ScriptedCall, Step

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
LOOK = Step(
    think="I look first.",
    say="Both at once.",
    calls=[
        ScriptedCall(name="bash", arguments={"command": "ls -la"}),
        ScriptedCall(name="bash", arguments={"command": "cat ünï.txt"}),
    ],
)
DONE = Step(think="That is all.", say="Done ✓.")
SCRIPT = Script(rules=[Rule(match="Look around", steps=[LOOK, DONE])])
USER = {"role": "user", "content": "Look around."}
ASK = {
    "model": "tiny",
    "messages": [USER],
    "tools": TOOLS,
    "logprobs": True,
    "return_token_ids": True,
}


class Client:
    def __init__(self, engine: ScriptedEngine, http: httpx2.AsyncClient) -> None:
        self.engine = engine
        self.http = http

    async def whole(self, **fields: Any) -> dict[str, Any]:
        reply = await self.http.post("/v1/chat/completions", json={**ASK, **fields})
        assert reply.status_code == 200, reply.text
        document: dict[str, Any] = reply.json()
        return document

    async def events(self, **fields: Any) -> list[dict[str, Any]]:
        """The documents of a stream, which must end with its mark."""
        body = {**ASK, "stream": True, **fields}
        reply = await self.http.post("/v1/chat/completions", json=body)
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        *data, end = re.findall(r"^data: (.*)$", reply.text, re.MULTILINE)
        assert end == "[DONE]"
        return [json.loads(document) for document in data]

    async def refused(self, status: int, **fields: Any) -> dict[str, Any]:
        body = {**ASK, **fields}
        reply = await self.http.post("/v1/chat/completions", json=body)
        assert reply.status_code == status
        error: dict[str, Any] = reply.json()["error"]
        assert error["code"] == status
        return error


@pytest.fixture(scope="module")
async def running(anyio_backend: str) -> AsyncIterator[ScriptedEngine]:
    """One server for all: starting and stopping it takes longer than most tests."""
    async with ScriptedEngine(SCRIPT) as engine:
        yield engine


@pytest.fixture
async def client(running: ScriptedEngine) -> AsyncIterator[Client]:
    running.calls.clear()
    running.total_calls = 0
    running.faults = []
    running.max_model_len = 131_072
    running.renders, running.strict_limits, running.lossy_streams = True, False, False
    running.controls = True
    running.ignores_token_ids = running.accepts_images = running.processed_logprobs = False
    running.routed_experts = running.sampling_mask = False
    running.template_arguments = {}
    running.load_weights(None)
    running.name_weights("default")
    async with httpx2.AsyncClient(base_url=running.url) as http:
        yield Client(running, http)


def choices(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice for event in events for choice in event.get("choices", [])]


async def test_a_whole_answer_has_ids_that_spell_it_and_a_logprob_for_each(client: Client) -> None:
    answer = await client.whole()
    [choice] = answer["choices"]
    tokenizer = client.engine.tokenizer
    assert tokenizer.decode(choice["token_ids"]) == LOOK.text + "<|im_end|>"
    entries = choice["logprobs"]["content"]
    assert len(entries) == len(choice["token_ids"]) == answer["usage"]["completion_tokens"]
    assert all(-100 < entry["logprob"] < 0 for entry in entries)
    assert len({entry["logprob"] for entry in entries}) > len(entries) / 2
    assert answer["prompt_token_ids"] == tokenizer.encode(client.engine.calls[0].prompt)
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]


async def test_a_whole_answer_is_parsed(client: Client) -> None:
    [choice] = (await client.whole())["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning"] == "\nI look first.\n"
    assert choice["message"]["content"] == "\n\nBoth at once.\n"
    calls = choice["message"]["tool_calls"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [
        {"command": "ls -la"},
        {"command": "cat ünï.txt"},
    ]
    assert len({call["id"] for call in calls}) == 2


async def test_a_stream_says_the_same_as_a_whole_answer_with_the_same_seed(client: Client) -> None:
    whole = await client.whole(seed=5)
    events = await client.events(seed=5)
    [choice] = whole["choices"]
    first, *later = choices(events)
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any("prompt_token_ids" in event for event in events[1:])
    assert [i for c in later for i in c["token_ids"]] == choice["token_ids"]
    assert [e for c in later for e in c["logprobs"]["content"]] == choice["logprobs"]["content"]
    assert later[-1]["finish_reason"] == "tool_calls"
    reasoning = "".join(c["delta"].get("reasoning", "") for c in later)
    assert reasoning == choice["message"]["reasoning"]


async def test_usage_ends_a_stream_only_if_it_was_asked_for(client: Client) -> None:
    plain = await client.events()
    assert not any("usage" in event for event in plain)
    counted = await client.events(stream_options={"include_usage": True})
    assert counted[-1]["choices"] == []
    sampled = sum(len(choice.get("token_ids", [])) for choice in choices(counted))
    assert counted[-1]["usage"]["completion_tokens"] == sampled


async def test_ids_and_logprobs_come_only_if_they_were_asked_for(client: Client) -> None:
    answer = await client.whole(logprobs=False, return_token_ids=False)
    assert answer["prompt_token_ids"] is None
    assert answer["choices"][0]["token_ids"] is None
    assert answer["choices"][0]["logprobs"] is None


async def test_a_conversation_takes_one_step_a_turn(client: Client) -> None:
    answer = (await client.whole())["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "x"}
        for call in answer["tool_calls"]
    ]
    last = await client.whole(messages=[USER, answer, *results])
    assert last["choices"][0]["message"]["content"] == "\n\nDone ✓."
    assert last["choices"][0]["finish_reason"] == "stop"
    first_prompt, second_prompt = (call.prompt_token_ids for call in client.engine.calls)
    assert second_prompt[: len(first_prompt)] == first_prompt


async def test_a_turn_without_a_seed_is_sampled_anew(client: Client) -> None:
    answers = [await client.whole() for _ in range(3)]
    assert len({tuple(a["choices"][0]["token_ids"]) for a in answers}) == 3


async def test_an_answer_that_runs_into_its_limit_ends_by_length(client: Client) -> None:
    [choice] = (await client.whole(max_tokens=4))["choices"]
    assert len(choice["token_ids"]) == 4
    assert choice["finish_reason"] == "length"
    assert choices(await client.events(max_completion_tokens=4))[-1]["finish_reason"] == "length"


async def test_the_room_left_in_the_context_limits_an_answer_too(client: Client) -> None:
    prompt = (await client.whole())["usage"]["prompt_tokens"]
    client.engine.max_model_len = prompt + 3
    [choice] = (await client.whole(max_tokens=100))["choices"]
    assert len(choice["token_ids"]) == 3


async def test_calls_in_parallel_may_be_forbidden(client: Client) -> None:
    [choice] = (await client.whole(parallel_tool_calls=False))["choices"]
    assert len(choice["message"]["tool_calls"]) == 1


async def test_top_logprobs_are_the_likeliest_of_their_context(client: Client) -> None:
    [choice] = (await client.whole(top_logprobs=3))["choices"]
    for entry in choice["logprobs"]["content"]:
        top = [other["logprob"] for other in entry["top_logprobs"]]
        assert len(top) == 3
        assert top == sorted(top, reverse=True)


async def test_the_request_id_names_the_answer(client: Client) -> None:
    reply = await client.http.post(
        "/v1/chat/completions", json=ASK, headers={"x-request-id": "mine"}
    )
    assert reply.json()["id"] == client.engine.calls[0].request_id == "chatcmpl-mine"


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        (
            {"messages": [USER, {"role": "system", "content": "x"}]},
            None,
            "must be at the beginning",
        ),
        ({"messages": [{"role": "developer", "content": "x"}, USER]}, None, "developer"),
        (
            {"messages": [{"role": "user", "content": "word " * 200}]},
            "input_tokens",
            "least 101 input",
        ),
        ({"messages": []}, None, "empty conversation"),
        ({"messages": "x"}, "body.messages", "Expected `array`"),
        ({"tools": []}, "tools", "must not be an empty array"),
        ({"max_tokens": 0}, "max_tokens", "at least 1, got 0"),
        ({"max_tokens": 101}, "max_tokens", "max_tokens=101 cannot be greater than"),
        ({"max_tokens": "many"}, "body.max_tokens", "Expected `int | null`"),
        ({"temperature": -1}, "temperature", "non-negative"),
        ({"top_logprobs": 21}, "logprobs", "max allowed: 20"),
        ({"n": 2}, "n", "one choice"),
    ],
)
async def test_what_vllm_refuses_is_refused_in_its_words(
    client: Client, fields: dict[str, Any], param: str | None, said: str
) -> None:
    client.engine.max_model_len = 100
    error = await client.refused(400, **fields)
    assert error["param"] == param
    assert said in error["message"]


async def test_an_unknown_model_is_not_found(client: Client) -> None:
    error = await client.refused(404, model="big")
    assert error["message"] == "The model `big` does not exist. Valid aliases: tiny."


async def test_a_body_that_is_no_json_is_refused(client: Client) -> None:
    reply = await client.http.post("/v1/chat/completions", content=b"{oops")
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "Bad Request"


async def test_it_says_that_it_is_no_model(client: Client) -> None:
    [card] = (await client.http.get("/v1/models")).json()["data"]
    assert card["owned_by"] == "scripted"
    assert "no model" in card["description"]
    assert card["max_model_len"] == 131_072
    assert (await client.http.get("/version")).json()["version"].startswith("scripted")
    assert (await client.whole())["system_fingerprint"].startswith("scripted")
    assert (await client.http.get("/health")).status_code == 200


async def test_tokenize_gives_the_ids_of_text_and_of_messages(client: Client) -> None:
    tokenizer = client.engine.tokenizer
    text = (await client.http.post("/tokenize", json={"prompt": "a<|im_end|>"})).json()
    assert text["tokens"] == [*tokenizer.encode("a"), tokenizer.end_of_turn]
    chat = (await client.http.post("/tokenize", json={"messages": [USER]})).json()
    assert chat["tokens"] == (await client.whole(tools=None))["prompt_token_ids"]


async def test_a_request_can_be_rendered_without_sampling(client: Client) -> None:
    rendered = (await client.http.post("/v1/chat/completions/render", json=ASK)).json()
    assert rendered["token_ids"] == (await client.whole())["prompt_token_ids"]
    assert len(client.engine.calls) == 1
    client.engine.max_model_len = 20
    reply = await client.http.post("/v1/chat/completions/render", json=ASK)
    assert reply.status_code == 400
    assert "least 21 input" in reply.json()["error"]["message"]
    client.engine.renders = False
    reply = await client.http.post("/v1/chat/completions/render", json=ASK)
    assert (reply.status_code, reply.json()["error"]["type"]) == (403, "PermissionDeniedError")


async def test_more_output_than_there_is_room_for_may_be_refused(client: Client) -> None:
    prompt = (await client.whole())["usage"]["prompt_tokens"]
    client.engine.strict_limits = True
    client.engine.max_model_len = prompt + 10
    error = await client.refused(400, max_tokens=11)
    assert (
        f"you requested 11 output tokens and your prompt contains at least {prompt}"
        in (error["message"])
    )
    assert len((await client.whole(max_tokens=10))["choices"][0]["token_ids"]) == 10


async def test_streams_may_lose_the_tokens_that_say_nothing(client: Client) -> None:
    client.engine.lossy_streams = True
    whole = await client.whole(seed=5)
    lossy = choices(await client.events(seed=5))
    ids = [i for choice in lossy for i in choice.get("token_ids", [])]
    assert len(ids) < len(whole["choices"][0]["token_ids"])
    assert lossy[-1]["finish_reason"] == "tool_calls"


async def test_calls_can_be_read_over_http(client: Client) -> None:
    answer = await client.whole()
    listed = (await client.http.get("/scripted/calls")).json()
    assert listed["total"] == 1
    [call] = listed["calls"]
    assert call["token_ids"] == answer["choices"][0]["token_ids"]
    assert call["message"] == answer["choices"][0]["message"]
    assert call["finished"]


async def test_a_fault_spoils_as_many_calls_as_it_says(client: Client) -> None:
    client.engine.faults = [Fault(skip=1, times=2, status=429, headers={"retry-after": "3"})]
    replies = [await client.http.post("/v1/chat/completions", json=ASK) for _ in range(4)]
    assert [reply.status_code for reply in replies] == [200, 429, 429, 200]
    assert replies[1].headers["retry-after"] == "3"


async def test_faults_can_be_set_over_http(client: Client) -> None:
    reply = await client.http.post("/scripted/faults", json=[{"status": 503}])
    assert reply.json() == {"faults": 1}
    await client.refused(503)
    misspelled = await client.http.post("/scripted/faults", json=[{"stauts": 503}])
    assert misspelled.status_code == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_a_connection_may_be_cut_in_mid_answer(client: Client, stream: bool) -> None:
    client.engine.faults = [Fault(disconnect_after=3)]
    with pytest.raises(httpx2.RemoteProtocolError):
        await client.http.post("/v1/chat/completions", json={**ASK, "stream": stream})
    [call] = client.engine.calls
    assert (call.sent_tokens, call.finished) == (3, False)


async def test_a_connection_may_be_cut_before_any_answer(client: Client) -> None:
    client.engine.faults = [Fault(hang_up=True)]
    with pytest.raises((httpx2.RemoteProtocolError, httpx2.ReadError)):
        await client.http.post("/v1/chat/completions", json=ASK)
    await client.whole()


async def test_an_answer_may_fall_silent_for_a_while(client: Client) -> None:
    client.engine.faults = [Fault(stall_after=2, stall=0.1)]
    began = time.monotonic()
    answer = await client.whole(max_tokens=4)
    assert time.monotonic() - began >= 0.1
    assert answer["usage"]["completion_tokens"] == 4


async def test_a_fault_may_be_for_certain_calls_alone(client: Client) -> None:
    client.engine.faults = [Fault(status=503, match="title")]
    await client.whole()
    await client.refused(503, messages=[{"role": "user", "content": "A title, please."}])
    await client.whole(messages=[{"role": "user", "content": "A title, please."}])
    client.engine.faults = [Fault(status=503, match="title")]
    ids = client.engine.tokenizer.encode("<|im_start|>user\nA title, please.<|im_end|>\n")
    await client.refused(503, kv_transfer_params={"prompt_token_ids": ids})


async def test_an_engine_may_die_and_come_back_at_its_address() -> None:
    body = {**ASK, "stream": True}
    async with (
        ScriptedEngine(SCRIPT, token_delay=0.02) as engine,
        httpx2.AsyncClient(base_url=engine.url) as http,
    ):
        async with http.stream("POST", "/v1/chat/completions", json=body) as reply:
            lines = reply.aiter_lines()
            await anext(lines)
            await engine.die()
            with pytest.raises((httpx2.RemoteProtocolError, httpx2.ReadError)):
                async for _ in lines:
                    pass
        with pytest.raises(httpx2.ConnectError):
            await http.get("/health")
        await engine.revive()
        assert (await http.get("/health")).status_code == 200


async def test_an_error_may_come_inside_a_stream(client: Client) -> None:
    client.engine.faults = [Fault(error_after=2, message="broken"), Fault(error_after=2)]
    events = await client.events()
    assert len(choices(events)) == 3
    assert events[-1]["error"]["message"] == "broken"
    await client.refused(500)


async def test_an_aborted_answer_says_so(client: Client) -> None:
    client.engine.faults = [Fault(abort_after=2, times=2)]
    [choice] = (await client.whole())["choices"]
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("abort", 2)
    assert choices(await client.events())[-1]["finish_reason"] == "abort"


async def test_ids_and_logprobs_may_be_missing(client: Client) -> None:
    client.engine.faults = [Fault(omit=["token_ids", "prompt_token_ids"]), Fault(omit=["logprobs"])]
    first, second = await client.whole(), await client.whole()
    assert first["prompt_token_ids"] is None
    assert first["choices"][0]["token_ids"] is None
    assert first["choices"][0]["logprobs"] is not None
    assert second["choices"][0]["logprobs"] is None


async def test_tokens_come_at_the_pace_that_was_set(client: Client) -> None:
    client.engine.faults = [Fault(delay=0.05, token_delay=0.01)]
    began = time.monotonic()
    answer = await client.whole(max_tokens=6)
    assert time.monotonic() - began >= 0.1
    assert answer["usage"]["completion_tokens"] == 6


async def test_a_held_engine_says_so_many_tokens_and_no_more_until_it_is_released(
    client: Client,
) -> None:
    client.engine.hold(after=2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(client.whole)
        with anyio.fail_after(5):
            while not client.engine.calls or client.engine.calls[0].sent_tokens < 2:
                await anyio.sleep(0.01)
        [call] = client.engine.calls
        client.engine.hold(after=3)
        await anyio.wait_all_tasks_blocked()
        assert (call.sent_tokens, call.finished) == (3, False)
        client.engine.release()
    assert call.finished


async def test_an_answer_stops_when_its_client_goes(client: Client) -> None:
    client.engine.hold(after=3)
    body = {**ASK, "stream": True}
    async with client.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        async for _ in reply.aiter_lines():
            break
    [call] = client.engine.calls
    await anyio.sleep(0.1)
    client.engine.release()
    await anyio.sleep(0.1)
    assert call.sent_tokens <= 3 < len(call.token_ids)
    assert not call.finished


def test_the_command_serves_a_script_until_it_is_told_to_stop(tmp_path: Path) -> None:
    script, ready = tmp_path / "script.json", tmp_path / "ready"
    script.write_bytes(msgspec.json.encode(SCRIPT))
    command = [sys.executable, "-m", "polar_gateway.testing.engine", "--port", "0"]
    command += ["--script", str(script), "--ready-file", str(ready)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url, said = process.stdout.readline().split(maxsplit=1)
            assert "no model" in said
            deadline = time.monotonic() + 10
            while not ready.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert ready.read_text() == url
            answer = httpx2.post(f"{url}/v1/chat/completions", json=ASK).json()
            assert len(answer["choices"][0]["message"]["tool_calls"]) == 2
        finally:
            process.terminate()
        assert process.wait(timeout=10) in (0, -15)
    assert os.listdir(tmp_path).count("ready.part") == 0


# ---- prompts of ids ----


async def test_a_prompt_of_ids_is_taken_as_it_is_and_answered_by_what_it_spells(
    client: Client,
) -> None:
    ids = client.engine.tokenizer.encode(f"<|im_start|>user\n{USER['content']}<|im_end|>\n")
    answer = await client.whole(
        messages=[{"role": "user", "content": "ignored"}],
        kv_transfer_params={"prompt_token_ids": ids},
    )
    assert answer["prompt_token_ids"] == ids
    assert answer["choices"][0]["message"]["content"] == "\n\nBoth at once.\n"
    error = await client.refused(400, kv_transfer_params={"prompt_token_ids": [99_999]})
    assert error["param"] == "kv_transfer_params.prompt_token_ids"
    assert "99999 is out of vocabulary" in error["message"]


async def test_ids_are_ignored_beside_images_and_by_engines_that_do_not_know_them(
    client: Client,
) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    shown = [{"role": "user", "content": [{"type": "text", "text": "Look around."}, image]}]
    sent = {"kv_transfer_params": {"prompt_token_ids": [1, 2]}}
    client.engine.accepts_images = True
    assert (await client.whole(messages=shown, **sent))["prompt_token_ids"] != [1, 2]
    client.engine.ignores_token_ids = True
    assert (await client.whole(**sent))["prompt_token_ids"] != [1, 2]


async def test_an_answer_is_gone_on_with_where_a_prompt_ends_inside_it(client: Client) -> None:
    whole = await client.whole()
    ids, prompt = whole["choices"][0]["token_ids"], whole["prompt_token_ids"]
    for begun in (1, len(ids) // 2, len(ids) - 1):
        sent = {"prompt_token_ids": prompt + ids[:begun]}
        rest = (await client.whole(kv_transfer_params=sent))["choices"][0]["token_ids"]
        spelled = client.engine.tokenizer.decode(ids[:begun] + rest)
        assert spelled == LOOK.text + "<|im_end|>"


async def test_rendering_generating_and_derendering_make_a_chat_answer(client: Client) -> None:
    whole = await client.whole(seed=5)
    rendered = (
        await client.http.post("/v1/chat/completions/render", json={**ASK, "seed": 5})
    ).json()
    assert rendered["reasoning_ended"] is False
    generated = (await client.http.post("/inference/v1/generate", json=rendered)).json()
    [sampled], [expected] = generated["choices"], whole["choices"]
    assert sampled["token_ids"] == expected["token_ids"]
    assert [entry["logprob"] for entry in sampled["logprobs"]["content"]] == [
        entry["logprob"] for entry in expected["logprobs"]["content"]
    ]
    assert sampled["weight_versions"] == [
        {"version": "default", "start": 0, "end": len(sampled["token_ids"])}
    ]
    asked = {"chat_request": ASK, "generate_response": generated}
    told = (await client.http.post("/v1/chat/completions/derender", json=asked)).json()
    [choice] = told["choices"]
    assert choice["finish_reason"] == "stop"  # as it was generated
    assert choice["message"]["reasoning"] == expected["message"]["reasoning"]
    assert choice["message"]["content"] == expected["message"]["content"]
    assert len(choice["message"]["tool_calls"]) == 2


async def test_generation_streams_tokens_and_says_versions_at_the_end(client: Client) -> None:
    body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3, "logprobs": 0}}
    asked = {**body, "stream": True, "return_token_ids": True}
    reply = await client.http.post("/inference/v1/generate", json=asked)
    data = re.findall(r"^data: (\{.*)$", reply.text, re.MULTILINE)
    events = [json.loads(document) for document in data]
    assert events[0]["prompt_token_ids"] == [1, 2]
    assert [len(event["choices"][0]["token_ids"]) for event in events] == [1, 1, 1]
    versions = [event["choices"][0]["weight_versions"] for event in events]
    assert versions == [None, None, [{"version": "default", "start": 0, "end": 3}]]


async def test_an_answer_may_come_with_experts_and_masks(client: Client) -> None:
    client.engine.routed_experts = client.engine.sampling_mask = True
    body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3}}
    [choice] = (await client.http.post("/inference/v1/generate", json=body)).json()["choices"]
    assert base64.b64decode(choice["routed_experts"]).startswith(b"\x93NUMPY")
    assert all(
        i in mask for i, mask in zip(choice["token_ids"], choice["sampling_mask"], strict=True)
    )


async def test_a_turn_may_end_with_another_id(client: Client) -> None:
    async with ScriptedEngine(Script(otherwise=Step(say="Bye.", end="<|endoftext|>"))) as engine:
        http = httpx2.AsyncClient(base_url=engine.url)
        [choice] = (await http.post("/v1/chat/completions", json=ASK)).json()["choices"]
        other = engine.tokenizer.id_of("<|endoftext|>")
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", other)
        assert choice["token_ids"][-1] == other
        await http.aclose()


@pytest.mark.parametrize(
    ("shown", "thoughts"), [("recent", 1), ("none", 0), ("all", 2), ("empty", 2)]
)
async def test_templates_may_forget_thinking_or_add_empty_blocks(
    client: Client, shown: str, thoughts: int
) -> None:
    client.engine.template_arguments = {"history_thinking": shown}
    messages = [
        USER,
        {"role": "assistant", "content": "a", "reasoning": "first"},
        USER,
        {"role": "assistant", "content": "b", "reasoning": "second"},
    ]
    body = {**ASK, "messages": messages, "add_generation_prompt": False}
    rendered = (await client.http.post("/v1/chat/completions/render", json=body)).json()
    text = (await client.http.post("/detokenize", json={"tokens": rendered["token_ids"]})).json()
    assert text["prompt"].count("<think>") == thoughts
    assert text["prompt"].endswith("b<|im_end|>\n")


# ---- orders ----


async def orders(client: Client, path: str, **said: Any) -> dict[str, Any]:
    reply = await client.http.post(path, json=said)
    assert reply.status_code == 200, reply.text
    document: dict[str, Any] = reply.json()
    return document


async def begun(client: Client, tokens: int) -> None:
    while not client.engine.calls or client.engine.calls[-1].sent_tokens < tokens:
        await anyio.lowlevel.checkpoint()


async def test_pausing_with_abort_ends_answers_with_what_they_have(client: Client) -> None:
    answers: list[dict[str, Any]] = []

    async def ask() -> None:
        answers.append(await client.whole())

    client.engine.hold(after=5)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await begun(client, 5)
        assert await orders(client, "/pause?mode=abort") == {"status": "paused"}
        assert (await client.http.get("/is_paused")).json() == {"is_paused": True}
    client.engine.release()
    await orders(client, "/resume")
    [choice] = answers[0]["choices"]
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("abort", 5)
    assert len(choice["logprobs"]["content"]) == 5
    assert answers[0]["usage"]["completion_tokens"] == 5


async def test_a_stream_that_is_aborted_says_so(client: Client) -> None:
    told: list[list[dict[str, Any]]] = []

    async def ask() -> None:
        told.append(await client.events())

    client.engine.hold(after=5)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await begun(client, 5)
        named = [client.engine.calls[-1].request_id]
        assert (await orders(client, "/abort_requests", request_ids=named))["aborted"] == 1
    client.engine.release()
    assert choices(told[0])[-1]["finish_reason"] == "abort"
    assert sum(len(c.get("token_ids") or []) for c in choices(told[0])) == 5


async def test_new_weights_sample_what_is_left_of_an_answer(client: Client) -> None:
    answers: list[dict[str, Any]] = []
    body = {**ASK, "sampling_params": {"logprobs": 0}}

    async def ask() -> None:
        rendered = await orders(client, "/v1/chat/completions/render", **body)
        answers.append(await orders(client, "/inference/v1/generate", **rendered))

    client.engine.hold(after=5)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await begun(client, 5)
        await orders(client, "/pause?mode=keep")
        loading = {"weights_path": "/weights/1"}
        await orders(client, "/collective_rpc", method="reload_weights", kwargs=loading)
        await orders(client, "/reset_prefix_cache")
        await orders(client, "/update_weight_version", new_version="step-1")
        client.engine.release()
        await orders(client, "/resume")
    assert (await client.http.get("/weight_info")).json() == {"weight_version": "step-1"}
    [choice] = answers[0]["choices"]
    ids = choice["token_ids"]
    assert choice["weight_versions"] == [
        {"version": "default", "start": 0, "end": 5},
        {"version": "step-1", "start": 5, "end": len(ids)},
    ]
    policies = client.engine.policies
    context = policies["default"].context(client.engine.calls[-1].prompt_token_ids)
    for number, entry in enumerate(choice["logprobs"]["content"]):
        policy = policies["default" if number < 5 else "step-1"]
        assert entry["logprob"] == policy.logprob(context, ids[number])
        context = policy.context([ids[number]], context)


async def test_a_pause_that_waits_lets_answers_end_and_none_begin(client: Client) -> None:
    done: list[str] = []

    async def ask(name: str) -> None:
        await client.whole()
        done.append(name)

    async def pause() -> None:
        await orders(client, "/pause?mode=wait")
        done.append("paused")
        assert done == ["first", "paused"]
        await orders(client, "/resume")

    client.engine.hold(after=5)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, "first")
        await begun(client, 5)
        tasks.start_soon(pause)
        while client.engine.paused is None:
            await anyio.lowlevel.checkpoint()
        tasks.start_soon(ask, "second")
        client.engine.release()
    assert done == ["first", "paused", "second"]


async def test_an_engine_may_take_no_orders(client: Client) -> None:
    client.engine.controls = False
    for path in ("/pause", "/collective_rpc", "/update_weight_version"):
        assert (await client.http.post(path)).status_code == 404
        assert (await client.http.get(path)).status_code == 404
    client.engine.controls = True
    assert (await client.http.get("/pause")).status_code == 405


async def test_processed_logprobs_know_the_temperature_and_what_is_allowed(client: Client) -> None:
    async def logprobs(**fields: Any) -> list[float]:
        [choice] = (await client.whole(seed=5, max_tokens=3, **fields))["choices"]
        return [entry["logprob"] for entry in choice["logprobs"]["content"]]

    client.engine.processed_logprobs = True
    [choice] = (await client.whole(seed=5, max_tokens=3, temperature=0.5))["choices"]
    context = client.engine.policy.context(client.engine.calls[-1].prompt_token_ids)
    entry, token_id = choice["logprobs"]["content"][0], choice["token_ids"][0]
    assert entry["logprob"] == client.engine.policy.logprob(context, token_id, 0.5)
    assert await logprobs(allowed_token_ids=[7]) == [0.0, 0.0, 0.0]
    client.engine.processed_logprobs = False
    assert all(value < 0 for value in await logprobs(allowed_token_ids=[7]))
