"""Custom tools of OpenAI's two APIs: the model writes one text, and no JSON.

An engine has functions only, so a custom tool is a function with the string `input`, and its text is
taken out of the arguments again, as they come.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from polar_gateway.dialects import messages as shared

_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The tool's input as plain text."}},
    "required": ["input"],
    "additionalProperties": False,
}


def custom_function(name: str, description: str, grammar: Mapping[str, Any]) -> dict[str, Any]:
    """`grammar` holds `syntax` and `definition`; an empty one is none."""
    if grammar:
        # The engine is not held to the grammar, so the model must at least be told of it.
        syntax, definition = grammar.get("syntax"), grammar.get("definition")
        description = f"{description}\n\nThe input follows this {syntax} grammar:\n{definition}"
    return shared.function_tool(name, description.strip(), _PARAMETERS)


def custom_arguments(text: str) -> str:
    """The arguments of a call whose text a harness sends back."""
    return shared.compact_json({"input": text})


_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_LONGEST_OPENING = 64
_PIECES = re.compile(
    r'(?:[^"\\]+'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"
    r"|\\[^u])*+",
    re.DOTALL,
)
_UNFINISHED = re.compile(r"\\(?:u[0-9a-fA-F]{0,4}(?:\\(?:u[0-9a-fA-F]{0,3})?)?)?\Z")
_ESCAPE = re.compile(r"\\(?:u[dD][89abAB]..\\u....|u....|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", '"': '"', "\\": "\\", "/": "/"}


class CustomInput:
    """The text of a custom tool, out of its arguments `{"input": "..."}` as they come.

    Arguments in another form are the text themselves, and an escape that JSON does not know stays as
    it is: a model that spelled its patch badly meant something, and its harness can say what is wrong.
    """

    def __init__(self) -> None:
        self._held = ""
        self._take: Callable[[], str] = self._opening

    def feed(self, text: str) -> str:
        """What more arguments add to the text."""
        self._held += text
        return self._take()

    def close(self) -> str:
        """What was held back in case more came."""
        rest, self._held = self._held, ""
        return "" if self._take == self._behind else rest

    def _opening(self) -> str:
        opening = _OPENING.match(self._held)
        if opening is not None:
            self._held = self._held[opening.end() :]
            self._take = self._inside
        elif len(self._held) < _LONGEST_OPENING and '{"input":"'.startswith(
            "".join(self._held.split())
        ):
            return ""
        else:
            self._take = self._as_it_is
        return self._take()

    def _as_it_is(self) -> str:
        text, self._held = self._held, ""
        return text

    def _behind(self) -> str:
        self._held = ""
        return ""

    def _inside(self) -> str:
        read, at = [], 0
        while True:
            pieces = _PIECES.match(self._held, at)
            assert pieces is not None  # it matches the empty text
            read.append(_unescaped(pieces[0]))
            at = pieces.end()
            if at == len(self._held) or _UNFINISHED.match(self._held, at):
                self._held = self._held[at:]
                break
            if self._held[at] == '"':
                self._take = self._behind
                self._held = ""
                break
            read.append("\\")
            at += 1
        return "".join(read)


def custom_input(arguments: str) -> str:
    whole = CustomInput()
    return whole.feed(arguments) + whole.close()


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(_unescape, text) if "\\" in text else text


def _unescape(escape: re.Match[str]) -> str:
    text = escape[0]
    if text[1] == "u":
        decoded: str = msgspec.json.decode(f'"{text}"')
        return decoded
    return _ESCAPED.get(text[1], text)
