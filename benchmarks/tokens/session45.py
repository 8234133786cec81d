"""One session of 45 turns that grows to 131,000 tokens: an agent that reads and writes Python.

Its text is the source of the interpreter's own standard library, its ids are those of the tiny
model's tokenizer, spread over as wide a range as a large vocabulary's. The engine's is the truth:
each prompt is the one before it, the answer's ids and what the template writes for a tool's result.
"""

import json
import sysconfig
from array import array
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.proxy.conversation import END_OF_TURN, LINE_BREAK, Said, Turn, mark, turn
from polar_gateway.testing.tokenizer import ChatTokenizer

NAME = "session45"
TURNS = 45
TOKENS = 131_000
"""Of the last turn's prompt and answer together."""
FIRST_TOKENS = 12_000
"""Of the first prompt: a command-line agent's instructions and tools."""
SAMPLED = 300
"""In each turn."""
RESULT_TOKENS = (TOKENS - FIRST_TOKENS - TURNS * SAMPLED) // (TURNS - 1)
"""That a tool's result adds to the prompt, with what the template writes around it."""
_TOOLS = ("bash", "read", "write", "edit", "glob", "grep", "agent")


class Library:
    """Text and its ids, some after another."""

    def __init__(self) -> None:
        self._tokenizer = ChatTokenizer()
        text = ""
        for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            if len(text) > 5 * TOKENS:
                break
            # Nothing but a mark shall look like one.
            text += source.read_text("utf-8").replace("turn-", "turn_")
        self._ids = array("i", self._tokenizer.encode(text))
        self._at = 0

    def next(self, tokens: int) -> tuple[str, list[int]]:
        ids = self._ids[self._at : self._at + tokens].tolist()
        self._at += tokens
        return self._tokenizer.decode(ids), [_spread(token) for token in ids]

    def ids_of(self, text: str) -> list[int]:
        return [_spread(token) for token in self._tokenizer.encode(text)]


def _spread(token: int) -> int:
    return token * 36 + 1


@cache
def turns(count: int = TURNS) -> list[Turn]:
    """The session's first turns."""
    library = Library()
    schema = {"type": "object", "properties": {"command": {"type": "string"}}}
    tools = [
        {
            "type": "function",
            "function": {"name": name, "description": text, "parameters": schema},
        }
        for name, (text, _) in ((name, library.next(FIRST_TOKENS // 14)) for name in _TOOLS)
    ]
    system, _ = library.next(FIRST_TOKENS // 3)
    task, _ = library.next(FIRST_TOKENS // 6)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": system},
        {"role": "user", "content": f"{task} {mark(NAME, 0)}"},
    ]
    prompt = library.ids_of(f"{system}{json.dumps(tools)}{task}")[: FIRST_TOKENS - 1]
    prompt.append(LINE_BREAK)
    made = []
    for number in range(count):
        said = _said(library, number)
        chat = {"model": "bench", "messages": messages, "tools": tools, "max_tokens": 4096}
        made.append(turn(chat, prompt, said))
        result, ids = library.next(RESULT_TOKENS - 2)
        prompt = [*prompt, *said.sampled, LINE_BREAK, *ids, LINE_BREAK]
        call = {"name": "bash", "arguments": said.arguments}
        messages = [
            *messages,
            {
                "role": "assistant",
                "content": said.content,
                "tool_calls": [{"id": said.call_id, "type": "function", "function": call}],
            },
            {
                "role": "tool",
                "tool_call_id": said.call_id,
                "content": f"{result} {mark(NAME, number + 1)}",
            },
        ]
    return made


def _said(library: Library, number: int) -> Said:
    command, _ = library.next(SAMPLED // 3)
    arguments = json.dumps({"command": command, "description": mark(NAME, number)})
    called = library.ids_of(arguments)
    content, ids = library.next(SAMPLED - 1 - len(called))
    return Said(content, f"call-{number}", arguments, [*ids, *called, END_OF_TURN])
