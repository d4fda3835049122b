"""Admits connections to apps with `max_connections`: never more than that over all workers.

An app's connections are held like a channel, `%conn`, only while the app has a limit. In other apps a connect costs
Redis nothing. A connection that finds its app full is retried for some seconds, because the places of a worker that
just died are about to become free, and pusher-js never reconnects after 4004 (cluster/membership/README.md "hold").
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from redpoll.cluster.membership.channel_settings import ChannelSettings
from redpoll.cluster.membership.hold_call import CONNECTIONS
from redpoll.cluster.membership.incarnation import Incarnation
from redpoll.cluster.membership.join import Join
from redpoll.cluster.membership.local_channel import LocalChannel
from redpoll.cluster.membership.local_channels import LocalChannels
from redpoll.cluster.membership.membership_events import MembershipEvents
from redpoll.cluster.membership.timings import Timings
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.protocol.apps import App
from redpoll.protocol.errors import Code

__all__ = ["CONN", "ConnectionLimit"]

FULL: Final = Code.OVER_QUOTA
TRY_AGAIN: Final = Code.OVER_CAPACITY

CONN: Final = "%conn"


class _Refusal:
    """Connections that were first refused by the same reply. `undecided` are the other workers and their beats at that
    time, without those that have beaten since or are gone; None until the beat table was read. `last`: the present
    attempt is the last one."""

    __slots__ = ("app_id", "joins", "last", "since", "undecided")

    def __init__(self, app_id: str, joins: Sequence[Join], since: float) -> None:
        self.app_id = app_id
        self.joins = dict.fromkeys(joins)
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
        self.timings = timings
        self._connections: dict[str, int] = {}
        self._limits: dict[str, int] = {}
        # Connections without an answer, in order of arrival, with their refusal if there was one.
        self._pending: dict[Join, _Refusal | None] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def refused(self) -> int:
        """Connections that found their app full, and wait for another attempt."""
        return sum(refusal is not None for refusal in self._pending.values())

    def admit_at_once(self, app: App) -> bool:
        """Counts a new connection, if its app has no limit. False: it needs `admit`."""
        if app.max_connections or app.id in self._limits:
            return False
        self._connections[app.id] = self._connections.get(app.id, 0) + 1
        return True

    def admit(self, join: Join) -> None:
        """A new connection; `join.channel` is CONN. Without a limit it is admitted at once, from within this call."""
        app = join.app
        if app.max_connections != self._limits.get(app.id, 0):
            self.limit(app.id, app.max_connections)
        if app.max_connections == 0:
            self._admit(app.id, join)
            return
        join.since = self._link.clock()
        self._pending[join] = None
        self._ask(app.id, [join])
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

    def cancel(self, join: Join) -> None:
        """A connection without an answer was closed. No effect on one that was answered."""
        self._forget(join)
        if join.unanswered:
            local_channel = self._channels.by_name[join.app.id, CONN]
            local_channel.withdraw(join)
            self._channels.mark_dirty(local_channel)

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
        queued = local_channel.queued or {}
        for join in list(self._pending):
            refusal = self._pending[join]
            # One in flight is admitted when its reply comes, whatever that says.
            if join in queued or (refusal is not None and refusal.app_id == app_id and not join.unanswered):
                if join in queued:
                    local_channel.withdraw(join)
                self._admit(app_id, join)
        self._channels.mark_dirty(local_channel)

    def answered(self, local_channel: LocalChannel, joined: Sequence[Join], refused: Sequence[Join]) -> None:
        """Takes a reply of `hold` for `%conn`. `joined` are attached already."""
        app_id = local_channel.app_id
        for join in joined:
            self._admit(app_id, join)
        if local_channel.attached != self._connections.get(app_id, 0):
            # One of them left at once, and `depart` noted only those that were counted so far.
            self._update(app_id)
        if app_id not in self._limits:
            for join in refused:
                self._admit(app_id, join)
            self._update(app_id)
            return
        newly_refused = [join for join in refused if self._pending[join] is None]
        for join in refused:
            refusal = self._pending[join]
            if refusal is not None and (refusal.decided or refusal.last):
                self._turn_away(join, FULL if refusal.decided else TRY_AGAIN)
        if newly_refused:
            refusal = _Refusal(app_id, newly_refused, self._link.clock())
            for join in newly_refused:
                self._pending[join] = refusal
            # The present beats, to compare later ones with.
            self._read_beats([refusal])

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ask(self, app_id: str, joins: Sequence[Join]) -> None:
        local_channel = self._channels.hold(app_id, CONN, CONNECTIONS)
        local_channel.settings = ChannelSettings(cap=self._limits[app_id])
        for join in joins:
            join.local_channel = local_channel
            local_channel.queue(join)
        self._channels.mark_dirty(local_channel)

    def _update(self, app_id: str) -> LocalChannel:
        local_channel = self._channels.hold(app_id, CONN, CONNECTIONS)
        cap = self._limits.get(app_id, 0)
        local_channel.settings = ChannelSettings(cap=cap)
        local_channel.attached = self._connections.get(app_id, 0) if cap else 0
        self._channels.mark_dirty(local_channel)
        return local_channel

    def _admit(self, app_id: str, join: Join) -> None:
        self._forget(join)
        self._connections[app_id] = self._connections.get(app_id, 0) + 1
        self._events.admitted(join)

    def _turn_away(self, join: Join, code: int) -> None:
        self.cancel(join)
        self._events.turned_away(join, code)

    def _forget(self, join: Join) -> None:
        refusal = self._pending.pop(join, None)
        if refusal is not None:
            del refusal.joins[join]

    # Retries of refused connections.

    def _start_timer(self) -> None:
        if self._timer is None and self._pending:
            self._timer = asyncio.get_running_loop().call_later(self.timings.admit_retry_s, self.retry)

    def retry(self) -> None:
        """Repeats the attempts of refused connections; called every `admit_retry_s` while any connection waits."""
        self.close()
        now = self._link.clock()
        for join, refusal in list(self._pending.items()):
            if refusal is None:
                if now - join.since > self.timings.away_s:
                    self._turn_away(join, TRY_AGAIN)
            elif now - refusal.since > self.timings.max_admit_s:
                self._turn_away(join, TRY_AGAIN)
        refusals = [refusal for refusal in dict.fromkeys(self._pending.values()) if refusal is not None]
        if refusals:
            # Before the attempts: if this table decides, a refusal after it is final.
            self._read_beats(refusals)
        for refusal in refusals:
            refusal.last = now - refusal.since > self.timings.max_admit_s - self.timings.admit_retry_s
            idle = [join for join in refusal.joins if not join.unanswered]
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
