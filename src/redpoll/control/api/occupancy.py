"""Reads the occupancy of channels from Redis: subscriptions, users and cached events.

The API's GET endpoints, `info` and the dashboard use it. It only reads, pipelined on the control plane's one
connection; the workers' scripts write these keys (cluster/redis/README.md "Keys"). Long lists are read, sorted and
returned in slices of about a millisecond each, because the same loop publishes.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

import hiredis

from redpoll.cluster.bus import Cached, Unavailable, read_cached
from redpoll.cluster.redis.keys import COUNTS_SUM, SHARDS, Keys
from redpoll.cluster.redis.link import Link, LinkDown
from redpoll.cluster.redis.values import MemberEntry

__all__ = ["ChannelPage", "Occupancy", "TooManyChannels"]

# Names per SSCAN or HSCAN, and commands per write.
_SCAN_COUNT: Final = 500
_COMMANDS_PER_WRITE: Final = 100
# Shards of an app's channels that are scanned at the same time.
_SHARDS_AT_ONCE: Final = 4
# Names that are merged between two turns of the loop.
_SLICE: Final = 200
# A page ends early after this many names were read that don't have the prefix.
_MAX_READ_PER_PAGE: Final = 50_000


class TooManyChannels(Exception):
    """There are more channels than the caller takes."""


class ChannelPage(NamedTuple):
    """`names` in order of their shard, then by name. `after`: where the next page begins; None if there is none."""

    names: list[str]
    after: tuple[int, str] | None


class Occupancy:
    """Methods raise Unavailable if Redis answers with an error, or not within `answer_s` seconds per write."""

    def __init__(self, link: Link, keys: Keys, *, answer_s: float = 2.0) -> None:
        self._link = link
        self._keys = keys
        self._answer_s = answer_s

    async def subscription_counts(self, app_id: str, channels: Sequence[str]) -> list[int]:
        """The number of subscriptions of each channel, over all workers."""
        keys = [self._keys.counts(app_id, channel) for channel in channels]
        totals = await self._ask_all([(b"HGET", key, COUNTS_SUM) for key in keys])
        # Only channels of apps with subscription_count have their sum stored.
        lacking = [at for at, total in enumerate(totals) if total is None]
        per_worker = await self._ask_all([(b"HGETALL", keys[at]) for at in lacking])
        for at, counts in zip(lacking, per_worker, strict=True):
            # The sum may have been stored in between.
            totals[at] = sum(int(count) for name, count in counts.items() if name != COUNTS_SUM)
        return [int(total) for total in totals]

    async def user_counts(self, app_id: str, channels: Sequence[str]) -> list[int]:
        """The number of distinct users of each presence channel, over all workers."""
        members = self._keys.members
        return await self._ask_all([(b"HLEN", members(app_id, channel)) for channel in channels])

    async def user_ids(self, app_id: str, channel: str) -> AsyncIterator[list[str]]:
        """The ids of the users of a presence channel in slices, sorted."""
        runs: list[list[bytes]] = []
        cursor: Any = b"0"
        while True:
            command = (b"HSCAN", self._keys.members(app_id, channel), cursor, b"COUNT", _SCAN_COUNT)
            ((cursor, flat),) = await self._ask_all([command])
            runs.append(sorted(flat[::2]))
            if not int(cursor):
                break
        async for ids in _merged(runs):
            yield ids

    async def members(self, app_id: str, channel: str, limit: int = 500) -> list[tuple[str, bytes]]:
        """At most `limit` users of a presence channel with their user_info (JSON, or b""), sorted by id."""
        entries: dict[bytes, bytes] = {}
        cursor: Any = b"0"
        while len(entries) < limit:
            command = (b"HSCAN", self._keys.members(app_id, channel), cursor, b"COUNT", _SCAN_COUNT)
            ((cursor, flat),) = await self._ask_all([command])
            entries.update(zip(flat[::2], flat[1::2], strict=True))
            if not int(cursor):
                break
        return [(user.decode(), MemberEntry.parse(entry).info) for user, entry in sorted(entries.items())[:limit]]

    async def with_history(self, app_id: str, limit: int = 500) -> list[str]:
        """At most `limit` channels with stored messages, sorted by name."""
        runs = []
        for start in range(0, SHARDS, _SHARDS_AT_ONCE):
            shards = range(start, start + _SHARDS_AT_ONCE)
            commands = [(b"ZREVRANGE", self._keys.histories(shard, app_id), 0, limit - 1) for shard in shards]
            runs += [sorted(names) for names in await self._ask_all(commands)]
        return [name.decode() for name in islice(heapq.merge(*runs), limit)]

    async def cached(self, app_id: str, channel: str) -> Cached | None:
        """The event that new subscribers of a cache channel get; None if nothing is cached."""
        return await read_cached(self._link, self._keys, app_id, channel)

    async def channels(
        self, app_id: str, prefix: str, *, max_count: int | None = None, max_bytes: int | None = None
    ) -> AsyncIterator[list[str]]:
        """The occupied channels whose names begin with `prefix`, in slices, sorted by name.

        Raises TooManyChannels before the first slice if there are more than `max_count`, or their names are longer
        than `max_bytes`.
        """
        runs: list[list[bytes]] = []
        count = size = 0
        for start in range(0, SHARDS, _SHARDS_AT_ONCE):
            shards = range(start, start + _SHARDS_AT_ONCE)
            async for batch in self._scan(app_id, shards, prefix.encode()):
                for _, _, names in batch:
                    runs.append(names)
                    count += len(names)
                    size += sum(map(len, names))
                if (max_count is not None and count > max_count) or (max_bytes is not None and size > max_bytes):
                    raise TooManyChannels
        async for slice_of_names in _merged(runs):
            yield slice_of_names

    async def page(self, app_id: str, prefix: str, limit: int, after: tuple[int, str] | None = None) -> ChannelPage:
        """At most `limit` occupied channels whose names begin with `prefix`, beginning after a former page's `after`.

        Shards come one after another, each sorted by name. So each channel that stays occupied is in exactly one page,
        and a page costs about as much as the shards that it begins and ends in. A page may have fewer names than
        `limit` although more follow.
        """
        start, last = (0, b"") if after is None else (after[0], after[1].encode())
        names: list[str] = []
        names_read, at_once = 0, 1
        while start < SHARDS:
            shards = range(start, min(SHARDS, start + at_once))
            runs: dict[int, list[list[bytes]]] = {shard: [] for shard in shards}
            async for batch in self._scan(app_id, shards, prefix.encode()):
                for shard, read, matching in batch:
                    runs[shard].append([name for name in matching if name > last] if shard == start else matching)
                    names_read += read
            for shard in shards:
                async for slice_of_names in _merged(runs[shard]):
                    names += slice_of_names
                    if len(names) > limit:
                        return ChannelPage(names[:limit], (shard, names[limit - 1]))
                if len(names) == limit and shard + 1 < SHARDS:
                    return ChannelPage(names, (shard + 1, ""))
            start, last, at_once = shards.stop, b"", min(2 * at_once, _SHARDS_AT_ONCE)
            if names_read > _MAX_READ_PER_PAGE and start < SHARDS:
                return ChannelPage(names, (start, ""))
        return ChannelPage(names, None)

    async def _scan(
        self, app_id: str, shards: Iterable[int], wanted: bytes
    ) -> AsyncIterator[list[tuple[int, int, list[bytes]]]]:
        """The replies of Redis, some at a time: the shard, how many names were read, and the wanted ones, sorted."""
        cursors: dict[int, Any] = dict.fromkeys(shards, b"0")
        while cursors:
            replies = await self._ask_all(
                [
                    (b"SSCAN", self._keys.occupied(shard, app_id), cursor, b"COUNT", _SCAN_COUNT)
                    for shard, cursor in cursors.items()
                ]
            )
            batch = []
            for shard, (cursor, names) in zip(list(cursors), replies, strict=True):
                batch.append((shard, len(names), sorted(name for name in names if name.startswith(wanted))))
                if int(cursor):
                    cursors[shard] = cursor
                else:
                    del cursors[shard]
            yield batch

    async def _ask_all(self, commands: Iterable[tuple[Any, ...]]) -> list[Any]:
        commands = list(commands)
        answers: list[Any] = []
        try:
            for start in range(0, len(commands), _COMMANDS_PER_WRITE):
                batch = commands[start : start + _COMMANDS_PER_WRITE]
                if start:
                    # Otherwise the next write would go out in the pass that reads the answers to the last one.
                    await asyncio.sleep(0)
                async with asyncio.timeout(self._answer_s):
                    answers += await self._link.ask_all(batch)
        except (LinkDown, hiredis.ReplyError) as error:
            raise Unavailable(str(error)) from error
        except TimeoutError:
            raise Unavailable(f"no answer from Redis within {self._answer_s:g} s") from None
        return answers


async def _merged(runs: Sequence[list[bytes]]) -> AsyncIterator[list[str]]:
    """The names of sorted runs in slices, sorted, each once: SCAN may return a name twice."""
    merged = heapq.merge(*runs) if len(runs) > 1 else iter(runs[0] if runs else ())
    last = b""
    while names := list(islice(merged, _SLICE)):
        yield [name.decode() for name, before in zip(names, [last, *names], strict=False) if name != before]
        last = names[-1]
        await asyncio.sleep(0)
