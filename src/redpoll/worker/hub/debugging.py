"""What a worker writes about connections that are being debugged (`cluster/debug_log.py`): each message, each decision,
each event.

Callers ask `any` first, so that this costs nothing while nothing is being debugged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import msgspec

from redpoll import _frame
from redpoll.cluster.debug_log import DebugLog, debug_text
from redpoll.protocol import effects
from redpoll.protocol.effects import Effect, Send, SendUrgent

if TYPE_CHECKING:
    from redpoll.cluster.membership.connection_state import ConnectionState
    from redpoll.cluster.membership.join import Join
    from redpoll.cluster.membership.local_channel import LocalChannel
    from redpoll.cluster.redis.keys import Keys
    from redpoll.cluster.redis.link import Link
    from redpoll.protocol.apps import App
    from redpoll.protocol.handshake import Refusal
    from redpoll.worker.hub.connection import Connection
    from redpoll.worker.hub.open_connections import OpenConnections

__all__ = ["Debugging"]

# Subscribes without an answer that are looked at in one pass of the loop.
_MAX_WAITING: Final = 10_000

_PHRASES: Final[dict[type, str]] = {
    effects.Join: "subscribe accepted",
    effects.Acknowledge: "subscribed already",
    effects.Leave: "channel left",
    effects.Publish: "client event accepted",
    effects.AskHistory: "history requested",
    effects.SignedIn: "signed in",
    effects.Close: "connection refused to continue",
}


class Debugging(DebugLog):
    """Lines about the connections in `open_connections`."""

    def __init__(self, open_connections: OpenConnections, link: Link, keys: Keys, node_name: str, process: str) -> None:
        super().__init__(link, keys, node_name, process)
        self._open_connections = open_connections

    def opened(self, connection: Connection, **request: Any) -> None:
        """A client was let in. `request` says what it asked for."""
        session = connection.session
        if self.covers(session.app.id, session.socket_id):
            self.line(session.app.id, session.socket_id, "connection opened", **request)

    def refused(self, app: App | None, refusal: Refusal, **request: Any) -> None:
        """A client of this app was refused. None: its key is unknown."""
        if app is not None and self.socket_of(app.id) == "":
            self.line(app.id, "", "connection refused", code=int(refusal.code), reason=refusal.message, **request)

    def received(self, connection: Connection, message: bytes) -> None:
        session = connection.session
        if self.covers(session.app.id, session.socket_id):
            self.line(session.app.id, session.socket_id, "message received", message=debug_text(message))

    def performs(self, connection: Connection, decided: Sequence[Effect]) -> None:
        """What the protocol decided: frames to send, channels to join or leave, events to publish."""
        session = connection.session
        if not self.covers(session.app.id, session.socket_id):
            return
        for effect in decided:
            if isinstance(effect, Send | SendUrgent):
                self.line(session.app.id, session.socket_id, "frame sent", frame=debug_text(effect.payload))
            else:
                fields = {name: value for name, value in msgspec.to_builtins(effect).items() if value is not None}
                if isinstance(effect, effects.Publish):
                    fields["data"] = debug_text(effect.data)
                if "event" in fields:
                    # structlog's own field.
                    fields["event_name"] = fields.pop("event")
                self.line(session.app.id, session.socket_id, _PHRASES[type(effect)], **fields)

    def subscribed(self, connection: Connection, channel: str) -> None:
        session = connection.session
        if self.covers(session.app.id, session.socket_id):
            self.line(session.app.id, session.socket_id, "subscribed", channel=channel)

    def waiting(self, joins: Iterator[Join], redis: ConnectionState) -> None:
        """These subscribes have no answer yet; `redis` is the state of the worker's connection."""
        for join in islice(joins, _MAX_WAITING):
            session = join.owner.session
            if self.covers(session.app.id, session.socket_id):
                self.line(
                    session.app.id,
                    session.socket_id,
                    "subscribe waits",
                    channel=join.channel,
                    state=join.state.value,
                    for_s=round(monotonic() - join.since, 1),
                    waits_for=join.waits_for,
                    redis=redis.value,
                )

    def event(self, local_channel: LocalChannel, payload: bytes, sockets: int) -> None:
        """An event came from Redis and was queued for this many connections."""
        socket_id = self._subscriber_of(local_channel)
        if socket_id is not None:
            _, _, hi, lo, _, _, event, data = _frame.envelope(payload)
            fields: dict[str, Any] = {
                "channel": local_channel.channel,
                "event_name": event.decode(errors="replace"),
                "sockets": sockets,
            }
            if hi or lo:
                fields["skipped_socket"] = f"{hi}.{lo}"
            self.line(local_channel.app_id, socket_id, "event sent", **fields, data=debug_text(data))

    def posted(self, local_channel: LocalChannel, payload: bytes) -> None:
        """A frame of the server, such as member_added, goes to all subscribers."""
        socket_id = self._subscriber_of(local_channel)
        if socket_id is not None:
            self.line(local_channel.app_id, socket_id, "frame sent to channel", frame=debug_text(payload))

    def _subscriber_of(self, local_channel: LocalChannel) -> str | None:
        """What to write in a line about a channel: the connection if one is being debugged and subscribes to it, "" if
        the whole app is; None for no line."""
        chosen = self.socket_of(local_channel.app_id)
        if not chosen:
            return chosen
        hi, _, lo = chosen.partition(".")
        connection = self._open_connections.find(local_channel.app_id, int(hi), int(lo))
        if connection is None:
            return None
        subscription = connection.session.channels.get(local_channel.channel)
        return chosen if subscription is not None and not subscription.pending else None

    def closing(self, connection: Connection, code: int, reason: str) -> None:
        """The server closes the connection."""
        session = connection.session
        if session is not None and self.covers(session.app.id, session.socket_id):
            self.line(session.app.id, session.socket_id, "closed by the server", code=int(code), reason=reason)

    def closed(self, connection: Connection, code: int, reason: str) -> None:
        """The connection has ended. 1006: without a Close frame."""
        session = connection.session
        if session is not None and self.covers(session.app.id, session.socket_id):
            self.line(session.app.id, session.socket_id, "connection ended", code=int(code), reason=reason)
