"""Asks for a place in an app for each new connection, and calls back when there is an answer.

An app's `max_connections` counts connections on all workers, so the registry asks Redis. This module matches its
answers with the connections that wait. It doesn't know how a connection is opened or refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from redpoll.cluster.membership.registry import Ticket
from redpoll.protocol.apps import App
from redpoll.protocol.handshake import Refusal

if TYPE_CHECKING:
    from redpoll.cluster.membership.registry import Registry
    from redpoll.worker.connection import Connection

__all__ = ["Admission", "Then"]

# Called with None when the connection has a place.
Then = Callable[[Refusal | None], None]

_REASONS = {
    4004: "the app has as many connections as it may have",
    4100: "the number of connections could not be confirmed in time; connect again",
}


class Admission:
    """The connections that wait. Every greeted connection has a place, in apps without a limit too, since an operator
    may set one later."""

    def __init__(self) -> None:
        self.registry: Registry
        self._waiting: dict[Connection, tuple[Ticket, Then]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def ask(self, connection: Connection, app: App, then: Then) -> None:
        """Ask for a place in `app`. `then` is called once: from within this call if the app has no limit, else later.
        It is not called if the connection is withdrawn first.

        The place is given back when the connection's session closes (`Hub.closed`), or by `give_back`.
        """
        ticket = Ticket(owner=connection)
        self._waiting[connection] = (ticket, then)
        self.registry.admit(app, ticket)

    def withdraw(self, connection: Connection) -> None:
        """The connection closed while it waited. Does nothing for other connections."""
        waiting = self._waiting.pop(connection, None)
        if waiting is not None:
            self.registry.cancel(waiting[0])

    def give_back(self, app_id: str) -> None:
        """A connection got a place and doesn't need it."""
        self.registry.depart(app_id)

    def dismiss(self, refusal: Refusal) -> None:
        """Refuse all connections that wait."""
        for connection, (_, then) in list(self._waiting.items()):
            self.withdraw(connection)
            then(refusal)

    # -- what the registry answers -------------------------------------------------------------------------

    def admitted(self, ticket: Ticket) -> None:
        self._settle(ticket, None)

    def turned_away(self, ticket: Ticket, code: int) -> None:
        self._settle(ticket, Refusal(code, _REASONS[code]))

    def _settle(self, ticket: Ticket, refusal: Refusal | None) -> None:
        _, then = self._waiting.pop(ticket.owner)
        then(refusal)
