"""The history of a channel over HTTP: `GET` tells messages in pages, `DELETE` forgets them (decisions.md "History").

What a caller may ask for is judged here; the pages are the cluster's (cluster/history.py). The command line asks
through it as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from redpoll.cluster.bus import Unavailable
from redpoll.cluster.history import History, InvalidOffset, Page, UnknownEpoch
from redpoll.control.schemas import ClearedAnswer, HistoryAnswer, Message
from redpoll.protocol.errors import ApiError
from redpoll.protocol.history import DEFAULT_LIMIT, MAX_LIMIT, MAX_OFFSET, Position, parse_position
from redpoll.protocol.messages import check_channel

if TYPE_CHECKING:
    # The command line comes here too, and does without HTTP.
    from redpoll.control.request import Request
    from redpoll.control.response import Response

__all__ = ["HISTORY_QUERY", "ChannelHistory"]

HISTORY_QUERY: Final = ("history_limit", "history_direction", "history_cursor", "history_since", "history_until")

_encode: Final = msgspec.json.Encoder().encode
# An answer is rendered at one go: with events of the greatest size it holds fewer than were asked for, and a cursor.
_MAX_BYTES: Final = 8 * 1024 * 1024
# For all pages of an answer; the caller is to have it within 2 s.
_READ_WITHIN_S: Final = 1.9
# Ours first, then the words of other servers.
_NEWEST_FIRST: Final = {
    "forwards": False,
    "backwards": True,
    "oldest_first": False,
    "newest_first": True,
    "forward": False,
    "backward": True,
}
# What follows the place in the cursor of an answer whose next messages are newer ones.
_ONWARDS: Final = ":newer"


class _Asked(NamedTuple):
    """`limit` messages behind the offset `since`, up to `until`, before `before`; the newest of them where `newest`.
    `places` are the positions in it that must be of this history."""

    limit: int
    reverse: bool
    newest: bool
    since: int | None
    until: int | None
    before: int | None
    places: tuple[Position, ...]


class ChannelHistory:
    """The handlers, and `page` and `clear` for others. Raises ApiError or Unavailable."""

    def __init__(self, history: History) -> None:
        self._history = history

    async def show(self, call: Request) -> Response:
        """GET channels/NAME/history: `{"epoch", "messages": [{"offset", "event", "data", "time_ms"}], "next"}`.

        Without bounds the newest ones; oldest first unless `direction` is `backwards`. A channel without history has
        no messages and the epoch "".
        """
        query = {name: value for name, value in call.params if name in _PARAMETERS}
        return call.answer(_encode(await self.page(call.app.id, call.parameters[1], query)))

    async def forget(self, call: Request) -> Response:
        """DELETE channels/NAME/history: `{"epoch"}`, the new one; "" where there was nothing to forget."""
        return call.answer(_encode(ClearedAnswer(await self.clear(call.app.id, call.parameters[1]))))

    async def page(self, app_id: str, channel: str, query: Mapping[str, str]) -> HistoryAnswer:
        """What `query`, by the names of the query's parameters, asks for of a channel."""
        check_channel(channel)
        asked = _asked(query)
        try:
            async with asyncio.timeout(_READ_WITHIN_S):
                page = await self._history.read(
                    app_id,
                    channel,
                    limit=asked.limit,
                    before=asked.before,
                    since=asked.since,
                    until=asked.until,
                    newest=asked.newest,
                    max_bytes=_MAX_BYTES,
                )
            for place in asked.places:
                assert place.epoch is not None
                page.check(place.epoch, place.offset)
        except TimeoutError:
            raise Unavailable(f"no answer from Redis within {_READ_WITHIN_S:g} s") from None
        except UnknownEpoch as error:
            raise ApiError("unknown_epoch", f"{error}: what was kept before is lost or was cleared") from None
        except InvalidOffset as error:
            raise ApiError("invalid_offset", f"this history has no such offset yet: {error}") from None
        return _answer(page, asked)

    async def clear(self, app_id: str, channel: str) -> str:
        """Forgets the messages of a channel and tells its subscribers. The new epoch, "" where there were none."""
        check_channel(channel)
        return await self._history.clear(app_id, channel) or ""


_PARAMETERS: Final = frozenset(name.removeprefix("history_") for name in HISTORY_QUERY)


def _asked(query: Mapping[str, str]) -> _Asked:
    limit = _limit(query.get("limit"))
    direction = query.get("direction", "forwards")
    if direction not in _NEWEST_FIRST:
        raise ApiError("bad_request", f"direction is forwards (oldest first) or backwards, not {direction[:40]!r}")
    reverse = _NEWEST_FIRST[direction]
    places: list[Position] = []
    since = _bound(query, "since", places)
    until = _bound(query, "until", places)
    newest = reverse or since is None
    before = None
    cursor = query.get("cursor")
    if cursor is not None:
        onwards = cursor.endswith(_ONWARDS)
        place = _place(cursor.removesuffix(_ONWARDS), "invalid_cursor", "cursor is not one that an answer gave")
        places.append(place)
        newest = not onwards
        if onwards:
            since = max(place.offset, since or 0)
        else:
            before = place.offset
    return _Asked(limit, reverse, newest, since, until, before, tuple(places))


def _limit(given: str | None) -> int:
    if given is None:
        return DEFAULT_LIMIT
    limit = int(given) if given.isascii() and given.isdecimal() and len(given) <= 9 else 0
    if not 1 <= limit <= MAX_LIMIT:
        raise ApiError("bad_request", f"limit is a number from 1 to {MAX_LIMIT}, not {given[:40]!r}")
    return limit


def _bound(query: Mapping[str, str], name: str, places: list[Position]) -> int | None:
    """The offset that `since` (behind it) or `until` (up to it) means; a position goes to `places` as well."""
    given = query.get(name)
    if given is None:
        return None
    if ":" in given:
        place = _place(given, "invalid_offset", f"{name} is EPOCH:OFFSET or a time in ms, not {given[:140]!r}")
        places.append(place)
        return place.offset
    time_ms = int(given) if given.isascii() and given.isdecimal() and len(given) <= 16 else MAX_OFFSET
    if time_ms > MAX_OFFSET // 1000:
        raise ApiError("bad_request", f"{name} is EPOCH:OFFSET or a time in ms, not {given[:40]!r}")
    # Offsets are microseconds. Messages of that very millisecond are within either bound.
    return max(0, time_ms * 1000 - 1) if name == "since" else time_ms * 1000 + 999


def _place(text: str, code: str, fault: str) -> Position:
    try:
        return parse_position(text)
    except ValueError:
        raise ApiError(code, fault) from None


def _answer(page: Page, asked: _Asked) -> HistoryAnswer:
    messages = [Message(row.offset, row.event, row.data, row.time_ms) for row in page.rows]
    following = None
    if page.more and messages:
        if asked.newest:
            following = str(Position(page.epoch, messages[0].offset))
        else:
            following = f"{Position(page.epoch, messages[-1].offset)}{_ONWARDS}"
    if asked.reverse:
        messages.reverse()
    return HistoryAnswer(page.epoch, messages, following)
