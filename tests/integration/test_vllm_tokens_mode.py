"""Tokens mode with a real vLLM, whose own template and parsers are in charge."""

from pathlib import Path

import httpx2
import pytest

from polar_gateway.testing.script import Step
from tests.integration.vllm_server import VllmServer, metric
from tests.polar_gateway.tokens_mode import SCENARIOS, says, sh, talking, user

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]


@pytest.mark.parametrize("name", SCENARIOS)
async def test_what_was_sampled_goes_back_as_it_was(
    vllm: VllmServer, tmp_path: Path, name: str
) -> None:
    scenario = SCENARIOS[name]
    vllm.speak(scenario.script)
    async with talking(tmp_path, vllm.url, **scenario.config) as talk:
        await scenario.play(talk)


async def prefix_hits(url: str) -> float:
    """How many tokens of all prompts so far were found in the prefix cache."""
    async with httpx2.AsyncClient() as http:
        return await metric(http, url, "prefix_cache_hits_total")


@pytest.mark.parametrize("prompts", ["tokens", "messages"])
async def test_the_prefix_cache_reaches_to_the_last_sampled_token(
    vllm: VllmServer, tmp_path: Path, prompts: str
) -> None:
    vllm.speak(says(Step(say="word " * 300, calls=[sh("ls")])))
    async with talking(tmp_path, vllm.url, prompts=prompts) as talk:
        await talk.ask(user("GO"))
        first = talk.last
        before = await prefix_hits(vllm.url)
        await talk.act()
        hits = await prefix_hits(vllm.url) - before
    # The cache keeps whole blocks, of 128 tokens at most.
    if prompts == "tokens":
        assert hits > len(first.context_ids) - 130
    else:
        assert hits < first.prompt_length + 130
