"""The open connections of this worker, by app.

Each app's connections are an Audience of their own, so a search for one app's connections doesn't look at the others,
and their number is known without counting. All sessions of an app share one record: a changed record reaches them at
once, however many they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from redpoll._fanout import Audience, Flusher
from redpoll.protocol.apps import App, CurrentApp
from redpoll.protocol.grants import AppGrants, RevokedGrants
from redpoll.worker.hub.removed import REMOVALS, Removed

if TYPE_CHECKING:
    from redpoll.worker.hub.connection import Connection

__all__ = ["OpenConnections", "UnsentBytes"]


# Connections that one call of `UnsentBytes.advance` looks at, at least.
_PART: Final = 2_000
# Connections that `each` takes at a time.
_CHUNK: Final = 50


class _OfApp(Audience):
    """The connections of one app, and the record that their sessions share."""

    __slots__ = ("current",)

    def __init__(self, flusher: Flusher, app: App, grants: AppGrants) -> None:
        super().__init__(flusher)
        self.current = CurrentApp(app, grants)


class OpenConnections:
    """Contains each open connection with a session once. `grants` has the revoked grants of all apps. `removed` has the
    users who were removed from channels, while a connection may be older than that."""

    def __init__(self, flusher: Flusher, grants: RevokedGrants) -> None:
        self.removed = Removed()
        self._flusher = flusher
        self._grants = grants
        self._by_app: dict[str, _OfApp] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Connection]:
        """Over a copy: connections may come and go meanwhile."""
        return iter([connection for audience in self._by_app.values() for connection in audience])

    def current(self, app: App) -> CurrentApp:
        """What the sessions of this app share. `add` a connection in the same step."""
        audience = self._by_app.get(app.id)
        if audience is None:
            audience = self._by_app[app.id] = _OfApp(self._flusher, app, self._grants.of(app.id))
        return audience.current

    def add(self, connection: Connection) -> None:
        if self._by_app[connection.session.app.id].add(connection):
            self._count += 1

    def discard(self, connection: Connection) -> bool:
        """False: it isn't here any more."""
        app_id = connection.session.app.id
        audience = self._by_app.get(app_id)
        if audience is None or not audience.discard(connection):
            return False
        self._count -= 1
        if not len(audience):
            del self._by_app[app_id]
            self.removed.forget(app_id)
        return True

    def remove_member(self, app_id: str, channel: str, user_id: str) -> None:
        """The connections that are here can't become this member again."""
        if app_id in self._by_app:
            self.removed.put(app_id, channel, user_id, REMOVALS.next())

    def app_changed(self, app: App) -> None:
        """All sessions of the app have this record from now on."""
        audience = self._by_app.get(app.id)
        if audience is not None:
            audience.current.record = app

    def each(self) -> Iterator[Connection]:
        """Every connection, for those who look at a part now and a part later. Connections may come and go meanwhile:
        those that were here from the beginning to the end come once at least, and new ones may not come."""
        for audience in self.audiences():
            yield from _backwards(audience)

    def each_of_app(self, app_id: str) -> Iterator[Connection]:
        """As `each`, the connections of one app."""
        audience = self._by_app.get(app_id)
        return iter(()) if audience is None else _backwards(audience)

    def count_of_app(self, app_id: str) -> int:
        return len(self._by_app.get(app_id, ()))

    def find(self, app_id: str, sid_hi: int, sid_lo: int) -> Connection | None:
        """The app's connection with this socket id."""
        audience = self._by_app.get(app_id)
        connection: Connection | None = audience.find(sid_hi, sid_lo) if audience is not None else None
        return connection

    def find_socket(self, app_id: str, socket_id: str) -> Connection | None:
        """As `find`, by a socket id as clients write it."""
        hi, _, lo = socket_id.partition(".")
        if len(socket_id) > 40 or not (hi.isdecimal() and lo.isdecimal()) or max(int(hi), int(lo)) >= 1 << 64:
            return None
        return self.find(app_id, int(hi), int(lo))

    def counts(self) -> dict[str, int]:
        """The number of connections by app."""
        return {app_id: len(audience) for app_id, audience in self._by_app.items()}

    def audiences(self) -> list[Audience]:
        """The connections, by app."""
        return list(self._by_app.values())


def _backwards(audience: Audience) -> Iterator[Connection]:
    # When a connection leaves, the last one takes its place. From the end on, none is passed over by that.
    place = len(audience)
    while place > 0:
        first = max(0, place - _CHUNK)
        yield from reversed(audience.part(first, place - first))
        place = first


class UnsentBytes:
    """The unsent bytes of all connections, for /metrics. A look at each connection takes long, so every call of
    `advance` adds up the next part of them, and `total` is the sum of the last complete round."""

    def __init__(self, open_connections: OpenConnections, calls_per_round: int) -> None:
        self.total = 0
        self._open_connections = open_connections
        self._calls = calls_per_round
        self._part = 0
        self._left: list[Audience] = []
        self._place = 0
        self._sum = 0

    def advance(self) -> None:
        if not self._left:
            self.total, self._sum = self._sum, 0
            self._left = self._open_connections.audiences()
            self._part = max(_PART, -(-len(self._open_connections) // self._calls))
        wanted = self._part
        while wanted > 0 and self._left:
            audience = self._left[-1]
            self._sum += audience.unsent(self._place, wanted)
            end = self._place + wanted
            wanted = end - len(audience)
            if wanted >= 0:
                self._left.pop()
                self._place = 0
            else:
                self._place = end
