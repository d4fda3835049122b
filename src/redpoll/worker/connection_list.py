"""A page of this worker's connections, for the dashboard: what an operator wants to know of each.

One look at most so many connections, whatever is asked: others are served in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from redpoll.worker.connection import Connection

__all__ = ["MOST", "QUESTION", "page_of"]

# Control asks every worker over `sys`: {"ask": QUESTION, "app", "find", "channel", "limit"}.
QUESTION: Final = "connections"
MOST: Final = 500
_CHANNELS_NAMED: Final = 20


def page_of(connections: Iterable[Connection], asked: Mapping[str, Any]) -> dict[str, Any]:
    """The newest `limit` connections of app `asked["app"]`, of all apps where it is "": `{"total", "connections"}`.

    `find` is a part of a socket id, an address, a library or a user id; `channel` what they are subscribed to; "" for
    any. `total` counts all that match. One connection is `{socket, app, address, library, since, channels, named,
    user, owed}`: `channels` how many, `named` the first of them, `owed` bytes.
    """
    app_id, find, channel = str(asked.get("app", "")), str(asked.get("find", "")), str(asked.get("channel", ""))
    limit = min(int(asked.get("limit", MOST)), MOST)
    matching = []
    for connection in connections:
        session = connection.session
        if app_id and session.app.id != app_id:
            continue
        if channel and channel not in session.channels:
            continue
        if find and not _matches(connection, find):
            continue
        matching.append(connection)
    matching.sort(key=lambda each: each.arrival.at_s, reverse=True)
    return {"total": len(matching), "connections": [_told(each) for each in matching[:limit]]}


def _matches(connection: Connection, find: str) -> bool:
    session = connection.session
    words = (session.socket_id, session.user_id or "", connection.arrival.library, _address(connection))
    return any(find in word for word in words)


def _address(connection: Connection) -> str:
    # A proxy's word where there is one; TLS and a proxy in front know more than the kernel.
    peer = getattr(connection, "peer_address", None) or connection.peer
    return str(peer[0]) if peer else ""


def _told(connection: Connection) -> dict[str, Any]:
    session = connection.session
    return {
        "socket": session.socket_id,
        "app": session.app.id,
        "address": _address(connection),
        "library": connection.arrival.library,
        "since": connection.arrival.at_s,
        "channels": len(session.channels),
        "named": list(islice(session.channels, _CHANNELS_NAMED)),
        "user": session.user_id,
        "owed": connection.bytes_owed,
    }
