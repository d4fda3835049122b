"""Which connections of this worker are signed in, and as whom (protocol.md 10).

A user is signed in as long as one connection is, on any worker; the registry is told of each. Knows nothing
of presence: a member of a channel is not signed in by that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from redpoll._fanout import Audience, Flusher
from redpoll.protocol.apps import App
from redpoll.worker.watchlists import Watchlists

if TYPE_CHECKING:
    from redpoll.cluster.membership.registry import Registry
    from redpoll.worker.connection import Connection

__all__ = ["Users"]

# Watchlists of an app that turned them on come in slices: others are served in between.
_LISTS_A_SLICE = 50


class Users:
    """This worker's map from user to connections, kept per app."""

    def __init__(self, flusher: Flusher) -> None:
        self.registry: Registry
        self.watchlists = Watchlists(flusher)
        self._flusher = flusher
        # An audience finds and loses one connection in O(1), in less than half of a set's memory.
        self._connections: dict[tuple[str, str], Audience] = {}
        # What each asked to watch, in apps without watchlists too: an operator may turn them on.
        self._wanted: dict[Connection, tuple[str, ...]] = {}
        self._to_switch: deque[Connection] = deque()

    def attach(self, registry: Registry) -> None:
        self.registry = self.watchlists.registry = registry

    def __len__(self) -> int:
        return len(self._connections)

    def signed_in(self, connection: Connection, user_id: str, watchlist: tuple[str, ...]) -> None:
        """`connection` is the user's. Again: nothing but the watchlist is replaced."""
        app = connection.session.app
        audience = self._connections.get((app.id, user_id))
        if audience is None:
            audience = self._connections[app.id, user_id] = Audience(self._flusher)
        # Before the watchlist: who watches themselves finds themselves online.
        if audience.add(connection):
            self.registry.sign_in(app, user_id)
        if watchlist:
            self._wanted[connection] = watchlist
        else:
            self._wanted.pop(connection, None)
        if app.watchlist:
            self.watchlists.replace(connection, app.id, watchlist)

    def closed(self, connection: Connection) -> None:
        """Whoever it was signed in as has one connection less. Idempotent."""
        user_id = connection.session.user_id
        if user_id is None:
            return
        self._wanted.pop(connection, None)
        self.watchlists.drop(connection)
        key = (connection.session.app.id, user_id)
        audience = self._connections.get(key)
        if audience is not None and audience.discard(connection):
            if not len(audience):
                del self._connections[key]
            self.registry.sign_out(*key)

    def app_changed(self, old: App, new: App) -> None:
        """Watchlists that were turned on are told from now on, those turned off are forgotten."""
        if old.watchlist is new.watchlist:
            return
        idle = not self._to_switch
        self._to_switch.extend(each for each in self._wanted if each.session.app.id == new.id)
        if idle and self._to_switch:
            self._switch_some()

    def _switch_some(self) -> None:
        for _ in range(min(_LISTS_A_SLICE, len(self._to_switch))):
            connection = self._to_switch.popleft()
            # As things stand now: it may have closed, or the switch been turned again.
            wanted = self._wanted.get(connection)
            if wanted is not None:
                app = connection.session.app
                self.watchlists.replace(connection, app.id, wanted if app.watchlist else ())
        if self._to_switch:
            asyncio.get_running_loop().call_soon(self._switch_some)

    def terminate(self, app_id: str, user_id: str) -> int:
        """Close whatever is signed in as this user (protocol.md 10.5); how many that were. Members of presence
        channels with that id are no matter of it."""
        connections = list(self._connections.get((app_id, user_id), ()))
        for connection in connections:
            connection.shut(4009, "the user's connections were terminated by the app")
        return len(connections)
