from random import Random

import pytest
from msgspec.structs import replace

from polar_gateway.protocol import NodeOffers
from polar_server.placement import Lane, Needs, NodeSlots, can_run, place

NEEDS = Needs(harness="codex", builder="per_request")


def lane(run: int, queued: int = 1, **fields: object) -> Lane:
    base = Lane(run=run, priority=0, last_placed=0, needs=NEEDS, avoid_node=None, queued=queued)
    return replace(base, **fields)


def slots(node_id: str, free: int, **fields: object) -> NodeSlots:
    base = NodeSlots(node_id=node_id, free=free, last_placed=0, offers=NodeOffers())
    return replace(base, **fields)


def served(lanes: list[Lane], nodes: list[NodeSlots]) -> list[int]:
    return [placement.run for placement in place(lanes, nodes)]


def chosen(lanes: list[Lane], nodes: list[NodeSlots]) -> list[str]:
    return [placement.node_id for placement in place(lanes, nodes)]


def test_nothing_is_placed_without_nodes_or_without_sessions():
    assert place([lane(1)], []) == []
    assert place([lane(1)], [slots("a", 0)]) == []
    assert place([], [slots("a", 3)]) == []


def test_sessions_go_to_the_node_with_the_most_free_places():
    assert chosen([lane(1, 4)], [slots("a", 1), slots("b", 3)]) == ["b", "b", "a", "b"]


def test_of_equal_nodes_the_one_that_waited_longest_is_chosen():
    nodes = [slots("a", 1, last_placed=9), slots("b", 1, last_placed=4)]
    assert chosen([lane(1)], nodes) == ["b"]


def test_a_higher_priority_is_served_until_it_has_nothing_left():
    assert served([lane(1, 5), lane(2, 2, priority=7)], [slots("a", 4)]) == [2, 2, 1, 1]


def test_tasks_take_turns():
    assert served([lane(1, 5), lane(2, 2)], [slots("a", 6)]) == [1, 2, 1, 2, 1, 1]


def test_the_task_that_was_served_longest_ago_is_first():
    assert served([lane(1, 2, last_placed=8), lane(2, 2, last_placed=3)], [slots("a", 1)]) == [2]


def test_a_task_that_no_free_node_can_run_does_not_hold_up_others():
    picky = lane(1, priority=100, needs=replace(NEEDS, harness="pi"))
    nodes = [slots("a", 1, offers=NodeOffers(harnesses=["codex"]))]
    assert served([picky, lane(2)], nodes) == [2]


def test_a_session_is_tried_again_elsewhere():
    failed = lane(1, avoid_node="a")
    assert chosen([failed], [slots("a", 9), slots("b", 1)]) == ["b"]


def test_a_session_waits_for_another_node_that_is_only_full():
    assert place([lane(1, avoid_node="a")], [slots("a", 9), slots("b", 0)]) == []


def test_a_session_is_tried_again_on_the_same_node_if_there_is_no_other():
    assert chosen([lane(1, avoid_node="a")], [slots("a", 1)]) == ["a"]


def test_sessions_that_failed_before_go_before_their_siblings():
    lanes = [lane(1, 1), lane(1, 1, avoid_node="b")]
    assert [p.avoid_node for p in place(lanes, [slots("a", 2)])] == ["b", None]


@pytest.mark.parametrize(
    ("offers", "able"),
    [
        pytest.param(NodeOffers(), True, id="says nothing"),
        pytest.param(NodeOffers(harnesses=["codex"], builders=["per_request"]), True, id="all named"),
        pytest.param(NodeOffers(harnesses=["pi"]), False, id="another harness"),
        pytest.param(NodeOffers(runtimes=["local"]), False, id="another runtime"),
        pytest.param(NodeOffers(builders=["other"]), False, id="another builder"),
        pytest.param(NodeOffers(evaluators=["other"]), False, id="another evaluator"),
    ],
)
def test_a_node_is_able_if_it_offers_what_the_task_names(offers: NodeOffers, able: bool):
    needs = replace(NEEDS, runtime="docker", evaluator="test_on_output")
    assert can_run(offers, needs) is able


def test_a_need_for_nothing_in_particular_is_met_by_everyone():
    assert can_run(NodeOffers(runtimes=["local"], evaluators=["other"]), NEEDS)


@pytest.mark.parametrize("seed", range(20))
def test_places_are_filled_and_never_overfilled(seed: int):
    random = Random(seed)
    lanes = [
        lane(run, random.randint(1, 9), priority=random.randint(0, 2), last_placed=random.randint(0, 9))
        for run in range(random.randint(1, 12))
    ]
    nodes = [slots(f"n{i}", random.randint(0, 6)) for i in range(random.randint(1, 5))]
    placements = place(lanes, nodes)
    free = sum(node.free for node in nodes)
    queued = sum(lane.queued for lane in lanes)
    assert len(placements) == min(free, queued)
    for node in nodes:
        assert sum(p.node_id == node.node_id for p in placements) <= node.free
    counts = {one.run: sum(p.run == one.run for p in placements) for one in lanes}
    assert all(counts[one.run] <= one.queued for one in lanes)
    for one in lanes:
        for other in lanes:
            if one.priority == other.priority and counts[other.run] < other.queued:
                assert counts[one.run] <= counts[other.run] + 1  # nobody is more than a turn ahead
