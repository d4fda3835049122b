"""User resume: a user who comes back within the app's `user_resume_s` gets the missed messages without asking.

It serves clients that know nothing of offsets, by their user: signed in, or member of a presence channel. When a
user's connection closes, the worker writes to Redis when the last bytes came from it; for a dead worker, the reaper
does. Clients are often back before the old connection's death is noticed, so the workers that hold other connections of
the user are asked as well.
Delivery is at least once: messages from just before the break may come again. Clients that recover by offset don't
need this.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final

import hiredis
import structlog

from redpoll import _frame
from redpoll.cluster.questions import SilenceOfUser, UserSilent, publication
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link, LinkDown
from redpoll.cluster.redis.values import MemberEntry
from redpoll.cluster.resume_points import ResumePoint, ResumePoints
from redpoll.cluster.stats import MAX_HANG_S, Stats
from redpoll.protocol.apps import App
from redpoll.worker.replay.attached_offsets import AttachedOffsets
from redpoll.worker.replay.returned import Returned

if TYPE_CHECKING:
    from redpoll.cluster.membership.local_channel import LocalChannel
    from redpoll.cluster.membership.registry import Registry
    from redpoll.worker.hub.connection import Connection
    from redpoll.worker.timers.janitor import Janitor

__all__ = ["ResumeTimings", "UserResume"]

log = structlog.get_logger()

# How long Redis is waited for when it is away.
_REDIS_AWAY_S: Final = 30.0
# Each connection is looked at so often, in so many parts: at 200,000 connections, a part has 2,000.
_SWEEP_S: Final = 1.0
_PARTS: Final = 100
# Offsets that one part of a sweep forgets, of the apps with one time.
_MAX_FORGOTTEN: Final = 2_000
# A client that only listens sends nothing for minutes, and all of that would be sent again. So it is pinged.
_QUIET_S: Final = 15
_PING: Final = _frame.ping()
# Only the latest connections of a user count. Some apps use one user id for all guests; a guest who returns was one of
# the latest.
_MAX_PINGED: Final = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeTimings:
    """All in seconds. Tests use longer ones."""

    in_flight_s: float = 1.0
    """Messages sent this long before the last bytes came may be missing: they were on their way."""
    answers_s: float = 0.2
    """How long other workers' answers are waited for. They need some of it to ping their connections."""
    pong_s: float = 0.12
    """How long a connection may take to answer a ping."""


class _Question:
    """A question to other workers. `ages` are the answers so far: seconds of silence, None for no silent connection.
    `missing`: the workers that haven't answered."""

    __slots__ = ("ages", "complete", "missing")

    def __init__(self, workers: Iterable[str]) -> None:
        self.missing = set(workers)
        self.ages: list[float | None] = []
        self.complete = asyncio.Event()

    def add(self, worker: str, age_s: float | None) -> None:
        self.ages.append(age_s)
        self.missing.discard(worker)
        if not self.missing:
            self.complete.set()


