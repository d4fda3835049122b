"""A real PostgreSQL for tests: Debian's, as an unprivileged user, in a folder of its own, on a Unix socket."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
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
            except (OSError, asyncpg.CannotConnectNowError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def kill(self) -> None:
        """Kills it with all its processes, as a power loss would, and waits until they have ended."""
        assert self._process is not None
        group = self._process.pid
        os.killpg(group, signal.SIGKILL)
        self._process.wait()
        self._process = None
        while _group_exists(group):
            time.sleep(0.002)

    def pause(self) -> None:
        """Stops all its processes: connections stay open and nothing answers."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGCONT)

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


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
