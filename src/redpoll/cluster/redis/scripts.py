"""The Lua scripts that Redis runs: their sources, names and SHA-1 sums.

Each script's head in lua/ says what it does, and what its KEYS, ARGV and reply are. cluster/redis/README.md "Scripts"
lists them.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

__all__ = [
    "ALL",
    "BEAT",
    "BEGIN",
    "BURY",
    "CLEAR",
    "DIR_FILL",
    "DIR_PUT",
    "ENDED",
    "FENCE",
    "FENCED",
    "FORGET_NODE",
    "HISTORY",
    "HOLD",
    "HOLD_PLAIN",
    "LEAD",
    "LOCATE",
    "OCCUPIED",
    "OK",
    "OUTBOX_TAKE",
    "PUBLISH",
    "RATE",
    "REFUSED",
    "REGISTER",
    "RESERVE",
    "RESTATE",
    "RESUME_POINT",
    "SPEND",
    "STALE",
    "UNKEPT",
    "WRITE",
    "Script",
]

# The first element of the replies of hold, register, beat and publish.
OK: Final = b"OK"
FENCED: Final = b"FENCED"
"""This W was given up, or is being reaped: the worker must take its next W."""
STALE: Final = b"STALE"
"""A later connection speaks for this W."""
ENDED: Final = b"ENDED"
"""An earlier event ended the channel: publish did nothing."""
UNKEPT: Final = b"UNKEPT"
"""The event can't end the channel, because the cap keeps it from being stored: publish did nothing."""
REFUSED: Final = b"REFUSED"
"""The reply of `lead` to a node whose record store isn't that of the others."""

# Not importlib.resources, whose import takes longer than reading all scripts.
_FOLDER: Final = Path(__file__).parents[1] / "lua"


class Script:
    """One script. Calls name it by `sha` (EVALSHA); a link loads every source on each new connection."""

    __slots__ = ("name", "sha", "source")

    def __init__(self, name: str) -> None:
        self.name = name
        self.source = (_FOLDER / f"{name}.lua").read_bytes()
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest().encode()

    def command(self, keys: Sequence[bytes], args: Sequence[bytes | str | int]) -> tuple[bytes | str | int, ...]:
        """The Redis command that runs this script."""
        return (b"EVALSHA", self.sha, len(keys), *keys, *args)


REGISTER: Final = Script("register")
HOLD: Final = Script("hold")
HOLD_PLAIN: Final = Script("hold_plain")
RESERVE: Final = Script("reserve")
OCCUPIED: Final = Script("occupied")
FENCE: Final = Script("fence")
BURY: Final = Script("bury")
BEAT: Final = Script("beat")
DIR_FILL: Final = Script("dir_fill")
DIR_PUT: Final = Script("dir_put")
PUBLISH: Final = Script("publish")
SPEND: Final = Script("spend")
HISTORY: Final = Script("history")
LOCATE: Final = Script("locate")
CLEAR: Final = Script("clear")
BEGIN: Final = Script("begin")
OUTBOX_TAKE: Final = Script("outbox_take")
LEAD: Final = Script("lead")
FORGET_NODE: Final = Script("forget_node")
RATE: Final = Script("rate")
RESTATE: Final = Script("restate")
RESUME_POINT: Final = Script("resume_point")
WRITE: Final = Script("write")

ALL: Final = (
    REGISTER,
    HOLD,
    HOLD_PLAIN,
    RESERVE,
    OCCUPIED,
    FENCE,
    BURY,
    BEAT,
    DIR_FILL,
    DIR_PUT,
    PUBLISH,
    SPEND,
    HISTORY,
    LOCATE,
    BEGIN,
    CLEAR,
    OUTBOX_TAKE,
    LEAD,
    FORGET_NODE,
    RATE,
    RESTATE,
    RESUME_POINT,
    WRITE,
)
