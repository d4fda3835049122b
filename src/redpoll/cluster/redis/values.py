"""Values in Redis that several modules read: a worker's name W, and a member's entry.

The scripts in ../lua write and read the same forms.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MemberEntry", "WorkerId"]


class WorkerId(NamedTuple):
    """A worker's name `RUN.K.N`. `run` is that of its node, `process` the number of its process there. A process that
    was given up goes on under the name with the next `incarnation`."""

    run: str
    process: int
    incarnation: int

    @classmethod
    def parse(cls, w: str) -> WorkerId:
        run, process, incarnation = w.split(".")
        return cls(run, int(process), int(incarnation))

    def __str__(self) -> str:
        return f"{self.run}.{self.process}.{self.incarnation}"

    @property
    def process_name(self) -> str:
        """`RUN.K`, which stays the same."""
        return f"{self.run}.{self.process}"


class MemberEntry(NamedTuple):
    """A user's entry in a presence channel: `W W…\\n<user_info>`. `holders`: the workers that have the user, `info`:
    the user_info as JSON, b"" for none."""

    holders: list[bytes]
    info: bytes

    @classmethod
    def parse(cls, entry: bytes) -> MemberEntry:
        holders, _, info = entry.partition(b"\n")
        return cls(holders.split(), info)
