"""The Lua scripts: read from the package, named by their SHA-1, called through a link.

What a script does, and what each KEYS and ARGV of it is, stands at its head in lua/.
"""

import hashlib
from collections.abc import Sequence
from importlib import resources
from typing import Final

__all__ = [
    "ALL",
    "BEAT",
    "BURY",
    "CLEAR",
    "DIR_PUT",
    "DRAIN",
    "FENCE",
    "HISTORY",
    "HOLD",
    "LOCATE",
    "PUBLISH",
    "REGISTER",
    "SPEND",
    "Script",
]


class Script:
    """One script. `EVALSHA` by `sha`; a link loads the sources on every new connection."""

    __slots__ = ("name", "sha", "source")

    def __init__(self, name: str) -> None:
        self.name = name
        self.source = resources.files("redpoll.cluster").joinpath(f"lua/{name}.lua").read_bytes()
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest().encode()

    def command(self, keys: Sequence[bytes], args: Sequence[bytes | str | int]) -> tuple[bytes | str | int, ...]:
        """The command that runs this script, for `Link.run` and for pipelines."""
        return (b"EVALSHA", self.sha, len(keys), *keys, *args)


REGISTER: Final = Script("register")
HOLD: Final = Script("hold")
FENCE: Final = Script("fence")
BURY: Final = Script("bury")
BEAT: Final = Script("beat")
DIR_PUT: Final = Script("dir_put")
PUBLISH: Final = Script("publish")
SPEND: Final = Script("spend")
HISTORY: Final = Script("history")
LOCATE: Final = Script("locate")
CLEAR: Final = Script("clear")
DRAIN: Final = Script("drain")

ALL: Final = (REGISTER, HOLD, FENCE, BURY, BEAT, DIR_PUT, PUBLISH, SPEND, HISTORY, LOCATE, CLEAR, DRAIN)
