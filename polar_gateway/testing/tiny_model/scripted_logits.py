"""A vLLM logits processor that makes any model over this tokenizer say what a script says.

    POLAR_SCRIPT=script.json vllm serve ... \\
        --logits-processors polar_gateway.testing.tiny_model.scripted_logits:ScriptedLogits

At each position only the tokens that go on with the script's text keep their logits, and the model
chooses among them. Its raw log probabilities stay its own, since vLLM takes them before this runs. A
request opts out with `vllm_xargs: {"no_script": 1}`. While a file script.slow lies beside the
script, no answer samples more than fifty tokens a second, so that one can be met on its way.
"""

import os
import time
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from polar_gateway.testing.script import ScriptFile
from polar_gateway.testing.tokenizer import ChatTokenizer

SLOW_SECONDS = 0.02
"""A step's, in slow motion."""


class ScriptedLogits(AdapterLogitsProcessor):  # type: ignore[misc]
    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._tokenizer = ChatTokenizer(Path(vllm_config.model_config.tokenizer))
        path = Path(os.environ["POLAR_SCRIPT"])
        self._script = ScriptFile(path)
        self._slow = path.with_suffix(".slow")

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self._slow.exists():
            time.sleep(SLOW_SECONDS)
        return super().apply(logits)

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        if (params.extra_args or {}).get("no_script"):
            return None
        return _Speaker(self._tokenizer, self._script)


class _Speaker:
    """Masks the logits of one request."""

    def __init__(self, tokenizer: ChatTokenizer, script: ScriptFile) -> None:
        self._tokenizer = tokenizer
        self._script = script
        self._rest: bytes | None = None
        self._end = tokenizer.end_of_turn
        self._forced: list[int] | None = None
        self._heard = 0

    def __call__(
        self, prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor
    ) -> torch.Tensor:
        if self._rest is None:
            line = self._script.current().rest(self._tokenizer.spelled(list(prompt_ids)))
            self._rest = line.text.encode()[len(line.begun) :]
            self._end = self._tokenizer.id_of(line.end)
            if line.tokens == "canonical" and not line.begun:
                self._forced = self._tokenizer.encode(line.text)
        for token_id in output_ids[self._heard :]:
            self._rest = self._rest[len(self._tokenizer.bytes_of[token_id]) :]
        self._heard = len(output_ids)
        if self._forced is not None and self._heard < len(self._forced):
            allowed = [self._forced[self._heard]]
        else:
            allowed = self._tokenizer.continuations(self._rest) or [self._end]
        for choice in (allowed, [self._end]):
            kept = logits[choice].clone()
            if kept.max() > -torch.inf:
                logits.fill_(-torch.inf)
                logits[choice] = kept
                return logits
        return logits  # a grammar of the request forbids the script
