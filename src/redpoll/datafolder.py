"""The data folder and its lock: one process at a time owns what lies in it, a server or a command."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["DataFolderError", "hold"]

_LOCK_NAME = "lock"


class DataFolderError(Exception):
    """The folder can't be used, or is in use. The text is a sentence for the operator."""


@contextlib.contextmanager
def hold(folder: Path, what: str, wait_s: float = 1.0) -> Iterator[None]:
    """Makes the folder (mode 0700) and holds its lock inside the block; `what` tells others who holds it.

    Waits up to `wait_s` for another holder: a command holds it for a moment only. Raises DataFolderError.
    The kernel lets go of the lock when the holder dies, however it dies.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise DataFolderError(f"the data folder {folder} can't be used: {error.strerror}") from error
    with open(descriptor, "r+") as lock:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    holder = lock.read().strip() or "another process"
                    raise DataFolderError(f"the data folder {folder} is in use by {holder}") from None
                time.sleep(0.02)
        lock.truncate(0)
        lock.write(f"redpoll {what}, process {os.getpid()}")
        lock.flush()
        try:
            yield
        finally:
            lock.truncate(0)
