"""Answers that outlive pauses, aborts, updates and backends."""

import json
import re
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from builders.records import Completion
from polar_gateway.backend import SILENCE_SECONDS, Backend, WeightUpdate
from polar_gateway.backends import BackendRefusedError
from polar_gateway.capture.journal import Appended, read_journal
from polar_gateway.capture.reading import ledger_of, read_session
from polar_gateway.dialects.turn import ModelRequest, Text
from polar_gateway.engines.base import EngineReply
from polar_gateway.engines.refusals import unreachable
from polar_gateway.engines.vllm import Vllm
from polar_gateway.testing.engine import Fault, ScriptedEngine
from polar_gateway.testing.script import Rule, Script, ScriptedCall, Step
from tests.polar_gateway.test_proxy import (
    BASH,
    CALLS,
    Asked,
    Bench,
    all_ended,
    bench,
    has_said,
    loop_turns,
    said_in,
    until,
)

ANSWER = Step(
    think="I should look at the files that there are before I say anything of them.",
    say="Let me look at what there is in this folder, and in the one above.",
    calls=[
        ScriptedCall(name="bash", arguments={"command": "ls -la . && ls -la .. && pwd"}),
        ScriptedCall(name="bash", arguments={"command": "cat notes.txt"}),
    ],
)
SCRIPT = Script(rules=[Rule(match="hi", tokens="canonical", steps=[ANSWER])])
FIRST = WeightUpdate(policy_version="v1", weights_path="/one")
SECOND = WeightUpdate(policy_version="v2", weights_path="/two")


def sampled(b: Bench) -> list[int]:
    """What the engine said of one answer in all its legs."""
    return [token for call in b.engine.calls for token in call.token_ids]


def spans(completion: Completion) -> list[tuple[str | None, int, int]]:
    return [(span.version, span.start, span.end) for span in completion.versions]


@asynccontextmanager
async def paused_in_answer(
    b: Bench, path: str, body: Any, *, at: int, mode: Any = "abort"
) -> AsyncIterator[Asked]:
    """An answer that has got as far as its token `at` when all is paused."""
    b.engine.hold(after=at)
    async with b.asking(path, body) as asked:
        await has_said(b, at)
        await loop_turns()
        await b.backends.pause(mode, timeout=30)
        b.engine.release()
        yield asked


# ---- an abort is not noticed ----


@pytest.mark.parametrize(
    ("dialect", "stream", "at"),
    [
        *[(dialect, True, at) for dialect in CALLS for at in (2, 12, 30, 48, 75)],
        *[(dialect, False, 30) for dialect in CALLS],
    ],
)
async def test_an_aborted_answer_is_gone_on_with_and_told_as_one(
    tmp_path: Path, dialect: str, stream: bool, at: int
) -> None:
    path, body = CALLS[dialect]
    tool = {"name": "bash", "type": "function", "input_schema": {"type": "object"}}
    tools = {"chat": BASH, "responses": tool, "anthropic": {**tool, "type": "custom"}}
    body = {"model": "m", "stream": stream, "tools": [tools[dialect]], **body}
    async with bench(tmp_path, SCRIPT, probed=True) as b:
        _, undisturbed = await b.ask(path, body)
        [whole] = b.engine.calls
        assert at < len(whole.token_ids)
        b.engine.calls.clear()
        await b.backends.update(FIRST)
        async with paused_in_answer(b, path, body, at=at) as asked:
            await b.backends.update(SECOND)
            await b.backends.resume()
        _, one = b.completions
        first, second = b.engine.calls
    assert asked.status == 200
    assert told(asked.answer, dialect, stream) == told(undisturbed, dialect, stream)
    assert second.prompt_token_ids == [*first.prompt_token_ids, *first.token_ids]
    assert list(one.prompt_ids) == first.prompt_token_ids
    assert list(one.sampled_ids) == [*first.token_ids, *second.token_ids]
    assert one.logprobs == array("f", [*first.logprobs, *second.logprobs])
    assert spans(one) == [("v1", 0, at), ("v2", at, len(one.sampled_ids))]
    assert (one.policy_version, one.backend, one.delivered) == ("v1", "backend-1", True)
    assert one.findings == []
    [_, read] = read_session(b.journal).completions
    assert read.versions == one.versions


