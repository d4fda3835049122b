"""The process that starts all others, watches them and stops them in order. It serves no client itself.

Makes every listening socket, so that a crashed worker's accept queue waits for its successor; starts Redis,
the control plane and the workers by exec; restarts what dies; turns SIGTERM and Ctrl-C into an orderly stop.
Each child is told what to do, and tells what it has done, over its leash.
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
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import msgspec
import structlog

from redpoll import certificate, datafolder, embedded
from redpoll.child import Child
from redpoll.child_pipe import ChildPipe, Start
from redpoll.config import Settings
from redpoll.system import StartError, has_terminal, listen, notify_systemd, raise_file_limit
from redpoll.welcome import first_login, how_to_use, url_host

__all__ = ["StartError", "Supervisor", "child_command", "serve"]

log = structlog.get_logger()

# Before the server was ready once, a child that keeps dying won't get better: then the whole start has
# failed.
_FAILED_STARTS = 5
_DOORS_SHUT_WITHIN_S = 1.0
# Beyond the grace period: a worker cuts the connections that are left then, and signs off in Redis.
_SIGN_OFF_WITHIN_S = 2.0
_CONTROL_ENDS_WITHIN_S = 10.0
_REDIS_ENDS_WITHIN_S = 10.0
_MAX_SOCKET_PATH_BYTES = 107
# In the data folder, which is private: what workers serve TLS with, and the password of the dashboard's first user. The
# control plane takes the second away at the first login.
_PAIR_NAME = "tls.pem"
_FIRST_LOGIN_NAME = "first-login"


def serve(settings: Settings, command_of: Callable[[str, int, int], list[str]] | None = None) -> int:
    """Runs the whole server until it is told to stop; returns the exit code. Raises StartError.

    `command_of(role, number, leash_fd)` makes a child's command line: tests put stand-ins there.
    """
    # Whatever any process of ours writes may hold secrets.
    os.umask(0o077)
    folder = Path(settings.data_dir).resolve()
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(datafolder.hold(folder, "serve"))
            redis_binary = None if settings.redis_url else embedded.find_binary()
        except (datafolder.DataFolderError, embedded.RedisMissing) as error:
            raise StartError(str(error)) from error
        public = listen(settings.host, settings.port, count=settings.workers)
        for each in public:
            stack.enter_context(each)
        tls: list[socket.socket] = []
        if settings.tls_port is not None:
            tls = listen(settings.host, settings.tls_port, count=settings.workers)
            for each in tls:
                stack.enter_context(each)
            try:
                _take_pair(settings, folder)
            except certificate.PairError as error:
                raise StartError(f"TLS can't be served: {error}") from error
            stack.callback((folder / _PAIR_NAME).unlink, missing_ok=True)
        control = stack.enter_context(listen(settings.control_host, settings.control_port)[0])
        run_dir = Path(tempfile.mkdtemp(prefix="redpoll-"))
        stack.callback(shutil.rmtree, run_dir, ignore_errors=True)
        raise_file_limit()

        async def run() -> int:
            return await Supervisor(
                settings, folder, run_dir, public, tls, control, redis_binary, command_of or child_command
            ).run()

        return asyncio.run(run())


def _take_pair(settings: Settings, folder: Path) -> None:
    """Puts the operator's certificate and key where the workers read them. Raises certificate.PairError."""
    certificate.keep(certificate.read_pair(settings.tls_cert, settings.tls_key), folder / _PAIR_NAME)


def child_command(role: str, number: int, leash_fd: int) -> list[str]:
    """The command line of a child. `-P`: a `redis.py` in the folder we are started from is none of ours."""
    place = [str(number)] if role == "worker" else []
    return [sys.executable, "-P", "-m", "redpoll", role, *place, "--leash", str(leash_fd)]


