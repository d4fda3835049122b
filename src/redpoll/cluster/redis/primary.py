"""Asks a Redis server whether it is a primary that takes writes, and says what the answers mean.

A connection stays open when its server becomes a replica (behind one address whose primary changes in place), and a
replica accepts GET, SUBSCRIBE and PUBLISH: its events reach only its own subscribers. So a link asks once a second
(link.py), and a publish is confirmed only by an answer to this question that was asked after it (bus.py).

The question is a write that changes nothing. Redis refuses it where it refuses writes: READONLY on a replica,
NOREPLICAS on a primary that has fewer replicas than `min-replicas-to-write`. A Redis that is full or can't write its
file still publishes. After publishes it is DEL of a key that never exists, because a script costs Redis seven times as
much. The link's own is a script: it needs no key, so it works in each slot of a cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import hiredis
import structlog

from redpoll.cluster.redis.calls import Done, LinkDown

__all__ = ["Checked", "ServerWatch", "question_of", "refusal"]

log = structlog.get_logger(__name__)

_SCRIPT: Final[tuple[Any, ...]] = (b"EVAL", b"#!lua flags=allow-oom\nreturn 1", 0)
_LOOK: Final = hiredis.pack_command(_SCRIPT)

_TOO_FEW_REPLICAS: Final = "NOREPLICAS"
# Redis counts as silent when this many looks in a row found the same question unanswered.
_SILENT_AFTER_LOOKS: Final = 2


def question_of(nothing: bytes) -> bytes:
    """The question after publishes, in RESP. `nothing`: a key that never exists (keys.py)."""
    words: tuple[Any, ...] = (b"DEL", nothing)
    packed: bytes = hiredis.pack_command(words)
    return packed


def refusal(reply: Any) -> str:
    """Why publishes must not be confirmed, by the answer to a question; "" if nothing speaks against it. A replica's
    answer (READONLY) ends the connection before it comes here."""
    if isinstance(reply, hiredis.ReplyError):
        return str(reply) if str(reply).startswith(_TOO_FEW_REPLICAS) else ""
    return str(reply) if isinstance(reply, Exception) else ""


class Checked:
    """`done` of a question after publishes: `publishes` gets 1, or why they are not confirmed."""

    __slots__ = ("publishes",)

    def __init__(self, publishes: Any) -> None:
        self.publishes = publishes

    @property
    def over(self) -> bool:
        return bool(self.publishes.over)

    def __call__(self, reply: Any) -> None:
        self.publishes(1 if type(reply) is int or not refusal(reply) else reply)


class ServerWatch:
    """Whether the server of one connection takes writes, and answers at all. The link calls `look` once a second, and
    `reset` when the connection is lost. `ask(question, done)` sends the question. `refusal`: why a publish would not be
    confirmed; "" if nothing is known against it. `unanswered_looks`: how many in a row found the same question
    unanswered."""

    __slots__ = ("_answer", "_asked", "refusal", "unanswered_looks")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Nothing is known, and no question is unanswered."""
        self.refusal = self._answer = ""
        self._asked = False
        self.unanswered_looks = 0

    def look(self, ask: Callable[[bytes, Done], None]) -> None:
        """Asks, or counts that the last question is unanswered."""
        if not self._asked:
            self._asked = True
            ask(_LOOK, self._answered)
            return
        self.unanswered_looks += 1
        if self.unanswered_looks == _SILENT_AFTER_LOOKS:
            log.warning("redis is silent")
            self.refusal = self._answer or "Redis doesn't answer"

    def _answered(self, reply: Any) -> None:
        if isinstance(reply, LinkDown):
            return
        self._asked, self.unanswered_looks = False, 0
        before, self._answer = self._answer, refusal(reply)
        self.refusal = self._answer
        if self._answer and not before:
            log.error("redis refuses writes", reason=self._answer)
        elif before and not self._answer:
            log.info("redis takes writes again")
