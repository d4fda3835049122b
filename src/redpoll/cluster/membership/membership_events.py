"""What the registry has to say to whoever has the sockets.

The promise only: worker/hub.py keeps it, and in tests whatever wants to see what a worker's clients would.
"""

from typing import Protocol

from redpoll.cluster.membership.local_channel import LocalChannel, Ticket

__all__ = ["MembershipEvents"]


class MembershipEvents(Protocol):
    """Who has the sockets. Called in the order in which things happened in Redis."""

    def opened(self, local_channel: LocalChannel) -> None:
        """A channel is held from now on; the place to set `local_channel.audience`."""

    def joined(
        self, local_channel: LocalChannel, tickets: list[Ticket], cached: bytes | None, total: int | None
    ) -> None:
        """Attach these and send success, with `local_channel.roster` as it is now; comes behind the member and count
        frames of the same reply, which are for those attached before.

        Then `cached`, an `e` envelope without a skip: the last event of a cache channel, b"" where there is none,
        None on other channels. Then `total`, where subscribers are told how many they are."""

    def refused(self, local_channel: LocalChannel, ticket: Ticket, reason: str) -> None:
        """`members`: the channel is full. `unavailable`: Redis didn't answer in time."""

    def member_added(self, local_channel: LocalChannel, user: str, info: bytes) -> None:
        """A user came who wasn't on the roster; `info` is JSON or b""."""

    def member_removed(self, local_channel: LocalChannel, user: str) -> None:
        """A user of the roster is gone."""

    def counted(self, local_channel: LocalChannel, total: int) -> None:
        """Everyone attached is to be told that so many are, in the whole cluster."""

    def event(self, local_channel: LocalChannel, payload: bytes) -> None:
        """An `e` envelope. With history each comes exactly once and in order, those with offset 0 apart: they aren't
        kept, and come or don't as everywhere."""

    def console(self, local_channel: LocalChannel, payload: bytes) -> None:
        """A `c` envelope, on the console's channel."""

    def lost(self, local_channel: LocalChannel) -> None:
        """Of a channel with history: what was missed can't be filled, or the history was cleared or is a new one.
        `local_channel.history` is the new place; the events that follow it come next."""

    def dropped(self, local_channel: LocalChannel) -> None:
        """The channel isn't held any more, and Redis knows it."""

    def user_state(self, app_id: str, user_id: str, online: bool) -> None:
        """A watched user is online or offline: the first answer about it, then each change."""

    def admitted(self, ticket: Ticket) -> None:
        """This connection counts from now on, until `depart`."""

    def turned_away(self, ticket: Ticket, code: int) -> None:
        """Close it: 4004, the app has as many connections as it may have; 4100, nobody knows in time."""
