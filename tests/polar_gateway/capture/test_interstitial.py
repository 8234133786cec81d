"""The interstitial, told by renderings of a toy template whose every choice is known."""

import random
from array import array
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders.records import Ids
from polar_gateway.capture.interstitial import (
    Frame,
    added_behind_first_end,
    added_past_markup,
    canonical_answer,
    composed,
)

START, END, LINE, THINK, THOUGHT, USER, ASSISTANT, TOOL = range(1, 9)
END_TEXT = "<end>"
NEW_LETTERS = "abcdef"


class Message(NamedTuple):
    role: int
    text: str


class Template(NamedTuple):
    """Closes turns with END and a line's end; or, as GLM's, by the id that begins the next turn."""

    closes: bool = True
    marks_last: bool = False
    """Whether an empty block of reasoning stands in front of a conversation's last answer."""
    marks_next: bool = False
    """Whether one begins the next answer."""

    @property
    def ends(self) -> tuple[int, ...]:
        return (END,) if self.closes else (USER, TOOL)

    def render(self, messages: list[Message], *, closed: bool = False) -> Ids:
        ids: list[int] = []
        for at, message in enumerate(messages):
            ids += [START, message.role, LINE] if self.closes else [message.role]
            if self.marks_last and message.role == ASSISTANT and at == len(messages) - 1:
                ids += [THINK, LINE, THOUGHT]
            ids += encode(message.text)
            ids += [END, LINE] if self.closes else []
        if not closed:
            ids += [START, ASSISTANT, LINE] if self.closes else [ASSISTANT]
            ids += [THINK, LINE, THOUGHT] if self.marks_next else []
        return array("i", ids)

    def new(self, messages: list[Message]) -> Ids:
        """What the template writes from the end of an answer on: the truth."""
        return array("i", [END, LINE] if self.closes else []) + self.render(messages)


def encode(text: str) -> Iterator[int]:
    """Two letters a token; the end of a turn written out becomes the control token."""
    first, *rest = text.split(END_TEXT)
    for part in (first, *([None, each] for each in rest)):
        if isinstance(part, list):
            yield END
            part = part[1]
        for at in range(0, len(part), 2):
            yield 100 + hash_of(part[at : at + 2])


def hash_of(text: str) -> int:
    return sum(ord(letter) * 256**place for place, letter in enumerate(text))


def sample(text: str, chance: random.Random) -> Ids:
    """As the model spells it: letter by letter or in pairs, never with a control token."""
    ids, at = [], 0
    while at < len(text):
        width = chance.choice([1, 2])
        ids.append(100 + hash_of(text[at : at + width]))
        at += width
    return array("i", ids)


def small(template: Template, new: list[Message], word: str) -> Ids:
    messages = [Message(USER, "go"), Message(ASSISTANT, word), *new]
    return template.render(messages, closed=not new)


def frame(template: Template, new: list[Message] | None = None) -> Frame:
    return Frame(small(template, new or [], "this"), small(template, new or [], "that"))


def cut(whole: Ids, less: int) -> Ids:
    return whole[: len(whole) - less]


def added(template: Template, before: list[Message], answer: Message, new: list[Message]) -> Ids:
    """As the gateway finds it."""
    closed = template.render([*before, answer], closed=True)
    followed = template.render([*before, answer, *new])
    closing = frame(template).closing(template.ends)
    assert closing is not None
    known = cut(closed, closing)
    if followed[: len(known)] == known:
        return followed[len(known) :]
    alike = [Message(new[0].role, "...")] if new else [Message(USER, "...")]
    following = frame(template, alike).following(template.ends)
    assert following is not None
    found = added_past_markup(
        known,
        followed,
        cut(small(template, [], "this"), closing),
        cut(small(template, alike, "this"), following),
    )
    assert found is not None
    return found


texts = st.text("abc ", max_size=8) | st.sampled_from(["", END_TEXT, f"so {END_TEXT} then"])
news = st.lists(st.builds(Message, st.sampled_from([USER, TOOL]), texts), min_size=1, max_size=3)
templates = st.builds(Template, st.booleans(), st.booleans(), st.booleans())


@given(
    templates, texts, texts, news, st.sampled_from(["whole", "cut", "other"]), st.integers(0, 99)
)
def test_a_prompt_is_the_recorded_context_closed_once_and_what_the_template_adds(
    template: Template, asked: str, text: str, new: list[Message], ending: str, seed: int
) -> None:
    before, answer = [Message(USER, asked)], Message(ASSISTANT, text)
    truth = template.new(new)
    sampled = sample(text, random.Random(seed))
    if ending == "whole":
        sampled += truth[:1]
    elif ending == "other":  # the model has more ends of turn than the template writes
        sampled.append(77)
    context = template.render(before) + sampled

    prompt = composed(context, added(template, before, answer, new))

    assert prompt == context + (truth[1:] if ending == "whole" else truth)


