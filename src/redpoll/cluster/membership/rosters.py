"""What a reply of `hold` changes in a roster. Pure functions.

Clients get a frame only for a real change: an unknown user added, a known user removed. So a change that arrives twice,
by a push and a reply or by two replies, makes one frame (cluster/membership/README.md "Why snapshot and deltas agree").
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from redpoll.cluster.membership.hold_call import HoldCall
from redpoll.cluster.redis.values import MemberEntry
from redpoll.protocol.presence import Roster

__all__ = ["Changes", "apply_reply", "read_first", "reread"]


class Changes(NamedTuple):
    """What to tell clients, in this order: `removed` users, then `added` users with their infos (JSON or b"").

    `ours` are users whom Redis lists under our name. `missing` are users of the roster whom Redis doesn't list.
    """

    added: Sequence[tuple[str, bytes]] = ()
    removed: Sequence[str] = ()
    ours: Sequence[str] = ()
    missing: Sequence[str] = ()


def apply_reply(roster: Roster, call: HoldCall[Any], added: Sequence[int], removed: Sequence[int]) -> Changes:
    """Applies what `call` itself changed: `added` indexes its joins, `removed` its gone users."""
    removed_users = [call.gone[at] for at in removed if roster.remove(call.gone[at])]
    added_users = [call.joins[at] for at in added if roster.add(*call.joins[at])]
    return Changes(added_users, removed_users)


def read_first(flat: Sequence[bytes], w: bytes) -> tuple[Roster, Changes]:
    """The first roster of a channel, from the flat HGETALL of its members. `w` is our name."""
    roster = Roster()
    ours: list[str] = []
    for user, holders, info in _entries(flat):
        roster[user] = info
        if w in holders:
            ours.append(user)
    return roster, Changes(ours=ours)


def reread(roster: Roster, flat: Sequence[bytes], w: bytes, *, final: bool) -> Changes:
    """Compares a roster with what Redis lists. Unknown users are added. Missing users are removed only if `final`:
    after a break, other workers may not have written them to Redis yet."""
    added: list[tuple[str, bytes]] = []
    ours: list[str] = []
    listed: set[str] = set()
    for user, holders, info in _entries(flat):
        listed.add(user)
        if user not in roster:
            added.append((user, info))
        roster[user] = info
        if w in holders:
            ours.append(user)
    missing = [user for user in roster if user not in listed]
    if not final:
        return Changes(added, (), ours, missing)
    for user in missing:
        del roster[user]
    return Changes(added, missing, ours)


def _entries(flat: Sequence[bytes]) -> list[tuple[str, list[bytes], bytes]]:
    return [(user.decode(), *MemberEntry.parse(entry)) for user, entry in zip(flat[::2], flat[1::2], strict=True)]
