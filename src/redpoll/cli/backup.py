"""`redpoll backup` and `redpoll restore`: a copy of the record store in one file. Records in PostgreSQL are left to its
own tools.

A backup reads the database beside the running server: SQLite's own backup copies one state of it and never blocks the
writer (WAL). A restore needs the data folder for itself, because the server has its records in memory.

Root acts in the data folder, and in the folder of FILE, as the owner of that folder (datafolder.as_owner).
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import click

from redpoll.cli.common import fail, print_json, refuse
from redpoll.cli.execute import import_store, refuse_unused_store
from redpoll.cli.records_command import records_command
from redpoll.config import config, data_files

__all__ = ["backup", "copy_database", "restore"]

_RESTORED_WITHIN_S = 60.0


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@records_command
def backup(file: Path, force: bool, settings: config.Settings, as_json: bool) -> None:
    """Copy the records to FILE, while the server runs: apps, keys, tokens, users, webhooks and their deliveries.

    FILE contains secrets and gets mode 0600. It can't be a file that a server itself uses. Histories are in Redis, and
    the event log in events.sqlite; neither is in FILE. A backup that is killed leaves FILE.PID.partial: remove it. With
    `database_url`, use pg_dump instead.

    \b
    Examples:
      redpoll backup /var/backups/redpoll.sqlite --force
      redpoll backup today.sqlite --data-dir /var/lib/redpoll --json
    """
    from redpoll.host import datafolder

    _refuse_postgres(settings, "back them up", "pg_dump --format=custom --file=FILE URL")
    source = _database(settings)
    partial = _partial(file)
    try:
        if not source.exists():
            fail(f"there is no record store at {source}")
        if not file.parent.is_dir():
            fail(f"there is no folder {file.parent}")
        if data_files.is_own_file(file, source.parent) or (file.exists() and file.samefile(source)):
            refuse([f"{file} is a file that a server itself uses; choose another name for the backup"])
        if file.exists() and not force:
            refuse([f"{file} exists; --force replaces it"])
        with datafolder.as_owner(file.parent), _temporary(partial):
            copy_database(source, partial)
            if not _has_app(partial):
                click.echo(
                    f"warning: {source} has no app; if it isn't the server's, --data-dir names another data folder",
                    err=True,
                )
            os.replace(partial, file)
            _sync_folder(file.parent)
    except (OSError, sqlite3.Error, datafolder.DataFolderError) as error:
        fail(f"the backup failed: {error}")
    _print_done(file, "saved to", as_json)


@click.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@records_command
def restore(file: Path, settings: config.Settings, as_json: bool) -> None:
    """Replace all records by those of a backup, also while the server runs.

    A running server answers HTTP requests with 503 for some seconds; WebSockets stay, except those of apps that the
    backup doesn't have. A backup of another server can be restored only while none runs. The present records are moved
    to redpoll.sqlite.before-restore in the data folder. Deliveries that waited when the backup was made are sent again.
    With `database_url`, use pg_restore instead.

    \b
    Examples:
      redpoll restore /var/backups/redpoll.sqlite
      redpoll restore today.sqlite --data-dir /var/lib/redpoll
    """
    from redpoll.host import datafolder
    from redpoll.store.migrating import scripts
    from redpoll.store.sqlite import finish_restore, restoring

    _refuse_postgres(settings, "restore them, with all servers stopped,", "pg_restore --clean --dbname=URL FILE")
    import_store()
    scripts()
    database = _database(settings)
    partial = _partial(database)
    try:
        try:
            with (
                datafolder.lock(database.parent, "restore"),
                datafolder.as_owner(database.parent),
                _temporary(partial),
            ):
                copy_database(file, partial)
                _refuse_unusable(file, partial)
                _raise_directory_version(partial)
                os.replace(partial, restoring(database))
                finish_restore(database)
        except datafolder.DataFolderInUse as error:
            _restore_running(file, partial, database, error)
    except (OSError, sqlite3.Error, datafolder.DataFolderError) as error:
        fail(f"the restore failed: {error}")
    _print_done(database, "restored to", as_json)


def _restore_running(file: Path, partial: Path, database: Path, in_use: Exception) -> None:
    """Has the running server replace its records: its control plane takes the file over, closes its records and starts
    again, also if this command is ended meanwhile. Raises OSError or sqlite3.Error."""
    from redpoll.host import datafolder
    from redpoll.ipc.command_socket import CommandError, ask, socket_path
    from redpoll.store.sqlite import restoring

    server = socket_path(database.parent)
    with datafolder.as_owner(database.parent), _temporary(partial):
        copy_database(file, partial)
        _refuse_unusable(file, partial)
        if _store_id(partial) != _store_id(database):
            fail(f"{in_use}, and {file} is a backup of another server, or of an older version: stop the server first")
        _raise_directory_version(partial)
        try:
            ask(server, "server restore", {"file": str(partial)})
        except (OSError, CommandError) as error:
            fail(f"{in_use}, which can't restore: {error}; stop it first")
        deadline = time.monotonic() + _RESTORED_WITHIN_S
        while True:
            try:
                if not restoring(database).exists():
                    ask(server, "server show", {})
                    return
            except (OSError, CommandError):
                pass
            if time.monotonic() > deadline:
                fail(f"the server is not back after {_RESTORED_WITHIN_S:g} s; its log says why")
            time.sleep(0.05)


def _refuse_unusable(file: Path, copy: Path) -> None:
    """Exits with 1 if a newer redpoll has migrated the backup `file`, and this one couldn't open it. `copy` is a copy
    of it. Raises sqlite3.Error."""
    import sqlalchemy as sa

    from redpoll.store.migrating import state_of, unusable

    engine = sa.create_engine("sqlite://", creator=lambda: sqlite3.connect(copy), poolclass=sa.NullPool)
    try:
        with engine.connect() as connection:
            schema = state_of(connection, str(file))
    except sa.exc.SQLAlchemyError as error:
        raise sqlite3.DatabaseError(f"{file} is no record store of redpoll") from error
    if not schema.usable:
        fail(f"nothing was restored: {unusable(schema)}")


def _store_id(path: Path) -> str | None:
    with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
        row = database.execute("SELECT value FROM meta WHERE name = 'store_id'").fetchone()
    return row[0] if row else None


def _has_app(path: Path) -> bool:
    with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
        return database.execute("SELECT 1 FROM apps").fetchone() is not None


def _refuse_postgres(settings: config.Settings, what: str, command: str) -> None:
    """Its own tools do this, consistently and while servers run. An SQLite file in the data folder, of the time before
    `database_url` was set, isn't meant."""
    if settings.database_url:
        fail(f"the records are in PostgreSQL (database_url): {what} with `{command}`")
    refuse_unused_store(_database(settings).parent, f"{what} with `{command}`")


