"""Which users this worker's connections watch, and their watchlist frames (protocol/README.md "Users and watchlists").

The registry reports which users are online, over all workers and debounced. This module joins the changes of one loop
pass into one frame per connection. It doesn't know who is signed in, nor how frames are sent: `redpoll.testing` uses it
too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from redpoll.protocol import frames

__all__ = ["Group", "Online", "Watchlists"]


class Group(Protocol):
    """A set of connections, such as an Audience. `add` and `discard` return whether that changed it."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...
    def add(self, connection: Any, /) -> bool: ...
    def discard(self, connection: Any, /) -> bool: ...


class Online(Protocol):
    """Which users are online. `watch` returns the state of a user from now on to be reported to `user_state`; None: it
    isn't known yet, and will be reported."""

    def watch(self, app_id: str, user_id: str) -> bool | None: ...
    def unwatch(self, app_id: str, user_id: str) -> None: ...


class _Watched:
    """A user whom a connection of this worker watches. `online` is None until it is known; `sent` is the state that
    watchers were sent last."""

    __slots__ = ("app_id", "online", "sent", "user_id", "watchers")

    def __init__(self, app_id: str, user_id: str, watchers: Group) -> None:
        self.app_id = app_id
        self.user_id = user_id
        self.watchers = watchers
        self.online: bool | None = None
        self.sent: bool | None = None


class Watchlists:
    """`replace` sets a connection's list, `drop` removes it; the registry calls `user_state`.

    A connection is first sent the states of all users on its list, as soon as all are known, and then the changes.
    `new_group` makes an empty group. `encode` makes of a frame's JSON what a connection's `send` takes.
    """

    def __init__(self, new_group: Callable[[], Group], online: Online, encode: Callable[[bytes], bytes]) -> None:
        self._new_group = new_group
        self._online = online
        self._encode = encode
        self._watched: dict[tuple[str, str], _Watched] = {}
        self._lists: dict[Any, tuple[_Watched, ...]] = {}
        # Connections whose list wasn't sent yet, with the number of users on it whose state isn't known.
        self._unsent: dict[Any, int] = {}
        self._complete: list[Any] = []
        self._changed: dict[_Watched, None] = {}
        self._scheduled = False

    @property
    def watched(self) -> int:
        """The number of different users watched here."""
        return len(self._watched)

    def replace(self, connection: Any, app_id: str, user_ids: Iterable[str]) -> None:
        """`connection` watches these users from now on, all different, and no others. It is sent all their states."""
        before = self._lists.pop(connection, ())
        # The new list first, so that users on both lists aren't asked for again.
        users = tuple(self._watch(connection, app_id, user_id) for user_id in user_ids)
        remaining = set(users)
        for watched in before:
            if watched not in remaining:
                self._unwatch(connection, watched)
        if not users:
            self._unsent.pop(connection, None)
            return
        self._lists[connection] = users
        self._unsent[connection] = unknown = sum(watched.online is None for watched in users)
        if not unknown:
            self._complete.append(connection)
            self._schedule()

    def drop(self, connection: Any) -> None:
        """`connection` no longer watches any user. Idempotent."""
        for watched in self._lists.pop(connection, ()):
            self._unwatch(connection, watched)
        self._unsent.pop(connection, None)

    def user_state(self, app_id: str, user_id: str, online: bool) -> None:
        """The state of a watched user became known or changed."""
        watched = self._watched.get((app_id, user_id))
        if watched is None or watched.online is online:
            return
        if watched.online is not None:
            watched.online = online
            self._changed[watched] = None
            self._schedule()
            return
        watched.online = watched.sent = online
        # Lists with an unknown user weren't sent, so all its watchers are in `_unsent`.
        for connection in watched.watchers:
            self._unsent[connection] -= 1
            if not self._unsent[connection]:
                self._complete.append(connection)
                self._schedule()

    def _watch(self, connection: Any, app_id: str, user_id: str) -> _Watched:
        watched = self._watched.get((app_id, user_id))
        if watched is None:
            watched = self._watched[app_id, user_id] = _Watched(app_id, user_id, self._new_group())
            watched.online = watched.sent = self._online.watch(app_id, user_id)
        watched.watchers.add(connection)
        return watched

    def _unwatch(self, connection: Any, watched: _Watched) -> None:
        watched.watchers.discard(connection)
        if not len(watched.watchers):
            del self._watched[watched.app_id, watched.user_id]
            self._changed.pop(watched, None)
            self._online.unwatch(watched.app_id, watched.user_id)

    # -- sending -------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        self._scheduled = False
        self._send_changes()
        complete, self._complete = self._complete, []
        for connection in complete:
            # The connection may have closed or got another list since.
            if self._unsent.get(connection) == 0:
                del self._unsent[connection]
                users = self._lists[connection]
                came = [watched.user_id for watched in users if watched.online]
                went = [watched.user_id for watched in users if not watched.online]
                connection.send(self._encode(frames.watchlist_events(came, went)))

    def _send_changes(self) -> None:
        changed, self._changed = self._changed, {}
        news: dict[Any, tuple[list[str], list[str]]] = {}
        for watched in changed:
            if watched.online is watched.sent:
                continue
            watched.sent = watched.online
            for connection in watched.watchers:
                if connection not in self._unsent:
                    news.setdefault(connection, ([], []))[not watched.online].append(watched.user_id)
        # Many connections watch the same users, so equal frames are made once.
        made: dict[tuple[tuple[str, ...], tuple[str, ...]], bytes] = {}
        for connection, (came, went) in news.items():
            key = (tuple(came), tuple(went))
            frame = made.get(key)
            if frame is None:
                frame = made[key] = self._encode(frames.watchlist_events(came, went))
            connection.send(frame)
