"""The scripted engine is a fair stand-in: where its tokens are fixed, real vLLM answers the same."""

import itertools
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from polar_gateway.testing.engine import ScriptedEngine
from polar_gateway.testing.script import Rule, Script, ScriptedCall, Spelling, Step
from tests.integration.vllm_server import VllmServer

pytestmark = pytest.mark.vllm

TOOLS = [
    {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "read", "description": "Read.", "strict": False}},
]
LOOK = Step(
    think="I should list the files.",
    say="Let me look.",
    calls=[
        ScriptedCall(name="bash", arguments={"command": "ls -la", "more": [1, {"y": None}]}),
        ScriptedCall(name="read", arguments={"path": "ünï ✓.txt"}),
    ],
)
WRITE = Step(calls=[ScriptedCall(name="bash", arguments={})])
DONE = Step(think="Finished.", say="All done: out.txt ✓ was written.")
UNTIDY = (
    '<think>\nhm\n<tool_call>\n{"name":"bash","arguments":{"command":"x"}}\n</tool_call>\nmore',
    "no end of the thinking",
    '<think>\na\n</think>\n\nA</think>B<think>C\n<tool_call>\n{"name": "bash", "arguments": \n</tool_call>',
    '</think>\n\n<tool_call>\n{"arguments": {"a": 1}, "name": "bash"}\n</tool_call>',
    "</think>\n\nsaid <tool_response>x</tool_response>",
)
EVERYTHING = {"model": "tiny", "seed": 7, "logprobs": True, "return_token_ids": True}


def script(tokens: Spelling) -> Script:
    untidy = [
        Rule(match=f"UNTIDY {number}", tokens=tokens, steps=[text])
        for number, text in enumerate(UNTIDY)
    ]
    ending = Rule(match="BYE", tokens=tokens, steps=[Step(say="Bye.", end="<|endoftext|>")])
    return Script(
        rules=[Rule(match="GO", tokens=tokens, steps=[LOOK, WRITE, DONE]), ending, *untidy]
    )


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return {**EVERYTHING, "messages": [{"role": "user", "content": text}], **fields}


