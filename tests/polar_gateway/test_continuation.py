from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_gateway.continuation import OtherwiseToldError, rest_of
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

WHOLE: list[Block] = [
    Reasoning(text="I think."),
    Text(text="I call it."),
    Call(id="new-1", name="bash", arguments='{"command": "ls -la", "n": [1, 2]}'),
    Call(id="new-2", name="bash", arguments="{}"),
]


def heard(events: Sequence[TurnEvent]) -> list[tuple[str, str, str]]:
    """What a harness makes of events: kind, id and text of each block."""
    blocks: list[list[str]] = []
    is_open = False
    for event in events:
        if isinstance(event, BlockStart):
            assert not is_open
            is_open = True
            blocks.append([event.kind, event.id, ""])
        elif isinstance(event, BlockDelta):
            assert is_open
            blocks[-1][2] += event.text
        else:
            assert is_open
            is_open = False
    assert not is_open
    return [(kind, name, text) for kind, name, text in blocks]


def said(*parts: tuple[str, str], ended: bool = False) -> list[TurnEvent]:
    """Blocks by kind and text, the last of them open unless `ended`."""
    events: list[TurnEvent] = []
    for number, (kind, text) in enumerate(parts):
        name = "bash" if kind == "call" else ""
        call_id = f"old-{number}" if kind == "call" else ""
        events.append(BlockStart(kind=kind, id=call_id, name=name))  # type: ignore[arg-type]
        if text:
            events.append(BlockDelta(text=text))
        if ended or number < len(parts) - 1:
            events.append(BlockEnd())
    return events


def pieces(whole: Sequence[Block]) -> list[TurnEvent]:
    """The events of an answer with every text in pieces of one character."""
    events: list[TurnEvent] = []
    for event in events_of(whole, cut=False):
        if isinstance(event, BlockDelta):
            events += [BlockDelta(text=character) for character in event.text]
        else:
            events.append(event)
    return events


@given(st.integers(min_value=0), st.booleans())
def test_told_to_any_point_the_rest_makes_it_the_whole(at: int, cut: bool) -> None:
    all_events = pieces(WHOLE)
    told = all_events[: at % (len(all_events) + 1)]
    blocks, events = rest_of(told, WHOLE, cut=cut)
    whole = events_of(blocks, cut=cut)
    assert heard([*told, *events]) == heard(whole)
    assert [type(block) for block in blocks] == [type(block) for block in WHOLE]
    if events:
        assert events[-1] == BlockEnd(cut=cut)


def test_a_call_keeps_the_id_that_it_was_told_by() -> None:
    told = said(("reasoning", "I think."), ("text", "I call it."), ("call", '{"comm'))
    blocks, events = rest_of(told, WHOLE, cut=False)
    first, second = blocks[2:]
    assert isinstance(first, Call)
    assert isinstance(second, Call)
    assert (first.id, second.id) == ("old-2", "new-2")
    assert first.arguments == '{"command": "ls -la", "n": [1, 2]}'
    assert heard([*told, *events])[2] == ("call", "old-2", first.arguments)


def test_white_space_that_only_streams_have_is_none_of_the_matter() -> None:
    whole: list[Block] = [Reasoning(text="Hm."), Text(text="Hello there.")]
    told = said(("reasoning", "\nHm.\n"), ("text", "\n\nHello "))
    blocks, events = rest_of(told, whole, cut=False)
    assert heard([*told, *events]) == [
        ("reasoning", "", "\nHm.\n"),
        ("text", "", "\n\nHello there."),
    ]
    assert blocks == [Reasoning(text="\nHm.\n"), Text(text="\n\nHello there.")]


def test_a_block_of_white_space_that_the_whole_does_not_have_ends_where_it_is() -> None:
    whole: list[Block] = [Reasoning(text="Hm."), Call(id="new", name="bash", arguments="{}")]
    told = said(("reasoning", "Hm."), ("text", "\n\n"))
    _, events = rest_of(told, whole, cut=False)
    assert heard([*told, *events])[1:] == [("text", "", "\n\n"), ("call", "new", "{}")]


def test_arguments_may_be_spaced_otherwise_but_not_inside_of_strings() -> None:
    whole: list[Block] = [Call(id="new", name="bash", arguments='{"command": "a  b", "n": [1, 2]}')]
    told = said(("call", '{"command":"a  b","n":[1'))
    _, events = rest_of(told, whole, cut=False)
    assert heard([*told, *events]) == [("call", "old-0", '{"command":"a  b","n":[1, 2]}')]
    with pytest.raises(OtherwiseToldError):
        rest_of(said(("call", '{"command":"a b')), whole, cut=False)


@pytest.mark.parametrize(
    "told",
    [
        said(("text", "I think")),
        said(("reasoning", "I dream")),
        said(("reasoning", "I think. A"), ended=True),
        said(("reasoning", "I thi"), ended=True),
        said(("reasoning", "I think."), ("text", "I call it."), ("call", '{"x')),
        said(("reasoning", "I think."), ("text", "I call it."), ("text", "more")),
        said(*[("reasoning", "I think."), ("text", "I call it."), ("call", "{}")] * 2),
    ],
)
def test_what_was_told_otherwise_cannot_be_gone_on_with(told: list[TurnEvent]) -> None:
    with pytest.raises(OtherwiseToldError):
        rest_of(told, WHOLE, cut=False)


def test_a_call_of_another_tool_is_another_call() -> None:
    told: list[TurnEvent] = [BlockStart(kind="call", id="old", name="read")]
    with pytest.raises(OtherwiseToldError, match="call block"):
        rest_of(told, [Call(id="new", name="bash", arguments="{}")], cut=False)
