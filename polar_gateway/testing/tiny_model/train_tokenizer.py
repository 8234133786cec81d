"""Train tokenizer.json, the byte-level BPE that the scripted engine and the tiny model share.

    python -m polar_gateway.testing.tiny_model.train_tokenizer [OUT]

The text is the standard library of the Python that runs this, with the JSON that agents write mixed
in. The committed file came from CPython 3.11.7; the same Python and `tokenizers` give the same bytes.
"""

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

VOCABULARY = 4096
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Special: left out of decoded text."""
MARKUP = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
"""One id each, but ordinary text when decoded, as Qwen3 has it."""

CORPUS_BYTES = 4_000_000
NOT_PROSE = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "__pycache__"}
AGENT_TEXT = (
    '{"name": "bash", "arguments": {"command": "ls -la && cat README.md | head -n 20"}}\n'
    '{"type": "function", "function": {"name": "read", "description": "Read a file", "parameters": '
    '{"type": "object", "properties": {"path": {"type": "string", "description": "The file to read"}, '
    '"limit": {"type": "number"}}, "required": ["path"], "additionalProperties": false}}}\n'
    "grep -rn 'def ' src/ | sort | uniq -c\ngit diff --stat HEAD~1\npython3 -m unittest -q tests\n"
)
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def corpus() -> Iterator[str]:
    """English first (the help topics), then modules in order of their path, up to CORPUS_BYTES."""
    library = Path(sysconfig.get_path("stdlib"))
    modules = [
        p for p in library.rglob("*.py") if not NOT_PROSE & set(p.relative_to(library).parts)
    ]
    modules.sort(key=lambda p: (p.name != "topics.py", p.relative_to(library).as_posix()))
    left = CORPUS_BYTES
    for module in modules:
        text = module.read_text("utf-8")
        yield text
        left -= len(text)
        if left < 0:
            break
    yield from [AGENT_TEXT] * 200


def train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(CONTROL) - len(MARKUP),
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP])
    return tokenizer


if __name__ == "__main__":
    out = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).with_name("tokenizer.json"))
    train().save(out, pretty=False)
