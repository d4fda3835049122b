"""Whether an app has a place for one more connection: who waits for the answer, and what is done then.

Places are counted over all workers where an app has `max_connections`, so the registry asks Redis (cluster.md
6, "connect"); here its answer finds the connection. Knows nothing of how one is opened or refused.
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

# Called with None when there is a place, which is the connection's then.
Then = Callable[[Refusal | None], None]

_REASONS = {
    4004: "the app has as many connections as it may have",
    4100: "the number of connections could not be confirmed in time; connect again",
}


class Admission:
    """Those who wait. Every greeted connection has a place, in apps without a limit too: one may be set."""

    def __init__(self) -> None:
        self.registry: Registry
        self._waiting: dict[Connection, tuple[Ticket, Then]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def ask(self, connection: Connection, app: App, then: Then) -> None:
        """Ask for a place in `app`. `then` is called once: from within this call where the app has no limit, else
        later, and not at all if the connection is withdrawn before.

        The place is given back when the connection's session closes (`Hub.closed`), or by `give_back`.
        """
        ticket = Ticket(owner=connection)
        self._waiting[connection] = (ticket, then)
        self.registry.admit(app, ticket)

    def withdraw(self, connection: Connection) -> None:
        """It is gone, and needs no place any more. Idempotent; nothing for those who don't wait."""
        waiting = self._waiting.pop(connection, None)
        if waiting is not None:
            self.registry.cancel(waiting[0])

    def give_back(self, app_id: str) -> None:
        """A place that was given isn't needed."""
        self.registry.depart(app_id)

    def dismiss(self, refusal: Refusal) -> None:
        """Nobody is let in any more: whoever waits is told so."""
        for connection, (_, then) in list(self._waiting.items()):
            self.withdraw(connection)
            then(refusal)

    # -- what the registry has to say ----------------------------------------------------------------------

    def admitted(self, ticket: Ticket) -> None:
        self._settle(ticket, None)

    def turned_away(self, ticket: Ticket, code: int) -> None:
        self._settle(ticket, Refusal(code, _REASONS[code]))

    def _settle(self, ticket: Ticket, refusal: Refusal | None) -> None:
        _, then = self._waiting.pop(ticket.owner)
        then(refusal)
