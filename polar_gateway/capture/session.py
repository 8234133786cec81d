"""The record of one session's model calls, durable call by call.

What a session's calls said is in its journal and nowhere else; resident are the ids, digests of
the messages, and what it takes to tell whose answer the next request continues (`forest`). All that
is known of a session is read back from the file, so that a live session and one that is found after
a crash cannot differ.

A completion is stored as the difference to an earlier one, whose messages it shares most of. Tokens
are then compared with that one's alone. A poor choice costs space and never truth.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio

from builders.ids import common_start
from builders.records import (
    AttachLevel,
    CompletionSession,
    Ids,
    Mode,
    TensorRef,
    TokenNode,
    VersionSpan,
)
from polar_gateway.capture import journal, restore, tensors
from polar_gateway.capture.answers import AnswerCache
from polar_gateway.capture.digests import head_digest, message_digest, value_digest
from polar_gateway.capture.forest import Branch, Forest, Node, Walk
from polar_gateway.capture.journal import CaptureError, Journal, Syncer
from polar_gateway.capture.reading import ledger_of
from polar_gateway.capture.tokens import Tokens
from polar_gateway.dialects.messages import compact_json
from polar_gateway.dialects.turn import ModelRequest, TurnEvent
from polar_gateway.engines.base import EngineReply, Generation, Tensor

CHAIN_HEADERS = ("thread-id", "x-claude-code-agent-id", "x-session-id")
"""Headers by which harnesses tell their conversations apart."""


class SessionCapture:
    """All calls of a session; one journal file. Methods raise CaptureError when it cannot be written.

    `answers` and `syncer` are those of the node: without a syncer, records are not forced to disk.
    """

    def __init__(
        self,
        *,
        session_id: str,
        journal_path: Path,
        task_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        policy_version: str | None = None,
        end_of_turn_ids: Sequence[int] = (),
        end_of_turn_texts: Sequence[str] = (),
        answers: AnswerCache | None = None,
        syncer: Syncer | None = None,
    ) -> None:
        self.session_id = session_id
        self.journal_path = journal_path
        self.completion_count = 0
        """How many calls have sampled something and are in the journal."""
        self._policy_version = policy_version
        self._journal = Journal(journal_path)
        self._answers = AnswerCache() if answers is None else answers
        self._syncer = syncer
        self._forest = Forest(lambda node: self._answers.answer(self._journal, node.place))
        self._tools: dict[bytes, int] = {}
        self._calls: dict[str, OpenCall] = {}
        self._arrived = 0
        self._sealed = False
        self._unwritten: list[journal.AnyRecord] = []
        """How calls ended whose end could not be journalled."""
        self._walk: Walk | None = None
        """Of the request that was restored last."""
        header = journal.Opened(
            session_id=session_id,
            task_id=task_id,
            metadata=_json(metadata or {}),
            policy_version=policy_version,
            end_of_turn_ids=list(end_of_turn_ids),
            end_of_turn_texts=list(end_of_turn_texts),
        )
        try:
            self._write(header)
        except CaptureError:
            self._journal.close()  # nobody else will, as there is no session
            raise

    def restored(
        self, request: ModelRequest, headers: Mapping[str, str] | None = None
    ) -> ModelRequest:
        """The request as the engine shall be sent it: assistant messages that mean the same as
        recorded answers of this session are those answers again, in the model's own spelling and
        with their reasoning. Equal to `request` where nothing had changed on the way; else its
        notes say what came back. `headers` are the call's own, see `open`."""
        restored, self._walk = self._forest.restored(request, _chain(headers or {}))
        return restored

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
        chain = _chain(headers)
        walk, self._walk = self._walk, None
        if walk is None or walk.messages is not request.messages:
            walk = Walk(request.messages)
            walk.digests = [message_digest(message) for message in request.messages]
        branch = self._forest.branch(walk, head_digest(request), request.answers, chain)
        tools = self._toolset(request.tools)
        attachment = branch.attachment
        self._write(
            journal.Intent(
                completion_id=completion_id,
                index=self._arrived,
                parent=None if branch.parent is None else branch.parent.index,
                previous=None if attachment is None else attachment.previous.index,
                attached=None if attachment is None else attachment.level,
                ambiguous=attachment is not None and attachment.ambiguous,
                continued_tokens=None if attachment is None else attachment.continued_tokens,
                messages_shared=branch.shared,
                messages_tail=request.messages[branch.shared :],
                tools=tools,
                kind=kind,
                dialect=dialect,
                model_requested=request.model,
                asked=_json(_asked(request)),
                chain=chain,
                notes=request.notes,
                at=time.time(),
            )
        )
        call = OpenCall(self, completion_id, self._arrived, branch, chain, self._policy_version)
        self._calls[completion_id] = call
        self._arrived += 1
        if attachment is not None:
            attachment.previous.continued = True
        return call

    def _toolset(self, tools: list[dict[str, Any]] | None) -> int | None:
        """The number of a set of tools, which is journalled once."""
        if tools is None:
            return None
        digest = value_digest(tools)
        if digest not in self._tools:
            number = len(self._tools)
            self._write(journal.Tools(number=number, tools=_json(tools)))
            self._tools[digest] = number
        return self._tools[digest]

    def redelivered(self, completion_id: str) -> None:
        """Journal that a harness which asked again got the recorded answer after all.

        Does nothing once the session is sealed: what was built must stay true.
        """
        if not self._sealed:
            self._write(journal.Delivered(completion_id=completion_id))
            node = self._forest.node(completion_id)
            node.delivered, node.delivered_tokens, node.part = True, None, None

    def seal(self) -> None:
        """End what is in flight and refuse what comes; whatever is built now stays true.

        The session is sealed even where this raises CaptureError; it then says `journal_failed`.
        """
        if self._sealed:
            return
        said = "the session was sealed while the call was in flight"
        endings = [call._ending("call_cut_by_seal", said) for call in self._calls.values()]
        lost: CaptureError | None = None
        for record in [*endings, journal.Sealed(at=time.time())]:
            try:
                self._write_ending(record)
            except CaptureError as error:
                lost = error
            self.completion_count += isinstance(record, journal.Completed)
        self._calls.clear()
        self._sealed = True
        if lost is not None:
            raise lost

    def completion_session(self, end_of_turn_ids: Sequence[int] = ()) -> CompletionSession:
        """The session as it is now, read from its journal. `end_of_turn_ids` are the ones that the
        session began with unless others are given. Raises OSError when the file is gone."""
        contents = journal.read_journal(self.journal_path)
        ledger = ledger_of(contents)
        for record in self._unwritten:
            ledger.apply(record)
        session = ledger.completion_session(end_of_turn_ids)
        if self._unwritten:
            session.findings.append("journal_failed")
        if contents.finding:
            session.findings.append(contents.finding)
        return session

    def close(self) -> None:
        """Release the file; the completions stay readable."""
        self._answers.forget(self._journal)
        self._journal.close()

    def _write_ending(self, record: journal.AnyRecord) -> None:
        """Write what stays true, and is told by `completion_session`, where this raises."""
        try:
            self._write(record)
        except CaptureError:
            self._unwritten.append(record)
            raise

    def _write(self, record: journal.AnyRecord) -> journal.Place:
        if self._sealed:
            raise CaptureError(f"session {self.session_id} is sealed")
        return self._journal.append(record)


