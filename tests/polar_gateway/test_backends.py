"""Backends as sessions lease them and trainers order them about."""

from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest

from builders.records import TokenNode
from polar_gateway.backends import (
    Backend,
    BackendRefusedError,
    Backends,
    WeightUpdate,
    open_backends,
)
from polar_gateway.config import BackendConfig, InferenceConfig
from polar_gateway.dialects.turn import ErrorKind, ModelRequest, Usage
from polar_gateway.engines.base import (
    EngineError,
    EngineProbe,
    EngineReply,
    EngineStream,
    PauseMode,
    Rendering,
)
from polar_gateway.policy_versions import Weights
from polar_gateway.testing.engine import Fault, ScriptedEngine
from tests.polar_gateway.test_proxy import loop_turns

FAILED = EngineError(
    ErrorKind(status=500, code="internal", message="the engine failed"), infra=True, again=True
)


class ObedientEngine:
    """Samples nothing; does as it is told, and remembers it."""

    def __init__(self, found: EngineProbe) -> None:
        self.found = found
        self.orders: list[object] = []
        self.fails = False
        self.obeys: anyio.Event | None = None
        """When it does what it is told; None: at once."""
        self.closed = False

    async def _obey(self, *order: object) -> None:
        self.orders.append(order if len(order) > 1 else order[0])
        if self.obeys is not None:
            await self.obeys.wait()
        if self.fails:
            raise FAILED

    async def probe(self) -> EngineProbe:
        await self._obey("probe")
        return self.found

    async def complete(
        self, request: ModelRequest, request_id: str, after: TokenNode | None = None
    ) -> EngineReply:
        ids = array("i", [1])
        return EngineReply(
            prompt_ids=ids,
            sampled_ids=ids,
            logprobs=None,
            blocks=[],
            finish_reason="stop",
            usage=Usage(),
        )

    async def stream(
        self, request: ModelRequest, request_id: str, after: TokenNode | None = None
    ) -> EngineStream:
        raise FAILED

    async def resume(
        self, request: ModelRequest, request_id: str, partial: EngineReply
    ) -> EngineReply:
        raise FAILED

    async def count_tokens(self, request: ModelRequest) -> int:
        return 1

    async def render(self, request: ModelRequest, *, closed: bool = False) -> Rendering:
        raise FAILED

    async def pause(self, mode: PauseMode) -> None:
        await self._obey("pause", mode)

    async def unpause(self) -> None:
        await self._obey("unpause")

    async def update(self, policy_version: str, weights_path: str | None) -> None:
        await self._obey("update", policy_version, weights_path)

    async def aclose(self) -> None:
        self.closed = True


def backend(name: str, *, controls: list[str] | None = None, **probe: Any) -> Backend:
    known = ["pause", "abort", "update"] if controls is None else controls
    found = EngineProbe(engine="obedient", model="tiny", controls=known, **probe)
    return Backend(name, f"http://{name}", ObedientEngine(found), found)


def engine_of(backend: Backend) -> ObedientEngine:
    assert isinstance(backend.engine, ObedientEngine)
    return backend.engine


def three() -> tuple[Backends, list[Backend]]:
    made = [backend(name) for name in "abc"]
    return Backends(made), made


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
    assert lease.failed(FAILED)
    assert lease.backend is made[1]
    assert [each.sessions for each in made] == [0, 1, 0]
    made[0].healthy = True
    assert lease.backend is made[1]


def test_where_none_is_well_a_session_stays_where_it_is() -> None:
    backends, made = three()
    lease = backends.lease()
    assert lease.backend is made[0]
    assert [lease.failed(FAILED) for _ in range(3)] == [True, True, False]
    assert not any(each.healthy for each in made)
    last = lease.backend
    assert not lease.failed(FAILED)
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


def test_weights_that_the_engine_has_a_name_for_have_it_from_the_start() -> None:
    assert backend("a", weight_version="step-7").weights.version == "step-7"
    assert backend("a", weight_version="default").weights.version is None


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


# ---- new weights ----


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
    assert began == [Weights("7", 2)]


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


# ---- coming, with engines that answer ----


@asynccontextmanager
async def serving(*engines: ScriptedEngine, **options: Any) -> AsyncIterator[Backends]:
    servers = [BackendConfig(base_url=engine.url) for engine in engines]
    inference = InferenceConfig(backends=servers)
    async with open_backends(inference, **{"model": "", "patience": 0.0, **options}) as backends:
        yield backends


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "other"}, "does not serve 'tiny' but other"),
        ({"max_model_len": 4096}, "takes 4096 tokens, of the others 131072"),
        ({"faults": [Fault(omit=["token_ids"], times=99)]}, "cannot be trained on"),
    ],
)
async def test_who_cannot_stand_beside_the_others_is_refused(
    options: dict[str, Any], said: str
) -> None:
    async with ScriptedEngine() as one, ScriptedEngine(**options) as two, serving(one) as backends:
        with pytest.raises(BackendRefusedError, match=said) as refused:
            await backends.add(BackendConfig(base_url=two.url))
        assert refused.value.status == 422
        assert len(list(backends)) == 1


class ChattyEngine(ScriptedEngine):
    """Its template says more than the others' does."""

    def render(self, messages: Any, tools: Any, **arguments: Any) -> str:
        return "Be brief." + super().render(messages, tools, **arguments)


@pytest.mark.parametrize("renders", [True, False])
async def test_another_chat_template_is_noticed(renders: bool) -> None:
    """By what it makes of a conversation: what a model is called says nothing of that."""
    one, two = ScriptedEngine(renders=renders), ChattyEngine(renders=renders)
    async with one, two, serving(one) as backends:
        with pytest.raises(BackendRefusedError, match="tokenizer or chat template"):
            await backends.add(BackendConfig(base_url=two.url))


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