def _database(settings: config.Settings) -> Path:
    return Path(settings.data_dir).resolve() / data_files.RECORDS


def copy_database(source: Path, target: Path) -> None:
    """Copies one state of a database to a file that is complete without -wal, and checks it. Raises sqlite3.Error.

    Root reads as the owner of the source's folder. The caller has the rights with which the target is written.
    """
    from redpoll.host import datafolder

    target.unlink(missing_ok=True)
    os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600))
    with contextlib.closing(sqlite3.connect(target)) as writing:
        # While root has the rights of the source's owner, no further file can be opened beside the target.
        writing.execute("PRAGMA journal_mode=OFF")
        # For reading: closing it must not write what is in the source's -wal into the source.
        uri = f"{source.absolute().as_uri()}?mode=ro"
        with datafolder.as_owner(source.parent), contextlib.closing(sqlite3.connect(uri, uri=True)) as reading:
            reading.execute("PRAGMA busy_timeout=5000")
            reading.backup(writing)
    with contextlib.closing(sqlite3.connect(target)) as writing:
        writing.execute("PRAGMA journal_mode=DELETE")
        (verdict,) = writing.execute("PRAGMA quick_check").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(f"{source} is damaged: {verdict}")
        if not writing.execute("SELECT 1 FROM sqlite_master WHERE name = 'apps'").fetchone():
            raise sqlite3.DatabaseError(f"{source} is no record store of redpoll")


def _raise_directory_version(path: Path) -> None:
    """Redis may have the directory of later records. Workers take only a newer one (cluster/README.md "Directory")."""
    from redpoll.store.schema import meta

    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute(
            f"UPDATE {meta.name} SET value = ? WHERE name = 'directory_version'", [str(time.time_ns() // 1_000_000)]
        )
        database.commit()


def _partial(path: Path) -> Path:
    """Where a copy is written that gets the name `path` at its end. Another command has a file of its own."""
    return path.with_name(f"{path.name}.{os.getpid()}.partial")


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[None]:
    """Removes the file at the end, unless it was renamed."""
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _print_done(path: Path, what: str, as_json: bool) -> None:
    size = path.stat().st_size
    if as_json:
        print_json({"file": str(path), "bytes": size})
    else:
        click.echo(f"{what} {path} ({size} bytes)")
