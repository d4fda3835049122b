"""Which channels this worker holds, and that Redis knows it: joins and leaves in, counts and rosters out.

Knows channels, users and tickets, no sockets: a `Listener` attaches those. What Redis is told and when is
cluster.md 5 and 6; the argument why a snapshot and the deltas around it agree stands there too, and leans on
everything here happening in the order in which the one connection brings it.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, Protocol

import hiredis
import msgspec
import structlog

from redpoll.cluster.admissions import Admissions
from redpoll.cluster.commits import Commits
from redpoll.cluster.directory import Directory
from redpoll.cluster.envelopes import cached_envelope, parse_added, parse_count, parse_removed
from redpoll.cluster.held import CHANNEL, CONNECTIONS, PRESENCE, TOPIC, UNKNOWN, Call, Held, Ticket
from redpoll.cluster.incarnation import Incarnation
from redpoll.cluster.keys import Keys
from redpoll.cluster.link import Link, LinkDown
from redpoll.cluster.rosters import Changes, apply_reply, read_again, read_first
from redpoll.cluster.tally import Tally
from redpoll.cluster.users import Users
from redpoll.cluster.watches import Watches
from redpoll.protocol.apps import App
from redpoll.protocol.channels import Kind, is_cache, kind_of

__all__ = ["Held", "Listener", "Registry", "Ticket"]

log = structlog.get_logger(__name__)

_EVENT: Final = ord("e")
_SCAN_COUNT: Final = 200
_KINDS: Final = {Kind.PRESENCE: PRESENCE, Kind.USER: TOPIC}


class Listener(Protocol):
    """Who has the sockets. Called in the order in which things happened in Redis."""

    def opened(self, held: Held) -> None:
        """A channel is held from now on; the place to set `held.audience`."""

    def joined(self, held: Held, tickets: list[Ticket], cached: bytes | None, total: int | None) -> None:
        """Attach these and send success, with `held.roster` as it is now; comes behind the member and count
        frames of the same reply, which are for those attached before.

        Then `cached`, an `e` envelope without a skip: the last event of a cache channel, b"" where there is none,
        None on other channels. Then `total`, where subscribers are told how many they are."""

    def refused(self, held: Held, ticket: Ticket, reason: str) -> None:
        """`members`: the channel is full. `unavailable`: Redis didn't answer in time."""

    def member_added(self, held: Held, user: str, info: bytes) -> None:
        """A user came who wasn't on the roster; `info` is JSON or b""."""

    def member_removed(self, held: Held, user: str) -> None:
        """A user of the roster is gone."""

    def counted(self, held: Held, total: int) -> None:
        """Everyone attached is to be told that so many are, in the whole cluster."""

    def event(self, held: Held, payload: bytes) -> None:
        """An `e` envelope."""

    def dropped(self, held: Held) -> None:
        """The channel isn't held any more, and Redis knows it."""

    def user_state(self, app_id: str, user_id: str, online: bool) -> None:
        """A watched user is online or offline: the first answer about it, then each change."""

    def admitted(self, ticket: Ticket) -> None:
        """This connection counts from now on, until `depart`."""

    def turned_away(self, ticket: Ticket, code: int) -> None:
        """Close it: 4004, the app has as many connections as it may have; 4100, nobody knows in time."""


def _no_message(message: dict[str, Any]) -> None:
    pass


