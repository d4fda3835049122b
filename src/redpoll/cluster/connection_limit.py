"""Which connections an app with `max_connections` lets in, exactly as many as that over all workers.

An app's connections are held like a channel, `%conn`, and only while it has a limit: else a connect costs Redis
nothing. Who is refused tries again for a while, since the places of a worker that just died are about to be free
and pusher-js gives up for good on 4004 (cluster.md 6).
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from redpoll.cluster.keys import Keys
from redpoll.cluster.link import Link
from redpoll.cluster.membership.hold_call import CONNECTIONS
from redpoll.cluster.membership.local_channel import LocalChannel, Ticket
from redpoll.protocol.apps import App

__all__ = ["ConnectionLimit"]

FULL: Final = 4004
TRY_AGAIN: Final = 4100

_CONN: Final = "%conn"


class _Refusal:
    """Those who were first refused at the same moment. `undecided`: the other workers and their beats then, less
    those that have beaten since or are gone; None until the table was read. `last`: the present try is."""

    __slots__ = ("app_id", "last", "since", "tickets", "undecided")

    def __init__(self, app_id: str, tickets: Sequence[Ticket], since: float) -> None:
        self.app_id = app_id
        self.tickets = dict.fromkeys(tickets)
        self.since = since
        self.undecided: dict[bytes, int] | None = None
        self.last = False

    @property
    def decided(self) -> bool:
        """The app is full of living workers' connections."""
        return self.undecided is not None and not self.undecided

    def looked(self, beats: dict[bytes, int]) -> None:
        """Takes the table of beats as it was read after the refusal."""
        if self.undecided is None:
            self.undecided = dict(beats)
        else:
            self.undecided = {w: beat for w, beat in self.undecided.items() if w in beats and beats[w] <= beat}


class ConnectionLimit:
    """Counts connections by app, and asks Redis for those of apps with a limit.

    `hold` and `touch` as in users.py. `on_admitted(ticket)`, `on_turned_away(ticket, code)`: 4004 the app is full,
    4100 nobody knows in time. `name()` is our W.
    """

    def __init__(
        self,
        link: Link,
        keys: Keys,
        hold: Callable[[str, str, str], LocalChannel],
        touch: Callable[[LocalChannel], None],
        name: Callable[[], bytes],
        *,
        on_admitted: Callable[[Ticket], None],
        on_turned_away: Callable[[Ticket, int], None],
        again_s: float,
        most_s: float,
        away_s: float,
    ) -> None:
        self._link = link
        self._keys = keys
        self._hold = hold
        self._touch = touch
        self._name = name
        self._on_admitted = on_admitted
        self._on_turned_away = on_turned_away
        self._again_s = again_s
        self._most_s = most_s
        self._away_s = away_s
        self._connections: dict[str, int] = {}
        self._limits: dict[str, int] = {}
        # Everybody who has no answer yet, in order of arrival, and those of them that were refused before.
        self._pending: dict[Ticket, _Refusal | None] = {}
        self._timer: asyncio.TimerHandle | None = None

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
        self._wind()

    def depart(self, app_id: str) -> None:
        """An admitted connection is gone."""
        left = self._connections[app_id] - 1
        if left:
            self._connections[app_id] = left
        else:
            del self._connections[app_id]
        if app_id in self._limits:
            self._tell(app_id)

    def forget(self, ticket: Ticket) -> None:
        """A connection went away that had no answer yet."""
        refusal = self._pending.pop(ticket, None)
        if refusal is not None:
            del refusal.tickets[ticket]

    def limit(self, app_id: str, most: int) -> None:
        """The app's limit changed, 0: there is none any more. Nobody is put out."""
        if most == self._limits.get(app_id, 0):
            return
        if most:
            self._limits[app_id] = most
            self._tell(app_id)
            return
        del self._limits[app_id]
        local_channel = self._tell(app_id)
        waiting = local_channel.waiting or {}
        for ticket in list(self._pending):
            refusal = self._pending[ticket]
            # One that is under way is admitted by its reply, whatever that is.
            if ticket in waiting or (refusal is not None and refusal.app_id == app_id and ticket.local_channel is None):
                if ticket in waiting:
                    local_channel.withdraw(ticket)
                self._admit(app_id, ticket)
        self._touch(local_channel)

    def answered(self, local_channel: LocalChannel, joined: Sequence[Ticket], refused: Sequence[Ticket]) -> None:
        """Redis' reply about `%conn`: `joined` are attached there."""
        app_id = local_channel.app_id
        for ticket in joined:
            self._admit(app_id, ticket)
        if app_id not in self._limits:
            for ticket in refused:
                self._admit(app_id, ticket)
            self._tell(app_id)
            return
        first = [ticket for ticket in refused if self._pending[ticket] is None]
        for ticket in refused:
            refusal = self._pending[ticket]
            if refusal is not None and (refusal.decided or refusal.last):
                self._turn_away(ticket, FULL if refusal.decided else TRY_AGAIN)
        if first:
            refusal = _Refusal(app_id, first, self._link.clock())
            for ticket in first:
                self._pending[ticket] = refusal
            # The table as of now, to compare later ones with.
            self._look([refusal])

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ask(self, app_id: str, tickets: Sequence[Ticket]) -> None:
        local_channel = self._hold(app_id, _CONN, CONNECTIONS)
        local_channel.cap = self._limits[app_id]
        for ticket in tickets:
            local_channel.wait(ticket)
        self._touch(local_channel)

    def _tell(self, app_id: str) -> LocalChannel:
        local_channel = self._hold(app_id, _CONN, CONNECTIONS)
        local_channel.cap = self._limits.get(app_id, 0)
        local_channel.attached = self._connections.get(app_id, 0) if local_channel.cap else 0
        self._touch(local_channel)
        return local_channel

    def _admit(self, app_id: str, ticket: Ticket) -> None:
        self.forget(ticket)
        self._connections[app_id] = self._connections.get(app_id, 0) + 1
        self._on_admitted(ticket)

    def _turn_away(self, ticket: Ticket, code: int) -> None:
        self.forget(ticket)
        if ticket.local_channel is not None:
            local_channel = ticket.local_channel
            local_channel.withdraw(ticket)
            self._touch(local_channel)
        self._on_turned_away(ticket, code)

    # Those who were refused try again.

    def _wind(self) -> None:
        if self._timer is None and self._pending:
            self._timer = asyncio.get_running_loop().call_later(self._again_s, self._round)

    def _round(self) -> None:
        self._timer = None
        now = self._link.clock()
        for ticket, refusal in list(self._pending.items()):
            if refusal is None:
                if now - ticket.since > self._away_s:
                    self._turn_away(ticket, TRY_AGAIN)
            elif now - refusal.since > self._most_s:
                self._turn_away(ticket, TRY_AGAIN)
        refusals = [each for each in dict.fromkeys(self._pending.values()) if each is not None]
        if refusals:
            # Ahead of the tries: one that is refused behind a table that decides is the last.
            self._look(refusals)
        for refusal in refusals:
            refusal.last = now - refusal.since > self._most_s - self._again_s
            idle = [ticket for ticket in refusal.tickets if ticket.local_channel is None]
            if idle:
                self._ask(refusal.app_id, idle)
        self._wind()

    def _look(self, refusals: Sequence[_Refusal]) -> None:
        def done(reply: Any) -> None:
            if isinstance(reply, dict):
                beats = {w: int(beat) for w, beat in reply.items() if w != self._name()}
                for refusal in refusals:
                    refusal.looked(beats)

        self._link.call(b"HGETALL", self._keys.beat, done=done)
