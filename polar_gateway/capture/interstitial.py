"""What stands between a recorded answer and the next one, cut out of an engine's renderings. Pure.

The prompt that follows an answer is the recorded context, sampled tokens and all, and the
*interstitial*: what the chat template puts behind an answer, then the new messages, then the
beginning of the next answer. It is told by comparing renderings of whole conversations, never by
looking for text:

    closed    ... <start>assistant\\n  the answer  <end>\\n
    followed  ... <start>assistant\\n  the answer  <end>\\n<start>tool\\n ... <start>assistant\\n
                                                 └ added ──────────────────────────────────┘

`added` begins with the id that ends the answer's turn. Which part of a closed rendering stands
behind the answer's words is learnt from small conversations that differ in those words alone.
"""

from collections.abc import Collection
from typing import NamedTuple

from builders.ids import common_end, common_start, difference
from builders.records import Ids


class Frame(NamedTuple):
    """A small conversation that ends in an assistant turn, rendered with two different answers."""

    one: Ids
    other: Ids

    def closing(self, ends: Collection[int]) -> int | None:
        """Of closed renderings: how many ids stand from the answer's end of turn on. 0 where the
        template leaves that to the message that follows; None where the answers made no
        difference."""
        behind = self._behind
        if behind is None:
            return None
        return next((back for back in range(1, behind + 1) if self.one[-back] in ends), 0)

    def following(self, ends: Collection[int]) -> int | None:
        """Of renderings that go on after the answer: how many ids stand from the answer's end of
        turn on; None where no turn ends behind it, or the answers made no difference."""
        behind = self._behind
        if behind is None:
            return None
        return next((back for back in range(behind, 0, -1) if self.one[-back] in ends), None)

    @property
    def _behind(self) -> int | None:
        """How many ids stand behind the words in which the two differ."""
        if self.one == self.other:
            return None
        return common_end(self.one, self.other)


def composed(context: Ids, added: Ids) -> Ids:
    """The prompt: the recorded context, closed if it was not (an answer that was cut off, or that
    ended in another way than with the template's id), and what is new."""
    if context[-1:] == added[:1]:
        return context + added[1:]
    return context + added


def added_behind_first_end(before: Ids, followed: Ids, ends: Collection[int]) -> Ids | None:
    """What follows an answer in the rendering `followed`, which begins with the messages `before`
    it, where the answer's text holds no end of turn itself; None where there is none."""
    start = len(before)
    if followed[:start] != before:
        return None
    found = (at for at in range(start, len(followed)) if followed[at] in ends)
    at = next(found, None)
    return None if at is None else followed[at:]


def added_past_markup(
    closed: Ids, followed: Ids, small_closed: Ids, small_followed: Ids
) -> Ids | None:
    """What follows the answer in `followed`, where that does not begin with `closed` only because
    the template marks up the last turn of a conversation as it does no earlier one (an empty block
    of reasoning, for one). All that is given ends where the answer does, except `followed`; the
    small conversations are those that show the difference in markup. None where it is another one.
    """
    there, gone = difference(small_closed, small_followed)
    if there == gone:
        return None
    at = common_start(closed, followed)
    if closed[at : at + len(there)] != there:
        return None
    expected = closed[:at] + gone + closed[at + len(there) :]
    return followed[len(expected) :] if followed[: len(expected)] == expected else None


def canonical_answer(ends: Ids, prompt_end: Ids, closing: int) -> Ids | None:
    """An answer as it is rendered, up to and including its end of turn. `ends` are the last ids of
    the closed rendering from the prompt's last one on, `prompt_end` is that id as it was sent, and
    `closing` how many ids there are from the end of turn on. None where the rendering has the
    answer begin otherwise than the prompt did."""
    if len(ends) < 1 + closing or ends[:1] != prompt_end:
        return None
    return ends[1 : len(ends) - closing + 1]
