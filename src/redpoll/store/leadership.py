"""The id of the record store, and the term of the node that leads: both are rows of `meta`.

The leader's transactions read the term. One whose term isn't the stored one is an earlier leader's, which doesn't know
yet that another node leads (cluster/README.md "Nodes and the leader").
"""

from contextlib import AbstractAsyncContextManager
from typing import Protocol

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.store.schema import meta

__all__ = ["Changes", "NotLeader", "check_term", "is_standby", "raise_term", "store_id", "stored_term"]

_ID = "store_id"
_TERM = "term"


class NotLeader(sa.exc.SQLAlchemyError):
    """The transaction was rolled back, because another node leads now.

    It is an error of the store to the code that writes: that keeps what it couldn't write, and tries again later.
    """


class Changes(Protocol):
    """The record store to code that doesn't know whether only the leader may change it (see `Store`)."""

    def reading(self) -> AbstractAsyncContextManager[AsyncConnection]: ...

    def change(self) -> AbstractAsyncContextManager[AsyncConnection]: ...


async def store_id(connection: AsyncConnection) -> str:
    """The id that the store got when it was created."""
    result = await connection.execute(sa.select(meta.c.value).where(meta.c.name == _ID))
    return str(result.scalar_one())


async def is_standby(connection: AsyncConnection) -> bool:
    """Whether this PostgreSQL takes no changes, as a primary that a fail-over has demoted."""
    return bool((await connection.execute(sa.select(sa.func.pg_is_in_recovery()))).scalar_one())


async def stored_term(connection: AsyncConnection) -> int:
    """The term of the last leader, 0 if no node has led yet."""
    return await _term(connection)


async def raise_term(connection: AsyncConnection, term: int, *, again: bool = False) -> bool:
    """Makes `term` the leader's. False: the stored one is greater, so another node has led since; or it is the same and
    another process may have stored it. `again`: the caller itself has stored `term` before.

    A Redis that lost writes may give two nodes the same term. Here only the first of them gets it.
    """
    result = await connection.execute(sa.update(meta).where(meta.c.name == _TERM).values(value=meta.c.value))
    if not result.rowcount:
        await connection.execute(sa.insert(meta).values(name=_TERM, value=str(term)))
        return True
    # The update above has locked the row.
    stored = await _term(connection)
    if stored > term or (stored == term and not again):
        return False
    await connection.execute(sa.update(meta).where(meta.c.name == _TERM).values(value=str(term)))
    return True


async def check_term(connection: AsyncConnection, term: int) -> None:
    """Raises NotLeader unless `term` is the stored one. It can't be raised before the transaction ends."""
    if await _term(connection, lock=True) != term:
        raise NotLeader("another node leads now")


async def _term(connection: AsyncConnection, *, lock: bool = False) -> int:
    query = sa.select(meta.c.value).where(meta.c.name == _TERM)
    # SQLite ignores the lock: it has one writer, and refuses to write after another one's commit.
    result = await connection.execute(query.with_for_update(read=True) if lock else query)
    return int(result.scalar_one_or_none() or 0)
