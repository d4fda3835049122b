"""Registers this worker with Redis and re-asserts what it holds: after a start, a break of the connection, or fencing.

cluster/README.md "Reconnecting" gives the order of steps. incarnation.py has the names and sync.py makes the calls.
This module starts each step, keeps the connection's state, and releases channels that Redis lists for us but nobody
here holds.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import hiredis
import structlog

from redpoll.cluster.canary import Canary
from redpoll.cluster.catchup import Catchup
from redpoll.cluster.keys import Keys
from redpoll.cluster.link import Link, LinkDown
from redpoll.cluster.membership.connection_state import Connection, ConnectionState
from redpoll.cluster.membership.incarnation import Incarnation
from redpoll.cluster.membership.local_channel import UNKNOWN, Activity, LocalChannel
from redpoll.cluster.membership.local_channels import LocalChannels
from redpoll.cluster.membership.rosters import read_first
from redpoll.cluster.membership.slices import walk
from redpoll.cluster.membership.sync import Sync
from redpoll.cluster.online import Online

__all__ = ["Reconnect"]

log = structlog.get_logger(__name__)

_SCAN_COUNT: Final = 200


class Reconnect:
    """Takes over the callbacks of the link (up, down), of the incarnation (fenced) and of the sync (fenced, stopped).

    `follow(local_channel)` applies the app's record to a channel, if the record is known. `fenced` counts how often
    our name was given up.
    """

    def __init__(
        self,
        link: Link,
        keys: Keys,
        connection: Connection,
        incarnation: Incarnation,
        channels: LocalChannels,
        sync: Sync,
        catchup: Catchup,
        online: Online,
        canary: Canary,
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
        self._canary = canary
        self._follow = follow
        self._registration: asyncio.Task[None] | None = None
        # After a break: the task that resets each channel, a slice at a time.
        self._reset: asyncio.Task[None] | None = None
        self._scans: set[asyncio.Task[None]] = set()
        # Channels whose users are being read, or were when the connection broke.
        self._scanned: set[LocalChannel] = set()
        self._was_registered = asyncio.Event()
        link.on_up = self._connected
        link.on_down = self._down
        incarnation.on_fenced = self._fence
        sync.on_fenced = self._fence
        sync.on_stopped = self._stopped
        # After the SUBSCRIBE, in the same write: what the pages don't have comes as a push.
        sync.on_subscribing = catchup.resume

    @property
    def was_registered(self) -> bool:
        """Redis has known this worker at least once."""
        return self._was_registered.is_set()

    async def wait_registered(self) -> None:
        """Returns when Redis knows this worker, however long that takes."""
        await self._was_registered.wait()

    def close(self) -> None:
        for task in (*self._scans, self._registration, self._reset):
            if task is not None:
                task.cancel()

    def _connected(self) -> None:
        self._canary.connected()
        self._up()

    def _up(self) -> None:
        self._registration = asyncio.get_running_loop().create_task(self._register(), name="register worker")

    def _down(self, reason: str) -> None:
        self._connection.number += 1
        self._connection.change(ConnectionState.DOWN)
        if self._registration is not None:
            self._registration.cancel()
            self._registration = None
        self._canary.connection_lost()
        self._incarnation.connection_lost()
        self._sync.connection_lost()
        self._online.connection_lost()
        self._catchup.connection_lost()
        # Nothing is sent before all channels are reset, so it doesn't matter that some of them change before that.
        if self._reset is not None:
            self._reset.cancel()
        self._reset = asyncio.get_running_loop().create_task(
            walk(self._channels.slice_by_slice(), LocalChannel.connection_lost)
        )

    def _fence(self) -> None:
        # Redis refuses calls under our name.
        if self._connection.state not in (ConnectionState.REASSERTING, ConnectionState.OPEN):
            return
        self.fenced += 1
        self._connection.change(ConnectionState.FENCED)
        self._sync.stop()
        if self._sync.in_flight == 0:
            self._stopped()

    def _stopped(self) -> None:
        # The last call was answered. Only now the next name is taken, so that no reply is misread.
        if self._connection.state is ConnectionState.FENCED and self._registration is None:
            self._up()

    async def _register(self) -> None:
        previous = self._incarnation.w if self._incarnation.gen else None
        try:
            if self._connection.state is ConnectionState.FENCED:
                self._incarnation.take_next_name()
            self._connection.change(ConnectionState.REGISTERING)
            shards = await self._incarnation.register()
            if self._reset is not None:
                await self._reset
                self._reset = None
            if self._incarnation.w != previous:
                await walk(self._channels.slice_by_slice(), LocalChannel.renamed)
            for local_channel in self._scanned:
                local_channel.activity = Activity.NONE
            scanned, self._scanned = self._scanned, set()
            for shard in shards:
                self._compare(shard, scanned)
                await asyncio.sleep(0)
        except LinkDown:
            return
        except Exception:
            log.exception("registration failed")
            self._link.drop("registration failed")
            return
        self._registration = None
        self._was_registered.set()
        self._online.connected()
        self._sync.assert_all()

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
            local_channel.activity = Activity.SCAN
            self._scanned.add(local_channel)
            task = asyncio.get_running_loop().create_task(self._scan(local_channel))
            self._scans.add(task)
            task.add_done_callback(self._scans.discard)

    async def _scan(self, local_channel: LocalChannel) -> None:
        key = self._keys.members(local_channel.app_id, local_channel.channel)
        number, w = self._connection.number, self._incarnation.name
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
            # The activity stays SCAN, so the next connection starts the scan again.
            return
        except hiredis.ReplyError as error:
            self._link.drop(f"HSCAN failed: {error}")
            return
        if number == self._connection.number:
            local_channel.activity = Activity.NONE
            self._scanned.discard(local_channel)
            self._sync.touch(local_channel)
