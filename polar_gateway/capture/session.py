"""The record of one session's model calls, durable call by call.

Everything known about a session is what its journal's records add up to (`Ledger`), for a live
session and for one that is read back, so that the two cannot differ.

A completion is stored as the difference to an earlier one. Which one is found by message identity:
the messages of all calls form a tree, a new request walks down it for as long as its messages are
equal, and its parent is the latest call that came through the deepest node reached, of those with
the same tools if there are any (tools stand at the head of a rendered prompt). Tokens are then
compared with that parent's alone. A poor choice costs space and never truth.
"""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from builders.records import AttachLevel, Completion, CompletionSession, Ids, Mode, TokenNode
from polar_gateway.capture import journal
from polar_gateway.capture.journal import CaptureError, Journal
from polar_gateway.capture.tree import MessageTree, Place
from polar_gateway.dialects.turn import ModelRequest
from polar_gateway.engines.base import EngineReply, Generation

CHAIN_HEADERS = ("thread-id", "x-claude-code-agent-id", "x-session-id")
"""Headers by which harnesses tell their conversations apart."""


class Ledger:
    """What a journal's records add up to."""

    def __init__(self) -> None:
        self.header = journal.Opened(session_id="")
        self.completions: dict[int, Completion] = {}
        """By index, which is the order of arrival and has gaps where calls failed."""
        self.open: dict[str, journal.Intent] = {}
        self.arrived = 0
        self.sealed = False
        self.findings: list[str] = []
        self._finished: dict[str, Completion] = {}
        self._appended: dict[str, list[journal.Appended]] = {}

    def apply(self, record: journal.AnyRecord) -> None:
        match record:
            case journal.Opened():
                self.header = record
            case journal.Intent():
                self.open[record.completion_id] = record
                self.arrived = record.index + 1
            case journal.Appended():
                self._appended.setdefault(record.completion_id, []).append(record)
            case journal.Completed():
                # Repeats what was appended.
                self._appended.pop(record.completion_id, None)
                completion = self._completion(self.open.pop(record.completion_id), record)
                self.completions[completion.index] = completion
                self._finished[completion.completion_id] = completion
            case journal.Failed():
                del self.open[record.completion_id]
                self.findings.append(record.code)
            case journal.Undelivered():
                completion = self._finished[record.completion_id]
                completion.delivered, completion.delivered_tokens = False, record.delivered_tokens
            case journal.Delivered():
                completion = self._finished[record.completion_id]
                completion.delivered, completion.delivered_tokens = True, None
            case journal.Rendered():
                pass
            case journal.Sealed():
                self.sealed = True

    def _completion(self, intent: journal.Intent, record: journal.Completed) -> Completion:
        parent = None if intent.parent is None else self.completions[intent.parent]
        previous = None if intent.previous is None else self.completions[intent.previous]
        return Completion(
            completion_id=intent.completion_id,
            index=intent.index,
            parent=parent,
            shared=record.shared,
            tail=journal.unpack_ids(record.tail),
            sampled_ids=journal.unpack_ids(record.sampled),
            logprobs=None if record.logprobs is None else journal.unpack_floats(record.logprobs),
            messages_shared=intent.messages_shared,
            messages_tail=intent.messages_tail,
            tools=parent.tools if intent.tools_as_parent and parent else intent.tools,
            response_message=record.response_message,
            finish_reason=record.finish_reason,
            stop_reason=record.stop_reason,
            kind=intent.kind,
            delivered=record.delivered,
            delivered_tokens=None if record.delivered else record.delivered_tokens,
            dialect=intent.dialect,
            model_requested=intent.model_requested,
            model_used=record.model_used,
            previous=previous,
            attached=intent.attached,
            ambiguous=intent.ambiguous,
            continued_tokens=intent.continued_tokens,
            mode=record.mode,
            logprob_kind=record.logprob_kind,
            backend=record.backend,
            versions=record.versions,
            policy_version=record.policy_version,
            sampling=record.sampling,
            asked=intent.asked,
            usage=record.usage,
            started_at=intent.at,
            ended_at=record.at,
            notes=[*intent.notes, *record.notes],
            findings=record.findings,
            chain=intent.chain,
        )

    def completion_session(self, end_of_turn_ids: Sequence[int] = ()) -> CompletionSession:
        """The session as it is now. An open call that has sampled something is a completion that
        nobody received; one that has not is a finding."""
        completions = dict(self.completions)
        findings = list(self.findings)
        for completion_id, intent in self.open.items():
            if appended := self._appended.get(completion_id):
                completions[intent.index] = self._completion(intent, unfinished(appended))
            else:
                findings.append("call_unfinished")
        return CompletionSession(
            session_id=self.header.session_id,
            task_id=self.header.task_id,
            completions=[completions[index] for index in sorted(completions)],
            metadata=self.header.metadata,
            end_of_turn_ids=list(end_of_turn_ids or self.header.end_of_turn_ids),
            findings=findings,
        )


