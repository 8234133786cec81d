"""What a plain OpenAI-compatible server can do, found out by asking it."""

from typing import TYPE_CHECKING

from polar_gateway.dialects.turn import ModelRequest
from polar_gateway.engines.base import EngineError, EngineProbe, EngineReply
from polar_gateway.engines.vllm_probe import SAID, TOKENS

if TYPE_CHECKING:
    from polar_gateway.engines.openai import OpenAI


async def probe(engine: "OpenAI") -> EngineProbe:
    """Problems come back as sentences. Raises EngineError for what may pass."""
    found = EngineProbe(engine=engine.name, model=engine.model)
    try:
        await _probe(engine, found)
    except EngineError as error:
        if error.again:
            raise
        found.problems.append(f"it does not answer chat completions: {error}")
    return found


async def _probe(engine: "OpenAI", found: EngineProbe) -> None:
    listed = await engine.api.models()
    if not listed:
        found.problems.append("it serves no model")
        return
    found.model = engine.api.model = engine.model or listed[0].id
    lengths = [model.max_model_len for model in listed if model.id == found.model]
    if not lengths:
        names = ", ".join(sorted(model.id for model in listed))
        found.problems.append(f"it does not serve {found.model!r} but {names}")
        return
    found.max_model_len = lengths[0]
    request = ModelRequest(model=found.model, messages=[SAID], max_tokens=TOKENS)
    reply = await _short_answer(engine, found, request)
    found.token_ids = not {"ids_missing", "prompt_ids_missing"} & set(reply.findings)
    if not reply.findings:
        await _streams(engine, found, request)
    else:
        found.problems.append(
            f"a short answer of {found.model!r} came without trustworthy tokens "
            f"({', '.join(reply.findings)}): harnesses can be served by it, but what they do cannot be "
            "trained on; if it is a vLLM or an SGLang, it has to be configured as that engine"
        )
    found.notes.append(
        "a plain OpenAI-compatible server tells nothing of how it renders messages, takes no prompts "
        "as ids, and takes no orders to pause or to change its weights"
    )


async def _short_answer(engine: "OpenAI", found: EngineProbe, request: ModelRequest) -> EngineReply:
    """An answer, asked for with less where the server refuses to be asked for so much."""
    while True:
        try:
            return await engine.chatted(request, "polar-probe")
        except EngineError as error:
            if error.kind.code != "invalid_request" or not engine.asks_for_logprobs:
                raise
            if engine.asks_for_ids:
                engine.asks_for_ids = False
                found.notes.append(f"it refuses to be asked for token ids: {error}")
            else:
                engine.asks_for_logprobs = False
                found.notes.append(f"it refuses to be asked for log probabilities: {error}")


async def _streams(engine: "OpenAI", found: EngineProbe, request: ModelRequest) -> None:
    try:
        stream = await engine.streamed(request, "polar-probe-stream")
        try:
            async for _ in stream:
                pass
        finally:
            await stream.aclose()
        lost = ", ".join(stream.reply.findings)
    except EngineError as error:
        if error.again:
            raise
        lost = str(error)
    found.stream_ids = not lost
    if lost:
        found.notes.append(f"streamed answers are asked for whole, since streams fail: {lost}")
