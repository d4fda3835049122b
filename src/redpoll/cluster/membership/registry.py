"""Keeps Redis informed of the channels that this worker holds, and reports what changes in them.

The hub calls `joins.add`, `join_at_once` and `leave`; the registry answers with the calls of `MembershipEvents`. It
knows channels, users and joins, but no sockets. This module connects the parts of the package and routes the pushes of
the one Redis connection to them. cluster/membership/README.md "hold" and "Reconnecting" describe the protocol; its
correctness depends on handling replies and pushes in the order in which the connection brings them.
"""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

import hiredis
import structlog

from redpoll import _frame
from redpoll.cluster import roll_call
from redpoll.cluster.canary import Canary
from redpoll.cluster.directory import Directory, DirectoryChanged
from redpoll.cluster.envelopes import Envelope
from redpoll.cluster.history import History
from redpoll.cluster.listening import Listening
from redpoll.cluster.mailbox import Mailbox
from redpoll.cluster.membership.catchup import Catchup
from redpoll.cluster.membership.connection_limit import ConnectionLimit
from redpoll.cluster.membership.connection_state import ALL_SHARDS, ConnectionState, Reach, RedisState
from redpoll.cluster.membership.counts import Counts
from redpoll.cluster.membership.following import Following
from redpoll.cluster.membership.incarnation import Incarnation
from redpoll.cluster.membership.join_queue import JoinQueue
from redpoll.cluster.membership.local_channel import LocalChannel
from redpoll.cluster.membership.local_channels import LocalChannels
from redpoll.cluster.membership.membership_events import MembershipEvents, report
from redpoll.cluster.membership.online import Online
from redpoll.cluster.membership.reconnect import Reconnect
from redpoll.cluster.membership.replies import Replies, Rosters
from redpoll.cluster.membership.signed_in import SignedInUsers, needs_sign_ins
from redpoll.cluster.membership.sync import Sync
from redpoll.cluster.membership.timings import Timings
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link, LinkDown
from redpoll.cluster.survey import Answerers
from redpoll.protocol.apps import App

__all__ = ["LocalChannel", "MembershipEvents", "Registry", "Timings"]

log = structlog.get_logger(__name__)

_EVENT: Final = ord(Envelope.EVENT)
_COUNT: Final = ord(Envelope.COUNT)
_CONSOLE_COPY: Final = ord(Envelope.CONSOLE_COPY)
_HISTORY_CLEARED: Final = ord(Envelope.HISTORY_CLEARED)
_HISTORY_ENDED: Final = ord(Envelope.HISTORY_ENDED)


def _ignore(message: Any) -> None:
    pass


def _hand_question(answerers: Answerers, payload: bytes) -> None:
    # An empty one only tries whether the topic may be used (redis/check.py).
    if payload:
        answerers.received(payload)