def told(answer: Any, dialect: str, stream: bool) -> Any:
    """What a harness makes of an answer: its reasoning, text and calls, and that it has ended."""
    if dialect == "chat" and stream:
        said = said_in(answer)
        for call in said.get("tool_calls", []):
            call.pop("id", None)
        return said
    if stream:
        events = [json.loads(data) for data in re.findall(r"^data: ({.*)$", answer, re.MULTILINE)]
        pieces: dict[str, str] = {}
        for event in events:
            kind = event["type"]
            index = str(event.get("index", event.get("output_index")))
            delta = event.get("delta")
            if isinstance(delta, str) and kind.endswith(".delta"):
                pieces[index] = pieces.get(index, "") + delta
            elif isinstance(delta, dict):
                text = "".join(str(v) for k, v in delta.items() if k not in ("type", "signature"))
                pieces[index] = pieces.get(index, "") + text
        return pieces, events[-1]["type"]
    answer.pop("usage")
    moving = r'"(id|call_id|created|created_at|completed_at|signature|encrypted_content)": [^,}]*'
    return re.sub(moving, "", json.dumps(answer))


async def test_an_answer_may_be_aborted_again_and_again(tmp_path: Path) -> None:
    async with bench(tmp_path, SCRIPT, probed=True) as b:
        await b.backends.update(FIRST)
        body = b.chat(stream=True)
        async with paused_in_answer(b, "/v1/chat/completions", body, at=5) as asked:
            for number, more in enumerate([4, 1, 20]):
                await b.backends.update(WeightUpdate(policy_version=f"w{number}"))
                b.engine.hold(after=more)
                await b.backends.resume()
                await has_said(b, more)
                await b.backends.pause("abort", timeout=30)
            b.engine.release()
            await b.backends.resume()
        [one] = b.completions
        assert asked.status == 200
        assert list(one.sampled_ids) == sampled(b)
        assert spans(one) == [
            ("v1", 0, 5),
            ("w0", 5, 9),
            ("w1", 9, 10),
            ("w2", 10, len(one.sampled_ids)),
        ]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_aborted_before_its_first_token_is_just_asked_again(
    tmp_path: Path, stream: bool
) -> None:
    async with bench(tmp_path, SCRIPT, probed=True) as b:
        b.engine.hold()
        async with b.asking("/v1/chat/completions", b.chat(stream=stream)) as asked:
            await until(lambda: len(b.engine.in_flight) == 1)
            await loop_turns()
            await b.backends.pause("abort", timeout=30)
            await b.backends.update(FIRST)
            b.engine.release()
            await b.backends.resume()
        [one] = b.completions
        assert asked.status == 200
        assert (one.policy_version, one.versions) == ("v1", [])
        assert list(one.sampled_ids) == b.engine.calls[-1].token_ids


@pytest.mark.parametrize("stream", [False, True])
async def test_what_reached_an_engine_that_was_paused_already_is_asked_anew(
    tmp_path: Path, stream: bool
) -> None:
    async with bench(tmp_path, SCRIPT, probed=True) as b:
        await b.engine.pause("abort")
        async with b.asking("/v1/chat/completions", b.chat(stream=stream)) as asked:
            await until(lambda: len(b.engine.in_flight) == 1)
            await b.backends.pause("abort", timeout=30)
            assert b.backends.first.in_flight == 0
            await b.backends.update(FIRST)
            await b.backends.resume()
        [one] = b.completions
        assert asked.status == 200
        assert (one.policy_version, one.versions, one.findings) == ("v1", [], [])
        assert b.engine.total_calls == 2


async def test_a_harness_hears_signs_of_life_for_as_long_as_a_pause_lasts(tmp_path: Path) -> None:
    quick: dict[str, Any] = {"header_delay_seconds": 0.05, "keep_alive_seconds": 0.05}
    async with bench(tmp_path, SCRIPT, probed=True, **quick) as b:
        await b.backends.pause("wait", timeout=1)
        async with b.post("/v1/chat/completions", b.chat(stream=True)) as response:
            assert response.status == 200
            for _ in range(4):
                assert await response.content.readany()
            assert b.engine.total_calls == 0
            await b.backends.resume()
            assert '"finish_reason":"tool_calls"' in await response.text()


async def test_a_pause_uses_up_no_patience(tmp_path: Path) -> None:
    async with bench(tmp_path, SCRIPT, probed=True, engine_patience_seconds=0.5) as b:
        b.engine.faults = [Fault(status=500)]
        await b.backends.pause("wait", timeout=1)
        async with b.asking("/v1/chat/completions", b.chat()) as asked:
            await anyio.sleep(0.6)
            await b.backends.resume()
        assert (asked.status, b.engine.total_calls) == (200, 2)


