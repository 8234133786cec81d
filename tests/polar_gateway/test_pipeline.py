"""Sessions from dispatch to result, with real processes and a scripted engine."""

import os
import sys
from pathlib import Path

import anyio
import pytest

from polar_gateway import recovery
from polar_gateway.protocol import SessionResult
from polar_gateway.testing.engine import Fault, ScriptedEngine
from tests.polar_gateway.gateway import (
    MINI_AGENT,
    THREE_TURNS,
    Gateway,
    call,
    gateway,
    script,
    turns,
)

AGENT = f"{sys.executable} {MINI_AGENT}"


def codes(result: SessionResult) -> set[str]:
    assert result.verdict is not None
    return {finding.code for finding in result.verdict.findings}


async def test_a_three_turn_run_is_one_trace_of_exactly_the_sampled_tokens(tmp_path: Path) -> None:
    async with gateway(tmp_path) as node:
        result = await node.run()
        calls = turns(node.engine)
    assert (result.status, result.error, result.reward) == ("COMPLETED", None, 1.0)
    assert result.trajectory is not None
    (trace,) = result.trajectory.traces
    assert trace.prompt_ids == calls[0].prompt_token_ids
    sampled = [token for c in calls for token in c.token_ids]
    trained = [t for t, mask in zip(trace.response_ids, trace.loss_mask, strict=True) if mask]
    assert trained == sampled
    assert trace.response_logprobs is not None
    said = [p for p, mask in zip(trace.response_logprobs, trace.loss_mask, strict=True) if mask]
    assert said == pytest.approx([p for c in calls for p in c.logprobs], abs=1e-5)
    assert trace.reward == 1.0
    assert result.verdict is not None
    assert (result.verdict.reward, result.verdict.tokens) == ("graded", "all")
    assert "unisolated" in codes(result)


async def test_the_run_of_the_harness_is_kept(tmp_path: Path) -> None:
    async with gateway(tmp_path) as node:
        result = await node.run()
    names = {artifact.name for artifact in result.artifacts}
    assert {"artifacts/agent.stdout.log", "session.journal"} <= names
    kept = {a.name: Path(a.path) for a in result.artifacts}
    assert "All done." in kept["artifacts/agent.stdout.log"].read_text()


async def test_a_session_past_its_time_is_built_and_graded_and_is_a_timeout(tmp_path: Path) -> None:
    slow = script("First." + call("true"), "Then." + call("sleep 600 & setsid sleep 600"), "Never.")
    async with gateway(tmp_path, slow) as node:
        result = await node.run(remaining_timeout_seconds=2.5)
    assert result.status == "TIMEOUT"
    assert result.failure is None
    assert result.reward == 0.0
    assert result.trajectory is not None
    assert sum(map(sum, (t.loss_mask for t in result.trajectory.traces))) > 0
    assert not await processes("sleep 600")


async def test_agent_timeout_in_the_metadata_lowers_the_bound(tmp_path: Path) -> None:
    slow = script("Then." + call("sleep 601"), "Never.")
    async with gateway(tmp_path, slow) as node:
        result = await node.run(metadata={"agent_timeout": 1.5, "group_id": "g7"})
    assert result.status == "TIMEOUT"
    assert result.metadata["group_id"] == "g7"


async def test_a_harness_that_crashes_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    crash = {"harness": "shell", "custom_shell": {"command": "echo dying >&2; exit 3"}}
    async with gateway(tmp_path) as node:
        result = await node.run(agent=crash)
    assert result.status == "ERROR"
    assert result.failure is not None
    assert (result.failure.boundary, result.failure.infra) == ("harness", False)
    assert "dying" in result.failure.detail
    assert result.metadata["agent_result"]["return_code"] == 3
    assert result.reward == 0.0
    assert result.verdict is not None
    assert [f.numbers for f in result.verdict.findings if f.code == "harness_crash"] == [
        {"return_code": 3}
    ]


async def test_a_failed_session_is_never_rewarded(tmp_path: Path) -> None:
    agent = Gateway(ScriptedEngine(), "").document()["agent"]
    agent["custom_shell"]["command"] += "; exit 1"
    graded = {
        "strategy": "test_on_output",
        "config": {"test_command": "echo PASSED everything", "expected": {"everything": "PASSED"}},
    }
    async with gateway(tmp_path) as node:
        result = await node.run(agent=agent, evaluator=graded)
    assert (result.status, result.reward) == ("ERROR", 0.0)
    assert "reward_withheld" in codes(result)


