"""When Redis is told what: one write per tick, one call per channel under way, bounds on what is awaited.

Decides about time and order only. What a call says `LocalChannel` knows, and what its reply means the registry.
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
from redpoll.cluster.membership.hold_call import TOPIC, HoldCall
from redpoll.cluster.membership.incarnation import Incarnation
from redpoll.cluster.membership.local_channel import LocalChannel
from redpoll.cluster.scripts import HOLD

__all__ = ["Sync"]

log = structlog.get_logger(__name__)

_TOPICS_A_SUBSCRIBE: Final = 1_000
# Redis closes a subscribed connection with 32 MB unread; a roster has at most 512 KiB, a cached event 256 KiB.
_MAX_ROSTERS: Final = 32
_MAX_CACHED: Final = 64
# Of a re-assertion: enough to keep Redis busy, few enough that others get their turn.
_MAX_TELLING: Final = 500


class _Bulk:
    """Replies of one sort that may be big: at most `most` are awaited, the channels of the others wait."""

    __slots__ = ("awaited", "most", "waiting")

    def __init__(self, most: int) -> None:
        self.most = most
        self.awaited = 0
        self.waiting: dict[LocalChannel, None] = {}

    @property
    def full(self) -> bool:
        return self.awaited >= self.most

    def next(self) -> LocalChannel | None:
        """Who may be told now."""
        if not self.waiting or self.full:
            return None
        local_channel = next(iter(self.waiting))
        del self.waiting[local_channel]
        return local_channel


class Sync:
    """`touch` a channel when something about it changed. Nothing goes out before `tell` on a new connection,
    which first repeats what is held, and only then lets changes through.

    `on_ok(local_channel, call, reply)`: Redis took the call. `on_heard(local_channel)`: the topic of a channel
    that is no more than that is heard. `on_idle(local_channel)`: the channel can be forgotten. `on_fenced()`: Redis
    takes nothing more in our name; `on_settled()`: after `stop`, the last call has ended.

    `debounced`: webhooks are told that a channel was vacated or a member removed after a while, and not at all if it
    came back. `unhooked` counts rows for webhooks that were not written because too many others wait to be fetched.
    """

    def __init__(
        self,
        link: Link,
        keys: Keys,
        incarnation: Incarnation,
        *,
        on_ok: Callable[[LocalChannel, HoldCall, list[Any]], None],
        on_heard: Callable[[LocalChannel], None],
        on_idle: Callable[[LocalChannel], None],
        on_fenced: Callable[[], None],
        on_settled: Callable[[], None],
        retry_s: float,
        greatest_retry_s: float,
        debounced: bool = True,
    ) -> None:
        self.errors = 0
        self.unhooked = 0
        self.in_flight = 0
        # The worker ends: counts that would be told later are told with this call.
        self.ending = False
        self._link = link
        self._keys = keys
        self._incarnation = incarnation
        self._on_ok = on_ok
        self._on_heard = on_heard
        self._on_idle = on_idle
        self._on_fenced = on_fenced
        self._on_settled = on_settled
        self._debounced = debounced
        # A history's epoch is named before it is known whether a new one begins, so each call brings a name.
        self._run = secrets.token_hex(6)
        self._epochs = count(1)
        self._retry_s = retry_s
        self._greatest_retry_s = greatest_retry_s
        # Changes go through; False from a break until everything was told again.
        self._open = False
        self._telling = False
        # What this tick's write is to contain.
        self._dirty: dict[LocalChannel, None] = {}
        self._unsubscribing: list[bytes] = []
        self._scheduled = False
        # Held channels that Redis has yet to be told of again, and those of them that wait for their turn.
        self._unasserted: dict[LocalChannel, None] = {}
        self._queue: deque[LocalChannel] = deque()
        self._bulks = {"r": _Bulk(_MAX_ROSTERS), "c": _Bulk(_MAX_CACHED)}

    def touch(self, local_channel: LocalChannel) -> None:
        """Something changed: Redis hears of it in this tick's write, or when the call under way is
        answered."""
        if local_channel.dropped or local_channel.call is not None or local_channel.blocked:
            return
        if local_channel.idle:
            self._on_idle(local_channel)
        elif self._open:
            self._dirty[local_channel] = None
            self._schedule()

    def forget(self, local_channel: LocalChannel) -> None:
        """The channel is held no longer."""
        self._dirty.pop(local_channel, None)
        self._unasserted.pop(local_channel, None)
        if local_channel.subscribed and self._link.up:
            self._unsubscribing.append(local_channel.topic)
            self._schedule()

    def stop(self) -> None:
        """We were fenced: no further calls. `on_settled` follows when none is under way."""
        self._open = self._telling = False
        self._dirty.clear()
        self._unasserted.clear()
        self._queue.clear()
        for bulk in self._bulks.values():
            bulk.waiting.clear()

    def lose(self) -> None:
        """The connection broke."""
        self.stop()
        self._unsubscribing.clear()

    def tell(self, local_channels: Iterable[LocalChannel], sys: bytes) -> None:
        """A new connection or a new name: topics first, `sys` last of them, then all that is held, then
        changes that came meanwhile."""
        local_channels = list(local_channels)
        self._unsubscribe()
        self._subscribe(
            local_channel for local_channel in local_channels if local_channel.attached or local_channel.waiting
        )
        self._link.subscribe([sys], self._subscribed)
        for local_channel in local_channels:
            # One that is blocked tells everything when it isn't any more; the others don't wait for it.
            if local_channel.attached and not local_channel.asserted and not local_channel.blocked:
                self._unasserted[local_channel] = None
        self._queue.extend(self._unasserted)
        self._telling = True
        self._pump()
        self._link.flush()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        if not self._open:
            return
        self._unsubscribe()
        dirty, self._dirty = self._dirty, {}
        self._subscribe(local_channel for local_channel in dirty if local_channel.waiting)
        # Calls with joins first: somebody waits for those.
        for local_channel in sorted(dirty, key=lambda local_channel: not local_channel.waiting):
            self._advance(local_channel)
        self._link.flush()

    def _unsubscribe(self) -> None:
        for at in range(0, len(self._unsubscribing), _TOPICS_A_SUBSCRIBE):
            self._link.unsubscribe(self._unsubscribing[at : at + _TOPICS_A_SUBSCRIBE], self._subscribed)
        self._unsubscribing.clear()

    def _subscribe(self, local_channels: Iterable[LocalChannel]) -> None:
        # Before the calls, in the same write: no event published after a success frame may be missed.
        fresh: list[LocalChannel] = []
        for local_channel in local_channels:
            if local_channel.listens and not local_channel.subscribed:
                local_channel.subscribed = True
                fresh.append(local_channel)
        for at in range(0, len(fresh), _TOPICS_A_SUBSCRIBE):
            share = fresh[at : at + _TOPICS_A_SUBSCRIBE]
            bare = [local_channel for local_channel in share if local_channel.kind == TOPIC]
            self._link.subscribe([local_channel.topic for local_channel in share], partial(self._heard, bare))

    def _heard(self, bare: list[LocalChannel], outcome: Any) -> None:
        self._subscribed(outcome)
        if outcome is None:
            for local_channel in bare:
                local_channel.listening = True
                self._advance(local_channel)

    def _subscribed(self, outcome: Any) -> None:
        # A refusal (by an ACL) comes before the replies to the calls that count on it.
        if isinstance(outcome, hiredis.ReplyError):
            self.errors += 1
            self._link.drop(f"SUBSCRIBE refused: {outcome}")

    def _advance(self, local_channel: LocalChannel) -> None:
        if local_channel.dropped or local_channel.call is not None or local_channel.blocked:
            return
        if local_channel.kind == TOPIC:
            if local_channel.listening and local_channel.waiting:
                self._on_heard(local_channel)
            if local_channel.idle:
                self._on_idle(local_channel)
            return
        bulk = self._bulks.get(local_channel.wants)
        if bulk is not None and bulk.full:
            bulk.waiting[local_channel] = None
            return
        call = local_channel.plan()
        if local_channel.asserted:
            self._unasserted.pop(local_channel, None)
        if call is not None:
            self._send(local_channel, call)
        elif local_channel.idle:
            self._on_idle(local_channel)

    def _send(self, local_channel: LocalChannel, call: HoldCall) -> None:
        local_channel.call = call
        self.in_flight += 1
        if call.brings:
            self._bulks[call.brings].awaited += 1
        keys, app_id, channel = self._keys, local_channel.app_id, local_channel.channel
        flags = call.flags
        if self.ending:
            flags += "e"
        if self._debounced and local_channel.hooks:
            flags += "d"
        names = keys.hold(self._incarnation.w, app_id, channel, local_channel.kind, flags)
        args: list[bytes | str | int] = [
            self._incarnation.name,
            self._incarnation.gen,
            local_channel.kind,
            flags,
            app_id,
            channel,
            call.base,
            call.cap,
            local_channel.topic,
            keys.publish,
            len(call.gone),
            call.joining,
            *call.gone,
        ]
        if local_channel.sockets is not None:
            for user, info in call.joins:
                args += (user, info)
        if "h" in flags:
            seconds, era = (
                (local_channel.rule.seconds, local_channel.rule.era) if local_channel.rule is not None else (0, "")
            )
            args += (f"{self._run}{next(self._epochs):x}", seconds, local_channel.most_histories, era)
        self._link.run(HOLD, names, args, partial(self._answered, local_channel, call))

    def _answered(self, local_channel: LocalChannel, call: HoldCall, reply: Any) -> None:
        local_channel.call = None
        self.in_flight -= 1
        if call.brings:
            self._bulks[call.brings].awaited -= 1
        try:
            if isinstance(reply, list) and reply[0] == b"OK":
                if "S" in call.flags or "X" in call.flags:
                    self.unhooked += reply.pop()
                self._on_ok(local_channel, call, reply)
            else:
                local_channel.take_back(call)
                if isinstance(reply, hiredis.ReplyError):
                    self._retry(local_channel, reply)
                elif not isinstance(reply, LinkDown):
                    self._on_fenced()
        finally:
            # Whatever went wrong with one channel's sockets, the others go on.
            if local_channel.asserted:
                self._unasserted.pop(local_channel, None)
            elif local_channel in self._unasserted:
                self._queue.appendleft(local_channel)
            self.touch(local_channel)
            self._pump()

    def _pump(self) -> None:
        # Goes on with whatever waited for a call to be answered.
        for bulk in self._bulks.values():
            while local_channel := bulk.next():
                self._advance(local_channel)
        while self._queue and self.in_flight < _MAX_TELLING:
            self._advance(self._queue.popleft())
        if self._telling:
            if not self._unasserted:
                self._telling, self._open = False, True
                self._on_settled()
        elif not self._open and self.in_flight == 0:
            self._on_settled()

    def _retry(self, local_channel: LocalChannel, error: hiredis.ReplyError) -> None:
        # The same absolute call again, later. Its channel waits, the others don't.
        self.errors += 1
        delay_s = min(self._retry_s * 2**local_channel.failures, self._greatest_retry_s)
        local_channel.failures = min(local_channel.failures + 1, 16)
        log.warning("hold failed", app=local_channel.app_id, channel=local_channel.channel, reason=str(error))
        local_channel.blocked = True
        self._unasserted.pop(local_channel, None)
        asyncio.get_running_loop().call_later(delay_s, self._unblock, local_channel)

    def _unblock(self, local_channel: LocalChannel) -> None:
        local_channel.blocked = False
        self.touch(local_channel)
