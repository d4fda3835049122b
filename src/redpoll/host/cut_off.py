"""Workers that can't reach Redis although their supervisor can: their clients go elsewhere, and publishes don't wait.

Redis' `maxclients`, the descriptors of one process, a certificate or a password may keep one worker from connecting
while everything else works. Its clients would miss every event, and publishes on all nodes would wait for it
(cluster/membership/README.md "Reconnecting"). The same holds for a whole node that alone lacks a master of a Cluster
(Heartbeat.answered_s_ago). So such a worker is asked to close its clients with 4200 (worker/aside.py). When it says
that none is left, the node says so in its heartbeat, and publishes don't wait for this worker any more.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final

import structlog

from redpoll.cluster.membership.connection_state import Reach
from redpoll.host.child import Child
from redpoll.host.heartbeat import Heartbeat
from redpoll.ipc.messages import EndService, ReturnToService, TellReach, WorkersCutOff

__all__ = ["CutOffWorkers", "Service"]

log = structlog.get_logger()

_TICK_S: Final = 0.25
# Heartbeats are sent every second. Without an answer for longer, Redis is away for this node and not for one worker.
_HEARTBEAT_WITHIN_S: Final = 1.5
# In ticks, which are counted like the supervisor's pings: after a stall of this process, a late tick counts once.
MAX_DOWN: Final = 16
# A worker with many channels takes a while to subscribe them again, but then other workers of its node do, too.
MAX_CONNECTING: Final = 40
MAX_CONNECTING_ALONE: Final = 120
# It doesn't say whether it is connected since Redis came back: it hangs.
MAX_SILENT: Final = 40
MAX_LEAVING: Final = 40
# All nodes read each other's heartbeats once a second: then all wait for the worker again before it admits a client.
RETURN_TICKS: Final = 14


class Service(Enum):
    """Whether a worker may have clients."""

    SERVING = "serving"
    LEAVING = "leaving"
    """It was asked to close its clients."""
    OUT = "out"
    """It has no clients and admits none."""
    RETURNING = "returning"
    """It is subscribed again. It admits clients when all nodes know that publishes must wait for it."""


class _Worker:
    """What is known about the process that runs in `child`. `reach` is None until it says so, also after Redis came
    back."""

    __slots__ = (
        "child",
        "connecting",
        "down",
        "has_spoken",
        "leaving",
        "reach",
        "returning",
        "said_down",
        "service",
        "silent",
    )

    def __init__(self, child: Child) -> None:
        self.child = child
        self.reach: Reach | None = None
        self.has_spoken = False
        # What it said last, also before Redis came back.
        self.said_down = False
        self.service = Service.SERVING
        self.leaving = self.returning = 0
        self.forget()

    def forget(self) -> None:
        """Restarts the counts of ticks without Redis."""
        self.down = self.connecting = self.silent = 0


class CutOffWorkers:
    """Decides which of the `workers` are in service. `changed()` is called when `without_clients` or `numbers` have
    changed. Create it and call `start` inside the running loop."""

    def __init__(self, workers: Sequence[Child], heartbeat: Heartbeat, changed: Callable[[], None]) -> None:
        self._workers = [_Worker(child) for child in workers]
        self._heartbeat = heartbeat
        self._changed = changed
        self._connects = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def without_clients(self) -> list[int]:
        """The `k` of the workers that publishes need not wait for."""
        return [worker.child.process for worker in self._workers if worker.service is Service.OUT]

    @property
    def numbers(self) -> list[int]:
        """The numbers of the workers that are out of service."""
        return [number for number, worker in enumerate(self._workers) if worker.service is not Service.SERVING]

    @property
    def down(self) -> list[int]:
        """The `k` of the workers that said last that Redis is down. They can't write that to Redis."""
        return [worker.child.process for worker in self._workers if worker.said_down]

    def message(self) -> WorkersCutOff:
        return WorkersCutOff(self.numbers, self.without_clients, self.down)

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_TICK_S, self.start)
        self.tick()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def process_ended(self, child: Child) -> None:
        """What was known was about this process. The next one is in service, and says at its start that it is down."""
        self._workers = [_Worker(child) if worker.child is child else worker for worker in self._workers]

    def said(self, child: Child, reach: Reach) -> None:
        """A worker says how far it has come with Redis."""
        worker = self._of(child)
        worker.reach = reach
        worker.has_spoken = True
        worker.said_down = reach is Reach.DOWN
        worker.silent = 0
        if worker.reach is Reach.SUBSCRIBED:
            worker.forget()

    def left(self, child: Child, without_clients: bool) -> None:
        """A worker that was asked to close its clients has none left, or has reached Redis before and keeps them. Or it
        has closed them unasked, because this process didn't run."""
        worker = self._of(child)
        if worker.service in (Service.SERVING, Service.LEAVING):
            self._change(worker, Service.OUT if without_clients else Service.SERVING)

    def tick(self) -> None:
        """Called four times a second."""
        if self._heartbeat.answered_s_ago > _HEARTBEAT_WITHIN_S:
            for worker in self._workers:
                worker.forget()
                worker.returning = 0
            return
        if self._connects != self._heartbeat.connects:
            # What workers said before may be over.
            self._connects = self._heartbeat.connects
            for worker in self._workers:
                worker.reach = None
                worker.child.send(TellReach())
        for worker in self._workers:
            if not worker.child.ended.is_set():
                self._look(worker)

    def _look(self, worker: _Worker) -> None:
        if worker.reach is None:
            worker.silent += worker.has_spoken
            if worker.silent == MAX_SILENT:
                self._kill(worker, "it does not say whether it reaches redis")
        elif worker.service is Service.SERVING:
            self._count(worker)
        elif worker.service is Service.LEAVING:
            worker.leaving += 1
            if worker.leaving == MAX_LEAVING:
                self._kill(worker, "it did not close its clients in time")
        elif worker.reach is not Reach.SUBSCRIBED:
            self._change(worker, Service.OUT)
        elif worker.service is Service.OUT:
            worker.returning = 0
            self._change(worker, Service.RETURNING)
        else:
            worker.returning += 1
            if worker.returning == RETURN_TICKS:
                worker.forget()
                worker.child.send(ReturnToService())
                self._change(worker, Service.SERVING)

    def _count(self, worker: _Worker) -> None:
        worker.down += worker.reach is Reach.DOWN
        worker.connecting += worker.reach is Reach.CONNECTING
        others = any(other.reach is Reach.SUBSCRIBED for other in self._workers if other is not worker)
        max_connecting = MAX_CONNECTING if others else MAX_CONNECTING_ALONE
        if worker.down >= MAX_DOWN or worker.connecting >= max_connecting:
            worker.leaving = 0
            worker.child.send(EndService())
            self._change(worker, Service.LEAVING)

    def _kill(self, worker: _Worker, why: str) -> None:
        log.error("child killed, publishes wait for it", child=worker.child.name, why=why)
        worker.child.signal(signal.SIGKILL)

    def _change(self, worker: _Worker, service: Service) -> None:
        if service is worker.service:
            return
        about = {"worker": worker.child.name, "k": worker.child.process, "service": service.value}
        if service is Service.LEAVING:
            reach = worker.reach.value if worker.reach else None
            log.error("worker does not reach redis, its clients are closed", **about, connection=reach)
        else:
            log.warning("worker's service changed", **about)
        worker.service = service
        self._changed()

    def _of(self, child: Child) -> _Worker:
        return next(worker for worker in self._workers if worker.child is child)