async def test_a_session_that_a_trainer_is_strict_about_is_masked_and_not_rewarded(
    tmp_path: Path,
) -> None:
    builder = {"strategy": "prefix_merging", "config": {"strict": ["unisolated"]}}
    async with gateway(tmp_path) as node:
        result = await node.run(builder=builder)
    assert (result.status, result.reward) == ("ERROR", 0.0)
    assert result.failure is not None
    assert (result.failure.boundary, result.failure.infra) == ("capture", False)
    assert "unisolated" in result.failure.message
    assert result.verdict is not None
    assert (result.verdict.reward, result.verdict.tokens) == ("graded", "none")
    assert result.trajectory is not None
    (trace,) = result.trajectory.traces
    assert set(trace.loss_mask) == {0}
    assert trace.metadata["mask_reason"] == "unisolated"


async def test_a_prepare_action_that_fails_ends_the_session_before_the_agent(
    tmp_path: Path,
) -> None:
    failing = {
        "backend": "local",
        "prepare": [{"type": "exec", "command": "echo no such repo >&2; exit 2"}],
    }
    async with gateway(tmp_path) as node:
        result = await node.run(runtime=failing)
        assert turns(node.engine) == []
    assert result.failure is not None
    assert result.failure.boundary == "prepare"
    assert "prepare[0]" in result.failure.message
    assert "no such repo" in result.failure.detail
    assert result.verdict is not None
    assert result.verdict.tokens == "none"


async def test_prepare_runs_again_as_often_as_it_may(tmp_path: Path) -> None:
    flaky = "test -e $SESSION_DIR/once || { touch $SESSION_DIR/once; exit 1; }"
    spec = {
        "backend": "local",
        "prepare": [{"type": "exec", "command": flaky, "max_attempts": 2}],
    }
    async with gateway(tmp_path) as node:
        assert (await node.run(runtime=spec)).status == "COMPLETED"


async def test_uploads_reach_the_inside_and_only_from_permitted_folders(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "data.txt").write_text("payload")
    upload = {
        "type": "upload_file",
        "source": str(shared / "data.txt"),
        "target": "/polar/session/d.txt",
    }
    stolen = {**upload, "source": "/etc/hostname"}
    see = {"harness": "shell", "custom_shell": {"command": "cat $SESSION_DIR/d.txt"}}
    async with gateway(tmp_path / "node", upload_roots=[shared]) as node:
        seen = await node.run("s1", agent=see, runtime={"backend": "local", "prepare": [upload]})
        refused = await node.run("s2", agent=see, runtime={"backend": "local", "prepare": [stolen]})
    kept = {a.name: Path(a.path) for a in seen.artifacts}
    assert kept["artifacts/agent.stdout.log"].read_text() == "payload"
    assert refused.failure is not None
    assert "upload_roots" in refused.failure.message


async def test_the_environment_is_the_one_that_agents_know(tmp_path: Path) -> None:
    show = {"harness": "shell", "custom_shell": {"command": "env"}, "env": {"MINE": "2"}}
    async with gateway(tmp_path) as node:
        result = await node.run(agent=show, runtime={"backend": "local", "env": {"THEIRS": "1"}})
    log = {a.name: Path(a.path) for a in result.artifacts}["artifacts/agent.stdout.log"].read_text()
    env = dict(line.split("=", 1) for line in log.splitlines() if "=" in line)
    assert env["OPENAI_BASE_URL"] == env["ANTHROPIC_BASE_URL"] + "/v1"
    assert env["GOOGLE_API_URL"] == env["ANTHROPIC_BASE_URL"]
    assert env["OPENAI_API_KEY"] == env["ANTHROPIC_API_KEY"] == env["GOOGLE_API_KEY"]
    assert env["OPENAI_API_KEY"] not in (env["SESSION_ID"], "s1")
    assert (env["SESSION_ID"], env["TASK_ID"]) == ("s1", "t1")
    assert {"SESSION_DIR", "ARTIFACTS_DIR", "LOGS_DIR", "AGENT_LOG_DIR"} <= env.keys()
    assert (env["THEIRS"], env["MINE"]) == ("1", "2")


@pytest.mark.parametrize("stage", ["init", "running"])
async def test_cancelling_ends_a_session_in_any_stage_within_two_seconds(
    tmp_path: Path, stage: str
) -> None:
    spec = {"backend": "local", "prepare": [{"type": "exec", "command": "sleep 602"}]}
    slow = script("Then." + call("sleep 602"), "Never.")
    async with gateway(tmp_path, slow) as node:
        await node.dispatch(**({"runtime": spec} if stage == "init" else {}))
        await node.until_stage(stage)
        await anyio.sleep(0.5)
        with anyio.fail_after(2):
            await node.http.delete(f"{node.address.control_url}/sessions/s1")
            result = await node.result()
    assert (result.status, result.error) == ("ERROR", "session cancelled")
    assert result.failure is not None
    assert result.failure.boundary == "cancelled"
    assert not await processes("sleep 602")


