"""What a person sees of tasks: live progress while they run, a table when they have ended.

Progress goes to stderr, a bar per session on a terminal and a line per change elsewhere, so that
stdout holds what was asked for and nothing else.
"""

import time
from types import TracebackType

import msgspec
from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from polar_client.client import RolloutStatus
from polar_gateway.protocol import SessionResult, Verdict
from polar_server.protocol import SessionView, TaskStatus

PATH = ("REGISTERED", "INITIALIZING", "READY", "RUNNING", "POST_RUN", "BUILDING", "EVALUATING")
"""A session's public states in order; how far along it is, is how far a bar is drawn."""
LONGEST_STATE = max(map(len, PATH))
STYLES = {"COMPLETED": "green", "TIMEOUT": "yellow", "ERROR": "red", "RUNNING": "cyan"}


def output() -> Console:
    """For stdout; wide where no terminal says how wide it is, so that tables stay whole in files."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


class SessionSummary(msgspec.Struct, kw_only=True, frozen=True):
    """One ended session in numbers."""

    session_id: str
    status: str
    reward: float | None
    completions: int
    traces: int
    prompt_tokens: int
    trainable_tokens: int
    verdict: str
    error: str | None


def summarize(result: SessionResult) -> SessionSummary:
    traces = result.trajectory.traces if result.trajectory else []
    return SessionSummary(
        session_id=result.session_id,
        status=result.status,
        reward=result.reward,
        completions=result.completion_count,
        traces=len(traces),
        prompt_tokens=sum(len(trace.prompt_ids) for trace in traces),
        trainable_tokens=sum(sum(trace.loss_mask) for trace in traces),
        verdict=verdict_line(result.verdict),
        error=result.error,
    )


def verdict_line(verdict: Verdict | None) -> str:
    """`graded, all tokens`, and in brackets what is to be known about it."""
    if verdict is None:
        return ""
    codes = [finding.code for finding in verdict.findings if finding.level != "note"]
    said = f"{verdict.reward}, {verdict.tokens} tokens"
    return f"{said} ({', '.join(codes)})" if codes else said


def result_table(rows: list[tuple[str, SessionSummary]]) -> Table:
    """One line a session; the first column is the harness, or whatever tells the rows apart."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("harness", no_wrap=True)
    table.add_column("status", no_wrap=True)
    for number in ("reward", "model calls", "traces", "prompt tokens", "trainable tokens"):
        table.add_column(number, justify="right")
    table.add_column("verdict", overflow="fold")
    for label, row in rows:
        table.add_row(
            label,
            Text(row.status, STYLES.get(row.status, "")),
            _number(row.reward, "none"),
            str(row.completions),
            str(row.traces),
            str(row.prompt_tokens),
            str(row.trainable_tokens),
            row.verdict,
        )
    return table


def _number(reward: float | None, none: str = "") -> str:
    return none if reward is None else str(round(reward, 4))


def session_table(sessions: list[SessionView]) -> Table:
    """The sessions of a task that still runs."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("session", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("node")
    table.add_column("model calls", justify="right")
    table.add_column("reward", justify="right")
    for session in sessions:
        table.add_row(
            session.session_id,
            Text(session.status, STYLES.get(session.status, "")),
            session.node_id or "",
            str(session.completion_count),
            _number(session.reward),
        )
    return table


def overview(status: RolloutStatus) -> list[RenderableType]:
    """The nodes and the tasks of a server."""
    nodes = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("node", "where", "state", "running", "harnesses", "runtimes"):
        nodes.add_column(heading)
    for node in status.nodes:
        state = "draining" if node.draining else "healthy" if node.healthy else "lost"
        running = f"{node.metrics.run_inflight} of {node.max_run_workers}"
        nodes.add_row(
            node.node_id,
            node.gateway_url,
            Text(state, "green" if state == "healthy" else "yellow"),
            running,
            ", ".join(node.offers.harnesses),
            ", ".join(node.offers.runtimes),
        )
    tasks = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("task", "status"):
        tasks.add_column(heading)
    for task_id, task_state in status.tasks.items():
        tasks.add_row(task_id, task_state)
    return [
        nodes if status.nodes else "no node has registered",
        tasks if status.tasks else "no tasks",
    ]


class Progress:
    """Follows the sessions of one or more tasks; feed it every status that changed.

    `labels` gives each task a short name; its sessions are numbered from 1.
    """

    def __init__(self, console: Console, labels: dict[str, str]) -> None:
        self._console = console
        self._labels = labels
        self._lines: dict[tuple[str, int], _Line] = {}
        self._live = (
            Live(get_renderable=self._draw, console=console, refresh_per_second=4)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> "Progress":
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()

    def update(self, task: TaskStatus) -> None:
        for number, session in enumerate(task.sessions, start=1):
            label = self._labels[task.task_id]
            line = self._lines.setdefault((label, number), _Line(f"{label} {number}"))
            changed = line.follow(session, time.monotonic())
            if changed and self._live is None:
                self._console.print(line.plain(), highlight=False, soft_wrap=True)

    def _draw(self) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        order = list(self._labels.values())
        for _, line in sorted(self._lines.items(), key=lambda item: (order.index(item[0][0]), item[0][1])):
            grid.add_row(*line.cells(time.monotonic()))
        return grid


class _Line:
    """One session's line."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.session: SessionView | None = None
        self.began: float | None = None
        self.ended: float | None = None

    def follow(self, session: SessionView, now: float) -> bool:
        """Take the news; tell whether the public state changed."""
        changed = self.session is None or session.status != self.session.status
        self.session = session
        if self.began is None and session.status != PATH[0]:
            self.began = now
        if self.ended is None and session.status not in PATH:
            self.ended = now
        return changed

    def plain(self) -> str:
        assert self.session is not None
        said = f"{self.label}: {self.session.status}"
        if self.ended is not None:
            said += f", {self._calls()}"
            if self.session.reward is not None:
                said += f", reward {_number(self.session.reward)}"
            if self.session.error:
                said += f": {self.session.error}"
        return said

    def cells(self, now: float) -> tuple[RenderableType, ...]:
        assert self.session is not None
        state = self.session.status
        done = PATH.index(state) if state in PATH else len(PATH)
        seconds = "" if self.began is None else f"{(self.ended or now) - self.began:.0f} s"
        reward = "" if self.session.reward is None else f"reward {_number(self.session.reward)}"
        return (
            Text(self.label, "bold"),
            ProgressBar(
                total=len(PATH),
                completed=done,
                width=21,
                complete_style="cyan",
                finished_style=STYLES.get(state, "green"),
            ),
            Text(state.ljust(LONGEST_STATE), STYLES.get(state, "")),
            Text(self._calls()),
            Text(seconds, "dim"),
            Text(reward or (self.session.error or "")[:60]),
        )

    def _calls(self) -> str:
        assert self.session is not None
        count = self.session.completion_count
        return f"{count} model call" if count == 1 else f"{count} model calls"
