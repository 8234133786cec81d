"""A database by URL: its connections, its transactions, its schema."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import anyio
from sqlalchemy import event, insert, make_url, select
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from polar_server.store import tables

BUSY_SECONDS = 30.0


class SchemaError(Exception):
    """The database was made by another version of the server."""


class Database:
    """Transactions on one database; each is shielded, so that stopping never leaves half of one."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._writer = engine.execution_options(polar_writes=True)
        # SQLite has one writer at a time, and who finds it busy polls; here they wait in order.
        self._turn = anyio.Lock() if engine.dialect.name == "sqlite" else nullcontext()

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """One decision: everything inside happens or nothing does."""
        with anyio.CancelScope(shield=True):
            async with self._turn, self._writer.begin() as connection:
                yield connection

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """One consistent view."""
        with anyio.CancelScope(shield=True):
            async with self._engine.connect() as connection:
                yield connection


@asynccontextmanager
async def open_database(url: str) -> AsyncIterator[Database]:
    """Open the database and make its tables where there are none. Raises SchemaError."""
    parsed = make_url(url)
    sqlite = parsed.get_backend_name() == "sqlite"
    if sqlite and parsed.database:
        Path(parsed.database).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    engine = create_async_engine(parsed, pool_size=8, max_overflow=0, pool_timeout=BUSY_SECONDS)
    if sqlite:
        event.listen(engine.sync_engine, "connect", _prepare_sqlite)
        event.listen(engine.sync_engine, "begin", _begin_sqlite)
    try:
        database = Database(engine)
        async with database.write() as connection:
            await connection.run_sync(tables.metadata.create_all)
            version = await connection.scalar(select(tables.schema_version.c.version))
            if version is None:
                await connection.execute(
                    insert(tables.schema_version).values(version=tables.SCHEMA_VERSION)
                )
            elif version != tables.SCHEMA_VERSION:
                raise SchemaError(
                    f"the database {parsed.render_as_string()} has schema version {version};"
                    f" this server reads version {tables.SCHEMA_VERSION}"
                )
        yield database
    finally:
        with anyio.CancelScope(shield=True):
            await engine.dispose()


def _prepare_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # `_begin_sqlite` begins; the driver must not
    cursor = connection.cursor()
    for pragma in (
        "journal_mode = WAL",
        "synchronous = FULL",  # a node forgets what was acknowledged, so a commit must be on disk
        "foreign_keys = ON",
        f"busy_timeout = {int(BUSY_SECONDS * 1000)}",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that reads before it writes cannot wait for the lock later: it takes it now.
    writes = connection.get_execution_options().get("polar_writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


