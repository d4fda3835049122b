"""Removes dead workers from Redis: their counts, members, signed-in users and connections, and then their names.

Only the leading node's control plane runs a reaper. A live supervisor alone says which of its workers are dead, because
a worker that stalls doesn't beat either. The workers of a dead node, whose supervisor sends no heartbeats, are dead. A
live worker that is reaped by mistake costs its members one removal and one return (cluster/membership/README.md "Dead
workers"). Every step can be repeated, so an interrupted reap simply starts again.
"""

import asyncio
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import hiredis
import structlog

from redpoll.cluster.membership.apps_of_dead import AppsOfDead
from redpoll.cluster.membership.hold_call import (
    CHANNEL,
    PRESENCE,
    REAPER_GEN,
    SIGNED_IN,
    Flag,
    HoldCall,
    encode,
    hook_flags,
)
from redpoll.cluster.nodes import KnownNode, Unchanged
from redpoll.cluster.redis.keys import SHARDS, Keys, user_pseudo
from redpoll.cluster.redis.link import Clock, Done, Link, LinkDown
from redpoll.cluster.redis.scripts import BURY, FENCE, FORGET_NODE, HOLD, STALE, WRITE
from redpoll.cluster.redis.values import MemberEntry, WorkerId

__all__ = ["Beats", "Reaper", "orphans"]

_WORKER_KEY: Final = re.compile(rb":w:([0-9a-f]{12}\.\d+\.\d+)\Z")

log = structlog.get_logger(__name__)

_FENCED_BEAT: Final = b"-1"
_WORKER: Final = re.compile(rb"[^.\x80-\xff]+\.[0-9]{1,19}\.[0-9]{1,19}").fullmatch
_SCAN_COUNT: Final = 500
# Bounds how long other clients of Redis wait, and how long control's own loop takes for the replies that come together:
# 20 calls of at most 100 users take about 10 ms.
_MAX_GONE: Final = 100
_MAX_IN_FLIGHT: Final = 20
# Reading all key names takes long in a big Redis. What it looks for is left by a fail-over that loses writes.
_LOOK_AGAIN_AFTER_S: Final = 86_400.0


def _no_hooks(app_id: str) -> str:
    return ""


def _no_history(app_id: str, channel: str) -> bool:
    return False


