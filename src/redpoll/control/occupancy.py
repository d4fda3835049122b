"""Reads the occupancy of channels from Redis: subscriptions, users and cached events.

The API's GET endpoints, `info` and the dashboard use it. It only reads, pipelined on the control plane's one
connection; the workers' scripts write these keys (cluster/README.md "Keys").
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Final

import hiredis

from redpoll.cluster.bus import Cached, Unavailable, read_cached
from redpoll.cluster.keys import SHARDS, Keys
from redpoll.cluster.link import Link, LinkDown

__all__ = ["Occupancy"]

# Names per SSCAN, and commands per write: long lists must not delay publishes.
_SCAN_COUNT: Final = 500
_COMMANDS_PER_WRITE: Final = 500


class Occupancy:
    """Methods raise Unavailable if Redis answers with an error, or not within `answer_s` seconds per write."""

    def __init__(self, link: Link, keys: Keys, *, answer_s: float = 2.0) -> None:
        self._link = link
        self._keys = keys
        self._answer_s = answer_s

    async def subscription_counts(self, app_id: str, channels: Sequence[str]) -> list[int]:
        """The number of subscriptions of each channel, over all workers."""
        counts = self._keys.counts
        per_worker = await self._ask_all([(b"HVALS", counts(app_id, channel)) for channel in channels])
        return [sum(map(int, values)) for values in per_worker]

    async def user_counts(self, app_id: str, channels: Sequence[str]) -> list[int]:
        """The number of distinct users of each presence channel, over all workers."""
        members = self._keys.members
        return await self._ask_all([(b"HLEN", members(app_id, channel)) for channel in channels])

    async def user_ids(self, app_id: str, channel: str) -> list[str]:
        """The ids of the users of a presence channel, sorted."""
        (users,) = await self._ask_all([(b"HKEYS", self._keys.members(app_id, channel))])
        return sorted(user.decode() for user in users)

    async def members(self, app_id: str, channel: str, limit: int = 500) -> list[tuple[str, bytes]]:
        """At most `most` users of a presence channel with their user_info (JSON, or b""), sorted by id."""
        found: dict[bytes, bytes] = {}
        cursor: Any = b"0"
        while len(found) < limit:
            command = (b"HSCAN", self._keys.members(app_id, channel), cursor, b"COUNT", _SCAN_COUNT)
            ((cursor, flat),) = await self._ask_all([command])
            found.update(zip(flat[::2], flat[1::2], strict=True))
            if not int(cursor):
                break
        # A value is `WORKER WORKER…\n<user_info>` (cluster/README.md "Keys").
        return [(user.decode(), value.partition(b"\n")[2]) for user, value in sorted(found.items())[:limit]]

    async def with_history(self, app_id: str, limit: int = 500) -> list[str]:
        """At most `most` channels with stored messages, sorted by name."""
        commands = [(b"ZREVRANGE", self._keys.histories(shard, app_id), 0, limit - 1) for shard in range(SHARDS)]
        names = {name.decode() for found in await self._ask_all(commands) for name in found}
        return sorted(names)[:limit]

    async def cached(self, app_id: str, channel: str) -> Cached | None:
        """The event that new subscribers of a cache channel get; None if nothing is cached."""
        return await read_cached(self._link, self._keys, app_id, channel)

    async def channels(self, app_id: str, prefix: str) -> list[str]:
        """The occupied channels whose names begin with `prefix`, sorted by name."""
        wanted = prefix.encode()
        found: set[bytes] = set()
        cursors: dict[int, Any] = dict.fromkeys(range(SHARDS), b"0")
        while cursors:
            pages = await self._ask_all(
                [
                    (b"SSCAN", self._keys.occupied(shard, app_id), cursor, b"COUNT", _SCAN_COUNT)
                    for shard, cursor in cursors.items()
                ]
            )
            for shard, (cursor, names) in zip(list(cursors), pages, strict=True):
                found.update(name for name in names if name.startswith(wanted))
                if int(cursor):
                    cursors[shard] = cursor
                else:
                    del cursors[shard]
        return sorted(name.decode() for name in found)

    async def _ask_all(self, commands: Iterable[tuple[Any, ...]]) -> list[Any]:
        commands = list(commands)
        answers: list[Any] = []
        try:
            for start in range(0, len(commands), _COMMANDS_PER_WRITE):
                batch = commands[start : start + _COMMANDS_PER_WRITE]
                async with asyncio.timeout(self._answer_s):
                    answers += await asyncio.gather(*(self._link.ask(*command) for command in batch))
        except (LinkDown, hiredis.ReplyError) as error:
            raise Unavailable(str(error)) from error
        except TimeoutError:
            raise Unavailable(f"no answer from Redis within {self._answer_s:g} s") from None
        return answers
