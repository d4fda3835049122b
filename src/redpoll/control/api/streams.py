"""Who may read a channel over HTTP. Workers read and answer (worker/streams); they ask here first, because tokens are
known here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from redpoll.control.http.response import header_line
from redpoll.http.messages import STREAM, STREAM_APP, STREAM_CHANNEL
from redpoll.protocol.errors import ApiError
from redpoll.protocol.messages import check_channel

if TYPE_CHECKING:
    from redpoll.control.http.request import Request
    from redpoll.control.http.response import Response

__all__ = ["allow_stream"]


async def allow_stream(request: Request) -> Response:
    """GET channels/NAME/stream, from a worker that has such a request: names the app and the channel in header fields.
    Raises ApiError `no_history` if the channel's messages aren't stored."""
    if not request.flags & STREAM:
        raise ApiError("not_found", "streams are read on the public port, by the path /apps/ID/channels/NAME/stream")
    channel = request.parameters[1]
    check_channel(channel)
    if request.app.history_rule(channel) is None:
        raise ApiError(
            "no_history",
            "the channel has no history, and only what is stored can be read; add a rule with redpoll history rule add",
        )
    return request.ok(b"{}", header_line(STREAM_APP, request.app.id) + header_line(STREAM_CHANNEL, channel))
