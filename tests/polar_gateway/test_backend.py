"""Backends as trainers order them about."""

import anyio
import pytest

from polar_gateway.backend import WeightUpdate
from polar_gateway.backends import BackendRefusedError, Backends
from polar_gateway.policy_versions import Weights
from tests.polar_gateway.obedient import backend, engine_of, three
from tests.polar_gateway.test_proxy import loop_turns


def test_weights_that_the_engine_has_a_name_for_have_it_from_the_start() -> None:
    assert backend("a", weight_version="step-7").weights.version == "step-7"
    assert backend("a", weight_version="default").weights.version is None


# ---- pausing ----


async def test_a_pause_waits_for_what_is_in_flight_and_calls_wait_for_it() -> None:
    backends, made = three()
    first, second = backends.lease(), backends.lease()
    done: list[str] = []

    async def call() -> None:
        async with second.call():
            done.append("call")

    async def pause() -> None:
        await backends.pause("wait", timeout=60)
        done.append("pause")

    async with anyio.create_task_group() as group:
        async with first.call():
            group.start_soon(pause)
            await loop_turns()
            group.start_soon(call)
            await loop_turns()
            assert done == []
        await loop_turns()
        assert done == ["pause"]
        await backends.resume()
    assert done == ["pause", "call"]
    assert [engine_of(each).orders for each in made] == [[], [], []]


async def test_a_pause_that_takes_too_long_stays_and_says_so() -> None:
    backends, made = three()
    async with backends.lease().call():
        with pytest.raises(BackendRefusedError, match=r"after 0.01 s \(a: 1\)") as refused:
            await backends.pause("wait", timeout=0.01, name="a")
        assert refused.value.status == 504
        assert not made[0].open
        assert made[1].open
    await backends.pause("wait", timeout=1, name="a")


async def test_a_pause_is_over_when_it_is_resumed() -> None:
    backends, _ = three()
    refusals = []

    async def pause() -> None:
        with pytest.raises(BackendRefusedError, match="resumed meanwhile") as refused:
            await backends.pause("wait", timeout=60)
        refusals.append(refused.value.status)

    async with anyio.create_task_group() as group, backends.lease().call():
        group.start_soon(pause)
        await loop_turns()
        await backends.resume()
        await loop_turns()
        assert refusals == [409]


async def test_answers_that_are_kept_are_not_waited_for() -> None:
    backends, made = three()
    async with backends.lease().call():
        await backends.pause("keep", timeout=60, name="a")
        assert made[0].in_flight == 1
        assert engine_of(made[0]).orders == [("pause", "keep")]
        await backends.resume("a")
    assert engine_of(made[0]).orders == [("pause", "keep"), "unpause"]


async def test_an_engine_that_takes_no_orders_can_only_be_waited_for() -> None:
    backends = Backends([backend("a", controls=[])])
    for mode in ("keep", "abort"):
        with pytest.raises(BackendRefusedError, match=r"mode=wait") as refused:
            await backends.pause(mode, timeout=1)
        assert refused.value.status == 409
    assert backends.first.open
    await backends.pause("wait", timeout=1)
    await backends.resume()


async def test_an_engine_that_does_not_obey_stays_closed() -> None:
    backends, made = three()
    engine_of(made[0]).fails = True
    with pytest.raises(BackendRefusedError, match="a did not pause") as refused:
        await backends.pause("keep", timeout=1)
    assert refused.value.status == 502
    with pytest.raises(BackendRefusedError, match="a did not resume"):
        await backends.resume()
    assert not made[0].open
    engine_of(made[0]).fails = False
    await backends.resume()
    assert all(each.open for each in made)


@pytest.mark.parametrize("order", ["pause", "resume"])
async def test_one_that_does_not_obey_keeps_no_other_from_it(order: str) -> None:
    backends, made = three()
    await backends.pause("keep", timeout=1)
    if order == "pause":
        await backends.resume()
    engine_of(made[0]).fails = True
    for each in made[1:]:
        engine_of(each).orders.clear()
        engine_of(each).obeys = anyio.Event()
    refused: list[str] = []

    async def give() -> None:
        with pytest.raises(BackendRefusedError, match=f"a did not {order}") as error:
            await (backends.resume() if order == "resume" else backends.pause("keep", timeout=9))
        refused.append(str(error.value))

    async with anyio.create_task_group() as group:
        group.start_soon(give)
        await loop_turns()
        assert refused == []
        for each in made[1:]:
            held = engine_of(each).obeys
            assert held is not None
            held.set()
    assert len(refused) == 1
    assert [each.open for each in made] == [False] + [order == "resume"] * 2


