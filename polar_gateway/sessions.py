"""The live sessions of a node and the keys that open them.

A harness proves who it is by its session's key alone. Keys are compared in constant time by their
digest, appear in no listing, and stop opening anything but a refusal once the session is sealed.
"""

import hashlib
import secrets
import time

import anyio

from polar_gateway.backends import Lease
from polar_gateway.capture.journal import CaptureError
from polar_gateway.capture.session import SessionCapture
from polar_gateway.errors import Failure
from polar_gateway.generations import Generations
from polar_gateway.lifecycle import Outcome, Stage, advance, wire_status
from polar_gateway.prompts import Prompter
from polar_gateway.protocol import Sampling, SessionResult, SessionTiming
from polar_gateway.stored_responses import StoredResponses


def new_key() -> str:
    """A session's secret: random, and not its id."""
    return "sk-polar-" + secrets.token_urlsafe(32)


class Session:
    """One live session: where it is, what it captured, how it ended."""

    def __init__(
        self,
        *,
        session_id: str,
        task_id: str | None,
        attempt_id: str,
        key: str,
        capture: SessionCapture,
        sampling: Sampling | None = None,
        prompter: Prompter | None = None,
        policy_version: str | None = None,
    ) -> None:
        self.session_id = session_id
        self.task_id = task_id
        self.attempt_id = attempt_id
        self.key = key
        self.capture = capture
        self.sampling = sampling
        self.prompter = prompter or Prompter()
        self.policy_version = policy_version
        """What the task says of weights that no trainer has named to the gateway."""
        self.lease: Lease | None = None
        """Of a backend, from the first model call until the seal."""
        self.stage = Stage.QUEUED
        self.outcome: Outcome | None = None
        self.sealed = False
        self.created_at = time.time()
        self.deadline_at: float | None = None
        """Wall clock at which the current stage is cut off."""
        self.engine_failure: Failure | None = None
        """Why the last model call failed; the next one that succeeds clears it."""
        self.refused: Failure | None = None
        """A request that had to be refused or a record that could not be kept: what fails the
        session, however its harness ends."""
        self.calls: set[anyio.CancelScope] = set()
        """The model calls in flight; cancelled by the seal."""
        self.generations = Generations()
        self.responses = StoredResponses()
        self.timing = SessionTiming()
        self.result: SessionResult | None = None

    def advance(self, stage: Stage) -> None:
        self.stage = advance(self.session_id, self.stage, stage)

    def seal(self) -> None:
        """From now on model calls are refused, and those in flight end. Never raises: a journal
        that cannot be written any more is noted as what failed the session."""
        self.sealed = True
        for call in self.calls:
            call.cancel()
        cut_off = [each.record.undelivered for each in self.generations.undelivered()]
        for end in (*cut_off, self.capture.seal):
            try:
                end()
            except CaptureError as error:
                self.refused = error.failure
        self.generations.close()
        if self.lease is not None:
            self.lease.release()

    @property
    def status(self) -> str:
        return wire_status(self.stage, self.outcome)


class Sessions:
    """All sessions of this node by id, and by the digest of their key."""

    def __init__(self) -> None:
        self._by_id: dict[str, Session] = {}
        self._by_key: dict[bytes, Session] = {}

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, session: Session) -> None:
        if session.session_id in self._by_id:
            raise KeyError(f"session {session.session_id} is live already")
        self._by_id[session.session_id] = session
        self._by_key[_digest(session.key)] = session

    def remove(self, session: Session) -> None:
        if self._by_id.get(session.session_id) is session:
            del self._by_id[session.session_id]
            self._by_key.pop(_digest(session.key), None)

    def get(self, session_id: str) -> Session | None:
        return self._by_id.get(session_id)

    def by_key(self, key: str) -> Session | None:
        """The session that this key opens; looked up by digest, so timing tells nothing of it."""
        return self._by_key.get(_digest(key))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
