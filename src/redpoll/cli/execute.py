"""Executes a command on the records: in the server that owns the data folder, or here if no server runs.

In a folder of another user, root acts as that user (datafolder.as_owner).
"""

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

import click

from redpoll.cli.common import fail, need_engine, refuse
from redpoll.config import config, data_files

__all__ = ["ALL_APPS_WITHIN_S", "ask_server", "import_store", "refuse_unused_store", "run"]

# For commands on all apps. Ten thousand apps take seconds in one transaction. With a transaction for each, a slow disk
# takes minutes.
ALL_APPS_WITHIN_S: Final = 600.0
# A server that is just starting owns the folder but takes no commands yet. So does another command, briefly.
_WAIT_FOR_SERVER_S = 10.0
_SETTING = "database_url (REDPOLL_DATABASE_URL)"
_NO_SOCKET_YET = (FileNotFoundError, ConnectionRefusedError)
_STORE_MODULES = (
    "alembic.command",
    "encodings.idna",
    "redpoll.control.commands.commands",
    "redpoll.control.webhooks.webhooks",
    "redpoll.store.migrating",
    "redpoll.store.store",
    "sqlalchemy.dialects.sqlite.aiosqlite",
)


def run(settings: config.Settings, verb: str, args: dict[str, Any], *, timeout_s: float = 30.0) -> Any:
    """Runs a command here if the data folder is free, else in the server that owns it, which must answer within
    `timeout_s`. Exits with 1 on failure."""
    need_engine("the server's data folder (without --url)")
    from redpoll.host import datafolder
    from redpoll.ipc import command_socket

    folder = Path(settings.data_dir).resolve()
    deadline = time.monotonic() + _WAIT_FOR_SERVER_S
    while True:
        try:
            with datafolder.lock(folder, verb, wait_s=0):
                if datafolder.foreign_owner(folder) is not None:
                    import_store()
                with datafolder.as_owner(folder):
                    if not settings.database_url:
                        refuse_unused_store(folder)
                    # A third of what a command takes that a server executes.
                    import asyncio

                    return asyncio.run(_run_here(settings, folder, verb, args))
        except datafolder.DataFolderError as error:
            obstacle = error
        except command_socket.CommandError as error:
            fail(error)
        try:
            return ask_server(settings, verb, args, timeout_s)
        except OSError as error:
            # A folder that can't be locked may have a server nevertheless: it may be mounted read-only here.
            if not isinstance(obstacle, datafolder.DataFolderInUse) or not isinstance(error, _NO_SOCKET_YET):
                fail(obstacle)
            if time.monotonic() > deadline:
                fail(f"{obstacle}, which does not answer commands: {error}")
            time.sleep(0.05)
        except (datafolder.DataFolderError, command_socket.CommandError) as error:
            fail(error)


def ask_server(settings: config.Settings, verb: str, args: dict[str, Any], timeout_s: float) -> Any:
    """Has the server that owns the data folder run the command. Unlike `run`, this leaves a folder alone that has none:
    its server may be about to start. Raises OSError, CommandError, DataFolderError."""
    from redpoll.host import datafolder
    from redpoll.ipc import command_socket

    folder = Path(settings.data_dir).resolve()
    with datafolder.as_owner(folder):
        return command_socket.ask(command_socket.socket_path(folder), verb, args, timeout_s)


def refuse_unused_store(folder: Path, remedy: str = f"set {_SETTING} as for the server") -> None:
    """For commands without `database_url`: exits with 2 if the folder's server has its records in PostgreSQL."""
    from redpoll.host import datafolder

    try:
        with datafolder.as_owner(folder):
            database = data_files.noted_postgres(folder)
    except datafolder.DataFolderError as error:
        fail(error)
    if database is not None:
        refuse(
            [
                f"the records of {folder} are in {database}: {remedy}, "
                f"or delete {folder / data_files.MARKER} if they are in {data_files.RECORDS} again"
            ]
        )


def import_store() -> None:
    """Imports what the record store needs, before root acts as somebody who may not be able to read the
    installation."""
    for name in _STORE_MODULES:
        importlib.import_module(name)


async def _run_here(settings: config.Settings, folder: Path, verb: str, args: dict[str, Any]) -> Any:
    import structlog

    from redpoll.control.commands import commands
    from redpoll.control.commands.context import Context
    from redpoll.control.records.records import Records
    from redpoll.control.webhooks.webhooks import Webhooks
    from redpoll.ipc.command_socket import CommandError
    from redpoll.store.errors import StoreError, StoreUnavailable
    from redpoll.store.store import Store, database_url

    # Stdout has the answer only.
    if not structlog.is_configured():
        structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))
    # The store contains secrets.
    os.umask(0o077)
    is_new = not settings.database_url and not (folder / data_files.RECORDS).exists()
    try:
        store = await Store.open(database_url(folder, settings.database_url))
    except (StoreError, StoreUnavailable) as error:
        raise CommandError(str(error)) from error
    if is_new:
        # The folder is often not the one that was meant, and the command itself succeeds.
        click.echo(f"no server has used the data folder {folder}; --data-dir names another", err=True)
    try:
        records = Records(store, max_unsent_bytes=settings.max_unsent_bytes)
        await records.load()
        webhooks = Webhooks(store, records, settings)
        await webhooks.load()
        try:
            return await commands.run(Context(store, records, settings, webhooks), verb, args)
        finally:
            await webhooks.finish()
    finally:
        await store.close()