class SessionCapture:
    """All calls of a session; one journal file. Methods raise CaptureError when it cannot be written."""

    def __init__(
        self,
        *,
        session_id: str,
        task_id: str | None,
        journal_path: Path,
        metadata: dict[str, Any],
        policy_version: str | None,
        end_of_turn_ids: Sequence[int] = (),
    ) -> None:
        self.session_id = session_id
        self.journal_path = journal_path
        self._ledger = Ledger()
        self._journal = Journal(journal_path)
        self._tree = MessageTree()
        self._calls: dict[str, OpenCall] = {}
        self._write(
            journal.Opened(
                session_id=session_id,
                task_id=task_id,
                metadata=metadata,
                policy_version=policy_version,
                end_of_turn_ids=list(end_of_turn_ids),
            )
        )

    def restored(self, request: ModelRequest) -> ModelRequest:
        """The request as the engine shall be sent it: assistant messages that mean the same as
        recorded answers of this session are those answers again, in the model's own spelling and
        with their reasoning. Equal to `request` where nothing had changed on the way; else its
        notes say what came back."""
        return self._tree.restored(request)

    def open(
        self,
        request: ModelRequest,
        *,
        completion_id: str,
        dialect: str,
        headers: Mapping[str, str],
        kind: str = "turn",
    ) -> "OpenCall":
        """Journal that a call is about to be made, exactly as the engine will be sent it."""
        place = self._tree.find(request.messages, request.tools)
        parent = place.parent
        depth, previous = place.previous()
        self._write(
            journal.Intent(
                completion_id=completion_id,
                index=self._ledger.arrived,
                parent=None if parent is None else parent.index,
                previous=None if previous is None else previous.index,
                attached=None if previous is None else "exact",
                messages_shared=place.shared,
                messages_tail=place.messages[place.shared :],
                tools_as_parent=parent is not None and parent.tools is place.tools,
                tools=None if parent is not None and parent.tools is place.tools else place.tools,
                kind=kind,
                dialect=dialect,
                model_requested=request.model,
                asked=_asked(request),
                chain={name: headers[name] for name in CHAIN_HEADERS if name in headers},
                notes=request.notes,
                at=time.time(),
            )
        )
        call = self._calls[completion_id] = OpenCall(self, completion_id, place)
        call.policy_version = self._ledger.header.policy_version
        if previous is not None:
            call.previous, call.attached, call.previous_messages = previous, "exact", depth
        return call

    def redelivered(self, completion_id: str) -> None:
        """Journal that a harness which asked again got the recorded answer after all.

        Does nothing once the session is sealed: what was built must stay true.
        """
        if not self._ledger.sealed:
            self._write(journal.Delivered(completion_id=completion_id))

    def seal(self) -> None:
        """End what is in flight and refuse what comes; whatever is built now stays true.

        The session is sealed even where this raises CaptureError; it then says `journal_failed`.
        """
        if self._ledger.sealed:
            return
        said = "the session was sealed while the call was in flight"
        endings = [call._ending("call_cut_by_seal", said) for call in self._calls.values()]
        lost: CaptureError | None = None
        for record in [*endings, journal.Sealed(at=time.time())]:
            try:
                self._write(record)
            except CaptureError as error:
                lost = error
                self._ledger.apply(record)
        self._calls.clear()
        if lost is not None:
            self._ledger.findings.append("journal_failed")
            raise lost

    @property
    def completion_count(self) -> int:
        return len(self._ledger.completions)

    def completion_session(self, end_of_turn_ids: Sequence[int] = ()) -> CompletionSession:
        """`end_of_turn_ids` are the ones that the session began with unless others are given."""
        return self._ledger.completion_session(end_of_turn_ids)

    def close(self) -> None:
        """Release the file; the completions stay readable."""
        self._journal.close()

    def _write(self, record: journal.AnyRecord) -> None:
        if self._ledger.sealed:
            raise CaptureError(f"session {self.session_id} is sealed")
        self._journal.append(record)
        self._ledger.apply(record)


