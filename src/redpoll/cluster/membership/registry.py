"""Keeps Redis informed of the channels that this worker holds, and reports what changes in them.

The hub calls `join`, `leave` and `cancel`; the registry answers with the calls of `MembershipEvents`. It knows
channels, users and tickets, but no sockets. This module connects the parts of the package and routes the pushes of the
one Redis connection to them. cluster/membership/README.md "hold" and "Reconnecting" describe the protocol; its
correctness depends on handling replies and pushes in the order in which the connection brings them.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final

import hiredis
import structlog

from redpoll.cluster.canary import Canary
from redpoll.cluster.directory import Directory, DirectoryChanged
from redpoll.cluster.envelopes import Envelope, parse_added, parse_removed, worker_of
from redpoll.cluster.history import History
from redpoll.cluster.membership.catchup import Catchup
from redpoll.cluster.membership.connection_limit import ConnectionLimit
from redpoll.cluster.membership.connection_state import ALL_SHARDS, Connection, ConnectionState, Reach
from redpoll.cluster.membership.counts import Counts
from redpoll.cluster.membership.incarnation import Incarnation
from redpoll.cluster.membership.local_channel import LocalChannel, Ticket
from redpoll.cluster.membership.local_channels import LocalChannels
from redpoll.cluster.membership.membership_events import MembershipEvents
from redpoll.cluster.membership.online import Online
from redpoll.cluster.membership.pending import Pending
from redpoll.cluster.membership.reconnect import Reconnect
from redpoll.cluster.membership.replies import Replies
from redpoll.cluster.membership.signed_in import SignedIn, needs_sign_ins
from redpoll.cluster.membership.sync import Sync
from redpoll.cluster.membership.timings import Timings
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link, LinkDown
from redpoll.cluster.survey import Answerers
from redpoll.loop.slices import Cursor, Slices
from redpoll.protocol.apps import App

__all__ = ["LocalChannel", "MembershipEvents", "Registry", "Ticket", "Timings"]

log = structlog.get_logger(__name__)

_EVENT: Final = ord(Envelope.EVENT)
_MEMBER_ADDED: Final = ord(Envelope.MEMBER_ADDED)
_MEMBER_REMOVED: Final = ord(Envelope.MEMBER_REMOVED)
_COUNT: Final = ord(Envelope.COUNT)
_CONSOLE_COPY: Final = ord(Envelope.CONSOLE_COPY)
_HISTORY_CLEARED: Final = ord(Envelope.HISTORY_CLEARED)

# The parts of an app's record that channels follow while they are held. Other parts change often (console_until).
_FOLLOWED: Final = ("history", "hooks", "max_history_channels", "max_presence_members", "subscription_count")

# Subscribes that waited too long and are refused in one pass of the loop.
_MAX_REFUSED: Final = 100
# Channels that follow a changed record in one step.
_MAX_FOLLOWING: Final = 100


def _ignore(message: Any) -> None:
    pass


class Registry:
    """One per worker. Takes over the link's callbacks.

    `answerers` gets the messages on the topic `sys`; this class adds the directory's. `debounce_s` is as in `Sync`.

    Signed-in users: `sign_in(app, user_id)` and `sign_out(app_id, user_id)`, see signed_in.py. Watched users:
    `watch(app_id, user_id)` and `unwatch`, see online.py. Connections: `admit(app, ticket)` for each one, and
    `depart(app_id)` for each admitted one, see connection_limit.py.
    """

    def __init__(
        self,
        link: Link,
        keys: Keys,
        events: MembershipEvents,
        directory: Directory,
        run: str,
        k: int,
        answerers: Answerers,
        *,
        timings: Timings | None = None,
        debounce_s: float = 3.0,
    ) -> None:
        timings = timings or Timings()
        answerers.hear(DirectoryChanged, directory.apply)
        self._answerers = answerers
        self.history = History(link, keys)
        self.canary = Canary(link, keys, run, k, timings.canary_s)
        self._link = link
        self._sys = keys.sys
        self._events = events
        self._on_event = events.event
        self._directory = directory
        self._timings = timings
        self._connection = Connection()
        self._channels = LocalChannels(keys, events)
        self._by_topic = self._channels.by_topic
        self._incarnation = Incarnation(link, keys, run, k, directory, timings)
        self._counts = Counts(self._channels, events)
        self._catchup = Catchup(self.history, events, timings)
        self.signed_in = SignedIn(self._channels)
        self.online = Online(link, keys, self.signed_in, events, timings)
        self.connection_limit = ConnectionLimit(link, keys, self._channels, self._incarnation, events, timings)
        self._pending = Pending()
        replies = Replies(
            events,
            self._pending,
            self._incarnation,
            self._connection,
            self._channels,
            self._counts,
            self._catchup,
            self.connection_limit,
            timings,
        )
        self._sync = Sync(
            link,
            keys,
            self._incarnation,
            self._connection,
            self._channels,
            replies,
            timings,
            debounce_s=debounce_s,
        )
        self._reconnect = Reconnect(
            link,
            keys,
            self._connection,
            self._incarnation,
            self._channels,
            self._sync,
            self._catchup,
            self.online,
            self.canary,
            self._follow_record,
        )
        self._reach = Reach.DOWN
        # Called with True when Redis delivers no messages, and with False when it does again.
        self.on_deaf: Callable[[bool], None] = _ignore
        self.canary.on_change = self._messages_stopped
        # Called with each new value of `reach`.
        self.on_reach: Callable[[Reach], None] = _ignore
        self._connection.on_change = self._reach_changed
        self._expiry: asyncio.TimerHandle | None = None
        # By app: the channels that are yet to follow its changed record.
        self._following: dict[str, tuple[App, Cursor[LocalChannel]]] = {}
        self._follow_slices = Slices(self._follow_some)
        link.on_push = self.push

    @property
    def w(self) -> str:
        """This worker's name in Redis. It changes when the worker is fenced."""
        return self._incarnation.w

    @property
    def connection_state(self) -> ConnectionState:
        """The state of the connection to Redis; for /metrics."""
        return self._connection.state

    @property
    def reach(self) -> Reach:
        """Whether events reach this worker."""
        if self.canary.broken or self._connection.state in (ConnectionState.DOWN, ConnectionState.PARTLY):
            return Reach.DOWN
        return Reach.SUBSCRIBED if self._connection.subscribed else Reach.CONNECTING

    def _reach_changed(self) -> None:
        if self.reach is not self._reach:
            self._reach = self.reach
            self.on_reach(self._reach)

    def _messages_stopped(self, broken: bool) -> None:
        self.on_deaf(broken)
        self._reach_changed()

    @property
    def ready(self) -> bool:
        """Whether clients may be admitted: Redis answered lately and delivers messages, and the directory is
        complete."""
        if self.canary.broken:
            return False
        silent_s = self._link.clock() - self._incarnation.answered_at
        max_silent_s = self._timings.away_s + self._timings.beat_s
        return self._reconnect.was_registered and self._directory.complete and silent_s < max_silent_s

    @property
    def fenced(self) -> int:
        """How often Redis or the reaper gave our name up."""
        return self._reconnect.fenced

    @property
    def errors(self) -> int:
        """Calls that Redis answered with an error; each of them is repeated. For /metrics."""
        return self._sync.errors + self._incarnation.errors + self.online.errors + self._catchup.errors

    @property
    def unhooked(self) -> int:
        """Webhook rows that were not written because too many are unread. For /metrics."""
        return self._sync.unhooked

    @property
    def catchups(self) -> int:
        """How often a channel caught up from its history. For /metrics."""
        return self._catchup.begun

    @property
    def histories_lost(self) -> int:
        """How often subscribers got a message about a gap or a new history. For /metrics."""
        return self._catchup.lost

    @property
    def channels(self) -> int:
        """How many channels have a subscriber here, or are about to."""
        return len(self._by_topic)

    @property
    def occupied_channels(self) -> int:
        """How many channels have an attached subscriber here. For /metrics."""
        return self._channels.occupied

    @property
    def subscriptions(self) -> int:
        """How many subscribers are attached here. For /metrics."""
        return self._channels.subscriptions

    def local_channel(self, app_id: str, channel: str) -> LocalChannel | None:
        return self._channels.by_name.get((app_id, channel))

    def local_channels(self) -> Iterable[LocalChannel]:
        """All channels and pseudo-channels. The former have a topic."""
        return self._channels.by_name.values()

    async def start(self) -> None:
        """Connects; returns when Redis knows this worker, however long that takes. The directory may not be complete
        yet: see `ready`."""
        self._link.start()
        self._incarnation.start()
        self._expire()
        await self._reconnect.wait_registered()

    async def finish(self, timeout_s: float = 5.0) -> bool:
        """The clean end, after the hub has closed every socket: waits until Redis knows, and removes this worker from
        it. False: something is left, and the reaper will remove it."""
        clean = False
        try:
            async with asyncio.timeout(timeout_s):
                self._sync.ending = True
                self._counts.make_all_due(self.local_channels())
                await self._channels.wait_empty()
                clean = await self._incarnation.bury()
        except (TimeoutError, LinkDown, hiredis.ReplyError) as error:
            log.warning("worker not removed from redis", w=self.w, reason=str(error) or "timeout")
        self.close()
        return clean

    def close(self) -> None:
        """Stops timers and tasks, and releases the link. What Redis has under our name stays."""
        self._link.release()
        self._connection.change(ConnectionState.DOWN)
        self._sync.connection_lost(ALL_SHARDS)
        self.online.close()
        self.connection_limit.close()
        for local_channel in self.local_channels():
            if local_channel.tally is not None:
                local_channel.tally.settle()
        self._following.clear()
        self._incarnation.close()
        self.canary.close()
        self._directory.close()
        self._reconnect.close()
        if self._expiry is not None:
            self._expiry.cancel()

    # Calls of the hub.

    def join(self, app: App, channel: str, ticket: Ticket) -> LocalChannel:
        """A subscribe. The outcome comes as `joined` or `refused` with this ticket, never from within this call."""
        local_channel = self._channels.channel(app.id, channel)
        self._follow(local_channel, app)
        ticket.since = self._link.clock()
        local_channel.wait(ticket)
        self._pending.add(ticket)
        self._sync.mark_dirty(local_channel)
        return local_channel

    def join_at_once(self, app: App, channel: str) -> LocalChannel | None:
        """A subscribe of a connection that needs nothing but events, to a channel that needs nothing from Redis for it:
        the connection counts as attached, and is answered in the same step. None: `join` it."""
        local_channel = self._channels.by_name.get((app.id, channel))
        if local_channel is None or not local_channel.is_plain(app) or not self._connection.sends(local_channel.shard):
            return None
        local_channel.attached += 1
        self._channels.attached_changed(local_channel, local_channel.attached - 1)
        self._sync.touch_count(local_channel)
        return local_channel

    def cancel(self, ticket: Ticket) -> bool:
        """Withdraws a subscribe or a connection that waits. No effect on one that was answered. True: a call with it is
        in flight, and `withdrawn` follows."""
        self.connection_limit.forget(ticket)
        self._pending.discard((ticket,))
        local_channel = ticket.local_channel
        if local_channel is not None:
            local_channel.withdraw(ticket)
            self._sync.mark_dirty(local_channel)
        return ticket.cancelled

    def leave(self, app_id: str, channel: str, user: str | None = None) -> None:
        """Detaches an attached socket. `user` is the one it joined with, on presence channels."""
        local_channel = self._channels.by_name[(app_id, channel)]
        local_channel.detach(user)
        self._channels.attached_changed(local_channel, local_channel.attached + 1)
        if local_channel.is_plain(local_channel.app):
            self._sync.touch_count(local_channel)
        else:
            self._sync.mark_dirty(local_channel)

    def app_changed(self, old: App | None, new: App | None) -> None:
        """An app's record changed: writes to Redis what the app turned on or off. If the app is gone, the hub closes
        its sockets instead."""
        if old is None or new is None:
            if old is not None:
                self._following.pop(old.id, None)
            return
        self.signed_in.switch(new.id, needs_sign_ins(new))
        self.connection_limit.limit(new.id, new.max_connections)
        if all(getattr(old, name) == getattr(new, name) for name in _FOLLOWED):
            return
        # Channels that are opened meanwhile follow the new record at their first join.
        self._following[new.id] = (new, Cursor(self._channels.slice_by_slice()))
        self._follow_slices.start()

    def _follow_some(self) -> bool:
        # One step. False: all channels follow the records of their apps.
        if not self._following:
            return False
        app_id, (app, cursor) = next(iter(self._following.items()))
        for local_channel in cursor.next(_MAX_FOLLOWING):
            if local_channel.app_id == app_id and not local_channel.dropped:
                if self._follow(local_channel, app):
                    self._counts.make_due(local_channel)
                elif local_channel.needs_position:
                    self._sync.mark_dirty(local_channel)
        if cursor.done:
            del self._following[app_id]
        return bool(self._following)

    def _follow(self, local_channel: LocalChannel, app: App) -> bool:
        # True: subscription_count was turned on for this channel.
        local_channel.apply_settings(app)
        return self._counts.switch(local_channel, app.subscription_count)

    def _follow_record(self, local_channel: LocalChannel) -> None:
        app = self._directory.by_id.get(local_channel.app_id)
        if app is not None:
            self._follow(local_channel, app)

    def _expire(self) -> None:
        # Subscribes wait for Redis to return, but not forever: 4100 makes the client connect elsewhere.
        loop = asyncio.get_running_loop()
        join_wait_s = self._timings.join_wait_s
        self._expiry = loop.call_later(min(1.0, join_wait_s / 4), self._expire)
        self._refuse_late()

    def _refuse_late(self) -> None:
        before = self._link.clock() - self._timings.join_wait_s
        late = self._pending.take_late(before, _MAX_REFUSED)
        if len(late) == _MAX_REFUSED:
            asyncio.get_running_loop().call_soon(self._refuse_late)
        for ticket in late:
            local_channel = ticket.local_channel
            if local_channel is not None:
                local_channel.withdraw(ticket)
                self._events.refused(local_channel, ticket, "unavailable")
                self._sync.mark_dirty(local_channel)

    # Pushes of Redis.

    def push(self, topic: bytes, payload: bytes) -> None:
        """Takes one published message. This is the hot path: events go to the hub unparsed."""
        local_channel = self._by_topic.get(topic)
        if local_channel is None:
            if topic == self._sys:
                self._push_sys(payload)
            elif topic in self.canary.topics:
                self.canary.push(topic, payload)
            else:
                self.online.push(topic, payload)
        elif payload[0] == _EVENT:
            position = local_channel.history
            if position is None:
                self._on_event(local_channel, payload)
            else:
                self._catchup.push(local_channel, position, payload)
        else:
            self._push_delta(local_channel, payload)

    def _push_sys(self, payload: bytes) -> None:
        # An empty one only tries whether the topic may be used (redis/check.py).
        if payload:
            self._answerers.received(payload)

    def _push_delta(self, local_channel: LocalChannel, payload: bytes) -> None:
        letter, name = payload[0], self._incarnation.name
        if letter == _COUNT:
            self._counts.push(local_channel, payload, name)
            return
        if letter == _CONSOLE_COPY:
            self._events.console(local_channel, payload)
            return
        if letter == _HISTORY_CLEARED:
            self._catchup.cleared(local_channel, payload)
            return
        # Without a roster there is nothing to change yet. Our own changes come with the reply: pushes of them arrive
        # before it on one server and after it on another.
        roster = local_channel.roster
        if roster is None or worker_of(payload) == name:
            return
        if letter == _MEMBER_ADDED:
            added = parse_added(payload)
            if roster.add(added.user, added.info):
                self._events.member_added(local_channel, added.user, added.info)
        elif letter == _MEMBER_REMOVED:
            user = parse_removed(payload).user
            if roster.remove(user):
                self._events.member_removed(local_channel, user)
