"""Whether a session may be trained on, said in findings. Pure."""

from collections import Counter
from typing import Literal

from builders.eligible import DISQUALIFYING
from builders.records import CompletionSession, Trajectory
from polar_gateway.errors import Failure
from polar_gateway.protocol import Finding, Verdict


def verdict(
    session: CompletionSession,
    trajectory: Trajectory | None,
    *,
    failure: Failure | None,
    graded: bool,
    notes: list[Finding],
) -> Verdict:
    """Reward validity and token usability of a session that has ended.

    `notes` are findings of the runtime and the stages (unisolated, network_bridged, ...).
    """
    findings = list(notes)
    findings += [
        Finding(code=code, level="warning", count=count)
        for code, count in sorted(Counter(session.findings).items())
    ]
    counted = Counter(code for c in session.completions for code in c.findings)
    findings += [
        Finding(
            code=code,
            level="fatal" if code in DISQUALIFYING else "warning",
            message="completions with this finding",
            count=count,
        )
        for code, count in sorted(counted.items())
    ]
    undelivered = sum(not c.delivered for c in session.completions)
    if undelivered:
        findings.append(
            Finding(
                code="undelivered",
                message="answers that the harness never received",
                count=undelivered,
            )
        )
    if not session.completions:
        findings.append(
            Finding(code="no_completions", level="fatal", message="no model call was captured")
        )
    left_out = _left_out(trajectory)
    findings += [
        Finding(
            code=f"left_out_{reason}",
            level="note",
            message="sampled tokens not trained on",
            count=tokens,
        )
        for reason, tokens in sorted(left_out.items())
    ]
    reward: Literal["graded", "ungraded", "infra"] = "ungraded"
    if graded:
        reward = "graded"
    elif failure is not None and failure.infra:
        reward = "infra"
    return Verdict(reward=reward, tokens=_tokens(trajectory, findings), findings=findings)


def _tokens(
    trajectory: Trajectory | None, findings: list[Finding]
) -> Literal["all", "prefix", "none"]:
    if trajectory is None or not any(any(t.loss_mask) for t in trajectory.traces):
        return "none"
    fatal = any(f.level == "fatal" for f in findings)
    return "prefix" if fatal else "all"


def _left_out(trajectory: Trajectory | None) -> dict[str, int]:
    if trajectory is None:
        return {}
    stats = trajectory.metadata.get("reconstruction_stats", {})
    return {reason: counts["tokens"] for reason, counts in stats.get("left_out", {}).items()}
