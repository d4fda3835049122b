"""Begins and ends the work that only the leading node's control plane does, and protects the store from two leaders.

The supervisor says whether this node leads. What needs only Redis begins at once. Before the other work begins, the
term is written to the record store. Each of the leader's transactions checks it, so a leader that was paused and
replaced meanwhile can't write any more (cluster/README.md "Nodes and the leader").
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, Protocol

import msgspec
import structlog
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.ipc.messages import FromChild, RecordStore
from redpoll.store.leadership import NotLeader, check_term, raise_term, store_id, stored_term
from redpoll.store.shard_key import shard_key
from redpoll.store.sqlite import reason_of
from redpoll.store.store import Store

__all__ = ["LeaderStore", "Leadership", "Work", "introduce"]

log = structlog.get_logger(__name__)

_RETRY_AFTER_S: Final = 1.0


async def introduce(store: Store) -> RecordStore:
    """What the supervisor has to know about the record store before it sends its first heartbeat, and workers before
    they connect to Redis."""
    async with store.reading() as connection:
        return RecordStore(await store_id(connection), await stored_term(connection), await shard_key(connection))


class Work(Protocol):
    """What the leader does. Each `begin` is followed by its `end`."""

    def begin(self) -> None:
        """Begins what needs Redis only, and can be repeated by two leaders without harm."""

    def end(self) -> None: ...

    def begin_with_store(self, store: LeaderStore) -> None:
        """Begins what needs the record store, which now has our term."""

    async def end_with_store(self) -> None: ...


class Leadership:
    """Begins and ends `work`. `tell` sends to the supervisor.

    `named` is the term with which the supervisor says that this node leads, None while it doesn't. `term` is the term
    with which the record store knows it as the leader, otherwise None.
    """

    def __init__(self, store: Store, tell: Callable[[FromChild], None], work: Work) -> None:
        self.named: int | None = None
        self.term: int | None = None
        self._store = store
        self._tell = tell
        self.work = work
        self._working = False
        # The last term that this process has stored.
        self._stored: int | None = None
        # The greatest term with which the store refused us, if the supervisor doesn't know it yet.
        self._refused: int | None = None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._follow(), name="leadership")

    def set_term(self, term: int | None) -> None:
        """What the supervisor says: the term with which this node leads, or None."""
        before, self.named = self.named, term
        if term is None:
            # Transactions that begin from now on are refused, even before the work has ended.
            self.term = None
        # Not in the task, which may wait for the record store.
        if before is not None and term is None:
            self.work.end()
        elif before is None and term is not None:
            self.work.begin()
        self._changed.set()

    async def finish(self) -> None:
        """Takes no more terms, and ends what needs Redis only. The caller ends the other work, which stops in its own
        order."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.named is not None:
            self.named = None
            self.work.end()

    async def check(self, connection: AsyncConnection) -> None:
        """Raises NotLeader, which rolls the transaction back, unless this node leads."""
        term = self.term
        if term is None:
            raise NotLeader("this node doesn't lead")
        try:
            await check_term(connection, term)
        except NotLeader:
            self._note_refused(term)
            # Unless the supervisor has named another term meanwhile.
            if self.named == term:
                self.set_term(None)
            raise

    def _note_refused(self, term: int) -> None:
        self._refused = max(term, self._refused or 0)

    async def _follow(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._adopt(self.named)
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
                await self.work.end_with_store()
                log.info("leader's work ended")
        elif term != self.term:
            async with self._store.change() as connection:
                is_ours = await raise_term(connection, term, again=term == self._stored)
            if is_ours:
                self._stored = term
            else:
                self._note_refused(term)
            if is_ours and self.named == term:
                if not self._working:
                    self.work.begin_with_store(LeaderStore(self._store, self))
                    self._working = True
                    log.info("leader's work begun", term=term)
                self.term = term
        if self._refused is not None:
            # If Redis lost writes and gave a term that was used, the supervisor asks for a greater one.
            known = await introduce(self._store)
            refused, self._refused = self._refused, None
            self._tell(msgspec.structs.replace(known, term=max(known.term, refused + 1)))


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
