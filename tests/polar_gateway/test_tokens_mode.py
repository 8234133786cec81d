"""Tokens mode with the scripted engine: what a real vLLM does as well, and what it cannot be made to."""

import json
from pathlib import Path
from typing import Any

import pytest

from polar_gateway.backend import WeightUpdate
from polar_gateway.backends import BackendRefusedError
from polar_gateway.likeness import restarted
from polar_gateway.testing.engine import Fault, ScriptedEngine
from polar_gateway.testing.script import Step
from polar_gateway.testing.sglang import ScriptedSglang
from tests.polar_gateway.gateway import turns
from tests.polar_gateway.test_proxy import connected, loop_turns, until
from tests.polar_gateway.tokens_mode import (
    MORE,
    MORE_TEXT,
    NO_THINKING,
    SCENARIOS,
    THINKING,
    assembled,
    result_text,
    says,
    talking,
    user,
)

ONE = Step(say="one")
KWARGS = NO_THINKING["chat_template_kwargs"]


@pytest.mark.parametrize("name", SCENARIOS)
async def test_what_was_sampled_goes_back_as_it_was(tmp_path: Path, name: str) -> None:
    scenario = SCENARIOS[name]
    async with (
        ScriptedEngine(scenario.script) as engine,
        talking(tmp_path, engine.url, **scenario.config) as talk,
    ):
        await scenario.play(talk)


async def test_an_image_is_sent_as_a_message(tmp_path: Path) -> None:
    async with (
        ScriptedEngine(says(ONE), accepts_images=True) as engine,
        talking(tmp_path, engine.url) as talk,
    ):
        await talk.ask(user("GO"), **NO_THINKING)
        await talk.ask(MORE, **NO_THINKING)
        assert talk.last.mode == "tokens"
        url = {"url": "data:image/png;base64,iVBORw0KGgo="}
        image = {"type": "image_url", "image_url": url}
        await talk.ask({"role": "user", "content": [image]}, **NO_THINKING)
        assert talk.last.notes == ["asked with messages: there are media in it"]
        await talk.ask(MORE, **NO_THINKING)
    assert talk.modes == ["messages", "tokens", "messages", "messages"]


