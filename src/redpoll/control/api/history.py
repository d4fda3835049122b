"""The history of a channel over HTTP: `GET` returns pages of messages, `DELETE` clears them.

history_query.py checks the query and renders the answer; cluster/history.py reads the pages. The command line uses it
too. The rules are in protocol/README.md "History and recovery".
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from redpoll.cluster.bus import Unavailable
from redpoll.cluster.history import History
from redpoll.control.api.history_query import PARAMETERS, answer, parse_query
from redpoll.control.http.schemas import ClearedResponse, HistoryResponse, Message
from redpoll.protocol.errors import ApiError
from redpoll.protocol.history import InvalidOffset, UnknownEpoch
from redpoll.protocol.messages import check_channel

if TYPE_CHECKING:
    # The command line uses this module without HTTP.
    from redpoll.control.http.request import Request
    from redpoll.control.http.response import Response

__all__ = ["ChannelHistory"]

_encode: Final = msgspec.json.Encoder().encode
# An answer's size. With very large events it has fewer messages than requested, and a cursor.
_MAX_BYTES: Final = 8 * 1024 * 1024
# The time limit for reading all pages of an answer. The caller gets an answer within 2 s.
_READ_WITHIN_S: Final = 1.9


class ChannelHistory:
    """The handlers, and `page` and `clear` for the command line. Methods raise ApiError or Unavailable."""

    def __init__(self, history: History) -> None:
        self._history = history

    async def show(self, request: Request) -> Response:
        """GET channels/NAME/history: `{"epoch", "messages": [{"offset", "event", "data", "time_ms"}], "next"}`.

        Without bounds it returns the newest messages. They are sorted oldest first, unless `direction` is `backwards`.
        A channel without history has no messages and the epoch "".
        """
        query = {name: value for name, value in request.params if name in PARAMETERS}
        return request.ok(_encode(await self.page(request.app.id, request.parameters[1], query)))

    async def forget(self, request: Request) -> Response:
        """DELETE channels/NAME/history: `{"epoch"}`, the new epoch, or "" if there was nothing to clear."""
        return request.ok(_encode(ClearedResponse(await self.clear(request.app.id, request.parameters[1]))))

    async def page(self, app_id: str, channel: str, query: Mapping[str, str]) -> HistoryResponse:
        """The messages of a channel that `query` selects; its keys are the names of the URL's parameters."""
        check_channel(channel)
        selected = parse_query(query)
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
        messages = [Message(row.offset, row.event, row.data, row.time_ms) for row in page.rows]
        return answer(page.epoch, messages, page.more, selected)

    async def clear(self, app_id: str, channel: str) -> str:
        """Clears the messages of a channel and notifies its subscribers. Returns the new epoch, "" without history."""
        check_channel(channel)
        return await self._history.clear(app_id, channel) or ""
