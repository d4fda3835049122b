"""The supervisor: the process that starts Redis, the control plane and the workers, restarts them and stops them.

It serves no clients itself. It creates every listening socket, so that the accept queue of a crashed worker waits for
the next one. It restarts children that die, with a growing delay, and kills those that hang. SIGTERM and Ctrl-C become
an orderly stop. It talks to each child over a pipe (child_pipe.py), and to other nodes through Redis (heartbeat.py).
"""

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Callable
from typing import Any, assert_never

import msgspec
import structlog

from redpoll import __version__
from redpoll.cluster.lifecycle import Life, Lifecycle
from redpoll.cluster.nodes import Node
from redpoll.config.config import Settings
from redpoll.config.reloading import reload
from redpoll.host.child import Child
from redpoll.host.children import Children, Place, Sockets
from redpoll.host.cut_off import CutOffWorkers
from redpoll.host.first_start import FirstStart
from redpoll.host.fitness import ControlFitness
from redpoll.host.heartbeat import Heartbeat
from redpoll.host.system import has_terminal, notify_systemd, notify_watchdog
from redpoll.host.ticket_keys import TicketKeyring
from redpoll.ipc.messages import (
    AdminCreated,
    AppCreated,
    BeginStop,
    CertificateChanged,
    ClientsLeft,
    Deaf,
    DeafWorkers,
    DirectoryVersion,
    Evacuate,
    Fatal,
    FitnessReport,
    FromChild,
    Lead,
    ListenersClosed,
    LivingWorkers,
    NodesChanged,
    ReachChanged,
    Ready,
    RecordStore,
    Reload,
    Reloaded,
    Serve,
    SettingsChanged,
    ShardKey,
    Stop,
    WorkersReady,
)
from redpoll.text import logs

__all__ = ["Supervisor"]

log = structlog.get_logger()

# If a child ends this often in a row before the server was ready for the first time, the start has failed.
_FAILED_STARTS = 5
_STOP_LISTENING_WITHIN_S = 1.0
# After the grace period a worker cuts its remaining connections and signs off in Redis, within this time.
_SIGN_OFF_WITHIN_S = 2.0
# More than 9 s: what commands, requests, webhooks and spans may take at its end, one after another.
_CONTROL_ENDS_WITHIN_S = 10.0
# A child whose loop leaves so many pings in a row unanswered, about 30 s, hangs and is killed.
_PING_EVERY_S = 1.0
# Clients that a worker takes over per second, in its heartbeat. It can connect and subscribe four times as many.
_ACCEPTS_PER_WORKER_S = 1_000
_MAX_SILENT_PINGS = 30
# A worker has no long work at its start, so it hangs too if it leaves so many unanswered before its first answer. Until
# it is ready, publishes of all nodes wait for it after Redis was away.
_MAX_SILENT_PINGS_AT_START = 60
_REDIS_ENDS_WITHIN_S = 10.0