class OpenCall:
    """A model call whose intent is in the journal and whose answer is not there yet."""

    def __init__(
        self,
        capture: SessionCapture,
        completion_id: str,
        index: int,
        branch: Branch,
        chain: dict[str, str],
        policy_version: str | None,
    ) -> None:
        attachment = branch.attachment
        self.completion_id = completion_id
        self.previous: Node | None = None if attachment is None else attachment.previous
        """The earlier call whose answer this request continues, under an identical head."""
        self.attached: AttachLevel | None = None if attachment is None else attachment.level
        self.ambiguous = attachment is not None and attachment.ambiguous
        self.continued_tokens = None if attachment is None else attachment.continued_tokens
        """How many of the previous call's sampled tokens are continued; None: all of them."""
        self.previous_messages = 0 if attachment is None else attachment.messages
        """How many leading messages of the request are those of the previous call and its answer."""
        self.backend = ""
        """The name of the backend that is asked; to be set by who asks, before the call ends."""
        self.policy_version = policy_version
        """That of the first sampled token; to be set by who asks, where it is not the session's."""
        self.versions: list[VersionSpan] = []
        """Of what was sampled so far, as of a completion; to be set by who asks."""
        self.delivered_tokens = 0
        """How many of the sampled tokens were written while the harness was there."""
        self._capture = capture
        self._index = index
        self._branch = branch
        self._chain = chain
        self.canonical_length: int | None = None
        """How many ids the engine's own rendering of the prompt has, where that is not the prompt;
        to be set by who has it rendered."""
        self._mode: Mode = "messages"
        self._notes: list[str] = []
        self._findings: list[str] = []
        self._tensors: list[TensorRef] = []
        self._told: Sequence[TurnEvent] = ()
        self._told_events = 0
        self._generation: Generation | None = None
        self._sampling: dict[str, Any] = {}
        self._tokens = Tokens(branch.parent)

    @property
    def is_open(self) -> bool:
        """False once it was closed, failed, or cut by the session's seal."""
        return self.completion_id in self._capture._calls

    @property
    def counts_as_delivered(self) -> bool:
        """Whether it is recorded, and nothing says that the answer did not reach the harness."""
        node = self._capture._forest.find(self.completion_id)
        return node is not None and node.delivered

    @property
    def after(self) -> TokenNode | None:
        """The earlier call that this one probably continues."""
        return self._branch.parent

    def composed(
        self, mode: Mode, *, notes: Sequence[str] = (), findings: Sequence[str] = ()
    ) -> None:
        """How the engine is asked for it, and what is to be said of that; recorded at its end."""
        self._mode = mode
        self._notes += notes
        self._findings += findings

    def rendered(self, answer: Ids) -> None:
        """Journal the engine's own rendering of the answer that is continued, once."""
        previous = self.previous
        if previous is None or previous.answer_rendered:
            return
        shared = common_start(previous.sampled_ids, answer)
        self._capture._write(
            journal.Rendered(
                completion_id=previous.completion_id,
                shared=shared,
                tail=journal.pack(answer[shared:]),
            )
        )
        previous.answer_rendered = True

    def heard(self, tokens: int, told: Sequence[TurnEvent], events: int) -> None:
        """The harness was there while the first events of what is told of the answer were written,
        which are made of that many tokens; to be recorded where the rest does not get through."""
        if tokens >= self.delivered_tokens:
            self.delivered_tokens = tokens
            self._told, self._told_events = told, events

    def follow(self, generation: Generation, sampling: dict[str, Any]) -> None:
        """The answer comes in pieces; what there is of it counts, however the call ends."""
        self._generation = generation
        self._sampling = sampling

    def append(self) -> None:
        """Journal what the followed generation has sampled since the last append; durable when
        this returns, see also `durable`."""
        if self._generation is None:
            return
        ids, logprobs = self._generation.sampled_so_far()
        if not ids:
            return
        record = journal.Appended(
            completion_id=self.completion_id,
            sampled=journal.pack(ids),
            logprobs=journal.pack(logprobs),
            policy_version=self.policy_version,
            versions=self.versions,
        )
        if not self._tokens.appended:
            prompt = self._generation.prompt_ids
            if prompt is not None:
                self._tokens.begin(prompt)
            record.shared, record.tail = self._tokens.shared, journal.pack(self._tokens.tail)
            record.sampling = _json(self._sampling)
            record.mode, record.backend = self._mode, self.backend
        self._capture._write(record)
        self._tokens.add(ids, logprobs)

    async def keep(self, sent: Sequence[Tensor]) -> None:
        """Write what the engine sent beside the tokens to files, for the completion to refer to."""
        if sent:
            capture = self._capture
            self._tensors = await anyio.to_thread.run_sync(
                lambda: tensors.store(
                    capture.journal_path.parent, sent, sync=capture._syncer is not None
                )
            )

    def close(self, reply: EngineReply, sampling: dict[str, Any]) -> Node:
        """Journal the finished completion; durable when this returns, see also `durable`."""
        return self._end(self._completed(reply, sampling))

    async def durable(self) -> None:
        """Returns when what was recorded survives as much as the node is configured to let it."""
        capture = self._capture
        if capture._syncer is not None:
            await capture._syncer.flushed(capture._journal)

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
            del self._capture._calls[self.completion_id]
            self._capture._write(record)

    def undelivered(self) -> None:
        """Journal that the answer, once recorded, did not reach the harness whole.

        Does nothing once the session is sealed: what was built must stay true.
        """
        capture = self._capture
        if capture._sealed:
            return
        self._mark_undelivered(capture._forest.node(self.completion_id))
        capture._write_ending(
            journal.Undelivered(
                completion_id=self.completion_id, delivered_tokens=self.delivered_tokens
            )
        )

    def _mark_undelivered(self, node: Node) -> None:
        node.delivered, node.delivered_tokens = False, self.delivered_tokens
        node.part = restore.told(self._told[: self._told_events])

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

    def _end(self, record: journal.Completed) -> Node:
        capture = self._capture
        place = capture._write(record)
        del capture._calls[self.completion_id]
        capture.completion_count += 1
        node = Node(
            completion_id=self.completion_id,
            parent=self._branch.parent,
            shared=self._tokens.shared,
            tail=self._tokens.tail,
            sampled_ids=self._tokens.sampled,
            index=self._index,
            head=self._branch.head,
            place=place,
            mode=record.mode,
            canonical_length=self.canonical_length,
            findings=tuple(record.findings),
            chain=self._chain,
        )
        if not record.delivered:
            self._mark_undelivered(node)
        capture._forest.insert(self._branch, node, record.response_message)
        return node

    def _completed(self, reply: EngineReply, sampling: dict[str, Any]) -> journal.Completed:
        usage = reply.usage
        record = journal.Completed(
            completion_id=self.completion_id,
            response_message=reply.message,
            finish_reason=reply.finish_reason,
            stop_reason=reply.stop_reason,
            model_used=reply.model,
            sampling=_json(sampling),
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
            tensors=self._tensors,
            findings=[*self._findings, *reply.findings],
            notes=[*self._notes, *reply.notes],
            at=time.time(),
        )
        self._tokens.finish(reply, record)
        return record


def _chain(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[name] for name in CHAIN_HEADERS if name in headers}


def _asked(request: ModelRequest) -> dict[str, Any]:
    """What beside messages, tools and sampling the prompt and the distribution depend on."""
    asked = {
        "tool_choice": request.tool_choice,
        "response_format": request.response_format,
        "template_kwargs": request.template_kwargs,
    }
    return {name: value for name, value in asked.items() if value not in (None, {})}


def _json(value: Any) -> bytes:
    return compact_json(value).encode()
