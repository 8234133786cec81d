"""Whether backends are alike: sessions move between them in the middle of a conversation."""

from polar_gateway.backend import Backend
from polar_gateway.dialects.turn import ModelRequest
from polar_gateway.engines.base import EngineProbe

SAMPLE_CONVERSATION = [
    {"role": "system", "content": "You answer in one word."},
    {"role": "user", "content": "Is it raining, tonight?\n\tÄ, 中, 1234567."},
]
"""What two backends must make the same ids of."""


def unlike(probe: EngineProbe, first: EngineProbe) -> list[str]:
    """Why a backend cannot stand beside those that are there, in sentences."""
    problems = list(probe.problems)
    if probe.model != first.model:
        problems.append(f"it serves {probe.model!r}, the others {first.model!r}")
    if first.max_model_len is not None and (probe.max_model_len or 0) < first.max_model_len:
        problems.append(
            f"its model takes {probe.max_model_len} tokens, of the others {first.max_model_len}"
        )
    for what, has, needed in (
        ("take prompts as ids by the same routes", probe.token_routes, first.token_routes),
        ("close turns with the same ids", probe.end_of_turn_ids, first.end_of_turn_ids),
    ):
        if has != needed:
            problems.append(f"it does not {what}: {has} instead of {needed}")
    if first.resumes and not probe.resumes:
        problems.append("it cannot go on with an aborted answer, as the others can")
    return problems


async def other_ids(newcomer: Backend, known: Backend) -> list[str]:
    """Why its tokenizer or template is not that of one that is there. Raises EngineError."""
    ours, theirs = [await _sample_ids(each) for each in (known, newcomer)]
    if ours == theirs:
        return []
    said = f"it makes other ids of the same conversation than {known.name}"
    return [f"{said}: its tokenizer or chat template is another"]


async def _sample_ids(backend: Backend) -> list[int]:
    request = ModelRequest(
        model=backend.probe.model, messages=SAMPLE_CONVERSATION, tools=None, max_tokens=1
    )
    if backend.probe.renders == "full":
        return (await backend.engine.render(request)).ids.tolist()
    return (await backend.engine.complete(request, "polar-compare")).prompt_ids.tolist()


def restarted(probe: EngineProbe, backend: Backend) -> str:
    """Why a backend that came back is not what it was: an engine that was started anew has the
    weights that it was started with. Empty where nothing speaks for that."""
    known, has = backend.weights.version, probe.weight_version
    if "update" not in probe.controls or known is None or has in (None, known):
        return ""
    return f"its weights are {has!r}, not {known!r}, as after a restart; update it"


def behind(newcomer: Backend, others: list[Backend]) -> str:
    """Why one more backend cannot be asked yet: a trainer has given the others weights, and nobody
    says that it has them, too."""
    known = dict.fromkeys(each.weights.version for each in others if each.weights.version)
    has = newcomer.weights.version
    if not known or has in known:
        return ""
    return (
        f"its weights are {has or 'not named'}, those of the others {', '.join(known)}; update it"
    )
