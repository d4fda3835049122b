"""Counts an app's messages by UTC day, over all processes, and enforces `App.daily_limit`.

Messages are counted in Redis before they are published. Control copies the count to the record store and restores it if
Redis lost it.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, NamedTuple

from redpoll.cluster.bus import CONFIRM_S, MARKED_S, ask_within
from redpoll.cluster.redis.keys import Keys, shard_of_name
from redpoll.cluster.redis.link import Link
from redpoll.cluster.redis.scripts import SPEND

__all__ = ["Quota", "Spent"]

_LIFETIME_S: Final = 3 * 86_400


class Spent(NamedTuple):
    """`ok` False: these messages would exceed the limit, and none of them is counted. `used` is the day's count now."""

    ok: bool
    used: int


def _spent(done: Callable[[Any], None], reply: Any) -> None:
    done(Spent(reply[0] == 1, reply[1]) if isinstance(reply, list) else reply)


class Quota:
    """For apps that have a limit. `wall_clock` returns Unix seconds."""

    def __init__(
        self,
        link: Link,
        keys: Keys,
        *,
        wall_clock: Callable[[], float] = time.time,
        confirm_s: float = CONFIRM_S,
    ) -> None:
        self._link = link
        self._keys = keys
        self._wall_clock = wall_clock
        self._confirm_s = confirm_s

    def today(self) -> str:
        """The UTC day, `YYYYMMDD`."""
        return datetime.fromtimestamp(self._wall_clock(), UTC).strftime("%Y%m%d")

    def shard(self, app_id: str) -> int:
        """Where an app's counters are."""
        return shard_of_name(self._keys.spent(app_id, self.today()))

    async def spend(self, app_id: str, n: int, limit: int, once: str | None = None, day: str | None = None) -> Spent:
        """Counts `n` messages that are about to be published, or none of them, on a day, today by default. With `once`
        (`Claim.once`) they are counted once, however often this is called. Raises Unavailable: they may be counted."""
        return await self._run(app_id, day or self.today(), n, limit, 0, once)

    def spend_then(self, app_id: str, n: int, limit: int, done: Callable[[Any], None]) -> None:
        """As `spend`, without waiting. `done` gets a Spent, a ReplyError or a LinkDown, in the order of the calls."""
        args = (n, limit, 0, _LIFETIME_S)
        self._link.run(SPEND, (self._keys.spent(app_id, self.today()),), args, partial(_spent, done))

    async def used(self, app_id: str, day: str | None = None) -> int:
        """The count of a day, today's by default. Raises Unavailable."""
        key = self._keys.spent(app_id, day or self.today())
        return int(await ask_within(self._link, lambda: self._link.ask(b"GET", key), self._confirm_s) or 0)

    async def restore(self, app_id: str, day: str, n: int) -> int:
        """Makes the count of a day at least `n`, and returns it. Raises Unavailable."""
        return (await self._run(app_id, day, 0, 0, n)).used

    async def _run(self, app_id: str, day: str, n: int, limit: int, at_least: int, once: str | None = None) -> Spent:
        marker = () if once is None else (self._keys.counted(app_id, once),)
        names, args = (self._keys.spent(app_id, day), *marker), (n, limit, at_least, _LIFETIME_S, MARKED_S)
        ok, used = await ask_within(self._link, lambda: self._link.execute(SPEND, names, args), self._confirm_s)
        return Spent(ok == 1, used)
