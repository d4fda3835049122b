"""The children of the supervisor and how each is started: Redis, the control plane, the workers.

supervisor.py decides which of them run, and what to tell them.
"""

import asyncio
import os
import secrets
import socket
import stat
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

import msgspec

from redpoll.config.config import Settings
from redpoll.config.reloading import BUNDLE_NAME, uses_tls
from redpoll.config.setting_table import without_secrets
from redpoll.host import embedded
from redpoll.host.child import Child
from redpoll.ipc.child_pipe import ChildPipe
from redpoll.ipc.messages import FROM_CHILD, FromChild, Start

__all__ = ["Children", "Place", "Sockets"]

_MAX_SOCKET_PATH_BYTES = 107


class Place(NamedTuple):
    """Where the server runs: its data folder, a folder for sockets, the program of the embedded Redis (None when
    `settings.redis_url` names a Redis), and `command_of(role, number, pipe_fd)`, a child's command line."""

    folder: Path
    run_dir: Path
    redis_binary: Path | None
    command_of: Callable[[str, int, int], list[str]]


class Sockets(NamedTuple):
    """The listening sockets. `public` has one per worker, `tls` as many, or none if TLS is off."""

    public: list[socket.socket]
    tls: list[socket.socket]
    control: socket.socket

    def ports(self) -> tuple[int, int, int | None]:
        """The public port, the control port and the TLS port as bound."""
        return _port(self.public[0]), _port(self.control), _port(self.tls[0]) if self.tls else None


class Children:
    """All children. Create it inside the running loop.

    `run` identifies this start of the supervisor. `settings` are those that children get. `alive` are the `k` of the
    living worker processes, `greatest` is the last one. `starting(child)` is called before a worker's process starts,
    `started(child)` when a process can get what it must know, and `received` with each message.
    """

    def __init__(
        self,
        settings: Settings,
        place: Place,
        sockets: Sockets,
        starting: Callable[[], None],
        started: Callable[[Child], None],
        received: Callable[[Child, FromChild], None],
    ) -> None:
        self.run = secrets.token_hex(6)
        port, control_port, tls_port = sockets.ports()
        bound: dict[str, Any] = {"port": port, "control_port": control_port}
        if tls_port is not None:
            bound["tls_port"] = tls_port
        if uses_tls(settings):
            bound |= {"tls_cert": (str(place.folder / BUNDLE_NAME),), "tls_key": (), "tls_ocsp": ()}
        self.settings = msgspec.structs.replace(settings, **bound)
        self.alive: set[int] = set()
        self.greatest = 0
        self._place = place
        self._starting = starting
        self._started = started
        self._received = received
        self._redis_socket = place.folder / "redis.sock"
        if len(os.fsencode(self._redis_socket)) > _MAX_SOCKET_PATH_BYTES:
            self._redis_socket = place.run_dir / "redis.sock"
        self.redis_url = settings.full_redis_url() or "unix://" + quote(str(self._redis_socket))
        self.redis = Child("redis", self._start_redis)
        self.control = Child("control", self._start_control, sockets.control)
        self.workers = [
            self._worker(number, *listeners)
            for number, listeners in enumerate(zip_longest(sockets.public, sockets.tls, fillvalue=None))
        ]

    @property
    def ours(self) -> list[Child]:
        """All but Redis: those with a pipe."""
        return [self.control, *self.workers]

    @property
    def all(self) -> list[Child]:
        return [self.redis, *self.ours]

    async def start(self) -> None:
        """Starts all. Raises OSError, or what `embedded.wait_answering` raises."""
        if self._place.redis_binary is not None:
            self.redis.start()
            await embedded.wait_answering(self._redis_socket)
        for child in self.ours:
            child.start()

    def log_of_redis(self) -> str:
        """The end of the embedded Redis' log."""
        return embedded.log_tail(self._place.folder / "redis")

    def _worker(self, number: int, listening: socket.socket | None, tls: socket.socket | None) -> Child:
        child = Child(f"worker {number}", lambda: self._start_worker(child, number), listening, tls)
        return child

    def _make_run_dir(self) -> None:
        # A program that cleans up /tmp may have removed it. Without it no socket can be bound, however often the child
        # is restarted. Meanwhile any user of the machine may have made one with its name, and would get what the
        # children tell each other.
        run_dir = self._place.run_dir
        run_dir.mkdir(mode=0o700, exist_ok=True)
        found = run_dir.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise OSError(f"{run_dir} was replaced by what is not a private folder of this user; remove it")

    def _start_redis(self) -> None:
        assert self._place.redis_binary is not None
        self._make_run_dir()
        folder = self._place.folder / "redis"
        folder.mkdir(mode=0o700, exist_ok=True)
        command = embedded.command(self._place.redis_binary, self.settings, folder, self._redis_socket)
        # Redis installs its own SIGINT handler, so it needs its own process group to not get Ctrl-C.
        self.redis.spawn(command, process_group=0)

    def _start_control(self) -> None:
        self._start_child(self.control, "control", 0, 0)
        self._started(self.control)

    def _start_worker(self, child: Child, number: int) -> None:
        self.greatest += 1
        child.process = self.greatest
        # Said before the process starts, so that a living worker is never missing from control's list.
        self.alive.add(child.process)
        self._starting()
        try:
            self._start_child(child, "worker", number, child.process)
        except BaseException:
            # Publishes would wait for a worker that doesn't exist.
            self.alive.discard(child.process)
            child.process = 0
            self._starting()
            raise
        self._started(child)

    def _start_child(self, child: Child, role: Literal["worker", "control"], number: int, process: int) -> None:
        assert child.listening is not None
        self._make_run_dir()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            command = self._place.command_of(role, number, theirs.fileno())
            child.spawn(command, pass_fds=(theirs.fileno(), *child.listening_fds()))
            pipe = ChildPipe(ours.detach())
        child.connect(pipe)
        # SIGCHLD reports the end of a child, so end of file needs no handling.
        pipe.attach(
            asyncio.get_running_loop(), FROM_CHILD, lambda message: self._received(child, message), lambda: None
        )
        pipe.send(
            Start(
                role=role,
                number=number,
                run=self.run,
                process=process,
                redis_url=self.redis_url,
                listen_fd=child.listening.fileno(),
                tls_fd=child.tls.fileno() if child.tls is not None else None,
                requests_path=str(self._place.run_dir / "requests.sock"),
                data_dir=str(self._place.folder),
                settings=self.settings if role == "control" else without_secrets(self.settings),
            )
        )


def _port(listening: socket.socket) -> int:
    port: int = listening.getsockname()[1]
    return port
