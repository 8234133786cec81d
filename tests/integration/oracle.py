"""What models themselves say of token ids, for tests: a program that answers each line with a line.

Runs where torch and transformers are. A line asks {"model": FOLDER, "questions": [{"ids": [...],
"sampled": [...]}]}, of which the last are positions in the ids, and is answered with a list for each
question: the log probabilities of the ids in those positions, each given all ids before it.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, DynamicCache

CHUNK = 1024
"""Ids that are read at once: so long a row of attention to all before it fits in memory."""


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # where libraries may say what they like
    for line in sys.stdin:
        asked = json.loads(line)
        model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32).eval()
        oracle = Oracle(model)
        with torch.inference_mode():
            said = [oracle.logprobs(each["ids"], each["sampled"]) for each in asked["questions"]]
        print(json.dumps(said), file=answers, flush=True)


class Oracle:
    """Keeps what it has read, so that a question which begins like the one before costs its rest."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._cache = DynamicCache(config=model.config)
        self._read: list[int] = []

    def logprobs(self, ids: list[int], sampled: list[int]) -> list[float]:
        # What an id is expected to be is known from the position before it.
        known = min(_common(ids, self._read), min(sampled) - 1)
        self._cache.crop(known - len(self._read))  # by so many, which is below 0
        states = [self._states(ids[at : at + CHUNK]) for at in range(known, max(sampled), CHUNK)]
        self._read = ids[: known + sum(len(chunk) for chunk in states)]
        before = torch.tensor(sampled) - 1 - known
        logits = self._model.lm_head(torch.cat(states)[before])
        chosen = torch.tensor(ids)[sampled]
        logprobs = torch.log_softmax(logits, dim=-1)
        return logprobs[torch.arange(len(sampled)), chosen].tolist()

    def _states(self, ids: list[int]) -> torch.Tensor:
        output = self._model.model(
            input_ids=torch.tensor([ids]), past_key_values=self._cache, use_cache=True
        )
        return output.last_hidden_state[0]


def _common(a: list[int], b: list[int]) -> int:
    differ = (at for at, (one, other) in enumerate(zip(a, b, strict=False)) if one != other)
    return next(differ, min(len(a), len(b)))


if __name__ == "__main__":
    main()
