"""Slows down logins after failed ones, by client address and by user name. Counts are in memory.

Every failed login makes the next attempt wait longer before its password is checked, up to a few seconds. So a right
password is delayed but gets in, and nobody can lock out the owner of a name, or everybody at an address, by failing
logins. Attempts are refused only while more of them wait, or are checked, than can be checked soon.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

from redpoll.config.proxies import network_of
from redpoll.protocol.limits import BoundedTable

__all__ = ["MAX_WAIT_S", "LoginThrottle"]

# No attempt waits longer than this. One that would have to is refused.
MAX_WAIT_S: Final = 15.0
# Failures are forgotten after this time without an attempt.
_FORGOTTEN_AFTER_S: Final = 900.0
_FIRST_INTERVAL_S: Final = 0.5
_MAX_KEYS: Final = 10_000
# Each attempt that waits or is checked holds one of the control port's connections. One core checks about four a second
# (passwords.py), so the last one is checked within half a minute.
_MAX_ATTEMPTS: Final = 100
_MAX_NAME_CHARS: Final = 64


class _Limit(NamedTuple):
    """This many attempts don't wait. Then the interval between attempts doubles up to a maximum."""

    free: int
    max_interval_s: float

    def interval_s(self, attempts: int) -> float:
        beyond = attempts - self.free
        return 0.0 if beyond < 0 else min(self.max_interval_s, _FIRST_INTERVAL_S * 2.0 ** min(beyond, 16))


# One address may try many names, and many addresses may try one name.
_LIMITS: Final = {"pair": _Limit(5, 8.0), "address": _Limit(10, 4.0), "name": _Limit(30, 4.0)}


class _Attempts(NamedTuple):
    """`failures`: attempts since the last success. `next_at`: when the next one may be checked. `at`: the last one."""

    failures: int
    next_at: float
    at: float


class LoginThrottle:
    """`clock` is monotonic, in seconds; `sleep` waits for that many seconds.

    An address that has logged in to a name before waits only for its own failures with this name, so that others can't
    slow it down. Of an IPv6 address the /64 counts.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        max_keys: int = _MAX_KEYS,
        max_attempts: int = _MAX_ATTEMPTS,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        # (kind, address, name) -> attempts. The latest attempt is last.
        self._attempts: BoundedTable[tuple[str, str, str], _Attempts] = BoundedTable(max_keys)
        self._known: BoundedTable[tuple[str, str], None] = BoundedTable(max_keys // 10)
        # Of addresses that aren't known: those that wait, and those whose password is being checked.
        self._strange_attempts = 0
        self._max_attempts = max_attempts

    @asynccontextmanager
    async def attempt(self, address: str, name: str) -> AsyncIterator[float]:
        """Waits until the password of this attempt may be checked, and yields 0. Check it within.

        Yields the seconds until it is worth trying again if too many attempts wait or are checked. Those aren't
        counted. All others are counted as failures before their password is checked, so that parallel attempts wait for
        each other.
        """
        address, name, now = network_of(address), name[:_MAX_NAME_CHARS], self._clock()
        keys = _keys(address, name)
        is_known = (address, name) in self._known
        if is_known:
            keys = keys[:1]
        attempts = [self._attempts_of(key, now) for key in keys]
        starts_at = max(now, *(of_key.next_at for of_key in attempts))
        wait_s = starts_at - now
        if wait_s > MAX_WAIT_S:
            yield wait_s
            return
        if not is_known and self._strange_attempts >= self._max_attempts:
            yield MAX_WAIT_S
            return
        for key, of_key in zip(keys, attempts, strict=True):
            self._count(key, of_key.failures + 1, starts_at, now)
        self._strange_attempts += not is_known
        try:
            if wait_s > 0:
                await self._sleep(wait_s)
            yield 0.0
        finally:
            self._strange_attempts -= not is_known

    def succeeded(self, address: str, name: str) -> None:
        """Forgets the failures of this address and of this name."""
        address, name = network_of(address), name[:_MAX_NAME_CHARS]
        for key in _keys(address, name):
            self._attempts.pop(key, None)
        self._known.put((address, name), None, lambda _: False)

    def _attempts_of(self, key: tuple[str, str, str], now: float) -> _Attempts:
        attempts = self._attempts.get(key)
        return attempts if attempts is not None and now - attempts.at < _FORGOTTEN_AFTER_S else _Attempts(0, now, now)

    def _count(self, key: tuple[str, str, str], failures: int, starts_at: float, now: float) -> None:
        attempts = _Attempts(failures, starts_at + _LIMITS[key[0]].interval_s(failures), now)
        self._attempts.put(key, attempts, lambda old: now - old.at >= _FORGOTTEN_AFTER_S)


def _keys(address: str, name: str) -> list[tuple[str, str, str]]:
    return [("pair", address, name), ("address", address, ""), ("name", "", name)]
