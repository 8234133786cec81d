"""Every question that the server asks its database, one method each, one transaction a decision."""

import uuid
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable
from enum import Enum, auto
from typing import Any, TypeVar, get_args

import msgspec
from sqlalchemy import Row, Select, and_, bindparam, case, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from polar_gateway.errors import Failure
from polar_gateway.protocol import (
    Finding,
    FindingLevel,
    NodeRegistrationRequest,
    NodeStageMetrics,
    RewardVerdict,
    TokenVerdict,
    Verdict,
)
from polar_server import lifecycle, nodes, placement
from polar_server.errors import RefusalError, conflict
from polar_server.lifecycle import (
    LIVE_TASK,
    AttemptState,
    CallbackState,
    Report,
    Ruling,
    SessionState,
    TaskState,
)
from polar_server.nodes import Progress
from polar_server.store import tables
from polar_server.store.engine import Database
from polar_server.store.records import (
    Callback,
    Outgoing,
    Plan,
    ReportedResult,
    Session,
    Task,
    TaskSummary,
)
from polar_server.tasks import CheckedTask

DocumentT = TypeVar("DocumentT")

CANCELLED = Failure(boundary="cancelled", message="session cancelled")
UNEXPLAINED = Failure(boundary="delivery", message="the session ended without a report")


class Taken(Enum):
    """What became of a reported result."""

    TAKEN = auto()
    REQUEUED = auto()
    IGNORED = auto()
    UNKNOWN = auto()
    """No session of this server has that id."""


