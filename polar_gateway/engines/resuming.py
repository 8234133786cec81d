"""Going on with an answer that was aborted: what is asked for, and both parts as one."""

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from builders.records import Floats, Ids, VersionSpan
from polar_gateway.dialects.turn import Block, Call, ModelRequest, Usage
from polar_gateway.engines.base import EngineError, EngineReply
from polar_gateway.engines.refusals import broke_off, unresumable


async def gone_on_with(
    request: ModelRequest,
    partial: EngineReply,
    ask: Callable[[ModelRequest], Awaitable[EngineReply]],
    spelled: Callable[[Sequence[int]], Awaitable[str]],
) -> EngineReply:
    """The whole answer, whose blocks are yet to be found out; `ask` gets the rest of it, `spelled`
    the text of ids. Raises EngineError, which carries what there is if the rest was aborted, too."""
    if partial.findings or not may_resume(request):
        raise unresumable()
    if stops := request.sampling.get("stop"):
        # Engines look for them in what they sample alone. A character has four tokens at most.
        tail = partial.sampled_ids[-4 * max(map(len, stops)) :]
        if ends_inside(await spelled(tail.tolist()), stops):
            raise unresumable()
    left = None if request.max_tokens is None else request.max_tokens - len(partial.sampled_ids)
    if left is not None and left < 1:
        return msgspec.structs.replace(partial, finish_reason="length")
    context = partial.prompt_ids + partial.sampled_ids
    try:
        added = await ask(rest_of(request, partial, context, left))
    except EngineError as error:
        if error.partial is not None:
            error.partial = joined(partial, error.partial)
        raise
    if added.prompt_ids != context:
        raise broke_off("it did not go on with the tokens that it was sent")
    return joined(partial, added)


def ends_inside(text: str, stops: Sequence[str]) -> bool:
    """Whether the text ends with the beginning of one of the strings."""
    return any(text.endswith(stop[:length]) for stop in stops for length in range(1, len(stop)))


def may_resume(request: ModelRequest) -> bool:
    """Not where a grammar holds: it would begin anew in the middle of what it has to end."""
    return (
        request.response_format is None
        and "structured_outputs" not in request.sampling
        and request.tool_choice in (None, "auto", "none")
    )


def rest_of(
    request: ModelRequest, partial: EngineReply, context: Ids, left: int | None
) -> ModelRequest:
    """What asks for the rest of an answer, `left` tokens at most."""
    sampling = dict(request.sampling)
    if isinstance(least := sampling.get("min_tokens"), int):
        sampling["min_tokens"] = max(0, least - len(partial.sampled_ids))
    return msgspec.structs.replace(request, prompt_ids=context, max_tokens=left, sampling=sampling)


def joined(partial: EngineReply, rest: EngineReply) -> EngineReply:
    """Both as one answer, whose blocks are yet to be found out."""
    known = len(partial.sampled_ids)
    logprobs: Floats | None = None
    if partial.logprobs is not None and rest.logprobs is not None:
        logprobs = partial.logprobs + rest.logprobs
    return EngineReply(
        prompt_ids=partial.prompt_ids,
        sampled_ids=partial.sampled_ids + rest.sampled_ids,
        logprobs=logprobs,
        blocks=[],
        finish_reason=rest.finish_reason,
        stop_reason=rest.stop_reason,
        usage=Usage(
            prompt_tokens=partial.usage.prompt_tokens,
            completion_tokens=partial.usage.completion_tokens + rest.usage.completion_tokens,
            cached_tokens=partial.usage.cached_tokens,
        ),
        model=rest.model,
        logprob_kind=partial.logprob_kind,
        versions=[
            *partial.versions,
            *(
                VersionSpan(version=span.version, start=known + span.start, end=known + span.end)
                for span in rest.versions
            ),
        ],
        # Routing is told of the whole context, prompt included; the rest only of what it sampled.
        tensors=[tensor for tensor in rest.tensors if tensor.name == "routed_experts"],
        findings=rest.findings,
        notes=[*partial.notes, f"resumed: aborted after {known} tokens"],
    )


def cut_at(blocks: list[Block], stop: str) -> list[Block]:
    """Blocks whose tokens reach beyond the stop string that ended them, without it."""
    if not blocks:
        return blocks
    *others, last = blocks
    if isinstance(last, Call):
        return blocks  # its arguments were parsed, so the string is none of their text
    text, found, _ = last.text.rpartition(stop)
    if not found:
        return blocks
    return [*others, msgspec.structs.replace(last, text=text)] if text else others
