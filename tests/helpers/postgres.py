"""A real PostgreSQL for tests: Debian's, as an unprivileged user, in a folder of its own, on a Unix socket."""

from __future__ import annotations

import asyncio
import os
import pwd
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import glob
from itertools import count
from pathlib import Path
from typing import Any

import asyncpg

from redpoll.store.store import Store

# Debian's programs are not on the PATH.
_FOLDERS = os.pathsep.join([os.environ.get("PATH", ""), *sorted(glob("/usr/lib/postgresql/*/bin"), reverse=True)])
_TEMPLATE = "redpoll_template"
# Data of tests needn't survive a power loss. Checkpoints and autovacuum only cost time.
# Without fsync a commit reaches the kernel only, which suffices: the tests kill the process, not the machine.
_OPTIONS = ("fsync=off", "full_page_writes=off", "autovacuum=off", "max_connections=60")


def program(name: str) -> str | None:
    """The path of one of PostgreSQL's programs; None if it isn't installed."""
    return shutil.which(name, path=_FOLDERS)


class PostgresServer:
    """A PostgreSQL on its own Unix socket. `kill`, `start`, `pause` and `resume` are for failure tests."""

    def __init__(self) -> None:
        # The path must be short: a Unix socket's path has at most 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="rp"))
        self._names = (f"test{number}" for number in count())
        self._template: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        # It refuses to run as root.
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:
            user = pwd.getpwnam("nobody")
            os.chown(self.folder, user.pw_uid, user.pw_gid)
            self._user = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        command = [str(program("initdb")), "--pgdata", str(self.folder / "data"), "--username", "redpoll"]
        command += ["--auth", "trust", "--no-sync", "--no-instructions", "--encoding", "UTF8", "--locale", "C"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=self.folder, **self._user)

    def start(self) -> None:
        command = [str(program("postgres")), "-D", str(self.folder / "data"), "-k", str(self.folder)]
        command += ["-c", "listen_addresses=", *(part for option in _OPTIONS for part in ("-c", option))]
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self.folder, start_new_session=True, **self._user
            )
        deadline = time.monotonic() + 60
        while True:
            try:
                self.execute("postgres", "SELECT 1")
                return
            except (OSError, asyncpg.CannotConnectNowError) as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    error.add_note((self.folder / "log").read_text()[-2000:])
                    raise
                time.sleep(0.01)

    def kill(self) -> None:
        """Kills it with all its processes, as a power loss would, and waits until they have ended."""
        assert self._process is not None
        # First: it starts no more of them.
        self._process.send_signal(signal.SIGSTOP)
        with _watched(_children(self._process.pid)) as children:
            _send(signal.SIGKILL, children)
            self._process.kill()
            self._process.wait()
            for descriptor in children:
                # Not `select`: it takes no descriptor above 1,023, and a long test has thousands of clients.
                ended = select.poll()
                ended.register(descriptor, select.POLLIN)
                ended.poll()
        self._process = None

    def pause(self) -> None:
        """Stops all its processes: connections stay open and nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        with _watched(_children(self._process.pid)) as children:
            _send(number, children)

    def make_standby(self) -> None:
        """After the next start it is a standby: it answers reads, takes no changes, and has no primary to follow."""
        (self.folder / "data" / "standby.signal").touch()

    def close(self) -> None:
        if self._process is not None:
            self.resume()
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def url(self, database: str) -> str:
        return f"postgresql://redpoll@/{database}?host={self.folder}"

    def execute(self, database: str, *statements: str) -> list[asyncpg.Record]:
        """Executes statements, each in a transaction of its own. Returns the rows of the last one."""

        async def execute() -> list[asyncpg.Record]:
            connection = await asyncpg.connect(self.url(database), timeout=60)
            try:
                rows = []
                for statement in statements:
                    rows = await connection.fetch(statement)
                return rows
            finally:
                await connection.close()

        return asyncio.run(execute())

    def create_database(self, *, empty: bool = False) -> str:
        """A new database, migrated unless `empty`. Returns its name."""
        name = next(self._names)
        if empty:
            self.execute("postgres", f"CREATE DATABASE {name}")
            return name
        if self._template is None:
            self.execute("postgres", f"CREATE DATABASE {_TEMPLATE}")
            asyncio.run(_migrate(self.url(_TEMPLATE)))
            self._template = _TEMPLATE
        self.execute("postgres", f"CREATE DATABASE {name} TEMPLATE {self._template} STRATEGY FILE_COPY")
        return name

    def drop_database(self, name: str) -> None:
        self.execute("postgres", f"DROP DATABASE {name} WITH (FORCE)")


async def _migrate(url: str) -> None:
    await (await Store.open(url)).close()


def _children(parent: int) -> list[int]:
    """PostgreSQL's processes are children of the first one, each in a session of its own."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # Behind the name, which is in parentheses: state, parent.
            if int(path.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(path.parent.name))
    return found


@contextmanager
def _watched(processes: list[int]) -> Iterator[list[int]]:
    """Descriptors of those that haven't ended; each is readable once its process has."""
    descriptors = []
    for process in processes:
        with suppress(ProcessLookupError):
            descriptors.append(os.pidfd_open(process))
    try:
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _send(number: signal.Signals, descriptors: list[int]) -> None:
    for descriptor in descriptors:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, number)
