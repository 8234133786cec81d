import random
from array import array

from builders.records import Floats, Ids, TokenNode
from polar_gateway.capture.journal import Completed, pack
from polar_gateway.capture.tokens import Tokens, shared_prefix
from polar_gateway.dialects.turn import Usage
from polar_gateway.engines.base import EngineReply

PARENT = TokenNode(completion_id="p", tail=array("i", [1, 2]), sampled_ids=array("i", [3, 4]))
NAN = float("nan")


def reply(prompt: list[int], sampled: list[int], logprobs: list[float] | None) -> EngineReply:
    return EngineReply(
        prompt_ids=array("i", prompt),
        sampled_ids=array("i", sampled),
        logprobs=None if logprobs is None else array("f", logprobs),
        blocks=[],
        finish_reason="stop",
        usage=Usage(),
    )


def begun(prompt: list[int], sampled: list[int], logprobs: list[float]) -> Tokens:
    """A call of which this is in the journal."""
    tokens = Tokens(PARENT)
    tokens.begin(array("i", prompt))
    tokens.add(array("i", sampled), array("f", logprobs))
    return tokens


def finished(tokens: Tokens, answer: EngineReply) -> Completed:
    record = Completed(completion_id="c", response_message={})
    tokens.finish(answer, record)
    assert tokens.sampled == answer.sampled_ids
    assert list(PARENT.context_ids[: tokens.shared] + tokens.tail) == list(answer.prompt_ids)
    return record


def ids(*values: int) -> bytes:
    packed: Ids = array("i", values)
    return pack(packed)


def floats(*values: float) -> bytes:
    packed: Floats = array("f", values)
    return pack(packed)


def test_an_answer_of_which_the_journal_has_nothing_is_written_whole() -> None:
    record = finished(Tokens(PARENT), reply([1, 2, 3, 9], [5, 6], [-1.0, -2.0]))
    assert (record.appended, record.shared, record.tail) == (0, 3, ids(9))
    assert (record.sampled, record.logprobs) == (ids(5, 6), floats(-1.0, -2.0))


def test_what_was_appended_is_not_written_again() -> None:
    record = finished(begun([1, 2, 9], [5], [NAN]), reply([1, 2, 9], [5, 6], [NAN, -2.0]))
    assert (record.appended, record.shared, record.tail) == (1, 0, b"")
    assert (record.sampled, record.logprobs) == (ids(6), floats(-2.0))
    whole = finished(begun([1, 2, 9], [5, 6], [-1.0, -2.0]), reply([1, 2, 9], [5, 6], [-1.0, -2.0]))
    assert (whole.appended, whole.sampled, whole.logprobs) == (2, b"", b"")


def test_an_answer_that_turns_out_to_be_another_one_is_written_whole() -> None:
    for answer in (
        reply([1, 2, 9], [7, 6], [-1.0, -2.0]),
        reply([1, 2, 8], [5, 6], [-1.0, -2.0]),
        reply([1, 2, 9], [5, 6], [-1.5, -2.0]),
        reply([1, 2, 9], [], []),
    ):
        record = finished(begun([1, 2, 9], [5], [-1.0]), answer)
        assert (record.appended, record.shared) == (0, 2)
        assert record.tail == pack(answer.prompt_ids[2:])
        assert record.sampled == pack(answer.sampled_ids)


def test_log_probabilities_that_are_missing_in_the_end_are_missing() -> None:
    record = finished(begun([1, 2, 9], [5], [-1.0]), reply([1, 2, 9], [5, 6], None))
    assert (record.appended, record.sampled, record.logprobs) == (1, ids(6), None)


def test_the_shared_prefix_is_the_longest_one() -> None:
    def call(
        index: int, parent: TokenNode | None, prompt: list[int], sampled: list[int]
    ) -> TokenNode:
        ids: Ids = array("i", prompt)
        shared = 0 if parent is None else shared_prefix(ids, parent)
        return TokenNode(
            completion_id=str(index),
            parent=parent,
            shared=shared,
            tail=ids[shared:],
            sampled_ids=array("i", sampled),
        )

    chance = random.Random(1)
    node: TokenNode | None = None
    for index in range(300):
        before = [] if node is None else list(node.context_ids)
        kept = before[: chance.randrange(len(before) + 1)] if chance.random() < 0.5 else before
        prompt = kept + [chance.randrange(2) for _ in range(chance.randrange(4))]
        expected = next(
            (i for i, (a, b) in enumerate(zip(prompt, before, strict=False)) if a != b),
            min(len(prompt), len(before)),
        )
        node = call(index, node, prompt, [chance.randrange(2)])
        assert node.shared == expected
        assert list(node.prompt_ids) == prompt
