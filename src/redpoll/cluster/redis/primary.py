"""Asks a Redis server whether it is a primary that takes writes, and says what the answers mean.

A connection stays open when its server becomes a replica (behind one address whose primary changes in place), and a
replica accepts GET, SUBSCRIBE and PUBLISH: its events reach only its own subscribers. So a link asks once a second
(link.py), and a publish is confirmed only by an answer to this question that was asked after it (bus.py).

The question is a script that writes nothing but doesn't say so. Redis refuses it where it refuses writes: READONLY on a
replica, NOREPLICAS on a primary that has fewer replicas than `min-replicas-to-write`. It needs no key, so it works in
each slot of a cluster. A Redis that is full (`allow-oom`) or can't write its file still publishes.
"""

from __future__ import annotations

from typing import Any, Final

import hiredis

__all__ = ["CHECK", "Checked", "refusal"]

_QUESTION: Final[tuple[Any, ...]] = (b"EVAL", b"#!lua flags=allow-oom\nreturn 1", 0)
CHECK: Final = hiredis.pack_command(_QUESTION)
"""The question in RESP."""

_TOO_FEW_REPLICAS: Final = "NOREPLICAS"


def refusal(reply: Any) -> str:
    """Why publishes must not be confirmed, by an answer to CHECK; "" if nothing speaks against it. A replica's answer
    (READONLY) ends the connection before it comes here."""
    if isinstance(reply, hiredis.ReplyError):
        return str(reply) if str(reply).startswith(_TOO_FEW_REPLICAS) else ""
    return str(reply) if isinstance(reply, Exception) else ""


class Checked:
    """`done` of a CHECK after publishes: `publishes` gets 1, or why they are not confirmed."""

    __slots__ = ("publishes",)

    def __init__(self, publishes: Any) -> None:
        self.publishes = publishes

    @property
    def over(self) -> bool:
        return bool(self.publishes.over)

    def __call__(self, reply: Any) -> None:
        self.publishes(reply if refusal(reply) else 1)
