"""Sub-agents: each in a chain of its own, beside the main conversation."""

from pathlib import Path

import pytest

from polar_gateway.testing.script import ScriptedCall, Step
from tests.live.driver import (
    assert_completed,
    assert_recorded,
    assert_sampled_once,
    live,
    rule,
    turn,
)

pytestmark = pytest.mark.clis

WORK = "Count the seeds and write seeds.txt."

ASKS: dict[str, list[Step]] = {
    "codex": [
        Step(calls=[ScriptedCall(name="multi_agent_v1__spawn_agent", arguments={"message": WORK})]),
        Step(
            calls=[
                ScriptedCall(
                    name="multi_agent_v1__wait_agent",
                    arguments={"targets": ['$["agent_id":"([^"]+)"]$'], "timeout_ms": 30_000},
                )
            ]
        ),
    ],
    "claude_code": [
        Step(
            calls=[
                ScriptedCall(
                    name="Agent",
                    arguments={
                        "description": "Count",
                        "prompt": WORK,
                        "subagent_type": "general-purpose",
                    },
                )
            ]
        )
    ],
    "gemini_cli": [
        Step(
            calls=[
                ScriptedCall(
                    name="invoke_agent", arguments={"agent_name": "generalist", "prompt": WORK}
                )
            ]
        )
    ],
    "qwen_code": [
        Step(
            calls=[
                ScriptedCall(
                    name="agent",
                    arguments={
                        "description": "Count",
                        "prompt": WORK,
                        "subagent_type": "general-purpose",
                        "run_in_background": False,
                    },
                )
            ]
        )
    ],
    "opencode": [
        Step(
            calls=[
                ScriptedCall(
                    name="task",
                    arguments={"description": "Count", "prompt": WORK, "subagent_type": "general"},
                )
            ]
        )
    ],
}
"""How the main agent of each CLI that has sub-agents asks one, and waits for it."""

REPORT = Step(think="I report.", say="There are nine seeds.")
REPORTS = {
    "gemini_cli": Step(
        calls=[
            ScriptedCall(
                name="complete_task", arguments={"result": {"response": "There are nine seeds."}}
            )
        ]
    )
}
"""How a sub-agent ends where saying so is not enough."""

TOLD_BY_A_USER_MESSAGE = {"codex"}
"""Who hears of a helper's end in a user message, at which the chat template drops what the main
agent thought before, so that it begins a new chain."""

NAMES_ITS_CHAINS = {"codex", "claude_code", "opencode"}
"""Whose requests say in a header which agent they come from."""


@pytest.mark.parametrize("harness", ASKS)
async def test_a_subagents_turns_are_a_chain_of_their_own(tmp_path: Path, harness: str) -> None:
    ran = await live(
        tmp_path,
        harness,
        rule(
            "Ask a helper",
            turn(harness, "echo ready"),
            *ASKS[harness],
            turn(harness, say="The helper found nine."),
        ),
        rule(
            "Count the seeds",
            turn(harness, "echo nine > seeds.txt", think="I count."),
            REPORTS.get(harness, REPORT),
        ),
        instruction="Ask a helper to count.",
    )
    assert_completed(ran)
    assert (ran.workdir / "seeds.txt").read_text() == "nine\n"
    mine = [call for call in ran.calls if "Ask a helper" in call.prompt]
    theirs = [call for call in ran.calls if "Ask a helper" not in call.prompt]
    assert (len(mine), len(theirs)) == (len(ASKS[harness]) + 2, 2)
    assert "nine seeds" in mine[-1].prompt
    assert_recorded(ran)
    assert_sampled_once(ran)
    assert ran.result.trajectory is not None
    *helpers, main = ran.result.trajectory.traces
    assert main.prompt_ids == mine[0].prompt_token_ids
    chains = [
        {f"chatcmpl-{span['completion_id']}" for span in trace.metadata["spans"]}
        for trace in (*helpers, main)
    ]
    asked, helped = ({call.request_id for call in calls} for calls in (mine, theirs))
    assert helped in chains
    assert all(chain <= asked for chain in chains if chain != helped)
    assert len(chains) == (3 if harness in TOLD_BY_A_USER_MESSAGE else 2)
    named = {tuple(one.chain.items()) for one in ran.completions}
    assert len(named) == (2 if harness in NAMES_ITS_CHAINS else 1)