class Store:
    """The server's hard state."""

    def __init__(self, database: Database, *, max_attempts: int) -> None:
        self._database = database
        self._max_attempts = max_attempts

    # Tasks

    async def submit(
        self, task: CheckedTask, *, idempotency_key: str | None, now: float
    ) -> TaskState:
        """Record a task and its sessions, unless it is recorded already; returns its state.

        A finished id starts a new run, which replaces the record, unless the finished one came with
        the same idempotency key.

        Raises RefusalError: 409 while another task of that id is live, 422 for an idempotency key
        that came with another body.
        """
        request = task.request
        async with self._database.write() as connection:
            current = await _one(
                connection,
                select(
                    tables.tasks.c.run,
                    tables.tasks.c.status,
                    tables.tasks.c.request,
                    tables.tasks.c.idempotency_key,
                ).where(_is_current(request.task_id)),
            )
            if current is not None:
                same = current.request == task.canonical
                if (state := TaskState(current.status)) in LIVE_TASK:
                    if not same or state is TaskState.CANCELLING:
                        raise conflict(_already_live(request.task_id, state))
                    return state
                if idempotency_key is not None and idempotency_key == current.idempotency_key:
                    if not same:
                        raise _key_reused(request.task_id)
                    return state
                await connection.execute(
                    update(tables.tasks).where(tables.tasks.c.run == current.run).values(superseded=True)
                )
            inserted = await connection.execute(
                insert(tables.tasks).values(
                    task_id=request.task_id,
                    superseded=False,
                    status=TaskState.RUNNING,
                    request=task.canonical,
                    idempotency_key=idempotency_key,
                    needs=msgspec.json.encode(task.needs),
                    num_samples=request.num_samples,
                    priority=request.dispatch_priority,
                    harness=task.needs.harness,
                    model=request.agent.model_name,
                    callback_url=request.callback_url,
                    created_at=now,
                    updated_at=now,
                )
            )
            assert inserted.inserted_primary_key is not None
            run = inserted.inserted_primary_key.run
            await connection.execute(
                insert(tables.sessions),
                [
                    {
                        "session_id": f"ses-{uuid.uuid4().hex}",
                        "run": run,
                        "sample": sample,
                        "status": SessionState.QUEUED,
                        "created_at": now,
                        "updated_at": now,
                    }
                    for sample in range(request.num_samples)
                ],
            )
        return TaskState.RUNNING

    async def cancel_task(self, task_id: str, now: float) -> bool:
        """End the queued sessions and mark the live ones; False when there is no such task."""
        async with self._database.write() as connection:
            task = await _one(
                connection, _tasks().where(_is_current(task_id)).with_for_update()
            )
            if task is None:
                return False
            if TaskState(task.status) is not TaskState.RUNNING:
                return True
            await connection.execute(
                update(tables.tasks)
                .where(tables.tasks.c.run == task.run)
                .values(
                    status=lifecycle.advance_task(task_id, TaskState.RUNNING, TaskState.CANCELLING),
                    updated_at=now,
                )
            )
            of_run = tables.sessions.c.run == task.run
            await connection.execute(
                update(tables.sessions)
                .where(of_run, tables.sessions.c.status == SessionState.QUEUED)
                .values(**_ended_by_us(CANCELLED, now), cancelling=True)
            )
            await connection.execute(
                update(tables.sessions)
                .where(of_run, tables.sessions.c.status == SessionState.PLACED)
                .values(cancelling=True, updated_at=now)
            )
            await _close_if_done(connection, task.run, now)
        return True

    async def task(self, task_id: str) -> tuple[Task, list[Session]] | None:
        """The current run of a task id and its sessions in sample order."""
        async with self._database.read() as connection:
            row = await _one(connection, _tasks().where(_is_current(task_id)))
            if row is None:
                return None
            return _task(row), await _sessions(connection, row.run)

    async def run(self, run: int) -> tuple[Task, list[Session]]:
        """One run, also a superseded one, and its sessions in sample order."""
        async with self._database.read() as connection:
            row = (await connection.execute(_tasks().where(tables.tasks.c.run == run))).one()
            return _task(row), await _sessions(connection, run)

    async def task_states(self) -> dict[str, str]:
        async with self._database.read() as connection:
            rows = await connection.execute(
                select(tables.tasks.c.task_id, tables.tasks.c.status)
                .where(tables.tasks.c.superseded.is_(False))
                .order_by(tables.tasks.c.run)
            )
            return {row.task_id: row.status for row in rows}

    async def queued_sessions(self) -> int:
        async with self._database.read() as connection:
            count = await connection.scalar(
                select(func.count())
                .select_from(tables.sessions)
                .where(tables.sessions.c.status == SessionState.QUEUED)
            )
            return count or 0

    async def task_list(
        self, *, status: str | None, harness: str | None, since: float | None, limit: int
    ) -> list[TaskSummary]:
        """The newest tasks first."""
        sessions = tables.sessions.c
        query = (
            select(
                tables.tasks.c.task_id,
                tables.tasks.c.status,
                tables.tasks.c.harness,
                tables.tasks.c.model,
                tables.tasks.c.num_samples,
                tables.tasks.c.created_at,
                tables.tasks.c.updated_at,
                func.count(sessions.outcome).label("completed_sessions"),
                func.count(case((sessions.outcome == "ERROR", 1))).label("errored_sessions"),
                func.avg(sessions.reward).label("mean_reward"),
                func.avg(case((sessions.outcome.is_not(None), sessions.completion_count))).label(
                    "mean_completions"
                ),
            )
            .join(tables.sessions, sessions.run == tables.tasks.c.run)
            .where(tables.tasks.c.superseded.is_(False))
            .group_by(tables.tasks.c.run)
            .order_by(tables.tasks.c.run.desc())
            .limit(limit)
        )
        if status is not None:
            query = query.where(tables.tasks.c.status == status)
        if harness is not None:
            query = query.where(tables.tasks.c.harness == harness)
        if since is not None:
            query = query.where(tables.tasks.c.created_at >= since)
        async with self._database.read() as connection:
            return [TaskSummary(**row._mapping) for row in await connection.execute(query)]

    # Nodes

    async def register(self, registration: NodeRegistrationRequest, now: float) -> nodes.Node:
        """Record a node, anew or again; whatever was held against it is forgotten."""
        values = {
            "registration": msgspec.json.encode(registration),
            "metrics": msgspec.json.encode(NodeStageMetrics()),
            "draining": False,
            "registered_at": now,
            "last_heartbeat": now,
            "refusals": 0,
            "aside_until": 0.0,
        }
        async with self._database.write() as connection:
            known = tables.nodes.c.node_id == registration.node_id
            changed = await connection.execute(update(tables.nodes).where(known).values(**values))
            if not changed.rowcount:
                await connection.execute(
                    insert(tables.nodes).values(node_id=registration.node_id, **values)
                )
            return (await _nodes(connection))[registration.node_id]

    async def heartbeat(
        self, node_id: str, metrics: NodeStageMetrics, attempt_ids: Iterable[str], now: float
    ) -> tuple[nodes.Node, list[str]] | None:
        """Renew a node's lease; returns it and those of the attempts it reports that are no longer
        current. None for an unknown node.

        An attempt that was given up while the node has it is current again unless its session went
        elsewhere.
        """
        reported = sorted({attempt_id for attempt_id in attempt_ids if attempt_id})
        async with self._database.write() as connection:
            changed = await connection.execute(
                update(tables.nodes)
                .where(tables.nodes.c.node_id == node_id)
                .values(last_heartbeat=now, metrics=msgspec.json.encode(metrics))
            )
            if not changed.rowcount:
                return None
            await _readopt(connection, node_id, reported, now)
            current = await connection.scalars(
                select(tables.attempts.c.attempt_id).where(
                    tables.attempts.c.attempt_id.in_(reported), tables.attempts.c.ended_at.is_(None)
                )
            )
            stale = sorted(set(reported) - set(current))
            return (await _nodes(connection))[node_id], stale

    async def drain(self, node_id: str) -> nodes.Node | None:
        """Give the node no more sessions until it registers again; None for an unknown node."""
        async with self._database.write() as connection:
            changed = await connection.execute(
                update(tables.nodes).where(tables.nodes.c.node_id == node_id).values(draining=True)
            )
            return (await _nodes(connection))[node_id] if changed.rowcount else None

    async def nodes(self) -> dict[str, nodes.Node]:
        async with self._database.read() as connection:
            return await _nodes(connection)

    # Attempts

    async def plan(
        self,
        progress: Progress,
        *,
        busy: Collection[str],
        now: float,
        listening_since: float,
        cancels_told_before: float,
    ) -> Plan:
        """Take the scheduler's decisions in one step.

        Attempts that will not be heard of again are ended: those that are lost to their node or with
        it, and those cancelled and never reported. Free places are filled; each placement is an attempt, recorded
        before its node hears of it. Returns what nodes are to be told, but for attempts whose node
        is being told (`busy`).
        """
        async with self._database.write() as connection:
            live = await _live_attempts(connection)
            known = await _nodes(connection, live)
            silences = progress.silences(live, now)
            lost = nodes.lost_attempts(live, known, silences, now, listening_since)
            for attempt, why in lost:
                failure = Failure(boundary="lost_node", message=why, infra=True)
                await self._fail(connection, attempt.attempt_id, AttemptState.LOST, failure, now)
            gone = {attempt.attempt_id for attempt, _ in lost}
            overdue = [
                attempt
                for attempt in live
                if attempt.cancel_told_at is not None
                and attempt.cancel_told_at <= cancels_told_before
                and attempt.attempt_id not in gone
            ]
            for attempt in overdue:
                await _cancelled(connection, attempt.attempt_id, now)
            slots = [
                placement.NodeSlots(
                    node_id=node.node_id,
                    free=nodes.free_places(node, now),
                    last_placed=node.last_placed,
                    offers=node.registration.offers,
                )
                for node in known.values()
                if nodes.healthy(node, now, listening_since) and not node.draining
            ]
            if any(slot.free for slot in slots):
                placements = placement.place(await _lanes(connection), slots)
                if placements:
                    await _record(connection, placements, now)
            return Plan(
                outgoing=await _outgoing(connection, busy),
                given_up=len(lost) + len(overdue),
                due_at=nodes.next_due(known.values(), now, listening_since),
            )

    async def accepted(self, attempt_id: str) -> bool:
        """The node took the attempt, unless it ended meanwhile; True when it was cancelled, so that
        the node is to be told more."""
        async with self._database.write() as connection:
            changed = await connection.execute(
                update(tables.attempts)
                .where(
                    tables.attempts.c.attempt_id == attempt_id,
                    tables.attempts.c.status == AttemptState.DISPATCHING,
                )
                .values(status=AttemptState.ACCEPTED)
                .returning(tables.attempts.c.node_id)
            )
            if (row := changed.one_or_none()) is not None:
                await connection.execute(
                    update(tables.nodes)
                    .where(tables.nodes.c.node_id == row.node_id, tables.nodes.c.refusals > 0)
                    .values(refusals=0, aside_until=0.0)
                )
            cancelling: bool | None = await connection.scalar(
                select(tables.sessions.c.cancelling).where(
                    tables.sessions.c.attempt_id == attempt_id,
                    tables.sessions.c.status == SessionState.PLACED,
                )
            )
            return bool(cancelling)

    async def refused(self, attempt_id: str, failure: Failure, now: float) -> None:
        """The node takes no sessions now: it is set aside, and the session waits again.

        That costs the session none of its attempts.
        """
        async with self._database.write() as connection:
            row = await _end_attempt(connection, attempt_id, AttemptState.REFUSED, failure, now)
            if row is None:
                return
            created_at = await connection.scalar(
                select(tables.attempts.c.created_at).where(tables.attempts.c.attempt_id == attempt_id)
            )
            # A node that registered anew since is not what refused.
            same = and_(
                tables.nodes.c.node_id == row.node_id, tables.nodes.c.registered_at <= created_at
            )
            refusals = await connection.scalar(
                update(tables.nodes)
                .where(same)
                .values(refusals=tables.nodes.c.refusals + 1)
                .returning(tables.nodes.c.refusals)
            )
            if refusals is not None:
                await connection.execute(
                    update(tables.nodes)
                    .where(same)
                    .values(aside_until=now + nodes.aside_seconds(refusals))
                )
            if row.cancelling:
                await _end_session(connection, row, _ended_by_us(_why_cancelled(row), now), now)
            else:
                await _requeue(connection, row, now)

    async def unfit(self, attempt_id: str, failure: Failure, now: float) -> None:
        """The node cannot run this session, or lost it: that costs an attempt."""
        async with self._database.write() as connection:
            await self._fail(connection, attempt_id, AttemptState.FAILED, failure, now)

    async def cancel_told(self, attempt_id: str, *, known: bool, now: float) -> None:
        """The node heard of the cancellation; one that does not know the session has ended it."""
        async with self._database.write() as connection:
            if known:
                await connection.execute(
                    update(tables.attempts)
                    .where(tables.attempts.c.attempt_id == attempt_id)
                    .values(cancel_told_at=now)
                )
            else:
                await _cancelled(connection, attempt_id, now)

    async def take_result(
        self,
        result: ReportedResult,
        publish: Callable[[str], Awaitable[str]],
        now: float,
    ) -> Taken:
        """Decide whether a reported result counts and, if so, end its session with it.

        `publish` is given the task's id, makes the staged bytes visible and returns their key; it
        runs inside the transaction, so that bytes of an attempt that lost never replace others. A
        crash between the two leaves bytes without a row, which the node's next try overwrites.
        """
        async with self._database.write() as connection:
            row = await _one(
                connection,
                select(
                    tables.sessions,
                    tables.tasks.c.task_id,
                    tables.tasks.c.status.label("task_status"),
                    tables.tasks.c.request,
                    tables.attempts.c.status.label("attempt_status"),
                )
                .join(tables.tasks, tables.tasks.c.run == tables.sessions.c.run)
                .outerjoin(
                    tables.attempts, tables.attempts.c.attempt_id == tables.sessions.c.attempt_id
                )
                .where(tables.sessions.c.session_id == result.session_id)
                .with_for_update(of=tables.sessions),
            )
            if row is None:
                return Taken.UNKNOWN
            failure, error = _reported_failure(result), result.error
            ruling = lifecycle.rule(
                Report(
                    attempt_id=result.attempt_id,
                    infra=failure is not None and failure.infra,
                    cancelled=failure is not None and failure.boundary == "cancelled",
                    ended_well=result.status != "ERROR",
                    session=SessionState(row.status),
                    current_attempt_id=row.attempt_id,
                    attempt=AttemptState(row.attempt_status) if row.attempt_status else None,
                    reported_by_node=row.result_key is not None,
                    cancelling=row.cancelling,
                    task=TaskState(row.task_status),
                    failed_attempts=row.failed_attempts,
                    max_attempts=self._max_attempts,
                )
            )
            if ruling is Ruling.IGNORE:
                return Taken.IGNORED
            if ruling is Ruling.TRY_AGAIN:
                assert failure is not None
                await self._fail(connection, row.attempt_id, AttemptState.FAILED, failure, now)
                return Taken.REQUEUED
            if ruling is Ruling.CANCEL:
                await _end_attempt(connection, row.attempt_id, AttemptState.CANCELLED, CANCELLED, now)
                await _end_session(connection, row, _ended_by_us(_why_cancelled(row), now), now)
                return Taken.IGNORED
            if row.cancelling and row.failure is not None:  # it says why, and the node does not know
                failure = _why_cancelled(row)
                error = failure.message
            verdict = _reported_verdict(result)
            values = {
                "outcome": result.status,
                "result_key": await publish(row.task_id),
                "reward": result.reward,
                "error": error,
                "failure": _encoded(failure),
                "verdict": _encoded(verdict),
                "completion_count": result.completion_count,
                "ended_at": now,
            }
            await _end_attempt(connection, row.attempt_id, AttemptState.REPORTED, failure, now)
            if _usable(result.status, verdict):
                await _stop_early(connection, row, now)
            await _end_session(connection, row, values, now)
            return Taken.TAKEN

    async def _fail(
        self,
        connection: AsyncConnection,
        attempt_id: str,
        state: AttemptState,
        failure: Failure,
        now: float,
    ) -> None:
        """The infrastructure failed an attempt: its session is tried again, elsewhere if possible,
        or ends if no attempt is left or it was cancelled."""
        row = await _end_attempt(connection, attempt_id, state, failure, now)
        if row is None:
            return
        failed = row.failed_attempts + 1
        await connection.execute(
            update(tables.sessions)
            .where(tables.sessions.c.session_id == row.session_id)
            .values(failed_attempts=failed, avoid_node=row.node_id)
        )
        if row.cancelling:
            await _end_session(connection, row, _ended_by_us(_why_cancelled(row), now), now)
        elif failed >= self._max_attempts:
            await _end_session(connection, row, _ended_by_us(failure, now), now)
        else:
            await _requeue(connection, row, now)

    # Callbacks

    async def pending_callbacks(self, *, busy: Collection[str], limit: int) -> list[Callback]:
        """The next deliveries, due or not, but for those that are being tried (`busy`)."""
        columns = tables.outbox.c
        async with self._database.read() as connection:
            rows = await connection.execute(
                select(
                    columns.callback_id,
                    columns.run,
                    columns.url,
                    columns.tries,
                    columns.next_at,
                    columns.created_at,
                )
                .where(
                    columns.status == CallbackState.PENDING, columns.callback_id.not_in(busy)
                )
                .order_by(columns.next_at)
                .limit(limit)
            )
            return [Callback(**row._mapping) for row in rows]

    async def callback_delivered(self, callback_id: str, now: float) -> None:
        await self._callback(
            callback_id,
            status=CallbackState.DELIVERED,
            tries=tables.outbox.c.tries + 1,
            last_error=None,
            ended_at=now,
        )

    async def callback_failed(self, callback_id: str, error: str, next_at: float) -> None:
        await self._callback(
            callback_id, tries=tables.outbox.c.tries + 1, last_error=error, next_at=next_at
        )

    async def callback_given_up(self, callback_id: str, error: str, now: float) -> None:
        await self._callback(
            callback_id,
            status=CallbackState.DEAD,
            tries=tables.outbox.c.tries + 1,
            last_error=error,
            ended_at=now,
        )

    async def _callback(self, callback_id: str, **values: Any) -> None:
        async with self._database.write() as connection:
            await connection.execute(
                update(tables.outbox)
                .where(tables.outbox.c.callback_id == callback_id)
                .values(**values)
            )