class Supervisor:
    """Runs the children. `run()` returns the exit code: 0, 1 for a failed start, 130 for a second Ctrl-C.

    Create it inside the running loop. `reread` reads the settings again for a reload.
    """

    def __init__(self, settings: Settings, place: Place, sockets: Sockets, reread: Callable[[], Settings]) -> None:
        self._settings = settings
        self._reread = reread
        self._folder = place.folder
        self._ports = sockets.ports()
        self._life = Life()
        self._announced = False
        # The numbers of workers that get no messages from Redis.
        self._deaf: set[int] = set()
        self._started_at = time.time()
        self._fitness = ControlFitness()
        self._joined = False
        self._directory_version: int | None = None
        self._shard_key: str | None = None
        self._failure: str | None = None
        self._interrupts = 0
        self._ends_with_terminal = False
        self._first_start = FirstStart(settings, place.folder)
        self._children = children = Children(settings, place, sockets, self._send_alive, self._started, self._received)
        alone, prefix = place.redis_binary is not None, settings.redis_prefix
        self._heartbeat = Heartbeat(children.redis_url, prefix, children.run, self._describe, self, alone=alone)
        self._tickets: TicketKeyring | None = None
        if sockets.tls:
            self._tickets = TicketKeyring(children.redis_url, prefix, children.workers, self._announce)
        self._cut_off = CutOffWorkers(children.workers, self._heartbeat, self._send_alive)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap_children)
        loop.add_signal_handler(signal.SIGTERM, self._life.become, Lifecycle.DRAINING)
        loop.add_signal_handler(signal.SIGINT, self._interrupt_received)
        # nohup sets SIGHUP to "ignore": then the server outlives its terminal.
        self._ends_with_terminal = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN and has_terminal()
        loop.add_signal_handler(signal.SIGHUP, self._hangup_received)
        log.info("starting", run=self._children.run, workers=len(self._children.workers), data_dir=str(self._folder))
        starting = asyncio.create_task(self._start())
        starting.add_done_callback(self._start_done)
        loop.call_later(_PING_EVERY_S, self._ping_children)
        await self._life.until(Lifecycle.DRAINING)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await self._stop()
        if self._failure is not None:
            log.error("server failed" if self._announced else "start failed", reason=self._failure)
            return 1
        return 130 if self._interrupts > 1 else 0

    # -- starting

    async def _start(self) -> None:
        await self._children.start()
        self._heartbeat.start()
        if self._tickets is not None:
            self._tickets.start()
        self._cut_off.start()

    def _start_done(self, starting: asyncio.Task[None]) -> None:
        if not starting.cancelled() and (error := starting.exception()) is not None:
            self._fail(f"a process could not be started: {error}")

    def _started(self, child: Child) -> None:
        """Tells a new process what it must know."""
        if child.process:
            if self._tickets is not None:
                self._tickets.tell(child)
            if self._shard_key is not None:
                child.send(ShardKey(self._shard_key))
            if self._joined and self._directory_version is not None:
                child.send(DirectoryVersion(self._directory_version))
            self._send_drain(child)
            return
        self._send_alive()
        if self._heartbeat.message is not None:
            child.send(self._heartbeat.message)
        child.send(Lead(self._heartbeat.term))
        self._send_drain(child)
        if self._announced:
            child.send(WorkersReady())
        if self._deaf:
            child.send(DeafWorkers(sorted(self._deaf)))
        self._heartbeat.beat_now()

    def _send_drain(self, child: Child) -> None:
        if self._heartbeat.drain_within_s is not None:
            child.send(Evacuate(self._heartbeat.drain_within_s, self._max_per_s()))

    def _send_alive(self) -> None:
        self._children.control.send(LivingWorkers(sorted(self._children.alive), self._children.greatest))
        self._children.control.send(self._cut_off.message())
        self._heartbeat.beat_now()

    # -- the other nodes

    def _describe(self, store: str, beat: int) -> Node:
        return Node(
            name=self._settings.node_name or socket.gethostname(),
            version=__version__,
            store=store,
            started=self._started_at,
            workers=sorted(self._children.alive),
            greatest=self._children.greatest,
            control=not self._children.control.ended.is_set(),
            lifecycle=self._life.state,
            beat=beat,
            accepts_per_s=_ACCEPTS_PER_WORKER_S * len(self._children.alive),
            without_clients=self._cut_off.without_clients,
            fitness=self._fitness.present(),
        )

    def joined(self) -> None:
        """The node may use its keys in Redis, so workers may admit clients."""
        self._joined = True
        self._send_directory_version()

    def refused(self, sentence: str) -> None:
        """A node with another record store uses the same keys."""
        if self._joined:
            # Redis lost its data, or we stalled, and the other server began meanwhile.
            log.error("another record store uses the same keys in redis", what=sentence)
        else:
            self._fail(sentence)

    def nodes_changed(self, message: NodesChanged) -> None:
        """Control lists the nodes, and reaps the workers of dead ones."""
        self._children.control.send(message)

    def term_changed(self, term: int | None) -> None:
        """Control does the work of the leader while `term` isn't None."""
        self._children.control.send(Lead(term))

    def drain_changed(self, within_s: float | None) -> None:
        """Workers close their connections and admit no more, or admit clients again (None)."""
        self._life.become(Lifecycle.SERVING if within_s is None else Lifecycle.EVACUATING)
        message = Serve() if within_s is None else Evacuate(within_s, self._max_per_s())
        for child in self._children.ours:
            child.send(message)
        self._heartbeat.beat_now()

    def _max_per_s(self) -> float | None:
        """The connections that each worker may close per second, so that the other nodes can accept their clients. None
        without other nodes."""
        known = self._heartbeat.message
        others = [
            node
            for node in (known.nodes if known is not None else ())
            if node.run != self._children.run and node.alive and node.serves
        ]
        accepted_per_s = sum(node.accepts_per_s for node in others)
        return accepted_per_s / max(1, len(self._children.alive)) if accepted_per_s else None

    def _send_directory_version(self) -> None:
        # Workers admit no clients until Redis has this version: older records may lack a change that a command made
        # while no server ran. They don't get it before the node has joined, because the directory in Redis may be
        # that of other servers.
        if self._joined and self._directory_version is not None:
            for worker in self._children.workers:
                worker.send(DirectoryVersion(self._directory_version))

    def _learn_shard_key(self, key: str) -> None:
        """Workers connect to Redis when they know in which shards the record store's channels are."""
        if self._shard_key is None:
            self._shard_key = key
            for worker in self._children.workers:
                worker.send(ShardKey(key))
        elif key != self._shard_key:
            # Control restarted, and its database is another one. Its channels would be elsewhere than the workers'.
            self._fail("the record store was replaced by another one while the server ran: start the server again")

    # -- messages from children

    def _received(self, child: Child, message: FromChild) -> None:
        match message:
            case Ready():
                child.ready = True
                self._announce()
            case ListenersClosed():
                child.stopped_listening.set()
            case Deaf():
                self._set_deaf(child, message.deaf)
            case ReachChanged():
                self._cut_off.said(child, message.reach)
                self._children.control.send(self._cut_off.message())
            case ClientsLeft():
                self._cut_off.left(child, message.all)
            case RecordStore():
                self._learn_shard_key(message.shard_key)
                self._heartbeat.know_store(message.store, message.term)
            case DirectoryVersion():
                self._directory_version = message.version
                self._send_directory_version()
            case FitnessReport():
                if self._fitness.changes(message.fitness):
                    self._heartbeat.beat_now()
            case AppCreated():
                self._first_start.app = message.app
            case AdminCreated():
                self._first_start.admin_created(message.password)
            case Reload():
                self._children.control.send(Reloaded(self._reload()))
            case Fatal():
                if not self._announced:
                    # The child can't start, and a restart would fail in the same way.
                    self._fail(message.reason)
            case _:
                assert_never(message)

    def _set_deaf(self, child: Child, deaf: bool) -> None:
        """A worker gets no messages from Redis, gets them again, or ended. /readyz shows it."""
        number = self._children.workers.index(child)
        if deaf != (number in self._deaf):
            self._deaf ^= {number}
            self._children.control.send(DeafWorkers(sorted(self._deaf)))

    def _announce(self) -> None:
        """When all children are ready for the first time."""
        if self._announced or not all(child.ready for child in self._children.ours):
            return
        if self._tickets is not None and not self._tickets.is_settled:
            # Clients that come back after a restart resume their TLS sessions.
            return
        self._announced = True
        self._children.control.send(WorkersReady())
        notify_systemd("READY=1")
        self._first_start.announce(*self._ports)

    # -- children that end

    def _reap_children(self) -> None:
        for child in self._children.all:
            code = child.take_exit_code()
            if code is not None:
                self._child_ended(child, code)

    def _child_ended(self, child: Child, code: int) -> None:
        # A worker that died can't report this.
        child.stopped_listening.set()
        if child.process:
            self._children.alive.discard(child.process)
            self._set_deaf(child, False)
            self._cut_off.process_ended(child)
            self._send_alive()
        if self._life.ends:
            return
        if child.quick_deaths >= _FAILED_STARTS and not self._announced:
            self._fail(self._why_failed(child))
            return
        delay_s = child.restart_delay_s()
        log.error("child ended", child=child.name, code=code, restart_in_s=delay_s)
        asyncio.get_running_loop().call_later(delay_s, self._restart, child)

    def _ping_children(self) -> None:
        """Kills children that hang. Nothing else decides that a process is dead: until it is waited for, control
        doesn't reap it, however long it stalls (cluster/membership/README.md "Dead workers")."""
        asyncio.get_running_loop().call_later(_PING_EVERY_S, self._ping_children)
        notify_watchdog()
        for child in self._children.ours:
            if child.ping() == _MAX_SILENT_PINGS:
                log.error("child killed, it does not answer", child=child.name, unanswered_pings=_MAX_SILENT_PINGS)
                child.signal(signal.SIGKILL)
            elif child.process and child.unanswered_at_start == _MAX_SILENT_PINGS_AT_START:
                log.error(
                    "child killed, it does not start", child=child.name, unanswered_pings=_MAX_SILENT_PINGS_AT_START
                )
                child.signal(signal.SIGKILL)

    def _restart(self, child: Child) -> None:
        if self._life.ends:
            return
        child.stopped_listening.clear()
        try:
            child.start()
        except OSError as error:
            # Out of memory, processes or descriptors. This may pass, so try again.
            delay_s = child.delay_after_failure_s()
            log.error("child not started", child=child.name, reason=str(error), restart_in_s=delay_s)
            asyncio.get_running_loop().call_later(delay_s, self._restart, child)

    def _why_failed(self, child: Child) -> str:
        why = f"{child.name} ended {child.quick_deaths} times in a row"
        if child is self._children.redis:
            why += f"; its log ends with: {self._children.log_of_redis()}"
        return why

    def _fail(self, why: str) -> None:
        self._failure = why
        self._life.become(Lifecycle.DRAINING)

    # -- SIGHUP

    def _hangup_received(self) -> None:
        """SIGHUP means "reload", or that our terminal was closed."""
        if self._ends_with_terminal and not has_terminal():
            # The terminal is gone, so no one can stop this process and nothing can be logged. The children end with it.
            asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
            signal.raise_signal(signal.SIGHUP)
        self._reload()

    def _reload(self) -> dict[str, Any]:
        """Applies what a running server can. Returns `Reloaded.answer`."""
        outcome = reload(self._settings, self._folder, self._reread)
        self._settings = outcome.settings
        # Children have the one file that was written of these.
        files = ("tls_cert", "tls_key", "tls_ocsp")
        if sent := {name: value for name, value in outcome.applied.items() if name not in files}:
            self._apply(sent)
        if outcome.certificate:
            served = self._children.ours if self._settings.tls_client_ca else self._children.workers
            for child in served:
                child.send(CertificateChanged())
        outcome.log()
        return outcome.answer()

    def _apply(self, changes: dict[str, Any]) -> None:
        """Sends changed settings to the children. Those that start later get them as well."""
        self._children.settings = msgspec.structs.replace(self._children.settings, **changes)
        if "log_level" in changes:
            logs.configure(self._settings, "supervisor")
        for child in self._children.ours:
            child.send(SettingsChanged(changes))

    # -- stopping

    def _interrupt_received(self) -> None:
        self._interrupts += 1
        self._life.become(Lifecycle.DRAINING)
        if self._interrupts > 1:
            for child in self._children.all:
                child.signal(signal.SIGKILL)

    async def _stop(self) -> None:
        """Stops in order: readiness, listening sockets, connections, control plane, Redis."""
        grace_s = self._settings.shutdown_grace_s
        log.info("stopping", grace_s=grace_s)
        notify_systemd("STOPPING=1")
        self._heartbeat.beat_now()
        self._cut_off.stop()
        self._children.control.send(BeginStop())
        for child in self._children.workers:
            child.send(BeginStop())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wait_stopped_listening(), _STOP_LISTENING_WITHIN_S)
        stop = Stop(self._max_per_s())
        for child in self._children.workers:
            # These are the last copies; once they are closed the kernel refuses new connections.
            child.close_listeners()
            child.send(stop)
        await asyncio.gather(*(child.wait_ended(grace_s + _SIGN_OFF_WITHIN_S) for child in self._children.workers))
        self._children.control.send(Stop())
        await self._children.control.wait_ended(_CONTROL_ENDS_WITHIN_S)
        await self._heartbeat.leave()
        if self._tickets is not None:
            await self._tickets.close()
        self._children.redis.signal(signal.SIGTERM)
        await self._children.redis.wait_ended(_REDIS_ENDS_WITHIN_S)
        self._life.become(Lifecycle.STOPPED)
        log.info("stopped")

    async def _wait_stopped_listening(self) -> None:
        for child in self._children.workers:
            if not child.ended.is_set():
                await child.stopped_listening.wait()
