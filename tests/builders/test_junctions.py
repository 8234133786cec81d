from array import array
from typing import Any

import pytest

from builders.junctions import (
    Junction,
    closes_once,
    drift,
    end_markup,
    end_of_turn,
    junction,
)
from builders.records import CompletionSession, Ids
from tests.builders.world import END, SYSTEM, Message, World

THREAD = [SYSTEM, {"role": "user", "content": "fix it"}]
E1, E2 = 2, 3


def ids(*values: int) -> Ids:
    return array("i", values)


@pytest.mark.parametrize(
    ("tail", "sampled", "interstitial", "drifted"),
    [
        (ids(10, 11, E1, 50, 51), ids(10, 11, E1), ids(50, 51), 0),
        (ids(19, E1, 50, 51), ids(10, 11, E1), ids(50, 51), 2),
        (ids(19, E1, 50, E1, 51), ids(10, 11, E1), ids(50, E1, 51), 2),
        (ids(19, E1, 50), ids(10, 11), ids(E1, 50), 2),
        (ids(10, 11, 40, E1, 50), ids(10, 11), ids(40, E1, 50), 0),
        (ids(19, E1, 50), ids(10, E2), ids(E1, 50), 2),
        (ids(19, E2, 50, E1), ids(10, E2), ids(50, E1), 1),
        (ids(10, E1, 11, E1, 50), ids(10, E1, 11, E1), ids(50), 0),
        (ids(E1, 50), ids(10, E1), ids(50), 1),
        (ids(19, E1), ids(10, E1), ids(), 1),
    ],
    ids=[
        "rendered as sampled",
        "re-encoded",
        "later ends of turn belong to the harness's messages",
        "a truncated turn is closed by the template",
        "a truncated turn rendered as sampled keeps all that follows",
        "ended by another id than the template's",
        "the first of several ids",
        "an end of turn inside, rendered as sampled",
        "body dropped by the template",
        "nothing after the turn",
    ],
)
def test_the_interstitial_is_what_follows_the_turn(
    tail: Ids, sampled: Ids, interstitial: Ids, drifted: int
) -> None:
    ends = frozenset({E1, E2})
    assert junction(tail, sampled, ends, one_end=True) == Junction(interstitial, drifted)


@pytest.mark.parametrize(
    ("tail", "sampled", "refusal"),
    [
        (ids(), ids(10, E1), "empty_tail"),
        (ids(19, 50), ids(10, E1), "no_end_of_turn"),
        (ids(10, E1, 19, E1, 50), ids(10, E1, 11, E1), "inner_end_of_turn"),
    ],
)
def test_a_turn_whose_end_cannot_be_known_is_not_merged(
    tail: Ids, sampled: Ids, refusal: str
) -> None:
    assert junction(tail, sampled, frozenset({E1}), one_end=True) == refusal


def test_a_turn_that_may_be_rendered_with_several_ends_merges_only_as_it_was_sampled() -> None:
    ends, sampled = frozenset({E1}), ids(10, 11, 12, E1)
    respelt, verbatim = ids(10, E1, 12, E1, 50), ids(10, 11, 12, E1, 50)
    assert junction(respelt, sampled, ends, one_end=False) == "inner_end_of_turn"
    assert junction(verbatim, sampled, ends, one_end=False) == Junction(ids(50), 0)


def test_a_turn_rendered_as_sampled_needs_no_end_of_turn_id() -> None:
    rest = Junction(ids(50), 0)
    assert junction(ids(10, 11, 50), ids(10, 11), frozenset(), one_end=True) == rest


def calling(arguments: str) -> Message:
    function = {"name": "write", "arguments": arguments}
    return said("", tool_calls=[{"id": "a", "type": "function", "function": function}])


def said(content: Any, **fields: Any) -> Message:
    return {"role": "assistant", "content": content, **fields}


@pytest.mark.parametrize(
    "echoed",
    [
        [said("ends with <|im_end|>, mostly")],
        [said([{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}])],
        [said([{"type": "image", "alt": "<|im_end|>"}])],
        [said("", reasoning_content="so <|im_end|> it is")],
        [calling('{"content": ["a<|im_end|>b"]}')],
        [calling('{"content": "a\\u003c|im_end|\\u003eb"}')],
        [calling('{"<|im_end|>": 1}')],
        [calling('{"content": "a<|im_end|>b')],
        [said("one half"), said("the other half")],
        [],
    ],
    ids=[
        "content",
        "across the parts of content",
        "a part that is not text",
        "reasoning",
        "arguments",
        "escaped in arguments",
        "the name of an argument",
        "arguments that are no JSON",
        "an answer echoed as two messages",
        "an answer that was not echoed",
    ],
)
def test_a_turn_whose_messages_may_render_another_end_does_not_close_once(
    echoed: list[Message],
) -> None:
    session = CompletionSession(session_id="s", end_of_turn_ids=[E1])
    known = CompletionSession(
        session_id="s", end_of_turn_ids=[E1], end_of_turn_texts=["<|im_end|>"]
    )
    assert not closes_once(echoed, end_markup(session, frozenset({E1})))
    assert not closes_once(echoed, end_markup(known, frozenset({E1})))


