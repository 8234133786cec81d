"""Which queued session goes to which node: pure.

Priority first; within a priority the tasks take turns, the one served longest ago first, so that a
small task never waits behind a large one. A session goes to the node with the most free places
that offers what it needs; among equals to the one that was given a session longest ago.
"""

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from polar_gateway.protocol import NodeOffers


class Needs(msgspec.Struct, kw_only=True, frozen=True):
    """What a node must offer to run a task; None: nothing in particular."""

    harness: str
    runtime: str | None = None
    builder: str
    evaluator: str | None = None


class Lane(msgspec.Struct, kw_only=True, frozen=True):
    """Queued sessions of one task that are alike for placement."""

    run: int
    priority: int
    last_placed: int
    """The tick at which the task was served last."""
    needs: Needs
    avoid_node: str | None
    """Where the infrastructure failed these sessions; any other node is better."""
    queued: int


class NodeSlots(msgspec.Struct, kw_only=True, frozen=True):
    """A live node that takes sessions."""

    node_id: str
    free: int
    last_placed: int
    offers: NodeOffers


class Placement(msgspec.Struct, kw_only=True, frozen=True):
    run: int
    avoid_node: str | None
    node_id: str


def place(lanes: Iterable[Lane], nodes: Sequence[NodeSlots]) -> list[Placement]:
    """Fill the free places; the placements stand in the order in which tasks were served."""
    free = {node.node_id: node.free for node in nodes if node.free > 0}
    used = {node.node_id: node.last_placed for node in nodes}
    tick = max(used.values(), default=0)
    placements: list[Placement] = []
    waiting = deque(_turns(lanes))
    while waiting and free:
        # All tasks of one priority take turns before a lower one is looked at.
        priority = waiting[0][0].priority
        turns = deque[_Turn]()
        while waiting and waiting[0][0].priority == priority:
            turns.append(waiting.popleft())
        while turns and free:
            turn = turns.popleft()
            lane = turn[0]
            node_id = _choose(lane, nodes, free, used)
            if node_id is None:  # nodes only fill up, so this lane is done
                turn.popleft()
                if turn:
                    turns.appendleft(turn)
                continue
            tick += 1
            used[node_id] = tick
            free[node_id] -= 1
            if not free[node_id]:
                del free[node_id]
            placements.append(
                Placement(run=lane.run, avoid_node=lane.avoid_node, node_id=node_id)
            )
            turn[0] = msgspec.structs.replace(lane, queued=lane.queued - 1)
            if not turn[0].queued:
                turn.popleft()
            if turn:
                turns.append(turn)
    return placements


_Turn = deque[Lane]
"""The lanes of one task, those that failed before first."""


def _turns(lanes: Iterable[Lane]) -> list[_Turn]:
    by_run: dict[int, list[Lane]] = {}
    for lane in lanes:
        by_run.setdefault(lane.run, []).append(lane)
    turns = [
        deque(sorted(group, key=lambda lane: (lane.avoid_node is None, lane.avoid_node or "")))
        for group in by_run.values()
    ]
    return sorted(turns, key=lambda turn: (-turn[0].priority, turn[0].last_placed, turn[0].run))


def _choose(
    lane: Lane, nodes: Sequence[NodeSlots], free: dict[str, int], used: dict[str, int]
) -> str | None:
    able = [node.node_id for node in nodes if can_run(node.offers, lane.needs)]
    elsewhere = [node_id for node_id in able if node_id != lane.avoid_node]
    candidates = [node_id for node_id in elsewhere or able if node_id in free]
    return min(candidates, key=lambda node_id: (-free[node_id], used[node_id], node_id), default=None)


def can_run(offers: NodeOffers, needs: Needs) -> bool:
    """An empty list of offers says nothing, as with nodes that know no offers."""
    return (
        _offered(offers.harnesses, needs.harness)
        and _offered(offers.runtimes, needs.runtime)
        and _offered(offers.builders, needs.builder)
        and _offered(offers.evaluators, needs.evaluator)
    )


def _offered(offered: list[str], name: str | None) -> bool:
    return name is None or not offered or name in offered
