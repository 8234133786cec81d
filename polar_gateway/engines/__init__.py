"""The engines that a node can ask, by the name that its configuration gives them."""

import os
from typing import Protocol

from polar_gateway.config import InferenceConfig
from polar_gateway.engines.base import Engine, TokenRoute
from polar_gateway.engines.openai import OpenAI
from polar_gateway.engines.sglang import Sglang
from polar_gateway.engines.vllm import Vllm


class EngineFactory(Protocol):
    def __call__(
        self, base_url: str, *, model: str, api_key: str | None, token_route: TokenRoute
    ) -> Engine: ...


ENGINES: dict[str, EngineFactory] = {"vllm": Vllm, "sglang": Sglang, "openai": OpenAI}


def open_engine(config: InferenceConfig, *, model: str) -> Engine:
    """The engine that a node's `inference` section describes.

    Raises ValueError in words for a secret that is not set.
    """
    api_key = None
    if config.api_key_env is not None:
        api_key = os.environ.get(config.api_key_env)
        if not api_key:
            raise ValueError(
                f"inference.api_key_env names the variable {config.api_key_env}, which is not set"
            )
    return ENGINES[config.engine](
        config.base_url, model=model, api_key=api_key, token_route=config.token_route
    )
