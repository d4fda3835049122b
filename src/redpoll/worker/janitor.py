"""Everything in a worker that happens because time went by.

One wheel holds one deadline per connection: the head that must be complete, the silence that must end, the
close that must be answered. Beside it stand those who have yet to prove who they are (protocol.md 10.4). Also
the loop's own pulse (its lag) and the counters told to Redis.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any

from redpoll import _engine, _frame
from redpoll._wheel import Wheel
from redpoll.config import Settings
from redpoll.protocol import frames
from redpoll.worker.backpressure import Backpressure

if TYPE_CHECKING:
    from redpoll.worker.connection import Connection

__all__ = ["Janitor"]

# Four looks a second: deadlines are kept to a quarter of one, for the price of a call of no arguments.
TICK_S = 0.25
_SLOTS = 1024
# How long a peer may take to answer our Close frame, and to take what it is still owed (RFC 6455 7.1.1).
_CLOSE_TIMEOUT_S = 5.0
# Of those who proved nothing: the others wait for the next beat, so that a crowd of them stops nobody else.
_PROOFS_A_BEAT = 500
_STATS_EVERY_TICKS = round(5.0 / TICK_S)


class Janitor:
    """All timers of a worker. `stats` is called every 5 s, `each_beat` four times a second, when `brake` looks too."""

    def __init__(self, settings: Settings, stats: Callable[[], None], brake: Backpressure) -> None:
        self.loop = asyncio.get_running_loop()
        self._stats = stats
        self._brake = brake
        self._wheel = Wheel(_SLOTS)
        # Not 0: there is one before each (`listen`).
        self._tick = 1
        self._expected_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._head_ticks = _ticks(settings.head_timeout_s)
        self._silent_ticks = _ticks(settings.activity_timeout_s)
        self._pong_ticks = _ticks(settings.pong_timeout_s)
        # Two pings: browsers answer the WebSocket's without their page, old clients only the protocol's.
        self._ping = _frame.text(frames.ping()) + _frame.ping(b"")
        # By the ticks they have: who is yet to sign in, or to enter a private or presence channel, and until when.
        # All in one queue have the same time, so the oldest come first and a beat looks at no others: a second
        # deadline that costs nothing where no app asks for it, and one entry of a dict where one does.
        self._unproven: dict[int, dict[Connection, int]] = {}
        self.loop_lag_s = 0.0
        self.head_late: Callable[[Connection], None]
        self.each_beat: Callable[[], None]

    def start(self) -> None:
        _engine.set_tick(self._tick)
        self._arm()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run `work` beside the loop; its failure goes to the loop's exception handler, never lost."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- a connection's deadlines --------------------------------------------------------------------------

    def arrived(self, connection: Connection) -> None:
        self._wheel.put(connection, self._tick + self._head_ticks)

    def opened(self, connection: Connection) -> None:
        self._wheel.put(connection, self._tick + self._silent_ticks)
        self._expect_proof(connection, connection.session.app.user_authentication_timeout_s)

    def closing(self, connection: Connection) -> None:
        self._wheel.put(connection, self._tick + _ticks(_CLOSE_TIMEOUT_S))
        self._forget_proof(connection)
        self._brake.closing(connection)

    def departed(self, connection: Connection) -> None:
        self._wheel.drop(connection)
        self._forget_proof(connection)

    def silent_s(self, connection: Connection) -> float:
        """How long ago bytes last came from it, rounded up."""
        return (self._tick - connection.heard_tick + 1) * TICK_S

    def listen(self, connection: Connection) -> int:
        """Whoever wants to know whether bytes come from now on: they came when `heard_tick` is what this returns, or
        greater. Several may, of the same connection."""
        connection.heard_tick = min(connection.heard_tick, self._tick - 1)
        return self._tick

    def proof_changed(self, connections: Iterable[Connection], timeout_s: float) -> None:
        """The app of these open connections has another `user_authentication_timeout_s`: it counts from now on."""
        for connection in connections:
            self._forget_proof(connection)
            if not connection.session.authorised:
                self._expect_proof(connection, timeout_s)

    def _expect_proof(self, connection: Connection, timeout_s: float) -> None:
        if timeout_s > 0:
            # One tick more: the present one has begun already, and nobody is to be closed early.
            ticks = _ticks(timeout_s) + 1
            self._unproven.setdefault(ticks, {})[connection] = self._tick + ticks

    def _forget_proof(self, connection: Connection) -> None:
        # A few queues at most: as many as there are different timeouts.
        for ticks, queue in self._unproven.items():
            if queue.pop(connection, None) is not None:
                if not queue:
                    del self._unproven[ticks]
                return

    def _ask_for_proof(self) -> None:
        for ticks, queue in list(self._unproven.items()):
            late: list[Connection] = []
            for connection, deadline in queue.items():
                if deadline > self._tick or len(late) == _PROOFS_A_BEAT:
                    break
                late.append(connection)
            for connection in late:
                del queue[connection]
            if not queue:
                del self._unproven[ticks]
            for connection in late:
                if not connection.session.authorised:
                    connection.shut(4009, f"neither signed in nor in a private channel within {_seconds(ticks)} s")

    def _due(self, connection: Connection) -> None:
        state = connection.state
        if state == _engine.OPEN:
            self._listen_to_silence(connection)
        elif state == _engine.HEAD:
            self.head_late(connection)
        elif state == _engine.CLOSING:
            connection.abort()

    def _listen_to_silence(self, connection: Connection) -> None:
        """Silence of `activity_timeout_s`: ping; of `pong_timeout_s` more: 4201 (decisions.md)."""
        if self._brake.on:
            # We don't listen to anybody. When we do again, that counts as life.
            self._wheel.put(connection, self._tick + self._silent_ticks)
            return
        silent = self._tick - connection.heard_tick
        if silent < self._silent_ticks:
            self._wheel.put(connection, self._tick + self._silent_ticks - silent)
        elif silent < self._silent_ticks + self._pong_ticks:
            connection.send(self._ping)
            self._wheel.put(connection, self._tick + self._pong_ticks)
        else:
            connection.shut(4201, "Pong reply not received in time")

    # -- the pulse -----------------------------------------------------------------------------------------

    def _arm(self) -> None:
        self._expected_at = self.loop.time() + TICK_S
        self._timer = self.loop.call_at(self._expected_at, self._beat)

    def _beat(self) -> None:
        self.loop_lag_s = max(self.loop.time() - self._expected_at, self.loop_lag_s)
        # One tick a beat, however late: time in which we didn't listen is nobody's silence.
        self._tick += 1
        _engine.set_tick(self._tick)
        self._arm()
        self._brake.look(self._tick)
        if self._unproven:
            self._ask_for_proof()
        for connection in self._wheel.advance(self._tick):
            self._due(connection)
        self.each_beat()
        if self._tick % _STATS_EVERY_TICKS == 0:
            self._stats()
            self.loop_lag_s = 0.0


def _seconds(ticks: int) -> str:
    return f"{(ticks - 1) * TICK_S:g}"


def _ticks(seconds: float) -> int:
    return max(1, round(seconds / TICK_S))
