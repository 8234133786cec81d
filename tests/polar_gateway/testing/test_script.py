import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from polar_gateway.testing.script import Rule, Script, ScriptedCall, ScriptFile, Step
from polar_gateway.testing.tokenizer import ChatTokenizer

TOKENIZER = ChatTokenizer()
USER: dict[str, Any] = {"role": "user", "content": "Mend the roof."}
DEMO = Path(__file__).parents[3] / "examples/demo/script.json"


def turn(step: Step) -> dict[str, Any]:
    """A step as the chat message that comes back as history."""
    return {
        "role": "assistant",
        "content": step.say,
        "reasoning": step.think,
        "tool_calls": [{"function": msgspec.to_builtins(call)} for call in step.calls],
    }


def test_the_first_rule_that_applies_answers() -> None:
    script = Script(
        rules=[
            Rule(match=["roof", "wall"], steps=["both"]),
            Rule(match="Mend.*roof", steps=["one"]),
            Rule(match="roof", steps=["late"]),
        ]
    )
    assert script.line(TOKENIZER.render([USER])).text == "one"


def test_a_prompt_without_a_rule_gets_the_other_answer() -> None:
    assert Script().line("hello").text == "<think>\n\n</think>\n\nDone."


def test_assistant_turns_number_the_steps_and_the_last_step_repeats() -> None:
    script = Script(rules=[Rule(match="roof", steps=["first", "second"])])
    two_calls = Step(calls=[ScriptedCall(name="saw", arguments={})] * 2)
    results = [{"role": "tool", "content": "sawn"}] * 2
    messages = [USER]
    said = []
    for _ in range(3):
        said.append(script.line(TOKENIZER.render(messages)).text)
        messages = [*messages, turn(two_calls), *results]
    assert said == ["first", "second", "second"]


def test_a_rule_may_count_something_else() -> None:
    rule = Rule(match="x", steps=["none", "one"], count="y")
    assert [Script(rules=[rule]).line(p).text for p in ("x", "xy")] == ["none", "one"]


@pytest.mark.parametrize(
    "step",
    [
        Step(think="Look.", say="I look."),
        Step(think="Look.", calls=[ScriptedCall(name="saw", arguments={"cut": 'é "<b>"'})] * 2),
        Step(think="Two\nlines.", say="Now.", calls=[ScriptedCall(name="saw", arguments={})]),
        Step(say="No thought."),
    ],
)
def test_a_step_reads_in_history_exactly_as_it_was_said(step: Step) -> None:
    before = TOKENIZER.render([USER])
    after = TOKENIZER.render([USER, turn(step)], add_generation_prompt=False)
    thought = step.text if step.think else step.text.removeprefix("<think>\n\n</think>\n\n")
    assert after == f"{before}{thought}<|im_end|>\n"


def test_a_prompt_that_closed_the_thinking_gets_an_answer_without_it() -> None:
    script = Script(rules=[Rule(match="roof", steps=[Step(think="Hm.", say="Mended.")])])
    prompt = TOKENIZER.render([USER], enable_thinking=False)
    assert script.line(prompt).text == "Mended."


def test_a_script_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_bytes(msgspec.json.encode(Script(otherwise=Step(say="old"))))
    source = ScriptFile(path)
    assert source.current().otherwise.say == "old"
    newer = tmp_path / "newer.json"
    newer.write_bytes(msgspec.json.encode(Script(otherwise=Step(say="new"))))
    os.replace(newer, path)
    assert source.current().otherwise.say == "new"


def test_a_misspelled_field_is_named() -> None:
    with pytest.raises(msgspec.ValidationError, match="step"):
        msgspec.json.decode(b'{"rules": [{"match": "x", "step": []}]}', type=Script)


def test_a_rule_without_steps_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="at least one step"):
        msgspec.json.decode(b'{"rules": [{"match": "x", "steps": []}]}', type=Script)


@pytest.mark.parametrize(("tool", "harness"), [("exec_command", 0), ("Bash", 1), ("bash", 2)])
def test_the_demo_knows_each_harness_by_its_tools(tool: str, harness: int) -> None:
    script = ScriptFile(DEMO).current()
    prompt = TOKENIZER.render(
        [{"role": "user", "content": "Find the mistake in calc.py"}],
        [{"type": "function", "function": {"name": tool, "parameters": {}}}],
    )
    applying = [number for number, rule in enumerate(script.rules) if rule.applies(prompt)]
    assert applying == [harness]
