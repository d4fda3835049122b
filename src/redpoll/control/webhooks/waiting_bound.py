"""Bounds the deliveries that wait for an endpoint, so that clients can't fill the record store.

A client causes deliveries without end by subscribing to new channels, and an endpoint that doesn't answer takes none.
Beyond the bound, new deliveries are dropped: counted, logged, and shown with the endpoint. Those of public channels, to
which everybody may subscribe, are dropped from half of the bound on, so that they don't take the places of others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import structlog

from redpoll.protocol.channels import Kind, kind_of
from redpoll.store.deliveries import Depth

__all__ = ["WaitingBound"]

log = structlog.get_logger(__name__)

# A delivery's share of the bound in bytes: bodies larger than that on average fill it sooner.
_BYTES_EACH: Final = 1_024
_LOG_EVERY_S: Final = 60.0
_COUNT_EVERY_S: Final = 1.0


class WaitingBound:
    """At most `limit` deliveries of each endpoint wait, with bodies of at most 1 KiB on average.

    The tidying counts what waits and calls `look`; until the next time, `wrote` adds what intake has written, and
    `left` subtracts what was sent, acknowledged or failed here. What other nodes acknowledged and what an operator
    discarded isn't known here, so before intake drops something, it counts the endpoints of `to_count` again, and calls
    `counted`. `dropped_total` counts the dropped ones since the start. `steady()` returns monotonic seconds.
    """

    def __init__(self, limit: int, steady: Callable[[], float] = time.monotonic) -> None:
        self.dropped_total = 0
        self._limit = limit
        self._steady = steady
        # By endpoint id: how many wait, and the bytes of their bodies.
        self._waiting: dict[str, tuple[int, int]] = {}
        self._logged_at: dict[str, float] = {}
        # When endpoints were counted before a drop.
        self._counted_at: dict[str, float] = {}

    @property
    def sum_from(self) -> int:
        """For this many deliveries, `look` needs the size of their bodies. Fewer can't fill the bound: a body isn't a
        hundred times as large as its share."""
        return self._limit // 100

    def look(self, depths: Mapping[str, Depth]) -> None:
        """Takes what the store has."""
        self._waiting = {endpoint_id: (depth.waiting, depth.waiting_bytes) for endpoint_id, depth in depths.items()}
        self._counted_at.clear()
        now = self._steady()
        self._logged_at = {which: at for which, at in self._logged_at.items() if now - at < _LOG_EVERY_S}

    def divide(self, deliveries: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Those of the deliveries that fit, in their order, and the others."""
        waiting = dict(self._waiting)
        fitting, others = [], []
        for delivery in deliveries:
            endpoint_id = delivery["endpoint_id"]
            count, size = waiting.get(endpoint_id, (0, 0))
            limit = self._limit // 2 if kind_of(delivery["channel"]) is Kind.PUBLIC else self._limit
            if count >= limit or size >= limit * _BYTES_EACH:
                others.append(delivery)
            else:
                fitting.append(delivery)
                waiting[endpoint_id] = count + 1, size + len(delivery["body"])
        return fitting, others

    def to_count(self, dropped: Sequence[dict[str, Any]]) -> list[str]:
        """The endpoints of these deliveries, which don't fit, without those that were counted within the last second:
        to count a hundred thousand takes time."""
        now = self._steady()
        ids = dict.fromkeys(delivery["endpoint_id"] for delivery in dropped)
        return [one for one in ids if now - self._counted_at.get(one, -_COUNT_EVERY_S) >= _COUNT_EVERY_S]

    def counted(self, endpoint_ids: Sequence[str], depths: Mapping[str, Depth]) -> None:
        """Takes what the store has of these endpoints."""
        now = self._steady()
        for endpoint_id in endpoint_ids:
            depth = depths.get(endpoint_id)
            self._waiting[endpoint_id] = (0, 0) if depth is None else (depth.waiting, depth.waiting_bytes)
            self._counted_at[endpoint_id] = now

    def left(self, endpoint_id: str, size: int) -> None:
        """A delivery with a body of this size waits no longer."""
        count, total = self._waiting.get(endpoint_id, (0, 0))
        # The tidying may have counted before it was written.
        self._waiting[endpoint_id] = max(0, count - 1), max(0, total - size)

    def wrote(self, written: Sequence[tuple[str, int]], dropped: Mapping[str, int]) -> None:
        """These were committed: endpoints and sizes of bodies of new deliveries, and how many were dropped by
        endpoint."""
        for endpoint_id, size in written:
            count, total = self._waiting.get(endpoint_id, (0, 0))
            self._waiting[endpoint_id] = count + 1, total + size
        for endpoint_id, number in dropped.items():
            self.dropped_total += number
            now = self._steady()
            if now - self._logged_at.get(endpoint_id, -_LOG_EVERY_S) >= _LOG_EVERY_S:
                self._logged_at[endpoint_id] = now
                log.warning("webhook deliveries dropped, too many wait", endpoint=endpoint_id, limit=self._limit)
