"""Whether the users that this worker's clients watch are online anywhere in the cluster.

This module only reads; signed_in.py writes. A user is reported online at once, and offline after a delay, so that a
page reload goes unnoticed (protocol/README.md "Users and watchlists").
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Final

import hiredis

from redpoll.cluster.envelopes import Envelope
from redpoll.cluster.membership.membership_events import MembershipEvents
from redpoll.cluster.membership.signed_in import SignedInUsers
from redpoll.cluster.membership.timings import Timings
from redpoll.cluster.redis.keys import SHARDS, Keys, shard_of_name, user_pseudo
from redpoll.cluster.redis.link import Link
from redpoll.loop.parted_dict import PartedDict
from redpoll.loop.slices import Cursor, Queue, Slices

__all__ = ["Online"]

_MAX_TOPICS_PER_UNSUBSCRIBE: Final = 1_000
# Users who are subscribed and asked for in one step, about.
_MAX_ASKED: Final = 100
_ONLINE: Final = ord(Envelope.USER_ONLINE)
_OFFLINE: Final = ord(Envelope.USER_OFFLINE)
_NEVER: Final = -1


class _Watched:
    """One watched user. `online` is what was reported last; None before the first answer of Redis. `subscribed_after`:
    how often the shard had been lost when the topic was subscribed."""

    __slots__ = ("app_id", "key", "online", "shard", "subscribed_after", "timer", "topic", "user_id", "watchers")

    def __init__(self, app_id: str, user_id: str, keys: Keys) -> None:
        pseudo = user_pseudo(user_id)
        self.app_id = app_id
        self.user_id = user_id
        self.topic = keys.topic(app_id, pseudo)
        self.key = keys.counts(app_id, pseudo)
        self.shard = shard_of_name(self.topic)
        self.online: bool | None = None
        self.watchers = 0
        self.subscribed_after = _NEVER
        # While it runs, the user may be offline in Redis, and is still online to its watchers.
        self.timer: asyncio.TimerHandle | None = None

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Online:
    """Reports to `events.user_state`: the first answer about a user, then each change. `errors` counts error answers,
    which are repeated.

    After a break, each pass of the loop subscribes and asks for a slice of the users. New ones don't wait for them.
    """

    def __init__(
        self,
        link: Link,
        keys: Keys,
        signed_in: SignedInUsers,
        events: MembershipEvents,
        timings: Timings,
    ) -> None:
        self.errors = 0
        self._link = link
        self._keys = keys
        self._signed_in = signed_in
        self._events = events
        self.timings = timings
        # By app and user.
        self.watched: PartedDict[tuple[str, str], _Watched] = PartedDict()
        self._topics: dict[bytes, _Watched] = {}
        # What the next write will contain.
        self._new: Queue[_Watched] = Queue()
        self._unsubscribing: deque[_Watched] = deque()
        self._slices = Slices(self._step)
        # Shards in which everything is to be asked for again after a break.
        self._lost: set[int] = set(range(SHARDS))
        # How often each shard was lost. What was subscribed or began to wait before the last time is over, and no pass
        # over all users is needed to note that.
        self._breaks = [0] * SHARDS
        # Shards that are back, and the watched users as far as they were not asked for since.
        self._walks: deque[tuple[set[int], Cursor[_Watched]]] = deque()

    def watch(self, app_id: str, user_id: str) -> bool | None:
        """One more watcher. Returns whether the user is online; None if that isn't known yet and will be reported."""
        watched = self.watched.get((app_id, user_id))
        if watched is None:
            watched = _Watched(app_id, user_id, self._keys)
            self.watched[app_id, user_id] = self._topics[watched.topic] = watched
            # Otherwise it is asked for when its shard is back.
            if watched.shard not in self._lost:
                self._new.add(watched)
                self._slices.start()
        watched.watchers += 1
        return watched.online

    def unwatch(self, app_id: str, user_id: str) -> None:
        """One watcher less. After the last one, nothing more is reported about the user."""
        watched = self.watched[app_id, user_id]
        watched.watchers -= 1
        if watched.watchers:
            return
        watched.stop_timer()
        del self.watched[app_id, user_id], self._topics[watched.topic]
        self._new.discard(watched)
        if self._is_subscribed(watched):
            self._unsubscribing.append(watched)
            self._slices.start()

    def push(self, topic: bytes, payload: bytes) -> None:
        """Takes a push on a topic that belongs to no channel."""
        watched = self._topics.get(topic)
        # Before the first answer there is nothing to change, and that answer includes this push.
        if watched is None or watched.online is None:
            return
        if payload[0] == _ONLINE:
            self._report(watched, True)
        elif payload[0] == _OFFLINE and watched.online:
            # Replaces the timer of a second look: this push is certain.
            self._wait(watched, self.timings.offline_s, self._gone)

    def connection_lost(self, shards: Collection[int]) -> None:
        self._lost.update(shards)
        for shard in shards:
            self._breaks[shard] += 1
        for walk in list(self._walks):
            walk[0].difference_update(shards)
            if not walk[0]:
                self._walks.remove(walk)

    def connected(self, shards: Collection[int]) -> None:
        """A new connection or a new W in these shards: everything is asked for again."""
        self._lost.difference_update(shards)
        self._walks.append((set(shards), Cursor(self.watched.values_in_parts())))
        self._slices.start()

    def close(self) -> None:
        self.connection_lost(range(SHARDS))
        for watched in self.watched.values():
            watched.stop_timer()

    def _is_subscribed(self, watched: _Watched) -> bool:
        return watched.subscribed_after == self._breaks[watched.shard]

    def _step(self) -> bool:
        if self._unsubscribing:
            # First, because a user may be watched again.
            count = min(len(self._unsubscribing), _MAX_TOPICS_PER_UNSUBSCRIBE)
            left = [self._unsubscribing.popleft() for _ in range(count)]
            topics = [watched.topic for watched in left if self._is_subscribed(watched)]
            if topics:
                self._link.unsubscribe(topics, self._subscribed)
        elif self._new:
            count = min(len(self._new), _MAX_ASKED)
            new = [self._new.pop() for _ in range(count)]
            self._look([watched for watched in new if watched.shard not in self._lost])
        elif self._walks:
            shards, cursor = self._walks[0]
            part = cursor.next(_MAX_ASKED * SHARDS // len(shards))
            if cursor.done:
                self._walks.popleft()
            self._look([watched for watched in part if watched.shard in shards and watched.watchers])
        return bool(self._unsubscribing or self._new or self._walks)

    def _look(self, part: list[_Watched]) -> None:
        topics = [watched.topic for watched in part if not self._is_subscribed(watched)]
        if topics:
            self._link.subscribe(topics, self._subscribed)
        # After the SUBSCRIBE, in the same write: a change after the answer comes as a push.
        for watched in part:
            watched.subscribed_after = self._breaks[watched.shard]
            self._ask(watched, self._first_look)

    def _subscribed(self, outcome: Any) -> None:
        if isinstance(outcome, hiredis.ReplyError):
            self.errors += 1
            self._link.drop(f"SUBSCRIBE refused: {outcome}")

    def _ask(self, watched: _Watched, done: Callable[[_Watched, Any], None]) -> None:
        self._link.call(b"EXISTS", watched.key, done=partial(done, watched))

    def _first_look(self, watched: _Watched, reply: Any) -> None:
        if self._failed(watched, reply):
            return
        if reply:
            self._report(watched, True)
        elif watched.online is None and self._signed_in.here(watched.app_id, watched.user_id):
            # Redis doesn't know this worker's user: yet, or any more. The user returned while a call removed it, or
            # watchlists were just turned off or on, and the call that adds the user or the end of this watch follows.
            self._ask_again(watched)
        elif watched.online is None:
            self._report(watched, False)
        elif watched.online:
            # After a break, the worker that has the user may not have written it to Redis again yet.
            self._wait(watched, self.timings.second_look_s, self.look_again)

    def look_again(self, watched: _Watched) -> None:
        """Asks Redis a second time, after `second_look_s`, about a user that seemed offline after a break."""
        self._ask(watched, self._second_look)

    def _second_look(self, watched: _Watched, reply: Any) -> None:
        # A timer that runs was started by a push meanwhile, which is newer than this answer.
        if not self._failed(watched, reply) and watched.timer is None:
            self._report(watched, bool(reply))

    def _failed(self, watched: _Watched, reply: Any) -> bool:
        # After a break everything is asked again anyway. An error answer is repeated after a delay.
        if isinstance(reply, hiredis.ReplyError):
            self.errors += 1
            if watched.watchers:
                self._ask_again(watched)
        return isinstance(reply, Exception) or not watched.watchers

    def _ask_again(self, watched: _Watched) -> None:
        self._wait(watched, self.timings.retry_s, partial(self._ask, done=self._first_look))

    def _wait(self, watched: _Watched, delay_s: float, then: Callable[[_Watched], None]) -> None:
        breaks = self._breaks[watched.shard]

        def over() -> None:
            watched.timer = None
            # After a break, the user is asked for again anyway.
            if breaks == self._breaks[watched.shard]:
                then(watched)

        watched.stop_timer()
        watched.timer = asyncio.get_running_loop().call_later(delay_s, over)

    def _gone(self, watched: _Watched) -> None:
        self._report(watched, False)

    def _report(self, watched: _Watched, online: bool) -> None:
        watched.stop_timer()
        if watched.online != online:
            watched.online = online
            self._events.user_state(watched.app_id, watched.user_id, online)
