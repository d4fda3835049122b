"""Which of this worker's connections are signed in, and as which user (protocol/README.md "Users and watchlists").

A user is signed in while at least one connection is, on any worker; the registry gets each sign-in and sign-out.
Being a member of a presence channel doesn't sign a user in.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from redpoll import _engine, _frame
from redpoll._fanout import Audience, Flusher
from redpoll.loop.slices import Slices
from redpoll.protocol.apps import App
from redpoll.protocol.errors import Code
from redpoll.protocol.users import TERMINATED
from redpoll.worker.hub.watchlists import Watchlists

if TYPE_CHECKING:
    from redpoll.cluster.membership.registry import Registry
    from redpoll.worker.hub.connection import Connection
    from redpoll.worker.hub.removed import Removed

__all__ = ["Users"]

# When an app turns watchlists on, so many are handled at a time; other clients are served in between.
_LISTS_A_SLICE = 50


class Users:
    """This worker's map from user to connections, by app. `removed` has those who may not return to a channel."""

    def __init__(self, flusher: Flusher, registry: Registry, removed: Removed) -> None:
        self.watchlists = Watchlists(partial(Audience, flusher), registry.online, _frame.text)
        self.removed = removed
        self._registry = registry
        self._flusher = flusher
        # An audience adds and discards in O(1) and takes less than half of a set's memory.
        self._connections: dict[tuple[str, str], Audience] = {}
        # The watchlists that clients asked for, by app; in apps without watchlists too: an operator may turn them on.
        self._wanted: dict[str, dict[Connection, tuple[str, ...]]] = {}
        self._to_switch: deque[Connection] = deque()

    def __len__(self) -> int:
        return len(self._connections)

    def signed_in(self, connection: Connection, user_id: str, watchlist: tuple[str, ...]) -> None:
        """`connection` signed in as this user. A second sign-in replaces only the watchlist."""
        app = connection.session.app
        audience = self._connections.get((app.id, user_id))
        if audience is None:
            audience = self._connections[app.id, user_id] = Audience(self._flusher)
        # Before the watchlist, so that users who watch themselves are online.
        if audience.add(connection):
            self._registry.signed_in.sign_in(app, user_id)
        if watchlist:
            self._wanted.setdefault(app.id, {})[connection] = watchlist
        else:
            self._forget_wanted(connection)
        if app.watchlist:
            self.watchlists.replace(connection, app.id, watchlist)

    def closed(self, connection: Connection) -> None:
        """`connection` closed, so its user has one connection less. Idempotent."""
        user_id = connection.session.user_id
        if user_id is None:
            return
        self._forget_wanted(connection)
        self.watchlists.drop(connection)
        key = (connection.session.app.id, user_id)
        audience = self._connections.get(key)
        if audience is not None and audience.discard(connection):
            if not len(audience):
                del self._connections[key]
            self._registry.signed_in.sign_out(*key)

    def _forget_wanted(self, connection: Connection) -> None:
        app_id = connection.session.app.id
        wanted = self._wanted.get(app_id)
        if wanted is not None:
            wanted.pop(connection, None)
            if not wanted:
                del self._wanted[app_id]

    def app_changed(self, old: App, new: App) -> None:
        """The app's record changed. If watchlists were turned on or off, open connections follow."""
        if old.watchlist is new.watchlist:
            return
        idle = not self._to_switch
        self._to_switch.extend(self._wanted.get(new.id, ()))
        if idle and self._to_switch:
            self._switch_some()

    def _switch_some(self) -> None:
        for _ in range(min(_LISTS_A_SLICE, len(self._to_switch))):
            connection = self._to_switch.popleft()
            # The connection may have closed, or the setting changed again.
            app = connection.session.app
            wanted = self._wanted.get(app.id, {}).get(connection)
            if wanted is not None:
                self.watchlists.replace(connection, app.id, wanted if app.watchlist else ())
        if self._to_switch:
            asyncio.get_running_loop().call_soon(self._switch_some)

    def was_removed(self, connection: Connection, channel: str, user_id: str) -> bool:
        """Whether the app removed this member after the connection began, which joins by a signature."""
        return connection.client_seen.removals < self.removed.at(connection.session, channel, user_id)

    def terminate(self, app_id: str, user_id: str) -> int:
        """Close the connections that are signed in as this user (protocol/README.md "Users and watchlists"). Returns
        their number. Presence members with that id are not affected.

        An app may sign in all its guests as one user, so only a slice of them is closed within this call.
        """
        connections = deque(self._connections.get((app_id, user_id), ()))
        count = len(connections)

        def close_one() -> bool:
            if connections:
                connection = connections.popleft()
                if connection.state == _engine.OPEN:
                    connection.shut(Code.UNAUTHORIZED, TERMINATED)
            return bool(connections)

        Slices(close_one).run()
        return count
