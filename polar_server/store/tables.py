"""The tables. Times are wall clock, seconds since the epoch; documents are JSON bytes.

A task id may be run again after its task ended, so rows refer to a task's `run`; of several runs
of one id exactly one is not superseded.
"""

from sqlalchemy import (
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    text,
)

SCHEMA_VERSION = 1

metadata = MetaData()

schema_version = Table("schema_version", metadata, Column("version", Integer, primary_key=True))

tasks = Table(
    "tasks",
    metadata,
    Column("run", Integer, primary_key=True, autoincrement=True),
    Column("task_id", String(128), nullable=False),
    Column("superseded", Boolean, nullable=False, default=False),
    Column("status", String(16), nullable=False),
    Column("request", LargeBinary, nullable=False),
    # The TaskRequest in canonical form: equal bytes are equal tasks.
    Column("idempotency_key", Text),
    Column("needs", LargeBinary, nullable=False),
    Column("num_samples", Integer, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("harness", Text, nullable=False),
    Column("model", Text),
    Column("callback_url", Text),
    Column("last_placed", Integer, nullable=False, default=0),
    # A tick that grows with every placement: who was served last waits longest.
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
)
Index(
    "task_current",
    tasks.c.task_id,
    unique=True,
    sqlite_where=text("superseded = 0"),
    postgresql_where=text("NOT superseded"),
)

sessions = Table(
    "sessions",
    metadata,
    Column("session_id", String(128), primary_key=True),
    Column("run", ForeignKey("tasks.run"), nullable=False),
    Column("sample", Integer, nullable=False),
    Column("status", String(16), nullable=False),
    Column("cancelling", Boolean, nullable=False, default=False),
    Column("attempt_id", String(128)),
    # The newest attempt, also after it ended.
    Column("node_id", String(128)),
    Column("attempts", Integer, nullable=False, default=0),
    Column("failed_attempts", Integer, nullable=False, default=0),
    Column("avoid_node", String(128)),
    # Where the infrastructure failed it last.
    Column("outcome", String(16)),
    # COMPLETED, TIMEOUT or ERROR once ended.
    Column("result_key", Text),
    # None: no node reported the end; its result is made from this row.
    Column("reward", Float),
    Column("error", Text),
    Column("failure", LargeBinary),
    Column("verdict", LargeBinary),
    Column("completion_count", Integer, nullable=False, default=0),
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
    Column("ended_at", Float),
)
Index("session_of_run", sessions.c.run, sessions.c.sample)
Index(
    "session_queued",
    sessions.c.run,
    sessions.c.avoid_node,
    sqlite_where=text("status = 'queued'"),
    postgresql_where=text("status = 'queued'"),
)

attempts = Table(
    "attempts",
    metadata,
    Column("attempt_id", String(128), primary_key=True),
    Column("session_id", ForeignKey("sessions.session_id"), nullable=False),
    Column("node_id", ForeignKey("nodes.node_id"), nullable=False),
    Column("number", Integer, nullable=False),
    Column("status", String(16), nullable=False),
    Column("failure", LargeBinary),
    Column("created_at", Float, nullable=False),
    Column("cancel_told_at", Float),
    Column("ended_at", Float),
)
Index("attempt_of_session", attempts.c.session_id)
Index(
    "attempt_live",
    attempts.c.node_id,
    sqlite_where=text("ended_at IS NULL"),
    postgresql_where=text("ended_at IS NULL"),
)

nodes = Table(
    "nodes",
    metadata,
    Column("node_id", String(128), primary_key=True),
    Column("registration", LargeBinary, nullable=False),
    Column("metrics", LargeBinary, nullable=False),
    Column("draining", Boolean, nullable=False, default=False),
    Column("registered_at", Float, nullable=False),
    Column("last_heartbeat", Float, nullable=False),
    Column("refusals", Integer, nullable=False, default=0),
    # In a row; a dispatch that is taken clears them.
    Column("aside_until", Float, nullable=False, default=0.0),
    Column("last_placed", Integer, nullable=False, default=0),
)

outbox = Table(
    "outbox",
    metadata,
    Column("callback_id", String(64), primary_key=True),
    Column("run", ForeignKey("tasks.run"), nullable=False),
    Column("url", Text, nullable=False),
    Column("status", String(16), nullable=False),
    Column("tries", Integer, nullable=False, default=0),
    Column("next_at", Float, nullable=False),
    Column("last_error", Text),
    Column("created_at", Float, nullable=False),
    Column("ended_at", Float),
)
Index(
    "outbox_pending",
    outbox.c.next_at,
    sqlite_where=text("status = 'pending'"),
    postgresql_where=text("status = 'pending'"),
)
