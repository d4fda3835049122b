"""The connection comes, goes, and is fenced: how this worker comes to stand in Redis again, with all that it holds.

In which order things are told stands in cluster.md 6. The names are incarnation.py's, the calls commits.py's; here is
what begins each, and what becomes of what Redis lists for us and nobody here holds.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import hiredis
import structlog

from redpoll.cluster.catchup import Catchup
from redpoll.cluster.keys import Keys
from redpoll.cluster.link import Link, LinkDown
from redpoll.cluster.membership.incarnation import Incarnation
from redpoll.cluster.membership.local_channel import UNKNOWN, LocalChannel
from redpoll.cluster.membership.local_channels import LocalChannels
from redpoll.cluster.membership.rosters import read_first
from redpoll.cluster.membership.sync import Sync
from redpoll.cluster.online import Online

__all__ = ["Reconnect"]

log = structlog.get_logger(__name__)

_SCAN_COUNT: Final = 200


class Reconnect:
    """`up` and `down` are the link's callbacks, `fence` the incarnation's and the commits', `settled` the latter's.

    `follow(local_channel)` lets a channel go by its app's record, where that is known. `connection` counts breaks, so
    that what began on one connection doesn't end on another; `fenced` counts how often our name was given up.
    """

    def __init__(
        self,
        link: Link,
        keys: Keys,
        incarnation: Incarnation,
        holdings: LocalChannels,
        commits: Sync,
        catchup: Catchup,
        watches: Online,
        follow: Callable[[LocalChannel], None],
    ) -> None:
        self.connection = 0
        self.fenced = 0
        self._link = link
        self._keys = keys
        self._incarnation = incarnation
        self._holdings = holdings
        self._commits = commits
        self._catchup = catchup
        self._watches = watches
        self._follow = follow
        self._fencing = False
        self._rising: asyncio.Task[None] | None = None
        self._scans: set[asyncio.Task[None]] = set()
        self._risen = asyncio.Event()

    @property
    def name(self) -> bytes:
        """Our W."""
        return self._incarnation.name

    @property
    def risen(self) -> bool:
        """Redis has known this worker at least once."""
        return self._risen.is_set()

    async def wait_risen(self) -> None:
        """Returns when Redis knows this worker, however long that takes."""
        await self._risen.wait()

    def close(self) -> None:
        for task in self._scans | ({self._rising} if self._rising else set()):
            task.cancel()

    def up(self) -> None:
        """There is a connection, in nobody's name yet."""
        self._rising = asyncio.get_running_loop().create_task(self._rise(), name="registry rise")

    def down(self, reason: str) -> None:
        """The connection broke."""
        self.connection += 1
        self._fencing = False
        if self._rising is not None:
            self._rising.cancel()
            self._rising = None
        self._incarnation.down()
        self._commits.lose()
        self._watches.lose()
        self._catchup.break_off(self._holdings.by_name.values())
        for local_channel in self._holdings.by_name.values():
            local_channel.lose()

    def fence(self) -> None:
        """Redis takes nothing more in our name."""
        if self._fencing or not self._link.up:
            return
        self.fenced += 1
        self._fencing = True
        self._commits.stop()
        self.settled()

    def settled(self) -> None:
        """Either everything was told again, and changes that waited may go, or we were fenced and the last call in
        the old name is answered: only then the next name is taken, so that no reply is misread."""
        if not self._fencing:
            for local_channel in list(self._holdings.by_name.values()):
                self._commits.touch(local_channel)
        elif self._rising is None and self._commits.in_flight == 0:
            self.up()

    async def _rise(self) -> None:
        before = self._incarnation.w if self._incarnation.gen else None
        try:
            if self._fencing:
                self._incarnation.fence()
            fields = await self._incarnation.rise()
        except LinkDown:
            return
        except Exception:
            log.exception("could not register")
            self._link.drop("could not register")
            return
        self._fencing = False
        self._rising = None
        local_channels = self._holdings.by_name
        if self._incarnation.w != before:
            for local_channel in local_channels.values():
                local_channel.renew()
        for local_channel in list(local_channels.values()):
            if local_channel.scan:
                local_channel.blocked = local_channel.scan = False
                if f"{local_channel.app_id}:{local_channel.channel}" in fields:
                    self._clear_away(local_channel)
        for field, value in fields.items():
            app_id, _, channel = field.partition(":")
            if (app_id, channel) not in local_channels:
                self._clear_away(self._holdings.hold(app_id, channel, value[0]))
        self._risen.set()
        self._watches.tell()
        self._commits.tell(local_channels.values(), self._keys.sys)
        # Behind the topics in the same write: what the pages don't have comes as an event.
        self._catchup.resume(local_channels.values())

    def _clear_away(self, local_channel: LocalChannel) -> None:
        # Redis lists a channel that we don't hold. Its users must be known before the count goes to 0, which
        # would hide them from a reaper; until then the channel is busy.
        local_channel.confirmed = UNKNOWN
        self._follow(local_channel)
        if local_channel.gone is not None:
            local_channel.blocked = local_channel.scan = True
            task = asyncio.get_running_loop().create_task(self._scan(local_channel))
            self._scans.add(task)
            task.add_done_callback(self._scans.discard)

    async def _scan(self, local_channel: LocalChannel) -> None:
        key = self._keys.members(local_channel.app_id, local_channel.channel)
        connection, name = self.connection, self._incarnation.name
        cursor: bytes | int = 0
        try:
            while True:
                cursor, flat = await self._link.ask(b"HSCAN", key, cursor, b"COUNT", _SCAN_COUNT)
                _, page = read_first(flat, name)
                local_channel.forsake(page.ours)
                if int(cursor) == 0:
                    break
        except LinkDown:
            # `scan` stands, so the next connection begins anew.
            return
        except hiredis.ReplyError as error:
            self._link.drop(f"HSCAN failed: {error}")
            return
        if connection == self.connection:
            local_channel.blocked = local_channel.scan = False
            self._commits.touch(local_channel)
