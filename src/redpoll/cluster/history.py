"""Reads a channel's history in pages, finds where its last messages begin, and clears it.

The bus stores messages in the same step as it publishes them. Reading goes page by page, so that a long history delays
neither Redis nor other users of the connection.

An offset is the stamp of a message: the Redis time in µs, growing per channel, with gaps. `prev` is the offset of the
message before it. The epoch changes when history was lost or cleared (cluster/README.md "History").
"""

import asyncio
import secrets
from array import array
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

from redpoll import _frame
from redpoll.cluster.bus import ask_within
from redpoll.cluster.envelopes import event_of_tail
from redpoll.cluster.redis.keys import Keys, cap_of_shard
from redpoll.cluster.redis.link import Done, Link
from redpoll.cluster.redis.scripts import BEGIN, CLEAR, HISTORY, LOCATE, Script
from redpoll.protocol.apps import App, HistoryRule
from redpoll.protocol.history import check_position

__all__ = [
    "MAX_DELIVERED",
    "MAX_PAGE_ROWS",
    "History",
    "HistoryPosition",
    "Page",
    "Row",
]

# Bounds of a page, which Redis reads in one step. A single message may have more bytes.
MAX_PAGE_ROWS: Final = 64
MAX_PAGE_BYTES: Final = 128 * 1024
# Bound one call of the script locate: Redis copies the messages that it counts.
_MAX_LOCATED: Final = 256
_MAX_LOCATED_BYTES: Final = 128 * 1024
# Greater than any offset. Numbers up to it are exact in Lua; clients may send any.
_MAX_OFFSET: Final = 2**53
# Pages awaited at a time. Together with rosters and cached events (membership/sync.py) they stay below the bytes that
# Redis lets a subscribed connection leave unread, and the next event waits for few of them.
_MAX_PAGES: Final = 16


# How long a history without a message outlives its last reader, as in hold.lua its last subscriber.
EMPTY_HISTORY_S: Final = 300

# Offsets that a position remembers, of 8 bytes each.
MAX_DELIVERED: Final = 256


class Row(NamedTuple):
    """A stored message. `prev` is the offset of the message before it; the first message of an epoch has one that
    belongs to no message. `tail` is the envelope from the skipped socket on (envelopes.py)."""

    offset: int
    prev: int
    tail: bytes

    @property
    def time_ms(self) -> int:
        """When it was published, by Redis' clock; Unix time."""
        return self.offset // 1000

    @property
    def event(self) -> str:
        return self._parts()[6].decode()

    @property
    def data(self) -> str:
        return self._parts()[7].decode()

    @property
    def user(self) -> str | None:
        """The sender of a client event on a presence channel."""
        user = self._parts()[5]
        return user.decode() if user is not None else None

    @property
    def skip(self) -> str | None:
        """The socket that didn't get it when it was published."""
        skip = self.tail.partition(b" ")[0]
        return None if skip == b"-" else skip.decode()

    def envelope(self, skip: bool = True) -> bytes:
        """The EVENT envelope in which it was published; without `skip`, every socket gets it."""
        return event_of_tail(self.offset, self.prev, self.tail, skip=skip)

    def _parts(self) -> tuple[int, int, int, int, bytes | None, bytes | None, bytes, bytes]:
        return _frame.envelope(self.envelope())


class Page(NamedTuple):
    """Messages, oldest first. `epoch` and `top` (the last offset) are those of the moment of reading; "" and 0 if
    nothing was ever stored. `more`: the limits on messages or bytes left out others in the requested range. `base` is
    the offset before the first message of the epoch, 0 if it isn't known: older rows are of earlier epochs. `ended`: an
    event ended the channel."""

    epoch: str
    top: int
    rows: list[Row]
    more: bool
    base: int = 0
    ended: bool = False

    def follows(self, epoch: str, since: int) -> bool:
        """Whether this page, read from `since` on, continues there without a gap."""
        return epoch == self.epoch and since == (self.rows[0].prev if self.rows else self.top)

    def check(self, epoch: str, offset: int = 0) -> None:
        """Raises UnknownEpoch or InvalidOffset if `epoch` and `offset` are no position in this history."""
        check_position(self.epoch, self.top, epoch, offset)


def _clamped(offset: int) -> int:
    return max(0, min(offset, _MAX_OFFSET))


