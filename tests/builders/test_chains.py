import pytest

from builders.chains import Beginning, Chain, cut_behind, first, joints, main_last, previous
from builders.eligible import Options, split
from builders.records import Completion
from tests.builders.world import SYSTEM, Message, World

THREAD: list[Message] = [SYSTEM, {"role": "user", "content": "fix it"}]


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def three(world: World, **middle: object) -> list[Completion]:
    """Three turns, of which the middle one is as told."""
    one = world.ask(THREAD)
    thread = world.follow(THREAD, one)
    two = world.ask(thread, **middle)  # type: ignore[arg-type]
    return [one, two, world.ask(world.follow(thread, two))]


def test_the_previous_one_is_the_nearest_that_is_trained_on() -> None:
    one, two, last = three(World())
    found = previous(last, {"msg_0": 9, "msg_1": 9})
    assert found is not None
    assert (found.completion, found.taken) == (two, len(two.sampled_ids))
    over = previous(last, {"msg_0": 9})
    assert over is not None
    assert (over.completion, over.taken) == (one, len(one.sampled_ids))
    assert previous(last, {"msg_2": 9}) is None


def test_what_was_ambiguous_or_composed_on_the_way_is_remembered() -> None:
    _, _, last = three(World(composes=1.0), ambiguous=True)
    last.mode = "messages"
    over = previous(last, {"msg_0": 9})
    assert over is not None
    assert (over.ambiguous, over.composed) == (True, True)
    near = previous(last, {"msg_1": 9})
    assert near is not None
    assert (near.ambiguous, near.composed) == (False, False)


def test_a_part_that_was_continued_is_what_is_taken_and_never_more_than_there_is() -> None:
    world = World()
    cut = world.ask(THREAD, delivered=False)
    last = world.ask(world.follow(THREAD, cut, heard=2))
    for continued, taken in ((2, 2), (10**6, len(cut.sampled_ids))):
        last.continued_tokens = continued
        found = previous(last, {"msg_0": 9})
        assert found is not None
        assert found.taken == taken


def begun(world: World, options: Options) -> dict[str, Beginning]:
    session = world.session()
    return joints(session, split(session, options), options, []).refused


def test_every_refusal_is_named() -> None:
    world = World()
    one = world.ask(THREAD, answer=said("a long answer in many tokens"))
    world.ask(world.follow(THREAD, one))
    world.ask([SYSTEM, *THREAD], previous=one)
    lost = world.ask(THREAD, kind="title")
    world.ask(world.follow(THREAD, lost))
    assert begun(world, Options(split_on_drift=True)) == {
        "msg_0": "no_predecessor",
        "msg_1": "drift",
        "msg_2": "prompt_changed",
        "msg_4": "previous_left_out",
    }


def test_nothing_joins_behind_tokens_that_are_not_trained_on() -> None:
    world = World(drifts=False)
    lost = world.ask(THREAD, answer=said("a long answer in many tokens"), delivered=False)
    world.ask(world.follow(THREAD, lost, heard=3))
    perhaps = world.ask(world.follow(THREAD, lost, heard=5))
    perhaps.ambiguous = True
    assert begun(world, Options())["msg_2"] == "previous_cut"


def test_what_is_skipped_stands_masked_in_between() -> None:
    world = World(drifts=False)
    one, _, last = three(world, findings=("logprobs_missing",))
    session = world.session()
    joint = joints(session, split(session, Options()), Options(), []).found["msg_2"]
    between = one.context_ids + joint.junction.interstitial
    assert between == last.prompt_ids


def test_the_longest_chain_is_the_main_one_and_the_earlier_among_equals() -> None:
    world = World(drifts=False)
    asked = [world.ask(THREAD, answer=said("same")) for _ in range(3)]
    parts = split(world.session(), Options())
    alone = [Chain([first(completion, parts)], "branch") for completion in asked]
    assert main_last(alone) == [alone[1], alone[2], alone[0]]
    long = Chain([*alone[2].links, *alone[1].links], "branch")
    assert main_last([long, alone[0]]) == [alone[0], long]
    assert main_last([]) == []


def test_what_was_cut_off_is_told_of_the_chain_behind_which_it_stood() -> None:
    world = World(drifts=False)
    one, two, last = three(world)
    session = world.session()
    options = Options(max_tokens=one.prompt_length + 1)
    parts = split(session, options)
    chains = [Chain([first(one, parts)], "no_predecessor")]
    assert cut_behind(session, parts, chains) == {
        0: sum(len(completion.sampled_ids) for completion in (one, two, last)) - 1
    }


def test_two_completions_of_one_id_cannot_be_told_apart() -> None:
    world = World()
    one, two, _ = three(world)
    two.completion_id = one.completion_id
    with pytest.raises(ValueError, match="session-1 holds two completions of the same id"):
        begun(world, Options())
