"""What the app takes back of open connections: grants, and single subscriptions (protocol/README.md "Grants").

A revocation is in the table before any connection is looked at, so what subscribes meanwhile is refused, and what was
subscribed before is found.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, TypeVar

from redpoll import _engine
from redpoll.loop.slices import walk
from redpoll.protocol.access import REVOKED, users_of
from redpoll.protocol.errors import Code
from redpoll.protocol.grants import Grant, RevokedGrants, of_channel

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from redpoll.cluster.questions import RevokeGrants, Unsubscribe
    from redpoll.worker.hub.connection import Connection
    from redpoll.worker.hub.hub import Hub

__all__ = ["Revocations"]

T = TypeVar("T")

_SIGN_IN_REVOKED: Final = f"{REVOKED}: connect and sign in again"


class Revocations:
    """`table` has the revoked grants of all apps. `end_readers` as Streams.end_granted."""

    def __init__(
        self, hub: Hub, table: RevokedGrants, end_readers: Callable[[str, Callable[[str, Grant], bool]], Awaitable[int]]
    ) -> None:
        self.table = table
        self._hub = hub
        self._end_readers = end_readers
        self._tasks: set[asyncio.Task[Any]] = set()

    def read(self, app_ids: set[str]) -> None:
        """Revocations of these apps were read from Redis."""
        for app_id in app_ids:
            self._start(self._end_revoked(app_id))

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Runs to its end, although the one who asked stops waiting."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return asyncio.shield(task)

    async def revoke(self, question: RevokeGrants) -> int:
        """Returns how many subscriptions and readers ended."""
        self.table.put(question.app, question.subject, question.at_s)
        return await self._start(self._end_revoked(question.app))

    async def _end_revoked(self, app_id: str) -> int:
        ended = 0

        def look(connection: Connection) -> None:
            nonlocal ended
            if connection.state != _engine.OPEN:
                return
            session = connection.session
            if session.sign_in_revoked:
                # Everything that it did as that user ends with it.
                ended += len(session.channels)
                connection.shut(Code.OVER_CAPACITY, _SIGN_IN_REVOKED)
                return
            for channel in session.revoked_channels():
                ended += 1
                self._hub.perform(connection, session.remove(channel))

        await walk(self._hub.open_connections.each_of_app(app_id), look)
        grants = self.table.of(app_id)
        return ended + await self._end_readers(app_id, lambda channel, grant: grants.is_revoked(grant, channel))

    async def unsubscribe(self, question: Unsubscribe) -> tuple[int, list[str]]:
        """Returns how many subscriptions and readers ended, and which grants had opened the subscriptions."""
        if question.user:
            self._hub.open_connections.remove_member(question.app, question.channel, question.user)
            # Without grants nothing bounds the table.
            if question.granted:
                self.table.put(question.app, of_channel(question.channel, question.user), question.at_s)
        return await self._start(self._remove(question))

    async def _remove(self, question: Unsubscribe) -> tuple[int, list[str]]:
        channel, user, at_s = question.channel, question.user, question.at_s
        ended = 0
        digests: set[str] = set()

        def look(connection: Connection) -> None:
            nonlocal ended
            if connection.state != _engine.OPEN:
                return
            session = connection.session
            subscription = session.channels.get(channel)
            if user and user not in users_of(session.user_id, subscription):
                return
            grant = subscription.grant if subscription is not None else None
            ended += subscription is not None
            if grant is not None:
                digests.add(grant.digest.hex())
            self._hub.perform(connection, session.remove(channel, at_s))

        if user:
            await walk(self._hub.open_connections.each_of_app(question.app), look)
            is_over: Callable[[str, Grant], bool] = lambda read, grant: read == channel and grant.user_id == user  # noqa: E731
            ended += await self._end_readers(question.app, is_over)
        else:
            connection = self._hub.find_socket(question.app, question.socket)
            if connection is not None:
                look(connection)
        return ended, sorted(digests)