async def test_the_seal_ends_what_waits_for_a_resume_and_keeps_its_tokens(tmp_path: Path) -> None:
    async with bench(tmp_path, SCRIPT, probed=True) as b:
        await b.backends.update(FIRST)
        body = b.chat(stream=True)
        async with paused_in_answer(b, "/v1/chat/completions", body, at=7) as asked:
            b.session.seal()
            await all_ended(b)
        [cut] = b.completions
        assert "this session has ended" in asked.answer
        assert list(cut.sampled_ids) == b.engine.calls[0].token_ids[:7]
        assert (cut.delivered, cut.findings) == (False, ["call_cut_by_seal"])
        assert cut.policy_version == "v1"
        assert b.backends.first.sessions == 0
        await b.backends.resume()


@pytest.mark.parametrize("stream", [False, True])
async def test_where_the_engine_cannot_resume_the_harness_backs_off(
    tmp_path: Path, stream: bool
) -> None:
    async with bench(tmp_path, SCRIPT, probed=True, served={"renders": False}) as b:
        body = b.chat(stream=stream)
        async with paused_in_answer(b, "/v1/chat/completions", body, at=7) as asked:
            pass
        [partial] = b.completions
        assert asked.status == (200 if stream else 503)
        assert "the engine aborted the generation" in str(asked.answer)
        assert list(partial.sampled_ids) == b.engine.calls[0].token_ids[:7]
        assert (partial.delivered, partial.findings) == (False, ["aborted"])
        await b.backends.resume()


async def test_what_a_grammar_holds_is_not_gone_on_with(tmp_path: Path) -> None:
    async with bench(tmp_path, SCRIPT, probed=True) as b:
        body = b.chat(tool_choice="required")
        async with paused_in_answer(b, "/v1/chat/completions", body, at=7) as asked:
            await b.backends.resume()
        assert asked.status == 503
        [partial] = b.completions
        assert partial.findings == ["aborted"]


class Forgetful(Vllm):
    """Makes something else of a resumed answer than it was."""

    async def resume(
        self, request: ModelRequest, request_id: str, partial: EngineReply
    ) -> EngineReply:
        reply = await super().resume(request, request_id, partial)
        reply.blocks = [Text(text="Something else.")]
        return reply


async def test_a_whole_that_does_not_begin_with_what_was_told_is_an_error_in_the_stream(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path, SCRIPT, probed=True) as b:
        engine = Forgetful(b.engine.url, model="tiny")
        await engine.probe()
        b.engine.calls.clear()
        b.backends.first.engine = engine
        body = b.chat(stream=True)
        async with paused_in_answer(b, "/v1/chat/completions", body, at=12) as asked:
            await b.backends.resume()
        await engine.aclose()
        assert "went on otherwise than it had begun" in asked.answer
        assert "Something else" not in asked.answer
        [one] = b.completions
        assert list(one.sampled_ids) == sampled(b)
        assert (one.delivered, one.findings) == (False, ["aborted"])
        assert one.delivered_tokens is not None
        assert one.delivered_tokens <= 12


async def test_an_answer_that_was_told_nothing_of_may_become_anything(tmp_path: Path) -> None:
    async with bench(tmp_path, SCRIPT, probed=True) as b:
        engine = Forgetful(b.engine.url, model="tiny")
        await engine.probe()
        b.engine.calls.clear()
        b.backends.first.engine = engine
        async with paused_in_answer(b, "/v1/chat/completions", b.chat(), at=12) as asked:
            await b.backends.resume()
        await engine.aclose()
        assert asked.answer["choices"][0]["message"]["content"] == "Something else."


# ---- answers that are kept, or finished first ----


async def test_a_kept_answer_says_of_which_tokens_nobody_knows_the_version(tmp_path: Path) -> None:
    async with bench(tmp_path, SCRIPT, probed=True) as b:
        await b.backends.update(FIRST)
        body = b.chat(stream=True)
        async with paused_in_answer(b, "/v1/chat/completions", body, at=12, mode="keep") as asked:
            await b.backends.update(SECOND)
            await b.backends.resume()
        [one] = b.completions
        assert asked.status == 200
        assert b.engine.total_calls == 1
        (old, start, known), (nobody, begins, end) = spans(one)
        assert (old, start, nobody, end) == ("v1", 0, None, len(one.sampled_ids))
        assert 0 < known == begins <= 12


