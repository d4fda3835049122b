"""The revocations of grants in Redis: a stream that every worker and control plane follows.

A beat brings the id of the last entry (beat.lua), so a process that missed a message on `sys` reads what follows within
a second. Each process keeps what it has read until the grants have expired, so any control plane fills a Redis that
starts empty (cluster/README.md "Revoked grants").
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

import hiredis
import structlog

from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link, LinkDown
from redpoll.cluster.redis.scripts import WRITE
from redpoll.protocol.grants import MAX_LIFETIME_S, RevokedGrants

__all__ = ["RevokedInRedis"]

log = structlog.get_logger(__name__)

# Revocations of one entry. The script of a beat reads the last entry, so it is small.
_PAIRS_PER_ENTRY: Final = 50
_ENTRIES_PER_READ: Final = 100
# An entry leaves the stream an hour after the last grant that it is about.
_KEPT_MS: Final = (MAX_LIFETIME_S + 3_600) * 1_000
# The stream is written again without repetitions when it has this many entries more than the table needs.
_MAX_SPARE_ENTRIES: Final = 2_000
_START: Final = (0, 0)


class RevokedInRedis:
    """One process's copy of the stream is `table`. `was_read`: it has had all that Redis had, once.

    `on_news(app_ids)` is called when others' revocations were read. Methods but `check` raise LinkDown or
    hiredis.ReplyError.
    """

    def __init__(self, link: Link, keys: Keys, table: RevokedGrants, on_news: Callable[[set[str]], None]) -> None:
        self.table = table
        self.was_read = False
        self._link = link
        self._keys = keys
        self._on_news = on_news
        self._last = _START
        # Entries that this process has added since the stream was shortened.
        self._added = 0
        self._reading: asyncio.Task[None] | None = None

    def check(self, last: bytes | None) -> None:
        """Takes the id of the stream's last entry, which a beat brought; None: it is empty."""
        if last is None:
            self.was_read = True
        elif _id(last) != self._last and (self._reading is None or self._reading.done()):
            self._reading = asyncio.get_running_loop().create_task(self._follow(), name="revoked grants")

    def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()

    async def _follow(self) -> None:
        try:
            await self.read()
        except (LinkDown, hiredis.ReplyError) as error:
            # The next beat asks again.
            log.warning("revoked grants not read", reason=str(error))

    async def read(self) -> dict[tuple[str, str], int]:
        """Reads what follows the last entry read; all, if Redis has lost entries. Returns the app ids and subjects that
        were read, with the latest time of each."""
        newest = await self._link.ask(b"XREVRANGE", self._keys.revoked_grants, b"+", b"-", b"COUNT", 1)
        if not newest or _id(newest[0][0]) < self._last:
            self._last = _START
        revoked: dict[tuple[str, str], int] = {}
        news: set[str] = set()
        while True:
            first = b"(%d-%d" % self._last if self._last != _START else b"-"
            entries = await self._link.ask(
                b"XRANGE", self._keys.revoked_grants, first, b"+", b"COUNT", _ENTRIES_PER_READ
            )
            for entry_id, fields in entries:
                for app_id, subject, at_s in _revocations(fields):
                    revoked[app_id, subject] = max(at_s, revoked.get((app_id, subject), at_s))
                    if self.table.put(app_id, subject, at_s):
                        news.add(app_id)
                self._last = _id(entry_id)
            if len(entries) < _ENTRIES_PER_READ:
                break
        self.was_read = True
        if news:
            self._on_news(news)
        return revoked

    async def add(self, revoked: Iterable[tuple[str, str, int]]) -> int:
        """Writes revocations: app id, subject, Unix seconds. Returns the number of entries."""
        pairs = [(f"{app_id} {subject}", at_s) for app_id, subject, at_s in revoked]
        entries = -(-len(pairs) // _PAIRS_PER_ENTRY)
        self._added += entries
        oldest = int(self.table.clock() * 1_000) - _KEPT_MS
        key, terms = self._keys.revoked_grants, (b"XADD", b"MINID", b"~", oldest, b"*")
        parts = (pairs[at : at + _PAIRS_PER_ENTRY] for at in range(0, len(pairs), _PAIRS_PER_ENTRY))
        await asyncio.gather(*(self._link.execute(WRITE, (key,), (*terms, *_flat(part))) for part in parts))
        return entries

    async def fill(self) -> None:
        """After a connection to Redis: reads what others have written, writes what is missing there, and shortens a
        stream with many repetitions."""
        # From the start: Redis may have lost what was read before.
        self._last = _START
        stored = await self.read()
        # Redis may have an earlier revocation of a user, whose later grants would still count.
        missing = [one for one in self.table if stored.get(one[:2], -1) < one[2]]
        if missing:
            await self.add(missing)
        await self.shorten()

    @property
    def is_long(self) -> bool:
        """Whether `fill` may find a stream to shorten: this process has written many entries."""
        return self._added > _MAX_SPARE_ENTRIES

    async def shorten(self) -> None:
        """Writes a stream with many repetitions again."""
        counted = self._added
        needed = len(self.table) // _PAIRS_PER_ENTRY + 1
        length = await self._link.ask(b"XLEN", self._keys.revoked_grants)
        if length <= needed + _MAX_SPARE_ENTRIES:
            self._added += max(0, length - needed) - counted
            return
        await self.read()
        # What another control plane adds from here on has a greater id, and stays.
        last = self._last
        written = await self.add(self.table)
        # Those that were added meanwhile stay counted.
        self._added -= counted + written
        await self._link.ask(b"XTRIM", self._keys.revoked_grants, b"MINID", b"%d-%d" % (last[0], last[1] + 1))


def _id(text: Any) -> tuple[int, int]:
    milliseconds, _, number = bytes(text).partition(b"-")
    return int(milliseconds), int(number)


def _flat(pairs: Collection[tuple[str, int]]) -> list[str | int]:
    return [part for pair in pairs for part in pair]


def _revocations(fields: Any) -> Iterable[tuple[str, str, int]]:
    flat = [part for pair in fields for part in pair] if fields and isinstance(fields[0], list) else fields
    for field, value in zip(flat[::2], flat[1::2], strict=True):
        app_id, _, subject = bytes(field).decode().partition(" ")
        yield app_id, subject, int(value)
