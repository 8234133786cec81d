"""Script documents: what an engine without a mind of its own answers to which prompt.

One document drives the scripted engine and, through a logits processor, a real vLLM:

    {"rules": [{"match": ["mistake in calc.py", "\\"name\\": \\"bash\\""],
                "tokens": "random",
                "steps": [{"think": "Look first.",
                           "calls": [{"name": "bash", "arguments": {"command": "cat calc.py"}}]},
                          {"think": "That was it.", "say": "It is repaired."}]}],
     "otherwise": {"say": "Done."}}

The first rule all of whose `match` expressions are found in the rendered prompt applies. Its step is
the number of assistant turns in the prompt so far, the last one repeating; that stays right when one
turn makes several tool calls and gets several responses. A step may also be a string: the very text
to sample, markup and its mistakes included.
"""

import json
import os
import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

ASSISTANT_TURNS = r"<\|im_start\|>assistant\n(?=.*?<\|im_end\|>)"
"""Finished ones: the generation prompt has no end yet."""

THINKING_CLOSED = "</think>\n\n"
"""How a generation prompt ends under `enable_thinking: false`."""

OPENING = b"<|im_start|>assistant\n"
EMPTY_THINKING = b"<think>\n\n</think>\n\n"

Spelling = Literal["random", "canonical"]
EndOfTurn = Literal["<|im_end|>", "<|endoftext|>"]


class ScriptedCall(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: dict[str, Any]


class Step(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One turn, spelled as the chat template spells it when it comes back as history."""

    think: str = ""
    say: str = ""
    calls: list[ScriptedCall] = []
    end: EndOfTurn = "<|im_end|>"
    """The token that ends the turn; the template closes every turn with the first one."""

    @property
    def text(self) -> str:
        calls = [
            f"<tool_call>\n{json.dumps(msgspec.to_builtins(call), ensure_ascii=False)}\n</tool_call>"
            for call in self.calls
        ]
        body = "\n".join([self.say, *calls] if self.say else calls)
        return f"<think>\n{self.think}\n</think>\n\n{body}"


class Rule(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    match: str | list[str]
    """Regular expressions on the rendered prompt, a dot matching newlines; all must be found."""
    steps: list[Step | str]
    """What to say, turn by turn, without the end of the turn."""
    count: str = ASSISTANT_TURNS
    """Regular expression whose hits in the rendered prompt number the step."""
    tokens: Spelling = "random"
    """random: any tokens that spell the text, as a policy samples them; canonical: the
    tokenizer's own."""

    def __post_init__(self) -> None:
        if not self.steps:
            raise ValueError("a rule needs at least one step")

    def applies(self, prompt: str) -> bool:
        wanted = [self.match] if isinstance(self.match, str) else self.match
        return all(re.search(pattern, prompt, re.DOTALL) for pattern in wanted)

    def step(self, prompt: str) -> Step | str:
        taken = sum(1 for _ in re.finditer(self.count, prompt, re.DOTALL))
        return self.steps[min(taken, len(self.steps) - 1)]


class Line(NamedTuple):
    """What to say to one prompt."""

    text: str
    tokens: Spelling
    end: EndOfTurn = "<|im_end|>"
    begun: bytes = b""
    """What of the text the prompt holds already: it is an answer that is gone on with."""


class Script(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    rules: list[Rule] = []
    otherwise: Step = Step(say="Done.")
    """The answer when no rule applies."""

    def line(self, prompt: str) -> Line:
        """The answer to a rendered prompt. Where the prompt has closed the thinking already, the
        answer's own thinking is left out."""
        rule = next((rule for rule in self.rules if rule.applies(prompt)), None)
        step = rule.step(prompt) if rule else self.otherwise
        text, end = (step, _END) if isinstance(step, str) else (step.text, step.end)
        if prompt.endswith(THINKING_CLOSED) and text.startswith("<think>"):
            text = text.partition("</think>")[2].lstrip("\n")
        return Line(text, rule.tokens if rule else "random", end)

    def rest(self, prompt: bytes) -> Line:
        """The answer to a prompt that is known by its tokens alone, and may end in the middle of
        that answer: then the line says how much of it there is."""
        before, opening, begun = prompt.rpartition(OPENING)
        if not opening or _END.encode() in begun:
            return self.line(prompt.decode("utf-8", "replace"))
        if begun.startswith(EMPTY_THINKING):
            opening, begun = opening + EMPTY_THINKING, begun.removeprefix(EMPTY_THINKING)
        line = self.line((before + opening).decode("utf-8", "replace"))
        return line._replace(begun=begun) if line.text.encode().startswith(begun) else line


_END: EndOfTurn = "<|im_end|>"


class ScriptFile:
    """A script on disk that may change while an engine runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version: tuple[int, int] | None = None
        self._script = Script()

    def current(self) -> Script:
        """Raises OSError or msgspec.ValidationError when there is no valid script there."""
        status = os.stat(self._path)
        version = (status.st_mtime_ns, status.st_ino)
        if version != self._version:
            self._script = msgspec.json.decode(self._path.read_bytes(), type=Script)
            self._version = version
        return self._script