async def test_a_kept_answer_has_the_engines_own_spans_where_it_tells_them(tmp_path: Path) -> None:
    async with bench(tmp_path, SCRIPT, probed=True) as b:
        engine = Vllm(b.engine.url, model="tiny", token_route="generate")
        await engine.probe()
        b.engine.calls.clear()
        b.backends.first.engine = engine
        await b.backends.update(FIRST)
        async with paused_in_answer(
            b, "/v1/chat/completions", b.chat(), at=12, mode="keep"
        ) as asked:
            await b.backends.update(SECOND)
            await b.backends.resume()
        await engine.aclose()
        [one] = b.completions
        assert asked.status == 200
        assert spans(one) == [("v1", 0, 12), ("v2", 12, len(one.sampled_ids))]


async def test_what_is_waited_for_has_one_version(tmp_path: Path) -> None:
    async with bench(tmp_path, SCRIPT, probed=True) as b:
        await b.backends.update(FIRST)
        b.engine.hold(after=12)
        async with b.asking("/v1/chat/completions", b.chat(stream=True)):
            await has_said(b, 12)
            with pytest.raises(BackendRefusedError):
                await b.backends.pause("wait", timeout=0.01)
            b.engine.release()
            await b.backends.pause("wait", timeout=30)
        await b.backends.update(SECOND)
        await b.backends.resume()
        await b.ask("/v1/chat/completions", b.chat("and hi"))
        assert [(c.policy_version, c.versions) for c in b.completions] == [("v1", []), ("v2", [])]


async def test_the_tasks_own_version_counts_until_a_trainer_sets_one(tmp_path: Path) -> None:
    async with bench(tmp_path, SCRIPT, probed=True) as b:
        b.session.policy_version = "7"
        await b.ask("/v1/chat/completions", b.chat())
        body = b.chat("and hi", stream=True)
        async with paused_in_answer(b, "/v1/chat/completions", body, at=5):
            await b.backends.update(SECOND)
            await b.backends.resume()
        one, two = b.completions
        assert (one.policy_version, one.versions) == ("7", [])
        assert spans(two) == [("7", 0, 5), ("v2", 5, len(two.sampled_ids))]


# ---- no token has the name of weights that did not sample it ----


def assert_stamped_truly(b: Bench, completion: Completion) -> None:
    """By what the weights of that name say of each token that has one."""
    ids, context = list(completion.sampled_ids), list(completion.prompt_ids)
    versions = [completion.policy_version] * len(ids)
    for version, start, end in spans(completion):
        versions[start:end] = [version] * (end - start)
    assert completion.logprobs is not None
    for version, token, logprob in zip(versions, ids, completion.logprobs, strict=True):
        if version is not None:
            policy = b.engine.policies[version]
            truth = policy.logprob(policy.context(context), token)
            assert logprob == pytest.approx(truth, abs=1e-4), version
        context.append(token)


class Meddled(Vllm):
    """Calls meanwhile go on between the loading of new weights and their naming, which may fail."""

    scripted: ScriptedEngine
    fails = False

    async def update(self, policy_version: str, weights_path: str | None) -> None:
        loading = {"weights_path": weights_path}
        await self.api.order("/collective_rpc", method="reload_weights", kwargs=loading)
        self.scripted.hold(after=24)
        await loop_turns()
        if self.fails:
            raise unreachable(OSError("it was lost"))
        await super().update(policy_version, None)


@asynccontextmanager
async def meddled(b: Bench, route: Any) -> AsyncIterator[Meddled]:
    """The bench's backend, asked by that route and known by the name of v1."""
    engine = Meddled(b.engine.url, model="tiny", token_route=route)
    engine.scripted = b.engine
    await engine.probe()
    b.engine.calls.clear()
    backend = b.backends.first
    backend.engine = engine
    try:
        await b.backends.update(FIRST)
        yield engine
    finally:
        await engine.aclose()


ROUTES = pytest.mark.parametrize("route", ["chat", "generate"])


