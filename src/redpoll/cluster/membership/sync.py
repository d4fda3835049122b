"""Tells Redis what this worker holds: one call per channel in flight, bounded replies, a slice of the work per tick.

This module decides when and in which order. Subscribes and, after a break, the topics of what is held come first,
because clients wait for them. Then comes everything else. local_channel.py decides what a call says, and replies.py
what its reply means.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Collection, Iterable
from functools import partial
from itertools import count
from typing import Any, Final

import hiredis
import structlog

from redpoll.cluster.membership.big_replies import BigReplies
from redpoll.cluster.membership.connection_state import ALL_SHARDS, Connection, ConnectionState
from redpoll.cluster.membership.hold_call import BEYOND_SHARE, TOPIC, Flag, HistoryTerms, HoldCall, decode, encode
from redpoll.cluster.membership.incarnation import Incarnation
from redpoll.cluster.membership.local_channel import Activity, LocalChannel, Subscription, Ticket
from redpoll.cluster.membership.local_channels import LocalChannels
from redpoll.cluster.membership.places import Outcome, Places
from redpoll.cluster.membership.plain_hold import PlainHold, is_plain_call, plain_reply
from redpoll.cluster.membership.replies import Replies
from redpoll.cluster.membership.timings import Timings
from redpoll.cluster.redis.keys import SHARDS, Keys
from redpoll.cluster.redis.link import Link, LinkDown
from redpoll.cluster.redis.scripts import HOLD, HOLD_PLAIN
from redpoll.loop.slices import Cursor, Queue, Slices

__all__ = ["Sync"]

log = structlog.get_logger(__name__)

_MAX_TOPICS_PER_SUBSCRIBE: Final = 1_000
# Redis closes a subscribed connection that leaves 32 MB unread. A roster has at most 512 KiB, a cached event 256 KiB.
_MAX_ROSTERS: Final = 32
_MAX_CACHED: Final = 64
# Redis gets the number of a plain channel's sockets at most once in so long.
_COUNT_S: Final = 0.05
# Channels whose topics are subscribed in one step after a break, about; those with history also ask for a page.
_MAX_RESUBSCRIBED: Final = 250
# Calls in flight in all, and those that no client waits for. A subscribe and each event wait for the calls that were
# sent before, in Redis and then among its replies: about 50 us for each. One slice makes 50 to 100 calls, so with so
# many in flight Redis is busy until the next slice.
_MAX_IN_FLIGHT: Final = 200
_MAX_BACKGROUND: Final = 100

_OPEN: Final = ConnectionState.OPEN
_REASSERTING: Final = ConnectionState.REASSERTING


def _ignore() -> None:
    pass


def _ignore_all(local_channels: Iterable[LocalChannel]) -> None:
    pass


class _Resubscription:
    """What is held in `shards`, as far as its topics are not subscribed again."""

    __slots__ = ("cursor", "shards")

    def __init__(self, shards: Collection[int], cursor: Cursor[LocalChannel]) -> None:
        self.shards = set(shards)
        self.cursor = cursor


class Sync:
    """Takes over `channels.on_dirty`. On a new connection nothing is sent before `assert_held`. From then on changes go
    out, new subscribes first, and what is held is repeated in between. The same holds for single shards of a Cluster.

    `on_fenced()`: Redis refuses calls under our name. `on_stopped()`: after `stop`, the last call was answered.
    `on_subscribing(local_channels)`: the SUBSCRIBE of these topics was just sent. All are set by reconnect.py.

    `debounce_s`: webhook rows for leaves are held back for so long, and not written if the channel or member returns.
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
        debounce_s: float = 3.0,
    ) -> None:
        self.errors = 0
        self.unhooked = 0
        self.in_flight = 0
        self.ending = False
        self.on_fenced: Callable[[], None] = _ignore
        self.on_stopped: Callable[[], None] = _ignore
        self.on_subscribing: Callable[[Iterable[LocalChannel]], None] = _ignore_all
        self._link = link
        self._keys = keys
        self._incarnation = incarnation
        self._connection = connection
        self._channels = channels
        self._replies = replies
        self._timings = timings
        self._debounce_ms = round(debounce_s * 1000)
        self._plain_hold = PlainHold(keys)
        self._places = Places(link, keys, timings, self._place_decided)
        # The caller names the epoch before it knows whether the history needs a new one, so each call brings a name.
        self._run = secrets.token_hex(6)
        self._epochs = count(1)
        self.slices = Slices(self._step, after=link.flush)
        # Channels with subscribes whose topic is yet to be subscribed, those of them whose shard is lost, and those
        # whose call may be made. The first two outlive a break of the connection.
        self._joining: Queue[LocalChannel] = Queue()
        self._joining_later: Queue[LocalChannel] = Queue()
        self._calling: Queue[LocalChannel] = Queue()
        # Channels with other changes, and topics to unsubscribe.
        self._dirty: Queue[LocalChannel] = Queue()
        self._unsubscribing: Queue[bytes] = Queue()
        # After a break: the topics that are not subscribed again; then the channels that are not asserted again yet,
        # and those of them that wait for their turn.
        self._resubscribing: deque[_Resubscription] = deque()
        self._resubscribes_next = False
        self._unasserted: set[LocalChannel] = set()
        self._asserting: Queue[LocalChannel] = Queue()
        # Channels with a call in flight that no client waits for.
        self._background: set[LocalChannel] = set()
        # Channels of which Redis got the number of sockets in this interval, and those that changed since.
        self._counted: set[LocalChannel] = set()
        self._counted_again: set[LocalChannel] = set()
        self._count_timer: asyncio.TimerHandle | None = None
        self._big_replies = {Flag.ROSTER: BigReplies(_MAX_ROSTERS), Flag.CACHED: BigReplies(_MAX_CACHED)}
        channels.on_dirty = self.mark_dirty

    def mark_dirty(self, local_channel: LocalChannel) -> None:
        """Something changed: written to Redis in one of the next writes, or when the call in flight is answered."""
        if local_channel.busy:
            return
        if local_channel.waiting:
            self._joining.add(local_channel)
            self.slices.start()
        elif local_channel.attached == 0 and local_channel.idle:
            self._drop(local_channel)
        elif local_channel.settled and local_channel not in self._unasserted:
            return
        elif self._connection.sends(local_channel.shard):
            self._dirty.add(local_channel)
            self.slices.start()

    def touch_count(self, local_channel: LocalChannel) -> None:
        """Only the number of its sockets changed, and nobody waits for Redis: it is told at once, and then at most
        every 50 ms."""
        if local_channel in self._counted:
            self._counted_again.add(local_channel)
            return
        self._counted.add(local_channel)
        self.mark_dirty(local_channel)
        if self._count_timer is None:
            self._count_timer = asyncio.get_running_loop().call_later(_COUNT_S, self._count_again)

    def _count_again(self) -> None:
        self._count_timer = None
        self._counted, self._counted_again = self._counted_again, set()
        for local_channel in self._counted:
            self.mark_dirty(local_channel)
        if self._counted:
            self._count_timer = asyncio.get_running_loop().call_later(_COUNT_S, self._count_again)

    def stop(self) -> None:
        """No further calls, because we were fenced. `on_stopped` follows when none is in flight."""
        # Their topics may be subscribed no longer.
        while self._calling:
            self._joining.add(self._calling.pop())
        self._dirty.clear()
        self._resubscribing.clear()
        self._unasserted.clear()
        self._asserting.clear()
        for big_replies in self._big_replies.values():
            big_replies.clear()

    def connection_lost(self, shards: Collection[int]) -> None:
        """No calls for these shards before `assert_held`. `forget` follows for each of their channels."""
        if len(shards) == SHARDS:
            self.stop()
            self._unsubscribing.clear()
        for resubscription in list(self._resubscribing):
            resubscription.shards.difference_update(shards)
            if not resubscription.shards:
                self._resubscribing.remove(resubscription)

    def forget(self, local_channel: LocalChannel) -> None:
        """The shard of this channel is lost: `assert_held` begins with it from the start."""
        if local_channel in self._calling:
            self._calling.discard(local_channel)
            self._joining.add(local_channel)
        self._dirty.discard(local_channel)
        self._asserting.discard(local_channel)
        self._unasserted.discard(local_channel)
        for big_replies in self._big_replies.values():
            big_replies.discard(local_channel)

    def assert_held(self, shards: Collection[int] = ALL_SHARDS) -> None:
        """A new connection or a new W: subscribes topics, `sys` last, then repeats all that is held, slice by slice.
        Subscribes go out in between. Each call carries absolute values, and a channel that isn't asserted yet is
        asserted before its subscribes, so the order of channels doesn't matter."""
        self._resubscribing.append(_Resubscription(shards, Cursor(self._channels.slice_by_slice())))
        self._connection.registered(shards)
        while self._joining_later:
            self._joining.add(self._joining_later.pop())
        self._resubscribe()
        self.slices.start()

    def _resubscribe(self) -> None:
        resubscription = self._resubscribing[0]
        cursor, shards = resubscription.cursor, resubscription.shards
        count = _MAX_RESUBSCRIBED * SHARDS // len(shards)
        part = [local_channel for local_channel in cursor.next(count) if local_channel.shard in shards]
        self._subscribe(local_channel for local_channel in part if local_channel.attached or local_channel.waiting)
        for local_channel in part:
            # A channel that waits to retry or is scanned is asserted afterwards; the others don't wait for it.
            if local_channel.attached and not local_channel.asserted and local_channel.activity is Activity.NONE:
                self._unasserted.add(local_channel)
                self._asserting.add(local_channel)
            else:
                self.mark_dirty(local_channel)
        if cursor.done:
            self._resubscribing.popleft()
            for of_shards, topics in self._incarnation.last_topics(shards):
                self._link.subscribe(topics, partial(self._last_subscribed, of_shards))
            self._open_if_asserted()

    def _drop(self, local_channel: LocalChannel) -> None:
        # The channel is no longer held, and Redis knows.
        self._joining.discard(local_channel)
        self._joining_later.discard(local_channel)
        self._calling.discard(local_channel)
        self._dirty.discard(local_channel)
        if local_channel.has_place:
            self._places.release(local_channel)
        self._asserted(local_channel)
        if local_channel.subscription is not Subscription.NONE and local_channel.shard not in self._connection.lost:
            self._unsubscribing.add(local_channel.topic)
            self.slices.start()
        self._replies.forget(local_channel)
        self._channels.drop(local_channel)

    def _step(self) -> bool:
        # One step of the most urgent work. False: there is none, or it waits for answers.
        if not self._connection.sending:
            return False
        # By turns with the subscribes, because established clients wait for these topics.
        self._resubscribes_next = not self._resubscribes_next
        if self._resubscribing and self._resubscribes_next:
            self._resubscribe()
        elif self.in_flight >= _MAX_IN_FLIGHT and not self._resubscribing:
            return False
        elif self._calling:
            # A client waits for this one.
            self._advance(self._calling.pop())
        elif self._joining:
            part = [self._joining.pop() for _ in range(min(len(self._joining), _MAX_TOPICS_PER_SUBSCRIBE))]
            lost = self._connection.lost
            for local_channel in part:
                (self._joining_later if local_channel.shard in lost else self._calling).add(local_channel)
            self._subscribe(local_channel for local_channel in part if local_channel.shard not in lost)
        elif self._resubscribing:
            self._resubscribe()
        elif self._dirty and len(self._background) < _MAX_BACKGROUND:
            self._advance(self._dirty.pop())
        elif self._asserting and len(self._background) < _MAX_BACKGROUND:
            self._advance(self._asserting.pop())
        elif self._unsubscribing:
            count = min(len(self._unsubscribing), _MAX_TOPICS_PER_SUBSCRIBE)
            self._link.unsubscribe([self._unsubscribing.pop() for _ in range(count)], self._subscribed)
        else:
            return False
        return True

    def _subscribe(self, local_channels: Iterable[LocalChannel]) -> None:
        # Before the calls, in the same write: no event published after a success frame may be missed.
        new: list[LocalChannel] = []
        for local_channel in local_channels:
            if local_channel.has_topic and local_channel.subscription is Subscription.NONE:
                local_channel.subscription = Subscription.REQUESTED
                # Left and joined again: an UNSUBSCRIBE that is sent later would end this subscription.
                self._unsubscribing.discard(local_channel.topic)
                new.append(local_channel)
        for at in range(0, len(new), _MAX_TOPICS_PER_SUBSCRIBE):
            part = new[at : at + _MAX_TOPICS_PER_SUBSCRIBE]
            topics_only = [local_channel for local_channel in part if local_channel.kind == TOPIC]
            topics = [local_channel.topic for local_channel in part]
            self._link.subscribe(topics, partial(self._topics_subscribed, topics_only))
            self.on_subscribing(part)

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

    def _last_subscribed(self, shards: Collection[int], outcome: Any) -> None:
        self._subscribed(outcome)
        if outcome is None:
            self._connection.all_subscribed(shards)

    def _advance(self, local_channel: LocalChannel) -> None:
        if local_channel.busy or local_channel.shard in self._connection.lost:
            return
        if local_channel.kind == TOPIC:
            if local_channel.subscription is Subscription.CONFIRMED and local_channel.waiting:
                self._replies.topic_subscribed(local_channel)
            if local_channel.idle:
                self._drop(local_channel)
            return
        big_replies = self._big_replies.get(local_channel.big_reply)
        if big_replies is not None and big_replies.full:
            big_replies.wait(local_channel)
            return
        call = local_channel.plan()
        if local_channel.asserted:
            self._asserted(local_channel)
        if call is not None:
            self._send(local_channel, call)
        elif local_channel.idle:
            self._drop(local_channel)

    def _send(self, local_channel: LocalChannel, call: HoldCall[Ticket]) -> None:
        local_channel.call = call
        self.in_flight += 1
        if not call.tickets:
            self._background.add(local_channel)
        settings, incarnation = local_channel.settings, self._incarnation
        if is_plain_call(local_channel.kind, call):
            share = settings.share if call.flags else None
            app_id, channel, joins = local_channel.app_id, local_channel.channel, len(call.tickets)
            gen = incarnation.gens[local_channel.shard]
            command = self._plain_hold.pack(incarnation.w, gen, app_id, channel, call.base, joins, share)
            self._link.call_packed(command, partial(self._answered, local_channel, call))
            return
        if call.big_reply:
            self._big_replies[call.big_reply].awaited += 1
        extra_flags = Flag.WORKER_ENDS if self.ending else ""
        if self._debounce_ms and settings.hooks:
            extra_flags += Flag.DEBOUNCE
        history = None
        if Flag.HISTORY in call.flags:
            rule, epoch = settings.rule, f"{self._run}{next(self._epochs):x}"
            seconds, era = (rule.seconds, rule.era) if rule is not None else (0, "")
            history = HistoryTerms(epoch, seconds, settings.max_histories, era)
        names, args = encode(
            self._keys,
            incarnation.w,
            incarnation.gens[local_channel.shard],
            local_channel.app_id,
            local_channel.channel,
            local_channel.kind,
            local_channel.topic,
            call,
            extra_flags,
            history,
            settings.share,
            self._debounce_ms,
        )
        self._link.run(HOLD, names, args, partial(self._answered, local_channel, call))

    def _answered(self, local_channel: LocalChannel, call: HoldCall[Ticket], outcome: Any) -> None:
        local_channel.call = None
        self.in_flight -= 1
        self._background.discard(local_channel)
        big_reply = call.big_reply
        if big_reply:
            self._big_replies[big_reply].awaited -= 1
        if local_channel.has_place:
            self._places.release(local_channel)
        try:
            reply = None
            if isinstance(outcome, int):
                reply = plain_reply(outcome, len(call.tickets))
            elif isinstance(outcome, list):
                reply = decode(call.flags, outcome)
            if reply is not None:
                self.unhooked += reply.dropped
                self._replies.apply(local_channel, call, reply)
                if call.tickets and local_channel.waiting and BEYOND_SHARE in reply.accepted:
                    self._places.ask(local_channel)
            else:
                local_channel.fail(call)
                if isinstance(outcome, hiredis.ReplyError):
                    self._retry(local_channel, outcome)
                elif not isinstance(outcome, LinkDown):
                    self.on_fenced()
            for ticket in call.tickets:
                if ticket.cancelled:
                    self._replies.withdrawn(ticket)
        finally:
            # An exception while one channel's sockets are served must not stop the other channels.
            if local_channel.asserted:
                self._asserted(local_channel)
            if local_channel in self._counted and local_channel.lacks_at_most_count():
                # While clients keep coming, each reply would be followed by another call.
                self._counted_again.add(local_channel)
            else:
                self.mark_dirty(local_channel)
            self._continue(big_reply)

    def _place_decided(self, local_channel: LocalChannel, outcome: Outcome) -> None:
        if local_channel.has_place and local_channel.shard in self._connection.lost:
            # The place may be another's before the shard is back.
            self._places.release(local_channel)
        if isinstance(outcome, Exception) and (
            isinstance(outcome, hiredis.ReplyError) or self._connection.sends(local_channel.shard)
        ):
            # The total is that of all shards, so it isn't known while others than this one are lost.
            self._retry(local_channel, outcome)
            return
        if outcome is False:
            self._replies.refuse(local_channel)
        self.mark_dirty(local_channel)

    def _asserted(self, local_channel: LocalChannel) -> None:
        if local_channel in self._unasserted:
            self._unasserted.discard(local_channel)
            self._open_if_asserted()

    def _open_if_asserted(self) -> None:
        if self._connection.state is _REASSERTING and not self._unasserted and not self._resubscribing:
            self._connection.change(_OPEN)

    def _continue(self, big_reply: str) -> None:
        # Makes the calls that waited for another to be answered.
        if big_reply and self._connection.sending:
            while local_channel := self._big_replies[big_reply].next():
                self._advance(local_channel)
        if self._calling or self._joining or self._dirty or self._asserting:
            self.slices.start()
        if not self._connection.sending and self.in_flight == 0:
            self.on_stopped()

    def _retry(self, local_channel: LocalChannel, error: Exception) -> None:
        # The same absolute call again, later. Only its channel waits.
        self.errors += 1
        if str(error).startswith("NOSCRIPT"):
            # The link repeats calls of the other scripts itself.
            self._link.call(b"SCRIPT", b"LOAD", HOLD_PLAIN.source)
        delay_s = self._timings.retry_delay_s(local_channel.failures)
        local_channel.failures += 1
        log.warning("hold failed", app=local_channel.app_id, channel=local_channel.channel, reason=str(error))
        local_channel.activity = Activity.RETRY_DELAY
        self._asserted(local_channel)
        asyncio.get_running_loop().call_later(delay_s, self._retry_delay_over, local_channel)

    def _retry_delay_over(self, local_channel: LocalChannel) -> None:
        local_channel.activity = Activity.NONE
        self.mark_dirty(local_channel)