class Registry:
    """One per worker. Starts the link, and has its callbacks.

    `answerers` gets the messages on the topic `sys`; this class adds the directory's. `mailbox` is this
    worker's. `debounce_s` is as in `Sync`.
    `on_deaf(broken)` is called with True when Redis delivers no messages, and with False when it does again;
    `on_reach` with each new value of `reach`; `on_revoked_grant` as in `Incarnation`.

    Topics of channels that it doesn't hold: `listening`, see cluster/listening.py. Joins: see join_queue.py. Signed-in
    users: `sign_in(app, user_id)` and `sign_out(app_id, user_id)`, see signed_in.py. Watched users: `watch(app_id,
    user_id)` and `unwatch`, see online.py. Connections: `admit(join)` for each one, and `depart(app_id)` for each
    admitted one, see connection_limit.py.
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
        mailbox: Mailbox | None = None,
        on_deaf: Callable[[bool], None] = _ignore,
        on_reach: Callable[[Reach], None] = _ignore,
        on_revoked_grant: Callable[[bytes | None], None] = _ignore,
    ) -> None:
        timings = timings or Timings()
        answerers.hear(DirectoryChanged, directory.apply)

        def messages_stopped(broken: bool) -> None:
            on_deaf(broken)
            self._reach_changed()

        mailbox = mailbox or Mailbox(link, keys, run, k)
        self._readers = mailbox.topics
        self._readers[keys.sys] = partial(_hand_question, answerers)
        self._readers |= roll_call.answerers(link, keys, f"{run}.{k}")
        self._on_reach = on_reach
        self._reach = Reach.DOWN
        self._link = link
        self._events = events
        self._on_event = events.event
        self._directory = directory
        self._timings = timings
        self.history = History(link, keys)
        self.canary = Canary(link, keys, run, k, timings.canary_s, messages_stopped)
        connection = self._connection = RedisState(self._reach_changed)
        # A circle: Sync needs the channels, which tell it what changed. The other one is that of `_fence`.
        channels = self._channels = LocalChannels(keys, events, lambda changed: self.sync.mark_dirty(changed))
        self._by_topic = channels.by_topic
        incarnation = self.incarnation = Incarnation(
            link, keys, run, k, directory, timings, self._fence, on_revoked_grant
        )
        counts = self._counts = Counts(channels, events)
        self.following = Following(channels, counts, directory, events)
        catchup = self.catchup = Catchup(self.history, events, timings)
        rosters = self._rosters = Rosters(events, incarnation, connection, channels, timings)
        self.signed_in = SignedInUsers(channels)
        self.online = Online(link, keys, self.signed_in, events, timings)
        self.connection_limit = ConnectionLimit(link, keys, channels, incarnation, events, timings)
        joins = self.joins = JoinQueue(channels, directory, events, timings, link.clock)
        replies = Replies(events, joins, channels, rosters, counts, catchup, self.connection_limit)
        sync = self.sync = self._create_sync(link, keys, replies, catchup, debounce_s)
        self.listening = Listening(link, keys, connection.sends, channels.has_subscribed, sync.keep_subscribed)
        sync.listened = self.listening.by_topic
        self._reconnect = self._create_reconnect(link, keys, mailbox)

    def _create_reconnect(self, link: Link, keys: Keys, mailbox: Mailbox) -> Reconnect:
        return Reconnect(
            link,
            keys,
            self._connection,
            self.incarnation,
            self._channels,
            self.sync,
            self.catchup,
            self.online,
            self.listening,
            self.canary,
            mailbox,
            self.following.apply_record,
        )

    def _create_sync(self, link: Link, keys: Keys, replies: Replies, catchup: Catchup, debounce_s: float) -> Sync:
        return Sync(
            link,
            keys,
            self.incarnation,
            self._connection,
            self._channels,
            self.joins,
            replies,
            catchup,
            self._timings,
            on_fenced=self._fence,
            on_stopped=lambda: self._reconnect.stopped(),
            debounce_s=debounce_s,
        )

    def _fence(self) -> None:
        # Reconnect needs the incarnation and Sync, which find that this worker is fenced.
        self._reconnect.fence()

    @property
    def worker_id(self) -> str:
        """This worker's name in Redis. It changes when the worker is fenced."""
        return self.incarnation.worker_id

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
            self._on_reach(self._reach)

    @property
    def ready(self) -> bool:
        """Whether clients may be admitted: Redis answered lately and delivers messages, and the directory is
        complete."""
        if self.canary.broken:
            return False
        silent_s = self._link.clock() - self.incarnation.answered_at
        max_silent_s = self._timings.away_s + self._timings.beat_s
        return self._reconnect.was_registered and self._directory.complete and silent_s < max_silent_s

    @property
    def fenced(self) -> int:
        """How often Redis or the reaper gave our name up."""
        return self._reconnect.fenced

    @property
    def errors(self) -> int:
        """Calls that Redis answered with an error; each of them is repeated. For /metrics."""
        return self.sync.errors + self.incarnation.errors + self.online.errors + self.catchup.errors

    @property
    def unhooked(self) -> int:
        """Webhook rows that were not written because too many are unread. For /metrics."""
        return self.sync.unhooked

    @property
    def catchups(self) -> int:
        """How often a channel caught up from its history. For /metrics."""
        return self.catchup.begun

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
        reconnect = self._reconnect
        self._link.start(on_push=self.push, on_up=reconnect.connected, on_down=reconnect.down)
        self.incarnation.start()
        self.joins.start()
        await reconnect.wait_registered()

    async def finish(self, timeout_s: float = 5.0) -> bool:
        """The clean end, after the hub has closed every socket: waits until Redis knows, and removes this worker from
        it. False: something is left, and the reaper will remove it."""
        clean = False
        try:
            async with asyncio.timeout(timeout_s):
                self.sync.ending = True
                self._counts.make_all_due(self.local_channels())
                await self._channels.wait_empty()
                clean = await self.incarnation.bury()
        except (TimeoutError, LinkDown, hiredis.ReplyError) as error:
            log.warning("worker not removed from redis", w=self.worker_id, reason=str(error) or "timeout")
        self.close()
        return clean

    def close(self) -> None:
        """Stops timers and tasks, and releases the link. What Redis has under our name stays."""
        self._link.release()
        self._connection.change(ConnectionState.DOWN)
        self.sync.connection_lost(ALL_SHARDS)
        self.online.close()
        self.connection_limit.close()
        for local_channel in self.local_channels():
            if local_channel.tally is not None:
                local_channel.tally.settle()
        self.following.close()
        self.incarnation.close()
        self.canary.close()
        self._directory.close()
        self._reconnect.close()
        self.joins.close()

    # Calls of the hub.

    def join_at_once(self, app: App, channel: str) -> LocalChannel | None:
        """A subscribe of a connection that needs nothing but events, to a channel that needs nothing from Redis for it:
        the connection counts as attached, and is answered in the same step. None: `joins.add` one."""
        local_channel = self._channels.by_name.get((app.id, channel))
        if local_channel is None or not local_channel.is_plain(app) or not self._connection.sends(local_channel.shard):
            return None
        local_channel.attached += 1
        self._channels.attached_changed(local_channel, local_channel.attached - 1)
        self.sync.counts.changed(local_channel)
        return local_channel

    def leave(self, app_id: str, channel: str, user: str | None = None) -> None:
        """Detaches an attached socket. `user` is the one it joined with, on presence channels."""
        local_channel = self._channels.by_name[(app_id, channel)]
        local_channel.detach(user)
        self._channels.attached_changed(local_channel, local_channel.attached + 1)
        if local_channel.is_plain(local_channel.app):
            self.sync.counts.changed(local_channel)
        else:
            self.sync.mark_dirty(local_channel)

    def app_changed(self, old: App | None, new: App | None) -> None:
        """An app's record changed: writes to Redis what the app turned on or off. If the app is gone, the hub closes
        its sockets instead."""
        if new is None:
            if old is not None:
                self.following.stop(old.id)
        elif old is not None:
            self.signed_in.switch(new.id, needs_sign_ins(new))
            self.connection_limit.limit(new.id, new.max_connections)
            self.following.changed(old, new)

    # Pushes of Redis.

    def push(self, topic: bytes, payload: bytes) -> None:
        """Takes one published message. This is the hot path: events go to the hub unparsed."""
        local_channel = self._by_topic.get(topic)
        listeners = self.listening.by_topic
        if listeners and topic in listeners:
            report(listeners[topic].pushed, payload)
        if local_channel is None:
            read = self._readers.get(topic)
            if read is not None:
                read(payload)
            elif topic in self.canary.topics:
                self.canary.push(topic, payload)
            else:
                self.online.push(topic, payload)
        elif payload[0] == _EVENT:
            position = local_channel.history
            if position is not None:
                self.catchup.push(local_channel, position, payload)
            else:
                if local_channel.settings.rule is not None and local_channel.attached:
                    self._push_without_position(local_channel, payload)
                self._on_event(local_channel, payload)
        else:
            self._push_delta(local_channel, payload)

    def _push_without_position(self, local_channel: LocalChannel, payload: bytes) -> None:
        # Subscribes could begin no history for this channel (the cap), but the event is stored: now it has one.
        if _frame.offsets(payload)[0]:
            local_channel.needs_position = True
            self.sync.mark_dirty(local_channel)

    def _push_delta(self, local_channel: LocalChannel, payload: bytes) -> None:
        letter = payload[0]
        if letter == _COUNT:
            self._counts.push(local_channel, payload, self.incarnation.name)
            return
        if letter == _CONSOLE_COPY:
            self._events.console(local_channel, payload)
            return
        if letter == _HISTORY_CLEARED:
            self.catchup.cleared(local_channel, payload)
            return
        if letter == _HISTORY_ENDED:
            # For those who read over HTTP.
            return
        self._rosters.push(local_channel, payload)
