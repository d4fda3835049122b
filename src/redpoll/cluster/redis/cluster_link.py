"""The link to a Redis Cluster: one connection to each master, used like one Link.

Each shard is in one slot, so its master executes everything that concerns a channel, and the order of replies and
pushes is kept for each channel (cluster/README.md "Ground rules"). Calls go to the master of the shard whose hash tag
is in their first key.

The link is up while it has the master of every shard. When a connection breaks, a slot moves or another node becomes a
master, shards are lost: their calls end, and the link is down until it has read the map of slots again and is connected
to the masters that it names. Meanwhile the other shards (`kept_shards`) go on as if nothing had happened. All shards
are lost when no two nodes agree on the map.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from functools import partial
from time import monotonic
from typing import Any, Final, TypeVar

import hiredis
import structlog

from redpoll._publish import Commands
from redpoll.cluster.redis.calls import Publishes, Refused, ShardCall
from redpoll.cluster.redis.keys import SHARDS, shard_of_name
from redpoll.cluster.redis.link import MAX_UNANSWERED_LOOKS, Clock, Done, Link, LinkDown
from redpoll.cluster.redis.scripts import Script
from redpoll.cluster.redis.slot_map import Address, SlotMap
from redpoll.config.redis_url import RedisUrl

__all__ = ["ClusterLink", "open_link"]

log = structlog.get_logger(__name__)

T = TypeVar("T")

_CONNECTED_WITHIN_S: Final = 5.0
_READ_MAP_EVERY_S: Final = 1.0
_MAX_DELAY_S: Final = 0.2
# While a slot moves, its keys are in two nodes. The same call succeeds when the move is over.
_MOVING: Final = ("ASK ", "TRYAGAIN")
_REPEAT_AFTER_S: Final = 0.05
_REPEAT_FOR_S: Final = 2.0

# The beginning of an event's envelope without an offset (cluster/README.md "Topics and envelopes").
_UNSTORED_EVENT: Final = b"e 0 "

_ALL: Final = frozenset(range(SHARDS))
# Where the first key is, if it isn't the word after the command.
_KEY_AT: Final = {b"EVAL": 3, b"EVALSHA": 3, b"PUBSUB": 2}


def _ignore(reply: Any) -> None:
    pass


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
    """As `Link`; `url` is `redis+cluster://…` or `rediss+cluster://…`.

    `masters` has the master of each shard, `links` the link to each of them. While the link is down, both are of the
    time before. `slot_map` is where they are read.
    """

    def __init__(
        self,
        url: str,
        *,
        clock: Clock = monotonic,
        first_delay_s: float = 0.05,
        is_answered_last: bool = False,
        connected_within_s: float = _CONNECTED_WITHIN_S,
        repeat_for_s: float = _REPEAT_FOR_S,
        max_unanswered_looks: int = MAX_UNANSWERED_LOOKS,
    ) -> None:
        super().__init__(
            url,
            clock=clock,
            sharded=True,
            first_delay_s=first_delay_s,
            max_delay_s=_MAX_DELAY_S,
            max_unanswered_looks=max_unanswered_looks,
            is_answered_last=is_answered_last,
        )
        self.slot_map = SlotMap(RedisUrl.parse(url))
        self.links: dict[Address, Link] = {}
        self.masters: tuple[Address, ...] = ()
        self._connected_within_s = connected_within_s
        self._repeat_for_s = repeat_for_s
        self._of_shard: tuple[Link, ...] = ()
        # The shards for which calls are made: all while the link is up, and while it is down those that are kept.
        self._up = False
        self._usable: frozenset[int] = frozenset()
        self._kept_shards: frozenset[int] = frozenset()
        # How often shards were lost, so that what was begun before can tell.
        self._losses = 0
        # By shard: calls that wait until its slot has moved, in order, with the time at which each was made.
        self._parked: dict[int, deque[tuple[float, tuple[Any, ...], Done]]] = {}

    @property
    def up(self) -> bool:
        return self._up

    @property
    def kept_shards(self) -> frozenset[int]:
        return self._kept_shards

    @property
    def unanswered(self) -> int:
        return sum(link.unanswered for link in self.links.values())

    @property
    def congested(self) -> bool:
        return any(link.congested for link in self.links.values())

    @property
    def refusal(self) -> str:
        return ""

    def refusal_of(self, name: bytes) -> str:
        at = shard_of_name(name)
        return self._of_shard[at].refusal if at in self._usable else ""

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._lose("closed by us", _ALL)
        await asyncio.gather(*map(self._close_link, list(self.links)))
        await self.slot_map.close()

    def drop(self, reason: str) -> None:
        log.warning("redis connections dropped", reason=reason)
        self._lose(reason, _ALL)
        for link in self.links.values():
            link.drop(reason)

    def shard_of_each_connection(self) -> list[int]:
        return [self._of_shard.index(link) for link in dict.fromkeys(self._of_shard)]

    def drop_connection(self, shard: int, reason: str) -> None:
        self._of_shard[shard].drop(reason)

    def abandon(self, shards: Collection[int]) -> None:
        for link in self.links.values():
            link.abandon(shards)

    def flush(self) -> None:
        for link in self.links.values():
            link.flush()

    # Calls.

    def call(self, *command: Any, done: Done = _ignore) -> None:
        self._send(shard_of_name(command[_KEY_AT.get(command[0], 1)] if len(command) > 1 else None), command, done)

    def call_packed(self, command: bytes, done: Done) -> None:
        # The prefix of keys has no brace, so the first one begins the hash tag.
        at = shard_of_name(command)
        if at in self._usable:
            self.commands += 1
            self._of_shard[at].call_packed(command, ShardCall(at, done))
        else:
            asyncio.get_running_loop().call_soon(done, LinkDown(sent=False))

    def publish(self, commands: Commands, done: Publishes) -> None:
        # Masters answer in any order, and one that is silent must not hold up the others' answers.
        loop = asyncio.get_running_loop()
        for (at, command), done_of_one in zip(commands.each(), done.of_each(), strict=True):
            if at not in self._usable:
                loop.call_soon(done_of_one, LinkDown(sent=False))
            elif reason := self._of_shard[at].refusal:
                loop.call_soon(done_of_one, Refused(reason))
            else:
                self.commands += 1
                self._of_shard[at].call_packed(command, ShardCall(at, done_of_one))

    def run(
        self, script: Script, keys: Sequence[bytes], args: Sequence[bytes | str | int], done: Done = _ignore
    ) -> None:
        self._send(shard_of_name(keys[0]), (script, keys, args), done)

    async def ask_all(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        # Replies of several masters come in any order.
        return await asyncio.gather(*(self.ask(*command) for command in commands))

    def _send(self, at: int, command: tuple[Any, ...], done: Done) -> None:
        if at not in self._usable:
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
            if is_moving and at in self._usable and self.clock() - since < self._repeat_for_s:
                self._park(at, since, command, done)
            else:
                done(reply)

        if isinstance(command[0], Script):
            script, keys, args = command
            link.run(script, keys, args, ShardCall(at, answered))
        else:
            link.call(*command, done=ShardCall(at, answered))

    def _park(self, at: int, since: float, command: tuple[Any, ...], done: Done) -> None:
        # Calls that were sent before the first refusal come here in order, and later ones wait after them.
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
        self._each_shard(topics, Link.subscribe, done)

    def unsubscribe(self, topics: Sequence[bytes], done: Done = _ignore) -> None:
        self._each_shard(topics, Link.unsubscribe, done)

    def _each_shard(self, topics: Sequence[bytes], change: Callable[..., None], done: Done) -> None:
        by_shard: dict[int, list[bytes]] = {}
        for topic in topics:
            by_shard.setdefault(shard_of_name(topic), []).append(topic)
        parts = _Parts(len(by_shard), done)
        for at, of_shard in by_shard.items():
            if at in self._usable:
                change(self._of_shard[at], of_shard, ShardCall(at, parts))
            else:
                asyncio.get_running_loop().call_soon(parts, LinkDown(sent=False))

    async def subscribers(self, topics: Sequence[bytes]) -> list[int]:
        if not self._up:
            raise LinkDown(sent=False)
        by_link: dict[Link, list[bytes]] = {}
        for topic in topics:
            by_link.setdefault(self._of_shard[shard_of_name(topic)], []).append(topic)
        answers = await self._of_all_masters(link.subscribers(part) for link, part in by_link.items())
        counts = {
            topic: count
            for part, answer in zip(by_link.values(), answers, strict=True)
            for topic, count in zip(part, answer, strict=True)
        }
        return [counts[topic] for topic in topics]

    async def scan(self, pattern: bytes) -> list[bytes]:
        by_master = await self._of_all_masters(link.scan(pattern) for link in self.links.values())
        return [name for names in by_master for name in names]

    async def _of_all_masters(self, answers: Iterable[Awaitable[list[T]]]) -> list[list[T]]:
        """What each master answers. Raises LinkDown if a shard was lost meanwhile: the answers may be of two maps."""
        losses = self._losses
        outcomes = await asyncio.gather(*answers)
        if losses != self._losses:
            raise LinkDown(sent=True)
        return outcomes

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
        for address in set(self.links) - set(masters):
            await self._close_link(address)
        for address in set(masters) - set(self.links):
            link = self.links[address] = Link(
                self.slot_map.url_of(address),
                clock=self.clock,
                sharded=True,
                max_unanswered_looks=self._max_unanswered_looks,
                is_answered_last=self._is_answered_last,
            )
            link.start(
                on_push=self._pushed,
                on_down=partial(self._link_down, address),
                on_moved=partial(self._slot_moved, link),
            )
        async with asyncio.timeout(self._connected_within_s):
            for link in self.links.values():
                await self._wait_up(link, masters)
        if not all(link.up for link in self.links.values()):
            raise OSError("a connection to a master broke at once")
        self._of_shard = tuple(self.links[address] for address in masters)
        self.masters = masters
        self.connects += 1
        self._up, self._usable = True, _ALL
        self._is_down.clear()
        self._is_up.set()
        log.info("redis connected", connects=self.connects, masters=len(self.links), kept_shards=len(self._kept_shards))
        try:
            self.on_up()
        except Exception as error:
            self.report(error)

    async def _read_map(self) -> tuple[Address, ...]:
        """Reads the map while the link is down. Shards are kept only while two nodes agree that their master is the
        same: one that was cut off with us would go on taking publishes (cluster-allow-pubsubshard-when-down)."""
        try:
            masters = await self.slot_map.read()
        except OSError as error:
            self._lose(str(error), _ALL)
            raise
        self._lose_changed(masters)
        return masters

    def _lose_changed(self, masters: Sequence[Address]) -> None:
        changed = {at for at in self._usable if masters[at] != self.masters[at]}
        self._lose("the masters of the cluster changed", changed)

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
        """Returns when the link is down. Loses the shards whose master is another one in the map of slots."""
        while not self._is_down.is_set():
            try:
                async with asyncio.timeout(_READ_MAP_EVERY_S):
                    await self._is_down.wait()
            except TimeoutError:
                with contextlib.suppress(OSError):
                    self._lose_changed(await self.slot_map.read())

    async def _close_link(self, address: Address) -> None:
        link = self.links.pop(address)
        link.release()
        await link.close()
        self.errors += link.errors
        self.handler_errors += link.handler_errors

    def _link_down(self, address: Address, reason: str) -> None:
        link = self.links[address]
        shards = {at for at, other in enumerate(self._of_shard) if other is link}
        self._lose(f"the connection to the master at {address[0]}:{address[1]} is lost: {reason}", shards)

    def _slot_moved(self, link: Link, shard: int) -> None:
        # A former master may say it once more when we are with its successor already.
        if self._of_shard and self._of_shard[shard] is link:
            self._lose("a slot moved", (shard,))

    def _lose(self, reason: str, shards: Collection[int]) -> None:
        """These shards can't be used before the map is read again."""
        lost = self._usable.intersection(shards)
        if not lost:
            return
        self._up = False
        self._kept_shards = self._usable = self._usable - lost
        self._losses += 1
        log.warning("redis cluster left", reason=reason, shards=len(lost), kept_shards=len(self._kept_shards))
        self._is_up.clear()
        self._is_down.set()
        parked = [self._parked.pop(at) for at in lost if at in self._parked]
        try:
            self.on_down(reason)
        except Exception as error:
            self.report(error)
        self.abandon(lost)
        for waiting in parked:
            for _, _, done in waiting:
                done(LinkDown(sent=False))

    def _pushed(self, topic: bytes, payload: bytes) -> None:
        # Connections that still work may bring events of shards that are lost. Everything else, stored events among it,
        # is read again when they are back.
        if self._up or shard_of_name(topic) in self._usable or payload.startswith(_UNSTORED_EVENT):
            self.on_push(topic, payload)


def open_link(url: str, *, max_delay_s: float = 1.0, is_answered_last: bool = False) -> Link:
    """The link for any URL of Redis. It isn't started yet. `max_delay_s` is the longest pause between two attempts to
    connect; with Sentinels or a Cluster it is 0.2 s at most. `is_answered_last` as in Link."""
    if RedisUrl.parse(url).cluster:
        return ClusterLink(url, is_answered_last=is_answered_last)
    return Link(url, max_delay_s=max_delay_s, is_answered_last=is_answered_last)
