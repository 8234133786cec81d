"""Sixteen answers on their way in a real vLLM while its weights become others.

What the spans say is compared with what the two models themselves say of each token.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import httpx2
import pytest

from builders.records import Completion
from polar_gateway.capture.reading import read_session
from polar_gateway.testing.script import Rule, Script, ScriptedCall, Step
from tests.integration.vllm_server import CACHE, Oracle, Question, VllmServer, metric
from tests.polar_gateway.gateway import Gateway, gateway

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

WEIGHTS = {"old": CACHE / "vllm/model", "new": CACHE / "vllm/other-model"}
IN_FLIGHT = 16
LATE = 4
PAUSE = 0.2
TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
LONG = Step(
    think="Some thoughts before. " * 10,
    say="Words and words and words. " * 60,
    calls=[ScriptedCall(name="bash", arguments={"command": "ls -la"})],
)


@asynccontextmanager
async def updating(folder: Path, vllm: VllmServer, **inference: Any) -> AsyncIterator[Gateway]:
    """A gateway before the engine, whose weights are the old ones again afterwards."""
    vllm.speak(Script(rules=[Rule(match="GO", steps=[LONG])]))
    async with gateway(folder, engine=nullcontext(vllm), inference=inference) as node:
        try:
            await order(node, "update", policy_version="old", weights_path=str(WEIGHTS["old"]))
            for number in range(IN_FLIGHT + LATE):
                sessions = f"{node.address.control_url}/sessions"
                await node.http.post(sessions, json={"session_id": f"s{number}"})
            yield node
        finally:
            await order(node, "resume")
            first = {"policy_version": "default", "weights_path": str(WEIGHTS["old"])}
            await order(node, "update", **first)


async def order(node: Gateway, what: str, **body: Any) -> dict[str, Any]:
    url = f"{node.address.control_url}/admin/inference/{what}"
    answer = await node.http.post(url, json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


class Crowd:
    """Harnesses that each ask once."""

    def __init__(self, node: Gateway, vllm: VllmServer) -> None:
        self._node = node
        self._vllm = vllm
        self.answers: dict[int, httpx2.Response] = {}

    async def ask(self, number: int) -> None:
        """Every second one wants a stream."""
        self.answers[number] = await self._node.http.post(
            f"{self._node.address.model_url}/v1/chat/completions",
            headers={"authorization": f"Bearer s{number}"},
            json={
                "model": "m",
                "messages": [{"role": "user", "content": f"GO {number}"}],
                "tools": [TOOL],
                "stream": number % 2 == 1,
            },
            timeout=120,
        )

    async def begin(self, group: anyio.abc.TaskGroup, tokens: int = IN_FLIGHT * 60) -> None:
        """Until all are in flight and the engine has sampled so many tokens for them."""
        began = await self._metric("generation_tokens_total")
        for number in range(IN_FLIGHT):
            group.start_soon(self.ask, number)
        with anyio.fail_after(60):
            while await self._metric("num_requests_running") < IN_FLIGHT:
                assert not self.answers
                await anyio.sleep(PAUSE)
            while await self._metric("generation_tokens_total") < began + tokens:
                await anyio.sleep(PAUSE)

    async def _metric(self, name: str) -> float:
        return await metric(self._node.http, self._vllm.url, name)

    def completions(self, folder: Path) -> list[Completion]:
        """All recorded calls of those who got a whole turn with its tool call."""
        for number, answer in self.answers.items():
            assert answer.status_code == 200, (number, answer.text)
            assert '"tool_calls"' in answer.text, (number, answer.text[-500:])
            assert '"error"' not in answer.text, (number, answer.text[-500:])
        found = [
            completion
            for journal in folder.glob("attempts/*/session.journal")
            for completion in read_session(journal).completions
        ]
        assert len(found) == len(self.answers)
        for completion in found:
            assert completion.delivered
            assert completion.findings == []
            assert completion.response_message["content"].strip() == str(LONG.say).strip()
        return found


def versions(completion: Completion) -> list[str | None]:
    """The policy version of each sampled token."""
    if not completion.versions:
        return [completion.policy_version] * len(completion.sampled_ids)
    spread = [span.version for span in completion.versions for _ in range(span.start, span.end)]
    assert len(spread) == len(completion.sampled_ids)
    return spread


async def check(oracle: Oracle, completions: list[Completion]) -> None:
    """Each token's recorded log probability is that of the weights that its span names."""
    for version, weights in WEIGHTS.items():
        questions = []
        for completion in completions:
            assert completion.logprobs is not None
            own = [at for at, name in enumerate(versions(completion)) if name == version]
            if own:
                questions.append(
                    Question(
                        completion.completion_id,
                        completion.context_ids.tolist(),
                        [completion.prompt_length + at for at in own],
                        [completion.logprobs[at] for at in own],
                    )
                )
        await oracle.confirms(questions, weights)


