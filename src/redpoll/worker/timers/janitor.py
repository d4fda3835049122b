"""Deadlines of connections.

A wheel holds one deadline per connection: for a complete request head, for the next sign of life, or for the answer to
our Close frame. Queues hold a second deadline for clients that must sign in. The janitor also measures the event
loop's lag and triggers the statistics that go to Redis.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from redpoll import _engine, _frame
from redpoll._wheel import Wheel
from redpoll.config.settings import Settings
from redpoll.loop.loop_lag import LoopLag
from redpoll.protocol import frames
from redpoll.protocol.channels import needs_auth
from redpoll.protocol.errors import CLOSE_TEXTS, Code
from redpoll.worker.timers.backpressure import Backpressure

if TYPE_CHECKING:
    from redpoll.protocol.session import Session
    from redpoll.worker.hub.connection import Connection

__all__ = ["STATS_EVERY_TICKS", "Janitor"]

# Deadlines are kept to a quarter of a second.
TICK_S = 0.25
_SLOTS = 1024
# How long a client may take to read its unsent frames and to answer our Close frame (RFC 6455 7.1.1).
_CLOSE_TIMEOUT_S = 5.0
# For how long a client may go on reading its last HTTP answer, which may have megabytes.
_LAST_ANSWER_S = 60.0
# An answer of this size is with the kernel at once, unless earlier ones fill it. It isn't looked at, which costs time.
_SMALL_ANSWER_BYTES = 4096
# When to look again at a connection that waited for Redis at the deadline for signing in.
_LOOK_AGAIN_S = 1.0
STATS_EVERY_TICKS = round(5.0 / TICK_S)


class _Ping:
    """Connections that were pinged together. `answered` is set when none is left in `missing`."""

    __slots__ = ("answered", "missing")

    def __init__(self, connections: Iterable[Connection]) -> None:
        self.missing = set(connections)
        self.answered = asyncio.Event()

    def discard(self, connection: Connection) -> None:
        self.missing.discard(connection)
        if not self.missing:
            self.answered.set()


class Janitor:
    """The timers of connections. `stats` is called every 5 s, `on_tick` and `backpressure.check` four times a
    second. `head_late(connection)` is called when a request head isn't complete in time, `http_late(connection)` at the
    deadline of an HTTP connection."""

    def __init__(
        self,
        settings: Settings,
        stats: Callable[[], None],
        backpressure: Backpressure,
        on_tick: Callable[[], None],
        *,
        head_late: Callable[[Connection], None],
        http_late: Callable[[Connection], None],
    ) -> None:
        self._on_tick = on_tick
        self._head_late = head_late
        self._http_late = http_late
        self.loop = asyncio.get_running_loop()
        self._stats = stats
        self._backpressure = backpressure
        self._wheel = Wheel(_SLOTS)
        self.close_timeout_s = _CLOSE_TIMEOUT_S
        # Connections per tick whose time to sign in is over; a crowd of them must not delay other clients.
        self.max_expired_a_tick = 500
        # Not 0, so that there is a tick before it (`ping`).
        self.tick = 1
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self.head_timeout_s = settings.head_timeout_s
        self._head_ticks = _ticks(settings.head_timeout_s)
        self._silent_ticks = _ticks(settings.activity_timeout_s)
        self._pong_ticks = _ticks(settings.pong_timeout_s)
        # From a ping to the next look. A client that answers at once may be silent again after `_silent_ticks`.
        self._pinged_ticks = min(self._silent_ticks, self._pong_ticks)
        # Two pings: browsers answer the WebSocket's without their page, old clients only the protocol's.
        self._ping = _frame.text(frames.ping()) + _frame.ping(b"")
        # Connections that have yet to sign in or to enter a private or presence channel, with their deadlines. One
        # queue per timeout and wait, both in ticks, so the first in a queue is due first. The wait is the timeout, and
        # shorter after the first look. Connections of other apps aren't here.
        self._unauthorised: dict[tuple[int, int], dict[Connection, int]] = {}
        # The last tick at which clients that have yet to sign in may not have been read.
        self._unread_tick = 0
        self._pings: dict[Connection, list[_Ping]] = {}
        # Of HTTP connections that close: what their clients had not taken at the last look, and the tick at which they
        # are cut.
        self._last_answers: dict[Connection, tuple[int, int]] = {}
        self.loop_lag = LoopLag()

    @property
    def unauthorised(self) -> int:
        """Connections that have yet to sign in, in apps with `user_authentication_timeout_s`."""
        return sum(map(len, self._unauthorised.values()))

    @property
    def pinged(self) -> int:
        """Connections whose answer `ping` waits for."""
        return len(self._pings)

    def start(self) -> None:
        _engine.set_tick(self.tick)
        self.loop_lag.start()
        self._arm()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.loop_lag.stop()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run `work` as a task. An exception goes to the loop's exception handler."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- a connection's deadlines --------------------------------------------------------------------------

    def arrived(self, connection: Connection) -> None:
        self._wheel.put(connection, self.tick + self._head_ticks)

    def http_waits(self, connection: Connection, seconds: float) -> None:
        """Call `http_late` for this HTTP connection after that long."""
        self._wheel.put(connection, self.tick + _ticks(seconds))

    def opened(self, connection: Connection) -> None:
        tick = self.tick
        # Its head may have come long ago, if Redis had to decide about its place.
        connection.heard_tick = tick
        self._wheel.put(connection, tick + self._silent_ticks)
        self._expect_sign_in(connection, connection.session.app.user_authentication_timeout_s)

    def closing(self, connection: Connection) -> None:
        self._wheel.put(connection, self.tick + _ticks(self.close_timeout_s))
        self._forget_sign_in(connection)
        self._answered(connection)
        self._backpressure.closing(connection)

    def http_closing(self, connection: Connection) -> None:
        """As `closing`, for a connection that never became a WebSocket."""
        self._wheel.put(connection, self.tick + _ticks(self.close_timeout_s))
        if connection.unsent_bytes > _SMALL_ANSWER_BYTES:
            self._last_answers[connection] = (connection.undelivered_bytes, self.tick + _ticks(_LAST_ANSWER_S))
        self._backpressure.closing(connection)

    def departed(self, connection: Connection) -> None:
        self._wheel.drop(connection)
        self._last_answers.pop(connection, None)
        self._forget_sign_in(connection)
        self._answered(connection)

    def silent_s(self, connection: Connection) -> float:
        """How long ago bytes last came from it, rounded up."""
        return (self.tick - connection.heard_tick + 1) * TICK_S

    async def ping(self, connections: Sequence[Connection], ping: bytes, timeout_s: float) -> list[Connection]:
        """Ping connections. Returns those that are open and from which no bytes came within `timeout_s`.

        Returns early when all have answered or closed.
        """
        connections = [connection for connection in connections if connection.state == _engine.OPEN]
        if not connections:
            return []
        # Bytes that came in this tick, before the ping, don't count.
        tick = self.tick
        pinged = _Ping(connections)
        for connection in connections:
            connection.heard_tick = min(connection.heard_tick, tick - 1)
            connection.awaits_pong = True
            self._pings.setdefault(connection, []).append(pinged)
            connection.send(ping)
        try:
            async with asyncio.timeout(timeout_s):
                await pinged.answered.wait()
        except TimeoutError:
            for connection in pinged.missing:
                self._forget_ping(connection, pinged)
        # A later ping may have lowered `heard_tick` of a connection that answered this one.
        return [
            connection
            for connection in connections
            if connection in pinged.missing and connection.state == _engine.OPEN and connection.heard_tick < tick
        ]

    def pong_received(self, connection: Connection) -> None:
        """Called for the first pong after `awaits_pong` was set."""
        self._answered(connection)

    def _answered(self, connection: Connection) -> None:
        for ping in self._pings.pop(connection, ()):
            ping.discard(connection)

    def _forget_ping(self, connection: Connection, ping: _Ping) -> None:
        pings = self._pings[connection]
        pings.remove(ping)
        if not pings:
            del self._pings[connection]

    def sign_in_timeout_changed(self, connection: Connection) -> None:
        """This connection's app has another `user_authentication_timeout_s`; it counts from now on."""
        self._forget_sign_in(connection)
        if not connection.session.authorised:
            self._expect_sign_in(connection, connection.session.app.user_authentication_timeout_s)

    def _expect_sign_in(self, connection: Connection, timeout_s: float) -> None:
        if timeout_s > 0:
            # One tick more: the present one has begun, and no client may be closed early.
            ticks = _ticks(timeout_s) + 1
            self._await_sign_in(connection, ticks, ticks)

    def _await_sign_in(self, connection: Connection, ticks: int, wait: int) -> None:
        self._unauthorised.setdefault((ticks, wait), {})[connection] = self.tick + wait

    def _forget_sign_in(self, connection: Connection) -> None:
        for key, queue in self._unauthorised.items():
            if queue.pop(connection, None) is not None:
                if not queue:
                    del self._unauthorised[key]
                return

    def _close_unauthorised(self) -> None:
        if self._backpressure.unsettled:
            # What a client has sent may not have been read yet. Its time begins again when all are read.
            self._unread_tick = self.tick
            return
        for key, queue in list(self._unauthorised.items()):
            ticks, _ = key
            if self.tick - self._unread_tick < ticks:
                continue
            late: list[Connection] = []
            for connection, deadline in queue.items():
                if deadline > self.tick or len(late) == self.max_expired_a_tick:
                    break
                late.append(connection)
            for connection in late:
                del queue[connection]
            if not queue:
                del self._unauthorised[key]
            for connection in late:
                self._sign_in_late(connection, ticks)

    def _sign_in_late(self, connection: Connection, ticks: int) -> None:
        session = connection.session
        timeout_s = session.app.user_authentication_timeout_s
        if session.authorised or timeout_s <= 0 or _ticks(timeout_s) + 1 != ticks:
            # If the timeout was changed a moment ago, the connection is about to get its new deadline.
            return
        if _awaits_entry(session):
            # The client did its part. If Redis doesn't answer within 30 s, the join closes the connection with 4100.
            self._await_sign_in(connection, ticks, min(ticks, _ticks(_LOOK_AGAIN_S)))
            return
        text = f"neither signed in nor in a private channel within {_seconds(ticks)} s"
        connection.shut(Code.UNAUTHORIZED, text)

    def _due(self, connection: Connection) -> None:
        state = connection.state
        if state == _engine.OPEN:
            self._check_idle(connection)
        elif state == _engine.HTTP:
            self._http_late(connection)
        elif state == _engine.HEAD:
            self._head_late(connection)
        elif state == _engine.CLOSING:
            self._close_late(connection)

    def _close_late(self, connection: Connection) -> None:
        """Its time to close is over, unless its client reads the last answer."""
        before, until = self._last_answers.get(connection, (0, 0))
        # Not `unsent_bytes`: the kernel may have megabytes, and takes no more before a third of them is read.
        if self.tick < until and (undelivered := connection.undelivered_bytes) < before:
            self._last_answers[connection] = (undelivered, until)
            self._wheel.put(connection, self.tick + _ticks(self.close_timeout_s))
        else:
            connection.abort()

    def _check_idle(self, connection: Connection) -> None:
        """Ping after `activity_timeout_s` without bytes, close after `pong_timeout_s` more (protocol/README.md
        "Connecting")."""
        if self._backpressure.unsettled:
            # No client is read now. Time in which we were not reading doesn't count as idle.
            self._wheel.put(connection, self.tick + self._silent_ticks)
            return
        silent = self.tick - connection.heard_tick
        if silent < self._silent_ticks:
            self._wheel.put(connection, self.tick + self._silent_ticks - silent)
        elif silent < self._silent_ticks + self._pinged_ticks:
            connection.send(self._ping)
            self._wheel.put(connection, self.tick + self._pinged_ticks)
        elif silent < self._silent_ticks + self._pong_ticks:
            # It was pinged, and its time to answer isn't over. One tick more at the end, because `ping` may have taken
            # one from `heard_tick`.
            left = self._silent_ticks + self._pong_ticks - silent + 1
            self._wheel.put(connection, self.tick + min(self._pinged_ticks, left))
        else:
            connection.shut(Code.PONG_NOT_RECEIVED, CLOSE_TEXTS[Code.PONG_NOT_RECEIVED])

    # -- ticks --------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        self._timer = self.loop.call_later(TICK_S, self._fire)

    def _fire(self) -> None:
        # First, so that an exception doesn't end the ticks.
        self._arm()
        self.advance()

    def advance(self) -> None:
        """One tick, however late: time in which the loop stood still doesn't count as idle."""
        self.tick += 1
        _engine.set_tick(self.tick)
        self._backpressure.check(self.tick)
        if self._unauthorised:
            self._close_unauthorised()
        for connection in self._wheel.advance(self.tick):
            try:
                self._due(connection)
            except Exception as error:
                # The others' deadlines are out of the wheel, too, and no one would look at them again.
                self.loop.call_exception_handler({"message": "a deadline was not carried out", "exception": error})
        self._on_tick()
        if self.tick % STATS_EVERY_TICKS == 0:
            self._stats()


def _awaits_entry(session: Session) -> bool:
    """Whether Redis has yet to answer a subscribe to a private or presence channel. It was rightly signed: the session
    refuses others at once."""
    return any(subscription.pending and needs_auth(name) for name, subscription in session.channels.items())


def _seconds(ticks: int) -> str:
    return f"{(ticks - 1) * TICK_S:g}"


def _ticks(seconds: float) -> int:
    return max(1, round(seconds / TICK_S))
