"""The query of `GET …/channels/NAME/history`, and its answer: which messages, in which order, and where the following
ones begin. No I/O: `redpoll.testing` uses it too (protocol/README.md "History and recovery").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from redpoll.control.http.schemas import HistoryResponse, Message
from redpoll.protocol.errors import ApiError
from redpoll.protocol.history import DEFAULT_LIMIT, MAX_LIMIT, MAX_OFFSET, Position, parse_position

__all__ = ["HISTORY_QUERY", "PARAMETERS", "PageQuery", "answer", "parse_query"]

# As the OpenAPI document names them, and as the query does.
HISTORY_QUERY: Final = ("history_limit", "history_direction", "history_cursor", "history_since", "history_until")
PARAMETERS: Final = frozenset(name.removeprefix("history_") for name in HISTORY_QUERY)

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


class PageQuery(NamedTuple):
    """`limit` messages after the offset `since`, up to and including `until`, and before `before`: the newest of them
    if `newest`, else the oldest. `positions` are those in the query that must belong to the current history."""

    limit: int
    reverse: bool
    newest: bool
    since: int | None
    until: int | None
    before: int | None
    positions: tuple[Position, ...]


def parse_query(query: Mapping[str, str]) -> PageQuery:
    """The pages that `query` selects; its keys are PARAMETERS. Raises ApiError."""
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
    return PageQuery(limit, reverse, newest, since, until, before, tuple(positions))


def _limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_LIMIT
    limit = int(text) if text.isascii() and text.isdecimal() and len(text) <= 9 else 0
    if not 1 <= limit <= MAX_LIMIT:
        raise ApiError("bad_request", f"limit must be a number from 1 to {MAX_LIMIT}, not {text[:40]!r}")
    return limit


def _bound(query: Mapping[str, str], name: str, positions: list[Position]) -> int | None:
    """The offset for `since` (exclusive) or `until` (inclusive). If it was given as a position, adds it to
    `positions`."""
    text = query.get(name)
    if text is None:
        return None
    if ":" in text:
        fault = f"{name} must be EPOCH:OFFSET or a time in ms, not {text[:140]!r}"
        position = _parse_position(text, "invalid_offset", fault)
        positions.append(position)
        return position.offset
    time_ms = int(text) if text.isascii() and text.isdecimal() and len(text) <= 16 else MAX_OFFSET
    if time_ms > MAX_OFFSET // 1000:
        raise ApiError("bad_request", f"{name} must be EPOCH:OFFSET or a time in ms, not {text[:40]!r}")
    # Offsets are in microseconds. Messages of the given millisecond are included by both bounds.
    return max(0, time_ms * 1000 - 1) if name == "since" else time_ms * 1000 + 999


def _parse_position(text: str, code: str, fault: str) -> Position:
    try:
        return parse_position(text)
    except ValueError:
        raise ApiError(code, fault) from None


def answer(epoch: str, messages: list[Message], more: bool, selected: PageQuery) -> HistoryResponse:
    """The answer with these messages, oldest first, of the history of `epoch`; `more`: others were left out."""
    following = None
    if more and messages:
        if selected.newest:
            following = str(Position(epoch, messages[0].offset))
        else:
            following = f"{Position(epoch, messages[-1].offset)}{_NEWER}"
    if selected.reverse:
        messages.reverse()
    return HistoryResponse(epoch, messages, following)
