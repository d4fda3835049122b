"""Which of this worker's connections are in which channel.

Carries out what sessions ask for, hears envelopes from the registry, hands frames to the fan-out. Knows
nothing of JSON, of signatures or of other workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from redpoll import _frame
from redpoll._fanout import Audience, Flusher
from redpoll.cluster.bus import Bus
from redpoll.cluster.registry import Held, Registry, Ticket
from redpoll.protocol import frames
from redpoll.protocol.apps import App
from redpoll.protocol.channels import Kind, kind_of
from redpoll.protocol.session import (
    Acknowledge,
    Close,
    Effect,
    Join,
    Leave,
    Publish,
    Send,
    SendUrgent,
)
from redpoll.worker.connection import Connection

__all__ = ["Channel", "Hub"]


class Channel(Audience):
    """The connections of this worker that are in one channel, and the channel's name as the wire has it."""

    __slots__ = ("name",)

    def __init__(self, flusher: Flusher, name: bytes) -> None:
        super().__init__(flusher)
        self.name = name


class Hub:
    """The worker's table of who hears what. Implements `cluster.registry.Listener`.

    `everyone` holds each open connection once; `pending` the subscribes that Redis hasn't answered yet.
    """

    def __init__(self, flusher: Flusher) -> None:
        self.flusher = flusher
        self.everyone = Audience(flusher)
        self.pending: dict[Connection, dict[str, Ticket]] = {}
        self.registry: Registry
        self.bus: Bus

    def attach(self, registry: Registry, bus: Bus) -> None:
        """Tie the knot: the registry needs its listener first, and the hub its registry."""
        self.registry = registry
        self.bus = bus

    # -- what sessions want -------------------------------------------------------------------------------

    def perform(self, connection: Connection, effects: Sequence[Effect]) -> None:
        """Carry out `effects` in order. A connection that closes on the way gets none of the rest."""
        for effect in effects:
            if isinstance(effect, Send):
                connection.send(_frame.text(effect.payload))
            elif isinstance(effect, SendUrgent):
                connection.send_urgent(_frame.text(effect.payload))
            elif isinstance(effect, Join):
                self._join(connection, effect)
            elif isinstance(effect, Leave):
                self._leave(connection, effect.channel, effect.user_id)
            elif isinstance(effect, Publish):
                self._publish(connection, effect)
            elif isinstance(effect, Acknowledge):
                self._acknowledge(connection, effect.channel)
            elif isinstance(effect, Close):
                connection.shut(effect.code, effect.message)
                return

    def _join(self, connection: Connection, join: Join) -> None:
        app = connection.session.app
        member = join.member
        ticket = Ticket(
            owner=connection,
            user=member.user_id if member else None,
            info=member.user_info if member else b"",
        )
        self.pending.setdefault(connection, {})[join.channel] = ticket
        presence = kind_of(join.channel) is Kind.PRESENCE
        self.registry.join(app.id, join.channel, presence, app.max_presence_members, ticket)

    def _leave(self, connection: Connection, channel: str, user: str | None) -> None:
        app_id = connection.session.app.id
        waiting = self.pending.get(connection)
        if waiting is not None and channel in waiting:
            self.registry.cancel(self._settled(connection, channel))
            return
        held = self.registry.held(app_id, channel)
        if held is not None and held.audience.discard(connection):
            self.registry.leave(app_id, channel, user)

    def _publish(self, connection: Connection, publish: Publish) -> None:
        self.bus.publish(
            connection.session.app.id,
            publish.channel,
            publish.event,
            publish.data,
            skip=connection.session.socket_id,
            user=publish.user_id,
            done=partial(self._published, connection),
        )

    @staticmethod
    def _published(connection: Connection, reply: object) -> None:
        if isinstance(reply, Exception):
            message = "client event not confirmed: the server has lost its connection to Redis; send it again"
            connection.send(_frame.text(frames.error(4301, message)))

    def _acknowledge(self, connection: Connection, channel: str) -> None:
        held = self.registry.held(connection.session.app.id, channel)
        if held is not None:
            connection.send(self._success(held))

    def closed(self, connection: Connection) -> None:
        """The one path for every cause of a close: whatever the connection held is let go. Idempotent."""
        self.everyone.discard(connection)
        session = connection.session
        for channel, membership in list(session.channels.items()):
            self._leave(connection, channel, membership.user_id)
        session.channels.clear()

    def _settled(self, connection: Connection, channel: str) -> Ticket:
        waiting = self.pending[connection]
        ticket = waiting.pop(channel)
        if not waiting:
            del self.pending[connection]
        return ticket

    # -- what the registry has to say (cluster.registry.Listener) ------------------------------------------

    def opened(self, held: Held) -> None:
        held.audience = Channel(self.flusher, held.channel.encode())

    def joined(self, held: Held, tickets: Sequence[Ticket]) -> None:
        """Attach and answer, in one breath: what the roster says now is what each joiner is told."""
        success = self._success(held)
        for ticket in tickets:
            connection: Connection = ticket.owner
            self._settled(connection, held.channel)
            held.audience.add(connection)
            connection.send(success)
            effects = connection.session.joined(held.channel)
            if effects:
                self.perform(connection, effects)

    def refused(self, held: Held, ticket: Ticket, reason: str) -> None:
        connection: Connection = ticket.owner
        self._settled(connection, held.channel)
        self.perform(connection, connection.session.refused(held.channel, reason))
        if reason == "unavailable":
            connection.shut(4100, "the subscription could not be confirmed in time; connect again")

    def member_added(self, held: Held, user: str, info: bytes) -> None:
        held.audience.post(_frame.text(frames.member_added(held.channel, user, info)))

    def member_removed(self, held: Held, user: str) -> None:
        held.audience.post(_frame.text(frames.member_removed(held.channel, user)))

    def event(self, held: Held, payload: bytes) -> None:
        audience = held.audience
        frame, skip_hi, skip_lo = _frame.frame_of(payload, audience.name)
        audience.post(frame, skip_hi, skip_lo)

    def dropped(self, held: Held) -> None:
        held.audience = None

    @staticmethod
    def _success(held: Held) -> bytes:
        presence = held.roster.snapshot() if held.roster is not None else None
        return _frame.text(frames.subscription_succeeded(held.channel, presence))

    # -- what others ask -----------------------------------------------------------------------------------

    def subscriptions(self) -> int:
        """How many subscriptions this worker's connections hold, over all channels."""
        return sum(held.attached for held in self.registry.helds())

    # -- what the directory has to say ---------------------------------------------------------------------

    def app_changed(self, app_id: str, new: App | None) -> Iterator[Connection]:
        """Give every connection of the app its new record; yields those that must close, to be paced."""
        for connection in list(self.everyone):
            session = connection.session
            if session.app.id == app_id:
                if new is None or not new.enabled:
                    yield connection
                else:
                    session.app = new
