"""Sends spans to an OpenTelemetry collector by OTLP over HTTP, with OpenTelemetry's own SDK.

A thread of its own encodes and sends them, so no request waits for the collector. The queue is bounded: while the
collector is away or slow, spans are dropped and counted. Headers, timeout, compression, certificates, service name and
resource attributes come from OpenTelemetry's environment variables (OTEL_EXPORTER_OTLP_HEADERS and so on).

The extra `otel` brings the SDK. It is imported only if spans are to be sent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import structlog

from redpoll import __version__
from redpoll.config.settings import Settings

if TYPE_CHECKING:
    from redpoll.control.tracing.spans import SpanData

__all__ = ["OtlpSender", "open_sender"]

log = structlog.get_logger(__name__)

_MAX_WAITING: Final = 10_000
_MAX_BATCH: Final = 256
# The last spans at shutdown, if the collector answers.
_FINISH_WITHIN_S: Final = 2.0


def open_sender(settings: Settings, environment: Mapping[str, str] = os.environ) -> OtlpSender | None:
    """Starts to send if the settings name a collector and the extra is installed, else returns None."""
    endpoint = environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
    if not endpoint and settings.otel_endpoint:
        endpoint = f"{settings.otel_endpoint.rstrip('/')}/v1/traces"
    if not endpoint or environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if not settings.event_log_calls or not settings.trace_calls_per_second:
        log.warning(
            "opentelemetry is off", reason="event_log_calls or trace_calls_per_second is 0, so nothing is traced"
        )
        return None
    try:
        return OtlpSender(endpoint, settings.node_name or socket.gethostname())
    except ImportError:
        log.warning("opentelemetry is off", reason="its SDK is missing; pip install 'redpoll[otel]'")
        return None


class OtlpSender:
    """Starts its thread. `put` takes spans of this node, named `node`; `finish` sends the rest.

    `sent_total` counts spans that the collector took, `lost_total` the others. Raises ImportError without the SDK.
    """

    def __init__(self, endpoint: str, node: str, *, max_waiting: int = _MAX_WAITING) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        self.sent_total = self.lost_total = 0
        self._endpoint = endpoint
        self._waiting: queue.Queue[SpanData | None] = queue.Queue(max_waiting)
        self._converter = _Converter(node)
        self._messages = _LastMessage()
        self._exporter: Any = OTLPSpanExporter(endpoint)
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="opentelemetry", daemon=True)
        self._thread.start()

    def put(self, span: SpanData) -> None:
        """Queues a span, or drops it if too many wait."""
        try:
            self._waiting.put_nowait(span)
        except queue.Full:
            self.lost_total += 1

    async def finish(self, within_s: float = _FINISH_WITHIN_S) -> None:
        """Sends what is queued."""
        with suppress(queue.Full):
            self._waiting.put_nowait(None)
        await asyncio.to_thread(self._thread.join, within_s)
        self._exporter.shutdown()

    # -- in the thread

    def _run(self) -> None:
        ending = False
        while not ending:
            batch = [self._waiting.get()]
            with suppress(queue.Empty):
                while len(batch) < _MAX_BATCH:
                    batch.append(self._waiting.get_nowait())
            ending = None in batch
            spans = [span for span in batch if span is not None]
            if spans:
                self._send(spans)

    def _send(self, spans: Sequence[SpanData]) -> None:
        try:
            result = self._exporter.export([self._converter.convert(span) for span in spans])
            reason = "" if result.name == "SUCCESS" else self._messages.text
        except Exception as error:
            # Whatever the SDK raises must not end the thread.
            reason = repr(error)
        if reason:
            self.lost_total += len(spans)
            if not self._failed:
                log.warning("spans not sent to opentelemetry", endpoint=self._endpoint, reason=reason)
        else:
            self.sent_total += len(spans)
            if self._failed:
                log.info("spans sent to opentelemetry again", endpoint=self._endpoint)
        self._failed = bool(reason)


class _Converter:
    """Makes the SDK's spans, with the resource that names this node."""

    def __init__(self, node: str) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk import trace as sdk
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._api, self._sdk = trace, sdk
        self._scope = InstrumentationScope("redpoll", __version__)
        named = OTELResourceDetector().detect().attributes
        own = {"service.name": "redpoll", "service.version": __version__, "service.instance.id": node}
        # What the environment says counts.
        self._resource = Resource.create({name: value for name, value in own.items() if name not in named})

    def convert(self, span: SpanData) -> Any:
        api = self._api
        status = api.Status(api.StatusCode.ERROR, span.error) if span.error else api.Status()
        return self._sdk.ReadableSpan(
            span.name,
            self._context(span.trace_id, span.span_id, is_remote=False),
            self._context(span.trace_id, span.parent_id, is_remote=True) if span.parent_id else None,
            self._resource,
            span.attributes,
            kind=api.SpanKind[span.kind.value],
            status=status,
            start_time=span.start_us * 1000,
            end_time=span.end_us * 1000,
            instrumentation_scope=self._scope,
        )

    def _context(self, trace_id: str, span_id: str, *, is_remote: bool) -> Any:
        flags = self._api.TraceFlags(self._api.TraceFlags.SAMPLED)
        return self._api.SpanContext(int(trace_id, 16), int(span_id, 16), is_remote, flags)


class _LastMessage(logging.Handler):
    """Holds the SDK's last complaint, which becomes the reason in our log line: the SDK logs every retry."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = "unknown"
        logger = logging.getLogger("opentelemetry")
        logger.propagate = False
        logger.handlers[:] = [self]

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()[:300]
