"""The data folder: its lock, and whose rights a command has in it. One process at a time, a server or a command, owns
the files in the folder.
"""

import contextlib
import fcntl
import os
import pwd
import shlex
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["DataFolderError", "DataFolderInUse", "as_owner", "foreign_owner", "lock", "name_of", "openness"]

_LOCK_NAME = "lock"
_SERVER = "redpoll serve"
# A server that is stopping releases the folder soon.
_WAIT_FOR_SERVER_S = 1.0
# Commands hold the folder briefly; a start script or a health check may run one at any moment.
_WAIT_FOR_COMMAND_S = 10.0


class DataFolderError(Exception):
    """The folder can't be used, or another process uses it. The text is a sentence for the operator."""


class DataFolderInUse(DataFolderError):
    """Another process uses the folder."""


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


def foreign_owner(folder: Path) -> str | None:
    """The name of the user who owns the folder, if this process is root and that user isn't; else None."""
    owner = _owner_of(folder) if os.getresuid()[0] == 0 else None
    return None if owner is None or owner.st_uid == 0 else name_of(owner.st_uid)


@contextlib.contextmanager
def as_owner(folder: Path) -> Iterator[None]:
    """Inside the block, root has the rights, groups and HOME of the folder's owner. Changes nothing for other users,
    nor for a folder that is missing: root creates and owns that one.

    The owner may put links into the folder at any time. With the owner's rights, these lead only to what the owner can
    read and write anyway, and new files belong to the owner, whose server must open them. Blocks can be nested: in a
    folder of root's, inside of one of somebody else's, root has all rights again.

    Modules that are imported inside must be readable by the owner. Raises DataFolderError.
    """
    owner = _owner_of(folder) if os.getresuid()[0] == 0 else None
    if owner is None or owner.st_uid == os.geteuid():
        yield
        return
    before = (os.geteuid(), os.getegid(), os.getgroups(), os.environ.get("HOME"))
    name = name_of(owner.st_uid)
    try:
        _become(owner.st_uid, *_rights_of(owner))
    except OSError as error:
        # Without the capability for one of the steps; the first of them needs none.
        os.seteuid(before[0])
        raise DataFolderError(
            f"the folder {folder} belongs to {name}, and this process can't act as {name} ({error.strerror}): "
            f"run the command as {name}"
        ) from error
    try:
        yield
    except ImportError as error:
        raise DataFolderError(
            f"the folder {folder} belongs to {name}, who can't read this installation of redpoll ({error}): "
            f"run one that {name} can read"
        ) from error
    finally:
        _become(*before)


def _owner_of(folder: Path) -> os.stat_result | None:
    """Asks as root; None if there is no folder."""
    acting_as = os.geteuid()
    os.seteuid(0)
    try:
        return folder.stat()
    except OSError:
        return None
    finally:
        os.seteuid(acting_as)


def _rights_of(owner: os.stat_result) -> tuple[int, list[int], str | None]:
    """Group, groups and home of the user to whom a file belongs."""
    try:
        entry = pwd.getpwuid(owner.st_uid)
    except KeyError:
        # A user of a container, or of another machine.
        return owner.st_gid, [owner.st_gid], None
    return entry.pw_gid, os.getgrouplist(entry.pw_name, entry.pw_gid), entry.pw_dir


def _become(uid: int, gid: int, groups: list[int], home: str | None) -> None:
    """Changes the effective ids of all threads. The real user remains root, so that this can be undone."""
    os.seteuid(0)
    os.setgroups(groups)
    os.setegid(gid)
    os.seteuid(uid)
    if home is None:
        os.environ.pop("HOME", None)
    else:
        os.environ["HOME"] = home


def name_of(uid: int) -> str:
    """The user's name for a sentence."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


@contextlib.contextmanager
def lock(
    folder: Path, command: str, wait_s: float | None = None, waiting: Callable[[str], None] = lambda _holder: None
) -> Iterator[None]:
    """Creates the folder with mode 0700 and holds its lock inside the block. `command` names the holder to others.

    Waits up to `wait_s` for another holder; by default 1 s for a server, and 10 s for a command, because commands hold
    the lock briefly. `waiting` is called once with the name of a command that is waited for. Root opens the lock with
    the rights of the folder's owner. Raises DataFolderError, DataFolderInUse if another process has the lock at the
    end of the wait. The kernel releases the lock when the holder dies.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with as_owner(folder):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(folder / _LOCK_NAME, flags, 0o600)
    except OSError as error:
        raise DataFolderError(f"the data folder {folder} can't be used: {error.strerror}") from error
    # Without a buffer, because what a full disk refuses would be written again when the file is closed.
    with open(descriptor, "rb+", buffering=0) as lock_file:
        _lock(lock_file.fileno(), folder, wait_s, waiting)
        try:
            lock_file.truncate(0)
            lock_file.write(f"redpoll {command}, process {os.getpid()}".encode())
        except OSError as error:
            raise DataFolderError(f"the data folder {folder} can't be written: {error.strerror}") from error
        try:
            yield
        finally:
            lock_file.truncate(0)


def _lock(descriptor: int, folder: Path, wait_s: float | None, waiting: Callable[[str], None]) -> None:
    began = time.monotonic()
    is_named = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            # Empty while the holder writes its name, and once it has finished.
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            # The folder's owner may write anything there, and it is printed.
            holder = holder if holder.isprintable() else "another process"
        except OSError as error:
            # A file system without locks, such as NFS without its lock daemon.
            raise DataFolderError(f"the data folder {folder} can't be locked: {error.strerror}") from error
        of_server = holder.startswith(_SERVER)
        limit_s = wait_s if wait_s is not None else _WAIT_FOR_SERVER_S if of_server else _WAIT_FOR_COMMAND_S
        if time.monotonic() - began >= limit_s:
            raise DataFolderInUse(f"the data folder {folder} is in use by {holder or 'another process'}")
        if holder and not of_server and not is_named:
            is_named = True
            waiting(holder)
        time.sleep(0.02)