async def test_aborted_answers_go_on_under_the_new_weights(
    vllm: VllmServer, oracle: Oracle, tmp_path: Path
) -> None:
    async with updating(tmp_path, vllm) as node:
        crowd = Crowd(node, vllm)
        async with anyio.create_task_group() as group:
            with vllm.slow_motion():
                await crowd.begin(group)
                paused = await order(node, "pause?mode=abort&timeout_seconds=60")
            assert paused["inflight"] == 0
            await order(node, "update", policy_version="new", weights_path=str(WEIGHTS["new"]))
            await order(node, "resume")
        completions = crowd.completions(tmp_path)
    for completion in completions:
        (old, start, turn), (new, begins, end) = [
            (span.version, span.start, span.end) for span in completion.versions
        ]
        assert (old, new, start, turn, end) == (
            "old",
            "new",
            0,
            begins,
            len(completion.sampled_ids),
        )
    await check(oracle, completions)


async def test_kept_answers_say_where_their_weights_became_others(
    vllm: VllmServer, oracle: Oracle, tmp_path: Path
) -> None:
    async with updating(tmp_path, vllm, token_route="generate") as node:
        crowd = Crowd(node, vllm)
        async with anyio.create_task_group() as group:
            with vllm.slow_motion():
                await crowd.begin(group)
                paused = await order(node, "pause?mode=keep&timeout_seconds=60")
            assert paused["inflight"] == IN_FLIGHT
            await order(node, "update", policy_version="new", weights_path=str(WEIGHTS["new"]))
            await order(node, "resume")
        completions = crowd.completions(tmp_path)
    for completion in completions:
        assert [span.version for span in completion.versions] == ["old", "new"]
    await check(oracle, completions)


async def test_answers_that_are_waited_for_are_of_one_version_and_those_that_wait_of_the_next(
    vllm: VllmServer, oracle: Oracle, tmp_path: Path
) -> None:
    async with updating(tmp_path, vllm) as node:
        crowd = Crowd(node, vllm)
        async with anyio.create_task_group() as group:

            async def pause() -> None:
                await order(node, "pause?mode=wait&timeout_seconds=120")
                assert len(crowd.answers) == IN_FLIGHT
                await order(node, "update", policy_version="new", weights_path=str(WEIGHTS["new"]))
                await order(node, "resume")

            with vllm.slow_motion():
                await crowd.begin(group)
                group.start_soon(pause)
                await node.until(lambda: is_paused(node))
            for number in range(IN_FLIGHT, IN_FLIGHT + LATE):
                group.start_soon(crowd.ask, number)
        completions = crowd.completions(tmp_path)
    assert all(completion.versions == [] for completion in completions)
    named = sorted(str(completion.policy_version) for completion in completions)
    assert named == ["new"] * LATE + ["old"] * IN_FLIGHT
    await check(oracle, completions)


async def is_paused(node: Gateway) -> bool:
    status = await node.http.get(f"{node.address.control_url}/admin/inference/status")
    paused: bool = status.json()["paused"]
    return paused
