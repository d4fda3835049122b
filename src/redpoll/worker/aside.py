"""Takes this worker out of service while it can't reach Redis, and back, as its supervisor decides (cut_off.py).

Its clients would miss every event without notice. They are closed with 4200, so that they connect to a worker that gets
events. Publishes wait for this worker until it has said that no client is left.

The supervisor knows whether Redis is away for all. If it doesn't run, nobody knows, and the worker goes out of service
by itself. The supervisor takes it back when it runs again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

import structlog

from redpoll.cluster.membership.connection_state import Reach
from redpoll.cluster.membership.registry import Registry
from redpoll.ipc.messages import ClientsLeft, FromChild
from redpoll.protocol.errors import Code
from redpoll.protocol.handshake import Refusal
from redpoll.worker.hub.hub import Hub
from redpoll.worker.timers.drain import Drain

__all__ = ["Aside"]

log = structlog.get_logger()

_MESSAGE: Final = "this worker has lost its connection to Redis; connect again"
# Over how long the connections are closed. Publishes on all nodes may be waiting for it.
_WITHIN_S: Final = 0.5
_LOOK_EVERY_S: Final = 0.02
_TICK_S: Final = 0.25
# In ticks, which are counted: after a stall of this process, a late tick counts once. The supervisor sends a ping each
# second, and decides after 4 s as well.
_MAX_DOWN: Final = 16
_MAX_SILENT: Final = 12


class Aside:
    """`on` while no client may be here: the gate admits none. `drain_streams(within_s)` ends those who read channels
    over HTTP. `tell` sends a message to the supervisor, `pings()` is how many it has sent."""

    def __init__(
        self,
        hub: Hub,
        registry: Registry,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        drain_streams: Callable[[float], Coroutine[Any, Any, None]],
        tell: Callable[[FromChild], None],
        pings: Callable[[], int],
    ) -> None:
        self.on = False
        self._drain_streams = drain_streams
        self._pings = pings
        self._seen_pings = 0
        # For how many ticks Redis has been away, and the supervisor silent.
        self._down = self._silent = 0
        self._timer: asyncio.TimerHandle | None = None
        self._hub = hub
        self._registry = registry
        self._spawn = spawn
        self._tell = tell
        self._drain = Drain(hub.open_connections, spawn)

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_TICK_S, self.start)
        self.tick()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def tick(self) -> None:
        """Called four times a second."""
        self._down = self._down + 1 if self._registry.reach is Reach.DOWN else 0
        self._silent = self._silent + 1 if self._pings() == self._seen_pings else 0
        self._seen_pings = self._pings()
        if self._down >= _MAX_DOWN and self._silent >= _MAX_SILENT and not self.on:
            log.error("the supervisor does not answer, this worker decides")
            self.set(True)

    def set(self, on: bool) -> None:
        """The supervisor takes this worker out of service (True) or back. `ClientsLeft` follows when no client is left,
        or if this worker has reached Redis meanwhile and stays in service."""
        if not on:
            self.on = False
            return
        if self._registry.reach is Reach.SUBSCRIBED:
            self._tell(ClientsLeft(all=False))
            return
        self.on = True
        log.error("clients closed, this worker does not reach redis", connections=len(self._hub.open_connections))
        self._hub.admission.dismiss(Refusal(Code.RECONNECT, _MESSAGE))
        self._spawn(self._drain_streams(_WITHIN_S))
        self._spawn(self._close_all())

    async def _close_all(self) -> None:
        self._drain.begin(_MESSAGE, _WITHIN_S)
        while len(self._hub.open_connections):
            await asyncio.sleep(_LOOK_EVERY_S)
        self._tell(ClientsLeft(all=True))
