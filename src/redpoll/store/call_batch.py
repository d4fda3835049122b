"""Trigger calls in batches, encoded as the event log stores them (eventlog.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

__all__ = ["MAX_TIME_DIFFERENCE_MS", "AppBatch", "CallBatch", "CallRow", "trace_time_ms"]

# The time in a trace id and the time of its call differ by at most this: clocks are set, and calls wait.
MAX_TIME_DIFFERENCE_MS: Final = 60_000
# A batch is decoded in one go, which takes about 1 ms, and other threads wait.
_MAX_CALLS: Final = 1_000
# So does a batch of calls with many channels that begins to be longer than this.
_MAX_BYTES: Final = 256 * 1024

_encode_into: Final = msgspec.json.Encoder().encode_into


class CallRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One trigger call. `time_ms` and `time_us` are the Unix time of its start in ms and µs. `name` and `channels` of a
    refused call are what could be read. `size` is the bytes of its data, `status` the HTTP status. `sampled`: it has
    spans."""

    trace_id: str
    app_id: str
    correlation_id: str | None
    time_ms: int
    name: str
    channels: Sequence[str]
    size: int
    caller: str
    status: int
    sampled: bool
    time_us: int = 0


def trace_time_ms(trace_id: str) -> int:
    """The Unix time in ms at the beginning of a trace id that we generated. For a foreign trace id the number means
    nothing, 0 if it isn't hexadecimal."""
    try:
        return int(trace_id[:12], 16)
    except ValueError:
        return 0


class AppBatch:
    """Up to _MAX_CALLS calls of one app in the order in which they ended, encoded as they will be stored.

    `marks` are the correlation ids and foreign trace ids by which calls are found; other calls are found by the time in
    their trace id.
    """

    __slots__ = ("_first_id", "_past_last_id", "count", "first_ms", "json", "last_ms", "marks")

    def __init__(self, at_ms: int) -> None:
        self.json = bytearray(b"[")
        self.count = 0
        self.first_ms = self.last_ms = at_ms
        self.marks: set[str] = set()
        # Trace ids from `_first_id` to before `_past_last_id` contain a time near this batch. Hexadecimal texts of
        # equal length sort like their numbers.
        self._first_id = f"{max(at_ms - MAX_TIME_DIFFERENCE_MS, 0):012x}"
        self._past_last_id = f"{at_ms + MAX_TIME_DIFFERENCE_MS + 1:012x}"

    def add(self, call: CallRow) -> None:
        at_ms = call.time_ms
        if at_ms > self.last_ms:
            self.last_ms = at_ms
        elif at_ms < self.first_ms:
            self.first_ms = at_ms
        self.count += 1
        _encode_into(call, self.json, -1)
        self.json += b","
        if call.correlation_id is not None:
            self.marks.add(call.correlation_id)
        if not self._first_id <= call.trace_id < self._past_last_id:
            self.marks.add(call.trace_id)

    def is_near(self, first_ms: int, last_ms: int) -> bool:
        """Whether trace ids with these times are found without a mark."""
        return self._first_id <= f"{first_ms:012x}" and f"{last_ms:012x}" < self._past_last_id

    def add_encoded(self, rows: bytes, count: int, first_ms: int, last_ms: int) -> None:
        self.first_ms = min(self.first_ms, first_ms)
        self.last_ms = max(self.last_ms, last_ms)
        self.count += count
        self.json += rows


class CallBatch:
    """Calls of any apps in the order in which they ended. `count` is their number, `size` their bytes.

    Encoding each call at once is cheaper than keeping objects: at full rate, a second's worth of objects would cost a
    publish more than everything else in the log.
    """

    __slots__ = ("_by_app", "count", "size")

    def __init__(self, calls: Iterable[CallRow] = ()) -> None:
        self.count = 0
        self.size = 0
        self._by_app: dict[str, list[AppBatch]] = {}
        for call in calls:
            self.add(call)

    def add(self, call: CallRow) -> None:
        batches = self._by_app.get(call.app_id)
        if batches is None:
            batches = self._by_app[call.app_id] = [AppBatch(call.time_ms)]
        batch = batches[-1]
        if batch.count == _MAX_CALLS or len(batch.json) >= _MAX_BYTES:
            batch = AppBatch(call.time_ms)
            batches.append(batch)
        before = len(batch.json)
        batch.add(call)
        self.count += 1
        self.size += len(batch.json) - before

    def add_encoded(self, app_id: str, rows: bytes, count: int, first_ms: int, last_ms: int) -> None:
        """Adds up to _MAX_CALLS calls of one app, encoded by `_fast_publish` as `add` encodes them, each with a comma
        after it. They have no correlation id, and trace ids with their time, which is within `first_ms` and
        `last_ms`."""
        batches = self._by_app.get(app_id)
        if batches is None:
            batches = self._by_app[app_id] = []
        if (
            not batches
            or batches[-1].count + count > _MAX_CALLS
            or len(batches[-1].json) >= _MAX_BYTES
            or not batches[-1].is_near(first_ms, last_ms)
        ):
            batches.append(AppBatch(first_ms))
        batches[-1].add_encoded(rows, count, first_ms, last_ms)
        self.count += count
        self.size += len(rows)

    def insert_before(self, before: CallBatch) -> None:
        """Inserts the calls of another batch before the ones of this batch."""
        for app_id, batches in before._by_app.items():
            self._by_app[app_id] = batches + self._by_app.get(app_id, [])
        self.count += before.count
        self.size += before.size

    def by_app(self) -> Iterator[tuple[str, AppBatch]]:
        for app_id, batches in self._by_app.items():
            for batch in batches:
                yield app_id, batch