async def test_stages_have_limits_of_their_own(tmp_path: Path) -> None:
    slow = script("Then." + call("sleep 0.6"), "Done.")
    peak = {"run_inflight": 0, "ready_depth": 0, "init_inflight": 0}
    async with gateway(
        tmp_path, slow, max_init_workers=2, max_ready_sessions=2, max_run_workers=1
    ) as node:
        ids = [f"s{i}" for i in range(5)]
        for session_id in ids:
            await node.dispatch(session_id)
        while len(node.results) < len(ids):
            health = (await node.http.get(f"{node.address.control_url}/health")).json()
            for name in peak:
                peak[name] = max(peak[name], health["metrics"][name])
            held = health["metrics"]["ready_depth"] + health["metrics"]["init_inflight"]
            assert held <= 2
            await anyio.sleep(0.02)
    assert peak["run_inflight"] == 1
    assert all(result.status == "COMPLETED" for result in node.results.values())


async def test_a_fresh_runtime_grades_the_workdir_and_nothing_else_of_the_agent(
    tmp_path: Path,
) -> None:
    sneaky = script("I cheat." + call("echo ok > work.txt; echo cheat > $HOME/cheat"), "Done.")
    grade = {
        "strategy": "test_on_output",
        "refresh_runtime": True,
        "config": {
            "test_command": "test ! -e $HOME/cheat && test -e work.txt && echo PASSED clean",
            "expected": {"clean": "PASSED"},
        },
    }
    async with gateway(tmp_path, sneaky) as node:
        result = await node.run(evaluator=grade)
    assert result.reward == 1.0, result
    assert "graded_in_agent_runtime" not in codes(result)


async def test_an_engine_that_is_gone_is_blamed_before_the_harness(tmp_path: Path) -> None:
    engine = ScriptedEngine(THREE_TURNS)
    async with gateway(tmp_path, engine=engine) as node:
        engine.faults.append(Fault(times=1000, status=500))
        result = await node.run()
    assert result.status == "ERROR"
    assert result.failure is not None
    assert (result.failure.boundary, result.failure.infra) == ("engine", True)
    assert result.reward is None


async def test_a_session_without_a_model_call_has_nothing_to_train_on(tmp_path: Path) -> None:
    idle = {"harness": "shell", "custom_shell": {"command": "true"}}
    async with gateway(tmp_path) as node:
        result = await node.run(agent=idle)
    assert result.status == "ERROR"
    assert "no_completions" in codes(result)


async def test_the_key_of_a_session_is_in_nothing_that_is_reported(tmp_path: Path) -> None:
    telling = {"command": "echo $OPENAI_API_KEY; echo $OPENAI_API_KEY >&2; sleep 0.5; exit 1"}
    async with gateway(tmp_path) as node:
        await node.dispatch(agent={"harness": "shell", "custom_shell": telling})
        listing = await node.http.get(f"{node.address.control_url}/sessions")
        result = await node.result()
    assert b"sk-polar-" not in listing.content
    assert b"sk-polar-" not in b"".join(node.raw)
    assert result.failure is not None
    assert "[session key]" in result.failure.detail


async def test_a_node_that_is_shut_down_reports_its_sessions_before_it_goes(tmp_path: Path) -> None:
    slow = script("Then." + call("sleep 604"), "Never.")
    async with gateway(tmp_path, slow) as node:
        await node.dispatch()
        await node.until(lambda: runs("sleep 604"))
        node.shut_down()
        result = await node.result()
        await node.down.wait()
    assert result.failure is not None
    assert (result.failure.boundary, result.failure.infra) == ("lost_node", True)
    assert result.completion_count == 1
    assert recovery.unfinished(tmp_path / "attempts") == []
    assert not await processes("sleep 604")


async def test_the_output_of_a_prepare_action_does_not_tell_the_key(tmp_path: Path) -> None:
    spec = {"backend": "local", "prepare": [{"type": "exec", "command": "env; exit 1"}]}
    async with gateway(tmp_path) as node:
        await node.run(runtime=spec)
    assert b"[session key]" in node.raw[0]
    assert b"sk-polar-" not in node.raw[0]


