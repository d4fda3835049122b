"""Counts each new connection against its app's `max_connections`.

The limit counts connections on all workers, so the registry asks Redis. This module matches the registry's answers
with the connections that wait for them. It doesn't open or refuse connections; its caller does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from redpoll.cluster.membership.connection_limit import CONN
from redpoll.cluster.membership.join import Join
from redpoll.protocol.apps import App
from redpoll.protocol.errors import CLOSE_TEXTS, Code
from redpoll.protocol.handshake import Refusal

if TYPE_CHECKING:
    from redpoll.cluster.membership.registry import Registry
    from redpoll.worker.hub.connection import Connection

__all__ = ["Admission", "OnAnswer"]

# Called with None if the connection may open, or with the reason why not.
OnAnswer = Callable[[Refusal | None], None]

_REASONS: dict[int, str] = {
    Code.OVER_QUOTA: CLOSE_TEXTS[Code.OVER_QUOTA],
    Code.OVER_CAPACITY: "the number of connections could not be confirmed in time; connect again",
}

_OTHER_APP = "the key belongs to another app now; connect again"


class Admission:
    """The connections that wait for an answer. Connections of apps without a limit are counted too, because an operator
    may set a limit later."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._waiting: dict[Connection, tuple[Join, OnAnswer]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def admits_at_once(self, app: App) -> bool:
        """Count a connection of an app without a limit. False: `ask` for its place.

        The connection counts until its session closes (`Hub.closed`) or until `give_back`.
        """
        return self._registry.connection_limit.admit_at_once(app)

    def ask(self, connection: Connection, app: App, on_answer: OnAnswer) -> None:
        """Count a connection of an app with a limit, as `admits_at_once` does. `on_answer` is called once, in this call
        or later. It isn't called if the connection is withdrawn first."""
        join = Join(connection, app, CONN)
        self._waiting[connection] = (join, on_answer)
        self._registry.connection_limit.admit(join)

    def withdraw(self, connection: Connection) -> None:
        """The connection closed while it waited. Does nothing for other connections."""
        waiting = self._waiting.pop(connection, None)
        if waiting is not None:
            self._registry.connection_limit.cancel(waiting[0])

    def give_back(self, app_id: str) -> None:
        """A connection of this app was counted and won't open."""
        self._registry.connection_limit.depart(app_id)

    def confirmed(self, app: App, outcome: App | Refusal) -> App | Refusal:
        """What a second check of a connection says that was counted in `app`. Its place is given back unless it opens
        there: its key may have gone to another app meanwhile."""
        if not isinstance(outcome, Refusal):
            if outcome.id == app.id:
                return outcome
            outcome = Refusal(Code.RECONNECT, _OTHER_APP)
        self.give_back(app.id)
        return outcome

    def dismiss(self, refusal: Refusal) -> None:
        """Refuse all connections that wait."""
        for connection, (_, on_answer) in list(self._waiting.items()):
            self.withdraw(connection)
            on_answer(refusal)

    # -- what the registry answers -------------------------------------------------------------------------

    def admitted(self, join: Join) -> None:
        self._settle(join, None)

    def turned_away(self, join: Join, code: int) -> None:
        self._settle(join, Refusal(code, _REASONS[code]))

    def _settle(self, join: Join, refusal: Refusal | None) -> None:
        _, on_answer = self._waiting.pop(join.owner)
        on_answer(refusal)
