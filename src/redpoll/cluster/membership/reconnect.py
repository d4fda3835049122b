"""Registers this worker with Redis and re-asserts what it holds: after a start, a break of the connection, or fencing.
After some shards of a Redis Cluster were lost, it does so in these shards, and the others go on meanwhile.

cluster/membership/README.md "Reconnecting" gives the order of steps. incarnation.py has the names and sync.py makes the
calls. This module starts each step, keeps the connection's state, and releases channels that Redis lists for us but
nobody here holds.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

import hiredis
import structlog

from redpoll.cluster.canary import Canary
from redpoll.cluster.listening import Listening
from redpoll.cluster.mailbox import Mailbox
from redpoll.cluster.membership.catchup import Catchup
from redpoll.cluster.membership.connection_state import ALL_SHARDS, ConnectionState, RedisState
from redpoll.cluster.membership.incarnation import Incarnation
from redpoll.cluster.membership.join import Stage
from redpoll.cluster.membership.local_channel import UNKNOWN, LocalChannel
from redpoll.cluster.membership.local_channels import LocalChannels
from redpoll.cluster.membership.online import Online
from redpoll.cluster.membership.replies import read_first
from redpoll.cluster.membership.sync import Sync
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link, LinkDown
from redpoll.loop.slices import walk

__all__ = ["Reconnect"]

log = structlog.get_logger(__name__)

_SCAN_COUNT: Final = 200


class Reconnect:
    """The link calls `connected` and `down`, the incarnation `fence`, the sync `fence` and `stopped`.

    `follow(local_channel)` applies the app's record to a channel, if the record is known. `fenced` counts how often
    our name was given up.
    """

    def __init__(
        self,
        link: Link,
        keys: Keys,
        connection: RedisState,
        incarnation: Incarnation,
        channels: LocalChannels,
        sync: Sync,
        catchup: Catchup,
        online: Online,
        listening: Listening,
        canary: Canary,
        mailbox: Mailbox,
        follow: Callable[[LocalChannel], None],
    ) -> None:
        self.fenced = 0
        self._link = link
        self._keys = keys
        self._connection = connection
        self._incarnation = incarnation
        self._channels = channels
        self._sync = sync
        self._catchup = catchup
        self._online = online
        self._listening = listening
        self._canary = canary
        self._mailbox = mailbox
        self._follow = follow
        self._registration: asyncio.Task[None] | None = None
        # After a break: the task that resets each channel of the shards that are lost, a slice at a time.
        self._reset: asyncio.Task[None] | None = None
        self._scans: set[asyncio.Task[None]] = set()
        # Channels whose users are being read, or were when the connection broke.
        self._scanned: set[LocalChannel] = set()
        # Redis has known this worker at least once. Those who wait have an event; each new client reads the other.
        self.was_registered = False
        self._registered = asyncio.Event()

    async def wait_registered(self) -> None:
        """Returns when Redis knows this worker, however long that takes."""
        await self._registered.wait()

    def close(self) -> None:
        for task in (*self._scans, self._registration, self._reset):
            if task is not None:
                task.cancel()

    def connected(self) -> None:
        """There is a connection: registers this worker."""
        self._canary.connected()
        self._mailbox.connected()
        self._up()

    def _up(self) -> None:
        self._registration = asyncio.get_running_loop().create_task(self._register(), name="register worker")

    def down(self, reason: str) -> None:
        """The connection is lost, or that to some masters of a Cluster."""
        kept_shards = self._link.kept_shards
        if kept_shards and self._connection.sending:
            self._lose(ALL_SHARDS - kept_shards - self._connection.lost)
        else:
            self._lose_all()

    def _lose_all(self) -> None:
        self._incarnation.connection_lost()
        self._lose(ALL_SHARDS)
        # In a Cluster, connections that still work may have calls of ours.
        self._link.abandon(ALL_SHARDS)

    def _lose(self, shards: frozenset[int]) -> None:
        self._connection.lose(shards)
        if self._registration is not None:
            self._registration.cancel()
            self._registration = None
        self._canary.connection_lost(shards)
        self._mailbox.connection_lost()
        self._sync.connection_lost(shards)
        self._online.connection_lost(shards)
        self._listening.connection_lost(shards)
        # Nothing is sent for these shards before all their channels are reset, so it doesn't matter that some of them
        # change before that.
        if self._reset is not None:
            self._reset.cancel()
        reset = partial(self._reset_channel, frozenset(self._connection.lost))
        self._reset = asyncio.get_running_loop().create_task(walk(self._channels.slice_by_slice(), reset))

    def _reset_channel(self, lost: frozenset[int], local_channel: LocalChannel) -> None:
        if local_channel.shard in lost and not local_channel.dropped:
            self._sync.forget(local_channel)
            self._catchup.forget(local_channel)
            local_channel.connection_lost()

    def _renamed(self, local_channel: LocalChannel) -> None:
        self._sync.forget(local_channel)
        local_channel.renamed()

    def fence(self) -> None:
        """Redis refuses calls under our name: the next one is taken."""
        if not self._connection.sending:
            return
        self.fenced += 1
        if not self._link.up:
            # Shards of a Cluster are lost as well: the next name is taken when all are back.
            self._lose_all()
            return
        if self._registration is not None:
            self._registration.cancel()
            self._registration = None
        # They read what Redis lists under the present name.
        for scan in self._scans:
            scan.cancel()
        self._connection.change(ConnectionState.FENCED)
        self._sync.stop()
        if self._sync.in_flight == 0:
            self.stopped()

    def stopped(self) -> None:
        """The last call was answered. Only now the next name is taken, so that no reply is misread."""
        if self._connection.state is ConnectionState.FENCED and self._registration is None:
            self._up()

    async def _register(self) -> None:
        previous = self._incarnation.worker_id if self._incarnation.used else None
        shards = ALL_SHARDS
        held: list[list[bytes]] | None
        try:
            if self._connection.state is ConnectionState.PARTLY:
                shards = frozenset(self._connection.lost)
                held = await self._incarnation.register_in(shards)
                if held is None:
                    self._registration = None
                    self.fence()
                    return
            else:
                if self._connection.state is ConnectionState.FENCED:
                    self._incarnation.adopt_next_name()
                self._connection.change(ConnectionState.REGISTERING)
                held = await self._incarnation.register()
            if self._reset is not None:
                # It goes on when this registration is given up.
                await asyncio.shield(self._reset)
                self._reset = None
            if self._incarnation.worker_id != previous:
                await walk(self._channels.slice_by_slice(), self._renamed)
            scanned = {local_channel for local_channel in self._scanned if local_channel.shard in shards}
            self._scanned -= scanned
            for local_channel in scanned:
                self._sync.agenda.move(local_channel, Stage.CLEAN)
            for listed in held:
                self._compare(listed, scanned)
                await asyncio.sleep(0)
        except LinkDown:
            return
        except Exception:
            log.exception("registration failed")
            self._link.drop("registration failed")
            return
        self._registration = None
        self.was_registered = True
        self._registered.set()
        self._online.connected(shards)
        self._sync.assert_held(shards)
        self._listening.connected(shards)

    def _compare(self, listed: list[bytes], scanned: set[LocalChannel]) -> None:
        # What Redis lists for us in one shard: `A:C`, then its kind and count, and so on.
        local_channels = self._channels.by_name
        for field, value in zip(listed[::2], listed[1::2], strict=True):
            if field == b"gen":
                continue
            app_id, _, channel = field.decode().partition(":")
            local_channel = local_channels.get((app_id, channel))
            if local_channel is None:
                self._release(self._channels.hold(app_id, channel, chr(value[0])))
            elif local_channel in scanned:
                self._release(local_channel)
            else:
                local_channel.listed()

    def _release(self, local_channel: LocalChannel) -> None:
        # Redis lists a channel that we don't hold. Its users must be read before the count goes to 0, because a reaper
        # finds users by way of the counts. Until then no call is made for it.
        local_channel.confirmed = UNKNOWN
        self._follow(local_channel)
        if local_channel.members is not None:
            self._sync.agenda.move(local_channel, Stage.SCAN)
            self._scanned.add(local_channel)
            task = asyncio.get_running_loop().create_task(self._scan(local_channel))
            self._scans.add(task)
            task.add_done_callback(self._scans.discard)

    async def _scan(self, local_channel: LocalChannel) -> None:
        key = self._keys.members(local_channel.app_id, local_channel.channel)
        breaks, w = self._connection.breaks[local_channel.shard], self._incarnation.name
        cursor: bytes | int = 0
        try:
            while True:
                cursor, flat = await self._link.ask(b"HSCAN", key, cursor, b"COUNT", _SCAN_COUNT)
                _, page = read_first(flat, w)
                if local_channel.members is not None:
                    local_channel.members.mark_gone(page.ours)
                if int(cursor) == 0:
                    break
        except LinkDown:
            # The stage stays SCAN, so the next connection starts the scan again.
            return
        except hiredis.ReplyError as error:
            self._link.drop_connection(local_channel.shard, f"HSCAN failed: {error}")
            return
        if breaks == self._connection.breaks[local_channel.shard]:
            self._sync.agenda.move(local_channel, Stage.CLEAN)
            self._scanned.discard(local_channel)
            self._sync.mark_dirty(local_channel)
