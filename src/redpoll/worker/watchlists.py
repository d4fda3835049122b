"""Who of this worker's connections watches whom, and the frames that tell them (protocol.md 10.3).

Which users are online the registry says, over all workers and with the debounce of those who went; here it
becomes one frame a tick and connection. Knows nothing of who is signed in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from redpoll import _frame
from redpoll._fanout import Audience, Flusher
from redpoll.protocol import frames

if TYPE_CHECKING:
    from redpoll.cluster.membership.registry import Registry
    from redpoll.worker.connection import Connection

__all__ = ["Watchlists"]


class _Watched:
    """A user that somebody here watches. `online` None: not known yet; `told` is what watchers were told last."""

    __slots__ = ("app_id", "online", "told", "user_id", "watchers")

    def __init__(self, app_id: str, user_id: str, flusher: Flusher) -> None:
        self.app_id = app_id
        self.user_id = user_id
        self.watchers = Audience(flusher)
        self.online: bool | None = None
        self.told: bool | None = None


class Watchlists:
    """`replace` gives a connection its list, `drop` takes it away; `user_state` is the registry's word.

    A list is told whole first, as soon as the state of each of its users is known; afterwards what changed.
    """

    def __init__(self, flusher: Flusher) -> None:
        self.registry: Registry
        self._flusher = flusher
        self._watched: dict[tuple[str, str], _Watched] = {}
        self._lists: dict[Connection, tuple[_Watched, ...]] = {}
        # Lists that weren't told yet, each with the number of its users whose state isn't known.
        self._untold: dict[Connection, int] = {}
        self._complete: list[Connection] = []
        self._changed: dict[_Watched, None] = {}
        self._scheduled = False

    @property
    def watched(self) -> int:
        """How many users are watched here, each counted once."""
        return len(self._watched)

    def replace(self, connection: Connection, app_id: str, user_ids: Iterable[str]) -> None:
        """From now on `connection` watches these, all different, and nobody else; it is told all their states."""
        before = self._lists.pop(connection, ())
        # The new ones first: whoever is on both lists isn't asked for again.
        users = tuple(self._watch(connection, app_id, user_id) for user_id in user_ids)
        kept = set(users)
        for each in before:
            if each not in kept:
                self._unwatch(connection, each)
        if not users:
            self._untold.pop(connection, None)
            return
        self._lists[connection] = users
        self._untold[connection] = unknown = sum(each.online is None for each in users)
        if not unknown:
            self._complete.append(connection)
            self._schedule()

    def drop(self, connection: Connection) -> None:
        """It watches nobody any more. Idempotent."""
        for each in self._lists.pop(connection, ()):
            self._unwatch(connection, each)
        self._untold.pop(connection, None)

    def user_state(self, app_id: str, user_id: str, online: bool) -> None:
        """The state of a watched user: known now, or changed."""
        watched = self._watched.get((app_id, user_id))
        if watched is None or watched.online is online:
            return
        if watched.online is not None:
            watched.online = online
            self._changed[watched] = None
            self._schedule()
            return
        watched.online = watched.told = online
        # No list that holds an unknown user was told, so all its watchers are counted.
        for connection in watched.watchers:
            self._untold[connection] -= 1
            if not self._untold[connection]:
                self._complete.append(connection)
                self._schedule()

    def _watch(self, connection: Connection, app_id: str, user_id: str) -> _Watched:
        watched = self._watched.get((app_id, user_id))
        if watched is None:
            watched = self._watched[app_id, user_id] = _Watched(app_id, user_id, self._flusher)
            watched.online = watched.told = self.registry.watch(app_id, user_id)
        watched.watchers.add(connection)
        return watched

    def _unwatch(self, connection: Connection, watched: _Watched) -> None:
        watched.watchers.discard(connection)
        if not len(watched.watchers):
            del self._watched[watched.app_id, watched.user_id]
            self._changed.pop(watched, None)
            self.registry.unwatch(watched.app_id, watched.user_id)

    # -- telling -------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._scheduled = False
        self._tell_changes()
        complete, self._complete = self._complete, []
        for connection in complete:
            # It may have left, or been given another list, since.
            if self._untold.get(connection) == 0:
                del self._untold[connection]
                users = self._lists[connection]
                came = [each.user_id for each in users if each.online]
                went = [each.user_id for each in users if not each.online]
                connection.send(_frame.text(frames.watchlist_events(came, went)))

    def _tell_changes(self) -> None:
        changed, self._changed = self._changed, {}
        news: dict[Connection, tuple[list[str], list[str]]] = {}
        for watched in changed:
            if watched.online is watched.told:
                continue
            watched.told = watched.online
            for connection in watched.watchers:
                if connection not in self._untold:
                    news.setdefault(connection, ([], []))[not watched.online].append(watched.user_id)
        # Many watch the same few: one frame for all to whom the same happened.
        made: dict[tuple[tuple[str, ...], tuple[str, ...]], bytes] = {}
        for connection, (came, went) in news.items():
            key = (tuple(came), tuple(went))
            frame = made.get(key)
            if frame is None:
                frame = made[key] = _frame.text(frames.watchlist_events(came, went))
            connection.send(frame)
