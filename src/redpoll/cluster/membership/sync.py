"""Tells Redis what this worker holds: one write per tick, one call per channel in flight, bounded replies.

This module decides when and in which order. local_channel.py decides what a call says, and replies.py what its reply
means.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from typing import Any, Final

import hiredis
import structlog

from redpoll.cluster.keys import Keys
from redpoll.cluster.link import Link, LinkDown
from redpoll.cluster.membership.connection_state import Connection, ConnectionState
from redpoll.cluster.membership.hold_call import TOPIC, Flag, HistoryTerms, HoldCall, decode, encode
from redpoll.cluster.membership.incarnation import Incarnation
from redpoll.cluster.membership.local_channel import Activity, LocalChannel, Subscription, Ticket
from redpoll.cluster.membership.local_channels import LocalChannels
from redpoll.cluster.membership.replies import Replies
from redpoll.cluster.membership.timings import Timings
from redpoll.cluster.scripts import HOLD

__all__ = ["Sync"]

log = structlog.get_logger(__name__)

_MAX_TOPICS_PER_SUBSCRIBE: Final = 1_000
# Redis closes a subscribed connection that leaves 32 MB unread. A roster has at most 512 KiB, a cached event 256 KiB.
_MAX_ROSTERS: Final = 32
_MAX_CACHED: Final = 64
# Calls of a re-assertion in flight: enough to keep Redis busy, few enough to let other clients have their turn.
_MAX_ASSERTIONS: Final = 500

_OPEN: Final = ConnectionState.OPEN
_REASSERTING: Final = ConnectionState.REASSERTING


def _ignore() -> None:
    pass


class _BigReplies:
    """Replies of one kind that may be big: at most `limit` are awaited, and further channels wait in `waiting`."""

    __slots__ = ("awaited", "limit", "waiting")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.awaited = 0
        self.waiting: dict[LocalChannel, None] = {}

    @property
    def full(self) -> bool:
        return self.awaited >= self.limit

    def next(self) -> LocalChannel | None:
        """The channel whose call may be made now."""
        if not self.waiting or self.full:
            return None
        local_channel = next(iter(self.waiting))
        del self.waiting[local_channel]
        return local_channel


class Sync:
    """Takes over `channels.on_touch`. On a new connection nothing is sent before `assert_all`, which first repeats what
    is held and then lets changes through.

    `on_fenced()`: Redis refuses calls under our name. `on_stopped()`: after `stop`, the last call was answered. Both
    are set by reconnect.py.

    `debounced`: webhook rows for leaves are held back, and not written if the channel or member returns in time.
    `unhooked` counts webhook rows that were not written because too many are unread. `errors` counts errors that Redis
    answered with. `ending`: the worker ends, so counts are announced with this call.
    """

    def __init__(
        self,
        link: Link,
        keys: Keys,
        incarnation: Incarnation,
        connection: Connection,
        channels: LocalChannels,
        replies: Replies,
        timings: Timings,
        *,
        debounced: bool = True,
    ) -> None:
        self.errors = 0
        self.unhooked = 0
        self.in_flight = 0
        self.ending = False
        self.on_fenced: Callable[[], None] = _ignore
        self.on_stopped: Callable[[], None] = _ignore
        self._link = link
        self._keys = keys
        self._incarnation = incarnation
        self._connection = connection
        self._channels = channels
        self._replies = replies
        self._timings = timings
        self._debounced = debounced
        # The caller names the epoch before it knows whether the history needs a new one, so each call brings a name.
        self._run = secrets.token_hex(6)
        self._epochs = count(1)
        # What this tick's write will contain.
        self._dirty: dict[LocalChannel, None] = {}
        self._unsubscribing: list[bytes] = []
        self._flush_scheduled = False
        # Held channels that are not asserted again yet, and those of them that wait for their turn.
        self._unasserted: dict[LocalChannel, None] = {}
        self._queue: deque[LocalChannel] = deque()
        self._big_replies = {Flag.ROSTER: _BigReplies(_MAX_ROSTERS), Flag.CACHED: _BigReplies(_MAX_CACHED)}
        channels.on_touch = self.touch

    def touch(self, local_channel: LocalChannel) -> None:
        """Something changed: it is written to Redis in this tick, or when the call in flight is answered."""
        if local_channel.busy:
            return
        if local_channel.idle:
            self._drop(local_channel)
        elif self._connection.state is _OPEN:
            self._dirty[local_channel] = None
            self._schedule_flush()

    def touch_all(self) -> None:
        for local_channel in list(self._channels.by_name.values()):
            self.touch(local_channel)

    def stop(self) -> None:
        """No further calls, because we were fenced. `on_stopped` follows when none is in flight."""
        self._dirty.clear()
        self._unasserted.clear()
        self._queue.clear()
        for big_replies in self._big_replies.values():
            big_replies.waiting.clear()

    def connection_lost(self) -> None:
        self.stop()
        self._unsubscribing.clear()

    def assert_all(self) -> None:
        """A new connection or a new W: subscribes topics, `sys` last, then repeats all that is held, then lets the
        changes through that waited."""
        local_channels = list(self._channels.by_name.values())
        self._unsubscribe()
        self._subscribe(
            local_channel for local_channel in local_channels if local_channel.attached or local_channel.waiting
        )
        self._link.subscribe([self._keys.sys], self._subscribed)
        for local_channel in local_channels:
            # A channel that waits to retry or is scanned is asserted afterwards; the others don't wait for it.
            if local_channel.attached and not local_channel.asserted and local_channel.activity is Activity.NONE:
                self._unasserted[local_channel] = None
        self._queue.extend(self._unasserted)
        self._connection.change(_REASSERTING)
        self._continue()
        self._link.flush()

    def _drop(self, local_channel: LocalChannel) -> None:
        # The channel is no longer held, and Redis knows.
        self._dirty.pop(local_channel, None)
        self._unasserted.pop(local_channel, None)
        if local_channel.subscription is not Subscription.NONE and self._link.up:
            self._unsubscribing.append(local_channel.topic)
            self._schedule_flush()
        self._replies.forget(local_channel)
        self._channels.drop(local_channel)

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self._connection.state is not _OPEN:
            return
        self._unsubscribe()
        dirty, self._dirty = self._dirty, {}
        self._subscribe(local_channel for local_channel in dirty if local_channel.waiting)
        # Calls with joins first, because a client waits for those.
        for local_channel in sorted(dirty, key=lambda local_channel: not local_channel.waiting):
            self._advance(local_channel)
        self._link.flush()

    def _unsubscribe(self) -> None:
        for at in range(0, len(self._unsubscribing), _MAX_TOPICS_PER_SUBSCRIBE):
            self._link.unsubscribe(self._unsubscribing[at : at + _MAX_TOPICS_PER_SUBSCRIBE], self._subscribed)
        self._unsubscribing.clear()

    def _subscribe(self, local_channels: Iterable[LocalChannel]) -> None:
        # Before the calls, in the same write: no event published after a success frame may be missed.
        new: list[LocalChannel] = []
        for local_channel in local_channels:
            if local_channel.has_topic and local_channel.subscription is Subscription.NONE:
                local_channel.subscription = Subscription.REQUESTED
                new.append(local_channel)
        for at in range(0, len(new), _MAX_TOPICS_PER_SUBSCRIBE):
            part = new[at : at + _MAX_TOPICS_PER_SUBSCRIBE]
            topics_only = [local_channel for local_channel in part if local_channel.kind == TOPIC]
            topics = [local_channel.topic for local_channel in part]
            self._link.subscribe(topics, partial(self._topics_subscribed, topics_only))

    def _topics_subscribed(self, topics_only: list[LocalChannel], outcome: Any) -> None:
        self._subscribed(outcome)
        if outcome is None:
            for local_channel in topics_only:
                local_channel.subscription = Subscription.CONFIRMED
                self._advance(local_channel)

    def _subscribed(self, outcome: Any) -> None:
        # A refusal by an ACL arrives before the replies of the calls that rely on the subscription.
        if isinstance(outcome, hiredis.ReplyError):
            self.errors += 1
            self._link.drop(f"SUBSCRIBE refused: {outcome}")

    def _advance(self, local_channel: LocalChannel) -> None:
        if local_channel.busy:
            return
        if local_channel.kind == TOPIC:
            if local_channel.subscription is Subscription.CONFIRMED and local_channel.waiting:
                self._replies.topic_subscribed(local_channel)
            if local_channel.idle:
                self._drop(local_channel)
            return
        big_replies = self._big_replies.get(local_channel.big_reply)
        if big_replies is not None and big_replies.full:
            big_replies.waiting[local_channel] = None
            return
        call = local_channel.plan()
        if local_channel.asserted:
            self._unasserted.pop(local_channel, None)
        if call is not None:
            self._send(local_channel, call)
        elif local_channel.idle:
            self._drop(local_channel)

    def _send(self, local_channel: LocalChannel, call: HoldCall[Ticket]) -> None:
        local_channel.call = call
        self.in_flight += 1
        if call.big_reply:
            self._big_replies[call.big_reply].awaited += 1
        settings, incarnation = local_channel.settings, self._incarnation
        extra_flags = Flag.WORKER_ENDS if self.ending else ""
        if self._debounced and settings.hooks:
            extra_flags += Flag.DEBOUNCE
        history = None
        if Flag.HISTORY in call.flags:
            rule, epoch = settings.rule, f"{self._run}{next(self._epochs):x}"
            seconds, era = (rule.seconds, rule.era) if rule is not None else (0, "")
            history = HistoryTerms(epoch, seconds, settings.max_histories, era)
        names, args = encode(
            self._keys,
            incarnation.w,
            incarnation.gen,
            local_channel.app_id,
            local_channel.channel,
            local_channel.kind,
            local_channel.topic,
            call,
            extra_flags,
            history,
            settings.max_occupied,
        )
        self._link.run(HOLD, names, args, partial(self._answered, local_channel, call))

    def _answered(self, local_channel: LocalChannel, call: HoldCall[Ticket], outcome: Any) -> None:
        local_channel.call = None
        self.in_flight -= 1
        if call.big_reply:
            self._big_replies[call.big_reply].awaited -= 1
        try:
            reply = decode(call.flags, outcome) if isinstance(outcome, list) else None
            if reply is not None:
                self.unhooked += reply.dropped
                self._replies.apply(local_channel, call, reply)
            else:
                local_channel.fail(call)
                if isinstance(outcome, hiredis.ReplyError):
                    self._retry(local_channel, outcome)
                elif not isinstance(outcome, LinkDown):
                    self.on_fenced()
        finally:
            # An exception while one channel's sockets are served must not stop the other channels.
            if local_channel.asserted:
                self._unasserted.pop(local_channel, None)
            elif local_channel in self._unasserted:
                self._queue.appendleft(local_channel)
            self.touch(local_channel)
            self._continue()

    def _continue(self) -> None:
        # Makes the calls that waited for another to be answered.
        for big_replies in self._big_replies.values():
            while local_channel := big_replies.next():
                self._advance(local_channel)
        while self._queue and self.in_flight < _MAX_ASSERTIONS:
            self._advance(self._queue.popleft())
        if self._connection.state is _REASSERTING:
            if not self._unasserted:
                self._connection.change(_OPEN)
                self.touch_all()
        elif self._connection.state is not _OPEN and self.in_flight == 0:
            self.on_stopped()

    def _retry(self, local_channel: LocalChannel, error: hiredis.ReplyError) -> None:
        # The same absolute call again, later. Only its channel waits.
        self.errors += 1
        delay_s = self._timings.retry_delay_s(local_channel.failures)
        local_channel.failures += 1
        log.warning("hold failed", app=local_channel.app_id, channel=local_channel.channel, reason=str(error))
        local_channel.activity = Activity.RETRY_DELAY
        self._unasserted.pop(local_channel, None)
        asyncio.get_running_loop().call_later(delay_s, self._retry_delay_over, local_channel)

    def _retry_delay_over(self, local_channel: LocalChannel) -> None:
        local_channel.activity = Activity.NONE
        self.touch(local_channel)