@ROUTES
async def test_an_update_that_pauses_nothing_mixes_up_no_names(tmp_path: Path, route: str) -> None:
    async with bench(tmp_path, SCRIPT, probed=True) as b, meddled(b, route):
        b.engine.hold(after=12)
        async with b.asking("/v1/chat/completions", b.chat(stream=True)) as asked:
            await has_said(b, 12)
            await b.backends.update(SECOND)
            assert b.backends.first.open
            b.engine.release()
        [one] = b.completions
        assert asked.status == 200
        assert_stamped_truly(b, one)
        assert {"v1"} < {version for version, _, _ in spans(one)}


@ROUTES
async def test_an_update_that_fails_leaves_no_name_to_what_comes_after(
    tmp_path: Path, route: str
) -> None:
    """The engine has the new weights then, and calls them by the old name."""
    async with bench(tmp_path, SCRIPT, probed=True) as b, meddled(b, route) as engine:
        body = b.chat(stream=True)
        async with paused_in_answer(b, "/v1/chat/completions", body, at=12, mode="keep"):
            engine.fails = True
            with pytest.raises(BackendRefusedError, match="it was lost"):
                await b.backends.update(SECOND)
            b.engine.release()
            await b.backends.resume()
        await b.ask("/v1/chat/completions", b.chat("and hi"))
        for one in b.completions:
            assert_stamped_truly(b, one)


@ROUTES
async def test_weights_that_were_put_in_place_before_anybody_said_so_mix_up_no_names(
    tmp_path: Path, route: str
) -> None:
    async with bench(tmp_path, SCRIPT, probed=True) as b:
        engine = Vllm(b.engine.url, model="tiny", token_route=route)  # type: ignore[arg-type]
        await engine.probe()
        b.engine.calls.clear()
        b.backends.first.engine = engine
        await b.backends.update(FIRST)
        b.engine.hold(after=12)
        async with b.asking("/v1/chat/completions", b.chat(stream=True)):
            await has_said(b, 12)
            b.engine.load_weights("/two")
            b.engine.hold(after=24)
            await has_said(b, 24)
            await b.backends.update(WeightUpdate(policy_version="v2"))
            b.engine.release()
        await engine.aclose()
        [one] = b.completions
        assert_stamped_truly(b, one)


async def test_an_engine_that_was_started_anew_in_silence_gives_its_tokens_no_name(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path, SCRIPT, probed=True) as b:
        backend = b.backends.first
        await b.backends.update(FIRST)
        await b.ask("/v1/chat/completions", b.chat())
        b.engine.load_weights(None)
        b.engine.name_weights("default")
        backend._heard -= SILENCE_SECONDS
        status, _ = await b.ask("/v1/chat/completions", b.chat("and hi"))
        assert status == 200
        one, two = b.completions
        assert (one.policy_version, one.versions) == ("v1", [])
        assert spans(two) == [(None, 0, len(two.sampled_ids))]
        assert "as after a restart" in backend.failure


async def test_an_engine_that_was_started_anew_gives_its_tokens_no_name(tmp_path: Path) -> None:
    async with bench(tmp_path, SCRIPT, probed=True, engine_patience_seconds=10) as b:
        await b.backends.update(FIRST)
        await b.engine.die()
        async with b.asking("/v1/chat/completions", b.chat()) as asked:
            await until(lambda: not b.backends.first.healthy)
            b.engine.load_weights(None)
            b.engine.name_weights("default")
            await b.engine.revive()
        assert asked.status == 200
        [one] = b.completions
        assert spans(one) == [(None, 0, len(one.sampled_ids))]


async def test_a_failure_that_was_no_restart_costs_no_name(tmp_path: Path) -> None:
    async with bench(tmp_path, SCRIPT, probed=True) as b:
        await b.backends.update(FIRST)
        b.backends.suspect(b.backends.first, "it was slow")
        await b.ask("/v1/chat/completions", b.chat())
        [one] = b.completions
        assert (one.policy_version, one.versions) == ("v1", [])


async def test_what_a_killed_node_leaves_has_the_versions_that_sampled_it(tmp_path: Path) -> None:
    """Of a call, before its closing record: only its end of a tool call was journalled."""
    async with bench(tmp_path, SCRIPT, probed=True) as b:
        b.session.policy_version = "0"
        await b.backends.update(FIRST)
        b.engine.hold(after=12)
        async with b.asking("/v1/chat/completions", b.chat(stream=True)):
            await has_said(b, 12)
            await b.backends.pause("keep", timeout=30)
            await b.backends.update(SECOND)
            await b.backends.resume()
            b.engine.release()
            await until(lambda: any(isinstance(r, Appended) for r in journalled(b)))
            [left] = read_as_killed(b)
        (old, start, known), (nobody, begins, end) = spans(left)
        assert (old, start, nobody, end) == ("v1", 0, None, len(left.sampled_ids))
        assert 0 < known == begins <= 12
        assert left.policy_version == "v1"


