"""The unmodified CLIs against a real vLLM: what is delivered is what vLLM says it sampled."""

from pathlib import Path
from typing import Any

import httpx2
import pytest

from polar_gateway.testing.script import ScriptFile
from tests.integration.conftest import DEMO, HARNESSES
from tests.integration.recorder import Recorder
from tests.integration.vllm_server import VllmServer
from tests.polar_gateway.gateway import gateway

pytestmark = [pytest.mark.vllm, pytest.mark.clis, pytest.mark.timeout(240)]


@pytest.mark.parametrize("harness", HARNESSES)
async def test_the_trace_of_a_run_holds_exactly_the_ids_that_vllm_reports(
    tmp_path: Path, packs: Path, vllm: VllmServer, harness: str, demo_task: dict[str, Any]
) -> None:
    vllm.speak(ScriptFile(DEMO / "script.json").current())
    engine = Recorder(vllm.url)
    async with (
        gateway(tmp_path, engine=engine, pack_dir=packs) as node,
        httpx2.AsyncClient(base_url=vllm.url) as http,
    ):
        result = await node.run(
            instruction=demo_task["instruction"],
            agent={"harness": harness, "model_name": "stub-model"},
            runtime={**demo_task["runtime"], "backend": "local", "allow_internet": True},
            evaluator=demo_task["evaluator"],
            remaining_timeout_seconds=120,
        )
        turns = engine.turns
        rendered = await prompt_ids(http, turns[0].request)
    assert (result.status, result.error, result.reward) == ("COMPLETED", None, 1.0)
    assert result.completion_count == len(turns) == 4
    assert result.trajectory is not None
    (trace,) = result.trajectory.traces
    assert trace.prompt_ids == rendered
    context = trace.prompt_ids + trace.response_ids
    for turn in turns:
        assert turn.prompt_token_ids == context[: len(turn.prompt_token_ids)]
    trained = [
        (token, logprob)
        for token, mask, logprob in zip(
            trace.response_ids, trace.loss_mask, trace.response_logprobs or [], strict=True
        )
        if mask
    ]
    assert [token for token, _ in trained] == [t for turn in turns for t in turn.token_ids]
    assert [logprob for _, logprob in trained] == pytest.approx(
        [p for turn in turns for p in turn.logprobs], rel=1e-6
    )
    assert result.verdict is not None
    assert result.verdict.tokens == "all"


async def prompt_ids(http: httpx2.AsyncClient, request: dict[str, Any]) -> list[int]:
    """What vLLM renders of the same request when it is asked for that alone."""
    answer = await http.post("/v1/chat/completions/render", json=request, timeout=60)
    tokens: list[int] = answer.json()["token_ids"]
    return tokens
