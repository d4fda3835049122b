"""Revokes grants and ends subscriptions, on all nodes (protocol/README.md "Grants").

A revocation is in three places: the memory of every worker and control plane, a stream in Redis, and the record store.
Any one of them fills the others again, so it counts while PostgreSQL is away, and after Redis lost its data.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, Final

import hiredis
import structlog
from sqlalchemy.exc import SQLAlchemyError

from redpoll.cluster.bus import Unavailable
from redpoll.cluster.questions import GrantRevoked, RevokeGrants, Unsubscribe, encode
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link, LinkDown
from redpoll.cluster.revoked_grants import RevokedInRedis
from redpoll.cluster.survey import Survey
from redpoll.loop.turns import Turns
from redpoll.protocol.errors import ApiError
from redpoll.protocol.grants import KEPT_S, MAX_REVOKED, RevokedGrants, of_channel, of_grant
from redpoll.store import revoked_grants
from redpoll.store.audit import Actor
from redpoll.store.audit import add as add_note
from redpoll.store.errors import reason_of
from redpoll.store.store import Store

__all__ = ["Grants"]

log = structlog.get_logger(__name__)

# Between two attempts to write what the record store doesn't have yet.
_RETRY_S: Final = 1.0
_WRITTEN_WITHIN_S: Final = 1.9
# A question waits this long for those of other requests.
_ASKED_WITHIN_S: Final = 2.0
# Questions of an app that wait for those that it asked before.
_MAX_WAITING: Final = 256


class Grants:
    """Call `load` before the link starts and `link_up` when Redis is connected. `clock` is Unix time."""

    def __init__(
        self,
        store: Store,
        link: Link,
        keys: Keys,
        survey: Survey,
        clock: Callable[[], float] = time.time,
        *,
        retry_s: float = _RETRY_S,
        written_within_s: float = _WRITTEN_WITHIN_S,
        asked_within_s: float = _ASKED_WITHIN_S,
    ) -> None:
        self.table = RevokedGrants(clock)
        self._store = store
        self._link = link
        self._keys = keys
        self._survey = survey
        self._clock = clock
        self._retry_s = retry_s
        self._written_within_s = written_within_s
        self._asked_within_s = asked_within_s
        self._redis = RevokedInRedis(link, keys, self.table, lambda app_ids: None)
        # What the record store has, and who revoked what it doesn't have yet.
        self._stored: dict[tuple[str, str], int] = {}
        self._actors: dict[tuple[str, str], Actor] = {}
        self._wake = asyncio.Event()
        self._unfilled = True
        self._task: asyncio.Task[None] | None = None
        # Workers answer a bounded number of questions at a time.
        self._asking = asyncio.Lock()
        self._turns = Turns(_MAX_WAITING)
        self._filling = asyncio.Lock()

    async def load(self) -> None:
        """Reads what the record store has. Raises SQLAlchemyError."""
        async with self._store.reading() as connection:
            for one in await revoked_grants.everything(connection):
                self.table.put(*one)
        self._remember_stored()

    def heard(self, revoked: GrantRevoked) -> None:
        """Another node has revoked this."""
        if self.table.put(revoked.app, revoked.subject, revoked.at_s):
            self._wake.set()

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="revoked grants")

    async def finish(self) -> None:
        self._redis.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def link_up(self) -> None:
        self._unfilled = True
        self._wake.set()

    async def fill(self) -> None:
        """Makes sure that Redis has what this process knows. Raises LinkDown or hiredis.ReplyError."""
        async with self._filling:
            if self._unfilled:
                # Now: what happens meanwhile needs another one.
                self._unfilled = False
                try:
                    await self._redis.fill()
                except BaseException:
                    self._unfilled = True
                    raise

    # -- what the app asks for

    async def revoke(self, app_id: str, subject: str, by: Actor | None = None) -> tuple[int, int]:
        """Revokes grants, and ends what they opened. Returns the Unix seconds of the revocation, and how many
        subscriptions and readers over HTTP it ended.

        Raises Unavailable if Redis or a worker didn't confirm it; the revocation counts as soon as they can be reached.
        Raises ApiError if the app has too many. Raises TooManyWaiting if too many of its requests wait; the revocation
        counts nevertheless, and what it ends ends within a second.
        """
        self._need_room(app_id, subject)
        at_s = int(self._clock())
        answers: dict[str, int]
        # Workers also read what is written, and who reads it first counts what it ends: so they are asked before.
        try:
            answers = await self._ask(RevokeGrants(app_id, subject, at_s))
        finally:
            await self._record(app_id, subject, at_s, by)
        ended = sum(answers.values())
        log.info("grants revoked", app=app_id, subject=subject, ended=ended)
        return at_s, ended

    async def unsubscribe(self, app_id: str, channel: str, user: str, socket: str, *, granted: bool) -> int:
        """Removes a user, or the connection with this socket id, from a channel. `granted`: the app accepts grants.
        Returns how many subscriptions and readers over HTTP ended. Raises as `revoke`."""
        recorded = of_channel(channel, user) if user and granted else None
        if recorded is not None:
            self._need_room(app_id, recorded)
        at_s = int(self._clock())
        answers: dict[str, tuple[int, list[str]]]
        try:
            answers = await self._ask(Unsubscribe(app_id, channel, user, socket, at_s, granted))
        finally:
            if recorded is not None:
                await self._record(app_id, recorded, at_s, None)
        ended = sum(ended for ended, _ in answers.values())
        if socket:
            # The connection's next socket id must not open the channel by the same grant.
            digests = {digest for _, used in answers.values() for digest in used}
            for subject in [of_grant(channel, digest) for digest in digests]:
                ended += (await self.revoke(app_id, subject))[1]
        log.info("unsubscribed by the app", app=app_id, channel=channel, user=user or None, socket=socket or None)
        return ended

    async def _ask(self, question: RevokeGrants | Unsubscribe) -> dict[str, Any]:
        """Asks all workers, one question at a time; apps take turns. Raises Unavailable, also if others ask for too
        long, and TooManyWaiting."""
        async with contextlib.AsyncExitStack() as turn:
            try:
                async with asyncio.timeout(self._asked_within_s):
                    await turn.enter_async_context(self._turns.of(question.app))
                    await turn.enter_async_context(self._asking)
            except TimeoutError:
                raise Unavailable(f"other requests were not answered within {self._asked_within_s:g} s") from None
            return await self._survey.ask(question)

    def _need_room(self, app_id: str, subject: str) -> None:
        app = self.table.of(app_id)
        if len(app) >= MAX_REVOKED:
            app.forget_old()
        if len(app) >= MAX_REVOKED and app.revoked_at(subject) is None:
            raise ApiError(
                "rate_limited",
                f"this app has {MAX_REVOKED} revocations of the last day, and nothing was revoked; to end all grants "
                "of a key, add another key and disable that one",
            )

    async def _record(self, app_id: str, subject: str, at_s: int, by: Actor | None) -> None:
        if self.table.of(app_id).revoke(subject, at_s):
            if by is not None:
                self._actors[app_id, subject] = by
            self._wake.set()
        try:
            async with asyncio.timeout(self._written_within_s):
                await self._link.wait_up()
                # Repeated requests are written again: the first one may have failed here.
                await self._redis.add([(app_id, subject, at_s)])
        except (TimeoutError, LinkDown, hiredis.ReplyError) as error:
            self._unfilled = True
            raise Unavailable(str(error) or f"no answer from Redis within {self._written_within_s:g} s") from None
        if self._redis.is_long:
            self._unfilled = True
            self._wake.set()
        self._link.call(self._keys.publish, self._keys.controls, encode(GrantRevoked(app_id, subject, at_s)))

    # -- in the background

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._retry_s if self._unfilled or self._missing() else None):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self._look()
            except Exception:
                # Our own bug must not end the task.
                log.exception("revoked grants not kept")
                await asyncio.sleep(self._retry_s)

    async def _look(self) -> None:
        if self._link.up and self._unfilled:
            try:
                await self.fill()
            except (LinkDown, hiredis.ReplyError) as error:
                log.warning("revoked grants not in redis", reason=str(error))
        missing = self._missing()
        if not missing:
            return
        try:
            async with self._store.change() as connection:
                await revoked_grants.add(connection, missing)
                await revoked_grants.remove_before(connection, int(self._clock()) - KEPT_S)
                for app_id, subject, _ in missing:
                    await add_note(connection, self._actors.get((app_id, subject)), "grant revoke", app_id, subject)
        except SQLAlchemyError as error:
            log.warning("revoked grants not stored yet", count=len(missing), reason=reason_of(error))
            return
        for app_id, subject, at_s in missing:
            self._stored[app_id, subject] = at_s
            self._actors.pop((app_id, subject), None)
        self.table.forget_old()
        self._stored = {one: at_s for one, at_s in self._stored.items() if self.table.of(one[0]).revoked_at(one[1])}

    def _missing(self) -> list[tuple[str, str, int]]:
        """What the record store doesn't have."""
        return [one for one in self.table if self._stored.get(one[:2]) != one[2]]

    def _remember_stored(self) -> None:
        self._stored = {(app_id, subject): at_s for app_id, subject, at_s in self.table}
