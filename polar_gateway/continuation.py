"""Going on with an answer of which a harness was told a part before the engine aborted it. Pure.

The whole was parsed once, over what had been sampled before and after. What was told cannot be
taken back: it must be how the whole begins, and what is told from then on makes it the whole.
"""

from collections.abc import Iterable, Sequence

import msgspec

from polar_gateway.dialects.turn import (
    Block,
    BlockDelta,
    BlockEnd,
    BlockStart,
    Call,
    Reasoning,
    Text,
    TurnEvent,
)
from polar_gateway.engines.whole import events_of


class OtherwiseToldError(Exception):
    """The whole does not begin with what was told of it."""


class Told(msgspec.Struct):
    """A block as far as it was told."""

    block: Block
    text: str = ""
    ended: bool = False


def rest_of(
    said: Iterable[TurnEvent], whole: Sequence[Block], *, cut: bool
) -> tuple[list[Block], list[TurnEvent]]:
    """The answer as the harness will have been told it, and the events that are left to be told.

    White space around text may differ, as engines strip it from whole answers and not from streams,
    and so may the white space between the parts of a call's arguments. `cut` says that the output
    limit ended the answer. Raises OtherwiseToldError.
    """
    left = list(whole)
    blocks: list[Block] = []
    events: list[TurnEvent] = []
    for told in told_of(said):
        rest = ""
        if left and _same(told.block, left[0]):
            rest = _continued(told, _text(left.pop(0)))
        elif told.text.strip() or isinstance(told.block, Call):
            raise OtherwiseToldError(
                f"a {type(told.block).__name__.lower()} block was told, and is none"
            )
        if not told.ended:
            if rest:
                events.append(BlockDelta(text=rest))
            events.append(BlockEnd(cut=cut and not left))
        blocks.append(_with_text(told.block, told.text + rest))
    return [*blocks, *left], [*events, *events_of(left, cut=cut)]


def told_of(said: Iterable[TurnEvent]) -> list[Told]:
    """The blocks that events have told so far, the last of which may not have ended."""
    found: list[Told] = []
    parts: list[str] = []
    for event in said:
        if isinstance(event, BlockStart):
            found.append(Told(_begun(event)))
            parts = []
        elif isinstance(event, BlockDelta):
            parts.append(event.text)
        elif isinstance(event, BlockEnd):
            found[-1].ended = True
            found[-1].text = "".join(parts)
    if found and not found[-1].ended:
        found[-1].text = "".join(parts)
    return found


def _begun(start: BlockStart) -> Block:
    if start.kind == "call":
        return Call(id=start.id, name=start.name, arguments="")
    return Text(text="") if start.kind == "text" else Reasoning(text="")


def _same(told: Block, whole: Block) -> bool:
    if isinstance(told, Call) and isinstance(whole, Call):
        return told.name == whole.name
    return type(told) is type(whole)


def _text(block: Block) -> str:
    return block.arguments if isinstance(block, Call) else block.text


def _with_text(block: Block, text: str) -> Block:
    if isinstance(block, Call):
        return Call(id=block.id, name=block.name, arguments=text)
    return type(block)(text=text)


def _continued(told: Told, whole: str) -> str:
    """What is left of a block's text after what was told of it."""
    end = (_json_end if isinstance(told.block, Call) else _text_end)(told.text, whole)
    rest = None if end is None else whole[end:]
    if rest is None or (told.ended and rest.strip()):
        raise OtherwiseToldError(
            f"a {type(told.block).__name__.lower()} block goes on otherwise than it was told"
        )
    return "" if told.ended else rest


def _text_end(told: str, whole: str) -> int | None:
    """Where in `whole` that ends which was told, but for white space around it."""
    if whole.startswith(told):
        return len(told)
    begin = len(whole) - len(whole.lstrip())
    inner = told.lstrip()
    if whole.startswith(inner, begin):
        return begin + len(inner)
    stripped = inner.rstrip()
    return len(whole) if whole.strip() == stripped else None


def _json_end(told: str, whole: str) -> int | None:
    """Where in `whole` that ends which was told, but for white space outside of JSON strings."""
    at = 0
    quoted = escaped = False
    for character in told:
        while not quoted and at < len(whole) and whole[at] != character and whole[at].isspace():
            at += 1
        if at < len(whole) and whole[at] == character:
            at += 1
        elif quoted or not character.isspace():
            return None
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = quoted
        elif character == '"':
            quoted = not quoted
    return at
