import pytest

from polar_gateway.errors import BoundaryError, boundary


def test_a_plain_exception_is_named_after_the_boundary_it_crossed() -> None:
    with pytest.raises(BoundaryError) as caught, boundary("runtime", "no container"):
        raise OSError("disk full")
    assert caught.value.failure.boundary == "runtime"
    assert caught.value.failure.message == "no container: disk full"
    assert caught.value.failure.infra


def test_the_innermost_boundary_keeps_its_name() -> None:
    with (
        pytest.raises(BoundaryError) as caught,
        boundary("evaluator", "outer"),
        boundary("prepare", "inner"),
    ):
        raise ValueError("no")
    assert caught.value.failure.boundary == "prepare"


def test_an_agents_own_failure_is_not_worth_another_attempt() -> None:
    assert not BoundaryError("harness", "crashed").failure.infra
    assert BoundaryError("lost_node", "gone").failure.infra


def test_the_tail_of_what_was_said_is_kept() -> None:
    assert BoundaryError("harness", "x", detail="a" * 9000 + "end").failure.detail.endswith("end")
    assert len(BoundaryError("harness", "x", detail="a" * 9000).failure.detail) == 8192
