"""Bounds what callers who haven't authenticated hold in a worker, so that they can't keep out those who have.

A connection is a stranger's until it is a WebSocket or control has found a right credential in its last request.

- Of each address, strangers hold at most `limit` places. A connection holds one place while it has anything under way
  that costs more than a descriptor: a handshake, a head or body that isn't complete, an upgrade for which Redis is
  asked, a request that control hasn't answered, answers that aren't read, the worker's own included.
- When the worker has no descriptor left, strangers' connections are closed to make room, those that nobody would miss
  first. Of the oldest, the address with the most loses half, so that a flood from one address ends its own connections
  and not those of others. Addresses from which somebody has authenticated
  make room only for each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Final

from redpoll.config.proxies import TrustedProxies, is_private, network_of
from redpoll.worker.hub.addresses import SHARED_FACTOR

if TYPE_CHECKING:
    from redpoll.worker.hub.connection import Connection

__all__ = ["Strangers"]

# How many of the oldest connections are compared when one has to go. If none of them may, the next ones are, up to
# _MAX_LOOKS in all: a look takes 2 µs.
_SAMPLE: Final = 16
_MAX_LOOKS: Final = 64
# How many addresses of callers who authenticated are remembered.
_MAX_KNOWN: Final = 1024
# An answer of this size is as good as read: a place costs more than it.
_SMALL_BYTES: Final = 4096


class Strangers:
    """The connections of strangers, and the places that addresses hold. `limit` 0: addresses have no limit.
    `withdraw(connection)`, called for each that is closed to make room, ends its wait for a place in its app.

    `newcomers`: connections whose first head isn't complete, TLS handshakes included. `callers`: HTTP connections;
    `idle` are those between two requests. `closing`: connections that were answered and wait for the client to close.
    All are in order of time, the oldest first; those that couldn't make room when it was needed come last.
    `closed_total` counts the connections that made room.
    """

    def __init__(
        self, limit: int, trusted: TrustedProxies, withdraw: Callable[[Connection], None] = lambda _: None
    ) -> None:
        self.limit = limit
        self._withdraw = withdraw
        self.closed_total = 0
        self.newcomers: dict[Connection, None] = {}
        self.callers: dict[Connection, None] = {}
        self.idle: dict[Connection, None] = {}
        self.closing: dict[Connection, None] = {}
        # What ends connections that are still in their TLS handshake.
        self.handshakes: dict[Connection, Callable[[], None]] = {}
        # Closed by `make_room`; their descriptors are counted until the loop reports their end.
        self.leaving: set[Connection] = set()
        self._trusted = trusted
        # By connection the network whose place it holds, and the number of places of each network.
        self._networks: dict[Connection, str] = {}
        self._places: dict[str, int] = {}
        # Of those, connections without a request, whose client hasn't read an answer.
        self._unread: dict[Connection, None] = {}
        # Networks from which a caller authenticated, the latest last.
        self._known: dict[str, None] = {}
        # Bounded: clients choose their addresses.
        self._look = lru_cache(maxsize=4096)(self._find)

    def __len__(self) -> int:
        """The number of places that are held."""
        return len(self._networks)

    # -- places --------------------------------------------------------------------------------------------

    def reserve(self, connection: Connection, address: str) -> bool:
        """Whether `connection`, whose client has this address, may have something under way. It holds one place until
        `release`, however often it takes it."""
        if connection in self._networks:
            self._unread.pop(connection, None)
            return True
        network, factor = self._look(address)
        limit = self.limit * factor
        if not limit:
            return True
        count = self._places.get(network, 0)
        if count >= limit:
            return False
        self._places[network] = count + 1
        self._networks[connection] = network
        return True

    def counted_as(self, address: str) -> tuple[str, int]:
        """The network as which an address counts, and how many times the limit of one it has; 0: there is none."""
        return self._look(address)

    def may_leave_unread(self, connection: Connection, address: str) -> bool:
        """Whether its client, who has this address, may get one more answer while it hasn't read those before. It takes
        a place for that."""
        return connection.unsent_bytes <= _SMALL_BYTES or self.reserve(connection, address)

    def release(self, connection: Connection) -> None:
        """It has nothing under way. Idempotent."""
        network = self._networks.pop(connection, None)
        if network is None:
            return
        self._unread.pop(connection, None)
        count = self._places[network]
        if count == 1:
            del self._places[network]
        else:
            self._places[network] = count - 1

    def rest(self, connection: Connection) -> None:
        """It has no request under way: release its place, or do so once its client has read the answers."""
        if connection in self._networks:
            if connection.unsent_bytes > _SMALL_BYTES:
                self._unread[connection] = None
            else:
                self.release(connection)

    def beat(self) -> None:
        """Release the places of those that have read their answers. Call it a few times a second."""
        for connection in [connection for connection in self._unread if not connection.unsent_bytes]:
            self.release(connection)

    def authenticated(self, connection: Connection, address: str) -> None:
        """Its caller, at this address, is no stranger any more. New connections from there make room for each other
        only."""
        self.forget(connection)
        network = network_of(address)
        self._known.pop(network, None)
        self._known[network] = None
        if len(self._known) > _MAX_KNOWN:
            del self._known[next(iter(self._known))]

    def forget(self, connection: Connection) -> None:
        """It is closed, or no stranger's any more. Idempotent."""
        self.newcomers.pop(connection, None)
        self.handshakes.pop(connection, None)
        self.callers.pop(connection, None)
        self.idle.pop(connection, None)
        self.closing.pop(connection, None)
        self.release(connection)

    def _find(self, address: str) -> tuple[str, int]:
        """What an address counts as, and how many times the limit it has; 0: there is none."""
        if self._trusted.trusts(address):
            # All its clients would share the limit, and it names them.
            return "", 0
        return network_of(address), SHARED_FACTOR if not self._trusted and is_private(address) else 1

    # -- room ----------------------------------------------------------------------------------------------

    def make_room(self, address: str) -> bool:
        """Close at least one connection of a stranger, for a new one of this address. False: there is none."""
        for sample in _samples(self.closing):
            done = next((connection for connection in sample if not connection.unsent_bytes), None)
            if done is not None:
                self._close(done)
                return True
        return self._close_some(self.newcomers, address) or self.make_http_room(address)

    def make_http_room(self, address: str) -> bool:
        """As `make_room` among HTTP connections. A busy one gives way only if its address has several, and to another
        address: what it waits for may be a publish."""
        return self.close_idle() or self._close_some(self.callers, address, spares_single=True)

    def close_idle(self) -> bool:
        """Close the connection that has been idle for the longest time. False: none is idle."""
        oldest = next(iter(self.idle), None)
        if oldest is None:
            return False
        self._close(oldest)
        return True

    def _close_some(self, queue: dict[Connection, None], address: str, *, spares_single: bool = False) -> bool:
        """Close connections of the address that has the most of the oldest, for a new one of `address`."""
        own = network_of(address)
        for sample in _samples(queue):
            oldest = [(connection, network_of(connection.address)) for connection in sample]
            others = [pair for pair in oldest if pair[1] not in self._known]
            if not others and own in self._known:
                others = oldest
            if not others:
                continue
            # Of equals the first, which is the oldest.
            network, count = Counter(network for _, network in others).most_common(1)[0]
            if spares_single and (count == 1 or network == own):
                continue
            for connection in [connection for connection, its in others if its == network][: (count + 1) // 2]:
                self._close(connection)
            return True
        return False

    def _close(self, connection: Connection) -> None:
        self.closed_total += 1
        give_up = self.handshakes.get(connection)
        if give_up is not None:
            give_up()
            return
        # Now, not when the connection is gone, which is later: the next one of this loop pass needs another one.
        self.forget(connection)
        self.leaving.add(connection)
        self._withdraw(connection)
        connection.abort()


def _samples(queue: dict[Connection, None]) -> Iterator[list[Connection]]:
    """The oldest of a queue, some at a time. Those that the caller doesn't close go to the end of the queue: at the
    front they would hide all others, also at the next call."""
    left = min(len(queue), _MAX_LOOKS)
    while left:
        sample = list(islice(queue, min(left, _SAMPLE)))
        yield sample
        left -= len(sample)
        for connection in sample:
            queue[connection] = queue.pop(connection)
