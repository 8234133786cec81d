"""A real server on loopback, and the world around it: nodes and a trainer, each with its moods."""

import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx2
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polar_gateway.protocol import NodeOffers, NodeRegistrationRequest, SessionDispatchRequest
from polar_gateway.testing.serve import serve as serve_app
from polar_server.app import ServerAddress, serve
from polar_server.config import RetryConfig, RolloutConfig


def task(task_id: str = "fix-it", **fields: Any) -> dict[str, Any]:
    return {
        "task_id": task_id,
        "instruction": "Make the test pass.",
        "agent": {"harness": "codex"},
        **fields,
    }


def result(dispatch: SessionDispatchRequest, **fields: Any) -> dict[str, Any]:
    """A SessionResult as a node reports it."""
    return {
        "session_id": dispatch.session_id,
        "task_id": dispatch.task_id,
        "attempt_id": dispatch.attempt_id,
        "status": "COMPLETED",
        "reward": 1.0,
        "completion_count": 3,
        "metadata": dispatch.metadata,
        "verdict": {"reward": "graded", "tokens": "all"},
        "trajectory": {"status": "COMPLETED", "traces": [{"prompt_ids": [1], "response_ids": [2], "loss_mask": [1]}]},
        **fields,
    }


def infra_failure(dispatch: SessionDispatchRequest) -> dict[str, Any]:
    failure = {"boundary": "runtime", "message": "no image", "infra": True}
    return result(
        dispatch, status="ERROR", reward=None, error="no image", failure=failure, trajectory=None
    )


class Polar:
    """The server under test, as an authenticated caller sees it."""

    def __init__(self, address: ServerAddress) -> None:
        self.url = address.url
        self.token = address.token_file.read_text().strip()
        self.http = httpx2.AsyncClient(
            base_url=address.url, headers={"authorization": f"Bearer {self.token}"}, timeout=20
        )

    async def submit(self, document: dict[str, Any], **headers: str) -> httpx2.Response:
        return await self.http.post("/rollout/task/submit", json=document, headers=headers)

    async def status(self, task_id: str = "fix-it", query: str = "") -> dict[str, Any]:
        response = await self.http.get(f"/rollout/task/{task_id}{query}")
        assert response.status_code == 200, response.text
        document: dict[str, Any] = response.json()
        return document

    async def report(self, document: dict[str, Any]) -> httpx2.Response:
        return await self.http.post("/callbacks/session_result", json=document)

    async def ended(self, task_id: str = "fix-it") -> dict[str, Any]:
        """The task's status once it has ended."""
        with anyio.fail_after(15):
            while True:
                status = await self.status(task_id)
                if status["status"] in ("completed", "cancelled"):
                    return status
                await anyio.sleep(0.01)


async def until(said: Callable[[], object]) -> None:
    """Wait until `said` is true."""
    with anyio.fail_after(15):
        while not said():
            await anyio.sleep(0.01)


async def rewrite(folder: Path, statement: str, *values: object) -> None:
    """Change what the server on `folder` recorded."""

    def execute() -> None:
        with closing(sqlite3.connect(folder / "polar.db", timeout=10)) as database:
            database.execute(statement, values)
            database.commit()

    await anyio.to_thread.run_sync(execute)  # the server, in this thread, may have to finish first


def config(folder: Path, **fields: Any) -> RolloutConfig:
    fields = {
        "port": 0,
        "data_dir": folder,
        "callback_retry_seconds": 0.02,
        "dispatch_timeout_seconds": 2.0,
        **fields,
    }
    if isinstance(fields.get("retry"), int):
        fields["retry"] = RetryConfig(max_attempts=fields["retry"])
    return RolloutConfig(**fields)


@asynccontextmanager
async def polar(folder: Path, **fields: Any) -> AsyncIterator[Polar]:
    """A running server on `folder`; started again on the same folder it knows what it knew."""
    async with anyio.create_task_group() as group:

        async def run(*, task_status: anyio.abc.TaskStatus[ServerAddress]) -> None:
            await serve(config(folder, **fields), started=task_status.started)

        server = Polar(await group.start(run))
        async with server.http:
            yield server
        group.cancel_scope.cancel()