def test_a_turn_that_spells_no_end_closes_once() -> None:
    session = CompletionSession(session_id="s")
    for message in (said("plain"), said(None), calling('{"content": "a <| b |> c < 1"}')):
        assert closes_once([message], end_markup(session, frozenset({E1})))


@pytest.mark.parametrize(
    ("ids", "texts", "closes"),
    [
        ([E1, E2], ["<|im_end|>", "<|endoftext|>"], True),
        ([E1, E2], ["</s>", "<|im_end|>"], False),
        ([E1, E2], [], False),
        ([E1, E2], ["<|im_end|>"], False),
        ([E1, E2], ["<|im_end|>", ""], False),
        ([E2], ["<|im_end|>"], False),
    ],
    ids=[
        "other texts are known",
        "this text is known",
        "none is known",
        "one is not known",
        "one has no text",
        "configured ids are not the engine's",
    ],
)
def test_common_markers_count_unless_the_text_of_every_end_is_known(
    ids: list[int], texts: list[str], closes: bool
) -> None:
    session = CompletionSession(session_id="s", end_of_turn_ids=ids, end_of_turn_texts=texts)
    markup = end_markup(session, frozenset({E1, E2}))
    assert closes_once([said("a <s>struck</s> word")], markup) is closes


@pytest.mark.parametrize(
    "text",
    [
        "<|im_end|>",
        "<|endoftext|>",
        "<|eot_id|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|END_OF_TURN_TOKEN|>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<end_of_turn>",
        "<turn|>",
        "<eos>",
        "</s>",
        "[EOS]",
        "[|endofturn|]",
    ],
)
def test_the_ends_of_turn_of_common_models_are_known_by_their_text(text: str) -> None:
    markup = end_markup(CompletionSession(session_id="s"), frozenset({E1}))
    assert not closes_once([said(f"then comes {text}.")], markup)


@pytest.mark.parametrize(
    ("canonical", "sampled", "positions"),
    [
        (ids(1, 2, 3), ids(1, 2, 3), 0),
        (ids(1, 9, 3), ids(1, 2, 3), 1),
        (ids(1, 3), ids(1, 2, 2, 3), 2),
        (ids(1, 2, 2, 3), ids(1, 3), 2),
        (ids(1, 1), ids(1, 1, 1), 1),
        (ids(), ids(1, 2), 2),
        (ids(4, 5), ids(6, 7, 8), 3),
    ],
)
def test_drift_counts_positions_without_common_beginning_and_end(
    canonical: Ids, sampled: Ids, positions: int
) -> None:
    assert drift(canonical, sampled) == positions


def test_configured_ids_outrank_the_engines_which_outrank_the_samples() -> None:
    world = World()
    samples = [world.ask(THREAD), world.ask(THREAD)]
    assert end_of_turn([7], [8], samples) == (frozenset({7}), "config")
    assert end_of_turn([], [8, 9], samples) == (frozenset({8, 9}), "engine")
    assert end_of_turn([], [], samples) == (frozenset({END}), "detected")


def test_one_sample_is_not_evidence_enough() -> None:
    assert end_of_turn([], [], [World().ask(THREAD)]).source == "unknown"


def test_samples_that_end_differently_agree_on_nothing() -> None:
    world = World()
    samples = [world.ask(THREAD), world.ask(THREAD)]
    samples[1].sampled_ids[-1] = 99
    assert end_of_turn([], [], samples).source == "unknown"


def test_truncated_turns_and_stop_strings_are_no_evidence() -> None:
    world = World()
    samples = [
        world.ask(THREAD),
        world.ask(THREAD),
        world.ask(THREAD, truncated=True),
        world.ask(THREAD, stop_reason="\n"),
    ]
    samples[3].sampled_ids[-1] = 99
    assert end_of_turn([], [], samples) == (frozenset({END}), "detected")


def test_an_id_that_also_stands_inside_a_turn_is_no_end_of_turn() -> None:
    world = World()
    samples = [world.ask(THREAD), world.ask(THREAD)]
    samples[0].sampled_ids[0] = END
    assert end_of_turn([], [], samples).source == "unknown"
