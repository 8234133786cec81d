"""Backends as sessions lease them, and as they come and go."""

import anyio
import msgspec
import pytest

from polar_gateway.backend import Backend, WeightUpdate
from polar_gateway.backends import BackendRefusedError
from polar_gateway.config import BackendConfig
from polar_gateway.engines.base import EngineError, EngineProbe
from polar_gateway.testing.engine import Fault, ScriptedEngine
from tests.polar_gateway.obedient import FAILED, engine_of, serving, three
from tests.polar_gateway.test_proxy import loop_turns

# ---- which one ----


def test_sessions_are_spread_and_stay() -> None:
    backends, made = three()
    leases = [backends.lease() for _ in range(7)]
    names = [lease.backend.name for lease in leases]
    assert names == ["a", "b", "c", "a", "b", "c", "a"]
    assert [lease.backend.name for lease in leases] == names
    assert [each.sessions for each in made] == [3, 2, 2]


def test_a_session_that_ended_makes_room_where_it_was() -> None:
    backends, made = three()
    leases = [backends.lease() for _ in range(6)]
    assert [lease.backend.name for lease in leases] == list("abcabc")
    leases[1].release()
    assert backends.lease().backend is made[1]


def test_of_equally_loaded_ones_the_one_that_was_used_longest_ago_is_taken() -> None:
    """Sessions that follow one another must not all meet the first backend."""
    backends, _ = three()
    met = []
    for _ in range(6):
        lease = backends.lease()
        met.append(lease.backend.name)
        lease.release()
    assert met == list("abcabc")


async def test_a_call_is_a_use() -> None:
    backends, made = three()
    stays = [backends.lease() for _ in range(3)]
    assert [lease.backend for lease in stays] == made
    async with stays[0].call():
        pass
    assert backends.lease().backend is made[1]


def test_a_released_lease_counts_no_more_and_twice_is_once() -> None:
    backends, made = three()
    lease = backends.lease()
    assert lease.backend is made[0]
    lease.release()
    lease.release()
    assert lease.backend is made[1], "what is still in flight must not fail for it"
    assert [each.sessions for each in made] == [0, 0, 0]


def test_a_session_moves_when_its_backend_fails_and_stays_there() -> None:
    backends, made = three()
    lease = backends.lease()
    assert lease.backend is made[0]
    assert lease.failed(made[0], FAILED)
    assert lease.backend is made[1]
    assert [each.sessions for each in made] == [0, 1, 0]
    made[0].healthy = True
    assert lease.backend is made[1]


def test_two_calls_that_fail_with_one_backend_blame_that_one_alone() -> None:
    backends, made = three()
    lease = backends.lease()
    assert lease.backend is made[0]
    assert lease.failed(made[0], FAILED)
    assert lease.failed(made[0], FAILED)
    assert lease.backend is made[1]
    assert [each.healthy for each in made] == [False, True, True]


def test_where_none_is_well_a_session_stays_where_it_is() -> None:
    backends, made = three()
    lease = backends.lease()
    assert lease.backend is made[0]
    assert [lease.failed(each, FAILED) for each in made] == [True, True, False]
    assert not any(each.healthy for each in made)
    last = lease.backend
    assert not lease.failed(last, FAILED)
    assert lease.backend is last


def test_new_sessions_go_to_those_that_are_well_and_open() -> None:
    backends, made = three()
    made[0].healthy = False
    made[1].pause_mode = "wait"
    assert {backends.lease().backend.name for _ in range(4)} == {"c"}
    made[2].draining = True
    assert backends.lease().backend is made[1]


async def test_a_backend_that_failed_is_looked_at_until_it_is_well() -> None:
    backends, made = three()
    engine = engine_of(made[0])
    engine.fails = True
    async with anyio.create_task_group() as group:
        group.start_soon(backends.watch, 0.01)
        backends.suspect(made[0], "it broke")
        while engine.orders.count("probe") < 3:
            await made[0].changed()
        assert not made[0].healthy
        assert made[0].failure == "the engine failed"
        engine.fails = False
        while not made[0].healthy:
            await made[0].changed()
        assert made[0].failure == ""
        looks = len(engine.orders)
        await anyio.sleep(0.05)
        assert len(engine.orders) == looks
        group.cancel_scope.cancel()