class OpenCall:
    """A model call whose intent is in the journal and whose answer is not there yet."""

    def __init__(self, capture: SessionCapture, completion_id: str, place: Place) -> None:
        self.completion_id = completion_id
        self._capture = capture
        self._place = place
        self._generation: Generation | None = None
        self._sampling: dict[str, Any] = {}
        self._appended = False
        self._mode: Mode = "messages"
        self._notes: list[str] = []
        self._findings: list[str] = []
        self.previous: TokenNode | None = None
        """The earlier call whose answer this request continues, under an identical head."""
        self.attached: AttachLevel | None = None
        self.ambiguous = False
        self.continued_tokens: int | None = None
        """How many of the previous call's sampled tokens are continued; None: all of them."""
        self.previous_messages = 0
        """How many leading messages of the request are those of the previous call and its answer."""
        self.backend = ""
        """The name of the backend that is asked; to be set by who asks, before the call ends."""
        self.policy_version: str | None = None
        """That of the first sampled token; to be set by who asks, where it is not the session's."""
        self.delivered_tokens = 0
        """How many of the sampled tokens were written while the harness was there; to be kept up
        to date by who writes them, and recorded of an answer that does not get through whole."""

    @property
    def is_open(self) -> bool:
        """False once it was closed, failed, or cut by the session's seal."""
        return self.completion_id in self._capture._ledger.open

    @property
    def after(self) -> TokenNode | None:
        """The earlier call that this one probably continues."""
        return self._place.parent

    def composed(
        self, mode: Mode, *, notes: Sequence[str] = (), findings: Sequence[str] = ()
    ) -> None:
        """How the engine is asked for it, and what is to be said of that; recorded at its end."""
        self._mode = mode
        self._notes += notes
        self._findings += findings

    def rendered(self, shared: int, tail: Ids) -> None:
        """Journal the engine's own rendering of `previous` up to and including its answer: the
        first `shared` ids of its recorded prompt and sample, then `tail`."""
        if self.previous is not None:
            self._capture._write(
                journal.Rendered(
                    completion_id=self.previous.completion_id,
                    shared=shared,
                    tail=journal.pack(tail),
                )
            )

    async def durable(self) -> None:
        """Returns when what was recorded survives as much as it is configured to."""

    def follow(self, generation: Generation, sampling: dict[str, Any]) -> None:
        """The answer comes in pieces; what there is of it counts, however the call ends."""
        self._generation = generation
        self._sampling = sampling

    def append(self) -> None:
        """Journal what the followed generation has sampled since the last append; durable when
        this returns."""
        if self._generation is None:
            return
        ids, logprobs = self._generation.sampled_so_far()
        if not ids:
            return
        shared, tail = 0, b""
        if not self._appended:
            shared, tail = self._prompt(self._generation.prompt_ids)
        self._capture._write(
            journal.Appended(
                completion_id=self.completion_id,
                shared=shared,
                tail=tail,
                sampled=journal.pack(ids),
                logprobs=journal.pack(logprobs),
            )
        )
        self._appended = True

    def close(self, reply: EngineReply, sampling: dict[str, Any]) -> Completion:
        """Journal the finished completion; durable when this returns."""
        return self._end(self._completed(reply, sampling))

    def fail(self, message: str, code: str = "call_failed") -> None:
        """Journal that the call ended without an answer; a call cut by the seal has ended already.

        What a followed generation sampled before is a completion that nobody received whole, and
        `code` a finding of it.
        """
        if not self.is_open:
            return
        record = self._ending(code, message)
        if isinstance(record, journal.Completed):
            self._end(record)
        else:
            self._capture._calls.pop(self.completion_id, None)
            self._capture._write(record)

    def _ending(self, code: str, message: str) -> journal.Completed | journal.Failed:
        """How a call is recorded that ends now, before its time."""
        if self._generation is not None and self._generation.prompt_ids:
            reply = self._generation.reply
            if reply.sampled_ids:
                record = self._completed(reply, self._sampling)
                record.finish_reason = record.stop_reason = None
                record.findings = [*record.findings, code]
                record.delivered, record.delivered_tokens = False, self.delivered_tokens
                return record
        return journal.Failed(
            completion_id=self.completion_id, code=code, message=message, at=time.time()
        )

    def _end(self, record: journal.Completed) -> Completion:
        self._capture._write(record)
        self._capture._calls.pop(self.completion_id, None)
        completion = self._capture._ledger._finished[self.completion_id]
        self._capture._tree.insert(self._place, completion)
        return completion

    def _prompt(self, ids: Ids | None) -> tuple[int, bytes]:
        """A prompt as the difference to the parent's context: shared length and packed rest."""
        if ids is None:
            return 0, b""
        parent = self._place.parent
        shared = 0 if parent is None else shared_prefix(ids, parent)
        return shared, journal.pack(ids[shared:])

    def _completed(self, reply: EngineReply, sampling: dict[str, Any]) -> journal.Completed:
        shared, tail = self._prompt(reply.prompt_ids)
        usage = reply.usage
        return journal.Completed(
            completion_id=self.completion_id,
            shared=shared,
            tail=tail,
            sampled=journal.pack(reply.sampled_ids),
            logprobs=None if reply.logprobs is None else journal.pack(reply.logprobs),
            response_message=reply.message,
            finish_reason=reply.finish_reason,
            stop_reason=reply.stop_reason,
            model_used=reply.model,
            sampling=sampling,
            usage={
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "cached_tokens": usage.cached_tokens,
                "reasoning_tokens": usage.reasoning_tokens,
            },
            mode=self._mode,
            logprob_kind=reply.logprob_kind,
            backend=self.backend,
            policy_version=self.policy_version,
            versions=reply.versions,
            findings=[*self._findings, *reply.findings],
            notes=[*self._notes, *reply.notes],
            at=time.time(),
        )

    def undelivered(self) -> None:
        """Journal that the answer, once recorded, did not reach the harness whole.

        Does nothing once the session is sealed: what was built must stay true.
        """
        if not self._capture._ledger.sealed:
            self._capture._write(
                journal.Undelivered(
                    completion_id=self.completion_id, delivered_tokens=self.delivered_tokens
                )
            )


