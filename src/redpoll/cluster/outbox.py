"""Reads the webhook rows that `hold`, `publish` and `take` write in Redis, and deletes those that are stored.

A row is written in the same step as the change that it reports. `take` returns the same rows again until they are
reported as `committed`. So a reader that dies loses none and may get some twice; (shard, stamp) is unique, so readers
can deduplicate. There is one reader. It uses no consumer group, because the 64 streams are in as many slots of a Redis
Cluster. This module doesn't know endpoints (cluster/README.md "Webhook rows").
"""

import asyncio
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from typing import Any, Final, NamedTuple

import hiredis
import structlog

from redpoll.cluster.redis.keys import SHARDS, Keys
from redpoll.cluster.redis.link import Link, LinkDown
from redpoll.cluster.redis.scripts import OUTBOX_TAKE, RESTATE
from redpoll.cluster.transition import Transition

__all__ = ["Outbox", "Subject", "Taken"]

log = structlog.get_logger(__name__)

# Bounds of one call: few rows from each of 64 shards, more when fewer shards are asked. A leave costs as much as two
# rows.
_MIN_ROWS: Final = 15
_MAX_ROWS: Final = 250
_MAX_DUE: Final = 100
_MAX_BYTES: Final = 128 * 1024
# Bounds of one `take`, which its reader has in memory.
_MAX_DRAIN_ROWS: Final = 1_000
_MAX_DRAIN_BYTES: Final = 8 * 1024 * 1024


class Subject(NamedTuple):
    """What rows are about: a channel, or with `user` a member of a presence channel."""

    app_id: str
    channel: str
    user: str | None


class Taken(NamedTuple):
    """`rows` are in the order of their stamps in each shard. `lost`: rows that Redis removed unread since the last
    `take`, because 20,000 others were in their shard. `more`: there are others, so take again at once."""

    rows: list[Transition]
    lost: int
    more: bool


