"""Reading a channel's history: pages of messages, and where the last of them begin.

Messages are written by the bus, in the same step as they are published. Here they are read, a page at a time, so that
a reader of a long history holds up neither Redis nor whoever shares its connection; and forgotten, all at once.

An offset is the stamp of a message (cluster.md rule 6): it grows per channel, not contiguously, and is the Redis time
of the message in µs. What came before a message is its `prev`. The epoch is another one once history was lost.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

from redpoll import _frame
from redpoll.cluster.bus import confirmed
from redpoll.cluster.envelopes import event_of_tail
from redpoll.cluster.keys import Keys, shard
from redpoll.cluster.link import Done, Link
from redpoll.cluster.scripts import CLEAR, HISTORY, LOCATE, Script

__all__ = ["MOST_ROWS", "History", "InvalidOffset", "Page", "Row", "UnknownEpoch"]

# Of a page, which Redis reads in one step. One message alone may have more bytes than that.
MOST_ROWS: Final = 64
MOST_PAGE_BYTES: Final = 128 * 1024
# Of a call to locate, which returns none of them.
_MOST_LOCATED: Final = 256
# No offset is as great, and numbers below are exact in Lua: what a client asks for may be any.
_BEYOND: Final = 2**53
# Pages awaited at a time: with rosters and cached events (commits.py) they stay below what Redis lets a subscribed
# connection leave unread, and the event that comes next waits behind few of them.
_MOST_PAGES: Final = 16


class UnknownEpoch(Exception):
    """An epoch that the channel's history doesn't have, or has no more: `epoch` is what it has, "" for none."""

    def __init__(self, epoch: str) -> None:
        super().__init__(epoch)
        self.epoch = epoch

    def __str__(self) -> str:
        return f"the history is of epoch {self.epoch!r}" if self.epoch else "the channel has no history"


class InvalidOffset(Exception):
    """An offset of the future: no message of this epoch has one beyond `top`."""

    def __init__(self, top: int) -> None:
        super().__init__(top)
        self.top = top

    def __str__(self) -> str:
        return f"the last offset is {self.top}"


class Row(NamedTuple):
    """A message as it is kept. `prev` is the offset of the message before it (before the first of an epoch: one that no
    message has), `tail` the envelope from the skipped socket on (envelopes.py)."""

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
        """Who sent it, of a client event on a presence channel."""
        user = self._parts()[5]
        return user.decode() if user is not None else None

    @property
    def skip(self) -> str | None:
        """The socket that was left out when it was published."""
        skip = self.tail.partition(b" ")[0]
        return None if skip == b"-" else skip.decode()

    def envelope(self, skip: bool = True) -> bytes:
        """The `e` envelope in which it was published; without `skip`, one that leaves nobody out."""
        return event_of_tail(self.offset, self.prev, self.tail, skip=skip)

    def _parts(self) -> tuple[int, int, int, int, bytes | None, bytes | None, bytes, bytes]:
        return _frame.envelope(self.envelope())


class Page(NamedTuple):
    """Messages, oldest first. `epoch` and `top`, the last offset given, are those of the moment of reading: "" and 0
    where nothing was ever kept. `more`: there are others within the bounds asked for, which the count or the bytes
    left out."""

    epoch: str
    top: int
    rows: list[Row]
    more: bool

    def follows(self, epoch: str, since: int) -> bool:
        """Whether this page, read from `since` on, leaves nothing out: who knew all up to there has missed nothing
        but this."""
        return epoch == self.epoch and since == (self.rows[0].prev if self.rows else self.top)

    def check(self, epoch: str, offset: int = 0) -> None:
        """Raises UnknownEpoch or InvalidOffset if a place in this history isn't `epoch` and `offset`."""
        if epoch != self.epoch or not epoch:
            raise UnknownEpoch(self.epoch)
        if offset > self.top:
            raise InvalidOffset(self.top)


def _clamped(offset: int) -> int:
    return max(0, min(offset, _BEYOND))


