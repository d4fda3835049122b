"""The server's rules for names and sizes, checked before anything is sent. Each check raises ValueError.

The rules are Pusher's: `channel_name`, `socket_id` and user ids as its server libraries check them, and redpoll's
(protocol/README.md "Channel names" and "Publishing") where these are wider.
"""

from __future__ import annotations

import re

__all__ = [
    "MAX_BATCH",
    "MAX_BODY_BYTES",
    "MAX_CHANNELS",
    "MAX_DATA_BYTES",
    "MAX_NAME_CHARS",
    "USER_CHANNEL",
    "check_app_id",
    "check_channel",
    "check_correlation_id",
    "check_data",
    "check_event",
    "check_signed_in_id",
    "check_socket_id",
    "check_target",
    "check_user_id",
    "is_encrypted",
    "needs_signature",
]

MAX_NAME_CHARS = 200
MAX_CHANNELS = 100
MAX_BATCH = 10
# Pusher's limit of an event's data, and redpoll's default. Servers may allow more.
MAX_DATA_BYTES = 10_240
# The whole body of a request.
MAX_BODY_BYTES = 1024 * 1024
USER_CHANNEL = "#server-to-user-"

_CHANNEL = re.compile(r"[-a-zA-Z0-9_=@,.;]+").fullmatch
_SOCKET_ID = re.compile(r"[0-9]+\.[0-9]+").fullmatch
_APP_ID = re.compile(r"[-a-zA-Z0-9_.]{1,64}").fullmatch
_PRINTABLE_ASCII = re.compile(r"[ -~]{1,128}").fullmatch
_RESERVED = ("pusher:", "pusher_internal:", "svc:")


def _quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"


def check_channel(name: str) -> str:
    """The name of a channel that clients subscribe to: 1 to 200 of letters, digits and `_-=@,.;`."""
    if not isinstance(name, str) or len(name) > MAX_NAME_CHARS or _CHANNEL(name) is None:
        raise ValueError(
            f"channel name {_quoted(name)}: 1 to {MAX_NAME_CHARS} of letters, digits and _-=@,.; are allowed"
        )
    return name


def check_target(name: str) -> str:
    """The name of a channel to publish to: as `check_channel`, or `#server-to-user-ID`."""
    if isinstance(name, str) and name.startswith(USER_CHANNEL):
        check_user_id(name.removeprefix(USER_CHANNEL))
        return name
    return check_channel(name)


def check_user_id(user_id: str) -> str:
    """A user's id in a channel name: 1 to 128 characters of those that channel names allow."""
    if not isinstance(user_id, str) or len(user_id) > 128 or _CHANNEL(user_id) is None:
        raise ValueError(f"user id {_quoted(user_id)}: a string of 1 to 128 letters, digits and _-=@,.; is allowed")
    return user_id


def check_signed_in_id(user_id: object) -> str:
    """The id with which a user signs in: 1 to 128 characters."""
    if not isinstance(user_id, str) or not 1 <= len(user_id) <= 128:
        raise ValueError(f"the user's id must be a string of 1 to 128 characters, not {_quoted(user_id)}")
    return user_id


def check_event(name: str) -> str:
    """An event's name: 1 to 200 characters, none of the server's own prefixes."""
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_CHARS:
        raise ValueError(f"event name {_quoted(name)}: a string of 1 to {MAX_NAME_CHARS} characters is allowed")
    if name.startswith(_RESERVED):
        raise ValueError(f"event name {_quoted(name)} begins with a prefix that is reserved for the server")
    return name


def check_data(data: str, max_bytes: int) -> str:
    """An event's data, as the string that is sent: at most `max_bytes` of UTF-8."""
    size = len(data) if data.isascii() else len(data.encode())
    if size > max_bytes:
        raise ValueError(f"the event's data has {size} bytes; at most {max_bytes} are allowed (max_data_bytes)")
    return data


def check_socket_id(socket_id: str) -> str:
    """A connection's id: digits, one dot, digits."""
    if not isinstance(socket_id, str) or len(socket_id) > 64 or _SOCKET_ID(socket_id) is None:
        raise ValueError(f"socket_id {_quoted(socket_id)} is not like 123.456")
    return socket_id


def check_app_id(app_id: str) -> str:
    """An app's id: 1 to 64 of letters, digits and `_-.`; Pusher's have digits only."""
    if not isinstance(app_id, str) or _APP_ID(app_id) is None or set(app_id) == {"."}:
        raise ValueError(f"app_id {_quoted(app_id)}: a string of 1 to 64 letters, digits and _-. is allowed")
    return app_id


def check_correlation_id(value: str) -> str:
    """A publish's id: 1 to 128 printable ASCII characters."""
    if not isinstance(value, str) or _PRINTABLE_ASCII(value) is None:
        raise ValueError(f"correlation_id {_quoted(value)}: 1 to 128 printable ASCII characters are allowed")
    return value


def needs_signature(channel: str) -> bool:
    """Whether a subscription to this channel must be signed: private and presence channels, by their prefix."""
    return channel.startswith(("private-", "presence-"))


def is_encrypted(channel: str) -> bool:
    """Whether this is an encrypted channel."""
    return channel.startswith("private-encrypted-")
