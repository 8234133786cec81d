import pytest
from msgspec.structs import replace

from polar_gateway.protocol import NodeRegistrationRequest, NodeStageMetrics, SessionProgress
from polar_server import nodes
from polar_server.nodes import LiveAttempt, Node, Progress, Silence

REGISTRATION = NodeRegistrationRequest(
    node_id="a",
    gateway_url="http://a",
    max_init_workers=9,
    max_ready_sessions=4,
    max_run_workers=2,
    max_postrun_workers=3,
    heartbeat_interval_seconds=10.0,
)


def node(**fields: object) -> Node:
    base = Node(
        registration=REGISTRATION,
        metrics=NodeStageMetrics(),
        draining=False,
        registered_at=100.0,
        last_heartbeat=100.0,
        refusals=0,
        aside_until=0.0,
        last_placed=0,
        live_attempts=0,
        dispatching=0,
    )
    return replace(base, **fields)


def attempt(**fields: object) -> LiveAttempt:
    base = LiveAttempt(
        attempt_id="att-1",
        session_id="s",
        node_id="a",
        created_at=110.0,
        cancel_told_at=None,
        dispatching=False,
    )
    return replace(base, **fields)


def lost(one: Node, *, now: float, unnamed: tuple[float, int] | None = None) -> str:
    """Why the attempt is lost; `unnamed` is since when and by how many heartbeats."""
    silences = {}
    if unnamed:
        silences["att-1"] = Silence(attempt=attempt(), since=unnamed[0], beats=unnamed[1])
    found = nodes.lost_attempts([attempt()], {"a": one}, silences, now, listening_since=0.0)
    return found[0][1] if found else ""


def test_a_node_is_healthy_for_two_and_a_half_heartbeats():
    assert nodes.healthy(node(), 124.9, listening_since=0.0)
    assert not nodes.healthy(node(), 125.0, listening_since=0.0)


def test_silence_before_the_server_listened_says_nothing():
    assert nodes.healthy(node(), 1000.0, listening_since=999.0)


def test_a_node_holds_what_is_prepared_what_runs_and_what_is_graded():
    assert nodes.capacity(REGISTRATION) == 4 + 2 + 3


@pytest.mark.parametrize(
    ("fields", "free"),
    [
        pytest.param({}, 9, id="empty"),
        pytest.param({"live_attempts": 4}, 5, id="busy"),
        pytest.param({"live_attempts": 12}, 0, id="overfull since it registered with fewer places"),
        pytest.param({"draining": True}, 0, id="draining"),
        pytest.param({"aside_until": 111.0}, 0, id="set aside"),
        pytest.param({"aside_until": 110.0}, 9, id="no longer set aside"),
    ],
)
def test_free_places(fields: dict[str, object], free: int):
    assert nodes.free_places(node(**fields), now=110.0) == free


def test_a_node_that_keeps_refusing_is_set_aside_for_longer_and_longer():
    pauses = [nodes.aside_seconds(refusals) for refusals in (1, 2, 3, 100)]
    assert pauses == [1.0, 2.0, 4.0, 60.0]


def test_attempts_are_lost_with_their_node():
    assert not lost(node(), now=124.0)
    assert lost(node(), now=125.0) == "node a was lost with the session"


def test_an_attempt_that_its_node_leaves_out_of_its_heartbeats_is_lost():
    speaks = node(last_heartbeat=200.0)
    assert lost(speaks, now=200.0, unnamed=(175.0, 2)) == "node a no longer has the session"
    assert not lost(speaks, now=200.0, unnamed=(175.0, 1))
    assert not lost(speaks, now=199.0, unnamed=(175.0, 9))
    assert not lost(speaks, now=200.0)


def test_a_restarted_node_gets_time_to_find_its_attempts_again():
    restarted = node(registered_at=200.0, last_heartbeat=226.0)
    assert not lost(restarted, now=224.0, unnamed=(110.0, 2))
    assert lost(restarted, now=226.0, unnamed=(110.0, 2))


def test_a_silence_begins_anew_with_each_naming_and_each_registration():
    progress = Progress()

    def silence(now: float) -> tuple[float, int]:
        said = progress.silences([attempt()], now)["att-1"]
        return said.since, said.beats

    assert silence(1.0) == (1.0, 0)
    progress.heard("b", [])
    progress.heard("a", [])
    assert silence(2.0) == (1.0, 1)
    progress.heard("a", [SessionProgress(session_id="s", attempt_id="att-1", stage="running")])
    assert silence(3.0) == (3.0, 0)
    progress.heard("a", [])
    progress.heard("a", [SessionProgress(session_id="s", stage="running")])  # knows no attempts
    assert silence(4.0) == (4.0, 0)
    progress.heard("a", [])
    progress.registered("a")
    assert silence(5.0) == (5.0, 0)
    assert not progress.silences([attempt(dispatching=True)], 6.0)


def test_the_next_thing_due_is_the_nearest_in_the_future():
    assert nodes.next_due([node()], 101.0, 0.0) == 125.0
    assert nodes.next_due([node(aside_until=103.0)], 101.0, 0.0) == 103.0
    assert nodes.next_due([node()], 125.0, 0.0) is None
    assert nodes.next_due([], 1.0, 0.0) is None


def test_the_public_view_carries_the_registration_and_what_is_stale():
    info = nodes.info(node(dispatching=2, draining=True), 130.0, 0.0, ["att-9"])
    assert (info.node_id, info.max_ready_sessions, info.heartbeat_interval_seconds) == ("a", 4, 10.0)
    assert (info.healthy, info.draining, info.dispatch_reservations) == (False, True, 2)
    assert info.stale_attempts == ["att-9"]


def test_progress_is_what_the_last_heartbeat_said():
    progress = Progress()
    said = SessionProgress(session_id="s", attempt_id="att-1", stage="running")
    progress.heard("a", [said])
    assert progress.of("a", "att-1") is said
    assert progress.of("b", "att-1") is None
    assert progress.of(None, None) is None
    progress.heard("a", [])
    assert progress.of("a", "att-1") is None
    progress.heard("a", [said])
    progress.registered("a")
    assert progress.of("a", "att-1") is None