class Supervisor:
    """The tree of processes. `run()` returns the exit code: 0, 1 for a failed start, 130 for a second Ctrl-C.

    `public` has one listening socket for each worker, and `tls` as many, or none where TLS is off;
    `redis_binary` is None where `settings.redis_url` says where Redis is. Make it inside the running loop.
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
    ) -> None:
        self._settings = settings
        bound: dict[str, Any] = {"port": _port(public[0]), "control_port": _port(control)}
        if tls:
            pair = str(folder / _PAIR_NAME)
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
        self._redis_url = settings.redis_url or "unix://" + quote(str(self._redis_socket))
        self._k = 0
        self._alive: set[int] = set()
        self._announced = False
        self._directory_version: int | None = None
        self._created_app: dict[str, Any] | None = None
        self._created_admin: str | None = None
        self._stop_asked = asyncio.Event()
        self._failure: str | None = None
        self._interrupts = 0
        self._ends_with_terminal = False
        self._redis = Child("redis", self._start_redis)
        self._control = Child("control", self._start_control, control)
        self._workers = [
            self._worker_post(number, *each) for number, each in enumerate(zip_longest(public, tls, fillvalue=None))
        ]

    def _worker_post(self, number: int, listening: socket.socket | None, tls: socket.socket | None) -> Child:
        post = Child(f"worker {number}", lambda: self._start_worker(post, number), listening, tls)
        return post

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._look_for_ended)
        loop.add_signal_handler(signal.SIGTERM, self._stop_asked.set)
        loop.add_signal_handler(signal.SIGINT, self._interrupted)
        # Started by nohup, it outlives its terminal.
        self._ends_with_terminal = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN and has_terminal()
        loop.add_signal_handler(signal.SIGHUP, self._hung_up)
        log.info("starting", run=self._run, workers=len(self._workers), data_dir=str(self._folder))
        starting = asyncio.create_task(self._start())
        starting.add_done_callback(self._start_done)
        await self._stop_asked.wait()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await self._stop()
        if self._failure is not None:
            log.error("start failed", why=self._failure)
            return 1
        return 130 if self._interrupts > 1 else 0

    # -- starting

    async def _start(self) -> None:
        if self._redis_binary is not None:
            self._redis.start()
            await embedded.wait_answering(self._redis_socket)
        for post in (self._control, *self._workers):
            post.start()

    def _start_done(self, starting: asyncio.Task[None]) -> None:
        if not starting.cancelled() and (error := starting.exception()) is not None:
            self._fail(f"a process can't be started: {error}")

    def _start_redis(self) -> None:
        assert self._redis_binary is not None
        folder = self._folder / "redis"
        folder.mkdir(mode=0o700, exist_ok=True)
        command = embedded.command(self._redis_binary, self._settings, folder, self._redis_socket)
        # A group of its own: Redis takes Ctrl-C as an order to end, whatever it was told before exec.
        self._redis.fill(command, process_group=0)

    def _start_control(self) -> None:
        self._start_child(self._control, "control", 0, 0)
        self._tell_alive()
        if self._announced:
            self._control.tell({"workers_ready": True})

    def _start_worker(self, post: Child, number: int) -> None:
        self._k += 1
        post.k = self._k
        # Before the process is there, so that control never sees a living worker missing from its list.
        self._alive.add(self._k)
        self._tell_alive()
        self._start_child(post, "worker", number, self._k)
        if self._directory_version is not None:
            post.tell({"directory": self._directory_version})

    def _start_child(self, post: Child, role: Literal["worker", "control"], number: int, k: int) -> None:
        assert post.listening is not None
        ours, theirs = socket.socketpair()
        with theirs:
            command = self._command_of(role, number, theirs.fileno())
            post.fill(command, pass_fds=(theirs.fileno(), *post.listening_fds()))
        post.child_pipe = ChildPipe(ours.detach())
        # End of file says no more than SIGCHLD does, and that is looked for in one place.
        post.child_pipe.attach(asyncio.get_running_loop(), lambda message: self._told(post, message), lambda: None)
        post.child_pipe.tell(
            Start(
                role=role,
                number=number,
                run=self._run,
                k=k,
                redis_url=self._redis_url,
                listen_fd=post.listening.fileno(),
                tls_fd=post.tls.fileno() if post.tls is not None else None,
                handover_path=str(self._run_dir / "handover.sock"),
                data_dir=str(self._folder),
                settings=self._children_settings,
            )
        )

    def _tell_alive(self) -> None:
        self._control.tell({"alive": sorted(self._alive), "greatest": self._k})

    # -- what children say

    def _told(self, post: Child, message: dict[str, Any]) -> None:
        if message.get("ready"):
            post.ready = True
            self._announce()
        if message.get("listening") is False:
            post.doors_shut.set()
        if "directory" in message:
            # The version of the records: until Redis has it too, workers have nothing to judge a key by. What lies
            # there may be of before a change that was made while no server ran.
            self._directory_version = message["directory"]
            for worker in self._workers:
                worker.tell({"directory": self._directory_version})
        if "created_app" in message:
            self._created_app = message["created_app"]
        if "created_admin" in message:
            self._created_admin = message["created_admin"]
            self._keep_first_login(message["created_admin"])
        if "fatal" in message and not self._announced:
            # It has said why it can't start; the next one could not either.
            self._fail(message["fatal"])

    def _keep_first_login(self, password: str) -> None:
        """At once: nobody can be told it again, should the start fail."""
        path = self._folder / _FIRST_LOGIN_NAME
        try:
            path.unlink(missing_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(f"{password}\n")
        except OSError as error:
            log.error("the first login's password is not kept", path=str(path), why=error.strerror)

    def _announce(self) -> None:
        """Once, when all are ready for the first time: readiness, the first start's block, the ready line."""
        if self._announced or not all(post.ready for post in (self._control, *self._workers)):
            return
        self._announced = True
        self._control.tell({"workers_ready": True})
        first = self._workers[0]
        public, control = _port(first.listening), _port(self._control.listening)
        tls = _port(first.tls) if first.tls is not None else None
        if self._created_app is not None:
            print("redpoll made an app for its first start (`redpoll app show ID` shows it again):\n")
            print(how_to_use(self._created_app, self._settings.host, public, tls))
        public_url = f"http://{url_host(self._settings.host)}:{public}"
        control_url = f"http://{url_host(self._settings.control_host)}:{control}"
        if self._created_admin is not None:
            print(first_login(control_url, self._created_admin, str(self._folder / _FIRST_LOGIN_NAME)))
        tls_url = f" tls=https://{url_host(self._settings.host)}:{tls}" if tls is not None else ""
        print(f"ready public={public_url} control={control_url}{tls_url}", flush=True)
        notify_systemd("READY=1")

    # -- what children come to

    def _look_for_ended(self) -> None:
        for post in (self._redis, self._control, *self._workers):
            code = post.take_exit_code()
            if code is not None:
                self._ended(post, code)

    def _ended(self, post: Child, code: int) -> None:
        # A worker that died with its doors open will not say that they are shut.
        post.doors_shut.set()
        if post.k:
            self._alive.discard(post.k)
            self._tell_alive()
        if self._stop_asked.is_set():
            return
        if post.quick_deaths >= _FAILED_STARTS and not self._announced:
            self._fail(self._why_failed(post))
            return
        after_s = post.restart_after_s()
        log.error("child ended", child=post.name, code=code, again_in_s=after_s)
        asyncio.get_running_loop().call_later(after_s, self._restart, post)

    def _restart(self, post: Child) -> None:
        if self._stop_asked.is_set():
            return
        post.doors_shut.clear()
        try:
            post.start()
        except OSError as error:
            # Out of memory, processes or descriptors: that passes, or the operator ends it.
            after_s = post.restart_after_s()
            log.error("child can't be started", child=post.name, why=error.strerror, again_in_s=after_s)
            asyncio.get_running_loop().call_later(after_s, self._restart, post)

    def _why_failed(self, post: Child) -> str:
        why = f"{post.name} ended {post.quick_deaths} times in a row"
        if post is self._redis:
            why += f"; its log ends with: {embedded.log_tail(self._folder / 'redis')}"
        return why

    def _fail(self, why: str) -> None:
        self._failure = why
        self._stop_asked.set()

    # -- while it runs

    def _hung_up(self) -> None:
        """SIGHUP: somebody asks for the new certificate, or the terminal that we run in was closed."""
        if self._ends_with_terminal and not has_terminal():
            # Nobody sees or stops us any more; nothing can be logged either. The children end with us.
            asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
            signal.raise_signal(signal.SIGHUP)
        self._reload()

    def _reload(self) -> None:
        """A new certificate for new handshakes. One that can't be served with changes nothing."""
        if self._settings.tls_port is None:
            log.info("nothing to read again: there is no tls_port")
            return
        try:
            _take_pair(self._settings, self._folder)
        except (certificate.PairError, OSError) as error:
            log.error("certificate not taken, the one before stays", why=str(error))
            return
        for post in self._workers:
            post.tell({"reload": True})
        log.info("certificate taken", cert=self._settings.tls_cert)

    # -- stopping

    def _interrupted(self) -> None:
        self._interrupts += 1
        self._stop_asked.set()
        if self._interrupts > 1:
            for post in (self._redis, self._control, *self._workers):
                post.signal(signal.SIGKILL)

    async def _stop(self) -> None:
        """Readiness goes first, then the doors, then the connections, then what they stood on."""
        grace_s = self._settings.shutdown_grace_s
        log.info("stopping", grace_s=grace_s)
        notify_systemd("STOPPING=1")
        self._control.tell({"draining": True})
        for post in self._workers:
            post.tell({"stop_listening": True})
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wait_doors_shut(), _DOORS_SHUT_WITHIN_S)
        for post in self._workers:
            # Ours are the last copies: with them the kernel refuses what still comes.
            post.stop_listening()
            post.tell({"drain": True})
        await asyncio.gather(*(post.wait_vacant(grace_s + _SIGN_OFF_WITHIN_S) for post in self._workers))
        self._control.tell({"drain": True})
        await self._control.wait_vacant(_CONTROL_ENDS_WITHIN_S)
        self._redis.signal(signal.SIGTERM)
        await self._redis.wait_vacant(_REDIS_ENDS_WITHIN_S)
        log.info("stopped")

    async def _wait_doors_shut(self) -> None:
        for post in self._workers:
            if not post.vacant.is_set():
                await post.doors_shut.wait()


def _port(listening: socket.socket | None) -> int:
    assert listening is not None
    port: int = listening.getsockname()[1]
    return port