# Parts of transactions


async def _one(connection: AsyncConnection, query: Select[Any]) -> Row[Any] | None:
    row: Row[Any] | None = (await connection.execute(query)).one_or_none()
    return row


def _is_current(task_id: str) -> Any:
    return and_(tables.tasks.c.task_id == task_id, tables.tasks.c.superseded.is_(False))


def _tasks() -> Select[Any]:
    columns = tables.tasks.c
    return select(
        columns.run,
        columns.task_id,
        columns.status,
        columns.request,
        columns.created_at,
        columns.updated_at,
    )


def _task(row: Row[Any]) -> Task:
    return Task(**{**row._mapping, "status": TaskState(row.status)})


async def _sessions(connection: AsyncConnection, run: int) -> list[Session]:
    columns = tables.sessions.c
    rows = await connection.execute(
        select(
            columns.session_id,
            columns.sample,
            columns.status,
            columns.cancelling,
            columns.attempt_id,
            columns.node_id,
            columns.outcome,
            columns.result_key,
            columns.reward,
            columns.error,
            columns.failure,
            columns.verdict,
            columns.completion_count,
            columns.ended_at,
        )
        .where(columns.run == run)
        .order_by(columns.sample)
    )
    return [
        Session(
            **{
                **row._mapping,
                "status": SessionState(row.status),
                "failure": _decoded(row.failure, Failure),
                "verdict": _decoded(row.verdict, Verdict),
            }
        )
        for row in rows
    ]


