"""What a reply of `hold` does to a roster. Functions of their arguments: no Redis, no sockets.

A roster's user is told to clients only when it really changes: unknown and added, known and removed. So
whatever is told twice, by a push and a reading, or by two readings, makes one frame (cluster.md 5).
"""

from collections.abc import Sequence
from typing import NamedTuple

from redpoll.cluster.membership.hold_call import HoldCall
from redpoll.protocol.presence import Roster

__all__ = ["Changes", "apply_reply", "read_again", "read_first"]


class Changes(NamedTuple):
    """Who came (with info, JSON or b"") and who went, to be told to clients in this order: removed, added.

    `ours`: users whom Redis lists in our name; `missing`: known ones whom Redis doesn't list.
    """

    added: Sequence[tuple[str, bytes]] = ()
    removed: Sequence[str] = ()
    ours: Sequence[str] = ()
    missing: Sequence[str] = ()


def apply_reply(roster: Roster, call: HoldCall, added: Sequence[int], removed: Sequence[int]) -> Changes:
    """Takes what `call` itself changed: places among its joins, and among its gone users."""
    went = [call.gone[at] for at in removed if roster.remove(call.gone[at])]
    came = [call.joins[at] for at in added if roster.add(*call.joins[at])]
    return Changes(came, went)


def read_first(flat: Sequence[bytes], name: bytes) -> tuple[Roster, Changes]:
    """A channel's first roster, from `HGETALL p`, flat. `name` is our W."""
    roster = Roster()
    ours: list[str] = []
    for user, holders, info in _entries(flat):
        roster[user] = info
        if name in holders:
            ours.append(user)
    return roster, Changes(ours=ours)


def read_again(roster: Roster, flat: Sequence[bytes], name: bytes, *, final: bool) -> Changes:
    """Compares a roster with what Redis lists: who was unknown came. Who is missing went only if `final`:
    after a break the others may not have told Redis again yet."""
    came: list[tuple[str, bytes]] = []
    ours: list[str] = []
    found: set[str] = set()
    for user, holders, info in _entries(flat):
        found.add(user)
        if user not in roster:
            came.append((user, info))
        roster[user] = info
        if name in holders:
            ours.append(user)
    missing = [user for user in roster if user not in found]
    if not final:
        return Changes(came, (), ours, missing)
    for user in missing:
        del roster[user]
    return Changes(came, missing, ours)


def _entries(flat: Sequence[bytes]) -> list[tuple[str, list[bytes], bytes]]:
    entries = []
    for user, entry in zip(flat[::2], flat[1::2], strict=True):
        holders, _, info = entry.partition(b"\n")
        entries.append((user.decode(), holders.split(b" "), info))
    return entries