async def whole(http: httpx2.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    reply = await http.post("/v1/chat/completions", json=body)
    document: dict[str, Any] = reply.json()
    return document


async def streamed(http: httpx2.AsyncClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    reply = await http.post("/v1/chat/completions", json=body)
    return [json.loads(data) for data in re.findall(r"^data: ({.*)$", reply.text, re.MULTILINE)]


def comparable(document: Any) -> Any:
    """Without what differs from call to call: times, names of calls, probabilities."""
    if isinstance(document, dict):
        moving = {"created", "logprob", "system_fingerprint"}
        return {k: comparable(v) for k, v in document.items() if k not in moving}
    if isinstance(document, list):
        return [comparable(item) for item in document]
    if isinstance(document, str):
        return re.sub(r"^(chatcmpl-(?:tool-)?)?[0-9a-f]{16}$", r"\1NAME", document)
    return document


def summed(events: list[dict[str, Any]]) -> dict[str, Any]:
    """A stream however vLLM cut it into chunks, which depends on how busy it is."""
    found = [choice for event in events for choice in event["choices"]]
    calls: dict[int, list[Any]] = {}
    for piece in itertools.chain(*(c["delta"].get("tool_calls", []) for c in found)):
        name, arguments = (piece["function"].get(k, "") for k in ("name", "arguments"))
        known = calls.setdefault(piece["index"], ["", ""])
        known[0] += name
        known[1] += arguments
    return {
        "prompt_token_ids": events[0]["prompt_token_ids"],
        "token_ids": [i for c in found for i in c.get("token_ids", [])],
        "tokens": [e for c in found if c["logprobs"] for e in c["logprobs"]["content"]],
        "reasoning": "".join(c["delta"].get("reasoning") or "" for c in found),
        "content": "".join(c["delta"].get("content") or "" for c in found),
        "calls": calls,
        "finish_reason": found[-1]["finish_reason"],
        "stop_reason": found[-1]["stop_reason"],
        "sampled": events[-1]["usage"]["completion_tokens"],
        "keys": sorted({key for event in events for key in event}),
    }


class Pair(list[httpx2.AsyncClient]):
    """Clients of the real engine and of the scripted one."""


@pytest.fixture(scope="module")
async def engine(anyio_backend: str) -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(script("canonical")) as running:
        yield running


@pytest.fixture
async def pair(vllm: VllmServer, engine: ScriptedEngine) -> AsyncIterator[Pair]:
    vllm.speak(script("canonical"))
    async with (
        httpx2.AsyncClient(base_url=vllm.url, timeout=60) as real,
        httpx2.AsyncClient(base_url=engine.url) as scripted,
    ):
        yield Pair([real, scripted])


CASES = {
    "tools": ask("GO", tools=TOOLS),
    "no tools": ask("GO"),
    "tools that may not be called": ask("GO", tools=TOOLS, tool_choice="none"),
    "one call at a time": ask("GO", tools=TOOLS, parallel_tool_calls=False),
    "no thinking": ask("GO", tools=TOOLS, chat_template_kwargs={"enable_thinking": False}),
    "cut in a thought": ask("GO", tools=TOOLS, max_tokens=3),
    "cut in a call": ask("GO", tools=TOOLS, max_tokens=30),
    "a stop string": ask("GO", tools=TOOLS, stop=["t me"]),
    "another end of the turn": ask("BYE"),
    "one token that is allowed": ask("GO", allowed_token_ids=[7], max_tokens=3),
    **{f"untidy {n}": ask(f"UNTIDY {n}", tools=TOOLS) for n in range(len(UNTIDY))},
}


@pytest.mark.parametrize("case", CASES)
async def test_whole_answers_are_the_same(pair: Pair, case: str) -> None:
    real, scripted = [comparable(await whole(http, CASES[case])) for http in pair]
    assert scripted == real


@pytest.mark.parametrize("case", CASES)
async def test_streamed_answers_are_the_same(pair: Pair, case: str) -> None:
    real, scripted = [comparable(summed(await streamed(http, CASES[case]))) for http in pair]
    assert scripted == real


REFUSED = {
    "a later system message": [
        {"role": "user", "content": "x"},
        {"role": "system", "content": "y"},
    ],
    "a developer message": [
        {"role": "developer", "content": "y"},
        {"role": "user", "content": "x"},
    ],
    "an unknown role": [{"role": "alien", "content": "y"}],
    "no message": [],
    "too long": [{"role": "user", "content": "word " * 140_000}],
}


@pytest.mark.parametrize("case", REFUSED)
async def test_refusals_are_the_same(pair: Pair, case: str) -> None:
    real, scripted = [await whole(http, {**EVERYTHING, "messages": REFUSED[case]}) for http in pair]
    assert real["error"]["code"] == 400
    assert scripted == real
    body = {**EVERYTHING, "messages": REFUSED[case]}
    rendered = [(await http.post("/v1/chat/completions/render", json=body)).json() for http in pair]
    assert rendered == [real, real]


async def test_history_is_rendered_the_same(pair: Pair) -> None:
    messages = [
        {
            "role": "system",
            "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}],
        },
        {"role": "user", "content": 'é <b>& "q"'},
        {
            "role": "assistant",
            "content": "\n\nhi\n",
            "reasoning_content": "\nr\n",
            "tool_calls": [
                {
                    "id": "1",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"a":1,  "b":"é<"}'},
                },
                {"id": "2", "type": "function", "function": {"name": "f", "arguments": "{oops"}},
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "x"}]},
        {"role": "tool", "tool_call_id": "2", "content": ""},
    ]
    body = {**EVERYTHING, "messages": messages, "tools": TOOLS}
    real, scripted = [(await whole(http, body))["prompt_token_ids"] for http in pair]
    assert scripted == real
    for http in pair:
        rendered = (await http.post("/v1/chat/completions/render", json=body)).json()
        assert rendered["token_ids"] == real


@pytest.mark.parametrize("shown", ["recent", "none", "all", "empty"])
async def test_closed_conversations_are_rendered_the_same_by_every_kind_of_template(
    pair: Pair, shown: str
) -> None:
    messages = [
        {"role": "user", "content": "GO"},
        {"role": "assistant", "content": "a", "reasoning_content": "first"},
        {"role": "user", "content": "on"},
        {"role": "assistant", "content": "b", "reasoning_content": "second"},
    ]
    kwargs = {"history_thinking": shown}
    body = {**EVERYTHING, "messages": messages, "chat_template_kwargs": kwargs}
    closed = {**body, "add_generation_prompt": False}
    for asked in (body, closed):
        real, scripted = [
            (await http.post("/v1/chat/completions/render", json=asked)).json()["token_ids"]
            for http in pair
        ]
        assert scripted == real


