"""The supervisor: the process that starts Redis, the control plane and the workers, restarts them and stops them.

It serves no clients itself. It creates every listening socket, so that the accept queue of a crashed worker waits for
the next one. It restarts children that die, with a growing delay, and kills those that hang. SIGTERM and Ctrl-C become
an orderly stop. It talks to each child over a pipe (child_pipe.py), and to other nodes through Redis (heartbeat.py).
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, assert_never
from urllib.parse import quote

import msgspec
import structlog

from redpoll import __version__
from redpoll.cluster.lifecycle import Life, Lifecycle
from redpoll.cluster.nodes import Node
from redpoll.config import certificate
from redpoll.config.config import Settings
from redpoll.config.reloading import PAIR_NAME, install_pair, reload
from redpoll.config.setting_table import without_secrets
from redpoll.host import datafolder, embedded
from redpoll.host.child import Child
from redpoll.host.cut_off import CutOffWorkers
from redpoll.host.fitness import ControlFitness
from redpoll.host.heartbeat import Heartbeat
from redpoll.host.system import StartError, has_terminal, listen, notify_systemd, notify_watchdog, raise_file_limit
from redpoll.host.welcome import FIRST_LOGIN_NAME, first_login, how_to_use, url_host, where_to_see
from redpoll.ipc.child_pipe import ChildPipe
from redpoll.ipc.messages import (
    FROM_CHILD,
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
    Start,
    Stop,
    WorkersCutOff,
    WorkersReady,
)
from redpoll.text import logs

__all__ = ["StartError", "Supervisor", "child_command", "serve"]

log = structlog.get_logger()

# If a child ends this often in a row before the server was ready for the first time, the start has failed.
_FAILED_STARTS = 5
_STOP_LISTENING_WITHIN_S = 1.0
# After the grace period a worker cuts its remaining connections and signs off in Redis, within this time.
_SIGN_OFF_WITHIN_S = 2.0
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
_MAX_SOCKET_PATH_BYTES = 107


def serve(
    settings: Settings,
    command_of: Callable[[str, int, int], list[str]] | None = None,
    reread: Callable[[], Settings] | None = None,
) -> int:
    """Runs the whole server until a signal stops it, and returns the exit code. Raises StartError.

    `command_of(role, number, pipe_fd)` returns a child's command line. Tests replace it to start stand-ins. `reread`
    reads the settings again for a reload; it raises ConfigError. By default they stay as they are.
    """
    # Files that our processes write may contain secrets.
    os.umask(0o077)
    folder = Path(settings.data_dir).resolve()
    owner = datafolder.foreign_owner(folder)
    if owner is not None:
        raise StartError(
            f"the data folder {folder} belongs to {owner}, who couldn't open what a server of root's writes there: "
            f"start the server as {owner}, or give the folder to root"
        )

    def say(holder: str) -> None:
        log.info("waiting for the data folder", data_dir=str(folder), used_by=holder)

    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(datafolder.lock(folder, "serve", waiting=say))
            open_to_others = datafolder.openness(folder)
            if open_to_others is not None:
                log.warning("data folder open to others", data_dir=str(folder), what=open_to_others)
            redis_binary = None if settings.redis_url else embedded.find_binary()
        except (datafolder.DataFolderError, embedded.RedisMissing) as error:
            raise StartError(str(error)) from error
        public = listen(settings.host, settings.port, count=settings.workers)
        for listener in public:
            stack.enter_context(listener)
        tls: list[socket.socket] = []
        if settings.tls_port is not None:
            tls = listen(settings.host, settings.tls_port, count=settings.workers)
            for listener in tls:
                stack.enter_context(listener)
            try:
                install_pair(settings, folder)
            except certificate.PairError as error:
                raise StartError(f"the TLS certificate can't be used: {error}") from error
            stack.callback((folder / PAIR_NAME).unlink, missing_ok=True)
        control = stack.enter_context(listen(settings.control_host, settings.control_port)[0])
        run_dir = Path(tempfile.mkdtemp(prefix="redpoll-"))
        stack.callback(shutil.rmtree, run_dir, ignore_errors=True)
        raise_file_limit()

        async def run() -> int:
            return await Supervisor(
                settings,
                folder,
                run_dir,
                public,
                tls,
                control,
                redis_binary,
                command_of or child_command,
                reread or (lambda: settings),
            ).run()

        return asyncio.run(run())


def child_command(role: str, number: int, pipe_fd: int) -> list[str]:
    """The command line of a child. `-P` keeps a `redis.py` in the current folder from shadowing the library."""
    arguments = [str(number)] if role == "worker" else []
    return [sys.executable, "-P", "-m", "redpoll", role, *arguments, "--pipe", str(pipe_fd)]


class Supervisor:
    """Runs the children. `run()` returns the exit code: 0, 1 for a failed start, 130 for a second Ctrl-C.

    `public` has one listening socket per worker. `tls` has as many, or none if TLS is off. `redis_binary` is None when
    `settings.redis_url` names a Redis. Create it inside the running loop.
    """

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        run_dir: Path,
        public: list[socket.socket],
        tls: list[socket.socket],
        control: socket.socket,
        redis_binary: Path | None,
        command_of: Callable[[str, int, int], list[str]],
        reread: Callable[[], Settings],
    ) -> None:
        self._settings = settings
        self._reread = reread
        bound: dict[str, Any] = {"port": _port(public[0]), "control_port": _port(control)}
        if tls:
            pair = str(folder / PAIR_NAME)
            bound |= {"tls_port": _port(tls[0]), "tls_cert": pair, "tls_key": pair}
        self._children_settings = msgspec.structs.replace(settings, **bound)
        self._folder = folder
        self._run_dir = run_dir
        self._redis_binary = redis_binary
        self._command_of = command_of
        self._run = secrets.token_hex(6)
        self._redis_socket = folder / "redis.sock"
        if len(os.fsencode(self._redis_socket)) > _MAX_SOCKET_PATH_BYTES:
            self._redis_socket = run_dir / "redis.sock"
        self._redis_url = settings.full_redis_url() or "unix://" + quote(str(self._redis_socket))
        self._k = 0
        self._alive: set[int] = set()
        self._announced = False
        # The numbers of workers that get no messages from Redis.
        self._deaf: set[int] = set()
        self._started_at = time.time()
        self._fitness = ControlFitness()
        self._heartbeat = Heartbeat(self._redis_url, settings.redis_prefix, self._run, self._describe, self)
        self._joined = False
        self._directory_version: int | None = None
        self._shard_key: str | None = None
        self._created_app: dict[str, Any] | None = None
        self._created_admin: str | None = None
        self._life = Life()
        self._failure: str | None = None
        self._interrupts = 0
        self._ends_with_terminal = False
        self._redis = Child("redis", self._start_redis)
        self._control = Child("control", self._start_control, control)
        self._workers = [
            self._worker_child(number, *listeners)
            for number, listeners in enumerate(zip_longest(public, tls, fillvalue=None))
        ]
        self._cut_off = CutOffWorkers(self._workers, self._heartbeat, self._send_alive)

    def _worker_child(self, number: int, listening: socket.socket | None, tls: socket.socket | None) -> Child:
        child = Child(f"worker {number}", lambda: self._start_worker(child, number), listening, tls)
        return child

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap_children)
        loop.add_signal_handler(signal.SIGTERM, self._life.become, Lifecycle.DRAINING)
        loop.add_signal_handler(signal.SIGINT, self._interrupt_received)
        # nohup sets SIGHUP to "ignore": then the server outlives its terminal.
        self._ends_with_terminal = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN and has_terminal()
        loop.add_signal_handler(signal.SIGHUP, self._hangup_received)
        log.info("starting", run=self._run, workers=len(self._workers), data_dir=str(self._folder))
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
        if self._redis_binary is not None:
            self._redis.start()
            await embedded.wait_answering(self._redis_socket)
        for child in (self._control, *self._workers):
            child.start()
        self._heartbeat.start()
        self._cut_off.start()

    def _start_done(self, starting: asyncio.Task[None]) -> None:
        if not starting.cancelled() and (error := starting.exception()) is not None:
            self._fail(f"a process could not be started: {error}")

    def _start_redis(self) -> None:
        assert self._redis_binary is not None
        folder = self._folder / "redis"
        folder.mkdir(mode=0o700, exist_ok=True)
        command = embedded.command(self._redis_binary, self._settings, folder, self._redis_socket)
        # Redis installs its own SIGINT handler, so it needs its own process group to not get Ctrl-C.
        self._redis.spawn(command, process_group=0)

    def _start_control(self) -> None:
        self._start_child(self._control, "control", 0, 0)
        self._send_alive()
        if self._heartbeat.message is not None:
            self._control.send(self._heartbeat.message)
        self._control.send(Lead(self._heartbeat.term))
        self._send_drain(self._control)
        if self._announced:
            self._control.send(WorkersReady())
        if self._deaf:
            self._control.send(DeafWorkers(sorted(self._deaf)))
        self._heartbeat.beat_now()

    def _start_worker(self, child: Child, number: int) -> None:
        self._k += 1
        child.k = self._k
        # Sent before the process starts, so that a living worker is never missing from control's list.
        self._alive.add(self._k)
        self._send_alive()
        self._start_child(child, "worker", number, self._k)
        if self._shard_key is not None:
            child.send(ShardKey(self._shard_key))
        if self._joined and self._directory_version is not None:
            child.send(DirectoryVersion(self._directory_version))
        self._send_drain(child)

    def _send_drain(self, child: Child) -> None:
        if self._heartbeat.drain_within_s is not None:
            child.send(Evacuate(self._heartbeat.drain_within_s, self._max_per_s()))

    def _start_child(self, child: Child, role: Literal["worker", "control"], number: int, k: int) -> None:
        assert child.listening is not None
        ours, theirs = socket.socketpair()
        with theirs:
            command = self._command_of(role, number, theirs.fileno())
            child.spawn(command, pass_fds=(theirs.fileno(), *child.listening_fds()))
        child.child_pipe = ChildPipe(ours.detach())
        # SIGCHLD reports the end of a child, so end of file needs no handling.
        child.child_pipe.attach(
            asyncio.get_running_loop(), FROM_CHILD, lambda message: self._received(child, message), lambda: None
        )
        child.child_pipe.send(
            Start(
                role=role,
                number=number,
                run=self._run,
                k=k,
                redis_url=self._redis_url,
                listen_fd=child.listening.fileno(),
                tls_fd=child.tls.fileno() if child.tls is not None else None,
                requests_path=str(self._run_dir / "requests.sock"),
                data_dir=str(self._folder),
                settings=self._children_settings if role == "control" else without_secrets(self._children_settings),
            )
        )

    def _send_alive(self) -> None:
        self._control.send(LivingWorkers(sorted(self._alive), self._k))
        self._control.send(WorkersCutOff(self._cut_off.numbers, self._cut_off.without_clients))
        self._heartbeat.beat_now()

    # -- the other nodes

    def _describe(self, store: str, beat: int) -> Node:
        return Node(
            name=self._settings.node_name or socket.gethostname(),
            version=__version__,
            store=store,
            started=self._started_at,
            workers=sorted(self._alive),
            greatest=self._k,
            control=not self._control.ended.is_set(),
            lifecycle=self._life.state,
            beat=beat,
            accepts_per_s=_ACCEPTS_PER_WORKER_S * len(self._alive),
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
        self._control.send(message)

    def term_changed(self, term: int | None) -> None:
        """Control does the work of the leader while `term` isn't None."""
        self._control.send(Lead(term))

    def drain_changed(self, within_s: float | None) -> None:
        """Workers close their connections and admit no more, or admit clients again (None)."""
        self._life.become(Lifecycle.SERVING if within_s is None else Lifecycle.EVACUATING)
        message = Serve() if within_s is None else Evacuate(within_s, self._max_per_s())
        for child in (self._control, *self._workers):
            child.send(message)
        self._heartbeat.beat_now()

    def _max_per_s(self) -> float | None:
        """The connections that each worker may close per second, so that the other nodes can accept their clients. None
        without other nodes."""
        known = self._heartbeat.message
        others = [
            node
            for node in (known.nodes if known is not None else ())
            if node.run != self._run and node.alive and node.serves
        ]
        accepted_per_s = sum(node.accepts_per_s for node in others)
        return accepted_per_s / max(1, len(self._alive)) if accepted_per_s else None

    def _send_directory_version(self) -> None:
        # Workers admit no clients until Redis has this version: older records may lack a change that a command made
        # while no server ran. They don't get it before the node has joined, because the directory in Redis may be
        # that of other servers.
        if self._joined and self._directory_version is not None:
            for worker in self._workers:
                worker.send(DirectoryVersion(self._directory_version))

    def _take_shard_key(self, key: str) -> None:
        """Workers connect to Redis when they know in which shards the record store's channels are."""
        if self._shard_key is None:
            self._shard_key = key
            for worker in self._workers:
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
            case ClientsLeft():
                self._cut_off.left(child, message.all)
            case RecordStore():
                self._take_shard_key(message.shard_key)
                self._heartbeat.know_store(message.store, message.term)
            case DirectoryVersion():
                self._directory_version = message.version
                self._send_directory_version()
            case FitnessReport():
                if self._fitness.take(message.fitness):
                    self._heartbeat.beat_now()
            case AppCreated():
                self._created_app = message.app
            case AdminCreated():
                self._created_admin = message.password
                self._write_first_login(message.password)
            case Reload():
                self._control.send(Reloaded(self._reload()))
            case Fatal():
                if not self._announced:
                    # The child can't start, and a restart would fail in the same way.
                    self._fail(message.reason)
            case _:
                assert_never(message)

    def _set_deaf(self, child: Child, deaf: bool) -> None:
        """A worker gets no messages from Redis, gets them again, or ended. /readyz shows it."""
        number = self._workers.index(child)
        if deaf != (number in self._deaf):
            self._deaf ^= {number}
            self._control.send(DeafWorkers(sorted(self._deaf)))

    def _write_first_login(self, password: str) -> None:
        """Writes the password at once: it can't be recovered if the start fails."""
        path = self._folder / FIRST_LOGIN_NAME
        try:
            path.unlink(missing_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(f"{password}\n")
        except OSError as error:
            log.error("first password not written", path=str(path), reason=error.strerror)

    def _announce(self) -> None:
        """When all children are ready for the first time: prints the first credentials and the ready line."""
        if self._announced or not all(child.ready for child in (self._control, *self._workers)):
            return
        self._announced = True
        self._control.send(WorkersReady())
        first = self._workers[0]
        public, control = _port(first.listening), _port(self._control.listening)
        tls = _port(first.tls) if first.tls is not None else None
        public_url = f"http://{url_host(self._settings.host)}:{public}"
        control_url = f"http://{url_host(self._settings.control_host)}:{control}"
        created = {"an app": self._created_app, "the user admin": self._created_admin}
        if not sys.stdout.isatty():
            # A journal or a container's log keeps what is printed, and others may read it.
            if names := [name for name, value in created.items() if value is not None]:
                print(where_to_see(names, str(self._folder)))
        else:
            if self._created_app is not None:
                print("redpoll created an app for the first start (`redpoll app show` shows it again):\n")
                print(how_to_use(self._created_app, self._settings.host, public, tls))
            if self._created_admin is not None:
                print(first_login(control_url, self._created_admin, str(self._folder / FIRST_LOGIN_NAME)))
        tls_url = f" tls=https://{url_host(self._settings.host)}:{tls}" if tls is not None else ""
        print(f"ready public={public_url} control={control_url}{tls_url}", flush=True)
        notify_systemd("READY=1")

    # -- children that end

    def _reap_children(self) -> None:
        for child in (self._redis, self._control, *self._workers):
            code = child.take_exit_code()
            if code is not None:
                self._child_ended(child, code)

    def _child_ended(self, child: Child, code: int) -> None:
        # A worker that died can't report this.
        child.stopped_listening.set()
        if child.k:
            self._alive.discard(child.k)
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
        for child in (self._control, *self._workers):
            if child.ping() == _MAX_SILENT_PINGS:
                log.error("child killed, it does not answer", child=child.name, unanswered_pings=_MAX_SILENT_PINGS)
                child.signal(signal.SIGKILL)
            elif child.k and child.unanswered_at_start == _MAX_SILENT_PINGS_AT_START:
                log.error(
                    "child killed, it does not start",
                    child=child.name,
                    unanswered_pings=_MAX_SILENT_PINGS_AT_START,
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
            delay_s = child.restart_delay_s()
            log.error("child not started", child=child.name, reason=error.strerror, restart_in_s=delay_s)
            asyncio.get_running_loop().call_later(delay_s, self._restart, child)

    def _why_failed(self, child: Child) -> str:
        why = f"{child.name} ended {child.quick_deaths} times in a row"
        if child is self._redis:
            why += f"; its log ends with: {embedded.log_tail(self._folder / 'redis')}"
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
        if sent := {name: value for name, value in outcome.applied.items() if name not in ("tls_cert", "tls_key")}:
            self._apply(sent)
        if outcome.certificate:
            for child in self._workers:
                child.send(CertificateChanged())
        outcome.log()
        return outcome.answer()

    def _apply(self, changes: dict[str, Any]) -> None:
        """Sends changed settings to the children. Those that start later get them as well."""
        self._children_settings = msgspec.structs.replace(self._children_settings, **changes)
        if "log_level" in changes:
            logs.configure(self._settings, "supervisor")
        for child in (self._control, *self._workers):
            child.send(SettingsChanged(changes))

    # -- stopping

    def _interrupt_received(self) -> None:
        self._interrupts += 1
        self._life.become(Lifecycle.DRAINING)
        if self._interrupts > 1:
            for child in (self._redis, self._control, *self._workers):
                child.signal(signal.SIGKILL)

    async def _stop(self) -> None:
        """Stops in order: readiness, listening sockets, connections, control plane, Redis."""
        grace_s = self._settings.shutdown_grace_s
        log.info("stopping", grace_s=grace_s)
        notify_systemd("STOPPING=1")
        self._heartbeat.beat_now()
        self._cut_off.stop()
        self._control.send(BeginStop())
        for child in self._workers:
            child.send(BeginStop())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wait_stopped_listening(), _STOP_LISTENING_WITHIN_S)
        stop = Stop(self._max_per_s())
        for child in self._workers:
            # These are the last copies; once they are closed the kernel refuses new connections.
            child.close_listeners()
            child.send(stop)
        await asyncio.gather(*(child.wait_ended(grace_s + _SIGN_OFF_WITHIN_S) for child in self._workers))
        self._control.send(Stop())
        await self._control.wait_ended(_CONTROL_ENDS_WITHIN_S)
        await self._heartbeat.leave()
        self._redis.signal(signal.SIGTERM)
        await self._redis.wait_ended(_REDIS_ENDS_WITHIN_S)
        self._life.become(Lifecycle.STOPPED)
        log.info("stopped")

    async def _wait_stopped_listening(self) -> None:
        for child in self._workers:
            if not child.ended.is_set():
                await child.stopped_listening.wait()


def _port(listening: socket.socket | None) -> int:
    assert listening is not None
    port: int = listening.getsockname()[1]
    return port
