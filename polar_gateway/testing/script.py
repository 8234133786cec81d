"""Script documents: what an engine without a mind of its own answers to which prompt.

One document drives the scripted engine and, through a logits processor, a real vLLM:

    {"rules": [{"match": ["fix calc.py", "\\"exec_command\\""],
                "tokens": "random",
                "steps": ["<think>\\nLook first.\\n</think>\\n\\n<tool_call>\\n{...}\\n</tool_call>",
                          "<think>\\nDone.\\n</think>\\n\\nIt is fixed."]}],
     "otherwise": "<think>\\n\\n</think>\\n\\nDone."}

The first rule all of whose `match` expressions are found in the rendered prompt applies. Its step is
the number of assistant turns in the prompt so far, the last one repeating; that stays right when one
turn makes several tool calls and gets several responses.
"""

import os
import re
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

ASSISTANT_TURNS = r"<\|im_start\|>assistant\n(?=.*?<\|im_end\|>)"
"""Finished ones: the generation prompt has no end yet."""

THINKING_CLOSED = "</think>\n\n"
"""How a generation prompt ends under `enable_thinking: false`."""

Spelling = Literal["random", "canonical"]


class Rule(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    match: str | list[str]
    """Regular expressions on the rendered prompt, a dot matching newlines; all must be found."""
    steps: list[str]
    """What to say, markup included, without the end of the turn."""
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

    def step(self, prompt: str) -> str:
        taken = sum(1 for _ in re.finditer(self.count, prompt, re.DOTALL))
        return self.steps[min(taken, len(self.steps) - 1)]


class Line(NamedTuple):
    """What to say to one prompt."""

    text: str
    tokens: Spelling


class Script(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    rules: list[Rule] = []
    otherwise: str = "<think>\n\n</think>\n\nDone."
    """The answer when no rule applies."""

    def line(self, prompt: str) -> Line:
        """The answer to a rendered prompt. Where the prompt has closed the thinking already, the
        answer's own thinking is left out."""
        rule = next((rule for rule in self.rules if rule.applies(prompt)), None)
        text, tokens = (rule.step(prompt), rule.tokens) if rule else (self.otherwise, "random")
        if prompt.endswith(THINKING_CLOSED) and text.startswith("<think>"):
            text = text.partition("</think>")[2].lstrip("\n")
        return Line(text, tokens)


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
