"""Signed-in users: parses a user from `user_data` (protocol/README.md "Users and watchlists")."""

from typing import Any

import msgspec

from redpoll.protocol.errors import ClientError, Code, fault_of
from redpoll.protocol.presence import Member, info_of, user_id_fault

__all__ = ["MAX_WATCHED", "OFFLINE_AFTER_S", "TERMINATED", "User", "parse_user"]

# Pusher's limit of a watchlist.
MAX_WATCHED = 100
# A user who went offline is reported after this time, so that a page reload goes unnoticed.
OFFLINE_AFTER_S = 3.0
# The text of the close of a user's connections.
TERMINATED = "the user's connections were terminated by the app"


class User(msgspec.Struct, frozen=True, gc=False):
    """A signed-in user. `member` is the user as a member of presence channels. `watchlist` has the first 100 distinct
    ids in the order given; `unwatched` counts the others."""

    member: Member
    watchlist: tuple[str, ...]
    unwatched: int


class _UserData(msgspec.Struct, gc=False):
    id: str
    user_info: Any = None
    watchlist: list[str | int] | None = None


_decode = msgspec.json.Decoder(_UserData).decode


def parse_user(user_data: str) -> User:
    """The user that `user_data` describes. Call it only after the signature was verified.

    The id must be a string, because pusher-js accepts nothing else. Raises ClientError 4009 if the data is no user.
    The size of the info is checked when the user joins a presence channel.
    """
    try:
        data = _decode(user_data)
        info = info_of(data.user_info)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as fault:
        raise ClientError(Code.UNAUTHORIZED, f"Invalid user_data: {fault_of(fault, user_data)}") from None
    id_problem = user_id_fault(data.id)
    if id_problem is not None:
        raise ClientError(Code.UNAUTHORIZED, f"Invalid user_data: id {id_problem}")
    watched = tuple(dict.fromkeys(user if type(user) is str else str(user) for user in data.watchlist or ()))
    for user_id in watched:
        id_problem = user_id_fault(user_id)
        if id_problem is not None:
            raise ClientError(Code.UNAUTHORIZED, f"Invalid user_data: a user id of the watchlist {id_problem}")
    return User(Member(data.id, info), watched[:MAX_WATCHED], max(0, len(watched) - MAX_WATCHED))
