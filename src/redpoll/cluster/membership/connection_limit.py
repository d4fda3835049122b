"""Admits connections to apps with `max_connections`: never more than that over all workers.

An app's connections are held like a channel, `%conn`, only while the app has a limit. In other apps a connect costs
Redis nothing. A connection that finds its app full is retried for some seconds, because the places of a worker that
just died are about to become free, and pusher-js never reconnects after 4004 (cluster/membership/README.md "hold").
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from redpoll.cluster.membership.hold_call import CONNECTIONS
from redpoll.cluster.membership.incarnation import Incarnation
from redpoll.cluster.membership.local_channel import ChannelSettings, LocalChannel, Ticket
from redpoll.cluster.membership.local_channels import LocalChannels
from redpoll.cluster.membership.membership_events import MembershipEvents
from redpoll.cluster.membership.timings import Timings
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.protocol.apps import App
from redpoll.protocol.errors import Code

__all__ = ["ConnectionLimit"]

FULL: Final = Code.OVER_QUOTA
TRY_AGAIN: Final = Code.OVER_CAPACITY

_CONN: Final = "%conn"


class _Refusal:
    """Connections that were first refused by the same reply. `undecided` are the other workers and their beats at that
    time, without those that have beaten since or are gone; None until the beat table was read. `last`: the present
    attempt is the last one."""

    __slots__ = ("app_id", "last", "since", "tickets", "undecided")

    def __init__(self, app_id: str, tickets: Sequence[Ticket], since: float) -> None:
        self.app_id = app_id
        self.tickets = dict.fromkeys(tickets)
        self.since = since
        self.undecided: dict[bytes, int] | None = None
        self.last = False

    @property
    def decided(self) -> bool:
        """All places of the app are taken by connections of living workers."""
        return self.undecided is not None and not self.undecided

    def compare(self, beats: dict[bytes, int]) -> None:
        """Takes the beat table as it was read after the refusal."""
        if self.undecided is None:
            self.undecided = dict(beats)
        else:
            self.undecided = {w: beat for w, beat in self.undecided.items() if w in beats and beats[w] <= beat}


class ConnectionLimit:
    """Counts connections by app, and asks Redis to admit those of apps with a limit. Reports to `events.admitted` and
    `events.turned_away`, the latter with 4004 (the app is full) or 4100 (Redis didn't decide in time)."""

    def __init__(
        self,
        link: Link,
        keys: Keys,
        channels: LocalChannels,
        incarnation: Incarnation,
        events: MembershipEvents,
        timings: Timings,
    ) -> None:
        self._link = link
        self._keys = keys
        self._channels = channels
        self._incarnation = incarnation
        self._events = events
        self._retry_s = timings.admit_retry_s
        self._max_wait_s = timings.max_admit_s
        self._away_s = timings.away_s
        self._connections: dict[str, int] = {}
        self._limits: dict[str, int] = {}
        # Connections without an answer, in order of arrival, with their refusal if there was one.
        self._pending: dict[Ticket, _Refusal | None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def admit_at_once(self, app: App) -> bool:
        """Counts a new connection, if its app has no limit. False: it needs a ticket and `admit`."""
        if app.max_connections or app.id in self._limits:
            return False
        self._connections[app.id] = self._connections.get(app.id, 0) + 1
        return True

    def admit(self, app: App, ticket: Ticket) -> None:
        """A new connection. Without a limit it is admitted at once, from within this call."""
        if app.max_connections != self._limits.get(app.id, 0):
            self.limit(app.id, app.max_connections)
        if app.max_connections == 0:
            self._admit(app.id, ticket)
            return
        ticket.since = self._link.clock()
        self._pending[ticket] = None
        self._ask(app.id, [ticket])
        self._start_timer()

    def depart(self, app_id: str) -> None:
        """An admitted connection is gone."""
        left = self._connections[app_id] - 1
        if left:
            self._connections[app_id] = left
        else:
            del self._connections[app_id]
        if app_id in self._limits:
            self._update(app_id)

    def forget(self, ticket: Ticket) -> None:
        """A connection without an answer was closed."""
        refusal = self._pending.pop(ticket, None)
        if refusal is not None:
            del refusal.tickets[ticket]

    def limit(self, app_id: str, max_connections: int) -> None:
        """The app's limit changed; 0 means no limit. Admitted connections stay."""
        if max_connections == self._limits.get(app_id, 0):
            return
        if max_connections:
            self._limits[app_id] = max_connections
            self._update(app_id)
            return
        del self._limits[app_id]
        local_channel = self._update(app_id)
        waiting = local_channel.waiting or {}
        for ticket in list(self._pending):
            refusal = self._pending[ticket]
            # A ticket in flight is admitted when its reply comes, whatever that says.
            if ticket in waiting or (refusal is not None and refusal.app_id == app_id and ticket.local_channel is None):
                if ticket in waiting:
                    local_channel.withdraw(ticket)
                self._admit(app_id, ticket)
        self._channels.mark_dirty(local_channel)

    def answered(self, local_channel: LocalChannel, joined: Sequence[Ticket], refused: Sequence[Ticket]) -> None:
        """Takes a reply of `hold` for `%conn`. `joined` are attached already."""
        app_id = local_channel.app_id
        for ticket in joined:
            self._admit(app_id, ticket)
        if app_id not in self._limits:
            for ticket in refused:
                self._admit(app_id, ticket)
            self._update(app_id)
            return
        newly_refused = [ticket for ticket in refused if self._pending[ticket] is None]
        for ticket in refused:
            refusal = self._pending[ticket]
            if refusal is not None and (refusal.decided or refusal.last):
                self._turn_away(ticket, FULL if refusal.decided else TRY_AGAIN)
        if newly_refused:
            refusal = _Refusal(app_id, newly_refused, self._link.clock())
            for ticket in newly_refused:
                self._pending[ticket] = refusal
            # The present beats, to compare later ones with.
            self._read_beats([refusal])

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ask(self, app_id: str, tickets: Sequence[Ticket]) -> None:
        local_channel = self._channels.hold(app_id, _CONN, CONNECTIONS)
        local_channel.settings = ChannelSettings(cap=self._limits[app_id])
        for ticket in tickets:
            local_channel.wait(ticket)
        self._channels.mark_dirty(local_channel)

    def _update(self, app_id: str) -> LocalChannel:
        local_channel = self._channels.hold(app_id, _CONN, CONNECTIONS)
        cap = self._limits.get(app_id, 0)
        local_channel.settings = ChannelSettings(cap=cap)
        local_channel.attached = self._connections.get(app_id, 0) if cap else 0
        self._channels.mark_dirty(local_channel)
        return local_channel

    def _admit(self, app_id: str, ticket: Ticket) -> None:
        self.forget(ticket)
        self._connections[app_id] = self._connections.get(app_id, 0) + 1
        self._events.admitted(ticket)

    def _turn_away(self, ticket: Ticket, code: int) -> None:
        self.forget(ticket)
        if ticket.local_channel is not None:
            local_channel = ticket.local_channel
            local_channel.withdraw(ticket)
            self._channels.mark_dirty(local_channel)
        self._events.turned_away(ticket, code)

    # Retries of refused connections.

    def _start_timer(self) -> None:
        if self._timer is None and self._pending:
            self._timer = asyncio.get_running_loop().call_later(self._retry_s, self._retry)

    def _retry(self) -> None:
        self._timer = None
        now = self._link.clock()
        for ticket, refusal in list(self._pending.items()):
            if refusal is None:
                if now - ticket.since > self._away_s:
                    self._turn_away(ticket, TRY_AGAIN)
            elif now - refusal.since > self._max_wait_s:
                self._turn_away(ticket, TRY_AGAIN)
        refusals = [refusal for refusal in dict.fromkeys(self._pending.values()) if refusal is not None]
        if refusals:
            # Before the attempts: if this table decides, a refusal after it is final.
            self._read_beats(refusals)
        for refusal in refusals:
            refusal.last = now - refusal.since > self._max_wait_s - self._retry_s
            idle = [ticket for ticket in refusal.tickets if ticket.local_channel is None]
            if idle:
                self._ask(refusal.app_id, idle)
        self._start_timer()

    def _read_beats(self, refusals: Sequence[_Refusal]) -> None:
        def done(reply: Any) -> None:
            if isinstance(reply, dict):
                beats = {w: int(beat) for w, beat in reply.items() if w != self._incarnation.name}
                for refusal in refusals:
                    refusal.compare(beats)

        self._link.call(b"HGETALL", self._keys.beat, done=done)