async def test_prompts_of_ids_are_answered_the_same_also_from_within_an_answer(pair: Pair) -> None:
    first = await whole(pair[1], CASES["tools"])
    sampled = first["choices"][0]["token_ids"]
    for begun in (0, 3, len(sampled) // 2):
        ids = first["prompt_token_ids"] + sampled[:begun]
        body = {**CASES["tools"], "kv_transfer_params": {"prompt_token_ids": ids}}
        real, scripted = [await whole(http, body) for http in pair]
        assert scripted["prompt_token_ids"] == real["prompt_token_ids"] == ids
        [expected], [told] = real["choices"], scripted["choices"]
        tokenizer = ScriptedEngine().tokenizer
        for rest in (expected, told):  # how the rest is spelled is up to chance
            spelled = tokenizer.decode(sampled[:begun] + rest["token_ids"])
            assert spelled == LOOK.text + "<|im_end|>"
    body = {**EVERYTHING, "messages": [{"role": "user", "content": "x"}]}
    body["kv_transfer_params"] = {"prompt_token_ids": [99_999]}
    real, scripted = [await whole(http, body) for http in pair]
    assert scripted == real


async def test_the_token_routes_say_the_same(pair: Pair) -> None:
    told = []
    for http in pair:
        body = CASES["tools"]
        rendered = (await http.post("/v1/chat/completions/render", json=body)).json()
        generated = (await http.post("/inference/v1/generate", json=rendered)).json()
        asked = {"chat_request": body, "generate_response": generated}
        derendered = (await http.post("/v1/chat/completions/derender", json=asked)).json()
        [choice], [parsed] = generated["choices"], derendered["choices"]
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
        told.append(
            {
                "fields": sorted(generated),
                "of a choice": sorted(choice),
                "versions": choice["weight_versions"],
                "ids": choice["token_ids"],
                "ends": (choice["finish_reason"], choice["stop_reason"]),
                "message": comparable(parsed["message"]),
                "finish_reason": parsed["finish_reason"],
                "parsed ids": parsed["token_ids"],
                "counts": derendered["usage"]["completion_tokens"],
            }
        )
    real, scripted = told
    assert scripted == real


async def test_orders_are_taken_and_confirmed_the_same(pair: Pair) -> None:
    posts: list[tuple[str, dict[str, Any]]] = [
        ("/pause?mode=keep", {}),
        ("/resume", {}),
        ("/update_weight_version", {"new_version": "default"}),
        ("/reset_prefix_cache", {}),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {}}),
    ]
    for path, said in posts:
        real, scripted = [(await http.post(path, json=said)).json() for http in pair]
        assert scripted == real, path
    for path in ("/is_paused", "/weight_info"):
        real, scripted = [(await http.get(path)).json() for http in pair]
        assert scripted == real, path
    for path in ("/pause", "/collective_rpc", "/inference/v1/generate"):
        assert [(await http.get(path)).status_code for http in pair] == [405, 405]


async def test_three_turns_on_real_vllm_are_sampled_tokens_that_spell_the_script(
    vllm: VllmServer,
) -> None:
    vllm.speak(script("random"))
    tokenizer = ScriptedEngine().tokenizer
    messages: list[dict[str, Any]] = [{"role": "user", "content": "GO"}]
    previous: list[int] = []
    async with httpx2.AsyncClient(base_url=vllm.url, timeout=60) as http:
        for step in (LOOK, WRITE, DONE):
            body = {**EVERYTHING, "messages": messages, "tools": TOOLS}
            answer = await whole(http, body)
            [choice] = answer["choices"]
            prompt, sampled = answer["prompt_token_ids"], choice["token_ids"]
            assert tokenizer.decode(sampled) == step.text + "<|im_end|>"
            assert sampled != [*tokenizer.encode(step.text), tokenizer.end_of_turn]
            assert all(entry["logprob"] < 0 for entry in choice["logprobs"]["content"])
            assert prompt[: len(previous)] == previous
            stream = summed(await streamed(http, body))
            assert (stream["prompt_token_ids"], stream["token_ids"]) == (prompt, sampled)
            previous = prompt
            message = choice["message"]
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": "x"}
                for call in message.get("tool_calls", [])
            ]
            messages = [*messages, message, *results]