class HistoryPosition:
    """How far this worker has delivered a channel's history: `last` is the offset of the last delivered message (0 for
    none) in `epoch`. `live`: the next push follows `last`. Otherwise the channel catches up (catchup.py). `delivered`
    are `last` and the offsets before it, at least the newest MAX_DELIVERED of them."""

    __slots__ = ("delivered", "epoch", "last", "live")

    def __init__(self, epoch: str, last: int, live: bool) -> None:
        self.live = live
        self.begin(epoch, last)

    def begin(self, epoch: str, last: int) -> None:
        """The next message follows `last`; what was delivered before it is in no relation to it."""
        self.epoch = epoch
        self.last = last
        self.delivered = array("q", (last,))

    def advance(self, offset: int) -> None:
        """This message is delivered now."""
        self.last = offset
        self.delivered.append(offset)
        if len(self.delivered) > 2 * MAX_DELIVERED:
            del self.delivered[:MAX_DELIVERED]


class History:
    """Reads over a link. A worker reads on the same connection that brings its events, so the position of a page among
    the events says which of them it contains."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self.pages = 0
        self._link = link
        self._keys = keys
        self._awaited = 0
        self._waiting: deque[Callable[[], None]] = deque()

    def page(self, app_id: str, channel: str, since: int, count: int, done: Done) -> None:
        """The oldest messages after the offset `since`, at most `count` (≤ 64) of them and about 128 KiB. `done` gets
        a Page, a hiredis.ReplyError or a LinkDown, never from within this call. At most 16 pages are awaited at a time;
        the others wait."""
        names = self._names(app_id, channel)
        args = (_clamped(since), "+", min(count, MAX_PAGE_ROWS), MAX_PAGE_BYTES, "first")
        self._run(HISTORY, names, args, partial(self._paged, done))

    def page_before(self, app_id: str, channel: str, before: int | None, done: Done) -> None:
        """As `page`: the newest messages before the offset `before`, or the newest of all."""
        high = self._upper(before, None)
        args = (0, high, MAX_PAGE_ROWS, MAX_PAGE_BYTES, "last")
        self._run(HISTORY, self._names(app_id, channel), args, partial(self._paged, done))

    def begin(self, app: App, channel: str, rule: HistoryRule, done: Done) -> None:
        """The position of a channel with this rule. Begins its history if there is none; that lives 5 min if no client
        asks again and nothing is published. `done` gets `(epoch, last offset)`, None if the app has as many channels
        with history as it may, or an error as in `page`, never from within this call."""
        keys, app_id = self._keys, app.id
        at = keys.shard(app_id, channel)
        names = [keys.history_meta(app_id, channel), keys.histories(at, app_id), keys.clock(at)]
        cap = cap_of_shard(app.max_history_channels)
        args = (secrets.token_hex(8), rule.era, channel, cap, EMPTY_HISTORY_S)
        self._run(BEGIN, names, args, partial(self._begun, done))

    def locate(
        self, app_id: str, channel: str, done: Done, *, count: int = 0, seconds: float = 0, after_ms: float = 0
    ) -> None:
        """The offset after which the last `count` messages begin, or those of the last `seconds` by Redis' clock, or
        those later than `after_ms` (Unix time); give one of the three. Only stored messages count. `done` gets the
        offset, or an error as in `page`, never from within this call."""
        names = self._names(app_id, channel)
        if count > 0:
            self._step_back(names, "+", count, done)
        elif after_ms:
            asyncio.get_running_loop().call_soon(done, int(after_ms * 1000))
        else:
            self._run(LOCATE, names, ("+", 0, f"{seconds:.6f}", 0), partial(self._located, done))

    async def read(
        self,
        app_id: str,
        channel: str,
        *,
        limit: int,
        before: int | None = None,
        since: int | None = None,
        until: int | None = None,
        epoch: str | None = None,
        newest: bool | None = None,
        max_bytes: int = 16 * 1024 * 1024,
    ) -> Page:
        """At most `limit` messages and about `max_bytes`, read in pages: those after the offset `since`, before
        `before` and up to `until`. If there are more, the oldest are returned when `since` is given, else the newest;
        `newest` overrides this.

        With `epoch`: raises UnknownEpoch if it isn't the channel's, InvalidOffset if `since` or `before` is beyond the
        last offset. Raises Unavailable. If the history is cleared meanwhile, the reading starts again.
        """
        last = newest if newest is not None else since is None
        low, high = _clamped(since or 0), self._upper(before, until)
        rows: list[Row] = []
        left = max_bytes
        read_epoch: str | None = None
        while True:
            count = min(limit - len(rows), MAX_PAGE_ROWS)
            page = await self._read(app_id, channel, low, high, count, left, last)
            if epoch is not None:
                page.check(epoch, max(since or 0, before or 0))
            if read_epoch not in (None, page.epoch):
                # The history was cleared between two pages.
                return await self.read(
                    app_id,
                    channel,
                    limit=limit,
                    before=before,
                    since=since,
                    until=until,
                    newest=newest,
                    max_bytes=max_bytes,
                )
            read_epoch = page.epoch
            rows = page.rows + rows if last else rows + page.rows
            # Fewer rows than asked for: the bytes of this page, or of the whole reading, are used up.
            full = len(page.rows) < count and left <= MAX_PAGE_BYTES
            left -= sum(len(row.tail) for row in page.rows)
            if not page.more or full or len(rows) >= limit or left <= 0:
                return page._replace(rows=rows)
            if last:
                high = str(page.rows[0].offset - 1)
            else:
                low = page.rows[-1].offset

    async def clear(self, app_id: str, channel: str) -> str | None:
        """Deletes the channel's messages and informs its subscribers. Returns the new epoch, None if the channel has no
        history. Raises Unavailable."""
        epoch, keys = secrets.token_hex(8), self._keys
        names = [*self._names(app_id, channel), keys.histories(keys.shard(app_id, channel), app_id)]
        args = (keys.publish, keys.topic(app_id, channel), epoch, channel)
        return epoch if await ask_within(self._link, lambda: self._link.execute(CLEAR, names, args)) else None

    def _names(self, app_id: str, channel: str) -> list[bytes]:
        return [self._keys.history(app_id, channel), self._keys.history_meta(app_id, channel)]

    @staticmethod
    def _upper(before: int | None, until: int | None) -> str:
        bounds = ([before - 1] if before is not None else []) + ([until] if until is not None else [])
        return str(_clamped(min(bounds))) if bounds else "+"

    async def _read(
        self, app_id: str, channel: str, low: int, high: str, count: int, max_bytes: int, last: bool
    ) -> Page:
        args = (low, high, count, min(max_bytes, MAX_PAGE_BYTES), "last" if last else "first")
        names = self._names(app_id, channel)
        return self._page_of(await ask_within(self._link, lambda: self._link.execute(HISTORY, names, args)))

    @staticmethod
    def _page_of(reply: list[Any]) -> Page:
        epoch, top, more, flat, base, ended = reply
        rows = [Row(int(flat[at]), int(flat[at + 1]), flat[at + 2]) for at in range(0, len(flat), 3)]
        return Page(epoch.decode() if epoch else "", int(top), rows, bool(more), int(base), bool(ended))

    def _run(self, script: Script, names: list[bytes], args: tuple[bytes | str | int, ...], done: Done) -> None:
        go = partial(self._link.run, script, names, args, partial(self._answered, done))
        if self._awaited < _MAX_PAGES:
            self._awaited += 1
            go()
        else:
            self._waiting.append(go)

    def _answered(self, done: Done, reply: Any) -> None:
        # The next waiting page goes first; `done` may ask for another page, which then waits its turn.
        if self._waiting:
            self._waiting.popleft()()
        else:
            self._awaited -= 1
        done(reply)

    def _paged(self, done: Done, reply: Any) -> None:
        self.pages += 1
        done(self._page_of(reply) if isinstance(reply, list) else reply)

    @staticmethod
    def _begun(done: Done, reply: Any) -> None:
        if not isinstance(reply, list):
            done(reply)
        else:
            epoch, top = reply
            done((epoch.decode(), int(top)) if epoch else None)

    def _located(self, done: Done, reply: Any) -> None:
        done(int(reply[0]) if isinstance(reply, list) else reply)

    def _step_back(self, names: list[bytes], start: bytes | str, left: int, done: Done) -> None:
        args = (start, min(left, _MAX_LOCATED), 0, _MAX_LOCATED_BYTES)
        self._run(LOCATE, names, args, partial(self._stepped, names, left, done))

    def _stepped(self, names: list[bytes], left: int, done: Done, reply: Any) -> None:
        if not isinstance(reply, list):
            done(reply)
            return
        offset, seen, more = reply
        if more and left > seen:
            self._step_back(names, offset, left - seen, done)
        else:
            done(int(offset))
