from array import array

from builders.records import Completion
from tests.builders.world import World, play


def chained(turns: int) -> list[Completion]:
    """A conversation in which every prompt is the one before, its answer, and one token more."""
    completions: list[Completion] = []
    for number in range(turns):
        parent = completions[-1] if completions else None
        completions.append(
            Completion(
                completion_id=f"msg_{number}",
                index=number,
                parent=parent,
                shared=2 * number,
                tail=array("i", [number]),
                sampled_ids=array("i", [1000 + number]),
                logprobs=array("f", [-0.5]),
                messages_shared=2 * number,
                messages_tail=[{"role": "user", "content": str(number)}],
                response_message={"role": "assistant", "content": f"answer {number}"},
                finish_reason="stop",
            )
        )
    return completions


def test_a_prompt_stored_as_a_difference_expands_to_what_was_sent() -> None:
    last = chained(3)[-1]
    assert last.prompt_ids.tolist() == [0, 1000, 1, 1001, 2]
    assert last.prompt_length == 5
    assert [message["content"] for message in last.messages] == [
        "0",
        "answer 0",
        "1",
        "answer 1",
        "2",
    ]


def test_a_session_of_thousands_of_turns_expands() -> None:
    last = chained(3000)[-1]
    assert len(last.prompt_ids) == last.prompt_length == 5999
    assert len(last.messages) == 5999


def test_expanding_hands_out_copies() -> None:
    first = chained(1)[0]
    ids, messages = first.prompt_ids, first.messages
    ids.append(7)
    messages.append({})
    assert first.prompt_ids.tolist() == [0]
    assert len(first.messages) == 1


def test_stored_differences_and_whole_prompts_are_the_same_session() -> None:
    actions = ["turn", "truncated", "retry", "fork", "turn", "rewind", "edit", "subagent", "turn"]
    thin, flat = World(5), World(5, flat=True)
    play(thin, actions)
    play(flat, actions)
    for one, other in zip(thin.completions, flat.completions, strict=True):
        assert one.prompt_ids == other.prompt_ids
        assert one.messages == other.messages
    assert any(completion.shared for completion in thin.completions)


def test_what_a_prompt_adds_to_an_earlier_one_does_not_depend_on_storage() -> None:
    actions = ["turn", "turn", "fork", "turn", "edit", "turn"]
    thin, flat = World(6), World(6, flat=True)
    play(thin, actions)
    play(flat, actions)
    found = 0
    for number, (one, other) in enumerate(zip(thin.completions, flat.completions, strict=True)):
        for earlier in range(number):
            tail = one.prompt_after(thin.completions[earlier])
            assert tail == other.prompt_after(flat.completions[earlier])
            found += tail is not None
    assert found


def test_the_end_of_a_prompt_is_that_of_the_whole() -> None:
    last = chained(4)[-1]
    whole = last.prompt_ids
    for start in range(len(whole) + 2):
        assert last.prompt_from(start) == whole[start:]


def test_what_is_stored_over_several_calls_is_found_without_comparing() -> None:
    first, *_, last = chained(5)
    added = last.prompt_after(first)
    assert added == last.prompt_ids[first.prompt_length :]
    first.tail = array("i", [77])
    assert last.prompt_after(first) == added, "storage vouches for the beginning"


def test_a_prompt_that_shares_less_than_all_of_an_earlier_one_does_not_begin_with_it() -> None:
    first, second, third = chained(3)
    third.parent, third.shared = second, first.prompt_length
    assert third.prompt_after(second) is None
    assert third.prompt_after(first) == third.tail
