"""Whether users that somebody on this worker watches are online anywhere in the cluster.

Reads and listens only; that users are online users.py tells. A user is online at once and offline after a while,
so that the reload of a page doesn't flicker (protocol.md 10.3).
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import hiredis

from redpoll.cluster.keys import Keys
from redpoll.cluster.link import Link

__all__ = ["Online"]

_TOPICS_A_SUBSCRIBE: Final = 1_000
_ONLINE: Final = ord("o")
_OFFLINE: Final = ord("f")


class _Watched:
    """One user. `online` is what watchers were told, None before Redis said anything."""

    __slots__ = ("app_id", "key", "online", "subscribed", "timer", "topic", "user_id", "watchers")

    def __init__(self, app_id: str, user_id: str, keys: Keys) -> None:
        pseudo = f"%u:{user_id}"
        self.app_id = app_id
        self.user_id = user_id
        self.topic = keys.topic(app_id, pseudo)
        self.key = keys.counts(app_id, pseudo)
        self.online: bool | None = None
        self.watchers = 0
        self.subscribed = False
        # Until it ends, the user is offline in Redis, or may be, and online to its watchers.
        self.timer: asyncio.TimerHandle | None = None

    def rest(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Online:
    """`here(app_id, user_id)`: whether the user is signed in on this worker, and Redis is told of that.
    `on_state(app_id, user_id, online)`: the first answer about a user, then each change.

    `offline_s`: how long a user is away before its watchers hear of it. `second_look_s`: how long others may
    need after a break to say again who is signed in.
    """

    def __init__(
        self,
        link: Link,
        keys: Keys,
        here: Callable[[str, str], bool],
        on_state: Callable[[str, str, bool], None],
        *,
        offline_s: float,
        second_look_s: float,
        retry_s: float,
    ) -> None:
        self.errors = 0
        self._link = link
        self._keys = keys
        self._here = here
        self._on_state = on_state
        self._offline_s = offline_s
        self._second_look_s = second_look_s
        self._retry_s = retry_s
        self._watched: dict[tuple[str, str], _Watched] = {}
        self._topics: dict[bytes, _Watched] = {}
        # What this tick's write is to contain.
        self._fresh: dict[_Watched, None] = {}
        self._unsubscribing: list[bytes] = []
        self._scheduled = False
        # False from a break until everything is asked for again.
        self._open = False

    def watch(self, app_id: str, user_id: str) -> bool | None:
        """One more watcher. Returns whether the user is online; None where that isn't known yet, and `on_state`
        will say it."""
        watched = self._watched.get((app_id, user_id))
        if watched is None:
            watched = _Watched(app_id, user_id, self._keys)
            self._watched[app_id, user_id] = self._topics[watched.topic] = watched
            self._fresh[watched] = None
            self._schedule()
        watched.watchers += 1
        return watched.online

    def unwatch(self, app_id: str, user_id: str) -> None:
        """One watcher less; with the last of them nothing is heard of the user any more."""
        watched = self._watched[app_id, user_id]
        watched.watchers -= 1
        if watched.watchers:
            return
        watched.rest()
        del self._watched[app_id, user_id], self._topics[watched.topic]
        self._fresh.pop(watched, None)
        if watched.subscribed:
            self._unsubscribing.append(watched.topic)
            self._schedule()

    def message(self, topic: bytes, payload: bytes) -> None:
        """A push that is no channel's."""
        watched = self._topics.get(topic)
        # Before the first answer there is nothing to change; what comes after it is later than it.
        if watched is None or watched.online is None:
            return
        if payload[0] == _ONLINE:
            self._found(watched, True)
        elif payload[0] == _OFFLINE and watched.online:
            # Anew, if a second look is on its way: this is said by who was there, and is certain.
            self._wait(watched, self._offline_s, self._gone)

    def lose(self) -> None:
        """The connection broke."""
        self._open = False
        self._unsubscribing.clear()
        for watched in self._watched.values():
            watched.subscribed = False
            watched.rest()

    def tell(self) -> None:
        """A new connection or a new name: everything is asked for again."""
        self._open = True
        self._fresh = dict.fromkeys(self._watched.values())
        self._flush()

    def close(self) -> None:
        for watched in self._watched.values():
            watched.rest()

    def _schedule(self) -> None:
        if self._open and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        if not self._open:
            return
        gone, self._unsubscribing = self._unsubscribing, []
        for at in range(0, len(gone), _TOPICS_A_SUBSCRIBE):
            self._link.unsubscribe(gone[at : at + _TOPICS_A_SUBSCRIBE], self._subscribed)
        fresh, self._fresh = self._fresh, {}
        topics = [watched.topic for watched in fresh if not watched.subscribed]
        for at in range(0, len(topics), _TOPICS_A_SUBSCRIBE):
            self._link.subscribe(topics[at : at + _TOPICS_A_SUBSCRIBE], self._subscribed)
        # Behind the SUBSCRIBE, in the same write: whatever changes after the answer is heard.
        for watched in fresh:
            watched.subscribed = True
            self._ask(watched, self._looked)

    def _subscribed(self, outcome: Any) -> None:
        if isinstance(outcome, hiredis.ReplyError):
            self.errors += 1
            self._link.drop(f"SUBSCRIBE refused: {outcome}")

    def _ask(self, watched: _Watched, done: Callable[[_Watched, Any], None]) -> None:
        self._link.call(b"EXISTS", watched.key, done=partial(done, watched))

    def _looked(self, watched: _Watched, reply: Any) -> None:
        if self._failed(watched, reply):
            return
        if reply:
            self._found(watched, True)
        elif watched.online is None and self._here(watched.app_id, watched.user_id):
            # Came back while Redis was being told of the going: that it is here waits for that call's answer, and
            # our question did not.
            self._ask_again(watched)
        elif watched.online is None:
            self._found(watched, False)
        elif watched.online:
            # The worker that has the user may not have said so again yet.
            self._wait(watched, self._second_look_s, self._look_again)

    def _look_again(self, watched: _Watched) -> None:
        self._ask(watched, self._looked_again)

    def _looked_again(self, watched: _Watched, reply: Any) -> None:
        # A timer that runs was set by a push meanwhile, which is as good an answer.
        if not self._failed(watched, reply) and watched.timer is None:
            self._found(watched, bool(reply))

    def _failed(self, watched: _Watched, reply: Any) -> bool:
        # After a break everything is asked again; an error of the server's is asked again in a while.
        if isinstance(reply, hiredis.ReplyError):
            self.errors += 1
            if watched.watchers:
                self._ask_again(watched)
        return isinstance(reply, Exception) or not watched.watchers

    def _ask_again(self, watched: _Watched) -> None:
        self._wait(watched, self._retry_s, partial(self._ask, done=self._looked))

    def _wait(self, watched: _Watched, delay_s: float, then: Callable[[_Watched], None]) -> None:
        def over() -> None:
            watched.timer = None
            then(watched)

        watched.rest()
        watched.timer = asyncio.get_running_loop().call_later(delay_s, over)

    def _gone(self, watched: _Watched) -> None:
        self._found(watched, False)

    def _found(self, watched: _Watched, online: bool) -> None:
        watched.rest()
        if watched.online != online:
            watched.online = online
            self._on_state(watched.app_id, watched.user_id, online)