@pytest.mark.parametrize(
    "options", [{"kv_connector": "NixlConnector"}, {"ignores_token_ids": True}]
)
async def test_an_engine_that_cannot_take_ids_is_asked_with_messages(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    async with ScriptedEngine(says(ONE), **options) as engine:
        if "ignores_token_ids" in options:
            engine.renders = False  # or it would be sent them to its generate route
        async with talking(tmp_path, engine.url) as talk:
            await talk.ask(user("GO"))
            await talk.ask(MORE)
            assert talk.modes == ["messages", "messages"]
        with pytest.raises(BackendRefusedError, match="prompts: tokens cannot be had"):
            async with talking(tmp_path, engine.url, prompts="tokens"):
                pass


async def test_ids_that_are_ignored_in_mid_session_move_the_branch_to_messages(
    tmp_path: Path,
) -> None:
    async with (
        ScriptedEngine(says(ONE)) as engine,
        talking(tmp_path, engine.url) as talk,
    ):
        await talk.ask(user("GO"), **NO_THINKING)
        await talk.ask(MORE, **NO_THINKING)
        fork = talk.messages[:]
        engine.ignores_token_ids = True
        for stream in (False, True):
            talk.messages = fork[:]
            await talk.ask(user(f"Stream {stream}?"), stream=stream, **NO_THINKING)
            assert (talk.last.mode, talk.last.findings) == ("messages", ["token_in_ignored"])
            assert talk.last.prompt_ids.tolist() == await talk.rendered(template_kwargs=KWARGS)
        engine.ignores_token_ids = False
        await talk.ask(MORE, **NO_THINKING)
        assert talk.last.notes == ["asked with messages: the engine read another prompt before"]
        talk.messages = fork[:]
        await talk.ask(MORE, **NO_THINKING)
        assert talk.new == f"\n{MORE_TEXT}<think>\n\n</think>\n\n"


@pytest.mark.parametrize("stream", [False, True])
async def test_engines_that_say_only_at_the_end_what_they_have_read_are_distrusted_from_then_on(
    tmp_path: Path, stream: bool
) -> None:
    async with (
        ScriptedSglang(says(ONE)) as engine,
        talking(tmp_path, engine.url, engine="sglang") as talk,
    ):
        await talk.ask(user("GO"), **NO_THINKING)
        engine.ignores_token_ids = True
        await talk.ask(MORE, stream=stream, **NO_THINKING)
        assert (talk.last.mode, talk.last.findings) == ("messages", ["token_in_ignored"])
        engine.ignores_token_ids = False
        await talk.ask(MORE, stream=stream, **NO_THINKING)
        assert talk.last.notes == ["asked with messages: the engine read another prompt before"]


async def test_weights_that_sglang_has_no_name_for_have_the_gateways(tmp_path: Path) -> None:
    async with (
        ScriptedSglang(says(ONE)) as engine,
        talking(tmp_path, engine.url, engine="sglang") as talk,
    ):
        talk.session.policy_version = "7"
        await talk.ask(user("GO"))
        assert (talk.last.policy_version, talk.last.versions) == ("7", [])
        await talk.backends.update(WeightUpdate(policy_version="8"))
        engine.name_weights("default")  # as after a restart
        await talk.ask(MORE)
        assert [each.version for each in talk.last.versions] == [None]
        assert "as after a restart" in restarted(
            await talk.backends.first.engine.probe(), talk.backends.first
        )


async def test_a_call_that_is_tried_again_is_composed_once(tmp_path: Path) -> None:
    async with (
        ScriptedEngine(says(THINKING)) as engine,
        talking(tmp_path, engine.url) as talk,
    ):
        await talk.ask(user("GO"))
        engine.faults = [Fault(status=503, times=2)]
        await talk.act()
        assert talk.new == "\n" + result_text("ok", "ok")
        await talk.ask(MORE)
        assert talk.last.findings == ["history_rewritten"]


async def test_an_engine_that_renders_no_reasoning_is_told_what_is_new_by_a_small_conversation(
    tmp_path: Path,
) -> None:
    (tmp_path / "other").mkdir()
    async with ScriptedEngine(says(THINKING), renders=False) as engine:
        async with talking(tmp_path, engine.url) as talk:
            assert talk.backends.first.probe.renders == "suffix"
            await talk.ask(user("GO"))
            await talk.act()
            assert talk.new == "\n" + result_text("ok", "ok")
            await talk.ask(MORE)
            assert talk.last.mode == "messages"
        async with talking(tmp_path / "other", engine.url, history="keep") as talk:
            await talk.ask(user("GO"))
            await talk.ask(MORE)
            assert (talk.last.mode, talk.last.findings) == ("tokens", ["history_kept"])


async def test_a_harness_goes_on_from_the_part_of_an_answer_that_it_received(
    tmp_path: Path,
) -> None:
    script = says(Step(say="one two three four five six seven eight nine ten"))
    async with (
        ScriptedEngine(script) as engine,
        talking(tmp_path, engine.url) as talk,
    ):
        engine.hold(after=8)
        messages = [user("GO")]
        body = {"model": "m", "messages": messages, "tools": talk.tools, "stream": True}
        data = json.dumps({**body, **NO_THINKING}).encode()
        reader, writer = await connected(talk, "/v1/chat/completions", data, len(data))
        await until(lambda: [call.sent_tokens for call in turns(engine)] == [8])
        await loop_turns()
        writer.write_eof()
        said = b"".join([part async for part in reader]).decode()
        writer.close()
        engine.release()
        await until(lambda: len(talk.completions) == 1)
        part = assembled(said)["content"]
        talk.messages = [*messages, {"role": "assistant", "content": part}]
        await talk.ask(MORE, **NO_THINKING)
        first, second = talk.completions
        assert (second.attached, second.mode) == ("half_delivered", "tokens")
        assert second.continued_tokens == first.delivered_tokens
        assert second.continued_tokens is not None
        known = first.prompt_ids + first.sampled_ids[: second.continued_tokens]
        assert talk.tokenizer.decode(known.tolist()).endswith(part)
        new = second.prompt_ids[len(known) :].tolist()
        assert second.prompt_ids[: len(known)] == known
        assert talk.tokenizer.decode(new) == (f"<|im_end|>\n{MORE_TEXT}<think>\n\n</think>\n\n")
