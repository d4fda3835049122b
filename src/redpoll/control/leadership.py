"""Begins and ends the work that only the leading node's control plane does, and protects the store from two leaders.

The supervisor says whether this node leads. Before the work begins, the term is written to the record store. Each of
the leader's transactions checks it, so a leader that was paused and replaced meanwhile can't write any more
(cluster/README.md "Nodes and the leader").
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final

import structlog
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.store.leadership import NotLeader, check_term, raise_term, store_id, stored_term
from redpoll.store.sqlite import reason_of
from redpoll.store.store import Store

__all__ = ["LeaderStore", "Leadership", "introduce"]

log = structlog.get_logger(__name__)

_RETRY_AFTER_S: Final = 1.0


async def introduce(store: Store) -> dict[str, Any]:
    """What the supervisor has to know about the record store before it sends its first heartbeat."""
    async with store.reading() as connection:
        return {"store": await store_id(connection), "term": await stored_term(connection)}


class Leadership:
    """Begins and ends the leader's work. `begin()` and `end()` are called by turns; `tell` sends to the supervisor.

    `term` is the term with which this node leads, None while it doesn't lead.
    """

    def __init__(
        self,
        store: Store,
        tell: Callable[[dict[str, Any]], None],
        begin: Callable[[], None],
        end: Callable[[], Awaitable[None]],
    ) -> None:
        self.term: int | None = None
        self._store = store
        self._tell = tell
        self._begin = begin
        self._end = end
        self._wanted: int | None = None
        self._working = False
        # The store has a greater term than ours, which the supervisor doesn't know.
        self._is_outdated = False
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._follow(), name="leadership")

    def set_term(self, term: int | None) -> None:
        """What the supervisor says: the term with which this node leads, or None."""
        self._wanted = term
        if term is None:
            # Transactions that begin from now on are refused, even before the work has ended.
            self.term = None
        self._changed.set()

    async def finish(self) -> None:
        """Takes no more terms. The caller ends the work itself, because it stops in its own order."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def check(self, connection: AsyncConnection) -> None:
        """Raises NotLeader, which rolls the transaction back, unless this node leads."""
        if self.term is None:
            raise NotLeader("this node doesn't lead")
        try:
            await check_term(connection, self.term)
        except NotLeader:
            self._is_outdated = True
            self.set_term(None)
            raise

    async def _follow(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._adopt(self._wanted)
            except SQLAlchemyError as error:
                log.error("term not written", reason=reason_of(error))
            except Exception:
                # Our own bug must not end the leadership of a single node.
                log.exception("leadership not changed")
            else:
                continue
            await asyncio.sleep(_RETRY_AFTER_S)
            self._changed.set()

    async def _adopt(self, term: int | None) -> None:
        if term is None:
            if self._working:
                self._working = False
                await self._end()
                log.info("leader's work ended")
        elif term != self.term:
            async with self._store.change() as connection:
                self._is_outdated = not await raise_term(connection, term)
            if not self._is_outdated and self._wanted == term:
                if not self._working:
                    self._begin()
                    self._working = True
                    log.info("leader's work begun", term=term)
                self.term = term
        if self._is_outdated:
            # If Redis lost its data and gave a term that was used, the supervisor asks for a greater one.
            self._tell(await introduce(self._store))
            self._is_outdated = False


class LeaderStore:
    """The record store for the leader's work: `change` is as in `Store`, but only the leader's transactions commit."""

    def __init__(self, store: Store, leadership: Leadership) -> None:
        self._store = store
        self._leadership = leadership

    def reading(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """As in `Store`."""
        return self._store.reading()

    @asynccontextmanager
    async def change(self) -> AsyncIterator[AsyncConnection]:
        """A transaction. Raises NotLeader if this node doesn't lead."""
        async with self._store.change() as connection:
            await self._leadership.check(connection)
            yield connection
