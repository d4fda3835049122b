"""PostgreSQL with SQLAlchemy and asyncpg: an engine that connects again by itself, with bounds on every wait, and whose
errors contain neither credentials nor values of rows.

asyncpg reads the URL itself, so everything that libpq's URLs allow works: several hosts, `sslmode`, a Unix socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

import sqlalchemy as sa
import structlog
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from redpoll.store.errors import StoreError, StoreUnavailable

__all__ = ["Postgres", "described"]

log = structlog.get_logger(__name__)

# Connections per control plane. Webhooks use two or three at the same time, the dashboard the others.
_CONNECTIONS: Final = 5
# How long a request waits: for one of those connections, for a new one, for a statement.
_POOL_TIMEOUT_S: Final = 5.0
_CONNECT_TIMEOUT_S: Final = 5.0
_STATEMENT_TIMEOUT_S: Final = 15.0
# lock_timeout: how long a change waits for the change of another control plane, twice. The other one bounds how long a
# stopped process blocks the others: PostgreSQL then rolls its change back. It is shorter, so those who wait succeed.
_SESSION: Final = (
    "SET application_name = 'redpoll'; SET lock_timeout = '4s'; SET idle_in_transaction_session_timeout = '3s'"
)
_PATIENT: Final = "; SET idle_in_transaction_session_timeout = 0"
# PostgreSQL doesn't count a process as idle that stops after it has sent a statement and before it sends the values,
# and `statement_timeout` doesn't end it. This finds the sessions that wait like that and hold the row of the version.
# Only one that every look finds is taken for stopped: a slow one is at work at some of them.
_STOPPED: Final = sa.text(
    "SELECT pid FROM pg_stat_activity a WHERE datname = current_database() AND application_name = 'redpoll'"
    " AND state = 'active' AND wait_event = 'ClientRead' AND query_start < now() - interval '3 s' AND EXISTS"
    " (SELECT FROM pg_locks WHERE pid = a.pid AND relation = 'meta'::regclass AND mode = 'RowShareLock')"
)
_LOOKS: Final = 10
_LOOK_EVERY_S: Final = 0.05
# Errors that say nothing about the statement. By class: connection, resources, operator. Single ones: a server that has
# become a standby, a lock that wasn't free in time, a transaction that was idle for too long.
_AWAY_CLASSES: Final = ("08", "53", "57")
_AWAY_CODES: Final = ("25006", "55P03", "25P03")
# After this error the connection is in order.
_LOCKED: Final = "55P03"
# Wrong user or password; no such database.
_REFUSED_CODES: Final = ("28000", "28P01", "3D000")
# The advisory lock under which one process at a time migrates: "redpoll" in ASCII.
_MIGRATION_LOCK: Final = int.from_bytes(b"redpoll")


def described(url: str) -> str:
    """Which database a URL names, without credentials: `PostgreSQL at db:5432/redpoll`."""
    parts = urlsplit(url)
    # The last @, because a password may have a / that isn't escaped.
    host, slash, database = f"{parts.netloc}{parts.path}".rpartition("@")[2].partition("/")
    host = host or "".join(parse_qs(parts.query).get("host", ()))
    return f"PostgreSQL at {unquote(host) or 'the default host'}{slash}{database}"


class Postgres:
    """A PostgreSQL database and its engine. Raises StoreError if the driver is missing.

    `patient`: statements may take as long as they need, and so may what is done between those of a transaction. Every
    error of the engine is an SQLAlchemyError; it is StoreUnavailable if PostgreSQL can't be used at present.
    """

    def __init__(self, url: str, *, patient: bool = False) -> None:
        try:
            import asyncpg
        except ImportError as error:
            raise StoreError(
                "database_url names PostgreSQL, and its driver is missing: pip install 'redpoll[postgres]'"
            ) from error
        self._asyncpg = asyncpg
        self._url = url
        self._patient = patient
        self.name = described(url)
        self.engine = self._engine(
            self._connect_for_use,
            pool_size=_CONNECTIONS,
            max_overflow=0,
            pool_timeout=_POOL_TIMEOUT_S,
            pool_use_lifo=True,
        )
        sa.event.listen(self.engine.sync_engine, "checkout", _check_open)

    def _engine(self, connect: Any, **options: Any) -> AsyncEngine:
        engine = create_async_engine(
            "postgresql+asyncpg://",
            async_creator=connect,
            # Errors must not contain parameters: these are secrets and payloads, and errors are logged.
            hide_parameters=True,
            **options,
        )
        sa.event.listen(engine.sync_engine, "handle_error", self._explain)
        return engine

    async def close(self) -> None:
        """Closes all connections."""
        await self.engine.dispose()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """A connection for reading. All its reads see the same state of the database."""
        with self._none_free_explained():
            async with self.engine.connect() as connection:
                await connection.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
                yield connection

    @asynccontextmanager
    async def change(self, lock: sa.Executable) -> AsyncIterator[AsyncConnection]:
        """A transaction that begins with `lock`, which waits for those of other processes. If one of these has stopped,
        its change is rolled back."""
        with self._none_free_explained():
            async with self.engine.connect() as connection:
                try:
                    await connection.execute(lock)
                except StoreUnavailable as error:
                    if not error.locked:
                        raise
                    await self._end_stopped(connection)
                    await connection.execute(lock)
                yield connection
                await connection.commit()

    async def _end_stopped(self, connection: AsyncConnection) -> None:
        stopped: set[int] | None = None
        for _ in range(_LOOKS):
            # Within a transaction, each look would show the same.
            await connection.rollback()
            pids = set((await connection.execute(_STOPPED)).scalars())
            stopped = pids if stopped is None else stopped & pids
            if not stopped:
                break
            await asyncio.sleep(_LOOK_EVERY_S)
        for pid in stopped or ():
            await connection.execute(sa.select(sa.func.pg_terminate_backend(pid)))
            log.warning("change of a stopped process rolled back", backend=pid)
        await connection.rollback()

    @contextmanager
    def _none_free_explained(self) -> Iterator[None]:
        try:
            yield
        except sa.exc.TimeoutError:
            text = f"none of the {_CONNECTIONS} connections to {self.name} became free within {_POOL_TIMEOUT_S:g} s"
            raise StoreUnavailable(text) from None

    @asynccontextmanager
    async def migrating(self) -> AsyncIterator[AsyncConnection]:
        """A transaction for migrations: without a time limit, and only one at a time in all processes."""

        async def connect() -> Any:
            return await self._connect(None)

        engine = self._engine(connect, poolclass=sa.NullPool)
        try:
            async with engine.begin() as connection:
                await connection.exec_driver_sql("SET lock_timeout = 0")
                await connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
                yield connection
        finally:
            await engine.dispose()

    async def _connect_for_use(self) -> Any:
        return await self._connect(None if self._patient else _STATEMENT_TIMEOUT_S)

    async def _connect(self, statement_timeout_s: float | None) -> Any:
        asyncpg = self._asyncpg
        try:
            connection = await asyncpg.connect(
                self._url, timeout=_CONNECT_TIMEOUT_S, command_timeout=statement_timeout_s
            )
            try:
                await connection.execute(_SESSION + _PATIENT if self._patient else _SESSION)
            except BaseException:
                connection.terminate()
                raise
        except TimeoutError:
            raise StoreUnavailable(f"{self.name} doesn't answer within {_CONNECT_TIMEOUT_S:g} s") from None
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            # ClientConfigurationError: the URL has an unknown or contradictory parameter.
            refused = getattr(error, "sqlstate", None) in _REFUSED_CODES or isinstance(error, ValueError)
            raise StoreUnavailable(f"{self.name} can't be reached: {error}", misconfigured=refused) from None
        except (ValueError, OverflowError):
            # asyncpg quotes a part of the URL, which may be one of the password.
            text = f"{self.name} can't be used: its URL, or a variable such as PGPORT, has a value of the wrong form"
            raise StoreUnavailable(text, misconfigured=True) from None
        return connection

    def _explain(self, context: ExceptionContext) -> StoreUnavailable | None:
        """Called for each error of a statement. Its result replaces the error."""
        error = context.original_exception
        if not isinstance(error, Exception):
            # The task is cancelled.
            return None
        cause: Any = error.__cause__
        if getattr(cause, "detail", None):
            # It quotes values of the row.
            text, cause.detail = f"\nDETAIL:  {cause.detail}", None
            for shown in (error, context.sqlalchemy_exception):
                if shown is not None:
                    shown.args = tuple(_without(text, argument) for argument in shown.args)
        if isinstance(error, TimeoutError | OSError):
            context.is_disconnect = True
            return StoreUnavailable(f"{self.name} doesn't answer: {error or 'timed out'}")
        state = getattr(error, "sqlstate", None) or ""
        if state.startswith(_AWAY_CLASSES) or state in _AWAY_CODES:
            context.is_disconnect = context.is_disconnect or state != _LOCKED
        elif not context.is_disconnect:
            return None
        return StoreUnavailable(f"{self.name} is not available: {cause or error}", locked=state == _LOCKED)


def _without(text: str, argument: Any) -> Any:
    return argument.replace(text, "") if isinstance(argument, str) else argument


def _check_open(connection: Any, _record: Any, _proxy: Any) -> None:
    """Replaces pooled connections that PostgreSQL has closed. asyncpg notices that at once, without asking."""
    if connection.driver_connection.is_closed():
        raise sa.exc.DisconnectionError
