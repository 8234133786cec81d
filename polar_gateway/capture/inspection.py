"""What a journal holds, for people and for programs that look into one."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from builders.records import Completion, CompletionSession
from polar_gateway.capture import journal
from polar_gateway.capture.journal import AnyRecord, Completed, JournalContents, Opened, Place
from polar_gateway.capture.reading import ledger_of

_IDS = ("tail", "sampled")
_FLOATS = ("logprobs",)
_JSON = ("metadata", "tools", "asked", "sampling")
"""Fields that are bytes, by what they hold."""


class Inspected(NamedTuple):
    contents: JournalContents
    session: CompletionSession
    """Of the records that are whole."""
    sealed: bool
    problems: list[str]
    """Sentences; empty where the journal is whole, and so is what it refers to."""


def inspected(path: Path) -> Inspected:
    """Read a journal with all that it refers to. Raises OSError when there is none."""
    contents = journal.read_journal(path)
    ledger = ledger_of(contents)
    problems = [contents.problem] if contents.problem else []
    if not any(isinstance(first, Opened) for first in contents.records[:1]):
        problems.append("no first record says whose session it is")
    for completion in ledger.completions.values():
        problems += _misaligned(completion)
        problems += _missing(completion, path.parent)
    session = ledger.completion_session()
    if contents.finding:
        session.findings.append(contents.finding)
    return Inspected(contents, session, ledger.sealed, problems)


def _misaligned(completion: Completion) -> Iterator[str]:
    name, parent = completion.completion_id, completion.parent
    if parent and completion.shared > parent.prompt_length + len(parent.sampled_ids):
        yield f"{name} shares more ids with {parent.completion_id} than that has"
    if completion.logprobs is not None and len(completion.logprobs) != len(completion.sampled_ids):
        yield (
            f"{name} has {len(completion.logprobs)} log probabilities for"
            f" {len(completion.sampled_ids)} sampled ids"
        )


def _missing(completion: Completion, folder: Path) -> Iterator[str]:
    for tensor in completion.tensors:
        said = f"{tensor.name} of {completion.completion_id}, {tensor.file},"
        try:
            data = (folder / tensor.file).read_bytes()
        except OSError as error:
            yield f"{said} cannot be read: {error.strerror}"
            continue
        if hashlib.sha256(data).hexdigest() != tensor.sha256:
            yield f"{said} is not what was written"


def readable(record: AnyRecord, place: Place) -> dict[str, Any]:
    """A record with its fields as JSON values, and where in the file it begins."""
    fields = msgspec.to_builtins(record, builtin_types=(bytes,))
    for name, value in fields.items():
        if not isinstance(value, bytes):
            continue
        if name in _IDS:
            fields[name] = journal.unpack_ids(value).tolist()
        elif name in _FLOATS:
            fields[name] = journal.unpack_floats(value).tolist()
        elif name in _JSON:
            fields[name] = msgspec.json.decode(value)
    return {"byte": place.offset, **fields}


def ended(completion: Completion) -> str:
    """How a call ended, in a few words."""
    if completion.delivered:
        return completion.finish_reason or "no reason given"
    told = completion.delivered_tokens or 0
    reason = completion.finish_reason or "cut off"
    return f"{reason}, {told} of {len(completion.sampled_ids)} delivered"


def calls_in_the_end(contents: JournalContents) -> int:
    """How many calls the journal holds to their end."""
    return sum(isinstance(record, Completed) for record in contents.records)
