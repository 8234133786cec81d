"""The tokenizer and chat template of the tiny model, and how vLLM prepares messages for them.

Everything here is pure. Text becomes ids the way vLLM with the same files makes them, so that a
prompt has the same ids on the scripted engine and on a real one.
"""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

TINY_MODEL = Path(__file__).with_name("tiny_model")
TEXT_PARTS = {"text", "input_text", "output_text", "refusal", "thinking"}


class RenderError(ValueError):
    """The chat template, or vLLM before it, refuses these messages."""


class ChatTokenizer:
    """Byte-level BPE and chat template from one folder."""

    def __init__(self, folder: Path = TINY_MODEL) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        self._template = environment.from_string(
            (folder / "chat_template.jinja").read_text("utf-8")
        )

        self.size = self._tokenizer.get_vocab_size()
        self.end_of_turn = self.id_of("<|im_end|>")
        self.ends_of_turn = {self.end_of_turn, self.id_of("<|endoftext|>")}
        added = {i: t.content for i, t in self._tokenizer.get_added_tokens_decoder().items()}
        self.bytes_of = [
            added[i].encode() if i in added else _spelled_bytes(self._tokenizer.id_to_token(i))
            for i in range(self.size)
        ]
        """Token id -> the bytes it stands for; of a control token, its name."""
        self._ids_by_bytes: dict[bytes, int] = {
            spelled: i for i, spelled in enumerate(self.bytes_of) if i not in added
        }
        self._longest = max(map(len, self._ids_by_bytes))
        self._added = {text.encode(): i for i, text in added.items()}
        self._markup = re.compile(
            b"|".join(re.escape(t) for t in sorted(self._added, key=len, reverse=True))
        )

    def id_of(self, token: str) -> int:
        """Raises KeyError when the vocabulary has no such token."""
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise KeyError(token)
        return token_id

    def encode(self, text: str) -> list[int]:
        """The canonical spelling; control tokens written out in the text become their own ids."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """Everything, control tokens too."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def spelled(self, ids: list[int]) -> bytes:
        """Everything, control tokens too, and halves of characters as they are."""
        return b"".join([self.bytes_of[i] for i in ids])

    def texts(self, ids: list[int]) -> Iterator[tuple[int, str]]:
        """Each token with the text that it completes, control tokens too."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for number, token_id in enumerate(ids, start=1):
            yield token_id, decoder.decode(self.bytes_of[token_id], number == len(ids))

    def continuations(self, rest: bytes) -> list[int]:
        """Every token that a model which still has to say `rest` may say next, shortest first.

        Markup is always its own token, since streaming parsers look for that id and not for the
        text.
        """
        window = rest[: self._longest + 32]
        markup = self._markup.search(window)
        if markup is not None:
            if markup.start() == 0:
                return [self._added[markup.group()]]
            window = window[: markup.start()]
        spellings = (window[:length] for length in range(1, min(self._longest, len(window)) + 1))
        return [self._ids_by_bytes[s] for s in spellings if s in self._ids_by_bytes]

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        images: bool = False,
        **template_arguments: Any,
    ) -> str:
        """The prompt as text, in which `images`, where they are allowed, are but a mark. Raises
        RenderError when the template refuses."""
        try:
            return self._template.render(
                messages=[_prepared(m, images) for m in messages],
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **template_arguments,
            )
        except TemplateError as error:
            raise RenderError(str(error)) from error


def _tojson(value: Any) -> str:
    """As transformers has it: Jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=False)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _prepared(message: dict[str, Any], images: bool) -> dict[str, Any]:
    """A chat message as vLLM hands it to a template: flat text, arguments as objects."""
    prepared: dict[str, Any] = {
        "role": message["role"],
        "content": _text(message.get("content"), images),
    }
    if message["role"] == "assistant":
        prepared["reasoning"] = message.get("reasoning") or message.get("reasoning_content")
        prepared["tool_calls"] = [
            {
                "function": {
                    "name": call["function"]["name"],
                    "arguments": _arguments(call["function"].get("arguments")),
                }
            }
            for call in message.get("tool_calls") or []
        ]
    return prepared


def _text(content: Any, images: bool) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif part.get("type") in TEXT_PARTS:
            texts.append(part.get(part["type"]) or part.get("text") or "")
        elif images and part.get("type") == "image_url":
            texts.append("<image>")
        else:
            raise RenderError("tiny is not a multimodal model")
    return "\n".join(texts)


def _arguments(arguments: Any) -> dict[str, Any]:
    """The object that the text holds; what is no object becomes an empty one, as in vLLM."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            return {}
    return arguments if isinstance(arguments, dict) else {}


def _byte_alphabet() -> dict[str, int]:
    """The printable characters by which byte-level BPE writes the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [chr(b) for b in printable] + [chr(256 + i) for i in range(len(others))]
    return dict(zip(characters, printable + others, strict=True))


_BYTE_OF = _byte_alphabet()


def _spelled_bytes(token: str | None) -> bytes:
    if token is None:
        raise ValueError("the vocabulary has gaps")
    return bytes(_BYTE_OF[character] for character in token)
