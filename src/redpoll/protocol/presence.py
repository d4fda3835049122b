"""Members of presence channels: parses a member from `channel_data`, and holds a channel's member list.

How many connections a member has is counted elsewhere. The rules: protocol/README.md "Presence".
"""

from typing import Any

import msgspec

from redpoll.protocol.apps import App
from redpoll.protocol.errors import ClientError, fault_of

__all__ = ["MAX_USER_ID_CHARS", "Member", "Roster", "info_fault", "info_of", "parse_member", "user_id_fault"]

# Pusher's limit. Its other two, 100 members and 1 KB of info, are settings of the app.
MAX_USER_ID_CHARS = 128


class Member(msgspec.Struct, frozen=True, gc=False):
    """A user of a presence channel. `user_info` is compact JSON; b"" if it was absent, null or {}."""

    user_id: str
    user_info: bytes


class _ChannelData(msgspec.Struct, gc=False):
    user_id: int | str
    user_info: Any = None


_decode = msgspec.json.Decoder(_ChannelData).decode
_encode = msgspec.json.Encoder().encode


def parse_member(channel_data: str, app: App) -> Member:
    """The member that `channel_data` describes; a numeric id becomes a string here.

    Call it only after the signature was verified: unsigned input must not reach this parser. Raises ClientError with
    code None if the data is no member or exceeds the app's limits. The info is decoded and encoded again, because it
    is copied into frames for all members and must be valid JSON.
    """
    try:
        data = _decode(channel_data)
        info = info_of(data.user_info)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as fault:
        raise ClientError(None, f"Invalid channel_data: {fault_of(fault, channel_data)}") from None
    user_id = data.user_id if type(data.user_id) is str else str(data.user_id)
    id_problem = user_id_fault(user_id)
    if id_problem is not None:
        raise ClientError(None, f"Invalid channel_data: user_id {id_problem}")
    info_problem = info_fault(info, app)
    if info_problem is not None:
        raise ClientError(None, f"Invalid channel_data: {info_problem}")
    return Member(user_id, info)


def info_of(user_info: Any) -> bytes:
    """A decoded `user_info` as `Member.user_info`."""
    return b"" if user_info is None or user_info == {} else _encode(user_info)


def user_id_fault(user_id: str) -> str | None:
    """What is wrong with an id, such as "is empty"; None if nothing."""
    if not user_id:
        return "is empty"
    if len(user_id) > MAX_USER_ID_CHARS:
        return f"is longer than {MAX_USER_ID_CHARS} characters"
    return None


def info_fault(info: bytes, app: App) -> str | None:
    """Why this info is too large for the app's presence channels; None if it isn't."""
    if len(info) <= app.max_user_info_bytes:
        return None
    return f"user_info has {len(info)} bytes, the app allows {app.max_user_info_bytes}"


class Roster(dict[str, bytes]):
    """The members of one presence channel, in the order in which they joined: user id → info (JSON, b"" for none)."""

    __slots__ = ()

    def add(self, user: str, info: bytes) -> bool:
        """True if the user is new. Of several infos of one user, the latest that isn't empty is used."""
        known = self.get(user)
        if known is None:
            self[user] = info
            return True
        if info:
            self[user] = info
        return False

    def remove(self, user: str) -> bool:
        """False if the user was no member."""
        return self.pop(user, None) is not None

    def snapshot(self) -> bytes:
        """`data` of a presence channel's success frame: `{"presence":{count,ids,hash}}`."""
        raw = msgspec.Raw
        infos = {user: raw(info or b"{}") for user, info in self.items()}
        return _encode({"presence": {"count": len(self), "ids": list(self), "hash": infos}})
