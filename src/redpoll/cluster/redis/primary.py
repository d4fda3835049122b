"""Asks a Redis server whether it is a primary that takes writes, and says what the answers mean.

A connection stays open when its server becomes a replica (behind one address whose primary changes in place), and a
replica accepts GET, SUBSCRIBE and PUBLISH: its events reach only its own subscribers. So a link asks once a second
(link.py), and a publish is confirmed only by an answer to this question that was asked after it (bus.py).

The question is a script that writes nothing but doesn't say so. Redis refuses it where it refuses writes: READONLY on a
replica, NOREPLICAS on a primary that has fewer replicas than `min-replicas-to-write`. It needs no key, so it works in
each slot of a cluster. A Redis that is full (`allow-oom`) or can't write its file still publishes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import hiredis
import structlog

from redpoll.cluster.redis.connection import Done, LinkDown

__all__ = ["CHECK", "Checked", "ServerWatch", "refusal"]

log = structlog.get_logger(__name__)

_QUESTION: Final[tuple[Any, ...]] = (b"EVAL", b"#!lua flags=allow-oom\nreturn 1", 0)
CHECK: Final = hiredis.pack_command(_QUESTION)
"""The question in RESP."""

_TOO_FEW_REPLICAS: Final = "NOREPLICAS"
# Redis counts as silent when this many looks in a row found the same question unanswered.
_SILENT_AFTER_LOOKS: Final = 2


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


class ServerWatch:
    """Whether the server of one connection takes writes, and answers at all. The link calls `look` once a second, and
    `reset` when the connection is lost. `ask(question, done)` sends the question."""

    __slots__ = ("_asked", "_looks_unanswered", "_refusal")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Nothing is known, and no question is unanswered."""
        self._refusal = ""
        self._asked = False
        self._looks_unanswered = 0

    @property
    def refusal(self) -> str:
        """Why a publish would not be confirmed; "" if nothing is known against it."""
        silent = self._looks_unanswered >= _SILENT_AFTER_LOOKS
        return self._refusal or ("Redis doesn't answer" if silent else "")

    def look(self, ask: Callable[[bytes, Done], None]) -> None:
        """Asks, or counts that the last question is unanswered."""
        if not self._asked:
            self._asked = True
            ask(CHECK, self._answered)
            return
        self._looks_unanswered += 1
        if self._looks_unanswered == _SILENT_AFTER_LOOKS:
            log.warning("redis is silent")

    def _answered(self, reply: Any) -> None:
        if isinstance(reply, LinkDown):
            return
        self._asked, self._looks_unanswered = False, 0
        before, self._refusal = self._refusal, refusal(reply)
        if self._refusal and not before:
            log.error("redis refuses writes", reason=self._refusal)
        elif before and not self._refusal:
            log.info("redis takes writes again")
