"""What a node does first: clear away what an earlier life of it left behind, and report it.

Every attempt has a folder; its dispatch document is there from the moment the node accepts it, and
`ended` appears once its result is safe in the outbox. A folder without `ended` is a session that
was cut off: it ends as an infrastructure failure, with the traces that its journal holds.
"""

import logging
from pathlib import Path

import msgspec

from builders.records import CompletionSession
from polar_gateway import stages
from polar_gateway.capture.reading import read_session
from polar_gateway.errors import BoundaryError, Failure, boundary
from polar_gateway.protocol import Finding, SessionDispatchRequest, SessionResult
from polar_gateway.runtimes.trees import remove_tree
from polar_gateway.verdicts import masked, verdict

logger = logging.getLogger(__name__)

DISPATCH = "dispatch.json"
ENDED = "ended"
JOURNAL = "session.journal"


def accept(folder: Path, dispatch: SessionDispatchRequest) -> None:
    """Make an attempt's folder and put its document there."""
    folder.mkdir(parents=True)
    part = folder / f".{DISPATCH}.part"
    part.write_bytes(msgspec.json.encode(dispatch))
    part.rename(folder / DISPATCH)


def was_accepted(folder: Path) -> bool:
    """Whether this node took the attempt on, in this life or an earlier one."""
    return (folder / DISPATCH).exists()


def sweep(attempts: Path) -> None:
    """Remove the runtimes' files that nobody lives to remove; for a node that runs nothing yet."""
    for leftover in attempts.glob("*/runtime-*"):
        try:
            remove_tree(leftover)
        except OSError as error:
            logger.warning("%s could not be removed: %s", leftover, error)


def mark_ended(folder: Path) -> None:
    (folder / ENDED).touch()


def unfinished(attempts: Path) -> list[tuple[Path, SessionDispatchRequest]]:
    """The attempts that were cut off, oldest first."""
    found = []
    for document in sorted(attempts.glob(f"*/{DISPATCH}"), key=lambda path: path.stat().st_mtime):
        if (document.parent / ENDED).exists():
            continue
        try:
            found.append(
                (
                    document.parent,
                    msgspec.json.decode(document.read_bytes(), type=SessionDispatchRequest),
                )
            )
        except msgspec.DecodeError as error:
            logger.warning("%s was cut short and tells nothing: %s", document, error)
    return found


def result_of(
    folder: Path, dispatch: SessionDispatchRequest, node_id: str, reason: str
) -> SessionResult:
    """The result of an attempt that was cut off, from what its journal holds."""
    failure = Failure(boundary="lost_node", message=reason, infra=True)
    journal = folder / JOURNAL
    completions = CompletionSession(session_id=dispatch.session_id, task_id=dispatch.task_id)
    trajectory = None
    findings = [Finding(code="cut_off", message=reason)]
    if journal.exists():
        try:
            with boundary("capture", f"the journal {journal.name} cannot be read"):
                completions = read_session(journal)
            trajectory = stages.build(dispatch, completions)
        except BoundaryError as error:
            findings.append(Finding(code="not_rebuilt", message=str(error)))
    said = verdict(
        completions,
        trajectory,
        failure=failure,
        graded=False,
        notes=findings,
        strict=stages.strict(dispatch),
    )
    if trajectory is not None:
        trajectory = masked(trajectory, said)
        trajectory.status = "ERROR"
        trajectory.error = failure.message
    return SessionResult(
        session_id=dispatch.session_id,
        task_id=dispatch.task_id,
        attempt_id=dispatch.attempt_id,
        status="ERROR",
        trajectory=trajectory,
        node_id=node_id,
        error=failure.message,
        metadata=dispatch.metadata,
        verdict=said,
        failure=failure,
        completion_count=len(completions.completions),
    )
