"""POST grants/revoke and POST channels/NAME/unsubscribe: what an app takes back (protocol/README.md "Grants").

Both responses wait for every worker of every node. If one doesn't answer in time it is 503, and the request may be
repeated.
"""

from __future__ import annotations

import msgspec

from redpoll.control.http.request import Request
from redpoll.control.http.response import Response
from redpoll.control.http.schemas import RevokedResponse, UnsubscribedResponse
from redpoll.control.records.grants import Grants
from redpoll.protocol.messages import decode_revoke, decode_unsubscribe

__all__ = ["GrantRequests"]


class GrantRequests:
    """The handlers."""

    def __init__(self, grants: Grants) -> None:
        self._grants = grants

    async def revoke(self, request: Request) -> Response:
        """Revokes one grant, or all of a user that were issued until now."""
        at_s, ended = await self._grants.revoke(request.app.id, decode_revoke(request.body))
        return request.ok(msgspec.json.encode(RevokedResponse(at_s, ended)))

    async def unsubscribe(self, request: Request) -> Response:
        """Removes a user or a connection from one channel."""
        app, channel = request.app, request.parameters[1]
        user, socket = decode_unsubscribe(request.body, channel)
        ended = await self._grants.unsubscribe(app.id, channel, user, socket, granted=app.grants)
        return request.ok(msgspec.json.encode(UnsubscribedResponse(ended)))