class FakeNode:
    """A node that takes every session, and reports it when the test says so."""

    places = 8
    offers = NodeOffers()

    def __init__(self, server: Polar, node_id: str) -> None:
        self.server = server
        self.node_id = node_id
        self.url = ""
        self.calls = 0
        self.taken: list[SessionDispatchRequest] = []
        self.cancelled: list[str] = []
        self.tokens: set[str] = set()
        self.app = Starlette(
            routes=[
                Route("/sessions", self._sessions, methods=["POST"]),
                Route("/sessions/{session_id}", self._delete, methods=["DELETE"]),
            ]
        )

    async def _sessions(self, request: Request) -> Response:
        self.calls += 1
        self.tokens.add(request.headers["authorization"])
        return await self.answer(msgspec.json.decode(await request.body(), type=SessionDispatchRequest))

    async def _delete(self, request: Request) -> Response:
        session_id = request.path_params["session_id"]
        self.cancelled.append(session_id)
        return await self.answer_cancel(session_id)

    async def answer(self, dispatch: SessionDispatchRequest) -> Response:
        self.taken.append(dispatch)
        return JSONResponse({"session_id": dispatch.session_id, "status": "REGISTERED"})

    async def answer_cancel(self, session_id: str) -> Response:
        return JSONResponse({"session_id": session_id, "deleted": True, "messages_deleted": 0})

    async def register(self, heartbeat_interval_seconds: float = 30.0) -> dict[str, Any]:
        registration = NodeRegistrationRequest(
            node_id=self.node_id,
            gateway_url=self.url,
            max_ready_sessions=self.places - 2,
            max_run_workers=1,
            max_postrun_workers=1,
            heartbeat_interval_seconds=heartbeat_interval_seconds,
            offers=self.offers,
        )
        response = await self.server.http.post(
            "/nodes/register", content=msgspec.json.encode(registration)
        )
        assert response.status_code == 200, response.text
        document: dict[str, Any] = response.json()
        return document

    async def beat(self, *sessions: dict[str, Any]) -> httpx2.Response:
        return await self.server.http.post(
            f"/nodes/{self.node_id}/heartbeat", json={"sessions": list(sessions)}
        )

    async def has(self, count: int) -> list[SessionDispatchRequest]:
        """What this node was given, once that is `count` sessions."""
        await until(lambda: len(self.taken) >= count)
        assert len(self.taken) == count
        return self.taken


class NodeThatRefuses(FakeNode):
    """Has a full disk, say."""

    async def answer(self, dispatch: SessionDispatchRequest) -> Response:
        return JSONResponse({"detail": "disk full"}, status_code=503)


class NodeThatFindsItUnfit(FakeNode):
    """Can never run such a session."""

    async def answer(self, dispatch: SessionDispatchRequest) -> Response:
        return JSONResponse({"detail": "no such harness here"}, status_code=422)


class NodeThatTimesOutOnce(FakeNode):
    """Takes the session and loses its answer; then knows the attempt when it is asked again."""

    async def answer(self, dispatch: SessionDispatchRequest) -> Response:
        if self.calls == 1:
            self.taken.append(dispatch)
            await anyio.sleep(5)
        assert [dispatch.attempt_id] == [known.attempt_id for known in self.taken]
        return JSONResponse({"attempt_id": dispatch.attempt_id, "detail": "live"}, status_code=409)


class NodeThatNeverAnswers(FakeNode):
    async def answer(self, dispatch: SessionDispatchRequest) -> Response:
        await anyio.sleep(60)
        raise AssertionError("nobody waits a minute")


class NodeThatReports(FakeNode):
    """Runs every session in no time."""

    async def answer(self, dispatch: SessionDispatchRequest) -> Response:
        answer = await super().answer(dispatch)
        assert (await self.server.report(result(dispatch))).json() == {"status": "accepted"}
        return answer


class NodeThatForgot(FakeNode):
    """Does not know the sessions that it is told to cancel."""

    async def answer_cancel(self, session_id: str) -> Response:
        return JSONResponse({"detail": "no such session here"}, status_code=404)


class NodeThatIsSlowToCancel(FakeNode):
    """Breaks when it is told to cancel for the first time."""

    async def answer_cancel(self, session_id: str) -> Response:
        if len(self.cancelled) == 1:
            return JSONResponse({"detail": "try again"}, status_code=500)
        return await super().answer_cancel(session_id)


@asynccontextmanager
async def node(
    server: Polar,
    node_id: str = "node-a",
    kind: type[FakeNode] = FakeNode,
    **settings: Any,
) -> AsyncIterator[FakeNode]:
    """A registered node; `settings` override `places`, `offers` and the heartbeat interval."""
    heartbeat = settings.pop("heartbeat_interval_seconds", 30.0)
    made = kind(server, node_id)
    for name, value in settings.items():
        setattr(made, name, value)
    async with serve_app(made.app) as made.url:
        await made.register(heartbeat)
        yield made


class Trainer:
    """A callback receiver that fails as often as it is told to."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        """Of the answers to come; what is beyond them is answered 200."""
        self.url = ""
        self.ids: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.app = Starlette(routes=[Route("/{path:path}", self._take, methods=["POST", "GET"])])

    async def _take(self, request: Request) -> Response:
        self.ids.append(request.headers["webhook-id"])
        body = await request.body()
        assert len(body) == int(request.headers["content-length"])
        status = self.statuses.pop(0) if self.statuses else 200
        if status == 200:
            self.bodies.append(msgspec.json.decode(body))
        return Response(status_code=status, headers={"location": "/elsewhere"})


@asynccontextmanager
async def trainer(*statuses: int) -> AsyncIterator[Trainer]:
    """A receiver that answers `statuses` first and 200 from then on."""
    made = Trainer(*statuses)
    async with serve_app(made.app) as url:
        made.url = f"{url}/callback/task_result"
        yield made