async def _nodes(
    connection: AsyncConnection, attempts: Iterable[nodes.LiveAttempt] | None = None
) -> dict[str, nodes.Node]:
    """All nodes; `attempts` are all live ones, where they were read already."""
    live: Counter[str] = Counter()
    dispatching: Counter[str] = Counter()
    for attempt in await _live_attempts(connection) if attempts is None else attempts:
        live[attempt.node_id] += 1
        dispatching[attempt.node_id] += attempt.dispatching
    rows = await connection.execute(select(tables.nodes).order_by(tables.nodes.c.node_id))
    return {
        row.node_id: nodes.Node(
            registration=msgspec.json.decode(row.registration, type=NodeRegistrationRequest),
            metrics=msgspec.json.decode(row.metrics, type=NodeStageMetrics),
            draining=row.draining,
            registered_at=row.registered_at,
            last_heartbeat=row.last_heartbeat,
            refusals=row.refusals,
            aside_until=row.aside_until,
            last_placed=row.last_placed,
            live_attempts=live[row.node_id],
            dispatching=dispatching[row.node_id],
        )
        for row in rows
    }


async def _lanes(connection: AsyncConnection) -> list[placement.Lane]:
    tasks, sessions = tables.tasks.c, tables.sessions.c
    queued = (
        select(sessions.run, sessions.avoid_node, func.count().label("queued"))
        .where(sessions.status == SessionState.QUEUED)
        .group_by(sessions.run, sessions.avoid_node)
        .subquery()
    )
    rows = await connection.execute(
        select(
            tasks.run,
            tasks.priority,
            tasks.last_placed,
            tasks.needs,
            queued.c.avoid_node,
            queued.c.queued,
        ).join(queued, queued.c.run == tasks.run)
    )
    return [
        placement.Lane(
            **{**row._mapping, "needs": msgspec.json.decode(row.needs, type=placement.Needs)}
        )
        for row in rows
    ]


