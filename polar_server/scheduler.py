"""The loop that brings sessions to nodes and notices nodes that went."""

import logging
import time
from collections.abc import Callable

import anyio.abc
from sqlalchemy.exc import SQLAlchemyError

from polar_gateway.errors import Failure
from polar_server.dispatch import Dispatcher
from polar_server.loops import LONGEST_WAIT_SECONDS, Loop
from polar_server.nodes import Progress
from polar_server.store.queries import Store
from polar_server.store.records import Outgoing

logger = logging.getLogger(__name__)

SLEPT_SECONDS = 5.0


class Scheduler(Loop):
    """Woken by submissions, results, registrations, heartbeats and cancellations."""

    def __init__(
        self,
        store: Store,
        dispatcher: Dispatcher,
        progress: Progress,
        *,
        cancel_grace_seconds: float,
        sessions_may_have_ended: Callable[[], None],
    ) -> None:
        super().__init__()
        self._store = store
        self._dispatcher = dispatcher
        self._progress = progress
        self._cancel_grace_seconds = cancel_grace_seconds
        self._sessions_may_have_ended = sessions_may_have_ended
        self._stepped_at = self.listening_since = time.time()
        """Since when nodes could be heard; their silence before says nothing about them."""

    async def step(self, group: anyio.abc.TaskGroup) -> float | None:
        now = time.time()
        if now - self._stepped_at > LONGEST_WAIT_SECONDS + SLEPT_SECONDS:
            logger.warning("the server was stopped for %.0f s", now - self._stepped_at)
            self.listening_since = now
        self._stepped_at = now
        plan = await self._store.plan(
            self._progress,
            busy=self._busy,
            now=now,
            listening_since=self.listening_since,
            cancels_told_before=now - self._cancel_grace_seconds,
        )
        if plan.given_up:
            logger.warning("%d attempts were lost, or cancelled and never reported", plan.given_up)
            self._sessions_may_have_ended()
        for outgoing in plan.outgoing:
            self.start(group, outgoing.attempt_id, self._tell, outgoing)
        grace_ends = now + self._cancel_grace_seconds
        return grace_ends if plan.due_at is None else min(plan.due_at, grace_ends)

    async def _tell(self, outgoing: Outgoing) -> bool:
        try:
            taken = await self._dispatcher.tell(outgoing)
        except SQLAlchemyError:
            raise  # the loop tries again; it says nothing about the session
        except Exception as error:
            logger.exception("attempt %s cannot be told to its node", outgoing.attempt_id)
            failure = Failure(
                boundary="delivery",
                message=f"the session could not be dispatched: {type(error).__name__}: {error}",
                infra=True,
            )
            await self._store.unfit(outgoing.attempt_id, failure, time.time())
            taken = False
        if not taken:
            self._sessions_may_have_ended()
        return not taken
