"""The history of a channel over HTTP: `GET` returns pages of messages, `DELETE` clears them.

This module checks the query and renders the answer; cluster/history.py reads the pages. The command line uses it too.
The rules are in protocol/README.md "History and recovery".
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from redpoll.cluster.bus import Unavailable
from redpoll.cluster.history import History, InvalidOffset, Page, UnknownEpoch
from redpoll.control.http.schemas import ClearedResponse, HistoryResponse, Message
from redpoll.protocol.errors import ApiError
from redpoll.protocol.history import DEFAULT_LIMIT, MAX_LIMIT, MAX_OFFSET, Position, parse_position
from redpoll.protocol.messages import check_channel

if TYPE_CHECKING:
    # The command line uses this module without HTTP.
    from redpoll.control.http.request import Request
    from redpoll.control.http.response import Response

__all__ = ["HISTORY_QUERY", "ChannelHistory"]

HISTORY_QUERY: Final = ("history_limit", "history_direction", "history_cursor", "history_since", "history_until")

_encode: Final = msgspec.json.Encoder().encode
# An answer's size. With very large events it has fewer messages than requested, and a cursor.
_MAX_BYTES: Final = 8 * 1024 * 1024
# The time limit for reading all pages of an answer. The caller gets an answer within 2 s.
_READ_WITHIN_S: Final = 1.9
# Our names first, then those of other servers.
_NEWEST_FIRST: Final = {
    "forwards": False,
    "backwards": True,
    "oldest_first": False,
    "newest_first": True,
    "forward": False,
    "backward": True,
}
# The end of a cursor whose following messages are newer ones.
_NEWER: Final = ":newer"


class _PageQuery(NamedTuple):
    """`limit` messages after the offset `since`, up to and including `until`, and before `before`: the newest of them
    if `newest`, else the oldest. `positions` are those in the query that must belong to the current history."""

    limit: int
    reverse: bool
    newest: bool
    since: int | None
    until: int | None
    before: int | None
    positions: tuple[Position, ...]


class ChannelHistory:
    """The handlers, and `page` and `clear` for the command line. Methods raise ApiError or Unavailable."""

    def __init__(self, history: History) -> None:
        self._history = history

    async def show(self, request: Request) -> Response:
        """GET channels/NAME/history: `{"epoch", "messages": [{"offset", "event", "data", "time_ms"}], "next"}`.

        Without bounds it returns the newest messages. They are sorted oldest first, unless `direction` is `backwards`.
        A channel without history has no messages and the epoch "".
        """
        query = {name: value for name, value in request.params if name in _PARAMETERS}
        return request.ok(_encode(await self.page(request.app.id, request.parameters[1], query)))

    async def forget(self, request: Request) -> Response:
        """DELETE channels/NAME/history: `{"epoch"}`, the new epoch, or "" if there was nothing to clear."""
        return request.ok(_encode(ClearedResponse(await self.clear(request.app.id, request.parameters[1]))))

    async def page(self, app_id: str, channel: str, query: Mapping[str, str]) -> HistoryResponse:
        """The messages of a channel that `query` selects; its keys are the names of the URL's parameters."""
        check_channel(channel)
        selected = _parse_query(query)
        try:
            async with asyncio.timeout(_READ_WITHIN_S):
                page = await self._history.read(
                    app_id,
                    channel,
                    limit=selected.limit,
                    before=selected.before,
                    since=selected.since,
                    until=selected.until,
                    newest=selected.newest,
                    max_bytes=_MAX_BYTES,
                )
            for position in selected.positions:
                assert position.epoch is not None
                page.check(position.epoch, position.offset)
        except TimeoutError:
            raise Unavailable(f"no answer from Redis within {_READ_WITHIN_S:g} s") from None
        except UnknownEpoch as error:
            raise ApiError("unknown_epoch", f"{error}: the earlier history was lost or cleared") from None
        except InvalidOffset as error:
            raise ApiError("invalid_offset", f"this history has no such offset yet: {error}") from None
        return _answer(page, selected)

    async def clear(self, app_id: str, channel: str) -> str:
        """Clears the messages of a channel and notifies its subscribers. Returns the new epoch, "" without history."""
        check_channel(channel)
        return await self._history.clear(app_id, channel) or ""


_PARAMETERS: Final = frozenset(name.removeprefix("history_") for name in HISTORY_QUERY)


def _parse_query(query: Mapping[str, str]) -> _PageQuery:
    limit = _limit(query.get("limit"))
    direction = query.get("direction", "forwards")
    if direction not in _NEWEST_FIRST:
        raise ApiError("bad_request", f"direction must be forwards (oldest first) or backwards, not {direction[:40]!r}")
    reverse = _NEWEST_FIRST[direction]
    positions: list[Position] = []
    since = _bound(query, "since", positions)
    until = _bound(query, "until", positions)
    newest = reverse or since is None
    before = None
    cursor = query.get("cursor")
    if cursor is not None:
        newer = cursor.endswith(_NEWER)
        fault = "cursor must be the `next` of an earlier answer"
        position = _parse_position(cursor.removesuffix(_NEWER), "invalid_cursor", fault)
        positions.append(position)
        newest = not newer
        if newer:
            since = max(position.offset, since or 0)
        else:
            before = position.offset
    return _PageQuery(limit, reverse, newest, since, until, before, tuple(positions))


def _limit(given: str | None) -> int:
    if given is None:
        return DEFAULT_LIMIT
    limit = int(given) if given.isascii() and given.isdecimal() and len(given) <= 9 else 0
    if not 1 <= limit <= MAX_LIMIT:
        raise ApiError("bad_request", f"limit must be a number from 1 to {MAX_LIMIT}, not {given[:40]!r}")
    return limit


def _bound(query: Mapping[str, str], name: str, positions: list[Position]) -> int | None:
    """The offset for `since` (exclusive) or `until` (inclusive). If it was given as a position, adds it to
    `positions`."""
    given = query.get(name)
    if given is None:
        return None
    if ":" in given:
        fault = f"{name} must be EPOCH:OFFSET or a time in ms, not {given[:140]!r}"
        position = _parse_position(given, "invalid_offset", fault)
        positions.append(position)
        return position.offset
    time_ms = int(given) if given.isascii() and given.isdecimal() and len(given) <= 16 else MAX_OFFSET
    if time_ms > MAX_OFFSET // 1000:
        raise ApiError("bad_request", f"{name} must be EPOCH:OFFSET or a time in ms, not {given[:40]!r}")
    # Offsets are in microseconds. Messages of the given millisecond are included by both bounds.
    return max(0, time_ms * 1000 - 1) if name == "since" else time_ms * 1000 + 999


def _parse_position(text: str, code: str, fault: str) -> Position:
    try:
        return parse_position(text)
    except ValueError:
        raise ApiError(code, fault) from None


def _answer(page: Page, selected: _PageQuery) -> HistoryResponse:
    messages = [Message(row.offset, row.event, row.data, row.time_ms) for row in page.rows]
    following = None
    if page.more and messages:
        if selected.newest:
            following = str(Position(page.epoch, messages[0].offset))
        else:
            following = f"{Position(page.epoch, messages[-1].offset)}{_NEWER}"
    if selected.reverse:
        messages.reverse()
    return HistoryResponse(page.epoch, messages, following)
