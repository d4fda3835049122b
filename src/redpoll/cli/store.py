"""`redpoll store copy`: moves the records of an existing server to another database.
`redpoll migrate`: shows or runs the migrations of the record store, which `serve` otherwise runs at its start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from redpoll.cli.backup import copy_database
from redpoll.cli.common import fail, print_json, refuse
from redpoll.cli.execute import import_store, refuse_unused_store
from redpoll.cli.records_command import records_command
from redpoll.config import config, data_files
from redpoll.config.addresses import ADDRESS_FAULTS

if TYPE_CHECKING:
    from redpoll.store.migrating import Schema

__all__ = ["migrate", "store"]

_SQLITE = "sqlite:"


@click.group()
def store() -> None:
    """Move the records to another database.

    \b
    Examples:
      redpoll store copy sqlite:./redpoll-data/redpoll.sqlite postgresql://redpoll@db/redpoll
    """


@store.command("copy")
@click.argument("source")
@click.argument("target")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def copy(source: str, target: str, as_json: bool) -> None:
    """Copy all records from the database SOURCE to the empty database TARGET. Stop the servers that use them first.

    A database is `sqlite:PATH` or `postgresql://USER@HOST/DATABASE`. Give the password in the environment variable
    PGPASSWORD or in ~/.pgpass, because other users can read command lines. SOURCE isn't changed. TARGET gets its tables
    here, so it must be a new database, which no server has used yet. If TARGET is redpoll.sqlite in the data folder of
    a server, that server can start without `database_url` afterwards.

    \b
    Examples:
      redpoll store copy sqlite:/var/lib/redpoll/redpoll.sqlite postgresql://redpoll@localhost/redpoll
      redpoll store copy postgresql://redpoll@localhost/redpoll sqlite:./redpoll-data/redpoll.sqlite --json
    """
    from redpoll.host import datafolder

    faults = [fault for name, url in (("SOURCE", source), ("TARGET", target)) if (fault := _fault(name, url))]
    if faults:
        refuse(faults)
    import_store()
    with contextlib.ExitStack() as stack:
        try:
            # The store contains secrets.
            os.umask(0o077)
            old, new = _path(source), _path(target)
            if old is not None:
                if not old.is_file():
                    fail(f"there is no record store at {old}")
                if (old.parent / "lock").exists():
                    # It is a server's data folder; a backup may be anywhere.
                    _lock(stack, old)
                if old.name == data_files.RECORDS:
                    refuse_unused_store(old.parent, "copy them from there")
            if new is not None:
                if new.exists():
                    fail(f"{new} exists; the target must be a new file")
                if old is None or old.parent != new.parent:
                    _lock(stack, new)
                # The owner of the target's folder opens both files.
                stack.enter_context(datafolder.as_owner(new.parent))
                stack.enter_context(_new_file(new))
            if old is not None:
                source = _SQLITE + str(_copied(stack, old))
            copied = asyncio.run(_copy(source, target))
            if new is not None and new.name == data_files.RECORDS:
                data_files.forget_postgres(new.parent)
        except (OSError, datafolder.DataFolderError) as error:
            fail(error)
    if as_json:
        # SQLAlchemy's names are a subclass of str, which isn't JSON.
        print_json({"rows": {"".join(table): rows for table, rows in copied.items()}})
        return
    for table, rows in copied.items():
        click.echo(f"{table:12} {rows}")
    click.echo(f"copied {sum(copied.values())} rows and counted them again")


def _fault(name: str, url: str) -> str | None:
    if url.startswith(_SQLITE):
        return None
    if not url.startswith(("postgresql://", "postgres://")):
        return f"{name} must begin with sqlite: or postgresql://"
    fault = ADDRESS_FAULTS["database_url"](url)
    return f"{name} {fault}" if fault else None


def _path(url: str) -> Path | None:
    return Path(url.removeprefix(_SQLITE)).resolve() if url.startswith(_SQLITE) else None


def _lock(stack: contextlib.ExitStack, path: Path) -> None:
    """No server may use the file's folder meanwhile: what it changes after the copy would be missing."""
    from redpoll.host import datafolder

    try:
        stack.enter_context(datafolder.lock(path.parent, "store copy"))
    except datafolder.DataFolderInUse as error:
        fail(f"{error}; stop the server first")


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[None]:
    """Makes the file, and removes it if the copy fails: no server may start with it, and the command can be repeated.
    If another command made the file meanwhile, that file stays."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600))
    except FileExistsError:
        fail(f"{path} exists; the target must be a new file")
    try:
        yield
    except BaseException:
        for ending in ("", "-wal", "-shm"):
            path.with_name(path.name + ending).unlink(missing_ok=True)
        raise


def _copied(stack: contextlib.ExitStack, path: Path) -> Path:
    """A temporary copy of an SQLite file, which may be migrated: the source may be of an older version."""
    temporary = Path(stack.enter_context(tempfile.TemporaryDirectory())) / path.name
    try:
        copy_database(path, temporary)
    except sqlite3.Error as error:
        fail(f"{path} can't be read: {error}")
    return temporary


async def _copy(source_url: str, target_url: str) -> dict[str, int]:
    from sqlalchemy.exc import SQLAlchemyError

    from redpoll.store import copying
    from redpoll.store.errors import StoreError, StoreUnavailable, reason_of
    from redpoll.store.store import Store

    async with contextlib.AsyncExitStack() as stack:
        try:
            opened = []
            for url in (source_url, target_url):
                opened.append(await Store.open(url, patient=True))
                stack.push_async_callback(opened[-1].close)
            return await copying.copy(*opened)
        except (StoreError, StoreUnavailable) as error:
            fail(error)
        except SQLAlchemyError as error:
            fail(f"the copy failed, and nothing was kept: {reason_of(error)}")


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; exit with 1 if a migration is missing.")
@records_command
def migrate(check: bool, settings: config.Settings, as_json: bool) -> None:
    """Bring the tables of the record store up to this version of redpoll, and show what was done.

    `serve` does the same at its start, so this command is for those who want to do it before: as a step of a release,
    or with an account that may change tables. Make a backup first. A migration only adds, so servers of the previous
    release go on using the store meanwhile: PostgreSQL is migrated while they run. An SQLite store needs the server
    stopped. The event log and the charts upgrade themselves.

    \b
    Examples:
      redpoll migrate --check
      redpoll migrate --data-dir /var/lib/redpoll --json
    """
    from redpoll.host import datafolder
    from redpoll.store.errors import StoreError, StoreUnavailable
    from redpoll.store.migrating import unusable
    from redpoll.store.store import Store, database_url, schema_of

    # The store contains secrets.
    os.umask(0o077)
    folder = Path(settings.data_dir).resolve()
    url = database_url(folder, settings.database_url)
    if not settings.database_url:
        refuse_unused_store(folder)

    async def apply() -> None:
        await (await Store.open(url)).close()

    import_store()
    try:
        with contextlib.nullcontext() if settings.database_url else datafolder.as_owner(folder):
            before = asyncio.run(schema_of(url))
        if not before.usable:
            fail(unusable(before))
        after = before
        if before.missing and not check:
            # The lock creates the folder if it is missing.
            with contextlib.ExitStack() as stack:
                if not settings.database_url:
                    stack.enter_context(datafolder.lock(folder, "migrate"))
                    stack.enter_context(datafolder.as_owner(folder))
                asyncio.run(apply())
                after = asyncio.run(schema_of(url))
    except datafolder.DataFolderInUse as error:
        fail(f"{error}; stop the server first, or restart it: it migrates at its start")
    except (StoreError, StoreUnavailable, datafolder.DataFolderError) as error:
        fail(error)
    if as_json:
        print_json(
            {
                "database": after.database,
                "revision": after.revision,
                "applied": _described(before) if after is not before else [],
                "missing": _described(after),
            }
        )
    else:
        _print(before, after)
    if after.missing:
        sys.exit(1)


def _described(schema: Schema) -> list[dict[str, str]]:
    return [{"revision": revision, "what": what} for revision, what in schema.missing]


def _print(before: Schema, after: Schema) -> None:
    word = "missing" if after is before else "applied"
    for revision, what in before.missing:
        click.echo(f"{word}  {revision}  {what}")
    if after.missing:
        state = "doesn't exist yet" if after.revision is None else f"is at revision {after.revision}"
        click.echo(f"redpoll: {after.database} {state}; {len(after.missing)} migrations are missing", err=True)
    else:
        click.echo(f"{after.database} is up to date (revision {after.revision})")