async def test_a_backend_that_came_back_as_another_is_not_well() -> None:
    backends, made = three()
    engine_of(made[0]).found = EngineProbe(engine="obedient", model="other")
    async with anyio.create_task_group() as group:
        group.start_soon(backends.watch, 0.01)
        backends.suspect(made[0], "it broke")
        while "serves" not in made[0].failure:
            await made[0].changed()
        assert not made[0].healthy
        group.cancel_scope.cancel()


async def test_a_backend_that_is_updated_while_it_is_looked_at_was_not_restarted() -> None:
    backends, made = three()
    await backends.update(WeightUpdate(policy_version="7"))
    engine = engine_of(made[0])
    engine.found = msgspec.structs.replace(made[0].probe, weight_version="7")
    looking = engine.obeys = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(backends.watch, 0.01)
        backends.suspect(made[0], "it broke")
        await loop_turns()
        engine.obeys = None
        await backends.update(WeightUpdate(policy_version="8"))
        looking.set()
        await made[0].changed()
        assert (made[0].healthy, made[0].weights.in_doubt) == (True, False)
        group.cancel_scope.cancel()


async def test_a_backend_that_came_back_with_other_weights_waits_for_an_update() -> None:
    backends, made = three()
    await backends.update(WeightUpdate(policy_version="7"))
    engine = engine_of(made[0])
    engine.found = msgspec.structs.replace(made[0].probe, weight_version="default")
    async with anyio.create_task_group() as group:
        group.start_soon(backends.watch, 0.01)
        backends.suspect(made[0], "it broke")
        while "as after a restart" not in made[0].failure:
            await made[0].changed()
        assert made[0].weights.in_doubt
        await backends.update(WeightUpdate(policy_version="7", backend="a"))
        engine.found = msgspec.structs.replace(made[0].probe, weight_version="7")
        while not made[0].healthy:
            await made[0].changed()
        assert not made[0].weights.in_doubt
        group.cancel_scope.cancel()


# ---- leaving ----


def test_a_draining_backend_keeps_its_sessions_and_gets_no_more() -> None:
    backends, made = three()
    lease = backends.lease()
    assert lease.backend is made[0]
    backends.drain("a")
    assert lease.backend is made[0]
    assert {backends.lease().backend.name for _ in range(4)} == {"b", "c"}


async def test_a_removed_backend_finishes_its_calls_and_is_closed_then() -> None:
    backends, made = three()
    lease = backends.lease()
    async with lease.call() as call:
        held = call.backend
        assert held is made[0]
        removed = await backends.remove("a")
        assert removed.in_flight == 1
        assert not engine_of(held).closed
        assert lease.backend is made[1]
    assert engine_of(held).closed
    await backends.remove("b")
    assert engine_of(made[1]).closed


async def test_a_paused_backend_is_not_removed_under_the_answers_that_it_keeps() -> None:
    backends, made = three()
    await backends.pause("keep", timeout=1, name="a")
    with pytest.raises(BackendRefusedError, match="a is paused; resume it first"):
        await backends.remove("a")
    await backends.resume("a")
    await backends.remove("a")
    assert made[0].removed


async def test_a_paused_backend_that_is_dead_can_be_removed() -> None:
    backends, made = three()
    await backends.pause("keep", timeout=1, name="a")
    engine_of(made[0]).fails = True
    with pytest.raises(BackendRefusedError, match="a did not resume"):
        await backends.resume("a")
    await backends.remove("a")
    assert engine_of(made[0]).closed


async def test_a_backend_is_not_removed_while_it_is_updated() -> None:
    backends, made = three()
    loading = engine_of(made[0]).obeys = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(backends.update, WeightUpdate(policy_version="7", backend="a"))
        await loop_turns()
        with pytest.raises(BackendRefusedError, match="a is being updated"):
            await backends.remove("a")
        loading.set()
    await backends.remove("a")


async def test_who_waits_at_a_backend_that_fails_asks_another() -> None:
    backends, made = three()
    lease = backends.lease()
    assert lease.backend is made[0]
    await backends.pause("wait", timeout=1, name="a")
    met: list[Backend] = []

    async def call() -> None:
        async with lease.call() as admitted:
            met.append(admitted.backend)

    async with anyio.create_task_group() as group:
        group.start_soon(call)
        await loop_turns()
        assert met == []
        backends.suspect(made[0], "it broke")
    assert met == [made[1]]


