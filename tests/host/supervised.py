"""A real supervisor with stand-ins for the control plane and the workers.

A stand-in uses the child pipe as a real child does and records the messages it gets.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec

from redpoll.ipc.messages import (
    Message,
)

# The program of a child. It writes the file `NAME.PID` with a line of JSON for its start and for every message. The
# file `NAME.does` has words that change what it does.
STAND_IN = """
import asyncio, json, os, resource, signal, socket, sys
from pathlib import Path
import msgspec
from redpoll.ipc.child_pipe import ChildPipe
from redpoll.ipc.messages import *

folder, place, fd = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
does = (folder / f"{place}.does").read_text() if (folder / f"{place}.does").exists() else ""
if "die" in does:
    sys.exit(3)
pipe = ChildPipe(fd)
start = pipe.read_start()
if "hang" in does and start.process == 2:
    signal.pause()
notes = open(folder / f"{place}.{os.getpid()}", "a", buffering=1)
def note(what): notes.write(json.dumps(what) + "\\n")
note({"k": start.process, "number": start.number, "run": start.run, "redis_url": start.redis_url,
      "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0], "notify": os.environ.get("NOTIFY_SOCKET"),
      "secrets": [start.settings.app_secret, start.settings.admin_password, start.settings.encryption_master_key],
      "message_bytes": start.settings.max_message_bytes,
      "certificates": list(start.settings.tls_cert),
      "ports": [start.settings.port, start.settings.control_port, start.settings.tls_port]})
listeners = [socket.socket(fileno=fd) for fd in (start.listen_fd, start.tls_fd) if fd is not None]

async def main():
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    def receive(message):
        note(msgspec.to_builtins(message))
        if isinstance(message, BeginStop) and start.role == "worker":
            for listening in listeners:
                loop.remove_reader(listening)
                listening.close()
            pipe.send(ListenersClosed())
        if isinstance(message, Stop) and "stay" not in does:
            ended.set()
    def accept(listening):
        connection, _ = listening.accept()
        with connection:
            behind = " by TLS" if listening.fileno() == start.tls_fd else ""
            connection.sendall(f"{place} {start.process}{behind}".encode())
    pipe.attach(loop, TO_CONTROL if start.role == "control" else TO_WORKER, receive, lambda: os._exit(1))
    for listening in listeners:
        listening.setblocking(False)
        if "deaf" not in does:
            loop.add_reader(listening, accept, listening)
    if "fatal" in does:
        pipe.send(Fatal("the disk is full"))
        return
    if "records" in does:
        pipe.send(RecordStore("5eed", 3, "aa" * 16))
        pipe.send(DirectoryVersion(17))
    if "other" in does:
        pipe.send(RecordStore("5eed", 3, "bb" * 16))
    if "create" in does:
        pipe.send(AppCreated({"id": "77", "key": "abc", "secret": "a-secret", "name": "x", "keys": []}))
        pipe.send(AdminCreated("the-first-password"))
    if "unready" not in does:
        pipe.send(Ready())
    if "reload" in does:
        pipe.send(Reload())
    await ended.wait()

asyncio.run(main())
"""

SUPERVISOR = """
import os, sys
from redpoll.text import logs
from redpoll.host import serve, supervisor
from redpoll.host.child import Child
from redpoll.config.config import load

folder = sys.argv[1]
def command_of(role, number, fd):
    place = role if role == "control" else f"{role}{number}"
    return [sys.executable, f"{folder}/stand_in.py", folder, place, str(fd)]
supervisor._PING_EVERY_S = float(os.environ.get("PING_EVERY_S", "1"))
# The only child that is pinged, if not all: with quick pings, others that a slow machine holds up would be killed too.
pinged, ping = os.environ.get("PINGED"), Child.ping
Child.ping = lambda child: ping(child) if pinged in (None, child.name) else 0
file = f"{folder}/redpoll.toml"
def reread():
    flags = dict(word.split("=", 1) for word in sys.argv[2:])
    return load(flags, os.environ, file if os.path.exists(file) else None)[0]
