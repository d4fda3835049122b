"""Which worker has a session: one key in Redis for each.

A client chooses its session's name, so the name can't say where the session is. The entry of a session that ended stays
for a minute, so that nobody opens it again. An entry of a dead worker is harmless: messages to it reach nobody, which
its sender learns (cluster/mailbox.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link

__all__ = ["ENDED", "RENEW_S", "Claims", "SessionName"]

_LIFETIME_S: Final = 3600
# Before half of its lifetime is over.
RENEW_S: Final = 1500.0
_REMEMBERED_S: Final = 60
ENDED: Final = "-"


class SessionName(NamedTuple):
    """A session belongs to the key it was opened with: with another key it isn't found."""

    key: str
    session: str


class Claims:
    """`own` is this worker's RUN.K. `done(owner)` is called later: RUN.K of the worker that has the session, ENDED, ""
    for none; None if Redis didn't answer."""

    def __init__(self, link: Link, keys: Keys, own: str) -> None:
        self._link = link
        self._keys = keys
        self.own = own

    def claim(self, name: SessionName, done: Callable[[str | None], None]) -> None:
        """Take the session unless it is another's; "" means that it is ours from now on."""
        key = self._keys.fallback(*name)
        self._link.call(b"SET", key, self.own, b"NX", b"GET", b"EX", _LIFETIME_S, done=_reader(done))

    def find(self, name: SessionName, done: Callable[[str | None], None]) -> None:
        self._link.call(b"GET", self._keys.fallback(*name), done=_reader(done))

    def renew(self, name: SessionName, done: Callable[[str | None], None]) -> None:
        """Keep a session of ours. Also writes what Redis has lost: `done("")`. ENDED: another worker has marked it, see
        `end`."""
        self.claim(name, done)
        self._link.call(b"EXPIRE", self._keys.fallback(*name), _LIFETIME_S)

    def end(self, name: SessionName, done: Callable[[str | None], None]) -> None:
        """Mark a session of another worker as ended, if Redis knows it. `done` gets the worker, which learns of it when
        it renews the session."""
        self._link.call(
            b"SET", self._keys.fallback(*name), ENDED, b"XX", b"GET", b"EX", _LIFETIME_S, done=_reader(done)
        )

    def give_up(self, name: SessionName) -> None:
        """The session was claimed, and never began: nothing is left to remember."""
        self._link.call(b"DEL", self._keys.fallback(*name))

    def release(self, name: SessionName) -> None:
        """The session has ended."""
        self._link.call(b"SET", self._keys.fallback(*name), ENDED, b"EX", _REMEMBERED_S)


def _reader(done: Callable[[str | None], None]) -> Callable[[Any], None]:
    def read(reply: Any) -> None:
        if isinstance(reply, Exception):
            done(None)
        else:
            done("" if reply is None else reply.decode())

    return read
