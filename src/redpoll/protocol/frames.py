"""The JSON of every frame: what clients send, decoded; what the server sends, encoded (protocol/README.md "Frames").

Not the WebSocket framing around it. Workers make published events by `redpoll._frame`, from the bytes on the bus;
`event` is the same in plain Python, for `redpoll.testing` and for the tests of `redpoll._frame`.
"""

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from redpoll.protocol.channels import CONSOLE
from redpoll.protocol.history import StoredMessage

__all__ = [
    "PING",
    "PONG",
    "HistoryRequest",
    "Message",
    "SignIn",
    "Subscribe",
    "Unsubscribe",
    "auth_required",
    "cache_miss",
    "connection_established",
    "console",
    "data_of",
    "decode_anything",
    "decode_history",
    "decode_message",
    "decode_sign_in",
    "decode_subscribe",
    "decode_unsubscribe",
    "error",
    "event",
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
    "text_of",
    "user_data",
    "watchlist_events",
]

# -- from clients -------------------------------------------------------------------------------------------

# `session` decides what a message means. For any bytes the decoders raise nothing but msgspec.DecodeError, UnicodeError
# and RecursionError, which `errors.fault_of` describes.


class Message(msgspec.Struct, gc=False):
    """One text message. `data` is decoded once the event is known; empty if it is missing."""

    event: str
    data: msgspec.Raw = msgspec.Raw()
    # Any, not str: a wrong type matters only to events that have a channel.
    channel: Any = None


class Subscribe(msgspec.Struct, gc=False):
    channel: str
    auth: str | None = None
    channel_data: str | None = None
    # Any: faults of these members have refusals of their own (history.parse_rewind).
    rewind: Any = None
    since: Any = None
    recover: Any = None


class HistoryRequest(msgspec.Struct, gc=False):
    channel: str
    limit: Any = None
    before: Any = None
    since: Any = None


class Unsubscribe(msgspec.Struct, gc=False):
    channel: str


class SignIn(msgspec.Struct, gc=False):
    auth: str
    user_data: str


decode_message = msgspec.json.Decoder(Message).decode
decode_subscribe = msgspec.json.Decoder(Subscribe).decode
decode_history = msgspec.json.Decoder(HistoryRequest).decode
decode_unsubscribe = msgspec.json.Decoder(Unsubscribe).decode
decode_sign_in = msgspec.json.Decoder(SignIn).decode
decode_anything = msgspec.json.Decoder().decode

_decode_string = msgspec.json.Decoder(str).decode
_QUOTE = 0x22


def data_of(data: msgspec.Raw) -> msgspec.Raw | str:
    """`data` of a control event: JSON, or a string that holds JSON, as some libraries send it."""
    view = memoryview(data)
    if not view:
        raise msgspec.ValidationError("Object missing required field `data`")
    return _decode_string(data) if view[0] == _QUOTE else data


def text_of(data: msgspec.Raw) -> str:
    """`data` of a client event as the string that subscribers get: a string as it is, other JSON in the sender's
    spelling, missing data as `{}`."""
    text = bytes(data)
    if not text:
        return "{}"
    return _decode_string(text) if text[0] == _QUOTE else text.decode()


# -- to clients ---------------------------------------------------------------------------------------------

# `data` is a string in every frame but `pusher:error`, where it is an object. All functions return one frame's JSON in
# UTF-8.

PING = b'{"event":"pusher:ping","data":"{}"}'
PONG = b'{"event":"pusher:pong","data":"{}"}'

_encode = msgspec.json.Encoder().encode


