"""What the model thought before a tool call is in the next prompt, whatever the CLI sends back."""

from pathlib import Path

import pytest

from tests.live.driver import (
    CLIS,
    assert_completed,
    assert_one_chain,
    assert_recorded,
    assert_sampled_once,
    live,
    rule,
    turn,
)

pytestmark = pytest.mark.clis

THOUGHTS = ("Beans want sun.", "Now for the water.", "All is growing.")


@pytest.mark.parametrize("harness", CLIS)
async def test_earlier_thinking_stands_in_every_later_prompt_as_it_was_sampled(
    tmp_path: Path, harness: str
) -> None:
    ran = await live(
        tmp_path,
        harness,
        rule(
            "Think of beans",
            turn(harness, "echo sun", think=THOUGHTS[0]),
            turn(harness, "echo water", think=THOUGHTS[1], say="I water them."),
            turn(harness, say="Done.", think=THOUGHTS[2]),
        ),
        instruction="Think of beans.",
    )
    assert_completed(ran)
    assert len(ran.calls) == 3
    for number, call in enumerate(ran.calls):
        before = [f"<|im_start|>assistant\n<think>\n{thought}\n</think>" for thought in THOUGHTS]
        assert [text in call.prompt for text in before] == [n < number for n in range(3)], ran.how
    assert [one.response_message["reasoning_content"].strip() for one in ran.completions] == [
        *THOUGHTS
    ]
    assert_recorded(ran)
    assert_sampled_once(ran)
    assert_one_chain(ran)