class History:
    """Reads over a link. A worker's is the one connection on which its events come as well, so that the place of a
    page among them says what is in it (cluster.md rule 1)."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self.pages = 0
        self._link = link
        self._keys = keys
        self._awaited = 0
        self._waiting: deque[Callable[[], None]] = deque()

    def page(self, app_id: str, channel: str, since: int, count: int, done: Done) -> None:
        """The oldest messages after the offset `since`, at most `count` (≤ 64) of them and about 128 KiB. `done` gets
        a Page, a hiredis.ReplyError or a LinkDown, never from within this call. Pages that many ask for wait for one
        another."""
        names = self._names(app_id, channel)
        args = (_clamped(since), "+", min(count, MOST_ROWS), MOST_PAGE_BYTES, "first")
        self._run(HISTORY, names, args, partial(self._paged, done))

    def locate(
        self, app_id: str, channel: str, done: Done, *, count: int = 0, seconds: float = 0, after_ms: float = 0
    ) -> None:
        """The offset after which the last `count` messages begin, or those of the last `seconds` by Redis' clock, or
        those later than `after_ms` (Unix time); one of the three. `done` gets it, or an error as in `page`; never
        from within this call. Kept messages alone count."""
        names = self._names(app_id, channel)
        if count > 0:
            self._step_back(names, "+", count, done)
        elif after_ms:
            asyncio.get_running_loop().call_soon(done, int(after_ms * 1000))
        else:
            self._run(LOCATE, names, ("+", 0, f"{seconds:.6f}"), partial(self._located, done))

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
        """At most `limit` messages and about `max_bytes` of them, read in pages: those after the offset `since`, before
        `before` and up to `until`. Where more would do, they are the oldest if there is a `since` and else the newest;
        `newest` says otherwise.

        With `epoch`: raises UnknownEpoch if it isn't the channel's, InvalidOffset if `since` or `before` is beyond the
        last offset. Raises Unavailable. A history that is cleared meanwhile is read as it is then.
        """
        last = newest if newest is not None else since is None
        low, high = _clamped(since or 0), self._upper(before, until)
        rows: list[Row] = []
        left = max_bytes
        found: str | None = None
        while True:
            count = min(limit - len(rows), MOST_ROWS)
            page = await self._read(app_id, channel, low, high, count, left, last)
            if epoch is not None:
                page.check(epoch, max(since or 0, before or 0))
            if found not in (None, page.epoch):
                # Cleared between two pages.
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
            found = page.epoch
            rows = page.rows + rows if last else rows + page.rows
            # Fewer than asked for: the bytes were at an end, of the page or of all.
            full = len(page.rows) < count and left <= MOST_PAGE_BYTES
            left -= sum(len(row.tail) for row in page.rows)
            if not page.more or full or len(rows) >= limit or left <= 0:
                return page._replace(rows=rows)
            if last:
                high = str(page.rows[0].offset - 1)
            else:
                low = page.rows[-1].offset

    async def clear(self, app_id: str, channel: str) -> str | None:
        """Forgets the channel's messages and tells its subscribers. Returns the new epoch, None where there is no
        history. Raises Unavailable."""
        epoch, keys = secrets.token_hex(8), self._keys
        names = [*self._names(app_id, channel), keys.histories(shard(app_id, channel), app_id)]
        args = (keys.publish, keys.topic(app_id, channel), epoch, channel)
        return epoch if await confirmed(self._link, lambda: self._link.execute(CLEAR, names, args)) else None

    # -- how

    def _names(self, app_id: str, channel: str) -> list[bytes]:
        return [self._keys.history(app_id, channel), self._keys.history_meta(app_id, channel)]

    @staticmethod
    def _upper(before: int | None, until: int | None) -> str:
        bounds = ([before - 1] if before is not None else []) + ([until] if until is not None else [])
        return str(_clamped(min(bounds))) if bounds else "+"

    async def _read(
        self, app_id: str, channel: str, low: int, high: str, count: int, most_bytes: int, last: bool
    ) -> Page:
        args = (low, high, count, min(most_bytes, MOST_PAGE_BYTES), "last" if last else "first")
        names = self._names(app_id, channel)
        return self._page_of(await confirmed(self._link, lambda: self._link.execute(HISTORY, names, args)))

    @staticmethod
    def _page_of(reply: list[Any]) -> Page:
        epoch, top, more, flat = reply
        rows = [Row(int(flat[at]), int(flat[at + 1]), flat[at + 2]) for at in range(0, len(flat), 3)]
        return Page(epoch.decode() if epoch else "", int(top), rows, bool(more))

    def _run(self, script: Script, names: list[bytes], args: tuple[bytes | str | int, ...], done: Done) -> None:
        go = partial(self._link.run, script, names, args, partial(self._answered, done))
        if self._awaited < _MOST_PAGES:
            self._awaited += 1
            go()
        else:
            self._waiting.append(go)

    def _answered(self, done: Done, reply: Any) -> None:
        # The place goes to the next before this one's turn, which may ask for more: each waits for the others.
        if self._waiting:
            self._waiting.popleft()()
        else:
            self._awaited -= 1
        done(reply)

    def _paged(self, done: Done, reply: Any) -> None:
        self.pages += 1
        done(self._page_of(reply) if isinstance(reply, list) else reply)

    def _located(self, done: Done, reply: Any) -> None:
        done(int(reply[0]) if isinstance(reply, list) else reply)

    def _step_back(self, names: list[bytes], start: bytes | str, left: int, done: Done) -> None:
        args = (start, min(left, _MOST_LOCATED), 0)
        self._run(LOCATE, names, args, partial(self._stepped, names, left, done))

    def _stepped(self, names: list[bytes], left: int, done: Done, reply: Any) -> None:
        if not isinstance(reply, list):
            done(reply)
            return
        offset, seen = reply
        if seen == _MOST_LOCATED and left > seen:
            self._step_back(names, offset, left - seen, done)
        else:
            done(int(offset))