async def _record(
    connection: AsyncConnection, placements: list[placement.Placement], now: float
) -> None:
    """Turn placements, which name tasks, into attempts of those tasks' next queued sessions."""
    tick: int = await connection.scalar(select(func.max(tables.tasks.c.last_placed))) or 0
    sessions = tables.sessions.c
    by_lane: dict[tuple[int, str | None], list[str]] = defaultdict(list)
    served: dict[int, int] = {}
    used: dict[str, int] = {}
    for number, chosen in enumerate(placements, start=tick + 1):
        by_lane[chosen.run, chosen.avoid_node].append(chosen.node_id)
        served[chosen.run] = used[chosen.node_id] = number
    attempts: list[dict[str, Any]] = []
    for (run, avoid_node), node_ids in by_lane.items():
        rows = await connection.execute(
            select(sessions.session_id, sessions.attempts)
            .where(
                sessions.run == run,
                sessions.status == SessionState.QUEUED,
                sessions.avoid_node.is_not_distinct_from(avoid_node),
            )
            .order_by(sessions.sample)
            .limit(len(node_ids))
        )
        for row, node_id in zip(rows.all(), node_ids, strict=True):
            attempts.append(
                {
                    "attempt_id": f"att-{uuid.uuid4().hex}",
                    "session_id": row.session_id,
                    "node_id": node_id,
                    "number": row.attempts + 1,
                    "status": AttemptState.DISPATCHING,
                    "created_at": now,
                }
            )
    await connection.execute(insert(tables.attempts), attempts)
    placed = lifecycle.advance_session("of a placement", SessionState.QUEUED, SessionState.PLACED)
    await connection.execute(
        update(tables.sessions)
        .where(sessions.session_id == bindparam("of_session"))
        .values(
            status=placed,
            attempt_id=bindparam("to_attempt"),
            node_id=bindparam("to_node"),
            attempts=sessions.attempts + 1,
            updated_at=now,
        ),
        [
            {
                "of_session": attempt["session_id"],
                "to_attempt": attempt["attempt_id"],
                "to_node": attempt["node_id"],
            }
            for attempt in attempts
        ],
    )
    for table, key, ticks in (
        (tables.tasks, tables.tasks.c.run, served),
        (tables.nodes, tables.nodes.c.node_id, used),
    ):
        await connection.execute(
            update(table).where(key == bindparam("of")).values(last_placed=bindparam("tick")),
            [{"of": of, "tick": number} for of, number in ticks.items()],
        )


