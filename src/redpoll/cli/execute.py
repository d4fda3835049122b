"""Executes a command on the records: in the server that owns the data folder, or here if no server runs."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from redpoll import config
from redpoll.cli.common import fail

__all__ = ["run"]

# A server that is just starting owns the folder but takes no commands yet. So does another command, briefly.
_WAIT_FOR_SERVER_S = 10.0


def run(settings: config.Settings, verb: str, args: dict[str, Any]) -> Any:
    """Runs a command here if the data folder is free, else in the server that owns it. Exits with 1 on failure."""
    from redpoll import command_socket, datafolder

    folder = Path(settings.data_dir).resolve()
    deadline = time.monotonic() + _WAIT_FOR_SERVER_S
    while True:
        try:
            with datafolder.lock(folder, verb, wait_s=0):
                return asyncio.run(_run_here(settings, folder, verb, args))
        except datafolder.DataFolderError as error:
            in_use = error
        except command_socket.CommandError as error:
            fail(error)
        try:
            return command_socket.ask(command_socket.socket_path(folder), verb, args)
        except NotADirectoryError:
            fail(in_use)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            if time.monotonic() > deadline:
                fail(f"{in_use}, which does not answer commands: {error}")
            time.sleep(0.05)
        except command_socket.CommandError as error:
            fail(error)


async def _run_here(settings: config.Settings, folder: Path, verb: str, args: dict[str, Any]) -> Any:
    from redpoll.command_socket import CommandError
    from redpoll.control import commands
    from redpoll.control.context import Context
    from redpoll.control.records import Records
    from redpoll.control.webhooks.webhooks import Webhooks
    from redpoll.store.errors import StoreError, StoreUnavailable
    from redpoll.store.store import Store, database_url

    # The store contains secrets.
    os.umask(0o077)
    try:
        store = await Store.open(database_url(folder, settings.database_url))
    except (StoreError, StoreUnavailable) as error:
        raise CommandError(str(error)) from error
    try:
        records = Records(store, max_owed_bytes=settings.max_owed_bytes)
        await records.load()
        webhooks = Webhooks(store, records, settings)
        await webhooks.load()
        try:
            return await commands.run(Context(store, records, settings, webhooks), verb, args)
        finally:
            await webhooks.finish()
    finally:
        await store.close()
