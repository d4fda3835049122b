"""Slows down logins after failed ones, by client address and by user name. Counts are in memory.

Every failed login makes the next attempt wait longer before its password is checked, up to a few seconds. The first
attempts of an address with a name don't wait for those of other addresses, so that nobody elsewhere can lock out the
owner of a name by failing logins. Further ones do: this limits how often one name's password can be guessed from
several addresses.

Attempts that would have to wait for too long are refused, and those for which there is no place. Addresses that are
slowed down have places of their own, so that they don't take those of the others.
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
# Attempts of addresses that are slowed down, and of others. Each holds one of the control port's connections until its
# password is checked. One core checks about four a second (passwords.py), so the last one waits for half a minute.
_MAX_ATTEMPTS: Final = 50
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
        # Attempts of addresses that aren't known, by whether they are slowed down.
        self._strange_attempts = {True: 0, False: 0}
        self._max_attempts = max_attempts

    @asynccontextmanager
    async def attempt(self, address: str, name: str) -> AsyncIterator[float]:
        """Waits until the password of this attempt may be checked, and yields 0. Check it within.

        Yields the seconds until it is worth trying again if the attempt is refused. Refused ones aren't counted. All
        others are counted as failures before their password is checked, so that parallel attempts wait for each other.
        """
        address, name, now = network_of(address), name[:_MAX_NAME_CHARS], self._clock()
        pair, of_address, of_name = _keys(address, name)
        is_known = (address, name) in self._known
        keys = [pair]
        if not is_known:
            keys += [of_address, of_name] if self._is_slow(pair, now) else [of_address]
        attempts = [self._attempts_of(key, now) for key in keys]
        wait_s = max(0.0, *(of_key.next_at - now for of_key in attempts))
        if wait_s > MAX_WAIT_S:
            yield wait_s
            return
        # Even if there is nothing to wait for at this moment.
        is_slow = self._is_slow(pair, now) or self._is_slow(of_address, now)
        if not is_known and self._strange_attempts[is_slow] >= self._max_attempts:
            yield MAX_WAIT_S
            return
        for key, of_key in zip(keys, attempts, strict=True):
            self._count(key, of_key, now)
        self._strange_attempts[is_slow] += not is_known
        try:
            if wait_s > 0:
                await self._sleep(wait_s)
            yield 0.0
        finally:
            self._strange_attempts[is_slow] -= not is_known

    def succeeded(self, address: str, name: str) -> None:
        """Forgets the failures of this address and of this name."""
        address, name = network_of(address), name[:_MAX_NAME_CHARS]
        for key in _keys(address, name):
            self._attempts.pop(key, None)
        self._known.put((address, name), None, lambda _: False)

    def _attempts_of(self, key: tuple[str, str, str], now: float) -> _Attempts:
        attempts = self._attempts.get(key)
        return attempts if attempts is not None and now - attempts.at < _FORGOTTEN_AFTER_S else _Attempts(0, now, now)

    def _is_slow(self, key: tuple[str, str, str], now: float) -> bool:
        """Whether there are more failures than don't wait."""
        return self._attempts_of(key, now).failures >= _LIMITS[key[0]].free

    def _count(self, key: tuple[str, str, str], so_far: _Attempts, now: float) -> None:
        failures = so_far.failures + 1
        # From when this key allows the attempt, even if another key delays it: else the wait of one pair would delay
        # all others with its address or name.
        next_at = max(now, so_far.next_at) + _LIMITS[key[0]].interval_s(failures)
        self._attempts.put(key, _Attempts(failures, next_at, now), lambda old: now - old.at >= _FORGOTTEN_AFTER_S)


def _keys(address: str, name: str) -> tuple[tuple[str, str, str], ...]:
    return ("pair", address, name), ("address", address, ""), ("name", "", name)