async def test_the_last_one_stays() -> None:
    backends, _ = three()
    backends.drain("a")
    await backends.remove("b")
    for leave in (backends.remove("c"), anyio.to_thread.run_sync(backends.drain, "c")):
        with pytest.raises(BackendRefusedError, match="c is the last") as refused:
            await leave
        assert refused.value.status == 409
    with pytest.raises(BackendRefusedError, match="no backend b, but a, c") as refused:
        backends.drain("b")
    assert refused.value.status == 404


# ---- coming, with engines that answer ----


async def test_the_backends_of_a_configuration_are_probed_and_named() -> None:
    async with ScriptedEngine() as one, ScriptedEngine() as two, serving(one, two) as backends:
        assert [each.name for each in backends] == ["backend-1", "backend-2"]
        assert backends.model == "tiny"
        assert all(each.probe.token_ids for each in backends)


async def test_one_more_is_probed_before_it_serves() -> None:
    async with ScriptedEngine() as one, ScriptedEngine() as two, serving(one) as backends:
        added = await backends.add(BackendConfig(base_url=two.url, name="more"))
        assert added.name == "more"
        assert two.total_calls > 0
        assert [each.name for each in backends] == ["backend-1", "more"]
        with pytest.raises(BackendRefusedError, match="more already") as refused:
            await backends.add(BackendConfig(base_url=two.url, name="more"))
        assert refused.value.status == 409


async def test_one_more_that_lacks_the_weights_of_the_others_waits_for_them() -> None:
    async with ScriptedEngine() as one, ScriptedEngine() as two, serving(one) as backends:
        await backends.update(WeightUpdate(policy_version="7", weights_path="/w"))
        added = await backends.add(BackendConfig(base_url=two.url, name="more"))
        assert not added.open
        assert added.weights.in_doubt
        assert added.failure == "its weights are not named, those of the others 7; update it"
        await backends.update(WeightUpdate(policy_version="7", weights_path="/w", backend="more"))
        await backends.resume("more")
        assert (added.open, added.weights.version, added.failure) == (True, "7", "")


async def test_one_more_that_has_the_weights_of_the_others_serves_at_once() -> None:
    async with ScriptedEngine() as one, ScriptedEngine() as two, serving(one) as backends:
        for engine in (one, two):
            engine.name_weights("7")
        await backends.update(WeightUpdate(policy_version="7"))
        added = await backends.add(BackendConfig(base_url=two.url, name="more"))
        assert (added.open, added.weights.version) == (True, "7")


async def test_a_backend_that_is_removed_while_it_is_looked_at_is_left_alone() -> None:
    """Connections that nobody closes would fail this test as a warning."""
    async with ScriptedEngine() as one, ScriptedEngine() as two, serving(one, two) as backends:
        second = backends.named("backend-2")
        two.hold()
        async with anyio.create_task_group() as group:
            group.start_soon(backends.watch, 0.01)
            backends.suspect(second, "it broke")
            calls = two.total_calls
            while two.total_calls == calls:
                await loop_turns()
            await backends.remove("backend-2")
            two.release()
            while "removed" not in second.failure and "reached" not in second.failure:
                await second.changed()
            group.cancel_scope.cancel()
        with pytest.raises(EngineError, match="cannot be reached"):
            await second.engine.probe()


async def test_who_does_not_answer_is_refused() -> None:
    async with ScriptedEngine() as one, serving(one) as backends:
        with pytest.raises(BackendRefusedError, match="did not answer") as refused:
            await backends.add(BackendConfig(base_url="http://127.0.0.1:9"))
        assert refused.value.status == 502
        missing = BackendConfig(base_url=one.url, api_key_env="POLAR_TEST_NOT_SET")
        with pytest.raises(BackendRefusedError, match="POLAR_TEST_NOT_SET") as refused:
            await backends.add(missing)
        assert refused.value.status == 422


async def test_a_configured_backend_is_waited_for() -> None:
    busy = ScriptedEngine(faults=[Fault(status=503, times=2)])
    async with busy as one, serving(one, patience=30.0) as backends:
        assert backends.first.healthy