async def _live_attempts(connection: AsyncConnection) -> list[nodes.LiveAttempt]:
    columns = tables.attempts.c
    rows = await connection.execute(
        select(
            columns.attempt_id,
            columns.session_id,
            columns.node_id,
            columns.created_at,
            columns.cancel_told_at,
            (columns.status == AttemptState.DISPATCHING).label("dispatching"),
        ).where(columns.ended_at.is_(None))
    )
    return [nodes.LiveAttempt(**row._mapping) for row in rows]


async def _outgoing(connection: AsyncConnection, busy: Collection[str]) -> list[Outgoing]:
    attempts, sessions = tables.attempts.c, tables.sessions.c
    to_dispatch = attempts.status == AttemptState.DISPATCHING
    to_cancel = and_(sessions.cancelling.is_(True), attempts.cancel_told_at.is_(None))
    rows = await connection.execute(
        select(
            attempts.attempt_id,
            attempts.session_id,
            attempts.node_id,
            attempts.status,
            tables.nodes.c.registration,
            tables.tasks.c.request,
        )
        .join(tables.sessions, sessions.session_id == attempts.session_id)
        .join(tables.tasks, tables.tasks.c.run == sessions.run)
        .join(tables.nodes, tables.nodes.c.node_id == attempts.node_id)
        .where(
            attempts.ended_at.is_(None),
            to_dispatch | to_cancel,
            attempts.attempt_id.not_in(busy),
        )
        .order_by(attempts.created_at)
    )
    return [
        Outgoing(
            attempt_id=row.attempt_id,
            session_id=row.session_id,
            node_id=row.node_id,
            status=AttemptState(row.status),
            gateway_url=msgspec.json.decode(
                row.registration, type=NodeRegistrationRequest
            ).gateway_url.rstrip("/"),
            request=row.request,
        )
        for row in rows
    ]


