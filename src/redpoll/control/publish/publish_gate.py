"""Decides when publishes may go on after a break of the connection to Redis: when every worker is subscribed again.

An earlier publish would be answered with 200 and reach no client of the workers that aren't subscribed yet
(cluster/membership/README.md "Reconnecting"). Each worker subscribes a topic with its own name last; this module asks
Redis who is missing, and calls the others by that topic (cluster/roll_call.py). It reads from Redis itself which nodes
there are, because what the supervisor knows may be from before the break. Two kinds of workers aren't waited for,
because no client can be there:

- those that say that they have no clients and admit none (cut_off.py);
- those of a node that is dead, or that has written no heartbeat and answered no call 1.5 s after the break, while our
  own node has. Live nodes write one every second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import hiredis
import msgspec
import structlog

from redpoll.cluster.nodes import Node, NodesView
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link, LinkDown
from redpoll.cluster.roll_call import RollCall

__all__ = ["PublishGate"]

log = structlog.get_logger(__name__)

# The pause between two checks whether the workers are subscribed again.
_CHECK_EVERY_S: Final = 0.02
_READ_NODES_EVERY_S: Final = 0.25
# So many reads without a sign of life, 1.5 s, are counted and not timed: after a stall of this process, or of Redis, a
# late read counts once.
_MAX_READS_WITHOUT_SIGN: Final = 6
# When the log first says whom publishes wait for, and how often after that.
_FIRST_LOG_S: Final = 2.0
_LOG_EVERY_S: Final = 10.0
_MAX_NAMES_LOGGED: Final = 20


class _Seen:
    """What one wait has seen of a node: its last entry, whether the entry changed meanwhile, and over how many reads it
    didn't."""

    __slots__ = ("changed", "entry", "reads")

    def __init__(self, entry: bytes | None) -> None:
        self.entry = entry
        self.changed = False
        self.reads = 0

    def read(self, entry: bytes | None) -> None:
        self.reads += 1
        if entry != self.entry:
            self.entry, self.changed = entry, True


class PublishGate:
    """`wait` returns when publishes may go on; cancel it when the connection breaks. Call `received` with each message
    of Redis."""

    def __init__(
        self,
        link: Link,
        keys: Keys,
        view: NodesView,
        *,
        check_every_s: float = _CHECK_EVERY_S,
        read_nodes_every_s: float = _READ_NODES_EVERY_S,
        first_log_s: float = _FIRST_LOG_S,
    ) -> None:
        self._link = link
        self._keys = keys
        self._view = view
        self._check_every_s = check_every_s
        self._read_nodes_every_s = read_nodes_every_s
        self._first_log_s = first_log_s
        self._roll_call: RollCall | None = None

    def received(self, topic: bytes, payload: bytes) -> None:
        """Takes a message of Redis, if it is for this."""
        if self._roll_call is not None and topic == self._roll_call.answers:
            self._roll_call.received(payload)

    async def wait(self) -> None:
        roll_call = self._roll_call = RollCall(self._link, self._keys)
        roll_call.begin()
        try:
            await self._wait_for_all(roll_call)
        finally:
            roll_call.end()

    async def _wait_for_all(self, roll_call: RollCall) -> None:
        loop = asyncio.get_running_loop()
        log_at = loop.time() + self._first_log_s
        read_at = loop.time()
        seen: dict[str, _Seen] = {}
        while True:
            if loop.time() >= read_at:
                await self._read_nodes(seen)
                read_at = loop.time() + self._read_nodes_every_s
            missing = await self._missing(seen, roll_call)
            if missing is not None and not missing:
                return
            if loop.time() >= log_at:
                names = "the first heartbeat" if missing is None else ", ".join(missing[:_MAX_NAMES_LOGGED])
                log.error("publishes wait for workers", missing=names, count=len(missing or ()))
                log_at = loop.time() + _LOG_EVERY_S
            await asyncio.sleep(self._check_every_s)

    async def _read_nodes(self, seen: dict[str, _Seen]) -> None:
        # The nodes' own entries, and not those that the supervisor knows: they may be from before the break.
        try:
            table = await self._link.ask(b"HGETALL", self._keys.nodes)
        except (LinkDown, hiredis.ReplyError):
            # After a break the wait is cancelled; after an error nothing was seen.
            return
        entries: dict[str, bytes] = {run.decode(): entry for run, entry in table.items()}
        for run in {*seen, *entries, *self._view.others}:
            seen.setdefault(run, _Seen(entries.get(run))).read(entries.get(run))

    async def _missing(self, seen: Mapping[str, _Seen], roll_call: RollCall) -> list[str] | None:
        """Whom publishes wait for, with the names of their nodes; None before our own node's first heartbeat."""
        view, own_run = self._view, self._view.run
        if not view.known:
            return None
        own_names = [f"{own_run}.{k}" for k in view.alive if k not in view.without_clients]
        by_run = {run: self._workers_of(run, one) for run, one in seen.items() if run != own_run}
        wanted = {*own_names, *(name for names in by_run.values() for name in names)}
        absent = await roll_call.absent(sorted(wanted))
        missing = [name for name in own_names if name in absent]
        own = seen.get(own_run)
        for run, names in sorted(by_run.items()):
            one = seen[run]
            without_sign = not one.changed and one.reads > _MAX_READS_WITHOUT_SIGN and absent >= names
            if without_sign and own is not None and own.changed:
                continue
            missing += [f"{name} of {self._name_of(run)}" for name in sorted(names & absent)]
        if absent and not missing:
            # Only such nodes are left out: a last look at all others.
            missing = sorted(await roll_call.absent(sorted(wanted - absent)))
        return missing

    def _workers_of(self, run: str, one: _Seen) -> set[str]:
        """The names of a node's workers that may have clients."""
        described = self._view.others.get(run)
        node: Node | None = None
        if one.entry is not None:
            try:
                node = msgspec.json.decode(one.entry, type=Node)
            except msgspec.DecodeError:
                # The supervisor logs it, and leaves it out as well.
                return set()
        if described is not None and not described.alive and (node is None or node.beat <= described.beat):
            # No heartbeat came after the one by which it was found dead.
            return set()
        alive, without_clients = set(), []
        if described is not None:
            alive |= set(described.workers)
            without_clients.append(set(described.without_clients))
        if node is not None:
            alive |= set(node.workers)
            without_clients.append(set(node.without_clients))
        # A fail-over may bring an older entry back, and the supervisor may have read an older one: both must say it.
        ignored = set.intersection(*without_clients) if without_clients else set()
        return {f"{run}.{k}" for k in alive - ignored}

    def _name_of(self, run: str) -> str:
        described = self._view.others.get(run)
        return described.name if described is not None else "a new node"
