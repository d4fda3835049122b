"""Maps channels to this worker's connections, in both directions.

It carries out what sessions ask for: join, leave, publish, sign in. It receives channel events from the registry and
posts their frames to the fan-out. It doesn't know JSON, signatures or other workers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from time import monotonic

from redpoll import _frame
from redpoll._fanout import Flusher
from redpoll.cluster.bus import Bus
from redpoll.cluster.membership.join import Join as QueuedJoin
from redpoll.cluster.membership.join_queue import JoinQueue
from redpoll.cluster.membership.local_channel import LocalChannel
from redpoll.cluster.membership.registry import Registry
from redpoll.cluster.quota import Quota
from redpoll.loop.slices import Slices
from redpoll.loop.writable import WritableSignal
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
from redpoll.protocol.errors import Code
from redpoll.protocol.grants import RevokedGrants
from redpoll.protocol.joining import Joined
from redpoll.worker.hub.admission import Admission
from redpoll.worker.hub.channel import Channel
from redpoll.worker.hub.client_events import ClientEvents
from redpoll.worker.hub.connection import Connection
from redpoll.worker.hub.debugging import Debugging
from redpoll.worker.hub.open_connections import OpenConnections
from redpoll.worker.hub.subscribe_rates import SubscribeRates
from redpoll.worker.hub.tracing import Tracing
from redpoll.worker.hub.users import Users
from redpoll.worker.replay.history_requests import HistoryRequests
from redpoll.worker.replay.pacing import Pacing
from redpoll.worker.replay.replay import Wants
from redpoll.worker.replay.replayer import Replayer
from redpoll.worker.replay.user_resume import UserResume

__all__ = ["Hub"]

# Channels in which a closed connection stops counting at once. With a thousand, others would notice the pause.
_MAX_LEFT_AT_ONCE = 100


class Hub:
    """The worker's table of subscriptions. Implements `cluster.membership.MembershipEvents`.

    `open_connections` contains each open connection once. `joins` has the subscribes that Redis hasn't answered yet.
    `users` knows who is signed in, `admission` which connections wait for a place in their app.
    """

    def __init__(self, flusher: Flusher) -> None:
        self.flusher = flusher
        self.revoked_grants = RevokedGrants(time.time)
        self.open_connections = OpenConnections(flusher, self.revoked_grants)
        # By app id: events times the connections that each was sent to.
        self.events_sent: dict[str, int] = {}
        # Subscribes refused because of max_occupied_channels.
        self.channels_refused = 0
        self.subscribe_rates = SubscribeRates()
        # Channels that closed connections have left, and in which they are still counted.
        self._leaving: deque[tuple[str, str, str | None]] = deque()
        self._leave_slices = Slices(self._leave_some)
        self.writable_signal = WritableSignal(flusher)
        self.pacing = Pacing(flusher, self.writable_signal, self._paced)
        self.registry: Registry
        self.joins: JoinQueue
        self.users: Users
        self.admission: Admission
        self.client_events: ClientEvents
        self.replayer: Replayer
        self.history_requests: HistoryRequests
        self.user_resume: UserResume
        self.tracing: Tracing
        self.debugging: Debugging

    def attach(
        self,
        registry: Registry,
        bus: Bus,
        quota: Quota,
        user_resume: UserResume,
        tracing: Tracing,
        debugging: Debugging,
    ) -> None:
        """Set what the hub works with. It comes after construction because the registry needs the hub first."""
        self.debugging = debugging
        self.registry = registry
        self.joins = registry.joins
        self.users = Users(self.flusher, registry, self.open_connections.removed)
        self.admission = Admission(registry)
        self.client_events = ClientEvents(bus, quota, tracing, self.perform)
        self.tracing = tracing
        self.user_resume = user_resume
        self.replayer = Replayer(registry.history, self.perform, user_resume, self.writable_signal)
        self.history_requests = HistoryRequests(registry.history, self.perform, self.writable_signal)

    # -- what sessions ask for -----------------------------------------------------------------------------

    def perform(self, connection: Connection, effects: Sequence[Effect]) -> None:
        """Carry out `effects` in order. After a Close the rest is dropped."""
        if self.debugging.any:
            self.debugging.performs(connection, effects)
        for effect in effects:
            if isinstance(effect, Send):
                connection.send(_frame.text(effect.payload))
            elif isinstance(effect, SendUrgent):
                connection.send_urgent(_frame.text(effect.payload))
            elif isinstance(effect, Join):
                self._join(connection, effect)
            elif isinstance(effect, Leave):
                self._leave(connection, effect.channel, effect.user_id)
                self.user_resume.left(connection, effect.channel, effect.user_id)
            elif isinstance(effect, Publish):
                self.client_events.publish(connection, effect)
            elif isinstance(effect, Acknowledge):
                self._acknowledge(connection, effect.channel)
            elif isinstance(effect, AskHistory):
                self.history_requests.ask(connection, effect)
            elif isinstance(effect, SignedIn):
                self.users.signed_in(connection, effect.user_id, effect.watchlist)
                self.user_resume.arrived(connection, effect.user_id)
            elif isinstance(effect, Close):
                connection.shut(effect.code, effect.message)
                return

    def _join(self, connection: Connection, join: Join) -> None:
        if self._is_too_fast(connection, join.channel):
            return
        app, member = connection.session.app, join.member
        if member is not None and self.users.was_removed(connection, join.channel, member.user_id):
            self.perform(connection, connection.session.remove(join.channel))
            return
        if member is None and join.rewind is None and not join.recovers:
            local_channel = self.registry.join_at_once(app, join.channel)
            if local_channel is not None:
                try:
                    local_channel.audience.admit(connection)
                    self._greet(local_channel, connection, self._success(local_channel))
                except Exception as fault:
                    self._attaching_failed(local_channel, connection, None, fault)
                return
        user, info = (None, b"") if member is None else (member.user_id, member.user_info)
        queued = QueuedJoin(connection, app, join.channel, user, info)
        if join.rewind is not None or join.recovers:
            queued.wants = Wants(join.rewind, join.recovers)
        if user is not None and app.user_resume_s:
            self.user_resume.arrived(connection, user, join.channel)
        self.joins.add(queued)

    def _is_too_fast(self, connection: Connection, channel: str) -> bool:
        """Counts a subscribe for the address of the connection. If there were too many, it is refused."""
        slot = connection.address_slot
        if not slot or self.subscribe_rates.take(slot, now := monotonic()):
            return False
        self.perform(connection, connection.session.refused(channel, "address", now))
        return True

    def _leave(self, connection: Connection, channel: str, user: str | None) -> None:
        if self._detach(connection, channel):
            self.registry.leave(connection.session.app.id, channel, user)

    def _detach(self, connection: Connection, channel: str) -> bool:
        """Takes the connection out of the channel. True: `registry.leave` must follow, until then it is counted."""
        if self.joins.withdraw(connection, channel):
            return False
        local_channel = self.registry.local_channel(connection.session.app.id, channel)
        if local_channel is None:
            return False
        audience: Channel = local_channel.audience
        attached = audience.discard(connection)
        if audience.readers is not None:
            try:
                attached = self.replayer.leave(audience, connection) or attached
            except Exception as fault:
                # It was in one of the two, and must not be counted any more.
                attached = True
                connection.report(fault)
        return attached

    def _acknowledge(self, connection: Connection, channel: str) -> None:
        if self._is_too_fast(connection, channel):
            return
        local_channel = self.registry.local_channel(connection.session.app.id, channel)
        if local_channel is None:
            return
        offset = self.replayer.offset_of(local_channel, connection)
        if offset is None or local_channel.history is None:
            connection.send(self._success(local_channel))
        else:
            # The connection has all events up to this offset.
            local_channel.audience.finish_posts()
            if local_channel.audience.readers is not None:
                local_channel.audience.readers.recovering.finish_posts()
            connection.send(self._success(local_channel, local_channel.history.epoch, offset))

    def closed(self, connection: Connection) -> None:
        """Release everything the connection held. Called for every cause of a close; idempotent."""
        if not self.open_connections.discard(connection):
            return
        session = connection.session
        if connection.overrun:
            self.tracing.dropped(session.app.id, session.socket_id, connection)
        self.joins.stop(connection)
        # Whatever fails for one part, the others release the connection too. User resume comes before the leaves: who
        # looks for the user asks for holders first.
        for closed in (
            self.user_resume.closed,
            self._leave_all,
            self.users.closed,
            self.history_requests.closed,
            self.replayer.closed,
            self.writable_signal.closed,
        ):
            try:
                closed(connection)
            except Exception as fault:
                connection.report(fault)
        self.registry.connection_limit.depart(session.app.id)

    def _leave_all(self, connection: Connection) -> None:
        channels, app_id = connection.session.channels, connection.session.app.id
        for number, (channel, membership) in enumerate(list(channels.items())):
            try:
                if number < _MAX_LEFT_AT_ONCE:
                    self._leave(connection, channel, membership.user_id)
                elif self._detach(connection, channel):
                    self._leaving.append((app_id, channel, membership.user_id))
            except Exception as fault:
                connection.report(fault)
        channels.clear()
        if self._leaving:
            self._leave_slices.start()

    def _leave_some(self) -> bool:
        if not self._leaving:
            return False
        self.registry.leave(*self._leaving.popleft())
        return True

    # -- what the registry reports (cluster.membership.MembershipEvents) -----------------------------------

    def opened(self, local_channel: LocalChannel) -> None:
        local_channel.audience = Channel(self.flusher, local_channel.channel.encode())

    def joined(
        self, local_channel: LocalChannel, joins: Sequence[QueuedJoin], cached: bytes | None, total: int | None
    ) -> None:
        """Attach the connections and answer them in the same step, so that all of them see the present roster.

        `cached` is a cache channel's last event, b"" for none. `total` is the number of subscribers, in apps that send
        it.
        """
        audience: Channel = local_channel.audience
        self.settings_changed(local_channel)
        answer = success = b""
        for join in joins:
            connection: Connection = join.owner
            try:
                if join.wants is not None or self._may_replay(local_channel, connection):
                    if self.debugging.any:
                        self.debugging.subscribed(connection, local_channel.channel)
                    success = success or self._success(local_channel)
                    self.replayer.attach(local_channel, join, cached, total, success)
                    continue
                answer = answer or self._answer(local_channel, cached, total)
                audience.admit(connection)
                self._greet(local_channel, connection, answer)
            except Exception as fault:
                self._attaching_failed(local_channel, connection, join.user, fault)

    def _greet(self, local_channel: LocalChannel, connection: Connection, answer: bytes) -> None:
        if self.debugging.any:
            self.debugging.subscribed(connection, local_channel.channel)
        connection.send(answer)
        effects = connection.session.joined(local_channel.channel)
        if effects:
            self.perform(connection, effects)

    def _attaching_failed(
        self, local_channel: LocalChannel, connection: Connection, user: str | None, fault: Exception
    ) -> None:
        """The connection counts as a subscriber and wasn't answered: close it, so that it counts no longer."""
        connection.report(fault)
        readers = local_channel.audience.readers
        if connection not in local_channel.audience and (readers is None or connection not in readers):
            self.registry.leave(local_channel.app_id, local_channel.channel, user)
        connection.abort()

    @staticmethod
    def _may_replay(local_channel: LocalChannel, connection: Connection) -> bool:
        """Whether new subscribers may get earlier messages without asking."""
        rule = local_channel.rule
        if local_channel.history is None or rule is None:
            return False
        return bool(rule.replay or rule.replay_seconds or connection.session.app.user_resume_s)

    def _answer(self, local_channel: LocalChannel, cached: bytes | None, total: int | None) -> bytes:
        """Success, the cached event or its miss, the count, as one piece (protocol/README.md "Subscribing")."""
        answer = self._success(local_channel)
        if cached:
            answer += _frame.frame_of(cached, local_channel.audience.name)[0]
        elif cached is not None:
            answer += _frame.text(frames.cache_miss(local_channel.channel))
        if total is not None:
            answer += _frame.text(frames.subscription_count(local_channel.channel, total))
        return answer

    def refused(self, local_channel: LocalChannel, join: QueuedJoin, reason: str) -> None:
        connection: Connection = join.owner
        if reason == "channels":
            self.channels_refused += 1
        now, subscription = monotonic(), connection.session.channels.get(local_channel.channel)
        if subscription is not None and connection.address_slot:
            # Those that were repeated meanwhile are refused with it.
            self.subscribe_rates.charge(connection.address_slot, subscription.repeats, now)
        self.perform(connection, connection.session.refused(local_channel.channel, reason, now))
        if reason == "unavailable":
            connection.shut(Code.OVER_CAPACITY, "the subscription could not be confirmed in time; connect again")

    def still_waiting(self, joins: Iterator[QueuedJoin]) -> None:
        if self.debugging.any:
            self.debugging.waiting(joins, self.registry.connection_state)

    def member_added(self, local_channel: LocalChannel, user: str, info: bytes) -> None:
        self._post(local_channel, frames.member_added(local_channel.channel, user, info))

    def member_removed(self, local_channel: LocalChannel, user: str) -> None:
        self._post(local_channel, frames.member_removed(local_channel.channel, user))

    def counted(self, local_channel: LocalChannel, total: int) -> None:
        self._post(local_channel, frames.subscription_count(local_channel.channel, total))
        if (readers := local_channel.audience.readers) is not None:
            readers.counted(total)

    def _post(self, local_channel: LocalChannel, payload: bytes) -> None:
        """Send a frame that isn't an event to all subscribers, those with a replay included."""
        if self.debugging.any:
            self.debugging.posted(local_channel, payload)
        audience: Channel = local_channel.audience
        frame = _frame.text(payload)
        audience.post(frame)
        if audience.readers is not None:
            audience.readers.post(frame)

    def event(self, local_channel: LocalChannel, payload: bytes) -> None:
        audience = local_channel.audience
        if audience.readers is None:
            frame, skip_hi, skip_lo, trace = _frame.frame_and_trace(payload, audience.name)
            count = audience.post(frame, skip_hi, skip_lo)
        else:
            paced = audience.readers.pacing is not None
            count = self.replayer.event(local_channel, payload)
            # With a rate, `_paced` is called when it is sent.
            trace = None if paced else _frame.trace_of(payload)
        if self.debugging.any:
            self.debugging.event(local_channel, payload, count)
        sent = self.events_sent
        sent[local_channel.app_id] = sent.get(local_channel.app_id, 0) + count
        if trace is not None:
            self.tracing.posted(trace, local_channel.app_id, local_channel.channel, audience, count)

    def _paced(self, local_channel: LocalChannel, joined: Joined, sockets: int) -> None:
        """Counts a frame of a channel with a rate, queued for this many connections."""
        app_id, channel, audience = local_channel.app_id, local_channel.channel, local_channel.audience
        self.events_sent[app_id] = self.events_sent.get(app_id, 0) + sockets
        if joined.traces or joined.replaced:
            self.tracing.joined(joined, app_id, channel, audience, sockets)

    def sent(self, app_id: str, count: int) -> None:
        """Events were sent to clients of this app, counted per client."""
        self.events_sent[app_id] = self.events_sent.get(app_id, 0) + count

    def console(self, local_channel: LocalChannel, payload: bytes) -> None:
        # `c <channel>`, a line feed, then that channel's event (cluster/README.md "Topics and envelopes").
        head, _, envelope = payload.partition(b"\n")
        _, _, hi, lo, _, user, event, data = _frame.envelope(envelope)
        sender = user.decode() if user is not None else None
        skip = f"{hi}.{lo}" if hi or lo else None
        self._post(local_channel, frames.console(head[2:].decode(), event.decode(), data.decode(), sender, skip))

    def lost(self, local_channel: LocalChannel) -> None:
        self.replayer.lost(local_channel)

    def dropped(self, local_channel: LocalChannel) -> None:
        audience: Channel | None = local_channel.audience
        if audience is not None and audience.readers is not None and audience.readers.pacing is not None:
            audience.readers.pacing.cancel()
        local_channel.audience = None

    def settings_changed(self, local_channel: LocalChannel) -> None:
        audience: Channel | None = local_channel.audience
        pace = local_channel.settings.pace
        if audience is not None and (pace is not None or audience.readers is not None):
            audience.set_pace(local_channel, pace, self.pacing)

    def user_state(self, app_id: str, user_id: str, online: bool) -> None:
        self.users.watchlists.user_state(app_id, user_id, online)

    def admitted(self, join: QueuedJoin) -> None:
        self.admission.admitted(join)

    def turned_away(self, join: QueuedJoin, code: int) -> None:
        self.admission.turned_away(join, code)

    @staticmethod
    def _success(local_channel: LocalChannel, epoch: str | None = None, offset: int | None = None) -> bytes:
        presence = local_channel.roster.snapshot() if local_channel.roster is not None else None
        return _frame.text(frames.subscription_succeeded(local_channel.channel, presence, epoch=epoch, offset=offset))

    # -- what the rest of the worker asks ------------------------------------------------------------------

    def find_socket(self, app_id: str, socket_id: str) -> Connection | None:
        """The app's connection with this id. Rarely asked for, so it searches: a map would cost each 100 bytes."""
        return self.open_connections.find_socket(app_id, socket_id)

    def close_socket(self, app_id: str, socket_id: str) -> int:
        """Close the connection with this id. Returns how many were closed, 0 or 1."""
        if (connection := self.find_socket(app_id, socket_id)) is None:
            return 0
        connection.shut(Code.UNAUTHORIZED, "the connection was closed by the app")
        return 1
