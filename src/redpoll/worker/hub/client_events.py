"""Client events: what a client sends to the other subscribers of a channel (protocol/README.md "Client events").

The session has checked them. Here they count against the app's daily limit, go to Redis like events of the HTTP API,
and are refused with an error if that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic

from redpoll.cluster.bus import Bus
from redpoll.cluster.publish_call import PublishRefused
from redpoll.cluster.quota import Quota, Spent
from redpoll.cluster.traces import new_trace_id
from redpoll.protocol.effects import Effect, Publish
from redpoll.worker.hub.connection import Connection
from redpoll.worker.hub.tracing import Tracing

__all__ = ["ClientEvents"]


class ClientEvents:
    """`received` has the number of client events by app id, before any check but the session's. `perform` carries out
    what the session of a refused event says."""

    def __init__(
        self, bus: Bus, quota: Quota, tracing: Tracing, perform: Callable[[Connection, Sequence[Effect]], None]
    ) -> None:
        self.received: dict[str, int] = {}
        self.bus = bus
        self._quota = quota
        self._tracing = tracing
        self._perform = perform

    def publish(self, connection: Connection, publish: Publish) -> None:
        app = connection.session.app
        self.received[app.id] = self.received.get(app.id, 0) + 1
        if app.daily_limit is None:
            self._send_on(connection, publish)
            return
        # Quota and publish use the same Redis connection, so a client's events keep their order.
        spent = partial(self._spent, connection, publish)
        self._quota.spend_then(app.id, 1, app.daily_limit, spent)

    def _spent(self, connection: Connection, publish: Publish, outcome: Spent | Exception) -> None:
        if isinstance(outcome, Exception):
            self._published(connection, publish, None, False, outcome)
        elif outcome.ok:
            self._send_on(connection, publish)
        else:
            self._rejected(connection, "the app's daily limit of messages is reached")

    def _send_on(self, connection: Connection, publish: Publish) -> None:
        session = connection.session
        # Only client events that trigger webhooks have a trace id, the others are too many; and of these only some have
        # spans.
        trace = new_trace_id() if "c" in session.app.hooks else None
        sampled = trace is not None and self._tracing.sample()
        self.bus.publish(
            session.app,
            publish.channel,
            publish.event,
            publish.data,
            skip=session.socket_id,
            trace=self._tracing.carried(trace) if trace is not None and sampled else None,
            row_trace_id=trace,
            user=publish.user_id,
            done=partial(self._published, connection, publish, trace, sampled),
        )

    def _published(
        self, connection: Connection, publish: Publish, trace: str | None, sampled: bool, reply: object
    ) -> None:
        if isinstance(reply, PublishRefused):
            self._rejected(connection, str(reply))
        elif isinstance(reply, Exception):
            self._rejected(connection, "the server has lost its connection to Redis; send it again")
        elif trace is not None:
            session = connection.session
            size = len(publish.data.encode())
            self._tracing.triggered(
                trace, session.app.id, publish.event, publish.channel, size, session.socket_id, sampled
            )

    def _rejected(self, connection: Connection, fault: str) -> None:
        self._perform(connection, connection.session.rejected(fault, monotonic()))
