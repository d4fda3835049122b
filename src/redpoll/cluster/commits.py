"""When Redis is told what: one write per tick, one call per channel under way, bounds on what is awaited.

Decides about time and order only. What a call says `Held` knows, and what its reply means the registry.
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

from redpoll.cluster.calls import TOPIC, Call
from redpoll.cluster.held import Held
from redpoll.cluster.incarnation import Incarnation
from redpoll.cluster.keys import Keys
from redpoll.cluster.link import Link, LinkDown
from redpoll.cluster.scripts import HOLD

__all__ = ["Commits"]

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
        self.waiting: dict[Held, None] = {}

    @property
    def full(self) -> bool:
        return self.awaited >= self.most

    def next(self) -> Held | None:
        """Who may be told now."""
        if not self.waiting or self.full:
            return None
        held = next(iter(self.waiting))
        del self.waiting[held]
        return held


class Commits:
    """`touch` a channel when something about it changed. Nothing goes out before `tell` on a new connection,
    which first repeats what is held, and only then lets changes through.

    `on_ok(held, call, reply)`: Redis took the call. `on_heard(held)`: the topic of a channel that is no more
    than that is heard. `on_idle(held)`: the channel can be forgotten. `on_fenced()`: Redis takes nothing more in
    our name; `on_settled()`: after `stop`, the last call has ended.

    `debounced`: webhooks are told that a channel was vacated or a member removed after a while, and not at all if it
    came back. `unhooked` counts rows for webhooks that were not written because too many others wait to be fetched.
    """

    def __init__(
        self,
        link: Link,
        keys: Keys,
        incarnation: Incarnation,
        *,
        on_ok: Callable[[Held, Call, list[Any]], None],
        on_heard: Callable[[Held], None],
        on_idle: Callable[[Held], None],
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
        self._dirty: dict[Held, None] = {}
        self._unsubscribing: list[bytes] = []
        self._scheduled = False
        # Held channels that Redis has yet to be told of again, and those of them that wait for their turn.
        self._unasserted: dict[Held, None] = {}
        self._queue: deque[Held] = deque()
        self._bulks = {"r": _Bulk(_MAX_ROSTERS), "c": _Bulk(_MAX_CACHED)}

    def touch(self, held: Held) -> None:
        """Something changed: Redis hears of it in this tick's write, or when the call under way is
        answered."""
        if held.dropped or held.call is not None or held.blocked:
            return
        if held.idle:
            self._on_idle(held)
        elif self._open:
            self._dirty[held] = None
            self._schedule()

    def forget(self, held: Held) -> None:
        """The channel is held no longer."""
        self._dirty.pop(held, None)
        self._unasserted.pop(held, None)
        if held.subscribed and self._link.up:
            self._unsubscribing.append(held.topic)
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

    def tell(self, helds: Iterable[Held], sys: bytes) -> None:
        """A new connection or a new name: topics first, `sys` last of them, then all that is held, then
        changes that came meanwhile."""
        helds = list(helds)
        self._unsubscribe()
        self._subscribe(held for held in helds if held.attached or held.waiting)
        self._link.subscribe([sys], self._subscribed)
        for held in helds:
            # One that is blocked tells everything when it isn't any more; the others don't wait for it.
            if held.attached and not held.asserted and not held.blocked:
                self._unasserted[held] = None
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
        self._subscribe(held for held in dirty if held.waiting)
        # Calls with joins first: somebody waits for those.
        for held in sorted(dirty, key=lambda held: not held.waiting):
            self._advance(held)
        self._link.flush()

    def _unsubscribe(self) -> None:
        for at in range(0, len(self._unsubscribing), _TOPICS_A_SUBSCRIBE):
            self._link.unsubscribe(self._unsubscribing[at : at + _TOPICS_A_SUBSCRIBE], self._subscribed)
        self._unsubscribing.clear()

    def _subscribe(self, helds: Iterable[Held]) -> None:
        # Before the calls, in the same write: no event published after a success frame may be missed.
        fresh: list[Held] = []
        for held in helds:
            if held.listens and not held.subscribed:
                held.subscribed = True
                fresh.append(held)
        for at in range(0, len(fresh), _TOPICS_A_SUBSCRIBE):
            share = fresh[at : at + _TOPICS_A_SUBSCRIBE]
            bare = [held for held in share if held.kind == TOPIC]
            self._link.subscribe([held.topic for held in share], partial(self._heard, bare))

    def _heard(self, bare: list[Held], outcome: Any) -> None:
        self._subscribed(outcome)
        if outcome is None:
            for held in bare:
                held.listening = True
                self._advance(held)

    def _subscribed(self, outcome: Any) -> None:
        # A refusal (by an ACL) comes before the replies to the calls that count on it.
        if isinstance(outcome, hiredis.ReplyError):
            self.errors += 1
            self._link.drop(f"SUBSCRIBE refused: {outcome}")

    def _advance(self, held: Held) -> None:
        if held.dropped or held.call is not None or held.blocked:
            return
        if held.kind == TOPIC:
            if held.listening and held.waiting:
                self._on_heard(held)
            if held.idle:
                self._on_idle(held)
            return
        bulk = self._bulks.get(held.wants)
        if bulk is not None and bulk.full:
            bulk.waiting[held] = None
            return
        call = held.plan()
        if held.asserted:
            self._unasserted.pop(held, None)
        if call is not None:
            self._send(held, call)
        elif held.idle:
            self._on_idle(held)

    def _send(self, held: Held, call: Call) -> None:
        held.call = call
        self.in_flight += 1
        if call.brings:
            self._bulks[call.brings].awaited += 1
        keys, app_id, channel = self._keys, held.app_id, held.channel
        flags = call.flags
        if self.ending:
            flags += "e"
        if self._debounced and held.hooks:
            flags += "d"
        names = keys.hold(self._incarnation.w, app_id, channel, held.kind, flags)
        args: list[bytes | str | int] = [
            self._incarnation.name,
            self._incarnation.gen,
            held.kind,
            flags,
            app_id,
            channel,
            call.base,
            call.cap,
            held.topic,
            keys.publish,
            len(call.gone),
            call.joining,
            *call.gone,
        ]
        if held.sockets is not None:
            for user, info in call.joins:
                args += (user, info)
        if "h" in flags:
            seconds, era = (held.rule.seconds, held.rule.era) if held.rule is not None else (0, "")
            args += (f"{self._run}{next(self._epochs):x}", seconds, held.most_histories, era)
        self._link.run(HOLD, names, args, partial(self._answered, held, call))

    def _answered(self, held: Held, call: Call, reply: Any) -> None:
        held.call = None
        self.in_flight -= 1
        if call.brings:
            self._bulks[call.brings].awaited -= 1
        try:
            if isinstance(reply, list) and reply[0] == b"OK":
                if "S" in call.flags or "X" in call.flags:
                    self.unhooked += reply.pop()
                self._on_ok(held, call, reply)
            else:
                held.take_back(call)
                if isinstance(reply, hiredis.ReplyError):
                    self._retry(held, reply)
                elif not isinstance(reply, LinkDown):
                    self._on_fenced()
        finally:
            # Whatever went wrong with one channel's sockets, the others go on.
            if held.asserted:
                self._unasserted.pop(held, None)
            elif held in self._unasserted:
                self._queue.appendleft(held)
            self.touch(held)
            self._pump()

    def _pump(self) -> None:
        # Goes on with whatever waited for a call to be answered.
        for bulk in self._bulks.values():
            while held := bulk.next():
                self._advance(held)
        while self._queue and self.in_flight < _MAX_TELLING:
            self._advance(self._queue.popleft())
        if self._telling:
            if not self._unasserted:
                self._telling, self._open = False, True
                self._on_settled()
        elif not self._open and self.in_flight == 0:
            self._on_settled()

    def _retry(self, held: Held, error: hiredis.ReplyError) -> None:
        # The same absolute call again, later. Its channel waits, the others don't.
        self.errors += 1
        delay_s = min(self._retry_s * 2**held.failures, self._greatest_retry_s)
        held.failures = min(held.failures + 1, 16)
        log.warning("hold failed", app=held.app_id, channel=held.channel, reason=str(error))
        held.blocked = True
        self._unasserted.pop(held, None)
        asyncio.get_running_loop().call_later(delay_s, self._unblock, held)

    def _unblock(self, held: Held) -> None:
        held.blocked = False
        self.touch(held)
