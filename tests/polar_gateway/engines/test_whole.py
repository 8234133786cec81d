import math
from array import array

import pytest

from polar_gateway.dialects.turn import (
    BlockDelta,
    BlockEnd,
    BlockStart,
    Call,
    Reasoning,
    Text,
    TurnEvent,
    Usage,
)
from polar_gateway.engines.base import EngineReply, EngineStream
from polar_gateway.engines.whole import WholeAsStream


def reply(finish_reason: str = "stop", *, logprobs: bool = True) -> EngineReply:
    return EngineReply(
        prompt_ids=array("i", [1, 2, 3]),
        sampled_ids=array("i", [4, 5]),
        logprobs=array("f", [-1.0, -2.0]) if logprobs else None,
        blocks=[
            Reasoning(text="hm"),
            Text(text="Look."),
            Call(id="c1", name="ls", arguments="{}"),
            Call(id="c2", name="pwd", arguments=""),
        ],
        finish_reason=finish_reason,
        usage=Usage(prompt_tokens=3, completion_tokens=2),
    )


async def events(stream: EngineStream) -> list[TurnEvent]:
    return [event for batch in [batch async for batch in stream] for event in batch]


async def test_each_block_comes_in_one_piece() -> None:
    assert await events(WholeAsStream(reply())) == [
        BlockStart(kind="reasoning"),
        BlockDelta(text="hm"),
        BlockEnd(),
        BlockStart(kind="text"),
        BlockDelta(text="Look."),
        BlockEnd(),
        BlockStart(kind="call", id="c1", name="ls"),
        BlockDelta(text="{}"),
        BlockEnd(),
        BlockStart(kind="call", id="c2", name="pwd"),
        BlockEnd(),
    ]


async def test_only_the_last_block_was_cut_by_the_output_limit() -> None:
    said = await events(WholeAsStream(reply("length")))
    assert [event.cut for event in said if isinstance(event, BlockEnd)] == [False] * 3 + [True]


@pytest.mark.parametrize("logprobs", [True, False])
async def test_its_tokens_are_sampled_at_once_and_handed_on_with_the_events(
    logprobs: bool,
) -> None:
    whole = reply(logprobs=logprobs)
    stream: EngineStream = WholeAsStream(whole)
    assert (stream.prompt_ids, stream.prompt_tokens) == (whole.prompt_ids, 3)
    ids, values = stream.sampled_so_far()
    assert ids == whole.sampled_ids
    if logprobs:
        assert values == whole.logprobs
    else:
        assert all(math.isnan(value) for value in values)
    assert stream.sampled_so_far() == (array("i"), array("f"))
    assert stream.sampled_tokens == 0
    await events(stream)
    assert stream.sampled_tokens == 2
    assert stream.reply is whole
    await stream.aclose()