class Outbox:
    """`debounce_s`: how long a leave is held back. As of the last `take`, `waiting` is the number of rows that are not
    committed, `leaves` the number of leaves held back, and `oldest_ms` the time of the oldest row (Unix; None without
    rows). `lost` counts rows that were lost; `errors` counts failures of single shards, which the next `take` repeats.
    """

    def __init__(self, link: Link, keys: Keys, debounce_s: float) -> None:
        self.waiting = 0
        self.leaves = 0
        self.oldest_ms: int | None = None
        self.lost = 0
        self.errors = 0
        self.debounce_s = debounce_s
        self._link = link
        self._all_keys = keys
        self._debounce_ms = round(debounce_s * 1000)
        self._keys = [(keys.clock(at), keys.outbox(at), keys.left(at)) for at in range(SHARDS)]
        # By shard, the stamp up to which Redis may delete rows, as of one connection. The next one may lead to a master
        # that lost them and whose clock is behind: its rows with smaller stamps are new.
        self._committed: dict[int, int] = {}
        self._connected = link.connects
        # By shard, why Redis refused to read it, of those that it refused last.
        self._refused: dict[int, str] = {}

    async def take(self) -> Taken:
        """The oldest rows of all shards, at most about 1,000 or 8 MiB; the same ones again until they are `committed`.

        Raises LinkDown or hiredis.ReplyError when every shard fails. Without a Cluster, all fail when the connection
        breaks."""
        rows: list[Transition] = []
        size = lost = waiting = leaves = 0
        oldest: list[int] = []
        # The shards to ask with the stamp after which to read, and how many rows of each shard have been read.
        asked: dict[int, int | None] = dict.fromkeys(range(SHARDS))
        read = [0] * SHARDS
        while asked:
            count = min(max(_MAX_DRAIN_ROWS // len(asked), _MIN_ROWS), _MAX_ROWS)
            replies = await self._ask(asked, count)
            full: dict[int, int | None] = {}
            for at, (page, present, left, made, gone) in replies.items():
                if asked[at] is None:
                    waiting += present
                    leaves += left
                    oldest += [_stamp(page[0][0])] if page else []
                lost += gone
                read[at] += len(page)
                for row_id, fields in page:
                    rows.append(_transition(at, _stamp(row_id), fields))
                    size += sum(map(len, fields))
                if page and (read[at] < present or made == _MAX_DUE):
                    full[at] = rows[-1].stamp
            asked = full
            # After a reconnect, rows with smaller stamps than those read before may be new (see `_committed`).
            reconnected = self._connected != self._link.connects
            if reconnected or len(rows) >= _MAX_DRAIN_ROWS or size >= _MAX_DRAIN_BYTES:
                break
        self.waiting, self.leaves = waiting, leaves
        self.oldest_ms = min(oldest) // 1000 if oldest else None
        if lost:
            self.lost += lost
            log.error("webhook rows lost", rows=lost, reason="too many were unread")
        return Taken(rows, lost, bool(asked))

    def committed(self, rows: Iterable[Transition]) -> None:
        """These rows are stored, with all that `take` returned before them. The next `take` deletes them in Redis,
        unless it was reconnected meanwhile: then it returns them again."""
        for row in rows:
            self._committed[row.shard] = max(row.stamp, self._committed.get(row.shard, 0))

    @property
    def connects(self) -> int:
        """How often Redis was connected. After each time it may lack writes whose rows were committed."""
        return self._link.connects

    async def present(self, subjects: Sequence[Subject]) -> list[bool]:
        """Whether each channel is occupied, or user is a member. Raises LinkDown or hiredis.ReplyError."""
        keys = self._all_keys
        commands: list[tuple[bytes | str, ...]] = []
        for app_id, channel, user in subjects:
            if user is None:
                commands.append((b"EXISTS", keys.counts(app_id, channel)))
            else:
                commands.append((b"HEXISTS", keys.members(app_id, channel), user))
        return [bool(reply) for reply in await self._link.ask_all(commands)]

    async def restate(self, subjects: Iterable[Subject]) -> int:
        """Writes rows with the present state of each, and returns how many: none for leaves that are held back, which
        become rows by themselves. Raises LinkDown or hiredis.ReplyError."""
        keys = self._all_keys
        written = 0
        for app_id, channel, user in subjects:
            at = keys.shard(app_id, channel)
            names = (*self._keys[at], keys.counts(app_id, channel), keys.members(app_id, channel))
            subject = (app_id, channel) if user is None else (app_id, channel, user)
            written += await self._link.execute(RESTATE, names, subject)
        return written

    async def _ask(self, asked: dict[int, int | None], count: int) -> dict[int, list[Any]]:
        if self._connected != self._link.connects:
            self._connected = self._link.connects
            self._committed.clear()
        # One pipeline. A failing shard delays no other.
        committed = {at: self._committed.get(at) for at in asked}
        answers = await asyncio.gather(
            *(
                self._link.execute(
                    OUTBOX_TAKE,
                    self._keys[at],
                    (_or_none(committed[at]), self._debounce_ms, _MAX_DUE, count, _MAX_BYTES, _or_none(after)),
                )
                for at, after in asked.items()
            ),
            return_exceptions=True,
        )
        replies: dict[int, list[Any]] = {}
        refused: dict[int, str] = {}
        for at, answer in zip(asked, answers, strict=True):
            if isinstance(answer, hiredis.ReplyError):
                self.errors += 1
                refused[at] = str(answer)
            elif isinstance(answer, LinkDown):
                # In a Cluster, other masters may have answered. The link logs it.
                self.errors += 1
            elif isinstance(answer, BaseException):
                raise answer
            else:
                replies[at] = answer
                if committed[at] is not None and committed[at] == self._committed.get(at):
                    del self._committed[at]
        self._note_refused(refused, replies)
        if not replies:
            raise answers[0]
        return replies

    def _note_refused(self, refused: dict[int, str], read: Container[int]) -> None:
        """Logs what changed, because Redis may refuse all shards for hours, many times a second."""
        before = self._refused
        self._refused = {at: reason for at, reason in before.items() if at not in read} | refused
        new = Counter(reason for at, reason in refused.items() if before.get(at) != reason)
        for reason, shards in new.items():
            log.warning("outbox not read", shards=shards, reason=reason)
        if before and not self._refused:
            log.info("outbox read again")


def _or_none(stamp: int | None) -> int | str:
    return "" if stamp is None else stamp


def _stamp(row_id: bytes) -> int:
    return int(row_id.partition(b"-")[0])


def _transition(at: int, stamp: int, fields: list[bytes]) -> Transition:
    row = dict(zip(fields[::2], fields[1::2], strict=True))
    user, trace = row.get(b"u"), row.get(b"i")
    return Transition(
        at,
        stamp,
        row[b"k"].decode(),
        row[b"a"].decode(),
        row[b"c"].decode(),
        None if user is None else user.decode(),
        int(row[b"t"]),
        row.get(b"x", b""),
        None if trace is None else trace.decode(),
    )
