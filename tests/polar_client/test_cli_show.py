import io

import msgspec
from rich.console import Console

from builders.records import Trace, Trajectory
from polar_client.cli.show import (
    Progress,
    overview,
    result_table,
    session_table,
    summarize,
    verdict_line,
)
from polar_client.client import RolloutStatus
from polar_gateway.protocol import (
    Finding,
    GatewayNodeInfo,
    NodeOffers,
    NodeStageMetrics,
    SessionResult,
    Verdict,
)
from polar_server.protocol import SessionView, TaskStatus

TRACES = [
    Trace(prompt_ids=[1, 2, 3], response_ids=[4, 5], loss_mask=[1, 0]),
    Trace(prompt_ids=[1], response_ids=[4, 5], loss_mask=[1, 1]),
]


def plain(*renderables: object) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(*renderables)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def result(**changes: object) -> SessionResult:
    base = SessionResult(
        session_id="s-1",
        task_id="t",
        status="COMPLETED",
        reward=1.0,
        completion_count=4,
        trajectory=Trajectory(traces=TRACES),
        verdict=Verdict(reward="graded", tokens="all"),
    )
    return msgspec.structs.replace(base, **changes)


def test_a_summary_counts_traces_prompt_tokens_and_trainable_tokens() -> None:
    summary = summarize(result())
    assert (summary.traces, summary.prompt_tokens, summary.trainable_tokens) == (2, 4, 3)


def test_a_session_that_left_no_trajectory_counts_nothing() -> None:
    summary = summarize(result(trajectory=None, verdict=None, reward=None))
    assert (summary.traces, summary.prompt_tokens, summary.verdict) == (0, 0, "")


def test_a_verdict_names_its_findings_and_leaves_notes_out() -> None:
    findings = [Finding(code="unisolated"), Finding(code="network_host", level="note")]
    assert verdict_line(Verdict(reward="graded", tokens="all", findings=findings)) == (
        "graded, all tokens (unisolated)"
    )


def test_the_table_tells_no_reward_from_a_reward_of_zero() -> None:
    rows = [("codex", summarize(result(reward=None))), ("pi", summarize(result(reward=0.0)))]
    head, codex, pi = plain(result_table(rows)).splitlines()
    assert head.split()[:3] == ["harness", "status", "reward"]
    assert codex.split()[:3] == ["codex", "COMPLETED", "none"]
    assert pi.split()[:3] == ["pi", "COMPLETED", "0.0"]


def test_a_running_task_shows_where_its_sessions_are() -> None:
    view = SessionView(session_id="s-1", status="RUNNING", node_id="node-a", completion_count=2)
    assert plain(session_table([view])).splitlines()[1].split() == ["s-1", "RUNNING", "node-a", "2"]


def test_the_overview_names_nodes_with_what_they_offer_and_tasks_with_their_status() -> None:
    node = GatewayNodeInfo(
        node_id="node-a",
        gateway_url="http://127.0.0.1:8081",
        offers=NodeOffers(harnesses=["codex"], runtimes=["docker"]),
        metrics=NodeStageMetrics(run_inflight=1),
    )
    said = plain(*overview(RolloutStatus(tasks={"t-1": "running"}, nodes=[node])))
    assert "node-a  http://127.0.0.1:8081  healthy  1 of 2   codex      docker" in said
    assert "t-1   running" in said


def watched(*views: SessionView) -> TaskStatus:
    return TaskStatus(
        task_id="t", status="running", total_sessions=len(views), completed_sessions=0, sessions=list(views)
    )


def test_progress_off_a_terminal_is_a_line_per_change_of_state() -> None:
    file = io.StringIO()
    with Progress(Console(file=file), {"t": "codex"}) as progress:
        progress.update(watched(SessionView(session_id="s-1", status="REGISTERED")))
        progress.update(watched(SessionView(session_id="s-1", status="RUNNING")))
        progress.update(watched(SessionView(session_id="s-1", status="RUNNING", completion_count=1)))
        progress.update(
            watched(SessionView(session_id="s-1", status="COMPLETED", completion_count=3, reward=1.0))
        )
    assert file.getvalue().splitlines() == [
        "codex 1: REGISTERED",
        "codex 1: RUNNING",
        "codex 1: COMPLETED, 3 model calls, reward 1.0",
    ]


def test_progress_says_why_a_session_failed() -> None:
    file = io.StringIO()
    with Progress(Console(file=file), {"t": "codex"}) as progress:
        progress.update(watched(SessionView(session_id="s-1", status="ERROR", error="no such image")))
    assert file.getvalue() == "codex 1: ERROR, 0 model calls: no such image\n"


def test_progress_on_a_terminal_draws_a_bar_per_session() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120)
    with Progress(console, {"t": "codex"}) as progress:
        progress.update(
            watched(
                SessionView(session_id="s-1", status="RUNNING", completion_count=1),
                SessionView(session_id="s-2", status="COMPLETED", reward=1.0),
            )
        )
    drawn = file.getvalue()
    assert "codex 1" in drawn
    assert "codex 2" in drawn
    assert "1 model call" in drawn
    assert "━" in drawn
