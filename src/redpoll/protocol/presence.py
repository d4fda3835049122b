"""Members of presence channels: one read out of `channel_data`, and the roster of a channel, protocol.md 6.

Knows neither sockets nor workers: how many connections a user has is counted by those who hold them.
"""

from typing import Any

import msgspec

from redpoll.protocol.apps import App
from redpoll.protocol.errors import ClientError, fault_of

__all__ = ["MAX_USER_ID_CHARS", "Member", "Roster", "info_fault", "info_of", "parse_member", "user_id_fault"]

# Documented by Pusher beside the 100 members and the 1 KB of info, which are the app's settings.
MAX_USER_ID_CHARS = 128


class Member(msgspec.Struct, frozen=True, gc=False):
    """A user of a presence channel. `user_info` is compact JSON; b"" where it was absent, null or {}."""

    user_id: str
    user_info: bytes


class _ChannelData(msgspec.Struct, gc=False):
    user_id: int | str
    user_info: Any = None


_decode = msgspec.json.Decoder(_ChannelData).decode
_encode = msgspec.json.Encoder().encode


def parse_member(channel_data: str, app: App) -> Member:
    """The member that `channel_data` names; numbers become strings here, once (protocol.md 6).

    Called after the signature was found right: nothing unsigned reaches this parser. Raises ClientError with
    code None when the data is no member or exceeds the app's limits. The info is decoded and encoded anew: it
    is pasted into frames for all members, so it must be JSON by our own word.
    """
    try:
        data = _decode(channel_data)
        info = info_of(data.user_info)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as fault:
        raise ClientError(None, f"Invalid channel_data: {fault_of(fault)}") from None
    user_id = data.user_id if type(data.user_id) is str else str(data.user_id)
    wrong = user_id_fault(user_id)
    if wrong is not None:
        raise ClientError(None, f"Invalid channel_data: user_id {wrong}")
    wrong = info_fault(info, app)
    if wrong is not None:
        raise ClientError(None, f"Invalid channel_data: {wrong}")
    return Member(user_id, info)


def info_of(user_info: Any) -> bytes:
    """A decoded `user_info` as `Member` keeps it."""
    return b"" if user_info is None or user_info == {} else _encode(user_info)


def user_id_fault(user_id: str) -> str | None:
    """What is wrong with an id, to stand behind the word for it; None if nothing."""
    if not user_id:
        return "is empty"
    if len(user_id) > MAX_USER_ID_CHARS:
        return f"is longer than {MAX_USER_ID_CHARS} characters"
    return None


def info_fault(info: bytes, app: App) -> str | None:
    """Why a `Member`'s info can't be shown in this app's presence channels; None when it can."""
    if len(info) <= app.max_user_info_bytes:
        return None
    return f"user_info has {len(info)} bytes, the app allows {app.max_user_info_bytes}"


class Roster(dict[str, bytes]):
    """Who is in one presence channel, in the order of arrival: user id -> info (JSON, b"" for none)."""

    __slots__ = ()

    def add(self, user: str, info: bytes) -> bool:
        """True when the user wasn't there. Of several infos of one user the latest non-empty one stands."""
        known = self.get(user)
        if known is None:
            self[user] = info
            return True
        if info:
            self[user] = info
        return False

    def remove(self, user: str) -> bool:
        """False when the user wasn't there."""
        return self.pop(user, None) is not None

    def snapshot(self) -> bytes:
        """The text of `data` in a presence channel's success frame: `{"presence":{count,ids,hash}}` (5.4)."""
        raw = msgspec.Raw
        infos = {user: raw(info or b"{}") for user, info in self.items()}
        return _encode({"presence": {"count": len(self), "ids": list(self), "hash": infos}})
