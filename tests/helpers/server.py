"""Runs a whole redpoll server for tests: the real command with its real processes.

`Server` starts `python -m redpoll serve`, waits for the ready line, finds and kills its processes, and checks at the
end that the server stopped cleanly. Like an operator, it uses only the command line, the ports, /proc and the log.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import redis as redis_py
from prometheus_client.parser import text_string_to_metric_families

from redpoll.cluster.redis.keys import Keys

APP_ID = "4711"
APP_KEY = "278d425bdf160c739803"
APP_SECRET = "7ad3773142a6692b25b8"

READY_WITHIN_S = 120.0
# Server sets a shorter grace period than the default, so that a hanging connection fails one test in time.
STOPPED_WITHIN_S = 60.0
_READY_LINE = re.compile(r"^ready public=(\S+) control=(\S+)(?: tls=(\S+))?", re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last)"
# Hides packages that only the development extra brings, so a server starts as in an installation.
_HIDDEN = Path(__file__).parents[1] / "hidden"


class ServerFailed(AssertionError):
    """The server did not start, did not stop cleanly, or printed a traceback. The text has its output."""


@dataclass(frozen=True)
class Process:
    """One process as /proc shows it."""

    pid: int
    parent: int
    command: tuple[str, ...]


def processes() -> Iterator[Process]:
    """All processes of this machine that we may inspect, except those that end meanwhile."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (running := process(int(entry.name))) is not None:
            yield running


def process(pid: int) -> Process | None:
    """One process, None if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return None
    # The name in brackets may contain spaces and brackets: the other fields begin after the last bracket.
    state, parent = stat.rpartition(")")[2].split()[:2]
    if state in "ZX":
        return None
    words = tuple(word.decode(errors="replace") for word in command.split(b"\0") if word)
    return Process(pid, int(parent), words)


def children(pid: int) -> list[int]:
    """The process ids of the children of a process, sorted. Reading them takes a hundredth of the time of a walk over
    /proc."""
    found: list[int] | None = None
    while True:
        before = found
        try:
            lists = [Path(entry.path, "children").read_text() for entry in os.scandir(f"/proc/{pid}/task")]
        except OSError:
            return []
        found = sorted(int(child) for text in lists for child in text.split())
        # The kernel may skip a child while another one ends. Two equal readings are complete.
        if found == before:
            return found


def rss_bytes(pid: int) -> int:
    """The resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def cpu_s(pid: int) -> float:
    """The processor time that a process has used, in user and kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def open_files(pid: int) -> int:
    """The number of open descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


