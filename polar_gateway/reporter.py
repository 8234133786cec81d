"""What a node tells the server: that it lives, and how its sessions ended.

Results wait in files until the server has acknowledged them, so neither a crash of the node nor an
absent server loses one. Both loops are level-triggered: they act on what is there and wait for a
wake-up or a period, whichever comes first.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.to_thread
import httpx2
import msgspec

from polar_gateway.protocol import (
    GatewayNodeInfo,
    NodeHeartbeatRequest,
    NodeRegistrationRequest,
    SessionDispatchRequest,
    SessionResult,
)

logger = logging.getLogger(__name__)

RETRY_SECONDS = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Waits between tries of a delivery; the last one repeats."""


REFUSED_FOR_GOOD = frozenset({400, 413, 422})
"""Answers that the same bytes will get again."""


class Envelope(msgspec.Struct, kw_only=True):
    """An undelivered result: where it goes, and its bytes as they will be sent."""

    callback_url: str
    session_id: str
    body: msgspec.Raw


class Outbox:
    """Undelivered results, one file each, named after the attempt."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._waiting = dict(map(_named, folder.glob("*.json")))
        self._wake = anyio.Event()
        self._delivered = anyio.Event()

    @property
    def waiting(self) -> dict[str, str]:
        """Attempt id to session id of what is not acknowledged yet. The server must hear of these:
        an attempt that its node does not name is lost to it."""
        return self._waiting

    async def put(self, dispatch: SessionDispatchRequest, result: SessionResult) -> None:
        """Returns when the result survives a crash of this process and of the machine."""
        if dispatch.callback_url is None:
            return
        name = dispatch.attempt_id or dispatch.session_id
        await anyio.to_thread.run_sync(self._write, name, result, dispatch.callback_url)
        self._waiting[name] = result.session_id
        self._wake.set()

    def _write(self, name: str, result: SessionResult, url: str) -> None:
        envelope = Envelope(
            callback_url=url,
            session_id=result.session_id,
            body=msgspec.Raw(msgspec.json.encode(result)),
        )
        part = self._folder / f".{name}.part"
        with part.open("wb") as file:
            file.write(msgspec.json.encode(envelope))
            file.flush()
            os.fsync(file.fileno())
        part.rename(self._folder / f"{name}.json")

    async def deliver(self, client: httpx2.AsyncClient) -> None:
        """Send what lies here, oldest first, for ever; a refusal of one does not hold up the rest."""
        tries: dict[str, int] = {}
        while True:
            self._wake = anyio.Event()
            waiting = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
            for path in waiting:
                if await self._deliver(client, path):
                    path.unlink(missing_ok=True)
                    self._waiting.pop(path.stem, None)
                    self._delivered.set()
                    self._delivered = anyio.Event()
                    tries.pop(path.name, None)
                else:
                    tries[path.name] = tries.get(path.name, 0) + 1
            left = min((tries[name] for name in tries), default=0)
            pause = RETRY_SECONDS[min(left, len(RETRY_SECONDS)) - 1] if left else 3600.0
            with anyio.move_on_after(pause):
                await self._wake.wait()

    async def _deliver(self, client: httpx2.AsyncClient, path: Path) -> bool:
        """Whether nothing remains to be done about this file."""
        try:
            envelope = msgspec.json.decode(await anyio.Path(path).read_bytes(), type=Envelope)
        except msgspec.DecodeError as error:
            return _put_aside(path, f"it is damaged: {error}")
        try:
            response = await client.post(
                envelope.callback_url,
                content=bytes(envelope.body),
                headers={"content-type": "application/json"},
            )
        except (httpx2.InvalidURL, httpx2.UnsupportedProtocol, ValueError) as error:
            return _put_aside(path, f"{envelope.callback_url!r} cannot be called: {error}")
        except httpx2.HTTPError as error:
            logger.warning("result of %s not delivered yet: %s", envelope.session_id, error)
            return False
        if response.is_success:
            return True
        said = f"{response.status_code} {response.text[:500]}"
        if response.status_code in REFUSED_FOR_GOOD:
            return _put_aside(path, f"the server refuses it: {said}")
        logger.warning("result of %s not accepted yet: %s", envelope.session_id, said)
        return False

    async def drained(self) -> None:
        """Wait until nothing is left to deliver."""
        while next(self._folder.glob("*.json"), None) is not None:
            await self._delivered.wait()


def _named(path: Path) -> tuple[str, str]:
    """Attempt and session of a waiting result; a damaged one, soon put aside, names no session."""
    try:
        return path.stem, msgspec.json.decode(path.read_bytes(), type=Envelope).session_id
    except msgspec.DecodeError:
        return path.stem, ""


def _put_aside(path: Path, why: str) -> bool:
    """Keep what can never be delivered where people find it and no loop does."""
    kept = path.with_suffix(".undeliverable")
    path.rename(kept)
    logger.error("the result in %s is not delivered: %s", kept, why)
    return True


async def keep_registered(
    client: httpx2.AsyncClient,
    server_url: str,
    registration: NodeRegistrationRequest,
    heartbeat: Callable[[], NodeHeartbeatRequest],
    on_stale: Callable[[list[str]], None],
    wake: Callable[[], anyio.Event],
) -> None:
    """Register, then beat for ever; register anew whenever the server does not know this node.

    A beat is sent at each period, and at once when the event that `wake` returns is set.
    """
    registered = False
    period = registration.heartbeat_interval_seconds
    while True:
        event = wake()
        try:
            if registered:
                response = await client.post(
                    f"{server_url}/nodes/{registration.node_id}/heartbeat",
                    content=msgspec.json.encode(heartbeat()),
                )
            else:
                response = await client.post(
                    f"{server_url}/nodes/register", content=msgspec.json.encode(registration)
                )
            if response.is_success:
                registered = True
                on_stale(msgspec.json.decode(response.content, type=GatewayNodeInfo).stale_attempts)
            else:
                if response.status_code != 404 or not registered:
                    logger.warning(
                        "the server refuses this node: %d %s",
                        response.status_code,
                        response.text[:500],
                    )
                registered = False
        except (httpx2.HTTPError, httpx2.InvalidURL, msgspec.DecodeError) as error:
            logger.warning("the server at %s cannot be reached: %s", server_url, error)
        with anyio.move_on_after(period if registered else min(period, 1.0)):
            await event.wait()
