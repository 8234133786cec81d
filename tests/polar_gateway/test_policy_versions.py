from builders.records import VersionSpan
from polar_gateway.policy_versions import UNNAMED, Leg, Versions, Weights, versions_of

OLD, NEW = Weights("v1", 1), Weights("v2", 2)


def span(version: str | None, start: int, end: int) -> VersionSpan:
    return VersionSpan(version=version, start=start, end=end)


def leg(start: int, end: int, before: Weights, after: Weights | None = None, **more: object) -> Leg:
    more = {"sure": start, **more}
    return Leg(start=start, end=end, before=before, after=after or before, **more)  # type: ignore[arg-type]


def test_an_answer_under_one_version_needs_no_spans() -> None:
    assert versions_of([leg(0, 9, OLD)], None) == Versions("v1", [])
    assert versions_of([leg(0, 4, OLD), leg(4, 9, OLD)], None) == Versions("v1", [])


def test_weights_that_nobody_named_are_what_the_task_says() -> None:
    assert versions_of([leg(0, 9, Weights())], "7") == Versions("7", [])
    assert versions_of([leg(0, 9, Weights())], None) == Versions(None, [])
    assert versions_of([leg(0, 4, Weights()), leg(4, 9, OLD)], "7") == Versions(
        "7", [span("7", 0, 4), span("v1", 4, 9)]
    )


def test_a_change_between_two_legs_is_exact() -> None:
    assert versions_of([leg(0, 4, OLD), leg(4, 9, NEW)], None) == Versions(
        "v1", [span("v1", 0, 4), span("v2", 4, 9)]
    )


def test_an_answer_that_was_aborted_twice_has_three_versions() -> None:
    third = Weights("v3", 3)
    assert versions_of([leg(0, 4, OLD), leg(4, 5, NEW), leg(5, 9, third)], None).spans == [
        span("v1", 0, 4),
        span("v2", 4, 5),
        span("v3", 5, 9),
    ]


def test_after_a_change_in_the_middle_of_a_leg_nobody_can_say() -> None:
    assert versions_of([leg(0, 9, OLD, NEW, sure=3)], None) == Versions(
        "v1", [span("v1", 0, 3), span(None, 3, 9)]
    )
    assert versions_of([leg(0, 9, OLD, NEW)], None) == Versions(None, [span(None, 0, 9)])


def test_where_the_engine_says_it_it_is_known() -> None:
    said = [span("v1", 0, 5), span("v2", 5, 9)]
    assert versions_of([leg(0, 9, OLD, NEW, sure=3, said=said)], None) == Versions("v1", said)


def test_an_engine_that_names_one_version_is_believed_also_against_the_gateway() -> None:
    told = leg(0, 9, Weights(), said=[span("step-7", 0, 9)])
    assert versions_of([told], "3") == Versions("step-7", [])


def test_what_the_engine_has_no_name_for_has_the_one_that_the_gateway_knows() -> None:
    said = [span(UNNAMED, 0, 5), span("v2", 5, 9)]
    assert versions_of([leg(0, 9, Weights(), NEW, said=said)], "7") == Versions(
        "7", [span("7", 0, 5), span("v2", 5, 9)]
    )


def test_an_engine_that_has_no_names_at_all_tells_nothing_of_a_change() -> None:
    told = leg(0, 9, OLD, NEW, sure=3, said=[span(UNNAMED, 0, 9)])
    assert versions_of([told], None).spans == [span("v1", 0, 3), span(None, 3, 9)]


def test_what_the_engine_says_of_a_part_is_not_stretched_over_the_rest() -> None:
    told = leg(4, 9, NEW, said=[span("v1", 0, 4)])
    assert versions_of([leg(0, 4, OLD), told], None).spans == [span("v1", 0, 4), span("v2", 4, 9)]


def test_weights_in_doubt_are_nobodys() -> None:
    doubtful = Weights("v1", 2, in_doubt=True)
    assert versions_of([leg(0, 9, doubtful)], None) == Versions(None, [span(None, 0, 9)])


def test_nothing_sampled_has_no_spans() -> None:
    assert versions_of([], "7") == Versions("7", [])
    assert versions_of([leg(0, 0, OLD)], "7").spans == []


def test_an_engine_that_was_told_a_name_and_has_none_was_started_anew() -> None:
    told = leg(0, 9, Weights("v1", 1, told=True), said=[span(UNNAMED, 0, 9)])
    assert versions_of([told], "7") == Versions(None, [span(None, 0, 9)])


def test_a_name_that_may_have_become_one_of_other_weights_is_no_evidence() -> None:
    """Weights that were loaded and not named, since naming them failed, have the old name."""
    before, after = Weights("v1", 1), Weights("v1", 3, in_doubt=True, blurred=1)
    said = [span("v1", 0, 9)]
    assert versions_of([leg(0, 9, before, after, sure=3, said=said)], None) == Versions(
        None, [span(None, 0, 9)]
    )
    assert versions_of([leg(0, 9, before, after, sure=3)], None) == Versions(
        None, [span(None, 0, 9)]
    )
    doubtful = Weights("v1", 3, in_doubt=True, blurred=1)
    assert versions_of([leg(0, 9, doubtful, said=said)], None) == Versions(None, [span(None, 0, 9)])


def test_a_new_name_is_evidence_also_where_the_old_one_is_none() -> None:
    before, after = Weights("v1", 1), Weights("v2", 4, blurred=1)
    said = [span("v1", 0, 5), span("v2", 5, 9)]
    assert versions_of([leg(0, 9, before, after, said=said)], None) == Versions(
        None, [span(None, 0, 5), span("v2", 5, 9)]
    )
