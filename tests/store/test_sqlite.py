"""Connections whose task is cancelled, and what errors reveal."""

import asyncio
import os
import sqlite3
import threading
from contextlib import closing, suppress
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from redpoll.store.errors import StoreUnavailable, reason_of
from redpoll.store.sqlite import Sqlite, finish_restore, restoring

SLOW = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 100000) SELECT count(*) FROM n"


@pytest.fixture
async def database(tmp_path):
    made = Sqlite(tmp_path / "a.sqlite", "journal_mode=WAL")
    yield made
    await made.close()


async def read(database: Sqlite, text: str) -> object:
    async with database.engine.connect() as connection:
        return (await connection.execute(sa.text(text))).scalar_one()


async def make_wait(connection, wait_until):
    """The connection's thread waits for the event that is returned."""
    began, go_on = threading.Event(), threading.Event()

    def wait() -> bool:
        began.set()
        return go_on.wait(60)

    connection._tx.put_nowait((None, wait))
    await wait_until(began.is_set)
    return go_on


async def held(database, wait_until):
    """A connection, a task that reads from it, and the event that the statement waits for."""
    await read(database, "SELECT 1")
    (connection,) = database._connections
    began, go_on = threading.Event(), threading.Event()

    def wait() -> bool:
        began.set()
        return go_on.wait(60)

    await connection.create_function("held", 0, wait)
    reader = asyncio.create_task(read(database, "SELECT held()"))
    await wait_until(began.is_set)
    return connection, reader, go_on


async def test_every_connection_has_the_pragmas(database):
    assert await read(database, "PRAGMA journal_mode") == "wal"


async def test_task_cancelled_twice_leaves_no_unfinished_task(database):
    """The second cancellation comes while the connection is being closed, as at the end of a process."""
    before = asyncio.all_tasks()
    for moment in range(10):
        reader = asyncio.create_task(read(database, SLOW))
        await asyncio.sleep(0.01)
        reader.cancel()
        await asyncio.sleep(moment * 0.0002)
        reader.cancel()
        with suppress(asyncio.CancelledError):
            await reader
    await asyncio.wait_for(database.close(), 60)
    left = asyncio.all_tasks() - before
    assert not left or not (await asyncio.wait(left, timeout=60))[1]


@pytest.mark.parametrize("has_ended", [False, True], ids=["running", "ended"])
async def test_closing_waits_for_connections_whose_task_was_cancelled(database, wait_until, has_ended):
    """Also for a thread that has ended, and whose last word has yet to reach the loop."""
    connection, reader, go_on = await held(database, wait_until)
    while not reader.done():
        reader.cancel()
        await asyncio.sleep(0)
    assert connection.stopped is not None
    assert not connection.stopped.done()
    go_on.set()
    if has_ended:
        connection._thread.join(60)
    await database.close()
    assert connection.stopped.done()


async def test_closing_waits_for_statements_that_still_run(database, wait_until):
    """Their threads would tell a closed loop of the result."""
    connection, reader, go_on = await held(database, wait_until)
    closing = asyncio.create_task(database.close())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not closing.done()
    go_on.set()
    await closing
    assert connection.stopped.done()
    await asyncio.gather(reader, return_exceptions=True)


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["leaves", "cancelled"])
async def test_a_task_that_ends_while_the_file_is_closed_logs_no_fault(database, wait_until, caplog, is_cancelled):
    """Its connection will be closed, and with that its transaction rolled back."""
    begun, leave = asyncio.Event(), asyncio.Event()

    async def use() -> None:
        async with database.reading():
            begun.set()
            await leave.wait()

    task = asyncio.create_task(use())
    await begun.wait()
    (connection,) = database._connections
    go_on = await make_wait(connection, wait_until)
    closing = asyncio.create_task(database.close())
    await wait_until(lambda: connection.stopped is not None)
    if is_cancelled:
        task.cancel()
    leave.set()
    for _ in range(10):
        await asyncio.sleep(0)
    go_on.set()
    async with asyncio.timeout(60):
        await closing
        await asyncio.wait((task,))
    assert task.cancelled() == is_cancelled
    assert task.cancelled() or task.exception() is None
    assert not caplog.records


async def test_errors_give_the_reason_but_no_parameters(database):
    await read(database, "SELECT 1")
    with pytest.raises(SQLAlchemyError) as caught:
        async with database.engine.connect() as connection:
            await connection.execute(sa.text("INSERT INTO nowhere VALUES (:it)"), {"it": "a secret"})
    assert reason_of(caught.value) == "no such table: nowhere"
    assert "a secret" not in str(caught.value)


async def test_a_file_that_is_full_or_locked_is_unavailable_until_it_no_longer_is(database, tmp_path):
    async def write(*pragmas: str) -> None:
        async with database.change() as connection:
            for pragma in pragmas:
                await connection.exec_driver_sql(f"PRAGMA {pragma}")
            await connection.execute(sa.text("INSERT INTO t VALUES (randomblob(100000))"))

    async with database.migrating() as connection:
        await connection.exec_driver_sql("CREATE TABLE t (x)")
    with pytest.raises(StoreUnavailable, match="database or disk is full"):
        await write("max_page_count=2")
    with closing(sqlite3.connect(tmp_path / "a.sqlite")) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="database is locked"):
            await write("busy_timeout=0")
    with pytest.raises(SQLAlchemyError) as caught:
        await read(database, "SELECT nothing")
    assert not isinstance(caught.value, StoreUnavailable)
    await write("max_page_count=1000")
    assert await read(database, "SELECT count(*) FROM t") == 1


# -- restores


@pytest.fixture
def files(tmp_path):
    """A database with its -wal, one that replaces it, and what is left of an earlier restore."""
    for name in ("a", "a-wal", "a.restoring", "a.before-restore", "a.before-restore-wal", "a.before-restore-shm"):
        (tmp_path / name).write_text(name)
    return tmp_path


def contents(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_restore_moves_the_present_file_and_its_wal(files):
    assert finish_restore(files / "a")
    assert contents(files) == {"a": "a.restoring", "a.before-restore": "a", "a.before-restore-wal": "a-wal"}
    assert not finish_restore(files / "a")


@pytest.mark.parametrize("moves", range(4))
def test_a_restore_that_was_cut_off_is_finished_without_loss(files, monkeypatch, moves):
    rename, done = Path.rename, []

    def cut_off(path, target):
        if len(done) == moves:
            raise OSError("cut off")
        done.append(path)
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", cut_off)
        patched.setattr(os, "replace", cut_off)
        with suppress(OSError):
            finish_restore(files / "a")
    finish_restore(files / "a")
    assert contents(files) == {"a": "a.restoring", "a.before-restore": "a", "a.before-restore-wal": "a-wal"}
    assert not restoring(files / "a").exists()
