from array import array

import pytest

from builders.junctions import Junction, drift, end_of_turn, junction
from builders.records import Ids
from tests.builders.world import END, SYSTEM, World

THREAD = [SYSTEM, {"role": "user", "content": "fix it"}]
E1, E2 = 2, 3


def ids(*values: int) -> Ids:
    return array("i", values)


@pytest.mark.parametrize(
    ("tail", "sampled", "interstitial", "drifted"),
    [
        (ids(10, 11, E1, 50, 51), ids(10, 11, E1), ids(50, 51), 0),
        (ids(19, E1, 50, 51), ids(10, 11, E1), ids(50, 51), 2),
        (ids(19, E1, 50, E1, 51), ids(10, 11, E1), ids(50, E1, 51), 2),
        (ids(19, E1, 50), ids(10, 11), ids(E1, 50), 2),
        (ids(10, 11, 40, E1, 50), ids(10, 11), ids(40, E1, 50), 0),
        (ids(19, E1, 50), ids(10, E2), ids(E1, 50), 2),
        (ids(19, E2, 50, E1), ids(10, E2), ids(50, E1), 1),
        (ids(10, E1, 11, E1, 50), ids(10, E1, 11, E1), ids(50), 0),
        (ids(E1, 50), ids(10, E1), ids(50), 1),
        (ids(19, E1), ids(10, E1), ids(), 1),
    ],
    ids=[
        "rendered as sampled",
        "re-encoded",
        "later ends of turn belong to the harness's messages",
        "a truncated turn is closed by the template",
        "a truncated turn rendered as sampled keeps all that follows",
        "ended by another id than the template's",
        "the first of several ids",
        "an end of turn inside, rendered as sampled",
        "body dropped by the template",
        "nothing after the turn",
    ],
)
def test_the_interstitial_is_what_follows_the_turn(
    tail: Ids, sampled: Ids, interstitial: Ids, drifted: int
) -> None:
    assert junction(tail, sampled, frozenset({E1, E2})) == Junction(interstitial, drifted)


@pytest.mark.parametrize(
    ("tail", "sampled", "refusal"),
    [
        (ids(), ids(10, E1), "empty_tail"),
        (ids(19, 50), ids(10, E1), "no_end_of_turn"),
        (ids(10, E1, 19, E1, 50), ids(10, E1, 11, E1), "inner_end_of_turn"),
    ],
)
def test_a_turn_whose_end_cannot_be_known_is_not_merged(
    tail: Ids, sampled: Ids, refusal: str
) -> None:
    assert junction(tail, sampled, frozenset({E1})) == refusal


def test_a_turn_rendered_as_sampled_needs_no_end_of_turn_id() -> None:
    assert junction(ids(10, 11, 50), ids(10, 11), frozenset()) == Junction(ids(50), 0)


@pytest.mark.parametrize(
    ("canonical", "sampled", "positions"),
    [
        (ids(1, 2, 3), ids(1, 2, 3), 0),
        (ids(1, 9, 3), ids(1, 2, 3), 1),
        (ids(1, 3), ids(1, 2, 2, 3), 2),
        (ids(1, 2, 2, 3), ids(1, 3), 2),
        (ids(1, 1), ids(1, 1, 1), 1),
        (ids(), ids(1, 2), 2),
        (ids(4, 5), ids(6, 7, 8), 3),
    ],
)
def test_drift_counts_positions_without_common_beginning_and_end(
    canonical: Ids, sampled: Ids, positions: int
) -> None:
    assert drift(canonical, sampled) == positions


def test_configured_ids_outrank_the_engines_which_outrank_the_samples() -> None:
    world = World()
    samples = [world.ask(THREAD), world.ask(THREAD)]
    assert end_of_turn([7], [8], samples) == (frozenset({7}), "config")
    assert end_of_turn([], [8, 9], samples) == (frozenset({8, 9}), "engine")
    assert end_of_turn([], [], samples) == (frozenset({END}), "detected")


def test_one_sample_is_not_evidence_enough() -> None:
    assert end_of_turn([], [], [World().ask(THREAD)]).source == "unknown"


def test_samples_that_end_differently_agree_on_nothing() -> None:
    world = World()
    samples = [world.ask(THREAD), world.ask(THREAD)]
    samples[1].sampled_ids[-1] = 99
    assert end_of_turn([], [], samples).source == "unknown"


def test_truncated_turns_and_stop_strings_are_no_evidence() -> None:
    world = World()
    samples = [
        world.ask(THREAD),
        world.ask(THREAD),
        world.ask(THREAD, truncated=True),
        world.ask(THREAD, stop_reason="\n"),
    ]
    samples[3].sampled_ids[-1] = 99
    assert end_of_turn([], [], samples) == (frozenset({END}), "detected")


def test_an_id_that_also_stands_inside_a_turn_is_no_end_of_turn() -> None:
    world = World()
    samples = [world.ask(THREAD), world.ask(THREAD)]
    samples[0].sampled_ids[0] = END
    assert end_of_turn([], [], samples).source == "unknown"
