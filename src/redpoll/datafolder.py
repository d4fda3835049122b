"""The data folder and its lock. One process at a time, a server or a command, owns the files in the folder."""

import contextlib
import fcntl
import os
import shlex
import stat
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["DataFolderError", "lock", "openness"]

_LOCK_NAME = "lock"


class DataFolderError(Exception):
    """The folder can't be used, or another process uses it. The text is a sentence for the operator."""


def openness(folder: Path) -> str | None:
    """What other users of this machine may do in the folder, and how to end it; None if they may do nothing.

    An existing folder keeps its mode: it may be one that the operator shares on purpose.
    """
    mode = stat.S_IMODE(folder.stat().st_mode)
    if not mode & 0o077:
        return None
    may = "replace its files, and so take over this server" if mode & 0o022 else "see the names of its files"
    return (
        f"mode {mode:04o} lets other users of this machine {may}; close it with: chmod 700 {shlex.quote(str(folder))}"
    )


@contextlib.contextmanager
def lock(folder: Path, command: str, wait_s: float = 1.0) -> Iterator[None]:
    """Creates the folder with mode 0700 and holds its lock inside the block. `command` names the holder to others.

    Waits up to `wait_s` for another holder, because a command holds the lock only briefly. Raises DataFolderError.
    The kernel releases the lock when the holder dies.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise DataFolderError(f"the data folder {folder} can't be used: {error.strerror}") from error
    with open(descriptor, "r+") as lock_file:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    holder = lock_file.read().strip() or "another process"
                    raise DataFolderError(f"the data folder {folder} is in use by {holder}") from None
                time.sleep(0.02)
        lock_file.truncate(0)
        lock_file.write(f"redpoll {command}, process {os.getpid()}")
        lock_file.flush()
        try:
            yield
        finally:
            lock_file.truncate(0)
