"""What webhooks are to be told of: the rows that `hold`, `publish` and `drain` write in Redis, fetched and let go.

A row is written in the same step as what it tells of, and stays until its reader has it in safety: `drain` brings the
same rows until they were `committed`. So a reader that dies loses none, and may get some twice; shard and stamp of a
row never repeat, and tell. There is one reader, and no consumer group: its 64 streams lie in as many slots (cluster.md
9). Knows nothing of endpoints.
"""

import asyncio
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import hiredis
import structlog

from redpoll.cluster.keys import SHARDS, Keys
from redpoll.cluster.link import Link
from redpoll.cluster.scripts import DRAIN

__all__ = ["Drained", "Outbox", "Transition"]

log = structlog.get_logger(__name__)

# Of one call: few of them from each of 64 shards, more where only some have any; leaves cost twice a row.
_LEAST_ROWS: Final = 15
_MOST_ROWS: Final = 250
_MOST_DUE: Final = 100
_MOST_BYTES: Final = 128 * 1024
# Of a drain, which is what its reader commits at a time.
_DRAIN_ROWS: Final = 1_000
_DRAIN_BYTES: Final = 8 * 1024 * 1024


class Transition(NamedTuple):
    """One row. `event` is channel.occupied, channel.vacated, member.added, member.removed, client_event, cache.miss or
    subscription.count. `user` on presence channels: who came, went or sent. `time_ms` is when it happened, of a leave
    that was held back too; Unix time. `stamp` grows per channel in the order of what happened, not contiguously.

    `detail` is JSON or b"": of occupied and subscription.count the number of subscriptions, of added the user_info, of
    client_event an object of `event`, `data` and `socket_id`. `trace` is the id of a client event's trace.
    """

    shard: int
    stamp: int
    event: str
    app_id: str
    channel: str
    user: str | None
    time_ms: int
    detail: bytes
    trace: str | None


class Drained(NamedTuple):
    """`rows` are in order of their stamps in each shard. `lost`: rows pushed out unread since the last drain, because
    20,000 others waited in their shard. `more`: others wait, so it is worth asking again at once."""

    rows: list[Transition]
    lost: int
    more: bool


class Outbox:
    """`debounce_s`: how long a leave is held back. As of the last drain, `waiting` is the number of rows not committed,
    `leaves` of those held back, and `oldest_ms` the time of the oldest row (Unix; None for no row). `lost` counts rows
    that nobody will be told of, `errors` shards that Redis couldn't drain and that are asked again with the next.
    """

    def __init__(self, link: Link, keys: Keys, debounce_s: float) -> None:
        self.waiting = 0
        self.leaves = 0
        self.oldest_ms: int | None = None
        self.lost = 0
        self.errors = 0
        self._link = link
        self._debounce_ms = round(debounce_s * 1000)
        self._keys = [(keys.clock(at), keys.outbox(at), keys.left(at)) for at in range(SHARDS)]
        # By shard, up to which stamp Redis may forget rows.
        self._committed: dict[int, int] = {}

    async def drain(self) -> Drained:
        """The oldest rows of every shard, at most about 1,000 or 8 MiB of them; the same again until `committed`.

        Raises LinkDown when Redis went away, and hiredis.ReplyError when it can't do it in any shard."""
        rows: list[Transition] = []
        size = lost = waiting = leaves = 0
        oldest: list[int] = []
        # Shards to ask, and behind which stamp to read; by shard, how many rows it had at first and how many of them
        # have been read.
        asked: dict[int, int | None] = dict.fromkeys(range(SHARDS))
        read = [0] * SHARDS
        while asked:
            count = min(max(_DRAIN_ROWS // len(asked), _LEAST_ROWS), _MOST_ROWS)
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
                if page and (read[at] < present or made == _MOST_DUE):
                    full[at] = rows[-1].stamp
            asked = full
            if len(rows) >= _DRAIN_ROWS or size >= _DRAIN_BYTES:
                break
        self.waiting, self.leaves = waiting, leaves
        self.oldest_ms = min(oldest) // 1000 if oldest else None
        if lost:
            self.lost += lost
            log.error("rows for webhooks lost, too many were waiting", rows=lost)
        return Drained(rows, lost, bool(asked))

    def committed(self, rows: Iterable[Transition]) -> None:
        """These rows, all that a drain brought, are in safety: with the next drain Redis forgets them."""
        for row in rows:
            self._committed[row.shard] = max(row.stamp, self._committed.get(row.shard, 0))

    async def _ask(self, asked: dict[int, int | None], count: int) -> dict[int, list[Any]]:
        # One pipeline. A shard that fails holds up no other.
        safe = {at: self._committed.get(at) for at in asked}
        answers = await asyncio.gather(
            *(
                self._link.execute(
                    DRAIN,
                    self._keys[at],
                    (_or_none(safe[at]), self._debounce_ms, _MOST_DUE, count, _MOST_BYTES, _or_none(after)),
                )
                for at, after in asked.items()
            ),
            return_exceptions=True,
        )
        replies: dict[int, list[Any]] = {}
        for at, answer in zip(asked, answers, strict=True):
            if isinstance(answer, hiredis.ReplyError):
                self.errors += 1
                log.warning("could not drain", shard=at, reason=str(answer))
            elif isinstance(answer, BaseException):
                raise answer
            else:
                replies[at] = answer
                if safe[at] is not None and safe[at] == self._committed.get(at):
                    del self._committed[at]
        if not replies:
            raise answers[0]
        return replies


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
