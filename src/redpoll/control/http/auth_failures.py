"""Limits failed authentications by client address. Counts are in this process' memory.

An address has a bucket that holds a minute's worth of failures and refills steadily. While it is empty, requests that
fail are answered 429 instead of 401, without an explanation, and signatures are checked in the usual layout only, which
takes a few us in C; the other layouts of protocol/README.md "Request signing" take up to 0.3 ms.

A right credential is accepted all the same, because many clients may share an address: one of them, with an old secret
or malicious, must not lock out the others. That makes guessing no easier: anyone who sees one signed subscription can
try secrets on it without this server (protocol/README.md "Request signing").
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

import structlog

from redpoll.config.proxies import network_of
from redpoll.control.http.ratelimit import WINDOW_S
from redpoll.protocol.limits import BoundedTable, Rate

__all__ = ["AuthFailures"]

log = structlog.get_logger(__name__)

# 100,000 addresses take about 12 MB. A limit per address doesn't stop a client with that many addresses anyway.
_MAX_ADDRESSES: Final = 100_000


class AuthFailures:
    """Counts failures by address, or by network for IPv6. `per_minute` is also what a full bucket holds.

    `limited_total` counts the requests that were answered 429. `clock()` returns monotonic seconds.
    """

    def __init__(
        self, per_minute: int, *, clock: Callable[[], float] = time.monotonic, max_addresses: int = _MAX_ADDRESSES
    ) -> None:
        self.per_minute = per_minute
        self.limited_total = 0
        self.clock = clock
        self._rate = Rate(per_minute / WINDOW_S, per_minute)
        # By address: when its bucket will be full again, and when it was logged. The latest failure is last, so the
        # first are nearly those that are full first.
        self._buckets: BoundedTable[str, tuple[float, float]] = BoundedTable(max_addresses)

    def __len__(self) -> int:
        """The number of addresses in memory."""
        return len(self._buckets)

    def wait_s(self, address: str) -> int:
        """Whole seconds until the address may fail again, at least 1; 0 if it may now."""
        bucket = self._buckets.get(network_of(address)) if self._buckets else None
        return 0 if bucket is None else math.ceil(self._rate.wait_s(bucket[0], self.clock()))

    def count(self, address: str) -> None:
        """Takes one failure from the bucket of an address. Logs an empty bucket, at most once a minute."""
        network, now = network_of(address), self.clock()
        full_at, logged_at = self._buckets.get(network, (-math.inf, -math.inf))
        full_at = self._rate.charged(full_at, now)
        if self._rate.wait_s(full_at, now) and now - logged_at >= WINDOW_S:
            logged_at = now
            log.warning("authentication failures limited", address=network, per_minute=self.per_minute)
        self._buckets.put(network, (full_at, logged_at), lambda old: old[0] <= now)
