"""The subscribes of this worker's connections that Redis hasn't answered yet.

All of them share one queue to Redis. A connection has at most MAX_IN_TURN subscribes in it, so that the other clients
don't wait for the thousand that one client sends at once. Its further ones wait here, and each answer lets the next go.
"""

from collections import OrderedDict
from typing import Final

from redpoll.cluster.membership.local_channel import Ticket
from redpoll.cluster.membership.registry import Registry
from redpoll.worker.hub.connection import Connection

__all__ = ["MAX_IN_TURN", "PendingJoins"]

# Most clients subscribe to fewer channels. A client that is alone gets a thousand channels in about 60 round trips.
MAX_IN_TURN: Final = 16


class PendingJoins:
    """Gives the subscribes to `registry`. Falsy when there are none."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        # All that aren't answered, by connection and channel.
        self._tickets: dict[Connection, dict[str, Ticket]] = {}
        # Those of them that wait for their turn.
        self._waiting: dict[Connection, OrderedDict[str, Ticket]] = {}
        # How many withdrawn ones Redis has yet to answer: until then they take room.
        self._withdrawn: dict[Connection, int] = {}

    def __bool__(self) -> bool:
        return bool(self._tickets)

    def add(self, connection: Connection, channel: str, ticket: Ticket) -> None:
        """A subscribe. The connection has none to this channel."""
        tickets = self._tickets.get(connection)
        if tickets is None:
            tickets = self._tickets[connection] = {channel: ticket}
        else:
            tickets[channel] = ticket
        withdrawn = self._withdrawn.get(connection, 0) if self._withdrawn else 0
        if len(tickets) + withdrawn > MAX_IN_TURN:
            self._waiting.setdefault(connection, OrderedDict())[channel] = ticket
        else:
            self._registry.join(connection.session.app, channel, ticket)

    def answered(self, connection: Connection, channel: str) -> None:
        """Redis has answered a subscribe, or won't."""
        self._remove(connection, channel)
        if self._waiting:
            self._start_next(connection)

    def withdraw(self, connection: Connection, channel: str) -> bool:
        """The client no longer wants this channel. False: no subscribe to it is pending."""
        tickets = self._tickets.get(connection)
        if tickets is None or channel not in tickets:
            return False
        ticket = self._remove(connection, channel)
        waiting = self._waiting.get(connection)
        if waiting is not None and waiting.pop(channel, None) is not None:
            if not waiting:
                del self._waiting[connection]
        elif self._registry.cancel(ticket):
            self._withdrawn[connection] = self._withdrawn.get(connection, 0) + 1
        else:
            self._start_next(connection)
        return True

    def withdrawn_answered(self, connection: Connection) -> None:
        """Redis has answered a withdrawn subscribe."""
        count = self._withdrawn.pop(connection, 0)
        if count > 1:
            self._withdrawn[connection] = count - 1
        if count:
            self._start_next(connection)

    def stop(self, connection: Connection) -> None:
        """The connection ends, and all its subscribes are withdrawn next: those that wait don't go to Redis."""
        self._waiting.pop(connection, None)

    def _remove(self, connection: Connection, channel: str) -> Ticket:
        tickets = self._tickets[connection]
        ticket = tickets.pop(channel)
        if not tickets:
            del self._tickets[connection]
        return ticket

    def _start_next(self, connection: Connection) -> None:
        waiting = self._waiting.get(connection)
        if waiting is None:
            return
        channel, ticket = waiting.popitem(last=False)
        if not waiting:
            del self._waiting[connection]
        self._registry.join(connection.session.app, channel, ticket)
