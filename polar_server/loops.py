"""The shape of every loop here: act on what the store says, then wait to be woken or until due.

A loop holds no queue. So a restart, a lost wake-up and a repeated one are the same case, and
whatever fails, a database for a moment or our own code for one item, costs that step or item a pause
and never the others.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import anyio.abc

T = TypeVar("T")

logger = logging.getLogger(__name__)

LONGEST_WAIT_SECONDS = 30.0
TROUBLE_SECONDS = 1.0


class Loop(ABC):
    """Runs `step` until cancelled."""

    def __init__(self) -> None:
        self._wake = anyio.Event()
        self._busy: set[str] = set()
        self._finished: set[str] = set()
        """What was finished since the step began: the step's view of it may be from before."""

    def wake(self) -> None:
        """Something happened that the next step should see."""
        self._wake.set()

    async def run(self) -> None:
        async with anyio.create_task_group() as group:
            while True:
                self._wake = anyio.Event()
                self._finished.clear()
                try:
                    due_at = await self.step(group)
                except Exception:
                    logger.exception("%s: a step failed; trying again", type(self).__name__)
                    due_at = time.time() + TROUBLE_SECONDS
                wait = LONGEST_WAIT_SECONDS
                if due_at is not None:
                    wait = min(wait, max(0.0, due_at - time.time()))
                with anyio.move_on_after(wait):
                    await self._wake.wait()

    @abstractmethod
    async def step(self, group: anyio.abc.TaskGroup) -> float | None:
        """Act once; return the wall clock at which there is more to do, None if nothing is due.

        What takes long is handed to `start`.
        """

    def start(
        self, group: anyio.abc.TaskGroup, name: str, work: Callable[[T], Awaitable[bool]], what: T
    ) -> None:
        """Do `work` in the group unless `name` is being done, or was finished after the step began.

        `work` returns whether the loop is to look again.
        """
        if name not in self._busy and name not in self._finished:
            self._busy.add(name)
            group.start_soon(self._once, name, work, what, name=name)

    async def _once(self, name: str, work: Callable[[T], Awaitable[bool]], what: T) -> None:
        look_again = True
        try:
            look_again = await work(what)
        except Exception:
            logger.exception("%s: %s failed; trying again", type(self).__name__, name)
            await anyio.sleep(TROUBLE_SECONDS)
        finally:
            self._busy.discard(name)
            self._finished.add(name)
            if look_again:
                self.wake()
