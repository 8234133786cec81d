"""What the server concludes about nodes: pure, but for the memory of their last heartbeats.

A node holds a lease that its heartbeats renew. Past LEASE_INTERVALS heartbeats of silence it is
lost, and so are the attempts on it.
"""

from collections.abc import Iterable, Mapping

import msgspec

from polar_gateway.protocol import (
    GatewayNodeInfo,
    NodeRegistrationRequest,
    NodeStageMetrics,
    SessionProgress,
)

LEASE_INTERVALS = 2.5
FORGOTTEN_BEATS = 2
"""Heartbeats that must leave out an attempt before it is lost: the first may have been composed before
the node took it."""
ASIDE_SECONDS = 1.0
"""How long a node is set aside when it refuses a dispatch; doubles with every further refusal."""
MAX_ASIDE_SECONDS = 60.0


class Node(msgspec.Struct, kw_only=True, frozen=True):
    """A node as the store knows it."""

    registration: NodeRegistrationRequest
    metrics: NodeStageMetrics
    draining: bool
    registered_at: float
    last_heartbeat: float
    refusals: int
    aside_until: float
    last_placed: int
    live_attempts: int
    dispatching: int

    @property
    def node_id(self) -> str:
        return self.registration.node_id


class LiveAttempt(msgspec.Struct, kw_only=True, frozen=True):
    """An attempt that a node has, or is being asked to take."""

    attempt_id: str
    session_id: str
    node_id: str
    created_at: float
    cancel_told_at: float | None
    dispatching: bool
    """The node has not said yet that it took it."""


class Silence(msgspec.Struct, kw_only=True):
    """How long a node has not named an attempt that it took."""

    attempt: LiveAttempt
    since: float
    beats: int = 0
    """Heartbeats of its node that left it out."""


def lease_ends(node: Node, listening_since: float) -> float:
    """Wall clock at which the node is lost unless it is heard; nobody is heard before the server
    listens."""
    heard = max(node.last_heartbeat, listening_since)
    return heard + LEASE_INTERVALS * node.registration.heartbeat_interval_seconds


def healthy(node: Node, now: float, listening_since: float) -> bool:
    return now < lease_ends(node, listening_since)


def capacity(registration: NodeRegistrationRequest) -> int:
    """How many sessions a node is given at once.

    A READY place is reserved before an INIT starts, so READY places bound what is prepared or being
    prepared, whatever the number of INIT workers; beside those a node holds what runs and what is
    being graded.
    """
    return (
        registration.max_ready_sessions
        + registration.max_run_workers
        + registration.max_postrun_workers
    )


def free_places(node: Node, now: float) -> int:
    """How many more sessions to place on a healthy node; none while it is set aside."""
    if node.draining or now < node.aside_until:
        return 0
    return max(0, capacity(node.registration) - node.live_attempts)


def aside_seconds(refusals: int) -> float:
    """How long a node is set aside after that many refusals in a row."""
    return min(MAX_ASIDE_SECONDS, ASIDE_SECONDS * 2.0 ** min(refusals - 1, 16))


def lost_attempts(
    attempts: Iterable[LiveAttempt],
    nodes: Mapping[str, Node],
    silences: Mapping[str, Silence],
    now: float,
    listening_since: float,
) -> list[tuple[LiveAttempt, str]]:
    """The attempts that will not be heard of again, each with the reason.

    Those on a silent node; and those that their node took and no longer names (`silences`, by attempt
    id), as one does that was restarted and did not find them again.
    """
    lost: list[tuple[LiveAttempt, str]] = []
    for attempt in attempts:
        node = nodes[attempt.node_id]
        silence = silences.get(attempt.attempt_id)
        if not healthy(node, now, listening_since):
            lost.append((attempt, f"node {node.node_id} was lost with the session"))
        elif silence and forgotten(silence, node, now, listening_since):
            lost.append((attempt, f"node {node.node_id} no longer has the session"))
    return lost


def forgotten(silence: Silence, node: Node, now: float, listening_since: float) -> bool:
    patience = LEASE_INTERVALS * node.registration.heartbeat_interval_seconds
    since = max(silence.since, node.registered_at, listening_since)
    return silence.beats >= FORGOTTEN_BEATS and now >= since + patience


def next_due(nodes: Iterable[Node], now: float, listening_since: float) -> float | None:
    """Wall clock at which something about the nodes changes although nobody says a word."""
    times: list[float] = []
    for node in nodes:
        times += [lease_ends(node, listening_since), node.aside_until]
    return min((at for at in times if at > now), default=None)


def info(
    node: Node, now: float, listening_since: float, stale_attempts: Iterable[str] = ()
) -> GatewayNodeInfo:
    """The public view; `dispatch_reservations` counts dispatches that are on their way."""
    registration = node.registration
    return GatewayNodeInfo(
        node_id=registration.node_id,
        gateway_url=registration.gateway_url,
        max_init_workers=registration.max_init_workers,
        max_run_workers=registration.max_run_workers,
        max_postrun_workers=registration.max_postrun_workers,
        max_ready_sessions=registration.max_ready_sessions,
        heartbeat_interval_seconds=registration.heartbeat_interval_seconds,
        offers=registration.offers,
        metrics=node.metrics,
        dispatch_reservations=node.dispatching,
        healthy=healthy(node, now, listening_since),
        draining=node.draining,
        last_heartbeat=node.last_heartbeat,
        stale_attempts=list(stale_attempts),
    )


class Progress:
    """Where nodes last said their sessions are; soft state, gone with the process."""

    def __init__(self) -> None:
        self._by_node: dict[str, dict[str, SessionProgress]] = {}
        self._silences: dict[str, Silence] = {}

    def registered(self, node_id: str) -> None:
        self.heard(node_id, ())
        self._silences = {
            attempt_id: silence
            for attempt_id, silence in self._silences.items()
            if silence.attempt.node_id != node_id
        }

    def heard(self, node_id: str, sessions: Iterable[SessionProgress]) -> None:
        said = self._by_node[node_id] = {session.attempt_id: session for session in sessions}
        # A node that knows no attempts names sessions.
        named = said.keys() | {session.session_id for session in said.values() if not session.attempt_id}
        for attempt_id, silence in list(self._silences.items()):
            if silence.attempt.node_id != node_id:
                continue
            if named.isdisjoint((attempt_id, silence.attempt.session_id)):
                silence.beats += 1
            else:
                del self._silences[attempt_id]

    def of(self, node_id: str | None, attempt_id: str | None) -> SessionProgress | None:
        return self._by_node.get(node_id or "", {}).get(attempt_id or "")

    def silences(self, attempts: Iterable[LiveAttempt], now: float) -> Mapping[str, Silence]:
        """The silence about each live attempt that its node took; one that was not asked after before,
        or was named since, begins now."""
        self._silences = {
            attempt.attempt_id: self._silences.get(attempt.attempt_id)
            or Silence(attempt=attempt, since=now)
            for attempt in attempts
            if not attempt.dispatching
        }
        return self._silences