def connection_established(socket_id: str, activity_timeout_s: float, recover: bool = False) -> bytes:
    """The first frame on every connection. The time-out is rounded up to whole seconds and is never 0, because
    pusher-js rejects a handshake with 0. `recover` confirms that the client will get epochs and offsets."""
    timeout_s = max(1, -int(-activity_timeout_s // 1))
    # `data` is JSON in a string of JSON. A socket id has digits and a dot.
    return (
        b'{"event":"pusher:connection_established","data":"{\\"socket_id\\":\\"%b\\",\\"activity_timeout\\":%d%b}"}'
        % (
            socket_id.encode(),
            timeout_s,
            b',\\"recover\\":true' if recover else b"",
        )
    )


def error(code: int | None, message: str) -> bytes:
    """Sent in band, or just before a close with the same code. Never with code None before
    `connection_established`: pusher-js hangs then."""
    body = _encode({"code": None if code is None else int(code), "message": message})
    return b'{"event":"pusher:error","data":%b}' % body


def event(channel: str, name: str, data: str, user_id: str | None = None, offset: int | None = None) -> bytes:
    """A published event, or a client event, which has the sender's `user_id` on presence channels. `offset` is for
    clients that recover, on channels with history."""
    body: dict[str, Any] = {"event": name, "channel": channel, "data": data}
    if user_id is not None:
        body["user_id"] = user_id
    if offset is not None:
        body["offset"] = offset
    return _encode(body)


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
    """`presence` is the result of `Roster.snapshot()`; None on other channels.

    For clients that recover, on channels with history: everything that follows on the channel comes after `offset` of
    `epoch`. `recovered` answers a `since`: whether it continues there without a gap.
    """
    if epoch is None and recovered is None:
        data = b'"{}"' if presence is None else _string(presence)
    else:
        fields = _position(epoch, offset, recovered)
        data = _string(fields if presence is None else presence[:-1] + b"," + fields[1:])
    return b'{"event":"pusher_internal:subscription_succeeded","channel":%b,"data":%b}' % (
        _encode(channel),
        data,
    )


def position(channel: str, epoch: str, offset: int, recovered: bool) -> bytes:
    """A recovering client's new position in the channel, after the history was lost or cleared, or a gap could not be
    filled (`recovered` false)."""
    data = _position(epoch, offset, recovered)
    return b'{"event":"pusher:position","channel":%b,"data":%b}' % (_encode(channel), _string(data))


def history(channel: str, epoch: str, messages: Sequence[StoredMessage], next: str | None) -> bytes:
    """The answer to a `pusher:history`, oldest message first. `next` is the `since` or `before`, whichever was asked
    by, of the page that follows; None if there is none."""
    data = _encode({"epoch": epoch, "messages": messages, "next": next})
    return b'{"event":"pusher:history","channel":%b,"data":%b}' % (_encode(channel), _string(data))


def subscription_error(channel: str, type: str, error: str, status: int, **more: Any) -> bytes:
    """The frame that Laravel Echo's `.error()` listens for. `more` adds members to its data."""
    data = _encode({"type": type, "error": error, "status": status, **more})
    return b'{"event":"pusher:subscription_error","channel":%b,"data":%b}' % (_encode(channel), _string(data))


def auth_required(channel: str, socket_id: str) -> bytes:
    """The first answer to a subscribe without `auth`, for clients that ask for a signature in a second step."""
    data = _encode({"channel": channel, "socket_id": socket_id})
    return b'{"event":"auth_required","channel":%b,"data":%b}' % (_encode(channel), _string(data))


def member_added(channel: str, user_id: str, info: bytes) -> bytes:
    """`info` is JSON text; b"" is sent as `{}`, because clients need an entry for each member."""
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
    """Follows the success frame of a cache channel that has no cached event."""
    return b'{"event":"pusher:cache_miss","channel":%b,"data":"{}"}' % _encode(channel)


def subscription_count(channel: str, count: int) -> bytes:
    """The number of connections in the channel, over all workers."""
    data = b'{"subscription_count":%d}' % count
    return b'{"event":"pusher_internal:subscription_count","channel":%b,"data":%b}' % (
        _encode(channel),
        _string(data),
    )


def signin_success(user_data: str) -> bytes:
    """`user_data` is repeated as sent, a string within the string."""
    return b'{"event":"pusher:signin_success","data":%b}' % _string(_encode({"user_data": user_data}))


def user_data(user_id: str, user_info: bytes) -> str:
    """`user_data` of a user whom a grant has signed in."""
    user = {"id": user_id} | ({"user_info": msgspec.Raw(user_info)} if user_info else {})
    return _encode(user).decode()


def watchlist_events(online: Collection[str], offline: Collection[str]) -> bytes:
    """The users of a watchlist, by id, that went online and offline; a group without users is left out. pusher-js
    handles only this event name."""
    groups = (("online", online), ("offline", offline))
    data = _encode({"events": [{"name": name, "user_ids": list(ids)} for name, ids in groups if ids]})
    return b'{"event":"pusher_internal:watchlist_events","data":%b}' % _string(data)


def console(channel: str, event: str, data: str, user: str | None, skip: str | None) -> bytes:
    """An event of the app, for the dashboard's console: an ordinary event on the console's channel. `user` is the
    sender of a client event; `skip` is the socket id that doesn't get the event."""
    copy = _encode({"channel": channel, "event": event, "data": data, "user_id": user, "skip": skip})
    return b'{"event":"event","channel":"%b","data":%b}' % (CONSOLE.encode(), _string(copy))


def _position(epoch: str | None, offset: int | None, recovered: bool | None) -> bytes:
    members = (("epoch", epoch), ("offset", offset), ("recovered", recovered))
    return _encode({name: value for name, value in members if value is not None})


def _string(json: bytes) -> bytes:
    """JSON text as a JSON string."""
    return _encode(json.decode())