class Registry:
    """One per worker. Takes over the link's callbacks.

    `on_sys(message)` gets what comes over `sys` for others than the directory. `ready` says whether clients
    may be let in. The times are those of cluster.md; tests shorten them.

    `sign_in(app, user_id)`, `sign_out(app_id, user_id)`: users.py. `watch(app_id, user_id)`, `unwatch`:
    watches.py. `admit(app, ticket)` for each connection, `depart(app_id)` for each admitted one: admissions.py.
    """

    def __init__(
        self,
        link: Link,
        keys: Keys,
        listener: Listener,
        directory: Directory,
        run: str,
        k: int,
        *,
        on_sys: Callable[[dict[str, Any]], None] = _no_message,
        beat_s: float = 1.0,
        unanswered_s: float = 10.0,
        away_s: float = 5.0,
        second_look_s: float = 5.0,
        offline_s: float = 3.0,
        admit_again_s: float = 0.5,
        admit_most_s: float = 7.0,
        join_wait_s: float = 30.0,
        retry_s: float = 0.05,
        greatest_retry_s: float = 1.0,
    ) -> None:
        self.on_sys = on_sys
        self.fenced = 0
        self._link = link
        self._keys = keys
        self._listener = listener
        self._event = listener.event
        self._directory = directory
        self._silent_s = away_s + beat_s
        self._second_look_s = second_look_s
        self._join_wait_s = join_wait_s
        self._incarnation = Incarnation(
            link,
            keys,
            run,
            k,
            on_fenced=self._fence,
            on_beat=directory.saw,
            beat_s=beat_s,
            unanswered_s=unanswered_s,
        )
        self._commits = Commits(
            link,
            keys,
            self._incarnation,
            on_ok=self._apply,
            on_heard=self._listening,
            on_idle=self._drop,
            on_fenced=self._fence,
            on_settled=self._settled,
            retry_s=retry_s,
            greatest_retry_s=greatest_retry_s,
        )
        users = Users(self._hold, self._commits.touch)
        self.sign_in, self.sign_out, self._switch_watchlist = users.sign_in, users.sign_out, users.switch
        self._watches = Watches(
            link,
            keys,
            listener.user_state,
            offline_s=offline_s,
            second_look_s=second_look_s,
            retry_s=retry_s,
        )
        self.watch, self.unwatch = self._watches.watch, self._watches.unwatch
        self._admissions = Admissions(
            link,
            keys,
            self._hold,
            self._commits.touch,
            lambda: self._incarnation.name,
            on_admitted=listener.admitted,
            on_turned_away=listener.turned_away,
            again_s=admit_again_s,
            most_s=admit_most_s,
            away_s=away_s,
        )
        self.admit, self.depart = self._admissions.admit, self._admissions.depart
        self._held: dict[tuple[str, str], Held] = {}
        self._topics: dict[bytes, Held] = {}
        self._fencing = False
        self._rising: asyncio.Task[None] | None = None
        self._scans: set[asyncio.Task[None]] = set()
        # Counts breaks, so that what began on one connection doesn't end on another.
        self._connection = 0
        self._pending: deque[Ticket] = deque()
        self._expiry: asyncio.TimerHandle | None = None
        self._emptied = asyncio.Event()
        self._risen = asyncio.Event()
        link.on_push = self.message
        link.on_up = self._up
        link.on_down = self._down

    @property
    def w(self) -> str:
        """This worker's name in Redis now; another one after it was fenced."""
        return self._incarnation.w

    @property
    def ready(self) -> bool:
        """Redis answers, or has been silent for less than `away_s`, and the directory is known."""
        silent_s = self._link.clock() - self._incarnation.heard_at
        return self._risen.is_set() and self._directory.complete and silent_s < self._silent_s

    @property
    def errors(self) -> int:
        """Calls that Redis answered with an error, each of them repeated; for /metrics."""
        return self._commits.errors + self._incarnation.errors + self._watches.errors

    @property
    def channels(self) -> int:
        """How many channels have a subscriber here, or are about to."""
        return len(self._topics)

    def held(self, app_id: str, channel: str) -> Held | None:
        return self._held.get((app_id, channel))

    def helds(self) -> Iterable[Held]:
        """Channels and pseudo-channels; the former are those that listen."""
        return self._held.values()

    async def start(self) -> None:
        """The worker's start (cluster.md 6): returns when Redis knows this worker, however long that takes.
        The directory may still be on its way: see `ready`."""
        self._link.start()
        self._incarnation.start()
        self._expire()
        await self._risen.wait()

    async def finish(self, timeout_s: float = 5.0) -> bool:
        """The clean end, when the listener has let go of every socket: waits until Redis knows, and takes
        this worker out of it. False: something is left, and the reaper will find it."""
        clean = False
        try:
            async with asyncio.timeout(timeout_s):
                self._commits.ending = True
                for held in list(self._held.values()):
                    if held.tally is not None and not held.tally.settled:
                        self._count(held)
                while self._held:
                    self._emptied.clear()
                    await self._emptied.wait()
                clean = await self._incarnation.bury()
        except (TimeoutError, LinkDown, hiredis.ReplyError) as error:
            log.warning("not taken out of redis", w=self.w, reason=str(error) or "timeout")
        self.close()
        return clean

    def close(self) -> None:
        """Stops timers and tasks, and lets go of the link; what Redis has in our name stays there."""
        self._link.let_go()
        self._commits.lose()
        self._watches.close()
        self._admissions.close()
        for held in self._held.values():
            if held.tally is not None:
                held.tally.rest()
        self._incarnation.close()
        self._directory.close()
        for task in self._scans | ({self._rising} if self._rising else set()):
            task.cancel()
        if self._expiry is not None:
            self._expiry.cancel()

    # What the worker says.

    def join(self, app: App, channel: str, ticket: Ticket) -> Held:
        """A subscribe. The outcome comes as `joined` or `refused` with this ticket, never from within this
        call. A user's channel is joined when its topic is heard; the rest follows from the app and the name."""
        held = self._held.get((app.id, channel))
        if held is None:
            held = self._open(app.id, channel, _KINDS.get(kind_of(channel), CHANNEL))
        if held.kind == PRESENCE:
            held.cap = app.max_presence_members
        held.caches = is_cache(channel)
        self._switch_count(held, app.subscription_count)
        ticket.since = self._link.clock()
        held.wait(ticket)
        self._pending.append(ticket)
        self._commits.touch(held)
        return held

    def cancel(self, ticket: Ticket) -> None:
        """Withdraws a subscribe or a connection that waits; without effect on one that was answered."""
        self._admissions.forget(ticket)
        held = ticket.held
        if held is not None:
            held.withdraw(ticket)
            self._commits.touch(held)

    def leave(self, app_id: str, channel: str, user: str | None = None) -> None:
        """An attached socket is detached. `user` is the one it joined with, on presence channels."""
        held = self._held[(app_id, channel)]
        held.detach(user)
        self._commits.touch(held)

    def app_changed(self, old: App | None, new: App | None) -> None:
        """An app's record changed: what it turned on is told with what is held, what it turned off is taken
        back (cluster.md 6). Of an app that is gone the listener closes the sockets."""
        if old is None or new is None:
            return
        self._switch_watchlist(new.id, new.watchlist)
        self._admissions.limit(new.id, new.max_connections)
        if old.subscription_count != new.subscription_count:
            for held in list(self._held.values()):
                if held.app_id == new.id and self._switch_count(held, new.subscription_count):
                    self._count(held)

    def _switch_count(self, held: Held, on: bool) -> bool:
        # True: subscribers of this channel are told their number from now on.
        if held.kind != CHANNEL or on == (held.tally is not None):
            return False
        if held.tally is not None:
            held.tally.rest()
        held.tally = Tally() if on else None
        return on

    def _count(self, held: Held) -> None:
        if held.tally is not None and not held.dropped:
            held.tally.hurry()
            self._commits.touch(held)

    def _hold(self, app_id: str, channel: str, kind: str) -> Held:
        # A channel, or a pseudo-channel that no listener hears of.
        return self._held.get((app_id, channel)) or self._open(app_id, channel, kind)

    def _open(self, app_id: str, channel: str, kind: str) -> Held:
        held = Held(app_id, channel, kind, self._keys.topic(app_id, channel))
        self._held[(app_id, channel)] = held
        if held.listens:
            self._topics[held.topic] = held
            self._listener.opened(held)
        return held

    def _drop(self, held: Held) -> None:
        held.dropped = True
        del self._held[(held.app_id, held.channel)]
        self._commits.forget(held)
        if held.listens:
            del self._topics[held.topic]
            self._listener.dropped(held)
        if not self._held:
            self._emptied.set()

    def _expire(self) -> None:
        # Joins wait for a Redis that is away, but not for ever: 4100 sends the client elsewhere.
        loop = asyncio.get_running_loop()
        self._expiry = loop.call_later(min(1.0, self._join_wait_s / 4), self._expire)
        before = self._link.clock() - self._join_wait_s
        while self._pending:
            ticket = self._pending[0]
            held = ticket.held if not ticket.cancelled else None
            if held is not None and ticket.since > before:
                return
            self._pending.popleft()
            if held is not None:
                held.withdraw(ticket)
                self._listener.refused(held, ticket, "unavailable")
                self._commits.touch(held)

    # What Redis says.

    def message(self, topic: bytes, payload: bytes) -> None:
        """A push. The hot path: events go on to the listener as they are."""
        held = self._topics.get(topic)
        if held is None:
            if topic == self._keys.sys:
                self._heard(payload)
            else:
                self._watches.message(topic, payload)
        elif payload[0] == _EVENT:
            self._event(held, payload)
        else:
            self._delta(held, payload)

    def _heard(self, payload: bytes) -> None:
        message = msgspec.json.decode(payload)
        if "dir" in message:
            self._directory.heard(message["dir"])
        else:
            self.on_sys(message)

    def _delta(self, held: Held, payload: bytes) -> None:
        roster = held.roster
        if payload[:1] == b"n":
            self._told(held, payload)
            return
        # Before the first roster there is nothing to apply it to. What we did ourselves the reply says, since
        # our own pushes come before it on one server and behind it on another (cluster.md rule 3).
        if roster is None or payload[2 : payload.index(b" ", 2)] == self._incarnation.name:
            return
        if payload[:1] == b"m":
            added = parse_added(payload)
            if roster.add(added.user, added.info):
                self._listener.member_added(held, added.user, added.info)
        elif payload[:1] == b"r":
            user = parse_removed(payload).user
            if roster.remove(user):
                self._listener.member_removed(held, user)

    def _told(self, held: Held, payload: bytes) -> None:
        tally = held.tally
        if tally is None or payload[2 : payload.index(b" ", 2)] == self._incarnation.name:
            return
        total = parse_count(payload)
        # While Redis is being told again after a break, our changes aren't in this number yet.
        news = tally.pushed(total) if held.asserted else tally.heard(total)
        if news and held.attached:
            self._listener.counted(held, total)
        self._commits.touch(held)

    def _listening(self, held: Held) -> None:
        self._listener.joined(held, held.listen(), None, None)

    def _apply(self, held: Held, call: Call, reply: list[Any]) -> None:
        _, _, accepted, added, removed = reply[:5]
        rest = reply[5:]
        attached = held.attached
        joined, refused = held.accept(call, accepted)
        if held.kind == CONNECTIONS:
            self._admissions.answered(held, joined, refused)
            return
        changes = Changes()
        if call.roster:
            changes = self._read_roster(held, call, rest.pop(0))
        elif held.roster is not None:
            changes = apply_reply(held.roster, call, added, removed)
        for user in changes.removed:
            self._listener.member_removed(held, user)
        for user, info in changes.added:
            self._listener.member_added(held, user, info)
        cached = self._read_cached(rest.pop(0)) if "c" in call.flags else None
        total = None
        if "s" in call.flags and held.tally is not None:
            total, due_ms = rest
            if held.tally.answered(total, due_ms, partial(self._count_later, held)) and attached:
                self._listener.counted(held, total)
        if joined:
            if total is not None and held.tally is not None:
                held.tally.joined(total, alone=not attached)
            self._listener.joined(held, joined, cached, total)
        for ticket in refused:
            self._listener.refused(held, ticket, "members")

    @staticmethod
    def _read_cached(tail: bytes | None) -> bytes:
        return b"" if tail is None else cached_envelope(tail)

    def _count_later(self, held: Held, delay_s: float) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay_s, self._count, held)

    def _read_roster(self, held: Held, call: Call, flat: list[bytes]) -> Changes:
        name = self._incarnation.name
        if held.roster is None:
            held.roster, changes = read_first(flat, name)
        else:
            changes = read_again(held.roster, flat, name, final=call.look)
        # Listed in our name without a socket: a join whose reply was lost.
        held.forsake(changes.ours)
        if changes.missing:
            loop = asyncio.get_running_loop()
            loop.call_later(self._second_look_s, self._look_again, held, self._connection)
        return changes

    def _look_again(self, held: Held, connection: int) -> None:
        # A later connection looks for itself, since the other workers may be just as far behind again.
        if connection == self._connection and not held.dropped:
            held.look = True
            self._commits.touch(held)

    # The connection comes, goes, and is fenced.

    def _up(self) -> None:
        self._rising = asyncio.get_running_loop().create_task(self._rise(), name="registry rise")

    def _down(self, reason: str) -> None:
        self._connection += 1
        self._fencing = False
        if self._rising is not None:
            self._rising.cancel()
            self._rising = None
        self._incarnation.down()
        self._commits.lose()
        self._watches.lose()
        for held in self._held.values():
            held.lose()

    def _fence(self) -> None:
        if self._fencing or not self._link.up:
            return
        self.fenced += 1
        self._fencing = True
        self._commits.stop()
        self._settled()

    def _settled(self) -> None:
        # Either everything was told again, and changes that waited may go, or we were fenced and the last
        # call in the old name is answered: only then the next name is taken, so that no reply is misread.
        if not self._fencing:
            for held in list(self._held.values()):
                self._commits.touch(held)
        elif self._rising is None and self._commits.in_flight == 0:
            self._up()

    async def _rise(self) -> None:
        before = self._incarnation.w if self._incarnation.gen else None
        try:
            if self._fencing:
                self._incarnation.fence()
            fields = await self._incarnation.rise()
        except LinkDown:
            return
        except Exception:
            log.exception("could not register")
            self._link.drop("could not register")
            return
        self._fencing = False
        self._rising = None
        if self._incarnation.w != before:
            for held in self._held.values():
                held.renew()
        for held in list(self._held.values()):
            if held.scan:
                held.blocked = held.scan = False
                if f"{held.app_id}:{held.channel}" in fields:
                    self._clear_away(held)
        for field, value in fields.items():
            app_id, _, channel = field.partition(":")
            if (app_id, channel) not in self._held:
                self._clear_away(self._open(app_id, channel, value[0]))
        self._risen.set()
        self._watches.tell()
        self._commits.tell(self._held.values(), self._keys.sys)

    def _clear_away(self, held: Held) -> None:
        # Redis lists a channel that we don't hold. Its users must be known before the count goes to 0, which
        # would hide them from a reaper; until then the channel is busy.
        held.confirmed = UNKNOWN
        app = self._directory.by_id.get(held.app_id)
        if app is not None:
            self._switch_count(held, app.subscription_count)
        if held.gone is not None:
            held.blocked = held.scan = True
            task = asyncio.get_running_loop().create_task(self._scan(held))
            self._scans.add(task)
            task.add_done_callback(self._scans.discard)

    async def _scan(self, held: Held) -> None:
        key = self._keys.members(held.app_id, held.channel)
        connection, name = self._connection, self._incarnation.name
        cursor: bytes | int = 0
        try:
            while True:
                cursor, flat = await self._link.ask(b"HSCAN", key, cursor, b"COUNT", _SCAN_COUNT)
                _, page = read_first(flat, name)
                held.forsake(page.ours)
                if int(cursor) == 0:
                    break
        except LinkDown:
            # `scan` stands, so the next connection begins anew.
            return
        except hiredis.ReplyError as error:
            self._link.drop(f"HSCAN failed: {error}")
            return
        if connection == self._connection:
            held.blocked = held.scan = False
            self._commits.touch(held)
