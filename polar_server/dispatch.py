"""One attempt on its way to its node, and a cancellation after it.

A dispatch whose answer never came may have been taken. So it is repeated to the same node with the
same attempt id, which the node takes once, before the session goes anywhere else.
"""

import logging
import time
from enum import Enum, auto

import aiohttp
import anyio
import msgspec

from polar_gateway.errors import Failure
from polar_server import tasks
from polar_server.lifecycle import AttemptState
from polar_server.protocol import TaskRequest
from polar_server.store.queries import Store
from polar_server.store.records import Outgoing

logger = logging.getLogger(__name__)

REPEAT_SECONDS = (0.2, 1.0)
"""Pauses before the repetitions of a dispatch that was not answered."""
CANCEL_RETRY_SECONDS = 1.0
SAID_BYTES = 2000
UNREACHABLE = (aiohttp.ClientError, TimeoutError, OSError, ValueError)
"""What a call to a node raises; ValueError when its URL names no host that can be."""


class Answer(Enum):
    """What a node's answer to a dispatch means."""

    TAKEN = auto()
    SET_ASIDE = auto()
    """The node takes no sessions now."""
    UNFIT = auto()
    """The node cannot run this session and never will."""


class _Refusal(msgspec.Struct):
    attempt_id: str = ""
    detail: str = ""


def judge(status: int, body: bytes, attempt_id: str) -> Answer:
    """Read a node's answer; 409 naming the same attempt is a yes that was said before."""
    if 200 <= status < 300:
        return Answer.TAKEN
    if status == 409 and _said(body).attempt_id == attempt_id:
        return Answer.TAKEN
    return Answer.UNFIT if status in (400, 413, 422) else Answer.SET_ASIDE


def _said(body: bytes) -> _Refusal:
    try:
        return msgspec.json.decode(body, type=_Refusal)
    except msgspec.MsgspecError:
        return _Refusal(detail=body[:SAID_BYTES].decode(errors="replace"))


class Dispatcher:
    """Tells nodes of attempts and records what they said."""

    def __init__(
        self,
        store: Store,
        http: aiohttp.ClientSession,
        *,
        token: str,
        callback_url: str,
        timeout_seconds: float,
    ) -> None:
        self._store = store
        self._http = http
        self._headers = {"authorization": f"Bearer {token}"}
        self._callback_url = callback_url
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)

    async def tell(self, outgoing: Outgoing) -> bool:
        """Bring the attempt, or its cancellation, to its node; True when nothing is left to do but to
        wait for the node's report."""
        if outgoing.status is AttemptState.DISPATCHING:
            return await self._dispatch(outgoing)
        return await self._cancel(outgoing)

    async def _dispatch(self, outgoing: Outgoing) -> bool:
        document = msgspec.json.encode(
            tasks.dispatch_request(
                msgspec.json.decode(outgoing.request, type=TaskRequest),
                session_id=outgoing.session_id,
                attempt_id=outgoing.attempt_id,
                callback_url=self._callback_url,
            )
        )
        status, body = await self._send(outgoing, document)
        answer = Answer.SET_ASIDE if status is None else judge(status, body, outgoing.attempt_id)
        now = time.time()
        if answer is Answer.TAKEN:
            cancelled_meanwhile = await self._store.accepted(outgoing.attempt_id)
            return not cancelled_meanwhile
        said = _said(body).detail if status is not None else body.decode()
        failure = Failure(
            boundary="delivery",
            message=f"node {outgoing.node_id} did not take the session: {status or 'no answer'}",
            infra=True,
            detail=said,
        )
        logger.warning(
            "attempt %s of session %s: %s: %s",
            outgoing.attempt_id,
            outgoing.session_id,
            failure.message,
            said,
        )
        if answer is Answer.UNFIT:
            await self._store.unfit(outgoing.attempt_id, failure, now)
        else:
            await self._store.refused(outgoing.attempt_id, failure, now)
        return False

    async def _send(self, outgoing: Outgoing, document: bytes) -> tuple[int | None, bytes]:
        """Status and body of the node's answer; None and the reason when there never was one."""
        pauses = iter(REPEAT_SECONDS)
        while True:
            try:
                async with self._http.post(
                    f"{outgoing.gateway_url}/sessions",
                    data=document,
                    headers={**self._headers, "content-type": "application/json"},
                    timeout=self._timeout,
                    allow_redirects=False,
                ) as response:
                    return response.status, await response.content.read(SAID_BYTES)
            except UNREACHABLE as error:
                reason = str(error) or type(error).__name__
            if (pause := next(pauses, None)) is None:
                return None, reason.encode()
            await anyio.sleep(pause)

    async def _cancel(self, outgoing: Outgoing) -> bool:
        status = None
        try:
            async with self._http.delete(
                f"{outgoing.gateway_url}/sessions/{outgoing.session_id}",
                headers=self._headers,
                timeout=self._timeout,
                allow_redirects=False,
            ) as response:
                status = response.status
            reason = f"it answered {status}"
        except UNREACHABLE as error:
            reason = str(error) or type(error).__name__
        if status == 404 or (status is not None and 200 <= status < 300):
            known = status != 404
            await self._store.cancel_told(outgoing.attempt_id, known=known, now=time.time())
            return known
        logger.warning(
            "node %s does not cancel session %s yet: %s", outgoing.node_id, outgoing.session_id, reason
        )
        await anyio.sleep(CANCEL_RETRY_SECONDS)
        return False
