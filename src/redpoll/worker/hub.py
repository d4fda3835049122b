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
from redpoll.cluster.membership.registry import LocalChannel, Registry, Ticket
from redpoll.cluster.quota import Quota, Spent
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
from redpoll.worker.connection import Connection
from redpoll.worker.ingress.admission import Admission
from redpoll.worker.replay.history_requests import HistoryRequests
from redpoll.worker.replay.replayer import Past, Replayer, Wants
from redpoll.worker.replay.user_resume import UserResume
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
    """The worker's table of who hears what. Implements `cluster.listener.MembershipEvents`.

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
        self.rewinds = Replayer(self)
        self.pages = HistoryRequests(self)
        self.resume: UserResume
        self.tracing: Tracing
        self.registry: Registry
        self.bus: Bus
        self.quota: Quota

    def attach(self, registry: Registry, bus: Bus, quota: Quota, resume: UserResume, tracing: Tracing) -> None:
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
        local_channel = self.registry.local_channel(app_id, channel)
        if local_channel is None:
            return
        attached = local_channel.audience.discard(connection)
        if local_channel.audience.past is not None and self.rewinds.leave(local_channel.audience, connection):
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
        local_channel = self.registry.local_channel(connection.session.app.id, channel)
        if local_channel is None:
            return
        place = self.rewinds.place_of(local_channel, connection)
        if place is None or local_channel.history is None:
            connection.send(self._success(local_channel))
        else:
            connection.send(self._success(local_channel, local_channel.history.epoch, place))

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

    def opened(self, local_channel: LocalChannel) -> None:
        local_channel.audience = Channel(self.flusher, local_channel.channel.encode())

    def joined(
        self, local_channel: LocalChannel, tickets: Sequence[Ticket], cached: bytes | None, total: int | None
    ) -> None:
        """Attach and answer, in one breath: what the roster says now is what each joiner is told.

        `cached`: the event that a cache channel kept, b"" for none. `total`: how many they are, in apps that tell.
        """
        audience = local_channel.audience
        looks_back = local_channel.rule is not None and self._looks_back(local_channel, tickets[0].owner)
        answer = success = b""
        for ticket in tickets:
            connection: Connection = ticket.owner
            self._settled(connection, local_channel.channel)
            if looks_back or ticket.wants is not None:
                success = success or self._success(local_channel)
                self.rewinds.attach(local_channel, ticket, cached, total, success)
                continue
            answer = answer or self._answer(local_channel, cached, total)
            audience.add(connection)
            connection.send(answer)
            effects = connection.session.joined(local_channel.channel)
            if effects:
                self.perform(connection, effects)

    @staticmethod
    def _looks_back(local_channel: LocalChannel, connection: Connection) -> bool:
        """Whether whoever joins may be told of what was before, without having asked for it."""
        rule = local_channel.rule
        if local_channel.history is None or rule is None:
            return False
        return bool(rule.replay or rule.replay_seconds or connection.session.app.user_resume_s)

    def _answer(self, local_channel: LocalChannel, cached: bytes | None, total: int | None) -> bytes:
        """One piece for all: success, then the cached event or its miss, then the count (protocol.md 8, 9)."""
        answer = self._success(local_channel)
        if cached:
            answer += _frame.frame_of(cached, local_channel.audience.name)[0]
        elif cached is not None:
            answer += _frame.text(frames.cache_miss(local_channel.channel))
        if total is not None:
            answer += _frame.text(frames.subscription_count(local_channel.channel, total))
        return answer

    def refused(self, local_channel: LocalChannel, ticket: Ticket, reason: str) -> None:
        connection: Connection = ticket.owner
        self._settled(connection, local_channel.channel)
        self.perform(connection, connection.session.refused(local_channel.channel, reason))
        if reason == "unavailable":
            connection.shut(4100, "the subscription could not be confirmed in time; connect again")

    def member_added(self, local_channel: LocalChannel, user: str, info: bytes) -> None:
        self._tell(local_channel, frames.member_added(local_channel.channel, user, info))

    def member_removed(self, local_channel: LocalChannel, user: str) -> None:
        self._tell(local_channel, frames.member_removed(local_channel.channel, user))

    def counted(self, local_channel: LocalChannel, total: int) -> None:
        self._tell(local_channel, frames.subscription_count(local_channel.channel, total))
        if local_channel.audience.past is not None:
            self.rewinds.counted(local_channel.audience.past, total)

    def _tell(self, local_channel: LocalChannel, payload: bytes) -> None:
        channel: Channel = local_channel.audience
        frame = _frame.text(payload)
        channel.post(frame)
        if channel.past is not None:
            channel.past.tell(frame)

    def event(self, local_channel: LocalChannel, payload: bytes) -> None:
        channel = local_channel.audience
        if channel.past is None:
            frame, skip_hi, skip_lo = _frame.frame_of(payload, channel.name)
            sockets = channel.post(frame, skip_hi, skip_lo)
        else:
            sockets = self.rewinds.event(local_channel, payload)
        sent = self.events_sent
        sent[local_channel.app_id] = sent.get(local_channel.app_id, 0) + sockets
        trace = _frame.trace_of(payload)
        if trace is not None:
            self.tracing.posted(trace, local_channel.app_id, local_channel.channel, channel, sockets)

    def console(self, local_channel: LocalChannel, payload: bytes) -> None:
        # A copy of some channel's event, for the dashboard: `c <channel>`, then its envelope (cluster.md 3).
        head, _, envelope = payload.partition(b"\n")
        _, _, hi, lo, _, user, event, data = _frame.envelope(envelope)
        sender = user.decode() if user is not None else None
        skip = f"{hi}.{lo}" if hi or lo else None
        self._tell(local_channel, frames.console(head[2:].decode(), event.decode(), data.decode(), sender, skip))

    def lost(self, local_channel: LocalChannel) -> None:
        self.rewinds.lost(local_channel)

    def dropped(self, local_channel: LocalChannel) -> None:
        local_channel.audience = None

    def user_state(self, app_id: str, user_id: str, online: bool) -> None:
        self.users.watchlists.user_state(app_id, user_id, online)

    def admitted(self, ticket: Ticket) -> None:
        self.admission.admitted(ticket)

    def turned_away(self, ticket: Ticket, code: int) -> None:
        self.admission.turned_away(ticket, code)

    @staticmethod
    def _success(local_channel: LocalChannel, epoch: str | None = None, offset: int | None = None) -> bytes:
        presence = local_channel.roster.snapshot() if local_channel.roster is not None else None
        return _frame.text(frames.subscription_succeeded(local_channel.channel, presence, epoch=epoch, offset=offset))

    # -- what others ask -----------------------------------------------------------------------------------

    def occupancy(self) -> tuple[int, int]:
        """How many channels have a subscriber on this worker, and how many subscriptions they are."""
        # What the registry holds besides, of users and connections, are no channels.
        attached = [
            local_channel.attached
            for local_channel in self.registry.local_channels()
            if local_channel.listens and local_channel.attached
        ]
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