settings = reread()
logs.configure(settings, "supervisor")
try:
    sys.exit(serve.serve(settings, command_of, reread))
except serve.StartError as error:
    sys.exit(f"refused: {error}")
"""


class Tree:
    """A supervisor with its stand-ins, in its own folder."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.folder = folder
        self.redis_url = redis_url
        self.process: subprocess.Popen[bytes] | None = None
        self._terminal: int | None = None
        self._printed = b""
        (folder / "stand_in.py").write_text(STAND_IN)
        (folder / "supervisor.py").write_text(SUPERVISOR)

    def does(self, place: str, what: str) -> None:
        (self.folder / f"{place}.does").write_text(what)

    def start(self, *, environment=None, before=None, terminal=False, **settings: object) -> None:
        """`terminal`: a terminal reads what the supervisor prints."""
        given = {"port": 0, "control_port": 0, "host": "127.0.0.1", "workers": 2, "redis_url": self.redis_url}
        given |= {"data_dir": self.folder / "data", "shutdown_grace_s": 5} | settings
        arguments = [f"{name}={value}" for name, value in given.items()]
        if terminal:
            ours, theirs = os.openpty()
            self._terminal = ours
            os.set_blocking(ours, False)
        else:
            theirs = os.open(self.folder / "out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with open(theirs, "wb") as out, open(self.folder / "err", "wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, self.folder / "supervisor.py", self.folder, *arguments],
                stdout=out,
                stderr=err,
                env={**os.environ, **(environment or {})},
                preexec_fn=before,
                start_new_session=True,
            )

    @property
    def out(self) -> str:
        if self._terminal is not None:
            # Nothing more was printed, or the other side is closed.
            with contextlib.suppress(BlockingIOError, OSError):
                while printed := os.read(self._terminal, 65_536):
                    self._printed += printed
            return self._printed.decode().replace("\r\n", "\n")
        return (self.folder / "out").read_text()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if self._terminal is not None:
            os.close(self._terminal)

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    @property
    def is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.err
        return "ready public=" in self.out

    @property
    def port(self) -> int:
        return self._port("public")

    @property
    def tls_port(self) -> int:
        return self._port("tls")

    def _port(self, what: str) -> int:
        return int(self.out.partition(f" {what}=")[2].split()[0].rpartition(":")[2])

    def pids(self, place: str) -> list[int]:
        """The pids of all processes that this child has had, oldest first."""
        notes = [path for path in self.folder.glob(f"{place}.*") if path.suffix[1:].isdigit()]
        notes.sort(key=lambda path: path.stat().st_ctime_ns if place == "control" else self._k(path))
        return [int(path.suffix[1:]) for path in notes]

    def _k(self, path: Path) -> int:
        return json.loads(path.read_text().partition("\n")[0] or '{"k": 999}')["k"]

    def notes(self, place: str, which: int = -1) -> list[dict]:
        """What a process of this child recorded, by default the present one."""
        pids = self.pids(place)
        return self.of(place, pids[which]) if pids else []

    def lists(self) -> list[dict]:
        """The lists of living workers that control got so far."""
        return [note for note in self.notes("control") if note.get("type") == "LivingWorkers"]

    def of(self, place: str, pid: int) -> list[dict]:
        lines = (self.folder / f"{place}.{pid}").read_text().split("\n")
        return [json.loads(line) for line in lines[:-1]]

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def family(self) -> list[int]:
        """Pids of all children of the supervisor."""
        assert self.process is not None
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]


def said(message: Message) -> dict:
    """A message as a stand-in records it."""
    return msgspec.to_builtins(message)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends while it is read
        return False


def environment_of(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def said_by(port: int) -> str:
    """What the worker that accepts this connection sends."""
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.settimeout(60)
        return connection.recv(100).decode()