class Beats:
    """Decides which workers are dead, from the beat table and what the nodes' supervisors say. No I/O; `now` is
    control's clock.

    A worker is dead when its node is dead, or when the supervisor of its node has waited for its process. The earlier
    names of a process, workers of unknown nodes, and workers that appear after the death of their node, are dead when
    their beat didn't change over `max_same` further reads. (A node that was cut off from Redis counts as dead until its
    supervisor's next heartbeat, and its workers may be back sooner.) A pause of more than `gap_s` between two reads
    restarts the count, because whatever stalled control may have stalled the workers.
    """

    def __init__(self, run: str, *, max_same: int = 4, gap_s: float = 2.0) -> None:
        self.table: dict[str, bytes] = {}
        self._max_same = max_same
        self._unchanged = Unchanged(gap_s=gap_s)
        # The greatest `n` in the table by run and `k`.
        self._present: dict[tuple[str, int], int] = {}
        # Workers that appeared while their node was dead.
        self._returned: set[str] = set()
        self._has_read = False
        self._run = run
        # The living workers of the own node, and the greatest `k` it assigned.
        self._alive: Collection[int] = ()
        self._greatest = -1
        self._nodes: Mapping[str, KnownNode] = {}

    def set_alive(self, ks: set[int], greatest: int) -> None:
        """The own supervisor's list, which is newer than its heartbeat."""
        self._alive, self._greatest = frozenset(ks), greatest

    def set_nodes(self, nodes: Mapping[str, KnownNode]) -> None:
        """The other nodes by run, as of their last heartbeats."""
        self._nodes = nodes

    def read(self, table: dict[str, bytes], now: float) -> None:
        """Takes the beat table; `now` is when the reply came."""
        self._unchanged.read(table, now)
        appeared = table.keys() - self.table.keys() if self._has_read else set()
        self._returned = {w for w in (self._returned | appeared) & table.keys() if self._is_of_dead_node(w)}
        self._has_read = True
        self.table = table
        self._present = {}
        for run, k, n in map(WorkerId.parse, table):
            self._present[run, k] = max(n, self._present.get((run, k), 0))

    def dead(self) -> list[str]:
        """The workers of the last table that must be reaped."""
        return [w for w, beat in self.table.items() if self._is_dead(w, beat)]

    def _is_dead(self, w: str, beat: bytes) -> bool:
        if beat == _FENCED_BEAT or self.is_reported_dead(w):
            return True
        return self._unchanged.reads(w) >= self._max_same and not self._is_supervised(w)

    def _is_supervised(self, w: str) -> bool:
        # The present name of a process of a live node. Its supervisor decides about it.
        run, k, n = WorkerId.parse(w)
        if self._present.get((run, k)) != n:
            return False
        return run == self._run or (run in self._nodes and self._nodes[run].alive)

    def is_reported_dead(self, w: str) -> bool:
        """Whether the worker's node is dead, or its supervisor says that this worker ended."""
        run, k, _ = WorkerId.parse(w)
        if run == self._run:
            return k not in self._alive and k <= self._greatest
        node = self._nodes.get(run)
        if node is None:
            return False
        if not node.alive:
            return w in self.table and w not in self._returned
        return k not in node.workers and k <= node.greatest

    def _is_of_dead_node(self, w: str) -> bool:
        node = self._nodes.get(WorkerId.parse(w).run)
        return node is not None and not node.alive

    def forgotten(self) -> dict[str, KnownNode]:
        """The dead nodes of which no worker is left in the last table, by run."""
        with_workers = {WorkerId.parse(w).run for w in self.table}
        return {run: node for run, node in self._nodes.items() if not node.alive and run not in with_workers}


