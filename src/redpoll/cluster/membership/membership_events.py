"""What the registry reports to the owner of the sockets.

worker/hub/hub.py implements it. Tests implement it with sockets that record what a client would see.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Protocol

from redpoll.cluster.membership.join import Join
from redpoll.cluster.membership.local_channel import LocalChannel

__all__ = ["MembershipEvents", "report"]


def report(event: Callable[..., None], *values: object) -> None:
    """Calls `event`. An exception is reported to the loop, and doesn't keep the rest of a reply from being applied."""
    try:
        event(*values)
    except Exception as fault:
        context = {"message": "a reply of hold was not carried out completely", "exception": fault}
        asyncio.get_running_loop().call_exception_handler(context)


class MembershipEvents(Protocol):
    """Called in the order in which things happened in Redis."""

    def opened(self, local_channel: LocalChannel) -> None:
        """A channel is held from now on. Set `local_channel.audience` here."""

    def settings_changed(self, local_channel: LocalChannel) -> None:
        """The app's record changed, and `local_channel.settings` are those of the new one."""

    def joined(self, local_channel: LocalChannel, joins: list[Join], cached: bytes | None, total: int | None) -> None:
        """Attach these sockets and send them success, with `local_channel.roster` as it is now. Member and count frames
        of the same reply come before this call; they are for sockets attached earlier.

        Then send `cached`, an EVENT envelope without a skipped socket: the last event of a cache channel, b"" if there
        is none, None on other channels. Then send `total`, the subscription_count, unless it is None."""

    def refused(self, local_channel: LocalChannel, join: Join, reason: str) -> None:
        """`members`: the channel is full. `channels`: the app has as many occupied ones as it may have. `unavailable`:
        Redis didn't answer in time."""

    def still_waiting(self, joins: Iterator[Join]) -> None:
        """These weren't answered within a second. Called again and again, for `redpoll debug`."""

    def member_added(self, local_channel: LocalChannel, user: str, info: bytes) -> None:
        """A user joined who was not on the roster. `info` is JSON or b""."""

    def member_removed(self, local_channel: LocalChannel, user: str) -> None:
        """A user left the roster."""

    def counted(self, local_channel: LocalChannel, total: int) -> None:
        """Send everybody attached the new subscription_count."""

    def event(self, local_channel: LocalChannel, payload: bytes) -> None:
        """An EVENT envelope. On a channel with history every stored event comes exactly once and in order; events with
        offset 0 are not stored, and come at most once."""

    def console(self, local_channel: LocalChannel, payload: bytes) -> None:
        """A CONSOLE_COPY envelope, on the console's channel."""

    def lost(self, local_channel: LocalChannel) -> None:
        """On a channel with history: missed messages can't be determined, or the history was cleared or replaced.
        `local_channel.history` is the new position; the next events follow it."""

    def dropped(self, local_channel: LocalChannel) -> None:
        """The channel is no longer held, and Redis knows."""

    def user_state(self, app_id: str, user_id: str, online: bool) -> None:
        """A watched user is online or offline: the first answer about the user, then each change."""

    def admitted(self, join: Join) -> None:
        """This connection counts from now on, until `depart`."""

    def turned_away(self, join: Join, code: int) -> None:
        """Close this connection with 4004 (the app is full) or 4100 (Redis didn't decide in time)."""
