"""`redpoll migrate`: shows or runs the migrations of the record store, which `serve` otherwise runs at its start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from redpoll.cli.common import fail, print_json
from redpoll.cli.execute import import_store
from redpoll.cli.records_command import records_command
from redpoll.config import config

if TYPE_CHECKING:
    from redpoll.store.migrating import Schema

__all__ = ["migrate"]


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
    except datafolder.DataFolderError as error:
        fail(f"{error}; stop the server first, or restart it: it migrates at its start")
    except (StoreError, StoreUnavailable) as error:
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