class UserResume:
    """One per worker. Apps without `user_resume_s` cost nothing.

    `replay_missed(local_channel, connection, since, attached_at)` is called for each channel in which a connection
    may have missed messages (`Replayer.replay_missed`).
    """

    def __init__(
        self,
        registry: Registry,
        link: Link,
        keys: Keys,
        janitor: Janitor,
        replay_missed: Callable[[LocalChannel, Connection, int, int | None], None],
    ) -> None:
        self.timings = ResumeTimings()
        self._replay_missed = replay_missed
        self._registry = registry
        self._link = link
        self._keys = keys
        self._points = ResumePoints(link, keys)
        self._stats = Stats(link, keys)
        self._janitor = janitor
        # Connections by app and user, users by connection, and what is known of their return.
        # The connections of a user are in order of arrival; a dict, because one user may have very many.
        self._connections: dict[tuple[str, str], dict[Connection, None]] = {}
        self._users: dict[Connection, tuple[str, ...]] = {}
        self._returned: dict[Connection, Returned] = {}
        # Since when a connection has had unsent bytes, as far as the sweeps saw.
        self._unsent_since: dict[Connection, float] = {}
        # By app and user: when connections that closed last worked, by the loop's time, until Redis has their points.
        self._unwritten: dict[tuple[str, str], list[float]] = {}
        # A connection's user may become known after it subscribed; no longer than `user_resume_s` is waited for that.
        self._attached = AttachedOffsets()
        # The present round of looks: the connections that are left, how many a part has, when the round began, and how
        # long ago the one before it began.
        self._unswept: Iterator[Connection] | None = None
        self._part = 0
        self._round_began = 0.0
        self._round_s = _SWEEP_S
        self._questions: dict[str, _Question] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def looking_up(self) -> int:
        """Connections of which it isn't known yet whether their user returned."""
        return sum(not returned.known for returned in self._returned.values())

    @property
    def idle(self) -> bool:
        """Nothing is remembered of any connection, and no question or write is under way."""
        return not (self._users or self._connections or self._attached or self._returned or self._tasks)

    # -- what the hub reports ------------------------------------------------------------------------------

    def arrived(self, connection: Connection, user: str, channel: str | None = None) -> None:
        """`connection` signed in as this user, or subscribes to that presence channel as this member. Nothing happens
        in apps without user resume."""
        if not connection.session.app.user_resume_s or not self._add(connection, user):
            return
        # Subscribes that were refused left theirs here.
        self._forget_users(connection)
        returned = self._returned.get(connection)
        if returned is None:
            returned = self._returned[connection] = Returned()
        if returned.needs(user):
            self._spawn(self._look_up(connection, user, channel, returned))

    def left(self, connection: Connection, channel: str, user: str | None) -> None:
        """`connection` unsubscribed from the channel, or was removed from it. It was there as this member, or none."""
        self._attached.leave(connection, channel)
        if user is not None:
            self._forget_users(connection)

    def returned(self, connection: Connection) -> Returned | None:
        """What is known, or being looked up, about the return of this connection's user. None if nothing is missed."""
        returned = self._returned.get(connection)
        if returned is None or not returned.known:
            return returned
        if returned.point is None or returned.until < asyncio.get_running_loop().time():
            return None
        return returned

    def attached(self, connection: Connection, local_channel: LocalChannel, offset: int) -> None:
        """`connection` hears the channel from `offset` on. If its user turns out to have returned, earlier messages are
        replayed up to there."""
        seconds = connection.session.app.user_resume_s
        if seconds:
            now = asyncio.get_running_loop().time()
            self._attached.note(connection, local_channel.channel, offset, seconds, now)
            self._sweep_later()

    def closed(self, connection: Connection) -> None:
        """Write to Redis when bytes last came from the user's connection. Call it before the connection leaves its
        channels: who looks for the user finds it among the holders, or finds the point."""
        age_s = self._age_s(connection)
        if (returned := self._returned.get(connection)) is not None:
            returned.forget()
        users = self._remove(connection)
        self._attached.close(connection)
        app = connection.session.app
        if users and app.user_resume_s:
            heard_at = min(asyncio.get_running_loop().time() - age_s, self._waited_since(connection))
            for user in users:
                self._unwritten.setdefault((app.id, user), []).append(heard_at)
            self._spawn(self._write_points(app, users, heard_at, self._write(app, users, heard_at)))

    def switch(self, connection: Connection) -> None:
        """`user_resume_s` was turned on or off in the app of this open connection."""
        session = connection.session
        if not session.app.user_resume_s:
            self._remove(connection)
            self._attached.close(connection)
            return
        for user in _users_of(connection):
            self._add(connection, user)

    def asked(self, message: SilenceOfUser) -> None:
        """A worker asks over `sys` about a user. This worker answers if it is among those that Redis lists."""
        if self._registry.worker_id in message.of:
            self._spawn(self._answer(message))

    def answered(self, message: UserSilent) -> None:
        """A worker answers over `sys`, this worker or another one that asked."""
        question = self._questions.get(message.id)
        if question is not None:
            question.add(message.worker, message.age_s)

    async def finish(self, timeout_s: float = 1.0) -> None:
        """The worker ends. Its clients connect elsewhere at once, so wait until Redis has all points."""
        if self._timer is not None:
            self._timer.cancel()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
            for task in late:
                task.cancel()

    # -- users and their connections -----------------------------------------------------------------------

    def _add(self, connection: Connection, user: str) -> bool:
        users = self._users.get(connection, ())
        if user in users:
            return False
        self._users[connection] = (*users, user)
        self._connections.setdefault((connection.session.app.id, user), {})[connection] = None
        self._sweep_later()
        return True

    def _forget_users(self, connection: Connection) -> None:
        """Remove those that no sign-in and no subscription of the connection names."""
        users = self._users.get(connection, ())
        if users and not (present := _users_of(connection)).issuperset(users):
            remaining = tuple(user for user in users if user in present)
            if remaining:
                self._users[connection] = remaining
            else:
                del self._users[connection]
                self._unsent_since.pop(connection, None)
            self._disconnect(connection, [user for user in users if user not in present])

    def _disconnect(self, connection: Connection, users: Iterable[str]) -> None:
        for user in users:
            key = (connection.session.app.id, user)
            connections = self._connections[key]
            del connections[connection]
            if not connections:
                del self._connections[key]

    def _remove(self, connection: Connection) -> tuple[str, ...]:
        users = self._users.pop(connection, ())
        self._unsent_since.pop(connection, None)
        self._disconnect(connection, users)
        returned = self._returned.pop(connection, None)
        if returned is not None and not returned.known:
            returned.settle(None, 0.0)
        return users

    def _latest(self, app_id: str, user: str, but: Connection | None = None) -> list[Connection]:
        """The user's latest connections on this worker, in order of arrival, without `but`."""
        newest_first = reversed(self._connections.get((app_id, user), {}))
        latest = list(islice((connection for connection in newest_first if connection is not but), _MAX_PINGED))
        return latest[::-1]

    def _age_s(self, connection: Connection) -> float:
        """How long ago the connection certainly worked: bytes came from it, and none were unsent."""
        since = self._unsent_since.get(connection)
        if since is None or not connection.unsent_bytes:
            return self._janitor.silent_s(connection)
        return max(self._janitor.silent_s(connection), asyncio.get_running_loop().time() - since)

    def _waited_since(self, connection: Connection) -> float:
        """Since when events of channels with a rate have been waiting for the connection, by the loop's time."""
        app_id = connection.session.app.id
        found = (self._registry.local_channel(app_id, channel) for channel in connection.session.channels)
        waits = (local.audience.waits_since(connection) for local in found if local and local.audience is not None)
        return min((since for since in waits if since is not None), default=math.inf)

    # -- a user returns ------------------------------------------------------------------------------------

    async def _look_up(self, connection: Connection, user: str, channel: str | None, returned: Returned) -> None:
        point: int | None = None
        until = 0.0
        try:
            async with asyncio.timeout(_REDIS_AWAY_S):
                while True:
                    await self._link.wait_up()
                    try:
                        point, until = await self._find_point(connection, user, channel)
                        break
                    except LinkDown:
                        continue
        except (TimeoutError, hiredis.ReplyError) as error:
            log.warning("user resume failed", app=connection.session.app.id, reason=str(error) or "no answer")
        returned.settle(point, until)
        if point is not None and connection in self._users:
            self._replay_attached(connection, point)

    async def _find_point(self, connection: Connection, user: str, channel: str | None) -> tuple[int | None, float]:
        app, keys, link = connection.session.app, self._keys, self._link
        members = keys.members(app.id, channel) if channel is not None else None
        now, holders, member = await asyncio.gather(
            link.ask(b"TIME"),
            link.ask(b"HKEYS", keys.counts(app.id, f"%u:{user}")),
            link.ask(b"HGET", members, user) if members is not None else _no_reply(),
        )
        names = (*holders, *MemberEntry.parse(member or b"").holders)
        workers = {name.decode() for name in names} - {self._registry.worker_id}
        others = self._latest(app.id, user, but=connection)
        ages = await asyncio.gather(self._silence(app.id, user, others), self._ask(app, user, sorted(workers)))
        loop = asyncio.get_running_loop()
        now_us = int(now[0]) * 1_000_000 + int(now[1])
        points = [now_us - round((age_s + self.timings.in_flight_s) * 1_000_000) for age_s in ages if age_s is not None]
        until = loop.time() + app.user_resume_s if points else 0.0
        # Last: a connection that ended before its worker was asked, or while it was, has its point there by now.
        written = await self._points.read(app.id, user)
        if written is not None:
            points.append(written[0])
            until = max(until, loop.time() + written[1])
        return min(points, default=None), until

    async def _silence(self, app_id: str, user: str, connections: list[Connection]) -> float | None:
        """Ping these connections of a user. Returns the longest silence of those that don't answer, and of those that
        closed and whose points Redis hasn't yet; None if there are none, as with an open second tab."""
        silent = await self._janitor.ping(connections, _PING, self.timings.pong_s)
        now = asyncio.get_running_loop().time()
        ages = [now - heard_at for heard_at in self._unwritten.get((app_id, user), ())]
        return max((*ages, *map(self._age_s, silent)), default=None)

    async def _ask(self, app: App, user: str, workers: list[str]) -> float | None:
        """The longest silence of the user's connections on these workers, None if none is silent."""
        if not workers:
            return None
        id_ = token_hex(8)
        question = self._questions[id_] = _Question(workers)
        try:
            await self._link.ask(*publication(self._keys, SilenceOfUser(id_, app.id, user, workers)))
            async with asyncio.timeout(self.timings.answers_s):
                await question.complete.wait()
        except TimeoutError:
            # A killed worker is listed until it is reaped. It isn't waited for any longer.
            pass
        finally:
            del self._questions[id_]
        silences = await asyncio.gather(*map(self._stats.silent_s, question.missing))
        ages = (*question.ages, *(min(silent_s, app.user_resume_s + MAX_HANG_S) for silent_s in silences))
        return max((age_s for age_s in ages if age_s is not None), default=None)

    async def _answer(self, message: SilenceOfUser) -> None:
        age_s = await self._silence(message.app, message.user, self._latest(message.app, message.user))
        self._link.call(*publication(self._keys, UserSilent(message.id, age_s, self._registry.worker_id)))

    def _replay_attached(self, connection: Connection, point: int) -> None:
        """Replay the channels that the connection subscribed to before its user was known."""
        app_id = connection.session.app.id
        offsets = self._attached.of(connection)
        for channel in connection.session.channels:
            local_channel = self._registry.local_channel(app_id, channel)
            if local_channel is not None:
                self._replay_missed(local_channel, connection, point, offsets.get(channel))

    # -- a user goes ---------------------------------------------------------------------------------------

    def _write(self, app: App, users: tuple[str, ...], heard_at: float) -> asyncio.Future[Any]:
        ago_s = asyncio.get_running_loop().time() - heard_at + self.timings.in_flight_s
        return self._points.write([ResumePoint(app.id, user, ago_s, app.user_resume_s) for user in users])

    async def _write_points(
        self, app: App, users: tuple[str, ...], heard_at: float, written: asyncio.Future[Any]
    ) -> None:
        try:
            async with asyncio.timeout(app.user_resume_s):
                while True:
                    try:
                        await written
                        return
                    except LinkDown:
                        await self._link.wait_up()
                        written = self._write(app, users, heard_at)
        except (TimeoutError, hiredis.ReplyError) as error:
            log.debug("resume point not written", app=app.id, reason=str(error) or "no answer")
        finally:
            for user in users:
                self._unwritten[app.id, user].remove(heard_at)
                if not self._unwritten[app.id, user]:
                    del self._unwritten[app.id, user]

    # -- once a second, for each connection -----------------------------------------------------------------

    def _sweep_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_SWEEP_S / _PARTS, self._sweep)

    def _sweep(self) -> None:
        """Looks at the next part of the connections, so that neither the looks nor the pings come all at once."""
        self._timer = None
        now = asyncio.get_running_loop().time()
        since = now - self._round_began
        if self._unswept is None and since >= _SWEEP_S:
            # After a pause there was no round before.
            self._round_s = since if self._round_began else _SWEEP_S
            self._round_began = now
            self._part = -(-len(self._users) // _PARTS)
            self._unswept = iter(list(self._users))
        if self._unswept is not None:
            part = list(islice(self._unswept, self._part))
            for connection in part:
                if connection in self._users:
                    self._look(connection, now)
            if len(part) < self._part or not part:
                self._unswept = None
        self._attached.expire(now, _MAX_FORGOTTEN)
        if self._users or self._attached:
            self._sweep_later()
        else:
            self._round_began = 0.0

    def _look(self, connection: Connection, now: float) -> None:
        if not connection.unsent_bytes:
            self._unsent_since.pop(connection, None)
        else:
            self._unsent_since.setdefault(connection, now - self._round_s)
        silent_s = self._janitor.silent_s(connection)
        if silent_s >= _QUIET_S and silent_s % _QUIET_S < self._round_s:
            connection.send(_PING)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _users_of(connection: Connection) -> set[str]:
    """The user who signed in, and the members that the connection's subscriptions name, pending ones included."""
    session = connection.session
    users = {membership.user_id for membership in session.channels.values()} | {session.user_id}
    return {user for user in users if user is not None}


async def _no_reply() -> None:
    return None