class Reaper:
    """`run` reads the beats once a second and reaps dead workers; `set_alive` makes it act at once. `reaped` counts
    them.

    A read without an answer for `unanswered_s` drops the connection, as a worker's beat does. `hooks_of(app_id)` is
    `App.hooks` as it is now, "" if there is no such app: the reaper writes the webhook rows for what a dead worker
    held. `has_history(app_id, channel)`: a history rule applies to the channel. `debounce_s` is as in `Sync`.
    """

    def __init__(
        self,
        link: Link,
        keys: Keys,
        run: str,
        *,
        hooks_of: Callable[[str], str] = _no_hooks,
        has_history: Callable[[str, str], bool] = _no_history,
        debounce_s: float = 3.0,
        read_s: float = 1.0,
        max_same: int = 4,
        gap_s: float = 2.0,
        unanswered_s: float = 10.0,
    ) -> None:
        self.reaped = 0
        self.look_for_orphans_after_s = 10.0
        self._look_at = float("-inf")
        self._connects = 0
        # Names in the table of beats that no worker has, and that the log has.
        self._unknown: set[bytes] = set()
        self._link = link
        self._keys = keys
        self._hooks_of = hooks_of
        self._has_history = has_history
        self._debounce_ms = round(debounce_s * 1000)
        self._read_s = read_s
        self._unanswered_s = unanswered_s
        self._clock: Clock = link.clock
        self._beats = Beats(run, max_same=max_same, gap_s=gap_s)
        self._reaping: dict[str, asyncio.Task[None]] = {}
        self._alive_changed = asyncio.Event()
        # For calls about members, and for those about other channels: the second are sent by one reap at a time.
        self._in_flight = asyncio.Semaphore(_MAX_IN_FLIGHT)
        self._releasing = asyncio.Lock()

    def set_alive(self, ks: set[int], greatest: int) -> None:
        """The own supervisor's list, at control's start and at every change."""
        self._beats.set_alive(ks, greatest)
        self._alive_changed.set()

    def set_nodes(self, nodes: Mapping[str, KnownNode]) -> None:
        """The other nodes by run, at control's start and at every change."""
        self._beats.set_nodes(nodes)
        self._alive_changed.set()

    def workers(self) -> list[str]:
        """Every W of the last beat table that isn't dead."""
        dead = set(self._beats.dead())
        return [w for w in self._beats.table if w not in dead]

    async def run(self) -> None:
        """Reads beats and reaps until cancelled. Waits while Redis is disconnected."""
        try:
            while True:
                await self._link.wait_up()
                try:
                    self._alive_changed.clear()
                    table = await self._table()
                    self._beats.read(table, self._clock())
                    for w in self._beats.dead():
                        self._begin(w)
                    await self._look_for_orphans()
                    for run, node in self._beats.forgotten().items():
                        names = (self._keys.nodes, self._keys.drained)
                        await self._link.execute(FORGET_NODE, names, (run, node.beat))
                    await self._wait_for_next_read()
                except (LinkDown, hiredis.ReplyError) as error:
                    log.warning("heartbeats not read", reason=str(error))
                    await asyncio.sleep(self._read_s / 4)
                except Exception:
                    # Our own bug must not end the reaping.
                    log.exception("heartbeats not handled")
                    await asyncio.sleep(self._read_s)
        finally:
            for task in self._reaping.values():
                task.cancel()

    async def _look_for_orphans(self) -> None:
        # At the start, some time after each reconnect, and once a day. They get a beat of -1, which the next read sees.
        now, connects = self._clock(), self._link.connects
        if self._connects and connects != self._connects:
            self._look_at = now + self.look_for_orphans_after_s
        self._connects = connects
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_AGAIN_AFTER_S
        for w in await orphans(self._link, self._keys):
            log.warning("worker without a beat", w=w.decode())
            await self._link.execute(WRITE, (self._keys.beat,), (b"HSETNX", w, _FENCED_BEAT))

    async def _wait_for_next_read(self) -> None:
        # Acts on what a supervisor says; the read for that doesn't count as one of the beats.
        loop = asyncio.get_running_loop()
        until = loop.time() + self._read_s
        while (left := until - loop.time()) > 0:
            try:
                async with asyncio.timeout(left):
                    await self._alive_changed.wait()
            except TimeoutError:
                return
            self._alive_changed.clear()
            for w in await self._table():
                if self._beats.is_reported_dead(w):
                    self._begin(w)

    async def _table(self) -> dict[str, bytes]:
        # Control sends no beats. This read shows that its connection still works.
        try:
            async with asyncio.timeout(self._unanswered_s):
                beats = await self._link.ask(b"HGETALL", self._keys.beat)
        except TimeoutError:
            self._link.drop_connection(0, f"a read of the beats was unanswered for {self._unanswered_s:g} s")
            raise LinkDown(sent=True) from None
        unknown = {w for w in beats if _WORKER(w) is None}
        for w in unknown - self._unknown:
            log.error("heartbeat with an unknown name", w=w)
        self._unknown = unknown
        return {w.decode(): beat for w, beat in beats.items() if w not in unknown}

    def _begin(self, w: str) -> None:
        if w not in self._reaping:
            task = asyncio.get_running_loop().create_task(self._reap(w), name=f"reap {w}")
            self._reaping[w] = task

    async def _reap(self, w: str) -> None:
        try:
            await self.reap(w)
        except (LinkDown, hiredis.ReplyError) as error:
            # Its beat is -1, or stays unchanged: the next read starts the reap again.
            log.warning("reap interrupted", w=w, reason=str(error))
        finally:
            del self._reaping[w]

    async def reap(self, w: str) -> None:
        """Removes one worker completely. Raises LinkDown or hiredis.ReplyError; can be repeated."""
        began = self._clock()
        apps = AppsOfDead(self._link, self._keys, w)
        await self._link.execute(WRITE, (self._keys.beat,), (b"HSET", w, _FENCED_BEAT))
        fenced = await asyncio.gather(*(self._link.execute(FENCE, (self._keys.worker(at, w),)) for at in range(SHARDS)))
        for at, left in enumerate(fenced):
            if left:
                await self._empty(at, w, apps)
        await asyncio.gather(*(self._bury(at, w, apps) for at in range(SHARDS)))
        await self._link.ask(b"HDEL", self._keys.beat, w)
        self.reaped += 1
        log.info("worker reaped", w=w, channels=sum(fenced), took_s=round(self._clock() - began, 3))

    async def _bury(self, at: int, w: str, apps: AppsOfDead) -> None:
        while not await self._link.execute(BURY, (self._keys.worker(at, w),)):
            await self._empty(at, w, apps)

    async def _empty(self, at: int, w: str, apps: AppsOfDead) -> None:
        # Removes everything that the worker holds in one shard.
        key = self._keys.worker(at, w)
        # Each channel is released in the shard where it was found. It is another one than ours if an earlier record
        # store, with another shard key, left it there.
        keys = self._keys.in_shard(at)
        cursor: bytes | int = 0
        while True:
            cursor, flat = await self._link.ask(b"HSCAN", key, cursor, b"COUNT", _SCAN_COUNT)
            fields = [
                (field.decode(), value[:1].decode())
                for field, value in zip(flat[::2], flat[1::2], strict=True)
                if field != b"gen"
            ]
            await self._release(keys, w, fields, apps)
            if int(cursor) == 0:
                return

    async def _release(self, keys: Keys, w: str, fields: Sequence[tuple[str, str]], apps: AppsOfDead) -> None:
        # Fields are `app:channel`, each with its kind.
        await apps.read({field.partition(":")[0] for field, _ in fields})
        signed_in = [field.partition(":" + user_pseudo("")) for field, kind in fields if kind == SIGNED_IN]
        await apps.users_leave([(app_id, user) for app_id, _, user in signed_in])
        members = [field for field, kind in fields if kind == PRESENCE]
        if len(members) < len(fields):
            # By callbacks: with a task and a future for each channel, control would spend five times as long.
            released: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            async with self._releasing:
                pairs = iter([pair for pair in fields if pair[1] != PRESENCE])
                _Pump(pairs, partial(self._send, keys, w, apps), released)
                await released
        rest = iter(members)
        await asyncio.gather(*(self._release_members(keys, w, rest, apps) for _ in members[:_MAX_IN_FLIGHT]))

    def _send(self, keys: Keys, w: str, apps: AppsOfDead, field: str, kind: str, done: Done) -> None:
        app_id, _, channel = field.partition(":")
        counts = kind == CHANNEL and apps.counts(app_id)
        names, args = self._call(keys, w, app_id, channel, kind, Flag.COUNT if counts else "", ())
        self._link.run(HOLD, names, args, done)

    async def _release_members(self, keys: Keys, w: str, fields: Iterator[str], apps: AppsOfDead) -> None:
        for field in fields:
            app_id, _, channel = field.partition(":")
            users = await self._users(keys, w, app_id, channel)
            # Until the last users are removed the worker's count stays at least 1: if this reap is interrupted, the
            # next one finds the users by way of the count.
            while len(users) > _MAX_GONE:
                await self._hold(keys, w, app_id, channel, Flag.USERS_REMAIN, users[:_MAX_GONE], apps)
                users = users[_MAX_GONE:]
            await self._hold(keys, w, app_id, channel, "", users, apps)

    async def _users(self, keys: Keys, w: str, app_id: str, channel: str) -> list[str]:
        # The users of a presence channel whom Redis lists under the worker's name.
        key, name = keys.members(app_id, channel), w.encode()
        users: dict[str, None] = {}
        cursor: bytes | int = 0
        while True:
            async with self._in_flight:
                cursor, flat = await self._link.ask(b"HSCAN", key, cursor, b"COUNT", _SCAN_COUNT)
            for user, entry in zip(flat[::2], flat[1::2], strict=True):
                if name in MemberEntry.parse(entry).holders:
                    users[user.decode()] = None
            if int(cursor) == 0:
                return list(users)

    async def _hold(
        self, keys: Keys, w: str, app_id: str, channel: str, flags: str, gone: Sequence[str], apps: AppsOfDead
    ) -> None:
        names, args = self._call(keys, w, app_id, channel, PRESENCE, flags, gone)
        async with self._in_flight:
            await apps.users_leave([(app_id, user) for user in gone])
            _check(await self._link.execute(HOLD, names, args))

    def _call(
        self, keys: Keys, w: str, app_id: str, channel: str, kind: str, flags: str, gone: Sequence[str]
    ) -> tuple[list[bytes], list[bytes | str | int]]:
        hooks = hook_flags(self._hooks_of(app_id), channel, kind)
        if hooks and self._debounce_ms:
            hooks += Flag.DEBOUNCE
        if kind in (CHANNEL, PRESENCE) and self._has_history(app_id, channel):
            flags += Flag.HISTORY_ENDS
        call: HoldCall[Any] = HoldCall(0, 0, flags + hooks, gone, (), (), True, False)
        topic = keys.topic(app_id, channel)
        return encode(keys, w, REAPER_GEN, app_id, channel, kind, topic, call, debounce_ms=self._debounce_ms)