def _asked(request: ModelRequest) -> dict[str, Any]:
    """What beside messages, tools and sampling the prompt and the distribution depend on."""
    asked = {
        "tool_choice": request.tool_choice,
        "response_format": request.response_format,
        "template_kwargs": request.template_kwargs,
    }
    return {name: value for name, value in asked.items() if value not in (None, {})}


def unfinished(appended: list[journal.Appended]) -> journal.Completed:
    """What an open call has sampled, as the record of a call that was cut off there."""
    sampled = b"".join(record.sampled for record in appended)
    logprobs = b"".join(record.logprobs for record in appended)
    # The engine may have left some out; they are not a number then, or fewer.
    aligned = len(logprobs) == len(sampled) and math.isfinite(sum(journal.unpack_floats(logprobs)))
    return journal.Completed(
        completion_id=appended[0].completion_id,
        shared=appended[0].shared,
        tail=appended[0].tail,
        sampled=sampled,
        logprobs=logprobs if aligned else None,
        response_message={"role": "assistant", "content": ""},
        findings=["call_unfinished"],
        delivered=False,
    )


def read_session(path: Path, end_of_turn_ids: Sequence[int] = ()) -> CompletionSession:
    """The session that a journal holds, as its capture last saw it."""
    contents = journal.read_journal(path)
    ledger = Ledger()
    for record in contents.records:
        ledger.apply(record)
    session = ledger.completion_session(end_of_turn_ids)
    if contents.finding:
        session.findings.append(contents.finding)
    return session


def shared_prefix(prompt: Ids, parent: Completion) -> int:
    """How many leading ids of `prompt` are those of the parent's prompt and sampled ids.

    Compares piece by piece along the parent's own ancestry, so that no prompt is expanded.
    """
    ours = prompt.tobytes()
    size = prompt.itemsize
    for start, piece in _context_pieces(parent):
        theirs = piece.tobytes()
        if not ours.startswith(theirs, start * size):
            return start + _common(ours[start * size : start * size + len(theirs)], theirs) // size
    return min(len(prompt), parent.prompt_length + len(parent.sampled_ids))


def _context_pieces(completion: Completion) -> list[tuple[int, Ids]]:
    """The stored pieces that a completion's context consists of, each with its offset, in order."""
    pieces: list[tuple[int, Ids]] = []
    node: Completion | None = completion
    wanted = completion.prompt_length + len(completion.sampled_ids)
    while node is not None and wanted > 0:
        prompt_end = node.prompt_length
        if wanted > prompt_end:
            pieces.append((prompt_end, node.sampled_ids[: wanted - prompt_end]))
            wanted = prompt_end
        if wanted > node.shared:
            pieces.append((node.shared, node.tail[: wanted - node.shared]))
            wanted = node.shared
        node = node.parent
    pieces.reverse()
    return pieces


def _common(a: bytes, b: bytes) -> int:
    """Length of the common prefix, by halving, so that bytes are compared in bulk."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
