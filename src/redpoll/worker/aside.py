"""Takes this worker out of service while it can't reach Redis, and back, as its supervisor decides (cut_off.py).

Its clients would miss every event without notice. They are closed with 4200, so that they connect to a worker that gets
events. Publishes wait for this worker until it has said that no client is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

import structlog

from redpoll.cluster.membership.connection_state import Reach
from redpoll.cluster.membership.registry import Registry
from redpoll.protocol.handshake import Refusal
from redpoll.worker.drain import DRAINED, Drain
from redpoll.worker.hub import Hub

__all__ = ["Aside"]

log = structlog.get_logger()

_MESSAGE: Final = "this worker has lost its connection to Redis; connect again"
# Over how long the connections are closed. Publishes on all nodes may be waiting for it.
_WITHIN_S: Final = 0.5
_LOOK_EVERY_S: Final = 0.02


class Aside:
    """`on` while no client may be here: the gate admits none. `tell` sends a message to the supervisor."""

    def __init__(
        self,
        hub: Hub,
        registry: Registry,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        tell: Callable[[dict[str, Any]], None],
    ) -> None:
        self.on = False
        self._hub = hub
        self._registry = registry
        self._spawn = spawn
        self._tell = tell
        self._drain = Drain(hub.everyone, spawn)

    def set(self, on: bool) -> None:
        """The supervisor takes this worker out of service (True) or back. `{"aside": True}` follows when no client is
        left, or `{"aside": False}` if this worker has reached Redis meanwhile and stays in service."""
        if not on:
            self.on = False
            return
        if self._registry.reach is Reach.SUBSCRIBED:
            self._tell({"aside": False})
            return
        self.on = True
        log.error("clients closed, this worker does not reach redis", connections=len(self._hub.everyone))
        self._hub.admission.dismiss(Refusal(DRAINED, _MESSAGE))
        self._spawn(self._close_all())

    async def _close_all(self) -> None:
        self._drain.begin(_MESSAGE, _WITHIN_S)
        while len(self._hub.everyone):
            await asyncio.sleep(_LOOK_EVERY_S)
        self._tell({"aside": True})