def journalled(b: Bench) -> list[Any]:
    return read_journal(b.journal).records


def read_as_killed(b: Bench) -> list[Completion]:
    """The session as its journal tells it up to the latest append."""
    contents = read_journal(b.journal)
    last = max(n for n, record in enumerate(contents.records) if isinstance(record, Appended))
    del contents.records[last + 1 :], contents.places[last + 1 :]
    return ledger_of(contents).completion_session().completions


# ---- another backend ----


async def test_an_engine_that_aborts_whatever_it_is_asked_is_not_asked_on_and_on(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path, SCRIPT, probed=True) as b:
        b.engine.faults = [Fault(abort_after=5), Fault(abort_after=0, times=10_000)]
        status, _ = await b.ask("/v1/chat/completions", b.chat())
        assert status == 503
        assert b.engine.total_calls < 10
        [one] = b.completions
        assert (len(one.sampled_ids), one.findings) == (5, ["aborted"])


async def test_what_a_long_answer_took_is_not_taken_from_its_patience(tmp_path: Path) -> None:
    async with bench(tmp_path, SCRIPT, probed=True, engine_patience_seconds=0.5) as b:
        b.engine.faults = [
            Fault(abort_after=5, stall_after=3, stall=0.6),
            Fault(status=500),
        ]
        status, _ = await b.ask("/v1/chat/completions", b.chat())
        assert (status, b.engine.total_calls) == (200, 3)


@asynccontextmanager
async def two_backends(
    tmp_path: Path, **options: Any
) -> AsyncIterator[tuple[Bench, ScriptedEngine]]:
    """A bench whose session has the first of two backends."""
    async with (
        ScriptedEngine(SCRIPT) as other,
        bench(tmp_path, SCRIPT, probed=True, **options) as b,
    ):
        engine = Vllm(other.url, model="tiny")
        backend = Backend("backend-2", other.url, engine, await engine.probe())
        other.calls.clear()
        b.backends._backends["backend-2"] = backend
        await b.ask("/v1/chat/completions", b.chat())
        assert len(b.engine.calls) == 1
        b.engine.calls.clear()
        yield b, other
        await engine.aclose()


async def test_a_session_stays_with_its_backend_and_moves_when_that_fails(tmp_path: Path) -> None:
    async with two_backends(tmp_path) as (b, other):
        first, second = b.backends
        for _ in range(3):
            await b.ask("/v1/chat/completions", b.chat())
        assert (len(b.engine.calls), len(other.calls)) == (3, 0)
        await b.engine.die()
        status, _ = await b.ask("/v1/chat/completions", b.chat())
        assert status == 200
        assert len(other.calls) == 1
        assert (first.healthy, first.sessions, second.sessions) == (False, 0, 1)
        assert [c.backend for c in b.completions][-2:] == ["backend-1", "backend-2"]
        assert b.session.engine_failure is None


async def test_tokens_are_counted_elsewhere_when_a_backend_fails(tmp_path: Path) -> None:
    async with two_backends(tmp_path) as (b, _):
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        _, before = await b.ask("/v1/messages/count_tokens", body)
        await b.engine.die()
        assert await b.ask("/v1/messages/count_tokens", body) == (200, before)


async def test_an_aborted_answer_is_gone_on_with_elsewhere_when_its_backend_is_lost(
    tmp_path: Path,
) -> None:
    async with two_backends(tmp_path) as (b, other):
        await b.backends.update(FIRST)
        first, _ = b.backends
        b.engine.hold(after=9)
        async with b.asking("/v1/chat/completions", b.chat(stream=True)) as asked:
            await has_said(b, 9)
            await loop_turns()
            await b.backends.pause("abort", timeout=30, name="backend-1")
            b.backends.suspect(first, "it was taken away")
        [call] = other.calls
        one = b.completions[-1]
        assert asked.status == 200
        assert call.prompt_token_ids[-9:] == list(one.sampled_ids)[:9]
        assert list(one.sampled_ids)[9:] == call.token_ids
        assert (one.policy_version, one.versions) == ("v1", [])
        await b.backends.resume()
