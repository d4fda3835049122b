"""Channels with a rate on a fake server: what waits for each of their clients, and replays that are joined.

The rules are those of `redpoll.protocol.joining`. Each client has a pacer of its own, so nothing is shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from redpoll.protocol import frames
from redpoll.protocol.joining import Joined, Joiner, LastJoined, Pace, Pacer, Part

if TYPE_CHECKING:
    from redpoll.testing.clock import Clock, Timer
    from redpoll.testing.histories import Stored

__all__ = ["Rates", "joined_frames", "last_joined", "part_of"]


class Receiver(Protocol):
    """A connection, as far as it is needed here."""

    def send(self, payload: bytes) -> None: ...


class _Waiting:
    """The events that wait for one client."""

    def __init__(self, pace: Pace, with_offset: bool) -> None:
        self.pace = pace
        self.with_offset = with_offset
        self.pacer = Pacer(pace, with_offset)
        self.timer: Timer | None = None


class Rates:
    """The clients of one channel for which events wait, or waited."""

    def __init__(self, channel: str, clock: Clock) -> None:
        self._channel = channel
        self._clock = clock
        self._waiting: dict[Receiver, _Waiting] = {}

    def event(self, client: Receiver, pace: Pace, part: Part, with_offset: bool) -> None:
        """Send an event to a client, now or when it is due."""
        waiting = self._waiting.get(client)
        if waiting is None:
            waiting = self._waiting[client] = _Waiting(pace, with_offset)
        now = self._clock.now()
        self._send(client, waiting, waiting.pacer.add(part, now))
        due = waiting.pacer.due
        if due is not None and waiting.timer is None:
            waiting.timer = self._clock.call_later(max(0.0, due - now), lambda: self._due(client, waiting))

    def flush(self, client: Receiver) -> None:
        """Send what waits for a client."""
        waiting = self._waiting.get(client)
        if waiting is not None:
            self._send(client, waiting, waiting.pacer.take(self._clock.now()))

    def end(self) -> None:
        """Send all that waits: the rule is another one."""
        for client in list(self._waiting):
            self.flush(client)
            self.forget(client)

    def forget(self, client: Receiver) -> None:
        """The client left the channel."""
        waiting = self._waiting.pop(client, None)
        if waiting is not None and waiting.timer is not None:
            waiting.timer.cancel()

    def _due(self, client: Receiver, waiting: _Waiting) -> None:
        waiting.timer = None
        self._send(client, waiting, waiting.pacer.take(self._clock.now()))

    def _send(self, client: Receiver, waiting: _Waiting, taken: Iterable[Joined]) -> None:
        for payload in _frames(self._channel, taken, waiting.pace, waiting.with_offset):
            client.send(payload)


def _frames(channel: str, taken: Iterable[Joined], pace: Pace, with_offset: bool) -> list[bytes]:
    return [
        frames.event(
            channel,
            joined.last.event.decode(),
            joined.data(pace).decode(),
            joined.last.user.decode() if joined.last.user is not None else None,
            joined.offset if with_offset and joined.offset else None,
        )
        for joined in taken
    ]


def _part(pace: Pace, row: Stored) -> Part:
    user = row.user_id.encode() if row.user_id is not None else None
    return Part(
        pace,
        row.event.encode(),
        row.data.encode(),
        user=user,
        skip=_skip(row.skip),
        offset=row.offset,
        prev=row.before,
    )


def _skip(socket_id: str | None) -> tuple[int, int]:
    high, _, low = (socket_id or "0.0").partition(".")
    return int(high), int(low)


def part_of(pace: Pace, event: str, data: str, user_id: str | None, skip: str | None, offset: int) -> Part:
    """A published event. `skip` is the socket id that doesn't get it; `offset` is 0 if it isn't stored."""
    user = user_id.encode() if user_id is not None else None
    return Part(pace, event.encode(), data.encode(), user=user, skip=_skip(skip), offset=offset)


def last_joined(pace: Pace, rows: Sequence[Stored], count: int, neighbours: bool) -> list[Stored]:
    """The messages of the last `count` events of a history, as they are after joining."""
    last = LastJoined(pace, count, neighbours)
    parts = [_part(pace, row) for row in rows]
    last.add(reversed(parts))
    return [
        row
        for row, part in zip(rows, parts, strict=True)
        if row.offset > last.since and (row.offset > last.mixed_until or part.key in last.keys)
    ]


def joined_frames(channel: str, pace: Pace, rows: Iterable[Stored], socket_id: str, with_offset: bool) -> list[bytes]:
    """Stored messages as they are replayed to the client with this socket id."""
    joiner = Joiner(pace, with_offset)
    for row in rows:
        if row.skip != socket_id:
            joiner.add(_part(pace, row))
    return _frames(channel, joiner.take(), pace, with_offset)
