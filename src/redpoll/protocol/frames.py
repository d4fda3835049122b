"""The JSON of every frame that the server itself composes, protocol.md 12. Not the WebSocket framing around
it, and not published events: those are made in C from the bytes on the bus (redpoll._frame).

`data` is a string in every frame but `pusher:error`, where it is an object: of the clients the strictest
decide (protocol.md 2.2). All functions return UTF-8 JSON of one frame.
"""

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from redpoll.protocol.channels import CONSOLE
from redpoll.protocol.history import Told

__all__ = [
    "PING",
    "PONG",
    "auth_required",
    "cache_miss",
    "connection_established",
    "console",
    "error",
    "history",
    "member_added",
    "member_removed",
    "ping",
    "pong",
    "position",
    "signin_success",
    "subscription_count",
    "subscription_error",
    "subscription_succeeded",
    "watchlist_events",
]

PING = b'{"event":"pusher:ping","data":"{}"}'
PONG = b'{"event":"pusher:pong","data":"{}"}'

_encode = msgspec.json.Encoder().encode


def connection_established(socket_id: str, activity_timeout_s: float, recover: bool = False) -> bytes:
    """The first frame on every socket (1.2). A fraction of a second counts as a whole one, and the
    timeout is never 0: pusher-js throws such a handshake away. `recover`: the client asked for what it needs to
    recover, and finds here that it will be told."""
    timeout_s = max(1, -int(-activity_timeout_s // 1))
    more = b',"recover":true' if recover else b""
    data = b'{"socket_id":"%b","activity_timeout":%d%b}' % (socket_id.encode(), timeout_s, more)
    return b'{"event":"pusher:connection_established","data":%b}' % _string(data)


def error(code: int | None, message: str) -> bytes:
    """In band, or just before a close with the same code (4.3). Never with code None before
    `connection_established`: pusher-js hangs on that."""
    body = _encode({"code": None if code is None else int(code), "message": message})
    return b'{"event":"pusher:error","data":%b}' % body


def pong() -> bytes:
    return PONG


def ping() -> bytes:
    return PING


def subscription_succeeded(
    channel: str,
    presence: bytes | None = None,
    *,
    epoch: str | None = None,
    offset: int | None = None,
    recovered: bool | None = None,
) -> bytes:
    """`presence` is what `Roster.snapshot()` gives; None on channels that aren't presence channels (5.4).

    For clients that recover, on channels with history: all that follows on the channel lies behind `offset` of
    `epoch`. `recovered` after a `since`: whether it goes on there without a gap.
    """
    if epoch is None and recovered is None:
        data = b'"{}"' if presence is None else _string(presence)
    else:
        place = _place(epoch, offset, recovered)
        data = _string(place if presence is None else presence[:-1] + b"," + place[1:])
    return b'{"event":"pusher_internal:subscription_succeeded","channel":%b,"data":%b}' % (
        _encode(channel),
        data,
    )


def position(channel: str, epoch: str, offset: int, recovered: bool) -> bytes:
    """Where a recovering client is in the channel, when the history was lost or cleared under it, or a gap could not
    be filled (`recovered` false)."""
    data = _place(epoch, offset, recovered)
    return b'{"event":"pusher:position","channel":%b,"data":%b}' % (_encode(channel), _string(data))


def history(channel: str, epoch: str, messages: Sequence[Told], next: str | None) -> bytes:
    """The answer to a `pusher:history`: oldest first, in the one shape of decisions.md "History". `next` is what
    to give as `since` or as `before`, whichever way it was asked, for the page after this one; None: that was all."""
    data = _encode({"epoch": epoch, "messages": messages, "next": next})
    return b'{"event":"pusher:history","channel":%b,"data":%b}' % (_encode(channel), _string(data))


def subscription_error(channel: str, type: str, error: str, status: int, **more: Any) -> bytes:
    """The frame that Echo's `.error()` hears (5.5). `more` goes beside `type`, `error` and `status`."""
    data = _encode({"type": type, "error": error, "status": status, **more})
    return b'{"event":"pusher:subscription_error","channel":%b,"data":%b}' % (_encode(channel), _string(data))


def auth_required(channel: str, socket_id: str) -> bytes:
    """Spec 4.8: what a subscribe without `auth` is told first, for clients that sign in a second step."""
    data = _encode({"channel": channel, "socket_id": socket_id})
    return b'{"event":"auth_required","channel":%b,"data":%b}' % (_encode(channel), _string(data))


def member_added(channel: str, user_id: str, info: bytes) -> bytes:
    """`info` is JSON text, b"" for none: told as `{}`, so that the member has an entry in `hash` (6)."""
    data = b'{"user_id":%b,"user_info":%b}' % (_encode(user_id), info or b"{}")
    return b'{"event":"pusher_internal:member_added","channel":%b,"data":%b}' % (
        _encode(channel),
        _string(data),
    )


def member_removed(channel: str, user_id: str) -> bytes:
    data = b'{"user_id":%b}' % _encode(user_id)
    return b'{"event":"pusher_internal:member_removed","channel":%b,"data":%b}' % (
        _encode(channel),
        _string(data),
    )


def cache_miss(channel: str) -> bytes:
    """Behind the success frame of a cache channel that has nothing cached (8)."""
    return b'{"event":"pusher:cache_miss","channel":%b,"data":"{}"}' % _encode(channel)


def subscription_count(channel: str, count: int) -> bytes:
    """How many connections are in the channel, over all workers (9)."""
    data = b'{"subscription_count":%d}' % count
    return b'{"event":"pusher_internal:subscription_count","channel":%b,"data":%b}' % (
        _encode(channel),
        _string(data),
    )


def signin_success(user_data: str) -> bytes:
    """`user_data` is repeated as it came, a string within the string (10.1)."""
    return b'{"event":"pusher:signin_success","data":%b}' % _string(_encode({"user_data": user_data}))


def watchlist_events(online: Collection[str], offline: Collection[str]) -> bytes:
    """Who of one's watchlist came and went, by user id; a group without users is left out (10.3). The one
    frame that pusher-js routes: it hears nothing of a bare `online`."""
    groups = (("online", online), ("offline", offline))
    data = _encode({"events": [{"name": name, "user_ids": list(ids)} for name, ids in groups if ids]})
    return b'{"event":"pusher_internal:watchlist_events","data":%b}' % _string(data)


def console(channel: str, event: str, data: str, user: str | None, skip: str | None) -> bytes:
    """An event of the app, shown to its dashboard: an ordinary event on the console's channel. `user` sent it, if a
    client did; `skip` is the socket id that it is not for."""
    shown = _encode({"channel": channel, "event": event, "data": data, "user_id": user, "skip": skip})
    return b'{"event":"event","channel":"%b","data":%b}' % (CONSOLE.encode(), _string(shown))


def _place(epoch: str | None, offset: int | None, recovered: bool | None) -> bytes:
    given = (("epoch", epoch), ("offset", offset), ("recovered", recovered))
    return _encode({name: value for name, value in given if value is not None})


def _string(json: bytes) -> bytes:
    """JSON text as a JSON string."""
    return _encode(json.decode())
