"""What the event log removes: calls that are too old, and those beyond its space.

Apps share the space evenly: the app with the most calls loses its oldest first, and so does the one with the most
bytes (store/README.md "Event log").
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

__all__ = ["Pruning"]

# The ids are a JSON array: one value for any number of them.
_REMOVE_BATCHES: Final = "DELETE FROM batches WHERE id IN (SELECT value FROM json_each(?))"
_REMOVE_MARKS: Final = "DELETE FROM marks WHERE batch_id IN (SELECT value FROM json_each(?))"
# The oldest batches of the apps in a JSON object of {app id: excess}, one of each app in turn. If the second value is
# 1, an app's next batch follows if it fits into what is left of the excess; if it is 0, as long as something is left.
# So what stays isn't read, and any number of apps is one statement.
_OLDEST: Final = (
    "WITH RECURSIVE oldest (app_id, id, calls, excess) AS (SELECT key, 0, 0, value FROM json_each(?) UNION ALL "
    "SELECT oldest.app_id, next.id, next.count, oldest.excess - next.count FROM oldest CROSS JOIN batches AS next "
    "ON next.id = (SELECT MIN(id) FROM batches WHERE app_id = oldest.app_id AND id > oldest.id) "
    "WHERE oldest.excess > ? * (next.count - 1) LIMIT ?) SELECT app_id, id, calls FROM oldest WHERE id > 0"
)
# Spans of the same apps, of before their oldest call that is left. The second value is the time if there is none.
_REMOVE_SPANS: Final = (
    "DELETE FROM spans WHERE id IN (SELECT spans.id FROM json_each(?) AS app CROSS JOIN spans "
    "ON spans.app_id = app.key AND time_ms < "
    "COALESCE((SELECT first_ms FROM batches WHERE app_id = app.key ORDER BY id LIMIT 1), ?))"
)
# SQLite would choose another index and read all of it.
_OUTDATED: Final = "SELECT app_id, id, count AS calls FROM batches INDEXED BY batches_by_time WHERE last_ms < ? LIMIT ?"
# Spans of the apps in a JSON array.
_REMOVE_OUTDATED_SPANS: Final = (
    "DELETE FROM spans WHERE id IN (SELECT spans.id FROM json_each(?) AS app CROSS JOIN spans "
    "ON spans.app_id = app.value AND time_ms < ?)"
)
# Above every id and time.
_MAX: Final = 1 << 62
# The file's size, whatever is published: bytes for each call that is kept, and at least. A traced call that reaches one
# channel has about 1 kB with its spans; one with many long names of channels has a hundred times as much.
_BYTES_PER_CALL: Final = 1_000
_MIN_BYTES: Final = 16_000_000
# What stays of a file that is too large, so that this isn't done at each pruning.
_KEPT_OF_BYTES: Final = 0.9
# How often all spans are read, to find old ones without a call.
_PRUNE_SPANS_EVERY_MS: Final = 86_400_000
# About what a span takes.
_SPAN_BYTES: Final = 300
# Batches that one transaction removes, and the apps that they are of; calls may be written in between.
_REMOVED_AT_A_TIME: Final = 500

_encode: Final = msgspec.json.Encoder().encode


class Pruning:
    """Removes from the batches and spans behind `engine`.

    `counts` has the calls in the file by app, and is kept right. `changing` is held by each transaction until it is.
    """

    def __init__(
        self, engine: AsyncEngine, counts: Counter[str], changing: asyncio.Lock, keep_calls: int, keep_s: float
    ) -> None:
        self._engine = engine
        self._counts = counts
        self._changing = changing
        self._keep_calls = keep_calls
        self._keep_ms = int(keep_s * 1000)
        self._keep_bytes = max(keep_calls * _BYTES_PER_CALL, _MIN_BYTES)
        self._spans_pruned_ms = 0

    async def prune(self, now_ms: int) -> int:
        """Removes what is too old, and what exceeds `keep_calls`, the latter from the apps with the most calls. Returns
        the number of removed calls. Its time depends on what it removes, not on what is stored, but for one pass a day
        and while the file is too large. Calls may be written meanwhile."""
        oldest_ms = now_ms - self._keep_ms
        if not 0 <= now_ms - self._spans_pruned_ms < _PRUNE_SPANS_EVERY_MS:
            # Those without a call here, such as the webhooks of a call that another node has. Others go with the calls
            # of their app.
            async with self._changing, self._engine.begin() as connection:
                await connection.exec_driver_sql("DELETE FROM spans WHERE time_ms < ?", (oldest_ms,))
            self._spans_pruned_ms = now_ms
        removed = await self._remove_outdated(oldest_ms)
        share = _share(self._counts, self._keep_calls)
        removed += await self._remove(
            {app_id: count - share for app_id, count in self._counts.items() if count > share}
        )
        return removed + await self._shrink()

    async def _shrink(self) -> int:
        """Removes calls and their spans until the file isn't too large, from the apps that take the most of it. Returns
        the number of calls."""
        removed = 0
        while (used := await self._used_bytes()) > self._keep_bytes:
            sizes = await self._sizes()
            # Indexes and pages that aren't full are in proportion.
            share = _share(sizes, int(sum(sizes.values()) * self._keep_bytes / used * _KEPT_OF_BYTES))
            large = {app_id: size for app_id, size in sizes.items() if size > share}
            if not large:
                break
            # Calls are about equal in size. If the oldest are smaller, the next pass removes more.
            excess = {app_id: math.ceil(self._counts[app_id] * (1 - share / size)) for app_id, size in large.items()}
            removed += await self._remove(excess, at_least=True)
        return removed

    async def _used_bytes(self) -> int:
        """What the file has, but for free pages, which it uses again."""
        async with self._engine.connect() as connection:
            pages, free, page_bytes = [
                int((await connection.exec_driver_sql(f"PRAGMA {name}")).scalar_one())
                for name in ("page_count", "freelist_count", "page_size")
            ]
        return (pages - free) * page_bytes

    async def _sizes(self) -> Counter[str]:
        """About how many bytes each app's calls and spans take."""
        sizes: Counter[str] = Counter()
        async with self._engine.connect() as connection:
            for text in (
                # Reads each batch once, in the order of the file, and not what it has beyond its first page.
                "SELECT app_id, SUM(length(calls)) AS bytes FROM batches NOT INDEXED GROUP BY app_id",
                f"SELECT app_id, COUNT(*) * {_SPAN_BYTES} AS bytes FROM spans GROUP BY app_id",
            ):
                for row in await connection.exec_driver_sql(text):
                    sizes[row.app_id] += row.bytes
        return sizes

    async def _remove_outdated(self, oldest_ms: int) -> int:
        """Removes the batches of before `oldest_ms` and the spans of their apps. Returns the number of calls. Where a
        clock was set back and forth, such batches are among the others."""
        removed = 0
        while True:
            async with self._changing:
                async with self._engine.begin() as connection:
                    values = (oldest_ms, _REMOVED_AT_A_TIME)
                    batches = (await connection.exec_driver_sql(_OUTDATED, values)).all()
                    await _delete(connection, batches)
                    apps = _encode({batch.app_id for batch in batches}).decode()
                    await connection.exec_driver_sql(_REMOVE_OUTDATED_SPANS, (apps, oldest_ms))
                removed += self._subtract(batches)
            if len(batches) < _REMOVED_AT_A_TIME:
                return removed

    async def _remove(self, excess: Mapping[str, int], *, at_least: bool = False) -> int:
        """Removes each app's oldest batches, at most as many calls as `excess` says, or at least, and their spans.
        Returns the number of calls."""
        removed = 0
        apps = list(excess.items())
        for start in range(0, len(apps), _REMOVED_AT_A_TIME):
            left = Counter(dict(apps[start : start + _REMOVED_AT_A_TIME]))
            batches: Sequence[Any] | None = None
            while batches is None or len(batches) >= _REMOVED_AT_A_TIME:
                text = _encode(left).decode()
                async with self._changing:
                    async with self._engine.begin() as connection:
                        # The limit counts the rows with which the apps begin.
                        values = (text, int(not at_least), len(left) + _REMOVED_AT_A_TIME)
                        batches = (await connection.exec_driver_sql(_OLDEST, values)).all()
                        await _delete(connection, batches)
                        await connection.exec_driver_sql(_REMOVE_SPANS, (text, _MAX))
                    removed += self._subtract(batches)
                for batch in batches:
                    left[batch.app_id] -= batch.calls
        return removed

    def _subtract(self, batches: Sequence[Any]) -> int:
        """Returns the number of calls in these batches, which aren't in the file any more."""
        calls = 0
        for batch in batches:
            calls += batch.calls
            self._counts[batch.app_id] -= batch.calls
            if self._counts[batch.app_id] <= 0:
                del self._counts[batch.app_id]
        return calls


def _share(counts: Mapping[str, int], keep: int) -> int:
    """The greatest number of calls that every app may keep so that all together have at most `keep`."""
    left, apps = keep, len(counts)
    for count in sorted(counts.values()):
        if count * apps > left:
            return left // apps
        left -= count
        apps -= 1
    return keep


async def _delete(connection: AsyncConnection, batches: Sequence[Any]) -> None:
    if batches:
        ids = _encode([batch.id for batch in batches]).decode()
        for text in (_REMOVE_BATCHES, _REMOVE_MARKS):
            await connection.exec_driver_sql(text, (ids,))
