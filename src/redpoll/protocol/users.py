"""Who signs in: the user read out of `user_data`, protocol.md 10.1 and 10.3. Knows no connection."""

from typing import Any

import msgspec

from redpoll.protocol.errors import ClientError, Code, fault_of
from redpoll.protocol.presence import Member, info_of, user_id_fault

__all__ = ["MAX_WATCHED", "User", "parse_user"]

# The documented limit of a watchlist.
MAX_WATCHED = 100


class User(msgspec.Struct, frozen=True, gc=False):
    """A signed-in user. `member` is what presence channels are told of them. `watchlist` are distinct ids in
    the order given, the first 100; `unwatched` counts those beyond."""

    member: Member
    watchlist: tuple[str, ...]
    unwatched: int


class _UserData(msgspec.Struct, gc=False):
    id: str
    user_info: Any = None
    watchlist: list[str | int] | None = None


_decode = msgspec.json.Decoder(_UserData).decode


def parse_user(user_data: str) -> User:
    """The user that `user_data` names. Called after the signature was found right.

    The id is a string: pusher-js takes no other. Raises ClientError 4009 when it is no user. How large the
    info may be is asked where it is told to others.
    """
    try:
        data = _decode(user_data)
        info = info_of(data.user_info)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as fault:
        raise ClientError(Code.UNAUTHORIZED, f"Invalid user_data: {fault_of(fault)}") from None
    wrong = user_id_fault(data.id)
    if wrong is not None:
        raise ClientError(Code.UNAUTHORIZED, f"Invalid user_data: id {wrong}")
    watched = tuple(dict.fromkeys(each if type(each) is str else str(each) for each in data.watchlist or ()))
    for user_id in watched:
        wrong = user_id_fault(user_id)
        if wrong is not None:
            raise ClientError(Code.UNAUTHORIZED, f"Invalid user_data: a user id of the watchlist {wrong}")
    return User(Member(data.id, info), watched[:MAX_WATCHED], max(0, len(watched) - MAX_WATCHED))