async def test_a_resume_reaches_the_engine_after_the_pause_that_it_ends() -> None:
    """Else the engine would stand still and the gateway think that it runs."""
    backends = Backends([backend("a")])
    engine = engine_of(backends.first)
    pausing = engine.obeys = anyio.Event()
    async with anyio.create_task_group() as group:

        async def pause() -> None:
            with pytest.raises(BackendRefusedError, match="resumed meanwhile"):
                await backends.pause("keep", timeout=60)

        group.start_soon(pause)
        await loop_turns()
        group.start_soon(backends.resume)
        await loop_turns()
        assert engine.orders == [("pause", "keep")]
        pausing.set()
    assert engine.orders == [("pause", "keep"), "unpause"]
    assert backends.first.open


async def test_an_engine_is_not_resumed_while_it_loads_weights() -> None:
    backends = Backends([backend("a")])
    engine = engine_of(backends.first)
    await backends.pause("keep", timeout=1)
    loading = engine.obeys = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(backends.update, WeightUpdate(policy_version="7", weights_path="/w"))
        await loop_turns()
        group.start_soon(backends.resume)
        await loop_turns()
        assert not backends.first.open
        loading.set()
    assert engine.orders == [("pause", "keep"), ("update", "7", "/w"), "unpause"]
    assert backends.first.open


# ---- new weights ----


async def test_what_is_in_flight_stands_still_while_weights_are_loaded() -> None:
    """Between the loading and the naming it would be sampled by the new ones under the old name."""
    backends = Backends([backend("a")])
    update = WeightUpdate(policy_version="7", weights_path="/w")
    async with backends.lease().call():
        await backends.update(update)
    engine = engine_of(backends.first)
    assert engine.orders == [("pause", "keep"), ("update", "7", "/w"), "unpause"]
    engine.orders.clear()
    await backends.update(update)
    assert engine.orders == [("update", "7", "/w")]


async def test_what_was_in_flight_when_an_update_failed_goes_on_after_a_resume() -> None:
    backends = Backends([backend("a")])
    engine = engine_of(backends.first)
    async with backends.lease().call():
        engine.obeys = anyio.Event()
        with pytest.raises(BackendRefusedError, match="longer than"):
            await backends.update(WeightUpdate(policy_version="7", timeout_seconds=0.01))
        engine.obeys = None
        await backends.resume()
    assert engine.orders == [("pause", "keep"), "unpause"]


async def test_an_update_names_the_weights_of_all_or_of_one() -> None:
    backends, made = three()
    await backends.update(WeightUpdate(policy_version="7", weights_path="/w"))
    await backends.update(WeightUpdate(policy_version="8", backend="b"))
    assert [each.weights.version for each in made] == ["7", "8", "7"]
    assert engine_of(made[1]).orders == [("update", "7", "/w"), ("update", "8", None)]
    assert [each.weights.changes for each in made] == [2, 4, 2]


async def test_no_call_begins_while_weights_are_loaded() -> None:
    backends = Backends([backend("a")])
    loading = engine_of(backends.first).obeys = anyio.Event()
    began = []

    async def call() -> None:
        async with backends.lease().call() as admitted:
            began.append(admitted.backend.weights)

    async with anyio.create_task_group() as group:
        group.start_soon(backends.update, WeightUpdate(policy_version="7", weights_path="/w"))
        await loop_turns()
        group.start_soon(call)
        await loop_turns()
        assert began == []
        with pytest.raises(BackendRefusedError, match="being updated already"):
            await backends.update(WeightUpdate(policy_version="8"))
        loading.set()
    assert began == [Weights("7", 2, told=True)]


async def test_an_update_that_takes_too_long_has_failed() -> None:
    backends = Backends([backend("a")])
    engine_of(backends.first).obeys = anyio.Event()
    with pytest.raises(BackendRefusedError, match="longer than"):
        await backends.update(WeightUpdate(policy_version="7", timeout_seconds=0.01))
    assert backends.first.weights.in_doubt


async def test_a_backend_whose_update_failed_is_closed_and_its_weights_are_nobodys() -> None:
    backends, made = three()
    engine_of(made[0]).fails = True
    with pytest.raises(BackendRefusedError, match=r"not updated.*a: the update to 7") as refused:
        await backends.update(WeightUpdate(policy_version="7"))
    assert refused.value.status == 502
    assert [each.open for each in made] == [False, True, True]
    assert made[0].weights.in_doubt
    engine_of(made[0]).fails = False
    await backends.update(WeightUpdate(policy_version="7", backend="a"))
    assert not made[0].weights.in_doubt
    assert made[0].failure == ""
    await backends.resume()
    assert made[0].open


async def test_weights_that_were_put_in_place_elsewhere_are_named_in_any_engine() -> None:
    backends = Backends([backend("a", controls=[])])
    with pytest.raises(BackendRefusedError, match="takes no orders to load") as refused:
        await backends.update(WeightUpdate(policy_version="7", weights_path="/w"))
    assert refused.value.status == 409
    await backends.update(WeightUpdate(policy_version="7"))
    assert backends.first.weights.version == "7"
    assert engine_of(backends.first).orders == []
