"""Tasks as answers: the server's own rows, with stored results spliced in undecoded."""

from collections.abc import Iterable, Mapping

import msgspec

from polar_gateway.results import Part, ResultStore
from polar_server import lifecycle, tasks
from polar_server.lifecycle import LIVE_TASK, SessionState
from polar_server.nodes import Progress
from polar_server.protocol import SessionView
from polar_server.store.queries import UNEXPLAINED
from polar_server.store.records import Session, Task


def task_status(
    task: Task,
    sessions: list[Session],
    progress: Progress,
    results: ResultStore,
    *,
    with_results: bool,
) -> list[Part]:
    """A TaskStatus. Results stand in the order in which sessions ended while the task is live, and
    in sample order afterwards."""
    ended = [session for session in sessions if session.status is SessionState.ENDED]
    if task.status in LIVE_TASK:
        ended.sort(key=lambda session: (session.ended_at or 0.0, session.sample))
    head = {
        "task_id": task.task_id,
        "status": task.status,
        "total_sessions": len(sessions),
        "completed_sessions": len(ended),
        "result_paths": _paths(ended, results),
        "sessions": [session_view(session, progress) for session in sessions],
    }
    return _with_results(head, task, ended if with_results else [], results)


def task_result(task: Task, sessions: list[Session], results: ResultStore) -> list[Part]:
    """A TaskResult, the callback's body."""
    head = {
        "task_id": task.task_id,
        "status": task.status,
        "result_paths": _paths(sessions, results),
    }
    return _with_results(head, task, sessions, results)


def session_view(session: Session, progress: Progress) -> SessionView:
    """A session without its trajectory; a live one as its node last described it."""
    said = None
    if session.status is SessionState.PLACED:
        said = progress.of(session.node_id, session.attempt_id)
    live = session.status is not SessionState.ENDED
    stage = said.stage if said else "queued"
    return SessionView(
        session_id=session.session_id,
        status=lifecycle.wire_status(session.outcome, stage),
        stage=stage if live else None,
        node_id=session.node_id,
        attempt_id=session.attempt_id or "",
        deadline_at=said.deadline_at if said else None,
        completion_count=said.completion_count if said else session.completion_count,
        reward=session.reward,
        error=session.error,
        verdict=session.verdict,
        failure=session.failure,
    )


def _with_results(
    head: Mapping[str, object], task: Task, ended: list[Session], results: ResultStore
) -> list[Part]:
    document = msgspec.json.encode(head)
    parts: list[Part] = [document[:-1] + b',"results":[']
    for number, session in enumerate(ended):
        if number:
            parts.append(b",")
        if session.result_key is not None:
            parts.append(results.path(session.result_key))
        else:
            parts.append(_unreported(task, session))
    parts.append(b"]}")
    return parts


def _unreported(task: Task, session: Session) -> bytes:
    return msgspec.json.encode(
        tasks.unreported_result(
            task.document,
            session_id=session.session_id,
            attempt_id=session.attempt_id,
            node_id=session.node_id,
            failure=session.failure or UNEXPLAINED,
        )
    )


def _paths(ended: Iterable[Session], results: ResultStore) -> list[str]:
    return [str(results.path(session.result_key)) for session in ended if session.result_key]
