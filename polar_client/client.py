"""The rollout server's routes as typed calls.

    async with RolloutClient("http://127.0.0.1:8080") as client:
        task = await client.submit(request)
        status = await client.wait(task.task_id)
        for result in session_results(status.results):
            ...

Whatever goes wrong is a `RolloutError`: the server's problem document as data, or, with `status`
None, a server that could not be reached.
"""

import os
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import quote

import anyio
import httpx2
import msgspec

from polar_gateway.protocol import GatewayNodeInfo, SessionResult
from polar_server.protocol import Problem, TaskRequest, TaskStatus, TaskSubmitted

DEFAULT_URL = "http://127.0.0.1:8080"
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
FIRST_POLL_SECONDS = 0.2
LONGEST_POLL_SECONDS = 5.0

Document = TypeVar("Document")


class RolloutError(Exception):
    """The server refused a request, broke, or could not be reached."""

    def __init__(
        self, message: str, *, status: int | None = None, field: str | None = None, detail: str = ""
    ) -> None:
        super().__init__(message)
        self.status = status
        """The HTTP status; None when there was no answer."""
        self.field = field
        """The path of what is wrong in the document, `agent.settings.effort`."""
        self.detail = detail

    @property
    def unreachable(self) -> bool:
        return self.status is None


class RolloutStatus(msgspec.Struct, kw_only=True):
    """The server at a glance."""

    tasks: dict[str, str] = {}
    """Task id to status."""
    pipeline: dict[str, Any] = {}
    nodes: list[GatewayNodeInfo] = []


class _NodeList(msgspec.Struct):
    nodes: list[GatewayNodeInfo] = []


class _RolloutStatusBody(msgspec.Struct):
    tasks: dict[str, str] = {}
    pipeline: dict[str, Any] = {}
    nodes: _NodeList = msgspec.field(default_factory=_NodeList)


class RolloutClient:
    """One server. The token is the argument, else POLAR_TOKEN, else what a token file holds: the
    argument's, else that of POLAR_TOKEN_FILE."""

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        token_file: Path | None = None,
        timeout: float = 30.0,
    ) -> None:
        self.url = (url or os.environ.get("POLAR_URL") or DEFAULT_URL).rstrip("/")
        secret = token or find_token(token_file)
        self._http = httpx2.AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {secret}"} if secret else {},
            timeout=httpx2.Timeout(timeout),
            # A proxy of the environment cannot reach this host's own loopback.
            trust_env=httpx2.URL(self.url).host not in LOOPBACK,
        )

    async def __aenter__(self) -> "RolloutClient":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def submit(
        self, task: TaskRequest | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> TaskSubmitted:
        """Submit a task: a TaskRequest, or the document as it would stand in a file."""
        return await self._call(
            "POST",
            "/rollout/task/submit",
            TaskSubmitted,
            content=msgspec.json.encode(task),
            headers={"idempotency-key": idempotency_key} if idempotency_key else {},
        )

    async def status(self, task_id: str, *, include: Iterable[str] = ("results",)) -> TaskStatus:
        """A task as it is now; leave "results" out of `include` to skip the trajectories."""
        return await self._call(
            "GET", _task_path(task_id), TaskStatus, params={"include": ",".join(include)}
        )

    async def watch(self, task_id: str, *, patience: float = 60.0) -> AsyncIterator[TaskStatus]:
        """Yield the task's status, without results, whenever it changes, until the task has ended.

        Polls quickly at first and every 5 s in the end. A server that cannot be reached is asked
        again for `patience` seconds, so that its restart does not end the wait.
        """
        pause = FIRST_POLL_SECONDS
        seen: TaskStatus | None = None
        lost_at: float | None = None
        while True:
            try:
                status = await self.status(task_id, include=())
            except RolloutError as error:
                lost_at = lost_at or anyio.current_time()
                broken = error.unreachable or error.status in (502, 503, 504)
                if not broken or anyio.current_time() - lost_at > patience:
                    raise
            else:
                lost_at = None
                if status != seen:
                    seen, pause = status, FIRST_POLL_SECONDS
                    yield status
                if status.status in ENDED:
                    return
            await anyio.sleep(pause)
            pause = min(pause * 1.5, LONGEST_POLL_SECONDS)

    async def wait(self, task_id: str) -> TaskStatus:
        """Poll until the task has ended; return its status with all results in sample order."""
        async for _ in self.watch(task_id):
            pass
        return await self.status(task_id)

    async def cancel(self, task_id: str) -> TaskStatus:
        """Cancel a task; what its sessions captured so far is still reported."""
        return await self._call("DELETE", _task_path(task_id), TaskStatus)

    async def nodes(self) -> list[GatewayNodeInfo]:
        return (await self._call("GET", "/nodes", _NodeList)).nodes

    async def rollout_status(self) -> RolloutStatus:
        body = await self._call("GET", "/rollout/status", _RolloutStatusBody)
        return RolloutStatus(tasks=body.tasks, pipeline=body.pipeline, nodes=body.nodes.nodes)

    async def _call(
        self, method: str, path: str, document: type[Document], **arguments: Any
    ) -> Document:
        try:
            response = await self._http.request(method, path, **arguments)
        except httpx2.TransportError as error:
            said = str(error) or type(error).__name__
            raise RolloutError(f"cannot reach {self.url}: {said}") from error
        if not response.is_success:
            raise _refused(f"{method} {path}", response)
        try:
            return msgspec.json.decode(response.content, type=document)
        except msgspec.MsgspecError as error:
            raise RolloutError(
                f"{self.url} answered {method} {path} with something that is not a"
                f" {document.__name__.strip('_')}: {error}",
                status=response.status_code,
            ) from error


ENDED = frozenset({"completed", "failed", "cancelled"})
"""The task statuses after which nothing changes."""


def session_results(results: Iterable[msgspec.Raw]) -> list[SessionResult]:
    """Decode the results of a TaskStatus or TaskResult, trajectories and all."""
    return [msgspec.json.decode(result, type=SessionResult) for result in results]


def _task_path(task_id: str) -> str:
    return f"/rollout/task/{quote(task_id, safe='')}"


def find_token(token_file: Path | None = None) -> str | None:
    """The token in `token_file`, else POLAR_TOKEN, else the one in the file that POLAR_TOKEN_FILE
    names. Raises RolloutError when a file that is named cannot be read."""
    if token_file is None:
        if token := os.environ.get("POLAR_TOKEN"):
            return token
        if not (named := os.environ.get("POLAR_TOKEN_FILE")):
            return None
        token_file = Path(named)
    try:
        return token_file.read_text().strip()
    except OSError as error:
        raise RolloutError(f"cannot read the token file {token_file}: {error.strerror}") from error


def _refused(what: str, response: httpx2.Response) -> RolloutError:
    try:
        problem = msgspec.json.decode(response.content, type=Problem)
    except msgspec.MsgspecError:  # not ours: a proxy in between, another service on the port
        return RolloutError(
            f"{what} was answered with {response.status_code} {response.reason_phrase}",
            status=response.status_code,
            detail=response.text[:2000],
        )
    said = problem.detail or problem.title
    if problem.field and problem.field not in said:
        said = f"{problem.field}: {said}"
    return RolloutError(
        said, status=response.status_code, field=problem.field, detail=problem.detail
    )