async def _end_attempt(
    connection: AsyncConnection,
    attempt_id: str,
    state: AttemptState,
    failure: Failure | None,
    now: float,
) -> Row[Any] | None:
    """End an attempt; returns its session's row, or None if it had ended or is not current."""
    changed = await connection.execute(
        update(tables.attempts)
        .where(tables.attempts.c.attempt_id == attempt_id, tables.attempts.c.ended_at.is_(None))
        .values(
            status=state, failure=_encoded(failure), ended_at=now
        )
    )
    if not changed.rowcount:
        return None
    return await _one(
        connection,
        select(tables.sessions)
        .where(
            tables.sessions.c.attempt_id == attempt_id,
            tables.sessions.c.status == SessionState.PLACED,
        )
        .with_for_update(),
    )


async def _cancelled(connection: AsyncConnection, attempt_id: str, now: float) -> None:
    row = await _end_attempt(connection, attempt_id, AttemptState.CANCELLED, CANCELLED, now)
    if row is not None:
        await _end_session(connection, row, _ended_by_us(_why_cancelled(row), now), now)


async def _requeue(connection: AsyncConnection, row: Row[Any], now: float) -> None:
    queued = lifecycle.advance_session(
        row.session_id, SessionState(row.status), SessionState.QUEUED
    )
    await connection.execute(
        update(tables.sessions)
        .where(tables.sessions.c.session_id == row.session_id)
        .values(status=queued, updated_at=now)
    )


def _ended_by_us(failure: Failure, now: float) -> dict[str, Any]:
    """What the row of a session says whose end no node reported."""
    return {
        "status": SessionState.ENDED,
        "outcome": "ERROR",
        "error": failure.message,
        "failure": msgspec.json.encode(failure),
        "ended_at": now,
        "updated_at": now,
    }


async def _end_session(
    connection: AsyncConnection, row: Row[Any], values: dict[str, Any], now: float
) -> None:
    ended = lifecycle.advance_session(row.session_id, SessionState(row.status), SessionState.ENDED)
    await connection.execute(
        update(tables.sessions)
        .where(tables.sessions.c.session_id == row.session_id)
        .values(**{**values, "status": ended, "updated_at": now})
    )
    await _close_if_done(connection, row.run, now)


async def _close_if_done(connection: AsyncConnection, run: int, now: float) -> None:
    """End a task whose sessions have all ended, and put its callback in the outbox."""
    task = (
        await connection.execute(
            select(tables.tasks.c.task_id, tables.tasks.c.status, tables.tasks.c.callback_url)
            .where(tables.tasks.c.run == run)
            .with_for_update()
        )
    ).one()
    unended = await connection.scalar(
        select(func.count())
        .select_from(tables.sessions)
        .where(tables.sessions.c.run == run, tables.sessions.c.status != SessionState.ENDED)
    )
    if unended:
        await connection.execute(
            update(tables.tasks).where(tables.tasks.c.run == run).values(updated_at=now)
        )
        return
    state = TaskState(task.status)
    await connection.execute(
        update(tables.tasks)
        .where(tables.tasks.c.run == run)
        .values(
            status=lifecycle.advance_task(task.task_id, state, lifecycle.closed(state)),
            updated_at=now,
        )
    )
    if task.callback_url:
        await connection.execute(
            insert(tables.outbox).values(
                callback_id=f"msg_{uuid.uuid4().hex}",
                run=run,
                url=task.callback_url,
                status=CallbackState.PENDING,
                next_at=now,
                created_at=now,
            )
        )