async def test_what_an_agent_names_its_files_cannot_break_its_result(tmp_path: Path) -> None:
    odd = (
        "python3 -c \"import os; os.chdir('$HOME'); os.makedirs('.codex/sessions');"
        "open(b'.codex/sessions/\\xff', 'w')\"; "
        "python3 -c \"import os; [(os.mkdir('d'), os.chdir('d')) for _ in range(1500)]\""
    )
    agent = {"harness": "shell", "custom_shell": {"command": f"{odd}; {AGENT}"}}
    async with gateway(tmp_path) as node:
        result = await node.run(agent=agent)
    assert (result.status, result.error) == ("COMPLETED", None)
    assert not list((tmp_path / "attempts").glob("*/runtime-*"))


async def test_a_request_that_had_to_be_refused_fails_the_session_however_its_harness_ends(
    tmp_path: Path,
) -> None:
    asking = (
        "curl -s -o /dev/null $ANTHROPIC_BASE_URL/v1/messages -H x-api-key:$ANTHROPIC_API_KEY "
        """-d '{"model":"m","max_tokens":9,"messages":[{"role":"user","content":[{"type":"document","""
        """"source":{"type":"base64","media_type":"application/pdf","data":"aGk="}}]}]}'; true"""
    )
    asking += f"; {sys.executable} {MINI_AGENT}"
    async with gateway(tmp_path) as node:
        result = await node.run(agent={"harness": "shell", "custom_shell": {"command": asking}})
    assert (result.status, result.reward) == ("ERROR", 0.0)
    assert result.failure is not None
    assert "application/pdf" in result.failure.message


async def test_a_journal_that_cannot_be_written_fails_its_session_and_no_other(
    tmp_path: Path,
) -> None:
    slow = script("Then." + call("sleep 2"), "Done.")
    async with gateway(tmp_path, slow) as node:
        await node.dispatch("s1")
        await node.dispatch("s2")
        await node.until_stage("running", "s1")
        await node.until(lambda: calls_of(node, 2))
        fill(tmp_path / "attempts" / "att-s1" / "session.journal")
        broken, whole = await node.result("s1"), await node.result("s2")
    assert (broken.status, whole.status) == ("ERROR", "COMPLETED")
    assert broken.failure is not None
    assert broken.failure.boundary == "capture"


async def test_a_session_whose_journal_is_full_can_still_be_cancelled(tmp_path: Path) -> None:
    slow = script("Then." + call("sleep 603"), "Never.")
    async with gateway(tmp_path, slow) as node:
        await node.dispatch()
        await node.until_stage("running")
        await node.until(lambda: calls_of(node, 1))
        fill(tmp_path / "attempts" / "att-s1" / "session.journal")
        deleted = await node.http.delete(f"{node.address.control_url}/sessions/s1")
        result = await node.result()
    assert deleted.status_code == 200
    assert result.error == "session cancelled"


async def test_a_result_that_cannot_be_kept_costs_no_other_session_and_waits_for_the_next_start(
    tmp_path: Path,
) -> None:
    slow = script("Then." + call("sleep 1"), "Done.")
    outbox, away = tmp_path / "outbox", tmp_path / "away"
    async with gateway(tmp_path, slow) as node:
        await node.dispatch("s1")
        await node.until(lambda: calls_of(node, 1))
        outbox.rename(away)
        outbox.touch()
        await node.until(lambda: gone(node, "s1"))
        outbox.unlink()
        away.rename(outbox)
        assert (await node.run("s2")).status == "COMPLETED"
        assert "s1" not in node.results
    assert [d.session_id for _, d in recovery.unfinished(tmp_path / "attempts")] == ["s1"]


async def runs(command: str) -> bool:
    return bool(await processes(command))


async def gone(node: Gateway, session_id: str) -> bool:
    listing = await node.http.get(f"{node.address.control_url}/sessions")
    return session_id not in [session["session_id"] for session in listing.json()["sessions"]]


async def calls_of(node: Gateway, count: int) -> bool:
    return len([call for call in turns(node.engine) if call.finished]) >= count


def fill(journal: Path) -> None:
    """Have every further write to the open journal fail, as on a full disk."""
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            if descriptor.resolve() == journal.resolve():
                full = os.open("/dev/full", os.O_WRONLY)
                os.dup2(full, int(descriptor.name))
                os.close(full)
        except OSError:
            continue


async def processes(wanted: str) -> list[str]:
    """Command lines on this machine that contain `wanted`, zombies left out."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if wanted in line and "pytest" not in line:
            found.append(line)
    return found
