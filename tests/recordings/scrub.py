"""Make what a harness sent fit to be kept: its long texts are its authors', and are not ours.

Words become invented ones of the same length and case, the same word always the same, so that
structure, sizes, equalities and prefixes stay. What stays as it is: keys, ids, names and everything
else without a space; words of up to three letters; tags; and the head and the tail of the texts by
which a call is told from another, which are the system prompt's and the first and last message's.

    python -m tests.recordings.scrub < exchanges.json > exchanges.json.xz
"""

import hashlib
import json
import lzma
import re
import sys
from typing import Any

HEAD = 130
TAIL = 110
"""Characters that are kept at either end of a telling text."""

_WORD = re.compile(r"</?[a-zA-Z_-]+|[A-Za-z]{4,}")


def invented(word: str) -> str:
    """Another word of the same length and case; tags are kept."""
    if word.startswith("<"):
        return word
    digest = hashlib.sha256(word.lower().encode()).digest()
    letters = "".join(
        ("bcdfghjklmnpqrstvwxz", "aeiou")[place % 2][digest[place % 32] % (20, 5)[place % 2]]
        for place in range(len(word))
    )
    if word.isupper():
        return letters.upper()
    return letters.capitalize() if word[0].isupper() else letters


def scrubbed(text: str) -> str:
    return _WORD.sub(lambda found: invented(found[0]), text)


def ends_kept(text: str) -> str:
    if len(text) <= HEAD + TAIL:
        return text
    return text[:HEAD] + scrubbed(text[HEAD:-TAIL]) + text[-TAIL:]


def scrub(body: dict[str, Any]) -> dict[str, Any]:
    """A request's body, in whichever dialect."""
    kept = dict(body)
    for key in ("messages", "input", "contents"):
        if isinstance(turns := body.get(key), list):
            telling = {0, 1, 2, len(turns) - 2, len(turns) - 1}
            kept[key] = [_walk(turn, telling=place in telling) for place, turn in enumerate(turns)]
    for key in ("system", "systemInstruction", "instructions"):
        if key in body:
            kept[key] = _walk(body[key], telling=True)
    for key in kept.keys() - {
        "messages",
        "input",
        "contents",
        "system",
        "systemInstruction",
        "instructions",
    }:
        kept[key] = _walk(body[key], telling=False)
    return kept


def _walk(value: Any, *, telling: bool) -> Any:
    if isinstance(value, dict):
        return {key: _walk(inner, telling=telling) for key, inner in value.items()}
    if isinstance(value, list):
        return [_walk(inner, telling=telling) for inner in value]
    if isinstance(value, str) and " " in value:
        return ends_kept(value) if telling else scrubbed(value)
    return value


def main() -> None:
    exchanges = json.load(sys.stdin)
    for exchange in exchanges:
        exchange["request"]["body"] = scrub(exchange["request"]["body"])
    document = json.dumps(exchanges, ensure_ascii=False, separators=(",", ":"))
    sys.stdout.buffer.write(lzma.compress(document.encode(), preset=9))


if __name__ == "__main__":
    main()