async def _readopt(
    connection: AsyncConnection, node_id: str, attempt_ids: Collection[str], now: float
) -> None:
    """Give a node back the sessions that still wait since these attempts of them were given up."""
    rows = await connection.execute(
        select(tables.sessions, tables.attempts.c.status.label("attempt_status"))
        .join(tables.attempts, tables.attempts.c.attempt_id == tables.sessions.c.attempt_id)
        .where(
            tables.attempts.c.attempt_id.in_(attempt_ids),
            tables.attempts.c.node_id == node_id,
            tables.attempts.c.status.in_(lifecycle.GIVEN_UP_ATTEMPT),
            tables.sessions.c.status == SessionState.QUEUED,
        )
        .with_for_update(of=tables.sessions)
    )
    for row in rows.all():
        placed = lifecycle.advance_session(
            row.session_id, SessionState(row.status), SessionState.PLACED
        )
        not_lost_after_all = row.attempt_status == AttemptState.LOST
        await connection.execute(
            update(tables.attempts)
            .where(tables.attempts.c.attempt_id == row.attempt_id)
            .values(status=AttemptState.ACCEPTED, failure=None, ended_at=None)
        )
        await connection.execute(
            update(tables.sessions)
            .where(tables.sessions.c.session_id == row.session_id)
            .values(
                status=placed,
                failed_attempts=row.failed_attempts - not_lost_after_all,
                updated_at=now,
            )
        )


class _EarlyStop(msgspec.Struct):
    """What early stopping reads of a TaskRequest."""

    early_stop_min_usable_sessions: int | None = None


def _usable(status: str, verdict: Verdict | None) -> bool:
    """Whether a session counts towards early_stop_min_usable_sessions."""
    return (
        status == "COMPLETED"
        and verdict is not None
        and verdict.reward == "graded"
        and verdict.tokens != "none"
    )


async def _stop_early(connection: AsyncConnection, row: Row[Any], now: float) -> None:
    """Cancel the other sessions of a task if, with this usable one, it has as many as it asked for."""
    wanted = msgspec.json.decode(row.request, type=_EarlyStop).early_stop_min_usable_sessions
    if wanted is None:
        return
    sessions = tables.sessions.c
    others = and_(sessions.run == row.run, sessions.session_id != row.session_id)
    ended = await connection.execute(
        select(sessions.outcome, sessions.verdict).where(others, sessions.status == SessionState.ENDED)
    )
    if 1 + sum(_usable(one.outcome, _decoded(one.verdict, Verdict)) for one in ended) < wanted:
        return
    why = Failure(
        boundary="cancelled",
        message=f"session cancelled: {wanted} usable sessions of its task are enough",
    )
    await connection.execute(
        update(tables.sessions)
        .where(others, sessions.status == SessionState.QUEUED)
        .values(**_ended_by_us(why, now), cancelling=True)
    )
    await connection.execute(
        update(tables.sessions)
        .where(others, sessions.status == SessionState.PLACED, sessions.cancelling.is_(False))
        .values(failure=_encoded(why), cancelling=True, updated_at=now)
    )


def _why_cancelled(row: Row[Any]) -> Failure:
    """What ends a session that is being cancelled: its row may say why."""
    return _decoded(row.failure, Failure) or CANCELLED


def _encoded(document: msgspec.Struct | None) -> bytes | None:
    return None if document is None else msgspec.json.encode(document)


def _decoded(column: bytes | None, document: type[DocumentT]) -> DocumentT | None:
    return None if column is None else msgspec.json.decode(column, type=document)


def _reported_failure(result: ReportedResult) -> Failure | None:
    """The failure as reported; a boundary that this version does not know is kept as the text."""
    if result.failure is None:
        return None
    try:
        return msgspec.convert(msgspec.to_builtins(result.failure), Failure)
    except msgspec.ValidationError:
        said = f"{result.failure.boundary}: {result.failure.message}"
        return Failure(boundary="harness", message=said, infra=result.failure.infra)


def _reported_verdict(result: ReportedResult) -> Verdict | None:
    """The verdict as reported; what this version does not know counts as the worse."""
    said = result.verdict
    if said is None:
        return None
    return Verdict(
        reward=_known(said.reward, RewardVerdict, "ungraded"),
        tokens=_known(said.tokens, TokenVerdict, "none"),
        findings=[
            Finding(
                code=finding.code,
                level=_known(finding.level, FindingLevel, "warning"),
                message=finding.message,
                count=finding.count,
                numbers=finding.numbers,
            )
            for finding in said.findings
        ],
    )


def _known(value: str, names: Any, otherwise: str) -> Any:
    """The value if it is one of the names that a Literal lists."""
    return value if value in get_args(names) else otherwise


def _already_live(task_id: str, state: TaskState) -> str:
    if state is TaskState.CANCELLING:
        return f"task {task_id} is being cancelled"
    return f"task {task_id} is running with another body"


def _key_reused(task_id: str) -> RefusalError:
    return RefusalError(
        422,
        "Idempotency key reused",
        f"the Idempotency-Key of task {task_id} was used with another body",
        field="task_id",
    )
