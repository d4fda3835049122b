"""The data folder and its lock. One process at a time, a server or a command, owns the files in the folder."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["DataFolderError", "lock"]

_LOCK_NAME = "lock"


class DataFolderError(Exception):
    """The folder can't be used, or another process uses it. The text is a sentence for the operator."""


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
