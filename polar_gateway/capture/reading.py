"""A session as its journal tells it, live or after a crash: there is no other account of it."""

import math
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from builders.records import Completion, CompletionSession, Floats
from polar_gateway.capture import journal
from polar_gateway.capture.journal import (
    AnyRecord,
    Appended,
    Completed,
    Delivered,
    Failed,
    Intent,
    JournalContents,
    Opened,
    Rendered,
    Sealed,
    Tools,
    Undelivered,
)

_json = msgspec.json.Decoder()


class Ledger:
    """What a journal's records add up to."""

    def __init__(self) -> None:
        self.header = Opened(session_id="")
        self.completions: dict[int, Completion] = {}
        """By index, which is the order of arrival and has gaps where calls failed."""
        self.findings: list[str] = []
        self.sealed = False
        self._open: dict[str, Intent] = {}
        self._appended: dict[str, list[Appended]] = {}
        self._tools: dict[int, list[dict[str, Any]]] = {}
        self._finished: dict[str, Completion] = {}

    def apply(self, record: AnyRecord) -> None:
        match record:
            case Opened():
                self.header = record
            case Tools():
                self._tools[record.number] = _json.decode(record.tools)
            case Intent():
                self._open[record.completion_id] = record
            case Appended():
                self._appended.setdefault(record.completion_id, []).append(record)
            case Completed():
                intent = self._open.pop(record.completion_id)
                appended = self._appended.pop(record.completion_id, [])
                completion = self._completion(intent, record, appended)
                self.completions[completion.index] = completion
                self._finished[completion.completion_id] = completion
            case Failed():
                del self._open[record.completion_id]
                self.findings.append(record.code)
            case Undelivered():
                completion = self._finished[record.completion_id]
                completion.delivered, completion.delivered_tokens = False, record.delivered_tokens
            case Delivered():
                completion = self._finished[record.completion_id]
                completion.delivered, completion.delivered_tokens = True, None
            case Rendered():
                completion = self._finished[record.completion_id]
                tail = journal.unpack_ids(record.tail)
                completion.canonical_ids = completion.sampled_ids[: record.shared] + tail
            case Sealed():
                self.sealed = True

    def _completion(
        self, intent: Intent, record: Completed, appended: Sequence[Appended]
    ) -> Completion:
        prompt: Appended | Completed = record
        sampled, logprobs = record.sampled, record.logprobs
        if record.appended:
            prompt = appended[0]
            sampled = b"".join([each.sampled for each in appended]) + sampled
            if logprobs is not None:
                logprobs = b"".join([each.logprobs for each in appended]) + logprobs
        return Completion(
            completion_id=intent.completion_id,
            index=intent.index,
            parent=None if intent.parent is None else self.completions[intent.parent],
            shared=prompt.shared,
            tail=journal.unpack_ids(prompt.tail),
            sampled_ids=journal.unpack_ids(sampled),
            previous=None if intent.previous is None else self.completions[intent.previous],
            attached=intent.attached,
            ambiguous=intent.ambiguous,
            continued_tokens=intent.continued_tokens,
            logprobs=None if logprobs is None else journal.unpack_floats(logprobs),
            logprob_kind=record.logprob_kind,
            mode=record.mode,
            messages_shared=intent.messages_shared,
            messages_tail=intent.messages_tail,
            tools=None if intent.tools is None else self._tools[intent.tools],
            response_message=record.response_message,
            finish_reason=record.finish_reason,
            stop_reason=record.stop_reason,
            kind=intent.kind,
            delivered=record.delivered,
            delivered_tokens=None if record.delivered else record.delivered_tokens,
            dialect=intent.dialect,
            model_requested=intent.model_requested,
            model_used=record.model_used,
            policy_version=record.policy_version,
            versions=record.versions,
            backend=record.backend,
            sampling=_json.decode(record.sampling),
            asked=_json.decode(intent.asked),
            usage=record.usage,
            started_at=intent.at,
            ended_at=record.at,
            notes=[*intent.notes, *record.notes],
            findings=record.findings,
            chain=intent.chain,
            tensors=record.tensors,
        )

    def completion_session(self, end_of_turn_ids: Sequence[int] = ()) -> CompletionSession:
        """The session as it is now. An open call that has sampled something is a completion that
        nobody received; one that has not is a finding."""
        completions = dict(self.completions)
        findings = list(self.findings)
        for completion_id, intent in self._open.items():
            if appended := self._appended.get(completion_id):
                cut_off = _cut_off(appended)
                completions[intent.index] = self._completion(intent, cut_off, appended)
            else:
                findings.append("call_unfinished")
        header = self.header
        return CompletionSession(
            session_id=header.session_id,
            task_id=header.task_id,
            completions=[completions[index] for index in sorted(completions)],
            metadata=_json.decode(header.metadata),
            end_of_turn_ids=list(end_of_turn_ids or header.end_of_turn_ids),
            end_of_turn_texts=header.end_of_turn_texts,
            findings=findings,
        )


def _cut_off(appended: Sequence[Appended]) -> Completed:
    """The record that a call lacks whose journal ends before it."""
    first = appended[0]
    logprobs = _floats(each.logprobs for each in appended)
    sampled = sum(len(each.sampled) for each in appended) // array("i").itemsize
    # The engine may have left some out; they are not a number then, or fewer.
    aligned = len(logprobs) == sampled and math.isfinite(sum(logprobs))
    return Completed(
        completion_id=first.completion_id,
        appended=sampled,
        logprobs=b"" if aligned else None,
        response_message={"role": "assistant", "content": ""},
        sampling=first.sampling,
        mode=first.mode,
        backend=first.backend,
        policy_version=appended[-1].policy_version,
        versions=appended[-1].versions,
        findings=["call_unfinished"],
        delivered=False,
    )


def _floats(parts: Iterable[bytes]) -> Floats:
    return journal.unpack_floats(b"".join(parts))


def read_session(path: Path, end_of_turn_ids: Sequence[int] = ()) -> CompletionSession:
    """The session that a journal holds. Raises OSError when there is none."""
    contents = journal.read_journal(path)
    session = ledger_of(contents).completion_session(end_of_turn_ids)
    if contents.finding:
        session.findings.append(contents.finding)
    return session


def ledger_of(contents: JournalContents) -> Ledger:
    """What the records add up to. One that does not follow from those before it is noted in
    `contents`; it and what comes after it are left out."""
    ledger = Ledger()
    for record, place in zip(contents.records, contents.places, strict=True):
        try:
            ledger.apply(record)
        except LookupError as error:
            contents.finding = "journal_damaged"
            contents.problem = (
                f"the record at byte {place.offset} refers to what is not there: {error}"
            )
            break
    return ledger
