from array import array
from collections.abc import Sequence
from contextlib import nullcontext

import msgspec
import pytest

from builders.records import VersionSpan
from polar_gateway.dialects.turn import Block, Call, ModelRequest, Reasoning, Text, Usage
from polar_gateway.engines.base import EngineError, EngineReply, Tensor
from polar_gateway.engines.resuming import cut_at, gone_on_with, joined

HI = ModelRequest(model="m", messages=[{"role": "user", "content": "hi"}])


def reply(*sampled: int, prompt: tuple[int, ...] = (1, 2), **fields: object) -> EngineReply:
    known = {
        "logprobs": array("f", [-1.0] * len(sampled)),
        "blocks": [],
        "finish_reason": None,
        "usage": Usage(prompt_tokens=len(prompt), completion_tokens=len(sampled)),
        "logprob_kind": "raw",
    }
    return EngineReply(
        prompt_ids=array("i", prompt),
        sampled_ids=array("i", sampled),
        **{**known, **fields},  # type: ignore[arg-type]
    )


async def spelled(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


async def test_what_is_asked_for_is_the_rest() -> None:
    asked: list[ModelRequest] = []

    async def ask(rest: ModelRequest) -> EngineReply:
        asked.append(rest)
        return reply(5, prompt=(1, 2, 3, 4), finish_reason="stop")

    request = ModelRequest(
        model="m", messages=HI.messages, max_tokens=9, sampling={"min_tokens": 3, "top_p": 0.5}
    )
    whole = await gone_on_with(request, reply(3, 4), ask, spelled)
    [rest] = asked
    assert rest.prompt_ids == array("i", [1, 2, 3, 4])
    assert rest.max_tokens == 7
    assert rest.sampling == {"min_tokens": 1, "top_p": 0.5}
    assert (rest.messages, request.sampling["min_tokens"]) == (HI.messages, 3)
    assert whole.sampled_ids == array("i", [3, 4, 5])
    assert whole.finish_reason == "stop"


@pytest.mark.parametrize("findings", [["ids_missing"], ["logprobs_null"]])
async def test_what_is_not_trustworthy_is_not_gone_on_with(findings: list[str]) -> None:
    async def ask(_: ModelRequest) -> EngineReply:
        raise AssertionError("it was asked")

    with pytest.raises(EngineError, match="cannot be gone on with"):
        await gone_on_with(HI, reply(3, findings=findings), ask, spelled)


@pytest.mark.parametrize(
    ("said", "resumes"), [("the EN", False), ("a #", False), ("the ENDING", True), ("a b", True)]
)
async def test_an_answer_is_not_gone_on_with_inside_of_a_stop_string(
    said: str, resumes: bool
) -> None:
    """The engine would look for it in the rest alone."""
    asked: list[ModelRequest] = []

    async def ask(rest: ModelRequest) -> EngineReply:
        asked.append(rest)
        return reply(5, prompt=(1, 2, *map(ord, said)), finish_reason="stop")

    request = msgspec.structs.replace(HI, sampling={"stop": ["###", "ENDS"]})
    with nullcontext() if resumes else pytest.raises(EngineError, match="cannot be gone on with"):
        await gone_on_with(request, reply(*map(ord, said)), ask, spelled)
    assert len(asked) == resumes


def test_both_parts_are_one_answer() -> None:
    routing, mask = Tensor("routed_experts", b"whole"), Tensor("sampling_mask", b"rest")
    whole = joined(
        reply(
            3,
            4,
            versions=[VersionSpan(version="a", start=0, end=2)],
            tensors=[Tensor("routed_experts", b"part")],
        ),
        reply(
            5,
            prompt=(1, 2, 3, 4),
            versions=[VersionSpan(version="b", start=0, end=1)],
            tensors=[routing, mask],
            stop_reason="x",
            finish_reason="stop",
        ),
    )
    assert whole.logprobs == array("f", [-1.0] * 3)
    assert whole.usage == Usage(prompt_tokens=2, completion_tokens=3)
    assert [(span.version, span.start, span.end) for span in whole.versions] == [
        ("a", 0, 2),
        ("b", 2, 3),
    ]
    assert whole.tensors == [routing]
    assert (whole.stop_reason, whole.logprob_kind) == ("x", "raw")
    assert joined(reply(3, logprobs=None), reply(4)).logprobs is None


def test_a_stop_string_is_cut_out_of_what_its_tokens_spell() -> None:
    thought: Block = Reasoning(text="ab")
    assert cut_at([thought, Text(text="one stop")], "sto") == [thought, Text(text="one ")]
    assert cut_at([thought, Text(text="stop")], "sto") == [thought]
    assert cut_at([thought], "x") == [thought]
    assert cut_at([], "x") == []
    call = Call(id="1", name="f", arguments='{"a": "stop"}')
    assert cut_at([call], "stop") == [call]
