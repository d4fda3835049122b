"""Collects the event log: one row per trigger call, and the spans of the calls that are traced.

The middleware reports each call that ended, the API its stages, and workers send their spans through a stream in Redis.
A call costs one note in memory; once a second all notes are written in one transaction. The tracer also decides which
calls are traced. Only those carry their trace id to the workers (control/tracing/README.md "Event log and trace").
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Final, NamedTuple

import hiredis
import msgspec
import structlog
from msgspec import structs
from sqlalchemy.exc import SQLAlchemyError

from redpoll.cluster.redis.link import LinkDown
from redpoll.cluster.traces import Batch, Entry, TraceReader
from redpoll.control.http.request import Request
from redpoll.control.tracing.latency import PublishLatency
from redpoll.control.tracing.spans import TRACE_ID_CHARS, Spans, trace_id_of
from redpoll.store.call_batch import CallBatch, CallRow
from redpoll.store.eventlog import EventLog, SpanRow
from redpoll.store.sqlite import reason_of

__all__ = ["Tracer", "call_row", "describe_call"]

log = structlog.get_logger(__name__)

FLUSH_EVERY_S: Final = 1.0
# A flush ends before the next one is due.
_READ_WITHIN_S: Final = FLUSH_EVERY_S
PRUNE_EVERY_S: Final = 10.0
RENEW_EVERY_S: Final = 10.0
# Rows that may wait while the disk doesn't keep up, five seconds at full rate, and their bytes.
_MAX_WAITING: Final = 100_000
_MAX_WAITING_BYTES: Final = 64 * 1024 * 1024
# Traced calls whose number is known: two minutes at full rate, and longer than a worker's spans take.
_MAX_CARRIED: Final = 12_000
# Entries of the workers' stream that one flush stores. Those of 25 busy workers are twice as few.
_MAX_ENTRIES: Final = 256
# Limits on what is logged of a refused call. Accepted calls are within the limits of their app.
_MAX_CHANNELS: Final = 100
_MAX_CHARS: Final = 200


class _Carried(NamedTuple):
    """What the number in a traced call's events stands for: its trace id, which may be followed by the id of a span
    (spans.py), and the Unix time of its start in µs, which tells it from others with its trace id."""

    text: str
    began_us: int


class Tracer:
    """`spans_per_s`: at most this many calls per second are traced; the others have a row but no spans.

    `spans`: None unless OpenTelemetry is on. `clock()` returns Unix seconds, `timer()` those of the clock of
    `Request.began`.
    `unlogged` counts calls whose row was lost, `sampled_out` calls without spans.
    `latency` has the times of the traced ones.
    `spans_left`: how many more calls are traced until the next flush.
    """

    def __init__(
        self,
        event_log: EventLog,
        reader: TraceReader,
        spans_per_s: int,
        *,
        spans: Spans | None = None,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.unlogged = 0
        self.sampled_out = 0
        self.latency = PublishLatency()
        self._log = event_log
        self._reader = reader
        self._otel = spans
        self._per_flush = max(1, round(spans_per_s * FLUSH_EVERY_S)) if spans_per_s else 0
        self.spans_left = self._per_flush
        self._clock = clock
        self._timer = timer
        self._ended = CallBatch()
        self._spans: list[SpanRow] = []
        # The traced calls of the last minutes, by the number that their events carry.
        self._carried: OrderedDict[str, _Carried] = OrderedDict()
        self._numbers = count(random.getrandbits(48))
        self._position = ""
        self._check_position = False
        self._renew_at_s = 0.0
        self._running: list[asyncio.Task[None]] = []
        self._ending = asyncio.Event()
        self._flushing = asyncio.Lock()

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._running = [
            loop.create_task(self._run(), name="event log"),
            # A pruning may take long, and rows would wait for it.
            loop.create_task(self._prune(), name="event log pruning"),
        ]

    def link_up(self) -> None:
        """Redis is connected: from now on the workers of all nodes may send spans of this node's calls."""
        self._renew_at_s = self._timer() + RENEW_EVERY_S
        self._reader.renew()
        # The stream may be a new one.
        self._check_position = True

    async def finish(self) -> None:
        """Writes the remaining rows. It doesn't close the log."""
        self._ending.set()
        await asyncio.gather(*self._running)

    # -- called by the middleware, the API and the webhooks

    def sample(self, request: Request) -> str | None:
        """The text with which this call's events are published: this node's run, and a number that stands for the call.
        None if the call isn't traced.

        Call it once per call, just before it publishes.
        """
        otel = self._otel
        if self.spans_left > 0:
            self.spans_left -= 1
        elif otel is None or not otel.follows(request):
            self.sampled_out += 1
            return None
        request.sampled = True
        request.call = None
        now_us = int(self._clock() * 1_000_000)
        request.began_us = now_us - self._elapsed_us(request)
        self._span(request.trace_id, request.app.id, "authenticated", now_us, request.began_us)
        number = f"{next(self._numbers):x}"
        text = request.trace_id if otel is None else otel.begin(request, now_us)
        self._carried[number] = _Carried(text, request.began_us)
        if len(self._carried) > _MAX_CARRIED:
            self._carried.popitem(last=False)
        return self._reader.run + number

    def accepted(self, request: Request) -> None:
        """Redis confirmed the events of a traced call."""
        now_us = self._of_call_us(request)
        self._span(request.trace_id, request.app.id, "accepted", now_us, request.began_us)
        if self._otel is not None:
            self._otel.accepted(request, now_us)

    def _of_call_us(self, request: Request) -> int:
        """The Unix time in µs on the clock of this call: `began_us`, and what the timer of `began` says since then. So
        a change of the wall clock during the call can't put its stages out of order."""
        return request.began_us + self._elapsed_us(request)

    def _elapsed_us(self, request: Request) -> int:
        return int((self._timer() - request.began) * 1_000_000)

    def span(self, trace_id: str, app_id: str, stage: str, **detail: Any) -> None:
        """Records that a traced client event reached this stage now."""
        self._span(trace_id, app_id, stage, int(self._clock() * 1_000_000), **detail)

    def _span(self, trace_id: str, app_id: str, stage: str, now_us: int, call_us: int = 0, **detail: Any) -> None:
        if len(self._spans) < _MAX_WAITING:
            self._spans.append(SpanRow(trace_id, app_id, now_us // 1000, stage, detail, now_us, call_us))

    def ended(self, request: Request, status: int, took_s: float, caller: str = "") -> None:
        """Records a trigger call that was answered after `took_s` seconds. Its app must be known.

        `caller` is given if the caller used no key or token of the app.
        """
        if self._is_full():
            self.unlogged += 1
            return
        call = request.decoded
        if call is None:
            name, channels, size, correlation_id = describe_call(request.body)
        else:
            (name, channels, size), correlation_id = call.describe(), call.correlation_id
        token = request.token
        credential = caller or (f"key {request.found_key or request.key}" if token is None else f"token {token.name}")
        began_us = request.began_us if request.sampled else int((self._clock() - took_s) * 1_000_000)
        if request.sampled:
            self.latency.began((request.trace_id, began_us), began_us, "http")
            if self._otel is not None:
                self._otel.ended(request, status, began_us, began_us + int(took_s * 1_000_000), name, channels, size)
        self._ended.add(
            call_row(
                request.found_trace_id or request.trace_id,
                request.app.id,
                correlation_id,
                (began_us // 1000, began_us),
                (name, channels, size),
                credential,
                request.remote,
                status,
                request.sampled,
            )
        )

    def ended_encoded(self, app_id: str, rows: bytes, count: int, first_ms: int, last_ms: int) -> None:
        """As `ended`, of calls whose rows are encoded, and which aren't traced (store/call_batch.py
        CallBatch.add_encoded)."""
        self.sampled_out += count
        if self._is_full():
            self.unlogged += count
            return
        self._ended.add_encoded(app_id, rows, count, first_ms, last_ms)

    def _is_full(self) -> bool:
        """No more calls can wait for the disk."""
        return self._ended.count >= _MAX_WAITING or self._ended.size >= _MAX_WAITING_BYTES

    # -- into the log

    async def _run(self) -> None:
        # Never cancelled: the rows of a running flush exist only there.
        while not self._ending.is_set():
            await self._pause(FLUSH_EVERY_S)
            await self.flush()

    async def _prune(self) -> None:
        while not self._ending.is_set():
            try:
                await self._log.prune(int(self._clock() * 1000))
            except SQLAlchemyError as error:
                log.warning("event log not pruned", reason=reason_of(error))
            await self._pause(PRUNE_EVERY_S)

    async def _pause(self, seconds: float) -> None:
        """Waits that long, or until the end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ending.wait()

    async def flush(self) -> None:
        """Writes what was collected since the last flush. If that fails, the rows wait for the next one. When this
        returns, an earlier flush has ended too."""
        async with self._flushing:
            await self._flush()

    async def _flush(self) -> None:
        self.spans_left = self._per_flush
        if self._otel is not None:
            self._otel.flush()
        if self._timer() >= self._renew_at_s:
            self.link_up()
        entries, stages = self._named(await self._read())
        ended, self._ended = self._ended, CallBatch()
        spans, self._spans = self._spans, []
        try:
            if not self._position:
                self._position = await self._log.position()
            if ended.count or spans or entries:
                position = entries[-1].id if entries else None
                batches = [ended, CallBatch(_triggered(entries))]
                await self._log.write(batches, [*spans, *stages], position)
                self._measure(entries, stages)
                if self._otel is not None:
                    self._otel.read(entries)
                if position:
                    self._position = position
                    self._reader.trim(position)
                ended, spans = CallBatch(), []
        except SQLAlchemyError as error:
            log.warning("event log not written", calls=ended.count, reason=reason_of(error))
            self._ended.insert_before(ended)
            self._spans[:0] = spans

    def _measure(self, entries: Sequence[Entry], stages: Sequence[SpanRow]) -> None:
        """Adds the times of these entries, which are read only once, to the histogram."""
        latency = self.latency
        for entry in entries:
            for event in entry.batch.triggered:
                if event.sampled:
                    latency.began((event.trace_id, 0), event.time_us, "client")
        for stage in stages:
            if stage.stage == "written":
                latency.written((stage.trace_id, stage.call_us), stage.time_us)
        latency.forget(int(self._clock() * 1_000_000))

    async def _read(self) -> list[Entry]:
        if not self._position:
            return []
        entries: list[Entry] = []
        # In parts: other replies, such as those to publishes, come in between.
        with suppress(LinkDown, hiredis.ReplyError, TimeoutError):
            async with asyncio.timeout(_READ_WITHIN_S):
                if self._check_position:
                    if await self._reader.is_behind(self._position):
                        self._position = "0-0"
                    self._check_position = False
                while len(entries) < _MAX_ENTRIES:
                    part = await self._reader.read(entries[-1].id if entries else self._position)
                    if not part:
                        break
                    entries += part
        # What wasn't read stays in the stream.
        if entries and not any(entry.batch.spans or entry.batch.triggered for entry in entries):
            # Only those by which the stream was renewed: nothing to store.
            self._position = entries[-1].id
            self._reader.trim(self._position)
            return []
        return entries

    def _named(self, entries: Sequence[Entry]) -> tuple[list[Entry], list[SpanRow]]:
        """The entries with the trace ids that the numbers stand for, and the rows of their spans. Spans of calls that
        are too long ago, or of an earlier control process, are left out."""
        named, rows = [], []
        for entry in entries:
            spans = []
            for span in entry.batch.spans:
                # A client event carries its trace id itself, which is its own.
                is_client = len(span.trace_id) == TRACE_ID_CHARS
                carried = _Carried(span.trace_id, 0) if is_client else self._carried.get(span.trace_id)
                if carried is None:
                    continue
                spans.append(structs.replace(span, trace_id=carried.text))
                trace_id = trace_id_of(carried.text)
                where = (span.app_id, span.time_ms, span.stage, span.detail, span.time_us)
                rows.append(SpanRow(trace_id, *where, carried.began_us))
            named.append(Entry(entry.id, Batch(spans, entry.batch.triggered)))
        return named, rows


def _triggered(entries: Sequence[Entry]) -> list[CallRow]:
    return [
        CallRow(
            event.trace_id,
            event.app_id,
            None,
            event.time_ms,
            event.event,
            [event.channel],
            event.size,
            f"client {event.socket_id}",
            200,
            event.sampled,
            event.time_us,
        )
        for entry in entries
        for event in entry.batch.triggered
    ]


def call_row(
    trace_id: str,
    app_id: str,
    correlation_id: str | None,
    began: tuple[int, int],
    described: tuple[str, Sequence[str], int],
    credential: str,
    remote: str,
    status: int,
    sampled: bool,
) -> CallRow:
    """The row of a trigger call: when it began, in ms and in µs; what it published, as Call.describe says; who sent
    it."""
    began_ms, began_us = began
    name, channels, size = described
    caller = f"{credential} from {remote}"
    return CallRow(trace_id, app_id, correlation_id, began_ms, name, channels, size, caller, status, sampled, began_us)


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def describe_call(body: bytes) -> tuple[str, Sequence[str], int, str | None]:
    """Name, channels, bytes of data and correlation id of a refused call, as far as its body can be read. Several names
    are joined by `, `."""
    try:
        call = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return "", [], len(body), None
    if not isinstance(call, dict):
        return "", [], len(body), None
    batch = call.get("batch")
    items = [item for item in batch if isinstance(item, dict)] if isinstance(batch, list) else [call]
    names: dict[str, None] = {}
    channels: dict[str, None] = {}
    size = 0
    for item in items[:_MAX_CHANNELS]:
        if isinstance(name := item.get("name"), str):
            names[name[:_MAX_CHARS]] = None
        several = item.get("channels")
        for channel in [item.get("channel"), *(several if isinstance(several, list) else ())][: _MAX_CHANNELS + 1]:
            if isinstance(channel, str):
                channels[channel[:_MAX_CHARS]] = None
        if isinstance(data := item.get("data"), str):
            size += _bytes(data)
    correlation_id = call.get("correlation_id")
    correlation_id = correlation_id[:_MAX_CHARS] if isinstance(correlation_id, str) else None
    return ", ".join(list(names)[:_MAX_CHANNELS]), list(channels)[:_MAX_CHANNELS], size, correlation_id
