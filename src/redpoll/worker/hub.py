"""Which of this worker's connections are in which channel.

Carries out what sessions ask for, hears envelopes from the registry, hands frames to the fan-out. Knows
nothing of JSON, of signatures or of other workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import monotonic

from redpoll import _frame
from redpoll._fanout import Audience, Flusher
from redpoll.cluster.bus import Bus
from redpoll.cluster.quota import Quota, Spent
from redpoll.cluster.registry import Held, Registry, Ticket
from redpoll.cluster.traces import new_trace_id
from redpoll.protocol import frames
from redpoll.protocol.effects import (
    Acknowledge,
    AskHistory,
    Close,
    Effect,
    Join,
    Leave,
    Publish,
    Send,
    SendUrgent,
    SignedIn,
)
from redpoll.worker.admission import Admission
from redpoll.worker.connection import Connection
from redpoll.worker.pages import Pages
from redpoll.worker.resume import Resume
from redpoll.worker.rewinds import Past, Rewinds, Wants
from redpoll.worker.tracing import Tracing
from redpoll.worker.users import Users

__all__ = ["Channel", "Hub"]


class Channel(Audience):
    """The connections of this worker that are in one channel, and the channel's name as the wire has it. `past`: those
    who are told of its history, as long as there are any; they are not among the others."""

    __slots__ = ("name", "past")

    def __init__(self, flusher: Flusher, name: bytes) -> None:
        super().__init__(flusher)
        self.name = name
        self.past: Past | None = None


class Hub:
    """The worker's table of who hears what. Implements `cluster.listener.Listener`.

    `everyone` holds each open connection once; `pending` the subscribes that Redis hasn't answered yet; `users`
    who is signed in, and `admission` who waits to be let in. What is told of the past is carried out by `rewinds`,
    `pages` and `resume`.
    """

    def __init__(self, flusher: Flusher) -> None:
        self.flusher = flusher
        self.everyone = Audience(flusher)
        self.pending: dict[Connection, dict[str, Ticket]] = {}
        self.users = Users(flusher)
        # By app id; of those that clients triggered, before anybody judged them but their session.
        self.client_events: dict[str, int] = {}
        # By app id; events times the sockets that each was written to.
        self.events_sent: dict[str, int] = {}
        self.admission = Admission()
        self._overruns = 0
        self.rewinds = Rewinds(self)
        self.pages = Pages(self)
        self.resume: Resume
        self.tracing: Tracing
        self.registry: Registry
        self.bus: Bus
        self.quota: Quota

    def attach(self, registry: Registry, bus: Bus, quota: Quota, resume: Resume, tracing: Tracing) -> None:
        """Tie the knot: the registry needs its listener first, and the hub its registry."""
        self.registry = registry
        self.users.attach(registry)
        self.admission.registry = registry
        self.rewinds.attach_history(registry.history)
        self.resume = resume
        self.tracing = tracing
        self.bus = bus
        self.quota = quota

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
            elif isinstance(effect, AskHistory):
                self.pages.ask(connection, effect)
            elif isinstance(effect, SignedIn):
                self.users.signed_in(connection, effect.user_id, effect.watchlist)
                if connection.session.app.user_resume_s:
                    self.resume.arrived(connection, effect.user_id)
            elif isinstance(effect, Close):
                connection.shut(effect.code, effect.message)
                return

    def _join(self, connection: Connection, join: Join) -> None:
        app, member = connection.session.app, join.member
        ticket = Ticket(
            owner=connection,
            user=member.user_id if member else None,
            info=member.user_info if member else b"",
        )
        if join.rewind is not None or join.recovers:
            ticket.wants = Wants(join.rewind, join.recovers)
        if member is not None and app.user_resume_s:
            self.resume.arrived(connection, member.user_id, join.channel)
        self.pending.setdefault(connection, {})[join.channel] = ticket
        self.registry.join(app, join.channel, ticket)

    def _leave(self, connection: Connection, channel: str, user: str | None) -> None:
        app_id = connection.session.app.id
        waiting = self.pending.get(connection)
        if waiting is not None and channel in waiting:
            self.registry.cancel(self._settled(connection, channel))
            return
        held = self.registry.held(app_id, channel)
        if held is None:
            return
        attached = held.audience.discard(connection)
        if held.audience.past is not None and self.rewinds.leave(held.audience, connection):
            attached = True
        if attached:
            self.registry.leave(app_id, channel, user)

    def _publish(self, connection: Connection, publish: Publish) -> None:
        app = connection.session.app
        self.client_events[app.id] = self.client_events.get(app.id, 0) + 1
        if app.daily_limit is None:
            self._send_on(connection, publish)
            return
        # Both go over the one connection to Redis: what one client says in order is spent and sent in order.
        spent = partial(self._spent, connection, publish)
        self.quota.spend_then(app.id, 1, app.daily_limit, spent)

    def _spent(self, connection: Connection, publish: Publish, outcome: Spent | Exception) -> None:
        if isinstance(outcome, Exception):
            self._published(connection, publish, None, outcome)
        elif outcome.ok:
            self._send_on(connection, publish)
        else:
            self._rejected(connection, "the app's daily limit of messages is reached")

    def _send_on(self, connection: Connection, publish: Publish) -> None:
        session = connection.session
        # Only those that webhooks come of: the others' way is short, and they are many.
        trace = new_trace_id() if "c" in session.app.hooks else None
        self.bus.publish(
            session.app,
            publish.channel,
            publish.event,
            publish.data,
            skip=session.socket_id,
            trace=trace,
            user=publish.user_id,
            done=partial(self._published, connection, publish, trace),
        )

    def _published(self, connection: Connection, publish: Publish, trace: str | None, reply: object) -> None:
        if isinstance(reply, Exception):
            self._rejected(connection, "the server has lost its connection to Redis; send it again")
        elif trace is not None:
            session = connection.session
            size = len(publish.data.encode())
            self.tracing.triggered(trace, session.app.id, publish.event, publish.channel, size, session.socket_id)

    def _rejected(self, connection: Connection, fault: str) -> None:
        self.perform(connection, connection.session.rejected(fault, monotonic()))

    def _acknowledge(self, connection: Connection, channel: str) -> None:
        held = self.registry.held(connection.session.app.id, channel)
        if held is None:
            return
        place = self.rewinds.place_of(held, connection)
        if place is None or held.history is None:
            connection.send(self._success(held))
        else:
            connection.send(self._success(held, held.history.epoch, place))

    def closed(self, connection: Connection) -> None:
        """The one path for every cause of a close: whatever the connection held is let go. Idempotent."""
        if not self.everyone.discard(connection):
            return
        session = connection.session
        if self.flusher.overruns != self._overruns:
            # It is closed for what it was owed.
            self._overruns = self.flusher.overruns
            self.tracing.dropped(session.app.id, session.socket_id, connection)
        for channel, membership in list(session.channels.items()):
            self._leave(connection, channel, membership.user_id)
        session.channels.clear()
        self.users.closed(connection)
        self.pages.closed(connection)
        self.resume.closed(connection)
        self.registry.depart(session.app.id)

    def _settled(self, connection: Connection, channel: str) -> Ticket:
        waiting = self.pending[connection]
        ticket = waiting.pop(channel)
        if not waiting:
            del self.pending[connection]
        return ticket

    # -- what the registry has to say (cluster.listener.Listener) ------------------------------------------

    def opened(self, held: Held) -> None:
        held.audience = Channel(self.flusher, held.channel.encode())

    def joined(self, held: Held, tickets: Sequence[Ticket], cached: bytes | None, total: int | None) -> None:
        """Attach and answer, in one breath: what the roster says now is what each joiner is told.

        `cached`: the event that a cache channel kept, b"" for none. `total`: how many they are, in apps that tell.
        """
        audience = held.audience
        looks_back = held.rule is not None and self._looks_back(held, tickets[0].owner)
        answer = success = b""
        for ticket in tickets:
            connection: Connection = ticket.owner
            self._settled(connection, held.channel)
            if looks_back or ticket.wants is not None:
                success = success or self._success(held)
                self.rewinds.attach(held, ticket, cached, total, success)
                continue
            answer = answer or self._answer(held, cached, total)
            audience.add(connection)
            connection.send(answer)
            effects = connection.session.joined(held.channel)
            if effects:
                self.perform(connection, effects)

    @staticmethod
    def _looks_back(held: Held, connection: Connection) -> bool:
        """Whether whoever joins may be told of what was before, without having asked for it."""
        rule = held.rule
        if held.history is None or rule is None:
            return False
        return bool(rule.replay or rule.replay_seconds or connection.session.app.user_resume_s)

    def _answer(self, held: Held, cached: bytes | None, total: int | None) -> bytes:
        """One piece for all: success, then the cached event or its miss, then the count (protocol.md 8, 9)."""
        answer = self._success(held)
        if cached:
            answer += _frame.frame_of(cached, held.audience.name)[0]
        elif cached is not None:
            answer += _frame.text(frames.cache_miss(held.channel))
        if total is not None:
            answer += _frame.text(frames.subscription_count(held.channel, total))
        return answer

    def refused(self, held: Held, ticket: Ticket, reason: str) -> None:
        connection: Connection = ticket.owner
        self._settled(connection, held.channel)
        self.perform(connection, connection.session.refused(held.channel, reason))
        if reason == "unavailable":
            connection.shut(4100, "the subscription could not be confirmed in time; connect again")

    def member_added(self, held: Held, user: str, info: bytes) -> None:
        self._tell(held, frames.member_added(held.channel, user, info))

    def member_removed(self, held: Held, user: str) -> None:
        self._tell(held, frames.member_removed(held.channel, user))

    def counted(self, held: Held, total: int) -> None:
        self._tell(held, frames.subscription_count(held.channel, total))
        if held.audience.past is not None:
            self.rewinds.counted(held.audience.past, total)

    def _tell(self, held: Held, payload: bytes) -> None:
        channel: Channel = held.audience
        frame = _frame.text(payload)
        channel.post(frame)
        if channel.past is not None:
            channel.past.tell(frame)

    def event(self, held: Held, payload: bytes) -> None:
        channel = held.audience
        if channel.past is None:
            frame, skip_hi, skip_lo = _frame.frame_of(payload, channel.name)
            sockets = channel.post(frame, skip_hi, skip_lo)
        else:
            sockets = self.rewinds.event(held, payload)
        sent = self.events_sent
        sent[held.app_id] = sent.get(held.app_id, 0) + sockets
        trace = _frame.trace_of(payload)
        if trace is not None:
            self.tracing.posted(trace, held.app_id, held.channel, channel, sockets)

    def console(self, held: Held, payload: bytes) -> None:
        # A copy of some channel's event, for the dashboard: `c <channel>`, then its envelope (cluster.md 3).
        head, _, envelope = payload.partition(b"\n")
        _, _, hi, lo, _, user, event, data = _frame.envelope(envelope)
        sender = user.decode() if user is not None else None
        skip = f"{hi}.{lo}" if hi or lo else None
        self._tell(held, frames.console(head[2:].decode(), event.decode(), data.decode(), sender, skip))

    def lost(self, held: Held) -> None:
        self.rewinds.lost(held)

    def dropped(self, held: Held) -> None:
        held.audience = None

    def user_state(self, app_id: str, user_id: str, online: bool) -> None:
        self.users.watchlists.user_state(app_id, user_id, online)

    def admitted(self, ticket: Ticket) -> None:
        self.admission.admitted(ticket)

    def turned_away(self, ticket: Ticket, code: int) -> None:
        self.admission.turned_away(ticket, code)

    @staticmethod
    def _success(held: Held, epoch: str | None = None, offset: int | None = None) -> bytes:
        presence = held.roster.snapshot() if held.roster is not None else None
        return _frame.text(frames.subscription_succeeded(held.channel, presence, epoch=epoch, offset=offset))

    # -- what others ask -----------------------------------------------------------------------------------

    def occupancy(self) -> tuple[int, int]:
        """How many channels have a subscriber on this worker, and how many subscriptions they are."""
        # What the registry holds besides, of users and connections, are no channels.
        attached = [held.attached for held in self.registry.helds() if held.listens and held.attached]
        return len(attached), sum(attached)

    def of_app(self, app_id: str) -> list[Connection]:
        """The open connections of one app."""
        return [each for each in self.everyone if each.session.app.id == app_id]

    def close_socket(self, app_id: str, socket_id: str) -> int:
        """Close the connection with this id; how many that were. A search through all of them: it is rarely asked,
        and a map would cost each connection 100 bytes."""
        hi, _, lo = socket_id.partition(".")
        if not (hi.isdecimal() and lo.isdecimal()):
            return 0
        sid = (int(hi), int(lo))
        for connection in self.everyone:
            if (connection.sid_hi, connection.sid_lo) == sid and connection.session.app.id == app_id:
                connection.shut(4009, "the connection was closed by the app")
                return 1
        return 0
