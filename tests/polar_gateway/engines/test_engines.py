import pytest

from polar_gateway.config import InferenceConfig
from polar_gateway.engines import ENGINES, open_engine
from polar_gateway.engines.openai import OpenAI
from polar_gateway.engines.sglang import Sglang
from polar_gateway.engines.vllm import Vllm


@pytest.mark.parametrize(("name", "kind"), [("vllm", Vllm), ("sglang", Sglang), ("openai", OpenAI)])
async def test_the_engine_that_the_configuration_names_is_opened(
    name: str, kind: type[Vllm | Sglang | OpenAI]
) -> None:
    assert name in ENGINES
    config = InferenceConfig(engine=name, base_url="http://host:8000/v1")  # type: ignore[arg-type]
    engine = open_engine(config, model="m")
    assert isinstance(engine, kind)
    assert (engine.base_url, engine.model) == ("http://host:8000", "m")
    await engine.aclose()


async def test_the_route_for_prompts_of_ids_is_the_configurations() -> None:
    engine = open_engine(InferenceConfig(engine="sglang", token_route="generate"), model="")
    assert isinstance(engine, Sglang)
    assert engine.token_route == "generate"


def test_a_secret_is_read_from_the_variable_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = InferenceConfig(api_key_env="ENGINE_TOKEN")
    monkeypatch.delenv("ENGINE_TOKEN", raising=False)
    with pytest.raises(ValueError, match="variable ENGINE_TOKEN, which is not set"):
        open_engine(config, model="")
    monkeypatch.setenv("ENGINE_TOKEN", "secret")
    assert isinstance(open_engine(config, model=""), Vllm)
