"""Tells Redis what this worker holds: one call per channel in flight, bounded replies, a slice of the work per tick.

This module decides when and in which order. Subscribes and, after a break, the topics of what is held come first,
because clients wait for them. Then comes everything else. local_channel.py decides what a call says, and replies.py
what its reply means.
"""

import asyncio
import secrets
from collections.abc import Callable, Collection, Iterable
from functools import partial
from itertools import count
from typing import Any, Final

import hiredis
import structlog

from redpoll.cluster.membership.catchup import Catchup
from redpoll.cluster.membership.connection_state import ALL_SHARDS, ConnectionState, RedisState
from redpoll.cluster.membership.hold_call import (
    BEYOND_SHARE,
    TOPIC,
    Flag,
    HistoryTerms,
    HoldCall,
    PlainHold,
    decode,
    encode,
    is_plain_call,
    plain_reply,
    with_source,
)
from redpoll.cluster.membership.incarnation import Incarnation
from redpoll.cluster.membership.join import Join, JoinState, Stage
from redpoll.cluster.membership.join_queue import JoinQueue
from redpoll.cluster.membership.local_channel import LocalChannel, TopicSubscription
from redpoll.cluster.membership.local_channels import Agenda, CountDelay, LocalChannels
from redpoll.cluster.membership.places import Outcome, Places
from redpoll.cluster.membership.reassertion import Reassertion
from redpoll.cluster.membership.replies import Replies
from redpoll.cluster.membership.timings import Timings
from redpoll.cluster.redis.keys import SHARDS, Keys
from redpoll.cluster.redis.link import Link, LinkDown
from redpoll.cluster.redis.scripts import HOLD
from redpoll.loop.slices import Slices

__all__ = ["Sync"]

log = structlog.get_logger(__name__)

_MAX_TOPICS_PER_SUBSCRIBE: Final = 1_000
# Calls in flight in all, and those that no client waits for. A subscribe and each event wait for the calls that were
# sent before, in Redis and then among its replies: about 50 us for each. One slice makes 50 to 100 calls, so with so
# many in flight Redis is busy until the next slice.
_MAX_IN_FLIGHT: Final = 200
_MAX_BACKGROUND: Final = 100

_OPEN: Final = ConnectionState.OPEN
_REASSERTING: Final = ConnectionState.REASSERTING
_CLEAN: Final = Stage.CLEAN
_CALLING: Final = Stage.CALLING
_SENDING: Final = Stage.SENDING
_DROPPED: Final = Stage.DROPPED
_WITHDRAWN: Final = JoinState.WITHDRAWN
_NONE: Final = TopicSubscription.NONE
_REQUESTED: Final = TopicSubscription.REQUESTED
_CONFIRMED: Final = TopicSubscription.CONFIRMED


