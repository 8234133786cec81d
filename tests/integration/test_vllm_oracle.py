"""The recorded log probabilities are the model's own, of these tokens in this context.

transformers computes them anew from the recorded ids alone, with the same weights in float32.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from builders.records import CompletionSession, Mode, Trace
from polar_gateway.capture.reading import read_session
from polar_gateway.testing.script import Script, ScriptFile
from tests.integration.conftest import DEMO, HARNESSES, SHELL_TOOL, part_of
from tests.integration.vllm_server import Oracle, Question, VllmServer
from tests.polar_gateway.gateway import gateway

pytestmark = [pytest.mark.vllm, pytest.mark.clis, pytest.mark.timeout(300)]

CLIS = (*HARNESSES, *(harness for harness in SHELL_TOOL if harness != "pi_old"))
TURNS = 4


@pytest.mark.parametrize("mode", ["messages", "tokens"])
async def test_the_recorded_log_probabilities_are_those_of_the_recorded_context(
    tmp_path: Path,
    packs: Path,
    vllm: VllmServer,
    oracle: Oracle,
    mode: Mode,
    demo_task: dict[str, Any],
) -> None:
    questions: list[Question] = []
    async with gateway(
        tmp_path, engine=nullcontext(vllm), inference={"prompts": mode}, pack_dir=packs
    ) as node:
        for harness in CLIS:
            vllm.speak(words_for(harness))
            result = await node.run(
                harness,
                instruction=demo_task["instruction"],
                agent={"harness": harness, "model_name": "stub-model"},
                runtime={**demo_task["runtime"], "backend": "local", "allow_internet": True},
                evaluator=demo_task["evaluator"],
                remaining_timeout_seconds=120,
            )
            assert (result.status, result.error, result.reward) == ("COMPLETED", None, 1.0)
            assert result.trajectory is not None
            (journal,) = tmp_path.glob(f"**/*{harness}*/session.journal")
            session = read_session(journal)
            asked = [completion.mode for completion in session.completions]
            assert asked == ["messages", *[mode] * (TURNS - 1)], harness
            traces = result.trajectory.traces
            if mode == "tokens":
                questions += merged(harness, traces)
            else:
                questions += canonical(harness, traces, session)
            assert sum(len(q.sampled) for q in questions if q.name.startswith(harness)) == sum(
                len(completion.sampled_ids) for completion in session.completions
            )
    await oracle.confirms(questions)


def merged(harness: str, traces: list[Trace]) -> Iterator[Question]:
    """Every trainable token in the context in which it is trained."""
    for number, trace in enumerate(traces):
        start = len(trace.prompt_ids)
        trainable = [at for at, mask in enumerate(trace.loss_mask) if mask]
        logprobs = trace.response_logprobs or []
        yield Question(
            f"{harness}, trace {number}",
            trace.prompt_ids + trace.response_ids,
            [start + at for at in trainable],
            [logprobs[at] for at in trainable],
        )


def canonical(harness: str, traces: list[Trace], session: CompletionSession) -> Iterator[Question]:
    """Every trainable token in the context that the engine made of the messages."""
    trained = {name for trace in traces for name in trace.metadata["completion_ids"]}
    for completion in session.completions:
        if completion.completion_id in trained:
            start = completion.prompt_length
            assert completion.logprobs is not None
            yield Question(
                f"{harness}, {completion.completion_id}",
                completion.context_ids.tolist(),
                list(range(start, start + len(completion.sampled_ids))),
                completion.logprobs.tolist(),
            )


def words_for(harness: str) -> Script:
    if harness in HARNESSES:
        return ScriptFile(DEMO / "script.json").current()
    return part_of(SHELL_TOOL[harness])
