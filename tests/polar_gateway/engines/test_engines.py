import pytest

from polar_gateway.config import InferenceConfig
from polar_gateway.engines import ENGINES, open_engine
from polar_gateway.engines.vllm import Vllm


async def test_the_engine_that_the_configuration_names_is_opened() -> None:
    engine = open_engine(InferenceConfig(base_url="http://host:8000/v1"), model="m")
    assert isinstance(engine, Vllm)
    assert (engine.base_url, engine.model) == ("http://host:8000", "m")
    await engine.aclose()


def test_an_engine_that_is_not_built_in_is_refused_in_words() -> None:
    assert list(ENGINES) == ["vllm"]
    with pytest.raises(ValueError, match=r"inference.engine is 'sglang'.*it can ask vllm"):
        open_engine(InferenceConfig(engine="sglang"), model="")


def test_a_secret_is_read_from_the_variable_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = InferenceConfig(api_key_env="ENGINE_TOKEN")
    monkeypatch.delenv("ENGINE_TOKEN", raising=False)
    with pytest.raises(ValueError, match="variable ENGINE_TOKEN, which is not set"):
        open_engine(config, model="")
    monkeypatch.setenv("ENGINE_TOKEN", "secret")
    assert isinstance(open_engine(config, model=""), Vllm)
