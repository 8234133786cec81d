"""The unmodified CLIs against a gateway with the scripted engine, in Docker and on the bare machine."""

from pathlib import Path
from typing import Any

import pytest

from polar_gateway.protocol import SessionResult
from polar_gateway.testing.engine import Fault, ScriptedEngine
from polar_gateway.testing.script import ScriptFile
from tests.integration.conftest import DEMO, HARNESSES, SHELL_TOOL, part_of
from tests.polar_gateway.gateway import gateway, turns

pytestmark = [pytest.mark.clis, pytest.mark.timeout(180)]


@pytest.fixture(params=["local", pytest.param("docker", marks=pytest.mark.docker)])
def runtime(request: pytest.FixtureRequest, demo_task: dict[str, Any]) -> dict[str, Any]:
    spec = {**demo_task["runtime"], "backend": request.param}
    if request.param == "docker":
        return {**spec, "image": request.getfixturevalue("agent_image")}
    return {**spec, "allow_internet": True}


def session(task: dict[str, Any], harness: str, runtime: dict[str, Any]) -> dict[str, Any]:
    return {
        "instruction": task["instruction"],
        "agent": {"harness": harness, "model_name": "stub-model"},
        "runtime": runtime,
        "evaluator": task["evaluator"],
        "remaining_timeout_seconds": 120,
    }


def trained(result: SessionResult) -> list[int]:
    assert result.trajectory is not None
    return [
        token
        for trace in result.trajectory.traces
        for token, mask in zip(trace.response_ids, trace.loss_mask, strict=True)
        if mask
    ]


@pytest.mark.parametrize("harness", HARNESSES)
async def test_a_cli_repairs_the_repository_and_its_run_is_one_chain_of_the_sampled_tokens(
    tmp_path: Path, packs: Path, harness: str, runtime: dict[str, Any], demo_task: dict[str, Any]
) -> None:
    engine = ScriptedEngine(ScriptFile(DEMO / "script.json"))
    async with gateway(tmp_path, engine=engine, pack_dir=packs) as node:
        result = await node.run(**session(demo_task, harness, runtime))
        calls = turns(node.engine)
    assert (result.status, result.error, result.reward) == ("COMPLETED", None, 1.0)
    assert result.completion_count == len(calls) == 4
    assert len(calls[0].message["tool_calls"]) == 2
    assert all(call.message["reasoning"] for call in calls)
    assert result.trajectory is not None
    (trace,) = result.trajectory.traces
    assert trace.prompt_ids == calls[0].prompt_token_ids
    assert trained(result) == [token for call in calls for token in call.token_ids]
    assert result.verdict is not None
    assert (result.verdict.reward, result.verdict.tokens) == ("graded", "all")
    assert {a.name for a in result.artifacts} >= {"artifacts/test_output.txt", "session.journal"}
    assert any(a.name.startswith("artifacts/native/") for a in result.artifacts)


TASK = r"mistake in calc\.py"
"""In every call of a harness and in none of the gateway's own."""


@pytest.mark.parametrize("harness", SHELL_TOOL)
async def test_a_cli_without_a_part_in_the_demo_repairs_the_repository_as_one_chain(
    tmp_path: Path, packs: Path, harness: str, runtime: dict[str, Any], demo_task: dict[str, Any]
) -> None:
    engine = ScriptedEngine(part_of(SHELL_TOOL[harness]))
    async with gateway(tmp_path, engine=engine, pack_dir=packs) as node:
        result = await node.run(**session(demo_task, harness, runtime))
        calls = turns(node.engine)
    assert (result.status, result.error, result.reward) == ("COMPLETED", None, 1.0)
    assert result.completion_count == len(calls) == 4
    assert len(calls[0].message["tool_calls"]) == 2
    assert result.trajectory is not None
    (trace,) = result.trajectory.traces
    assert trace.prompt_ids == calls[0].prompt_token_ids
    assert trained(result) == [token for call in calls for token in call.token_ids]
    assert any(a.name.startswith("artifacts/native/") for a in result.artifacts)


@pytest.mark.parametrize("harness", HARNESSES)
async def test_a_cli_whose_time_is_up_is_stopped_built_and_graded(
    tmp_path: Path, packs: Path, harness: str, runtime: dict[str, Any], demo_task: dict[str, Any]
) -> None:
    script = ScriptFile(DEMO / "script.json").current()
    engine = ScriptedEngine(script, faults=[Fault(match=TASK, skip=1, times=1000, delay=600)])
    async with gateway(tmp_path, engine=engine, pack_dir=packs) as node:
        result = await node.run(
            **{**session(demo_task, harness, runtime), "remaining_timeout_seconds": 8}
        )
    assert (result.status, result.reward) == ("TIMEOUT", 0.0)
    assert result.completion_count == 1
    assert trained(result)


@pytest.mark.parametrize("harness", HARNESSES)
async def test_a_cli_whose_engine_refuses_every_call_ends_as_a_failure_of_the_engine(
    tmp_path: Path, packs: Path, harness: str, runtime: dict[str, Any], demo_task: dict[str, Any]
) -> None:
    engine = ScriptedEngine(
        faults=[Fault(match=TASK, times=10_000, status=400, message="not today")]
    )
    async with gateway(tmp_path, engine=engine, pack_dir=packs) as node:
        result = await node.run(**session(demo_task, harness, runtime))
    assert result.status == "ERROR"
    assert result.failure is not None
    assert result.failure.boundary == "engine"
    assert "not today" in result.failure.message + result.failure.detail
    assert result.reward is None or result.reward <= 0
