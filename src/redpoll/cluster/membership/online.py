"""Whether the users that this worker's clients watch are online anywhere in the cluster.

This module only reads; signed_in.py writes. A user is reported online at once, and offline after a delay, so that a
page reload goes unnoticed (protocol/README.md "Users and watchlists").
"""

import asyncio
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

__all__ = ["Online"]

_MAX_TOPICS_PER_SUBSCRIBE: Final = 1_000
_ONLINE: Final = ord(Envelope.USER_ONLINE)
_OFFLINE: Final = ord(Envelope.USER_OFFLINE)


class _Watched:
    """One watched user. `online` is what was reported last; None before the first answer of Redis. `subscribed`: the
    topic is subscribed on this connection."""

    __slots__ = ("app_id", "key", "online", "shard", "subscribed", "timer", "topic", "user_id", "watchers")

    def __init__(self, app_id: str, user_id: str, keys: Keys) -> None:
        pseudo = user_pseudo(user_id)
        self.app_id = app_id
        self.user_id = user_id
        self.topic = keys.topic(app_id, pseudo)
        self.key = keys.counts(app_id, pseudo)
        self.shard = shard_of_name(self.topic)
        self.online: bool | None = None
        self.watchers = 0
        self.subscribed = False
        # While it runs, the user may be offline in Redis, and is still online to its watchers.
        self.timer: asyncio.TimerHandle | None = None

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Online:
    """Reports to `events.user_state`: the first answer about a user, then each change. `errors` counts error answers,
    which are repeated."""

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
        self.watched: dict[tuple[str, str], _Watched] = {}
        self._topics: dict[bytes, _Watched] = {}
        # What this tick's write will contain.
        self._new: dict[_Watched, None] = {}
        self._unsubscribing: list[bytes] = []
        self._flush_scheduled = False
        # Shards in which everything is to be asked for again after a break.
        self._lost: set[int] = set(range(SHARDS))

    def watch(self, app_id: str, user_id: str) -> bool | None:
        """One more watcher. Returns whether the user is online; None if that isn't known yet and will be reported."""
        watched = self.watched.get((app_id, user_id))
        if watched is None:
            watched = _Watched(app_id, user_id, self._keys)
            self.watched[app_id, user_id] = self._topics[watched.topic] = watched
            self._new[watched] = None
            self._schedule()
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
        self._new.pop(watched, None)
        if watched.subscribed:
            self._unsubscribing.append(watched.topic)
            self._schedule()

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
        self._unsubscribing = [topic for topic in self._unsubscribing if shard_of_name(topic) not in shards]
        for watched in self.watched.values():
            if watched.shard in shards:
                watched.subscribed = False
                watched.stop_timer()

    def connected(self, shards: Collection[int]) -> None:
        """A new connection or a new W in these shards: everything is asked for again."""
        self._lost.difference_update(shards)
        self._new.update(dict.fromkeys(watched for watched in self.watched.values() if watched.shard in shards))
        self._flush()

    def close(self) -> None:
        for watched in self.watched.values():
            watched.stop_timer()

    def _schedule(self) -> None:
        if len(self._lost) < SHARDS and not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        if len(self._lost) == SHARDS:
            return
        topics_left, self._unsubscribing = self._unsubscribing, []
        for at in range(0, len(topics_left), _MAX_TOPICS_PER_SUBSCRIBE):
            self._link.unsubscribe(topics_left[at : at + _MAX_TOPICS_PER_SUBSCRIBE], self._subscribed)
        new = [watched for watched in self._new if watched.shard not in self._lost]
        # The others wait until their shard is back.
        self._new = {watched: None for watched in self._new if watched.shard in self._lost}
        topics = [watched.topic for watched in new if not watched.subscribed]
        for at in range(0, len(topics), _MAX_TOPICS_PER_SUBSCRIBE):
            self._link.subscribe(topics[at : at + _MAX_TOPICS_PER_SUBSCRIBE], self._subscribed)
        # After the SUBSCRIBE, in the same write: a change after the answer comes as a push.
        for watched in new:
            watched.subscribed = True
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
        def over() -> None:
            watched.timer = None
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
