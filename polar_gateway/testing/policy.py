"""A stand-in for a policy: a probability for every token in every context, without a network.

The logits of a context are one seeded table, rotated by a checksum of all ids before. So they vary
from position to position, depend on the exact ids and on nothing else, and their softmax costs
nothing: a rotation does not change its denominator. Anyone who has the ids can recompute a recorded
log probability, which is how tests show that the right ones were recorded.
"""

import math
import random
import zlib
from array import array
from collections.abc import Sequence
from typing import NamedTuple


class Sample(NamedTuple):
    token_id: int
    logprob: float


class SeededPolicy:
    def __init__(self, size: int, seed: int = 0) -> None:
        source = random.Random(seed)
        logits = [source.gauss(0.0, 2.0) for _ in range(size)]
        denominator = math.log(math.fsum(math.exp(x) for x in logits))
        self._logprobs = [x - denominator for x in logits]
        self._denominators: dict[float, float] = {1.0: 0.0}
        """Temperature -> the logarithm by which its softmax is normalised."""
        self._likeliest = sorted(range(size), key=self._logprobs.__getitem__, reverse=True)

    def context(self, ids: Sequence[int], before: int = 0) -> int:
        """The checksum of a context, or of one that goes on where `before` ended."""
        return zlib.crc32(array("i", ids).tobytes(), before)

    def logprob(self, context: int, token_id: int, temperature: float = 1.0) -> float:
        """Of the distribution at a temperature; the script's mask leaves it alone."""
        logprob = self._logprobs[(token_id + context) % len(self._logprobs)]
        return logprob / temperature - self._denominator(temperature)

    def top(self, context: int, count: int, temperature: float = 1.0) -> list[Sample]:
        """The likeliest tokens of a context."""
        size = len(self._logprobs)
        ids = [(slot - context) % size for slot in self._likeliest[:count]]
        return [Sample(i, self.logprob(context, i, temperature)) for i in ids]

    def _denominator(self, temperature: float) -> float:
        if temperature not in self._denominators:
            scaled = math.fsum(math.exp(x / temperature) for x in self._logprobs)
            self._denominators[temperature] = math.log(scaled)
        return self._denominators[temperature]

    def choose(
        self, context: int, allowed: list[int], temperature: float, source: random.Random
    ) -> Sample:
        """One of the allowed tokens, by its probability among them."""
        logprobs = [self.logprob(context, i) for i in allowed]
        best = max(logprobs)
        if temperature == 0:
            chosen = logprobs.index(best)
        else:
            weights = [math.exp((x - best) / temperature) for x in logprobs]
            chosen = source.choices(range(len(allowed)), weights)[0]
        return Sample(allowed[chosen], logprobs[chosen])
