"""The files in the data folder: which names are redpoll's own, and the marker that says that the records are in
PostgreSQL.

A server with `database_url` leaves the marker. Commands and servers without `database_url` then leave `redpoll.sqlite`
alone: it has the records of an earlier time, or none.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from redpoll.config.certificate import write_private

__all__ = ["MARKER", "RECORDS", "forget_postgres", "is_own_file", "note_postgres", "noted_postgres"]

RECORDS: Final = "redpoll.sqlite"
_LOCK: Final = "lock"
MARKER: Final = "records-in-postgresql"
_MAX_MARKER_BYTES: Final = 1_000
# tests/cli/test_backup.py compares this with what a running server has in its folder.
_OWN_NAME = re.compile(
    r"(redpoll|events|charts)\.sqlite(\.old|\.before-restore|\.restoring|\.[0-9]+\.partial)?(-wal|-shm|-journal)?"
    r"|(tls\.pem|records-in-postgresql)(\.new)?|first-login|lock|redis|(redis|control)\.sock"
)


def is_own_file(path: Path, folder: Path) -> bool:
    """Whether redpoll itself uses this file, in the data folder `folder` or in that of another server. Links are
    followed. Raises OSError."""
    return any(
        _OWN_NAME.fullmatch(place.relative_to(parent).parts[0]) is not None
        for place in {path.parent.resolve() / path.name, path.resolve()}
        for parent in place.parents
        if _is_data_folder(parent, folder)
    )


def _is_data_folder(path: Path, folder: Path) -> bool:
    return (path.exists() and path.samefile(folder)) or ((path / _LOCK).is_file() and (path / RECORDS).is_file())


def note_postgres(folder: Path, database: str) -> None:
    """Leaves the marker. `database` describes the database without credentials. Raises OSError."""
    if noted_postgres(folder) != database:
        write_private(f"{database}\n".encode(), folder / MARKER)


def noted_postgres(folder: Path) -> str | None:
    """The database that the marker names; None without a marker. Root calls this with the rights of the folder's
    owner, who may write anything there."""
    path = folder / MARKER
    text = b""
    try:
        # A link isn't followed, and a pipe isn't waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            text = file.read(_MAX_MARKER_BYTES) or b""
    except OSError:
        # One that can't be read is a marker nevertheless.
        if not os.path.lexists(path):
            return None
    name = text.decode(errors="replace").strip()
    return name if name and name.isprintable() else "PostgreSQL"


def forget_postgres(folder: Path) -> None:
    """Removes the marker: the records are in the data folder again. Raises OSError."""
    (folder / MARKER).unlink(missing_ok=True)
