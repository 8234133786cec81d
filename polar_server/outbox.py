"""The loop that tells trainers of tasks that have ended, until they acknowledge it.

A callback is a row, written in the transaction that ended its task. Its id is the same on every
try, so that a receiver can tell a repetition; 2xx is an acknowledgement and 410 a farewell.
Redirects are not followed: a body of trajectories goes where the task said and nowhere else.
"""

import logging
import random
import time
from collections.abc import AsyncIterator

import aiohttp
import anyio
import anyio.abc
import anyio.to_thread
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import iterate_in_threadpool

from polar_gateway.results import Part, ResultStore, splice, spliced_length
from polar_server import documents
from polar_server.loops import Loop
from polar_server.store.queries import Store
from polar_server.store.records import Callback

logger = logging.getLogger(__name__)

AT_ONCE = 16
LONGEST_PAUSE_SECONDS = 300.0
GONE = 410


def pause_seconds(tries: int, first: float) -> float:
    """The wait after that many failed tries: it doubles, up to LONGEST_PAUSE_SECONDS."""
    return min(LONGEST_PAUSE_SECONDS, first * 2.0 ** min(tries - 1, 32))


class Outbox(Loop):
    """Woken when a task may have ended."""

    def __init__(
        self,
        store: Store,
        results: ResultStore,
        http: aiohttp.ClientSession,
        *,
        timeout_seconds: float,
        retry_seconds: float,
        give_up_seconds: float,
    ) -> None:
        super().__init__()
        self._store = store
        self._results = results
        self._http = http
        self._timeout_seconds = timeout_seconds
        self._retry_seconds = retry_seconds
        self._give_up_seconds = give_up_seconds

    async def step(self, group: anyio.abc.TaskGroup) -> float | None:
        if len(self._busy) >= AT_ONCE:
            return None  # the next one to finish wakes the loop
        now = time.time()
        for callback in await self._store.pending_callbacks(
            busy=self._busy, limit=AT_ONCE - len(self._busy)
        ):
            if callback.next_at > now:
                return callback.next_at
            self.start(group, callback.callback_id, self._deliver, callback)
        return None  # what else there is, is seen when one of these is done

    async def _deliver(self, callback: Callback) -> bool:
        await self._try(callback)
        return True

    async def _try(self, callback: Callback) -> None:
        try:
            problem, gone = await self._post(callback)
        except SQLAlchemyError:
            raise  # the loop tries again; it says nothing about the receiver
        except Exception as error:
            logger.exception("callback %s cannot be made", callback.callback_id)
            problem, gone = f"{type(error).__name__}: {error}", False
        now = time.time()
        if problem is None:
            await self._store.callback_delivered(callback.callback_id, now)
            return
        tries = callback.tries + 1
        extra = {"callback_id": callback.callback_id, "run": callback.run}
        if gone or now - callback.created_at >= self._give_up_seconds:
            logger.error("callback to %s given up: %s", callback.url, problem, extra=extra)
            await self._store.callback_given_up(callback.callback_id, problem, now)
            return
        pause = pause_seconds(tries, self._retry_seconds) * random.uniform(0.8, 1.2)
        logger.warning("callback to %s failed: %s; again in %.1f s", callback.url, problem, pause, extra=extra)
        await self._store.callback_failed(callback.callback_id, problem, now + pause)

    async def _post(self, callback: Callback) -> tuple[str | None, bool]:
        """Deliver once; returns what went wrong, and whether the receiver wants no more of it."""
        task, sessions = await self._store.run(callback.run)
        parts = documents.task_result(task, sessions, self._results)
        try:
            length = await anyio.to_thread.run_sync(spliced_length, parts)
            # aiohttp's own read timeout begins after the body; a receiver may stop reading within it.
            with anyio.fail_after(self._timeout_seconds) as stall:
                async with self._http.post(
                    callback.url,
                    data=self._body(parts, stall),
                    headers={
                        "content-type": "application/json",
                        "content-length": str(length),
                        "webhook-id": callback.callback_id,
                        "webhook-timestamp": str(int(time.time())),
                    },
                    timeout=aiohttp.ClientTimeout(total=None),
                    allow_redirects=False,
                ) as response:
                    if 200 <= response.status < 300:
                        return None, False
                    return f"the receiver answered {response.status}", response.status == GONE
        except TimeoutError:
            return f"the receiver was silent for {self._timeout_seconds:g} s", False
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: no such host can be
            return str(error) or type(error).__name__, False

    async def _body(self, parts: list[Part], stall: anyio.CancelScope) -> AsyncIterator[bytes]:
        """The body in blocks; each that the receiver takes puts off the end of its patience."""
        async for block in iterate_in_threadpool(splice(parts)):
            yield block
            stall.deadline = anyio.current_time() + self._timeout_seconds
