"""Lists this worker's connections for the dashboard, one page per question.

A page is bounded, so that clients are served in between.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappush, heapreplace
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from redpoll.cluster.questions import ListConnections
from redpoll.loop.slices import walk

if TYPE_CHECKING:
    from redpoll.worker.hub.connection import Connection

__all__ = ["MAX_CONNECTIONS", "page_of"]

MAX_CONNECTIONS: Final = 500
_MAX_CHANNELS_NAMED: Final = 20


async def page_of(connections: Iterable[Connection], question: ListConnections) -> dict[str, Any]:
    """The newest `limit` connections of the app, "" for all apps: `{"total", "connections"}`.

    `find` is a part of a socket id, an address, a library or a user id; `channel` is one they are subscribed to; "" for
    any. `total` counts all that match. One connection is `{socket, app, address, library, transport, since,
    channels, named, user, unsent}`: `transport` is websocket, xhr_streaming or xhr_polling, `channels` is a number,
    `named` the first of them, `unsent` the bytes that wait.

    Searches for a slice in each pass of the loop.
    """
    app_id, find, channel = question.app, question.find, question.channel
    limit = min(question.limit, MAX_CONNECTIONS)
    total = 0
    # The newest so far, the oldest of them first. The number decides between connections of one moment.
    newest: list[tuple[float, int, Connection]] = []

    def look(connection: Connection) -> None:
        nonlocal total
        session = connection.session
        if app_id and session.app.id != app_id:
            return
        if channel and channel not in session.channels:
            return
        if find and not _matches(connection, find):
            return
        total += 1
        entry = (connection.client_seen.at_s, -total, connection)
        if len(newest) < limit:
            heappush(newest, entry)
        elif newest and entry > newest[0]:
            heapreplace(newest, entry)

    await walk(connections, look)
    newest.sort(reverse=True)
    # One may have come twice (`OpenConnections.each`).
    page = {id(connection): connection for _, _, connection in newest}
    return {"total": total, "connections": [_described(connection) for connection in page.values()]}


def _matches(connection: Connection, find: str) -> bool:
    session = connection.session
    words = (session.socket_id, session.user_id or "", connection.client_seen.library, _address(connection))
    return any(find in word for word in words)


def _address(connection: Connection) -> str:
    if connection.client_seen.address:
        return connection.client_seen.address
    # TLS listeners and the PROXY protocol know the client's address better than the kernel.
    peer = getattr(connection, "peer_address", None) or connection.peer
    return str(peer[0]) if peer else ""


def _described(connection: Connection) -> dict[str, Any]:
    session = connection.session
    return {
        "socket": session.socket_id,
        "app": session.app.id,
        "address": _address(connection),
        "library": connection.client_seen.library,
        "transport": connection.transport_name,
        "since": connection.client_seen.at_s,
        "channels": len(session.channels),
        "named": list(islice(session.channels, _MAX_CHANNELS_NAMED)),
        "user": session.user_id,
        "unsent": connection.unsent_bytes,
    }
