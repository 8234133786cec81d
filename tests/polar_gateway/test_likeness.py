"""Backends that are to stand beside others."""

from typing import Any

import pytest

from polar_gateway.backends import BackendRefusedError
from polar_gateway.config import BackendConfig
from polar_gateway.testing.engine import Fault, ScriptedEngine
from tests.polar_gateway.obedient import serving


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
