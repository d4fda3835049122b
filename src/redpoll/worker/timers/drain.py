"""Closes connections with 4200, so that their clients connect elsewhere: all of them, or so many that the load is even.

A stop of the server, `redpoll node drain` and `redpoll balance` use it. Connections are closed evenly over the given
time, and those with the most presence memberships last, because each of their returns changes rosters for all members.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from redpoll.loop.slices import walk
from redpoll.protocol.errors import Code
from redpoll.worker.hub.open_connections import OpenConnections
from redpoll.worker.timers.paced_close import PacedClose

if TYPE_CHECKING:
    from redpoll.worker.hub.connection import Connection

__all__ = ["Drain"]


class Drain:
    """`spawn` starts a task that the worker owns. At most one drain runs; a new one replaces it."""

    def __init__(
        self,
        open_connections: OpenConnections,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        paced: PacedClose | None = None,
    ) -> None:
        self._open_connections = open_connections
        self._spawn = spawn
        self._paced = paced or PacedClose()
        # Grows with each drain: the preparation of an earlier one then has no effect.
        self._number = 0

    def begin(
        self, message: str, within_s: float, *, target: int | None = None, max_per_s: float | None = None
    ) -> None:
        """Close `target` connections, or all, evenly over `within_s` seconds, but at most `max_per_s` in a second: this
        worker's share of what the other nodes accept. None: there are no others, and a few connections take less time,
        because at least 1,000 are closed per second."""
        self.cancel()
        self._spawn(self._close(self._number, message, within_s, target, max_per_s))

    def cancel(self) -> None:
        """Leave the connections open that aren't closed yet."""
        self._number += 1
        self._paced.cancel()

    async def _close(
        self, number: int, message: str, within_s: float, target: int | None, max_per_s: float | None
    ) -> None:
        by_memberships: dict[int, list[Connection]] = {}

        def sort_in(connection: Connection) -> None:
            by_memberships.setdefault(_memberships(connection), []).append(connection)

        await walk(self._open_connections.each(), sort_in)
        count = sum(map(len, by_memberships.values()))
        if number != self._number or not count:
            return
        ordered: Iterator[Connection] = chain.from_iterable(by_memberships[n] for n in sorted(by_memberships))
        if target is not None:
            ordered, count = islice(ordered, target), min(count, target)
        within_s = max(within_s, 0.1)
        if max_per_s is None:
            self._paced.close(ordered, count, Code.RECONNECT, message, within_s)
        else:
            self._paced.close(ordered, count, Code.RECONNECT, message, max(within_s, count / max_per_s), min_rate=0)


def _memberships(connection: Connection) -> int:
    """The number of presence channels to which the connection is subscribed."""
    return sum(subscription.user_id is not None for subscription in connection.session.channels.values())