def _check(reply: Any) -> None:
    # FENCED means that the worker is gone already: Redis was emptied, or the worker is buried.
    if reply[0] == STALE:
        raise hiredis.ReplyError("the worker is not fenced in this shard")


class _Pump:
    """Sends one call per pair, _MAX_IN_FLIGHT at a time: each answer sends the next one. `finished` gets its result
    after the last answer, or the first error."""

    def __init__(
        self,
        pairs: Iterator[tuple[str, str]],
        send: Callable[[str, str, Done], None],
        finished: asyncio.Future[None],
    ) -> None:
        self._pairs = pairs
        self._send = send
        self._finished = finished
        self._in_flight = 0
        for _ in range(_MAX_IN_FLIGHT):
            self._next()

    def _next(self) -> None:
        pair = next(self._pairs, None)
        if pair is not None:
            self._in_flight += 1
            self._send(*pair, self._answered)
        elif not self._in_flight and not self._finished.done():
            self._finished.set_result(None)

    def _answered(self, reply: Any) -> None:
        self._in_flight -= 1
        if self._finished.done():
            return
        try:
            if isinstance(reply, Exception):
                raise reply
            _check(reply)
        except Exception as error:
            self._finished.set_exception(error)
            return
        self._next()


async def orphans(link: Link, keys: Keys) -> set[bytes]:
    """The names of workers that Redis has something of, but that its beat table doesn't name, so that no reaper would
    see them. Reads all key names of Redis, a thousand at a time. Raises hiredis.ReplyError or LinkDown.

    A fail-over that loses writes leaves them: the removal of a worker's hash in one master is undone, while its beat
    stays removed in another. A worker adds its beat before its hashes, and removes them before its beat. So what was in
    a shard before the beat table was read, and isn't in that table, is left over.
    """
    heads = set(keys.heads)
    processes: set[bytes] = set()
    for name in await link.scan(b"%b:{*}:w:*" % keys.prefix.encode()):
        match = _WORKER_KEY.search(name)
        if match is not None and name[: match.start() + 1] in heads:
            processes.add(match[1])
    return processes.difference(await link.ask(b"HKEYS", keys.beat)) if processes else processes
