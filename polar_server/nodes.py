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
    reported: Mapping[str, Iterable[str]],
    now: float,
    listening_since: float,
) -> list[LiveAttempt]:
    """The attempts that will not be heard of again.

    Those on a silent node; and those older than their node's registration, when the node's
    heartbeats since (`reported`: node id to attempt ids) do not name them: the node was restarted
    and did not find them again.
    """
    lost: list[LiveAttempt] = []
    for attempt in attempts:
        node = nodes[attempt.node_id]
        registered = max(node.registered_at, listening_since)
        patience = LEASE_INTERVALS * node.registration.heartbeat_interval_seconds
        forgotten = (
            attempt.created_at < node.registered_at
            and attempt.attempt_id not in reported.get(attempt.node_id, ())
            and now >= registered + patience
        )
        if forgotten or not healthy(node, now, listening_since):
            lost.append(attempt)
    return lost


def next_due(nodes: Iterable[Node], now: float, listening_since: float) -> float | None:
    """Wall clock at which something about the nodes changes although nobody says a word."""
    times: list[float] = []
    for node in nodes:
        patience = LEASE_INTERVALS * node.registration.heartbeat_interval_seconds
        times += [
            lease_ends(node, listening_since),
            max(node.registered_at, listening_since) + patience,
            node.aside_until,
        ]
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

    def registered(self, node_id: str) -> None:
        self._by_node.pop(node_id, None)

    def heard(self, node_id: str, sessions: Iterable[SessionProgress]) -> None:
        self._by_node[node_id] = {session.attempt_id: session for session in sessions}

    def of(self, node_id: str | None, attempt_id: str | None) -> SessionProgress | None:
        return self._by_node.get(node_id or "", {}).get(attempt_id or "")

    @property
    def reported(self) -> Mapping[str, Iterable[str]]:
        """Node id to the attempts that its last heartbeat named."""
        return self._by_node