class Sync:
    """On a new connection nothing is sent before `assert_held`. From then on changes go out, new joins first, and what
    is held is repeated in between. The same holds for single shards of a Cluster.

    `on_fenced()`: Redis refuses calls under our name. `on_stopped()`: after `stop`, the last call was answered.

    `debounce_s`: webhook rows for leaves are held back for so long, and not written if the channel or member returns.
    `unhooked` counts webhook rows that were not written because too many are unread. `errors` counts errors that Redis
    answered with. `ending`: the worker ends, so counts are announced with this call.
    """

    def __init__(
        self,
        link: Link,
        keys: Keys,
        incarnation: Incarnation,
        connection: RedisState,
        channels: LocalChannels,
        joins: JoinQueue,
        replies: Replies,
        catchup: Catchup,
        timings: Timings,
        *,
        on_fenced: Callable[[], None],
        on_stopped: Callable[[], None],
        debounce_s: float = 3.0,
    ) -> None:
        self.errors = 0
        self.unhooked = 0
        self.in_flight = 0
        self.ending = False
        self.agenda = Agenda()
        self.slices = Slices(self._step, after=link.flush)
        # Plain channels of which only the number of sockets changed.
        self.counts = CountDelay(self.mark_dirty, timings.count_s)
        self._on_fenced = on_fenced
        self._on_stopped = on_stopped
        self._link = link
        self._keys = keys
        self._incarnation = incarnation
        self._connection = connection
        self._channels = channels
        self._joins = joins
        self._replies = replies
        self._catchup = catchup
        self._timings = timings
        self._debounce_ms = round(debounce_s * 1000)
        self._plain_hold = PlainHold(keys)
        self.places = Places(link, keys, timings, self.agenda, self._place_decided)
        # The caller names the epoch before it knows whether the history needs a new one, so each call brings a name.
        run = secrets.token_hex(6)
        self._epochs = (f"{run}{number:x}" for number in count(1))
        self._reassertion = Reassertion()
        # Topics that are heard for others, too: they stay subscribed (cluster/listening.py).
        self.listened: Collection[bytes] = ()
        # Calls in flight that no client waits for.
        self._background = 0

    def mark_dirty(self, local_channel: LocalChannel) -> None:
        """Something changed: written to Redis in one of the next writes, or when the call in flight is answered."""
        if local_channel.busy:
            return
        if local_channel.queued:
            self.agenda.queue_joins(local_channel)
            self.slices.start()
        elif local_channel.attached == 0 and local_channel.idle:
            self._drop(local_channel)
        elif local_channel.settled and local_channel not in self._reassertion.unasserted:
            return
        elif self._connection.sends(local_channel.shard):
            self.agenda.queue_change(local_channel)
            self.slices.start()

    def keep_subscribed(self, topic: bytes) -> None:
        """The topic is subscribed for others: an UNSUBSCRIBE that is due would end that."""
        self.agenda.unsubscribing.discard(topic)

    def stop(self) -> None:
        """No further calls, because we were fenced. `on_stopped` follows when none is in flight, and then `forget` for
        each channel."""
        self._reassertion.stop()

    def connection_lost(self, shards: Collection[int]) -> None:
        """No calls for these shards before `assert_held`. `forget` follows for each of their channels."""
        if len(shards) == SHARDS:
            self._reassertion.stop()
            self.agenda.unsubscribing.clear()
        else:
            self._reassertion.lose(shards)

    def forget(self, local_channel: LocalChannel) -> None:
        """The shard of this channel is lost, or our name: `assert_held` begins with it from the start."""
        self.agenda.forget(local_channel)
        self._reassertion.unasserted.discard(local_channel)

    def assert_held(self, shards: Collection[int] = ALL_SHARDS) -> None:
        """A new connection or a new W: subscribes topics, `sys` last, then repeats all that is held, slice by slice.
        Joins go out in between. Each call carries absolute values, and a channel that isn't asserted yet is asserted
        before its joins, so the order of channels doesn't matter."""
        self._reassertion.begin(shards, self._channels.slice_by_slice())
        self._connection.registered(shards)
        self.agenda.shards_are_back()
        self._resubscribe()
        self.slices.start()

    def _resubscribe(self) -> None:
        part, ended_shards = self._reassertion.next_part()
        self._subscribe(local_channel for local_channel in part if local_channel.attached or local_channel.queued)
        for local_channel in part:
            # A channel that waits to retry or is scanned is asserted afterwards; the others don't wait for it.
            if local_channel.attached and not local_channel.asserted and local_channel.stage <= _SENDING:
                self._reassertion.unasserted.add(local_channel)
                if local_channel.queued and not local_channel.busy:
                    self.agenda.queue_joins(local_channel)
                elif local_channel.stage is _CLEAN:
                    self.agenda.move(local_channel, Stage.ASSERTING)
            else:
                self.mark_dirty(local_channel)
        if ended_shards:
            for of_shards, topics in self._incarnation.last_topics(ended_shards):
                self._link.subscribe(topics, partial(self._last_subscribed, of_shards))
            self._open_if_asserted()

    def _drop(self, local_channel: LocalChannel) -> None:
        # The channel is no longer held, and Redis knows.
        self.agenda.move(local_channel, _DROPPED)
        if local_channel.has_place:
            self.places.release(local_channel)
        self._asserted(local_channel)
        if (
            local_channel.subscription is not _NONE
            and local_channel.shard not in self._connection.lost
            and local_channel.topic not in self.listened
        ):
            self.agenda.unsubscribing.add(local_channel.topic)
            self.slices.start()
        self._catchup.forget(local_channel)
        self._channels.drop(local_channel)

    def _step(self) -> bool:
        # One step of the most urgent work. False: there is none, or it waits for answers.
        if not self._connection.sending:
            return False
        agenda, resubscribing = self.agenda, self._reassertion.subscribing
        if self._reassertion.takes_turn():
            self._resubscribe()
        elif self.in_flight >= _MAX_IN_FLIGHT and not resubscribing:
            return False
        elif agenda.calling:
            # A client waits for this one.
            self._advance(agenda.take(agenda.calling))
        elif agenda.subscribing:
            self._subscribe_for_joins()
        elif resubscribing:
            self._resubscribe()
        elif agenda.dirty and self._background < _MAX_BACKGROUND:
            self._advance(agenda.take(agenda.dirty))
        elif agenda.asserting and self._background < _MAX_BACKGROUND:
            self._advance(agenda.take(agenda.asserting))
        elif agenda.unsubscribing:
            count = min(len(agenda.unsubscribing), _MAX_TOPICS_PER_SUBSCRIBE)
            self._link.unsubscribe([agenda.unsubscribing.pop() for _ in range(count)], self._subscribed)
        else:
            return False
        return True

    def _subscribe_for_joins(self) -> None:
        agenda, lost, part = self.agenda, self._connection.lost, list[LocalChannel]()
        for _ in range(min(len(agenda.subscribing), _MAX_TOPICS_PER_SUBSCRIBE)):
            local_channel = agenda.take(agenda.subscribing)
            if local_channel.shard in lost:
                agenda.move(local_channel, Stage.LOST)
            else:
                agenda.move(local_channel, _CALLING)
                part.append(local_channel)
        self._subscribe(part)

    def _subscribe(self, local_channels: Iterable[LocalChannel]) -> None:
        # Before the calls, in the same write: no event published after a success frame may be missed.
        new: list[LocalChannel] = []
        for local_channel in local_channels:
            if local_channel.has_topic and local_channel.subscription is _NONE:
                local_channel.subscription = _REQUESTED
                # Left and joined again: an UNSUBSCRIBE that is sent later would end this subscription.
                self.agenda.unsubscribing.discard(local_channel.topic)
                new.append(local_channel)
        for at in range(0, len(new), _MAX_TOPICS_PER_SUBSCRIBE):
            part = new[at : at + _MAX_TOPICS_PER_SUBSCRIBE]
            topics_only = [local_channel for local_channel in part if local_channel.kind == TOPIC]
            topics = [local_channel.topic for local_channel in part]
            self._link.subscribe(topics, partial(self._topics_subscribed, topics_only))
            # In the same write as the SUBSCRIBE: what the pages don't have comes as a push.
            self._catchup.resume(part)

    def _topics_subscribed(self, topics_only: list[LocalChannel], outcome: Any) -> None:
        self._subscribed(outcome)
        if outcome is None:
            for local_channel in topics_only:
                local_channel.subscription = _CONFIRMED
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
            if local_channel.subscription is _CONFIRMED and local_channel.queued:
                self._replies.topic_subscribed(local_channel)
            if local_channel.idle:
                self._drop(local_channel)
            return
        if self.agenda.wait_for_reply(local_channel):
            return
        call = local_channel.plan()
        if local_channel.asserted:
            self._asserted(local_channel)
        if call is not None:
            self._send(local_channel, call)
        elif local_channel.idle:
            self._drop(local_channel)

    def _send(self, local_channel: LocalChannel, call: HoldCall[Join]) -> None:
        self.agenda.move(local_channel, _SENDING)
        self.in_flight += 1
        if not call.joins:
            self._background += 1
        settings, incarnation = local_channel.settings, self._incarnation
        if is_plain_call(local_channel.kind, call):
            self._link.call_packed(self._packed(local_channel, call), partial(self._answered, local_channel, call))
            return
        if call.big_reply:
            self.agenda.awaited[call.big_reply] += 1
        extra_flags = Flag.WORKER_ENDS if self.ending else ""
        if self._debounce_ms and settings.hooks:
            extra_flags += Flag.DEBOUNCE
        history = None
        if Flag.HISTORY in call.flags:
            rule, epoch = settings.rule, next(self._epochs)
            seconds, era = (rule.seconds, rule.era) if rule is not None else (0, "")
            history = HistoryTerms(epoch, seconds, settings.max_histories, era)
        names, args = encode(
            self._keys,
            incarnation.worker_id,
            incarnation.generations[local_channel.shard],
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

    def _packed(self, local_channel: LocalChannel, call: HoldCall[Join]) -> bytes:
        incarnation, joins = self._incarnation, len(call.joins)
        gen = incarnation.generations[local_channel.shard]
        share = local_channel.settings.share if call.flags else None
        app_id, channel = local_channel.app_id, local_channel.channel
        return self._plain_hold.pack(incarnation.worker_id, gen, app_id, channel, call.base, joins, share)

    def _answered(self, local_channel: LocalChannel, call: HoldCall[Join], outcome: Any) -> None:
        if type(outcome) is hiredis.ReplyError and str(outcome).startswith("NOSCRIPT"):
            # Of HOLD_PLAIN: the link repeats calls of the other scripts itself.
            command = with_source(self._packed(local_channel, call))
            self._link.call(*command, done=partial(self._answered, local_channel, call))
            return
        self.agenda.move(local_channel, _CLEAN)
        self.in_flight -= 1
        if not call.joins:
            self._background -= 1
        big_reply = call.big_reply
        if big_reply:
            self.agenda.awaited[big_reply] -= 1
        if local_channel.has_place:
            self.places.release(local_channel)
        try:
            reply = None
            if isinstance(outcome, int):
                reply = plain_reply(outcome, len(call.joins))
            elif isinstance(outcome, list):
                reply = decode(call.flags, outcome)
            if reply is not None:
                self.unhooked += reply.dropped
                self._replies.apply(local_channel, call, reply)
                if call.joins and local_channel.queued and BEYOND_SHARE in reply.accepted:
                    self.places.ask(local_channel)
            else:
                local_channel.fail(call)
                if isinstance(outcome, hiredis.ReplyError):
                    self._retry(local_channel, outcome)
                elif not isinstance(outcome, LinkDown):
                    self._on_fenced()
            for join in call.joins:
                if join.state is _WITHDRAWN:
                    self._joins.withdrawn_answered(join)
        finally:
            # An exception while one channel's sockets are served must not stop the other channels.
            if local_channel.asserted:
                self._asserted(local_channel)
            if not self.counts.holds_back(local_channel):
                self.mark_dirty(local_channel)
            self._continue(big_reply)

    def _place_decided(self, local_channel: LocalChannel, outcome: Outcome) -> None:
        if local_channel.has_place and local_channel.shard in self._connection.lost:
            # The place may be another's before the shard is back.
            self.places.release(local_channel)
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
        if local_channel in self._reassertion.unasserted:
            self._reassertion.unasserted.discard(local_channel)
            self._open_if_asserted()

    def _open_if_asserted(self) -> None:
        if self._connection.state is _REASSERTING and self._reassertion.done:
            self._connection.change(_OPEN)

    def _continue(self, big_reply: str) -> None:
        # Makes the calls that waited for another to be answered.
        if big_reply and self._connection.sending:
            while local_channel := self.agenda.next_for_reply(big_reply):
                self._advance(local_channel)
        if self.agenda.due:
            self.slices.start()
        if not self._connection.sending and self.in_flight == 0:
            self._on_stopped()

    def _retry(self, local_channel: LocalChannel, error: Exception) -> None:
        # The same absolute call again, later. Only its channel waits.
        self.errors += 1
        delay_s = self._timings.retry_delay_s(local_channel.failures)
        local_channel.failures += 1
        log.warning("hold failed", app=local_channel.app_id, channel=local_channel.channel, reason=str(error))
        self.agenda.move(local_channel, Stage.RETRY_DELAY)
        self._asserted(local_channel)
        asyncio.get_running_loop().call_later(delay_s, self._retry_delay_over, local_channel)

    def _retry_delay_over(self, local_channel: LocalChannel) -> None:
        self.agenda.move(local_channel, _CLEAN)
        self.mark_dirty(local_channel)