@given(templates, texts, st.lists(texts, min_size=2, max_size=5), st.integers(0, 99))
def test_sampled_tokens_stay_where_they_are_over_many_turns(
    template: Template, asked: str, said: list[str], seed: int
) -> None:
    chance = random.Random(seed)
    messages = [Message(USER, asked)]
    context = template.render(messages)
    for text in said:
        answer, new = Message(ASSISTANT, text), [Message(TOOL, "done")]
        sampled = sample(text, chance)
        prompt = composed(context + sampled, added(template, messages, answer, new))
        assert prompt[: len(context) + len(sampled)] == context + sampled
        assert prompt[len(context) + len(sampled) :] == template.new(new)
        messages, context = [*messages, answer, *new], prompt


def test_what_stands_behind_an_answer_is_counted_from_the_end_of_its_turn() -> None:
    assert frame(Template()).closing((END,)) == 2  # <end> and a line's end
    assert frame(Template(closes=False)).closing((USER, TOOL)) == 0


def test_an_end_of_turn_that_nobody_named_is_not_found() -> None:
    assert frame(Template()).closing((99,)) == 0
    assert frame(Template(), [Message(USER, "...")]).following((99,)) is None


def test_a_template_that_leaves_the_answer_out_shows_nothing() -> None:
    same = array("i", [START, END])
    assert Frame(same, same).closing((END,)) is None
    assert Frame(same, same).following((END,)) is None


@pytest.mark.parametrize("text", ["yes", ""])
def test_where_no_answer_can_be_last_its_first_end_of_turn_tells(text: str) -> None:
    template, before, new = Template(), [Message(USER, "go")], [Message(TOOL, "done")]
    followed = template.render([*before, Message(ASSISTANT, text), *new])
    closed_before = template.render(before, closed=True)
    assert added_behind_first_end(closed_before, followed, (END,)) == template.new(new)
    assert added_behind_first_end(array("i", [LINE]), followed, (END,)) is None
    assert added_behind_first_end(closed_before, followed, (99,)) is None


def test_the_first_end_of_turn_of_an_answer_that_spells_one_would_repeat_half_of_it() -> None:
    template, before, new = Template(), [Message(USER, "go")], [Message(TOOL, "done")]
    answer = Message(ASSISTANT, f"half{END_TEXT}rest")
    followed = template.render([*before, answer, *new])
    told = added_behind_first_end(template.render(before, closed=True), followed, (END,))
    assert told is not None
    assert told[1 : 1 + len(list(encode("rest")))] == array("i", encode("rest"))
    assert added(template, before, answer, new) == template.new(new)


def test_history_that_is_left_out_is_no_markup() -> None:
    template = Template(marks_last=True)
    new = [Message(TOOL, "done")]
    closing, following = 2, frame(template, new).following((END,))
    assert following is not None
    small_closed = cut(small(template, [], "this"), closing)
    small_followed = cut(small(template, new, "this"), following)
    thought = [Message(USER, "go"), Message(ASSISTANT, "a thought"), Message(TOOL, "ok")]
    without = [Message(USER, "go"), Message(ASSISTANT, "aought"), Message(TOOL, "ok")]
    last = Message(ASSISTANT, "yes")
    closed = cut(template.render([*thought, last], closed=True), closing)
    followed = template.render([*without, last, *new])
    assert added_past_markup(closed, followed, small_closed, small_followed) is None


def test_without_a_difference_in_markup_there_is_nothing_to_look_past() -> None:
    one = array("i", [1, 2, 3])
    assert added_past_markup(one, array("i", [1, 9, 3]), one, one) is None


@pytest.mark.parametrize("template", [Template(), Template(closes=False)])
def test_an_answer_is_cut_out_of_its_rendering_with_its_end_of_turn(template: Template) -> None:
    asked = [Message(USER, "go")]
    prompt = template.render(asked)
    closed = template.render([*asked, Message(ASSISTANT, "done")], closed=True)
    answer = array("i", [*encode("done"), *([END] if template.closes else [])])
    closing = 2 if template.closes else 0
    ends = closed[len(prompt) - 1 :]
    assert canonical_answer(ends, prompt[-1:], closing) == answer


def test_an_answer_that_begins_otherwise_than_its_prompt_said_is_not_cut_out() -> None:
    template = Template(marks_next=True)
    asked = [Message(USER, "go")]
    prompt = template.render(asked)
    closed = template.render([*asked, Message(ASSISTANT, "all done")], closed=True)
    assert canonical_answer(closed[len(prompt) - 1 :], prompt[-1:], 2) is None
    assert canonical_answer(array("i"), prompt[-1:], 2) is None
