"""The link to a Redis Cluster: one connection to each master, used like one Link.

Each shard is in one slot, so its master executes everything that concerns a channel, and the order of replies and
pushes is kept for each channel (cluster/README.md "Ground rules"). Calls go to the master of the shard whose hash tag
is in their first key.

The link is up while every master is connected. When one connection breaks, a slot moves or another node becomes a
master, the link goes down as a whole, reads the map of slots again, and connects to the masters that it names.
Connections that still work are kept, with their subscriptions, so that events of other shards go on arriving. With
`keeps_shards`, calls for their shards go on, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from time import monotonic
from typing import Any, Final

import hiredis
import structlog

from redpoll.cluster.keys import SHARDS, TAGS
from redpoll.cluster.link import Clock, Done, Link, LinkDown
from redpoll.cluster.redis_connection import Publishes, Refused
from redpoll.cluster.scripts import Script
from redpoll.cluster.slot_map import Address, SlotMap
from redpoll.redis_url import RedisUrl

__all__ = ["ClusterLink", "open_link"]

log = structlog.get_logger(__name__)

_CONNECTED_WITHIN_S: Final = 5.0
_READ_MAP_EVERY_S: Final = 1.0
_MAX_DELAY_S: Final = 0.2
# While a slot moves, its keys are in two nodes. The same call succeeds when the move is over.
_MOVING: Final = ("ASK ", "TRYAGAIN")
_REPEAT_AFTER_S: Final = 0.05
_REPEAT_FOR_S: Final = 2.0

# The beginning of an event's envelope without an offset (cluster/README.md "Topics and envelopes").
_UNSTORED_EVENT: Final = b"e 0 "

_SHARD_OF_TAG: Final = {tag: at for at, tag in enumerate(TAGS)}
# Where the first key is, if it isn't the word after the command.
_KEY_AT: Final = {b"EVAL": 3, b"EVALSHA": 3}


def _ignore(reply: Any) -> None:
    pass


def _shard_of(name: Any) -> int:
    """The shard of a key or topic; 0 for a word without a hash tag, because any master will do then."""
    if not isinstance(name, bytes):
        return 0
    begin = name.find(b"{") + 1
    return _SHARD_OF_TAG.get(name[begin : name.find(b"}", begin)], 0)


class _Parts:
    """Collects the outcomes of the parts of one call: `done` gets None or the first error."""

    __slots__ = ("done", "error", "left")

    def __init__(self, left: int, done: Done) -> None:
        self.left = left
        self.done = done
        self.error: Exception | None = None

    def __call__(self, reply: Any) -> None:
        if isinstance(reply, Exception) and self.error is None:
            self.error = reply
        self.left -= 1
        if self.left == 0:
            self.done(self.error)


class ClusterLink(Link):
    """As `Link`; `url` is `redis+cluster://…` or `rediss+cluster://…`. `keeps_shards`: while the link is down, calls
    for `kept_shards` are carried out."""

    def __init__(
        self,
        url: str,
        *,
        clock: Clock = monotonic,
        first_delay_s: float = 0.05,
        keeps_shards: bool = False,
    ) -> None:
        super().__init__(url, clock=clock, sharded=True, first_delay_s=first_delay_s, max_delay_s=_MAX_DELAY_S)
        self._map = SlotMap(RedisUrl.parse(url))
        self._links: dict[Address, Link] = {}
        self._masters: tuple[Address, ...] = ()
        self._of_shard: tuple[Link, ...] = ()
        self._up = False
        self._keeps_shards = keeps_shards
        self._kept: frozenset[int] = frozenset()
        # How often the link went down, so that what was begun before can tell.
        self._downs = 0
        # SUBSCRIBEs that aren't confirmed yet, and what waits for them.
        self._subscribing = 0
        self._after_subscribing: deque[Callable[[], None]] = deque()
        # By shard: calls that wait until its slot has moved, in order, with the time at which each was made.
        self._parked: dict[int, deque[tuple[float, tuple[Any, ...], Done]]] = {}

    @property
    def up(self) -> bool:
        return self._up

    @property
    def kept_shards(self) -> frozenset[int]:
        return self._kept

    @property
    def unanswered(self) -> int:
        return sum(link.unanswered for link in self._links.values())

    @property
    def congested(self) -> bool:
        return any(link.congested for link in self._links.values())

    @property
    def refusal(self) -> str:
        return ""

    def refusal_of(self, name: bytes) -> str:
        return self._of_shard[_shard_of(name)].refusal if self._up or self._kept else ""

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._go_down("closed by us")
        await asyncio.gather(*map(self._close_link, list(self._links)))
        await self._map.close()

    def drop(self, reason: str) -> None:
        log.warning("redis connections dropped", reason=reason)
        self._go_down(reason)
        for link in self._links.values():
            link.drop(reason)

    def shard_of_each_connection(self) -> list[int]:
        return [self._of_shard.index(link) for link in dict.fromkeys(self._of_shard)]

    def drop_connection(self, shard: int, reason: str) -> None:
        self._of_shard[shard].drop(reason)

    def abandon(self) -> None:
        for link in self._links.values():
            link.abandon()

    def flush(self) -> None:
        for link in self._links.values():
            link.flush()

    # Calls.

    def call(self, *command: Any, done: Done = _ignore) -> None:
        self._send(_shard_of(command[_KEY_AT.get(command[0], 1)] if len(command) > 1 else None), command, done)

    def call_packed(self, command: bytes, done: Done) -> None:
        # The prefix of keys has no brace, so the first one begins the hash tag.
        at = _shard_of(command)
        if self._up or at in self._kept:
            self.commands += 1
            self._of_shard[at].call_packed(command, done)
        else:
            asyncio.get_running_loop().call_soon(done, LinkDown(sent=False))

    def call_many(self, commands: bytes, count: int, done: Publishes) -> None:
        # Masters answer in any order, and one that is silent must not hold up the others' answers.
        if not self._up:
            super().call_many(commands, count, done)
            return
        reader = hiredis.Reader()
        reader.feed(commands)
        loop = asyncio.get_running_loop()
        for done_of_one in done.of_each():
            command = hiredis.pack_command(tuple(reader.gets()))
            reason = self.refusal_of(command)
            if reason:
                loop.call_soon(done_of_one, Refused(reason))
            else:
                self.call_packed(command, done_of_one)

    def run(
        self, script: Script, keys: Sequence[bytes], args: Sequence[bytes | str | int], done: Done = _ignore
    ) -> None:
        self._send(_shard_of(keys[0]), (script, keys, args), done)

    async def ask_all(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        # Replies of several masters come in any order.
        return await asyncio.gather(*(self.ask(*command) for command in commands))

    def _send(self, at: int, command: tuple[Any, ...], done: Done) -> None:
        if not self._up and at not in self._kept:
            asyncio.get_running_loop().call_soon(done, LinkDown(sent=False))
            return
        waiting = self._parked.get(at)
        if waiting is not None:
            waiting.append((self.clock(), command, done))
        else:
            self._send_now(at, self.clock(), command, done)

    def _send_now(self, at: int, since: float, command: tuple[Any, ...], done: Done) -> None:
        self.commands += 1
        link = self._of_shard[at]

        def answered(reply: Any) -> None:
            is_moving = type(reply) is hiredis.ReplyError and str(reply).startswith(_MOVING)
            if is_moving and self._up and self.clock() - since < _REPEAT_FOR_S:
                self._park(at, since, command, done)
            else:
                done(reply)

        if isinstance(command[0], Script):
            script, keys, args = command
            link.run(script, keys, args, answered)
        else:
            link.call(*command, done=answered)

    def _park(self, at: int, since: float, command: tuple[Any, ...], done: Done) -> None:
        # Calls that were sent before the first refusal come here in order, and those that are made later wait behind.
        if at not in self._parked:
            self._parked[at] = deque()
            asyncio.get_running_loop().call_later(_REPEAT_AFTER_S, self._repeat, at, self._parked[at])
        waiting = self._parked[at]
        place = sum(other <= since for other, _, _ in waiting)
        waiting.insert(place, (since, command, done))

    def _repeat(self, at: int, waiting: deque[tuple[float, tuple[Any, ...], Done]]) -> None:
        if self._parked.get(at) is waiting:
            del self._parked[at]
            for since, command, done in waiting:
                self._send_now(at, since, command, done)

    # Topics. SSUBSCRIBE takes topics of one slot.

    def subscribe(self, topics: Sequence[bytes], done: Done = _ignore) -> None:
        downs = self._downs

        def confirmed(outcome: Exception | None) -> None:
            done(outcome)
            if downs != self._downs:
                return
            self._subscribing -= 1
            while not self._subscribing and self._after_subscribing:
                self._after_subscribing.popleft()()

        self._subscribing += 1
        self._each_shard(topics, Link.subscribe, confirmed)

    def subscribe_last(self, topics: Sequence[bytes], done: Done = _ignore) -> None:
        # Connections to several masters have no common order, so this waits for the confirmations.
        def go() -> None:
            self._each_shard(topics, Link.subscribe, done)

        if self._subscribing:
            self._after_subscribing.append(go)
        else:
            go()

    def unsubscribe(self, topics: Sequence[bytes], done: Done = _ignore) -> None:
        self._each_shard(topics, Link.unsubscribe, done)

    def _each_shard(self, topics: Sequence[bytes], change: Callable[..., None], done: Done) -> None:
        if not self._up:
            asyncio.get_running_loop().call_soon(done, LinkDown(sent=False))
            return
        by_shard: dict[int, list[bytes]] = {}
        for topic in topics:
            by_shard.setdefault(_shard_of(topic), []).append(topic)
        parts = _Parts(len(by_shard), done)
        for at, of_shard in by_shard.items():
            change(self._of_shard[at], of_shard, parts)

    async def subscribers(self, topics: Sequence[bytes]) -> list[int]:
        if not self._up:
            raise LinkDown(sent=False)
        by_link: dict[Link, list[bytes]] = {}
        for topic in topics:
            by_link.setdefault(self._of_shard[_shard_of(topic)], []).append(topic)
        answers = await asyncio.gather(*(link.subscribers(part) for link, part in by_link.items()))
        counts = {
            topic: count
            for part, answer in zip(by_link.values(), answers, strict=True)
            for topic, count in zip(part, answer, strict=True)
        }
        return [counts[topic] for topic in topics]

    async def scan(self, pattern: bytes) -> list[bytes]:
        found = await asyncio.gather(*(link.scan(pattern) for link in self._links.values()))
        return [name for names in found for name in names]

    # The connections.

    async def _run(self) -> None:
        delay_s = self._first_delay_s
        while True:
            began = self.clock()
            try:
                await self._connect_all()
            except (OSError, TimeoutError) as error:
                log.warning("redis unreachable", reason=str(error) or "no connection to every master in time")
            else:
                await self._watch()
            if self.clock() - began > 5 * _MAX_DELAY_S:
                delay_s = self._first_delay_s
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(2 * delay_s, _MAX_DELAY_S)

    async def _connect_all(self) -> None:
        masters = await self._read_map()
        for address in set(self._links) - set(masters):
            await self._close_link(address)
        for address in set(masters) - set(self._links):
            link = self._links[address] = Link(self._map.url_of(address), clock=self.clock, sharded=True)
            link.on_down = partial(self._link_down, address)
            link.on_moved = partial(self._slot_moved, link)
            link.on_push = self._pushed
            link.on_handed_out = self._handed_out
            link.start()
        async with asyncio.timeout(_CONNECTED_WITHIN_S):
            for link in self._links.values():
                await self._wait_up(link, masters)
        if not all(link.up for link in self._links.values()):
            raise OSError("a connection to a master broke at once")
        before, self._of_shard = self._of_shard, tuple(self._links[address] for address in masters)
        self._kept = frozenset(at for at in self._kept if self._of_shard[at] is before[at])
        self._masters = masters
        self.connects += 1
        self._up = True
        self._is_down.clear()
        self._is_up.set()
        log.info("redis connected", connects=self.connects, masters=len(self._links))
        try:
            self.on_up()
        except Exception as error:
            self.report(error)

    async def _read_map(self) -> tuple[Address, ...]:
        """Reads the map while the link is down. Shards are kept only while two nodes agree that their master is the
        same: one that was cut off with us would go on taking publishes (cluster-allow-pubsubshard-when-down)."""
        try:
            masters = await self._map.read()
        except OSError:
            self._kept = frozenset()
            raise
        self._kept = frozenset(at for at in self._kept if masters[at] == self._masters[at])
        return masters

    async def _wait_up(self, link: Link, masters: Sequence[Address]) -> None:
        """Waits for the connection to one master. Raises OSError when it was replaced meanwhile."""
        while not link.up:
            try:
                async with asyncio.timeout(_MAX_DELAY_S):
                    await link.wait_up()
            except TimeoutError:
                if await self._read_map() != masters:
                    raise OSError("the masters of the cluster changed") from None

    async def _watch(self) -> None:
        """Returns when the link is down. Takes it down when the map of slots changes, or some master hangs."""
        while not self._is_down.is_set():
            try:
                async with asyncio.timeout(_READ_MAP_EVERY_S):
                    await self._is_down.wait()
            except TimeoutError:
                with contextlib.suppress(OSError):
                    masters = await self._map.read()
                    changed = {at for at, master in enumerate(masters) if master != self._masters[at]}
                    if changed:
                        self._go_down("the masters of the cluster changed", changed)

    async def _close_link(self, address: Address) -> None:
        link = self._links.pop(address)
        self._kept -= self._shards_of(link)
        link.release()
        await link.close()
        self.errors += link.errors
        self.handler_errors += link.handler_errors

    def _shards_of(self, link: Link) -> set[int]:
        return {at for at, other in enumerate(self._of_shard) if other is link}

    def _link_down(self, address: Address, reason: str) -> None:
        shards = self._shards_of(self._links[address])
        self._go_down(f"the connection to the master at {address[0]}:{address[1]} is lost: {reason}", shards)

    def _slot_moved(self, link: Link) -> None:
        # The map, which is read next, says which slot.
        self._go_down("a slot moved", self._shards_of(link))

    def _go_down(self, reason: str, shards: Collection[int] = range(SHARDS)) -> None:
        """`shards` are those that can't be used any more."""
        if not self._up:
            self._kept -= frozenset(shards)
            return
        if self._keeps_shards:
            working = {at for at, link in enumerate(self._of_shard) if link.up}
            self._kept = frozenset(working - set(shards))
        log.warning("redis cluster left", reason=reason)
        self._up = False
        self._downs += 1
        self._is_up.clear()
        self._is_down.set()
        self._subscribing = 0
        self._after_subscribing.clear()
        parked, self._parked = self._parked, {}
        try:
            self.on_down(reason)
        except Exception as error:
            self.report(error)
        for link in self._links.values():
            if not self._shards_of(link) & self._kept:
                link.abandon()
        for waiting in parked.values():
            for _, _, done in waiting:
                done(LinkDown(sent=False))

    def _pushed(self, topic: bytes, payload: bytes) -> None:
        # While the link is down, connections that still work bring events. Everything else, stored events among it, is
        # read again when it is up.
        if self._up or payload.startswith(_UNSTORED_EVENT):
            self.on_push(topic, payload)

    def _handed_out(self) -> None:
        self.on_handed_out()


def open_link(url: str, *, max_delay_s: float = 1.0, keeps_shards: bool = False) -> Link:
    """The link for any URL of Redis. It isn't started yet. `max_delay_s` is the longest pause between two attempts to
    connect; with Sentinels or a Cluster it is 0.2 s at most. `keeps_shards` as in ClusterLink."""
    if RedisUrl.parse(url).cluster:
        return ClusterLink(url, keeps_shards=keeps_shards)
    return Link(url, max_delay_s=max_delay_s)
