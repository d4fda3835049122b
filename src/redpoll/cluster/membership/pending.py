"""The subscribes that Redis hasn't answered, in order of arrival, so that those that wait too long are found."""

from collections.abc import Iterable

from redpoll.cluster.membership.local_channel import Ticket

__all__ = ["Pending"]


class Pending:
    """Each ticket leaves when it is answered or withdrawn, wherever it is in the order."""

    __slots__ = ("_tickets",)

    def __init__(self) -> None:
        self._tickets: dict[Ticket, None] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    def add(self, ticket: Ticket) -> None:
        """`ticket.since` is not before that of any other."""
        self._tickets[ticket] = None

    def discard(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            self._tickets.pop(ticket, None)

    def take_late(self, before: float, count: int) -> list[Ticket]:
        """Removes and returns the first tickets that wait since `before` or longer, at most `count`."""
        late: list[Ticket] = []
        for ticket in self._tickets:
            if ticket.since > before or len(late) == count:
                break
            late.append(ticket)
        self.discard(late)
        return late
