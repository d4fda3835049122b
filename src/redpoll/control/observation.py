"""What is kept of the calls and of the apps' use: the event log, traces, spans for OpenTelemetry, usage."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from redpoll.cluster.traces import TraceReader
from redpoll.control.observe.cluster_usage import ClusterUsage
from redpoll.control.observe.usage import Usage
from redpoll.control.tracing.cluster_log import ClusterLog
from redpoll.control.tracing.otlp import open_sender
from redpoll.control.tracing.spans import Spans
from redpoll.control.tracing.tracing import Tracer

if TYPE_CHECKING:
    from redpoll.cluster.redis.keys import Keys
    from redpoll.cluster.redis.link import Link
    from redpoll.cluster.survey import NodeSurvey
    from redpoll.ipc.messages import Start
    from redpoll.store.charts import Charts
    from redpoll.store.eventlog import EventLog

__all__ = ["Observation"]


class Observation:
    """`tracer` and `cluster_log` are None without an event log, `otlp` and `spans` without a receiver of spans."""

    def __init__(
        self,
        start: Start,
        link: Link,
        keys: Keys,
        survey: NodeSurvey,
        event_log: EventLog | None,
        charts: Charts | None,
    ) -> None:
        settings = start.settings
        per_second = settings.trace_calls_per_second
        self.tracer: Tracer | None = None
        self.cluster_log: ClusterLog | None = None
        self.otlp = open_sender(settings)
        self.spans = Spans(self.otlp.put, per_second) if self.otlp else None
        if event_log is not None:
            self.tracer = Tracer(event_log, TraceReader(link, keys, start.run), per_second, spans=self.spans)
            self.cluster_log = ClusterLog(event_log, survey, settings.node_name or socket.gethostname())
        self.usage = Usage(charts)
        self.cluster_usage = ClusterUsage(self.usage, survey)

    def start(self) -> None:
        if self.tracer is not None:
            self.tracer.start()

    def link_up(self) -> None:
        if self.tracer is not None:
            self.tracer.link_up()

    async def finish(self) -> None:
        if self.tracer is not None:
            await self.tracer.finish()
        if self.otlp is not None:
            await self.otlp.finish()
