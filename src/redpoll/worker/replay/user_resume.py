"""User resume: who comes back within the app's `user_resume_s` is told what was missed, without asking (cluster.md 8).

For stock clients, by the user: signed in, or member of a presence channel. When the last bytes came from a user's
socket is written to Redis as it closes; but a client is often back before the death of its old socket is noticed, so
the workers that have others of the same user are asked too. At least once: what came just before the break may come
again. Who recovers by naming a place has no need of this, and is left out of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import hiredis
import msgspec
import structlog

from redpoll import _engine, _frame
from redpoll.cluster.keys import Keys
from redpoll.cluster.link import Link, LinkDown
from redpoll.protocol.apps import App

if TYPE_CHECKING:
    from redpoll.cluster.membership.registry import LocalChannel
    from redpoll.worker.connection import Connection
    from redpoll.worker.hub import Hub
    from redpoll.worker.janitor import Janitor

__all__ = ["QUESTION", "Returned", "UserResume"]

log = structlog.get_logger()

# What workers ask each other over `sys`.
QUESTION = "resume"
# Of what was sent before the last bytes came, the peer may have missed this much: it was on its way.
_UNDER_WAY_S = 1.0
# The answers of other workers are waited for so long, which includes their time to see which sockets live.
_ANSWERS_S = 0.2
_SIGN_OF_LIFE_S = 0.12
_LOOK_S = 0.01
# How long Redis, being away, is waited for.
_AWAY_S = 30.0
_SWEEP_S = 1.0
# A client that only listens says nothing for minutes, and would be told all of that again: it is asked for a pong.
_QUIET_S = 15
_PING = _frame.ping()
# Of one user, the latest: some apps have one name for all their guests, and who comes back is one of the last.
_MOST_PINGED = 32

Tell = Callable[[int | None], None]


class Returned:
    """A connection of somebody who may have been here before. `point` is the offset from which on something may have
    been missed, None for none; `until` is when that doesn't matter any more, by the loop's clock."""

    __slots__ = ("_waiting", "point", "until")

    def __init__(self) -> None:
        self.point: int | None = None
        self.until = 0.0
        self._waiting: list[Tell] | None = []

    @property
    def known(self) -> bool:
        return self._waiting is None

    def tell(self, told: Tell) -> None:
        """`told` gets the point, at once or as soon as it is known."""
        if self._waiting is None:
            told(self.point)
        else:
            self._waiting.append(told)

    def settle(self, point: int | None, until: float) -> None:
        """An answer. Where there are several, of one who is two users, the least counts."""
        if point is not None:
            self.point = point if self.point is None else min(self.point, point)
            self.until = max(self.until, until)
        waiting, self._waiting = self._waiting, None
        for told in waiting or ():
            told(self.point)


class UserResume:
    """One per worker. Costs nothing but a look at the app where that has no `user_resume_s`."""

    def __init__(self, hub: Hub, link: Link, keys: Keys, janitor: Janitor) -> None:
        self._hub = hub
        self._link = link
        self._keys = keys
        self._janitor = janitor
        # Who is whom, in apps that resume: both ways, and what is known of a return.
        self._sockets: dict[tuple[str, str], list[Connection]] = {}
        self._users: dict[Connection, tuple[str, ...]] = {}
        self._returned: dict[Connection, Returned] = {}
        # Since when something has been owed to them, as far as was seen.
        self._owing: dict[Connection, float] = {}
        # The offset behind which a socket hears a channel, by channel, and when it was noted: who it is may be said
        # later.
        self._places: dict[Connection, dict[str, int]] = {}
        self._noted: deque[tuple[float, Connection, str]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # -- what the hub tells --------------------------------------------------------------------------------

    def arrived(self, connection: Connection, user: str, channel: str | None = None) -> None:
        """`connection` is this user's: it signed in, or subscribes to that presence channel."""
        if self._know(connection, user):
            returned = self._returned.get(connection)
            if returned is None:
                returned = self._returned[connection] = Returned()
            self._spawn(self._look_up(connection, user, channel, returned))

    def returned(self, connection: Connection) -> Returned | None:
        """What is known, or being found out, about the return of whoever this is; None where it doesn't matter."""
        returned = self._returned.get(connection)
        if returned is None or not returned.known:
            return returned
        if returned.point is None or returned.until < asyncio.get_running_loop().time():
            return None
        return returned

    def attached(self, connection: Connection, local_channel: LocalChannel, place: int) -> None:
        """This socket hears of the channel what lies behind `place`: should it turn out who it is, it is told what
        lies before."""
        if connection.session.app.user_resume_s:
            self._places.setdefault(connection, {})[local_channel.channel] = place
            self._noted.append((asyncio.get_running_loop().time(), connection, local_channel.channel))
            self._sweep_later()

    def closed(self, connection: Connection) -> None:
        """The last word about it is left for its user's next one."""
        self._places.pop(connection, None)
        age_s = self._age_s(connection)
        users = self._forget(connection)
        app = connection.session.app
        if users and app.user_resume_s:
            self._spawn(self._leave_word(app, users, age_s))

    def app_changed(self, old: App, new: App, connections: Iterable[Connection]) -> None:
        """Turned on: those who are here may come back. Turned off: nothing is known of anybody."""
        if bool(old.user_resume_s) == bool(new.user_resume_s):
            return
        for connection in connections:
            if not new.user_resume_s:
                self._forget(connection)
                self._places.pop(connection, None)
                continue
            session = connection.session
            members = [each.user_id for each in session.channels.values() if each.user_id is not None]
            for user in (*members, *([session.user_id] if session.user_id is not None else [])):
                self._know(connection, user)

    def asked(self, message: dict[str, Any], w: str, answer: Callable[[str, str, Any], None]) -> None:
        """Another worker has a socket of a user of whom Redis says that we have one."""
        if w in message["of"]:
            self._spawn(self._tell(message, w, answer))

    async def finish(self, timeout_s: float = 1.0) -> None:
        """The worker ends: its clients are elsewhere in a moment, so the words about them are waited for."""
        if self._timer is not None:
            self._timer.cancel()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
            for task in late:
                task.cancel()

    # -- who is whom ---------------------------------------------------------------------------------------

    def _know(self, connection: Connection, user: str) -> bool:
        users = self._users.get(connection, ())
        if user in users:
            return False
        self._users[connection] = (*users, user)
        self._sockets.setdefault((connection.session.app.id, user), []).append(connection)
        self._sweep_later()
        return True

    def _forget(self, connection: Connection) -> tuple[str, ...]:
        users = self._users.pop(connection, ())
        self._owing.pop(connection, None)
        for user in users:
            key = (connection.session.app.id, user)
            sockets = self._sockets[key]
            sockets.remove(connection)
            if not sockets:
                del self._sockets[key]
        returned = self._returned.pop(connection, None)
        if returned is not None and not returned.known:
            returned.settle(None, 0.0)
        return users

    def _age_s(self, connection: Connection) -> float:
        """How long ago it was surely there, and owed nothing."""
        since = self._owing.get(connection)
        if since is None or not connection.bytes_owed:
            return self._janitor.silent_s(connection)
        return max(self._janitor.silent_s(connection), asyncio.get_running_loop().time() - since)

    # -- a return ------------------------------------------------------------------------------------------

    async def _look_up(self, connection: Connection, user: str, channel: str | None, returned: Returned) -> None:
        point: int | None = None
        until = 0.0
        try:
            async with asyncio.timeout(_AWAY_S):
                while True:
                    await self._link.wait_up()
                    try:
                        point, until = await self._find(connection, user, channel)
                        break
                    except LinkDown:
                        continue
        except (TimeoutError, hiredis.ReplyError) as error:
            log.warning("user resume failed", app=connection.session.app.id, reason=str(error) or "no answer")
        returned.settle(point, until)
        if point is not None and connection in self._users:
            self._fill(connection, point)

    async def _find(self, connection: Connection, user: str, channel: str | None) -> tuple[int | None, float]:
        app, keys, link = connection.session.app, self._keys, self._link
        word = keys.resumed(app.id, user)
        members = keys.members(app.id, channel) if channel is not None else None
        now, left, ttl_ms, holders, listed = await asyncio.gather(
            link.ask(b"TIME"),
            link.ask(b"GET", word),
            link.ask(b"PTTL", word),
            link.ask(b"HKEYS", keys.counts(app.id, f"%u:{user}")),
            link.ask(b"HGET", members, user) if members is not None else _nobody(),
        )
        loop = asyncio.get_running_loop()
        now_us = int(now[0]) * 1_000_000 + int(now[1])
        points: list[int] = []
        until = 0.0
        if left is not None:
            points.append(int(left))
            until = loop.time() + ttl_ms / 1000
        mine = self._hub.registry.w
        of = {each.decode() for each in (*holders, *(listed or b"").partition(b"\n")[0].split())} - {mine}
        sockets = [each for each in self._sockets.get((app.id, user), ()) if each is not connection]
        ages = await asyncio.gather(self._silence(sockets), self._ask(app.id, user, sorted(of)))
        for age_s in ages:
            if age_s is not None:
                points.append(now_us - round((age_s + _UNDER_WAY_S) * 1_000_000))
                until = max(until, loop.time() + app.user_resume_s)
        return min(points, default=None), until

    async def _silence(self, sockets: list[Connection]) -> float | None:
        """The longest silence of those that don't answer a ping now, None if all do: another tab isn't gone."""
        sockets = sockets[-_MOST_PINGED:]
        tick = 0
        for connection in sockets:
            tick = self._janitor.listen(connection)
            connection.send(_PING)
        waits_until = asyncio.get_running_loop().time() + _SIGN_OF_LIFE_S
        silent = sockets
        while silent:
            await asyncio.sleep(_LOOK_S)
            silent = [each for each in silent if each.state == _engine.OPEN and each.heard_tick < tick]
            if asyncio.get_running_loop().time() > waits_until:
                break
        return max(map(self._age_s, silent), default=None)

    async def _ask(self, app_id: str, user: str, of: list[str]) -> float | None:
        if not of:
            return None
        question = token_hex(8)
        about = {"ask": QUESTION, "id": question, "app": app_id, "user": user, "of": of}
        await self._link.ask(self._keys.publish, self._keys.sys, msgspec.json.encode(about))
        waits_until = asyncio.get_running_loop().time() + _ANSWERS_S
        told: list[bytes] = []
        # A worker that was killed is among them until it is reaped: nobody waits longer for it.
        while len(told) < len(of) and asyncio.get_running_loop().time() < waits_until:
            await asyncio.sleep(_LOOK_S)
            told = await self._link.ask(b"LRANGE", self._keys.answers(question), 0, -1)
        ages = [age_s for _, age_s in map(msgspec.json.decode, told) if age_s is not None]
        return max(ages, default=None)

    async def _tell(self, message: dict[str, Any], w: str, answer: Callable[[str, str, Any], None]) -> None:
        age_s = await self._silence(list(self._sockets.get((message["app"], message["user"]), ())))
        answer(message["id"], w, age_s)

    def _fill(self, connection: Connection, point: int) -> None:
        """The channels that were there before it was known who this is."""
        app_id = connection.session.app.id
        places = self._places.get(connection, {})
        for channel in connection.session.channels:
            local_channel = self._hub.registry.local_channel(app_id, channel)
            place = places.get(channel)
            if local_channel is None:
                continue
            if place is None:
                self._hub.rewinds.bring_forward(local_channel, connection, point)
            elif point < place:
                self._hub.rewinds.fill(local_channel, connection, point, place)

    # -- a departure ---------------------------------------------------------------------------------------

    async def _leave_word(self, app: App, users: tuple[str, ...], age_s: float) -> None:
        loop = asyncio.get_running_loop()
        then = loop.time() - age_s - _UNDER_WAY_S
        try:
            async with asyncio.timeout(app.user_resume_s):
                await self._link.wait_up()
                now = await self._link.ask(b"TIME")
        except (TimeoutError, LinkDown, hiredis.ReplyError) as error:
            log.debug("no word left", app=app.id, reason=str(error) or "no answer")
            return
        point = int(now[0]) * 1_000_000 + int(now[1]) - round((loop.time() - then) * 1_000_000)
        for user in users:
            self._link.call(b"SET", self._keys.resumed(app.id, user), max(0, point), b"EX", app.user_resume_s)

    # -- what time brings ----------------------------------------------------------------------------------

    def _sweep_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        for connection in self._users:
            if not connection.bytes_owed:
                self._owing.pop(connection, None)
            else:
                self._owing.setdefault(connection, now - _SWEEP_S)
            silent_s = self._janitor.silent_s(connection)
            if silent_s >= _QUIET_S and silent_s % _QUIET_S < _SWEEP_S:
                connection.send(_PING)
        while self._noted:
            noted, connection, channel = self._noted[0]
            places = self._places.get(connection)
            if places is not None and noted + connection.session.app.user_resume_s > now:
                break
            self._noted.popleft()
            if places is not None:
                # A later note of the same channel goes with it: that was a second subscribe within the time.
                places.pop(channel, None)
                if not places:
                    del self._places[connection]
        if self._users or self._noted:
            self._sweep_later()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _nobody() -> None:
    return None