class Server:
    """A running redpoll with one app: `with Server(workers=4, activity_timeout_s=2) as server:`.

    Keyword arguments are settings, passed as REDPOLL_… variables. `redis_url` None means the embedded Redis. `files` is
    (soft, hard) for RLIMIT_NOFILE. The end of the block stops the server. It fails unless the server ended with exit
    code 0, without a traceback, a counted exception or a process that survived.
    """

    def __init__(
        self,
        workers: int = 4,
        redis_url: str | None = None,
        *,
        files: tuple[int, int] | None = None,
        **settings: object,
    ) -> None:
        self.workers = workers
        self.redis_url = redis_url
        self.app_id, self.app_key, self.app_secret = APP_ID, APP_KEY, APP_SECRET
        self.public_url = self.control_url = self.tls_url = ""
        self.port = self.control_port = 0
        # What `start` asks for; 0 is any free port, another one at every start.
        self.public_port = 0
        # All tests publish from one address, so the rate limit is off; its own tests set it.
        self.settings = {"shutdown_grace_s": 5, "trigger_rate_per_minute": 0, **settings}
        self._files = files
        self._process: subprocess.Popen[bytes] | None = None
        # The path must be short: a Unix socket's path has at most 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="rp"))

    # -- start and stop

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self._end_by_force()
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self.stop()
        except ServerFailed as failure:
            # Report the failure of the test itself, and print the server's for context.
            if error is None:
                raise
            print(failure, file=sys.stderr)
        finally:
            self._end_by_force()
            shutil.rmtree(self.folder, ignore_errors=True)

    def start(self) -> None:
        """Starts the command and waits for the ready line. After `stop`, starts it again with the same data folder."""
        command = [sys.executable, "-m", "redpoll", "serve", "--host", "127.0.0.1"]
        command += [
            "--port",
            str(self.public_port),
            "--control-port",
            "0",
            "--workers",
            str(self.workers),
            "--data-dir",
            str(self.folder / "data"),
        ]
        if self.redis_url is not None:
            command += ["--redis-url", self.redis_url]
        with open(self.folder / "out", "wb") as out, open(self.folder / "err", "wb") as err:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=self.environment(),
                cwd=self.folder,
                start_new_session=True,
                preexec_fn=self._limit_files if self._files else None,
            )
        match = self._wait_ready_line()
        self.public_url, self.control_url, self.tls_url = match[1], match[2], match[3] or ""
        self.port = int(self.public_url.rpartition(":")[2])
        self.control_port = int(self.control_url.rpartition(":")[2])

    def environment(self) -> dict[str, str]:
        """The environment of the tests without settings of redpoll, plus the settings of this server."""
        prefixes = ("REDPOLL_", "PUSHER_", "REVERB_", "SOKETI_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
        environment.pop("REDIS_URL", None)
        package = importlib.util.find_spec("redpoll")
        assert package is not None, "redpoll cannot be imported here"
        assert package.origin is not None
        # The server runs in another folder, but must import the same redpoll as the tests.
        environment["PYTHONPATH"] = os.pathsep.join((str(_HIDDEN), str(Path(package.origin).parents[1])))
        environment["REDPOLL_APP_ID"] = self.app_id
        environment["REDPOLL_APP_KEY"] = self.app_key
        environment["REDPOLL_APP_SECRET"] = self.app_secret
        environment.update({f"REDPOLL_{name.upper()}": str(value) for name, value in self.settings.items()})
        return environment

    def _limit_files(self) -> None:
        assert self._files is not None
        resource.setrlimit(resource.RLIMIT_NOFILE, self._files)

    def _wait_ready_line(self) -> re.Match[str]:
        assert self._process is not None
        deadline = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline:
            match = _READY_LINE.search((self.folder / "out").read_text(errors="replace"))
            if match is not None:
                return match
            if self._process.poll() is not None:
                raise ServerFailed(f"serve ended with {self._process.returncode}\n{self.output()}")
            time.sleep(0.01)
        raise ServerFailed(f"serve was not ready within {READY_WITHIN_S} s\n{self.output()}")

    def stop(self) -> None:
        """Sends SIGTERM to the supervisor. Raises ServerFailed unless every process ends cleanly."""
        if self._process is None:
            return
        faults = self._counted_errors()
        family = [running.pid for running in self._family()]
        supervisor, self._process = self._process, None
        supervisor.send_signal(signal.SIGTERM)
        try:
            code = supervisor.wait(STOPPED_WITHIN_S)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(supervisor.pid, signal.SIGKILL)
            supervisor.wait()
        if code is None:
            faults.append(f"serve was still running {STOPPED_WITHIN_S} s after SIGTERM")
        elif code != 0:
            faults.append(f"serve ended with {code}")
        faults += [f"{pid} survived its supervisor" for pid in family if pid != supervisor.pid and process(pid)]
        faults += [f"traceback in the log: {line}" for line in self._tracebacks()]
        if faults:
            raise ServerFailed("\n".join([*faults, self.output()]))

    def signal(self, number: int) -> None:
        """Sends a signal to the supervisor only."""
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self, timeout_s: float = STOPPED_WITHIN_S) -> int:
        """Waits until the supervisor ends and returns its exit code. A later `stop` does nothing."""
        assert self._process is not None
        code = self._process.wait(timeout_s)
        self._process = None
        return code

    def _end_by_force(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    # -- output and metrics

    def output(self) -> str:
        """The last 6,000 characters of stdout and of stderr."""
        texts = [(self.folder / name).read_text(errors="replace")[-6000:] for name in ("out", "err")]
        return "--- stdout\n{}\n--- stderr\n{}".format(*texts)

    def _tracebacks(self) -> list[str]:
        found = []
        for name in ("out", "err"):
            lines = (self.folder / name).read_text(errors="replace").splitlines()
            for number, line in enumerate(lines):
                if _TRACEBACK in line:
                    found.append(f"{name}:{number + 1}: {line[:300]}")
        return found

    def _counted_errors(self) -> list[str]:
        """Exceptions that escaped a callback or a task, from the counters of the processes. They may be 5 s old."""
        counters = ("redpoll_callback_errors_total", "redpoll_loop_exceptions_total")
        try:
            text = self._metrics_text()
        except OSError:
            return []  # the test itself has stopped the server
        # Parsing all of it takes ten times as long as these lines.
        lines = [line.rpartition(" ") for line in text.splitlines() if line.startswith(counters)]
        return [f"{sample} is {value}" for sample, _, value in lines if float(value)]

    def metrics(self) -> dict[tuple[str, str], float]:
        """(name, labels as text) → value, from /metrics on the control port."""
        values = {}
        for family in text_string_to_metric_families(self._metrics_text()):
            for sample in family.samples:
                labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
                values[sample.name, labels] = sample.value
        return values

    def _metrics_text(self) -> str:
        with urllib.request.urlopen(f"{self.control_url}/metrics", timeout=60) as response:
            text: str = response.read().decode()
        return text

    # -- processes

    @property
    def running(self) -> bool:
        """Whether it was started, and not ended since by `stop` or `wait`."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """The process id of the supervisor."""
        assert self._process is not None
        return self._process.pid

    def _family(self) -> list[Process]:
        """The supervisor and all its descendants."""
        found = [running for running in [process(self.pid)] if running is not None]
        for parent in found:  # the list grows during the loop
            found += [running for pid in children(parent.pid) if (running := process(pid)) is not None]
        return found

    def _role(self, word: str) -> list[Process]:
        return [process for process in self._family()[1:] if word in process.command]

    def worker_pids(self) -> list[int]:
        """The process ids of the workers, ordered by the number on their command line."""

        def number(process: Process) -> int:
            digits = re.search(r"\d+", " ".join(process.command[process.command.index("worker") + 1 :]))
            return int(digits[0]) if digits else 0

        return [process.pid for process in sorted(self._role("worker"), key=number)]

    def control_pids(self) -> list[int]:
        """The process ids of the control plane: none while it is started again, else one."""
        return [process.pid for process in self._role("control")]

    @property
    def control_pid(self) -> int:
        (pid,) = self.control_pids()
        return pid

    @property
    def redis_pid(self) -> int:
        """The process id of the embedded Redis."""
        (process,) = [
            process
            for process in self._family()[1:]
            if process.command and re.search(r"(redis|valkey)-server", process.command[0])
        ]
        return process.pid

    def kill_worker(self, index: int) -> int:
        """Kills a worker with SIGKILL and returns its process id."""
        pid = self.worker_pids()[index]
        os.kill(pid, signal.SIGKILL)
        return pid

    def worker_of(self, client_port: int) -> int:
        """The process id of the worker that has the connection from this local port."""
        inode = self._inodes_by_client_port().get(client_port)
        for pid in self.worker_pids():
            if inode in _socket_inodes(pid):
                return pid
        raise AssertionError(f"no worker has a connection from port {client_port}")

    def client_ports(self) -> dict[int, set[int]]:
        """The client ports of the connections on the public port, by the process id of the worker."""
        by_inode = {inode: port for port, inode in self._inodes_by_client_port().items()}
        return {
            pid: {by_inode[inode] for inode in _socket_inodes(pid) if inode in by_inode} for pid in self.worker_pids()
        }

    def _inodes_by_client_port(self) -> dict[int, int]:
        """The inode of the server's socket by client port, for established connections on the public port."""
        found = {}
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            local, remote, state = fields[1], fields[2], fields[3]
            if state == "01" and int(local.rpartition(":")[2], 16) == self.port:
                found[int(remote.rpartition(":")[2], 16)] = int(fields[9])
        return found

    @contextmanager
    def redis(self) -> Iterator[redis_py.Redis]:
        """A client of the Redis that this server uses."""
        if self.redis_url is not None:
            client = redis_py.Redis.from_url(self.redis_url)
        else:
            client = redis_py.Redis(unix_socket_path=_unix_socket_of(self.redis_pid))
        try:
            yield client
        finally:
            client.close()

    def keys(self) -> Keys:
        """The names in Redis, with the shard key of this server's record store, an SQLite file."""
        with contextlib.closing(sqlite3.connect(self.folder / "data" / "redpoll.sqlite")) as database:
            ((key,),) = database.execute("SELECT value FROM meta WHERE name = 'shard_key'")
        return Keys(shard_key=bytes.fromhex(key))

    # -- address

    @property
    def pusher_url(self) -> str:
        """`http://KEY:SECRET@HOST:PORT/apps/ID`, the form that server libraries and bench/ accept."""
        return f"http://{self.app_key}:{self.app_secret}@127.0.0.1:{self.port}/apps/{self.app_id}"


def _socket_inodes(pid: int) -> set[int]:
    inodes = set()
    try:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(entry.path)
            except FileNotFoundError:
                continue
            if target.startswith("socket:["):
                inodes.add(int(target[8:-1]))
    except (FileNotFoundError, PermissionError):
        return set()
    return inodes


def _unix_socket_of(pid: int) -> str:
    """The path of the Unix socket on which the process listens."""
    inodes = _socket_inodes(pid)
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        listening = fields[3] == "00010000"
        if listening and len(fields) == 8 and int(fields[6]) in inodes:
            return fields[7]
    raise AssertionError(f"process {pid} listens on no Unix socket")
