"""The control process: opens the record store, runs the control plane, and closes the store after it.

WebSocket traffic continues while it restarts.
"""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog
import uvloop
from sqlalchemy.exc import SQLAlchemyError

from redpoll.config import data_files
from redpoll.config.certificate import PairError
from redpoll.config.settings import Settings
from redpoll.control.accounts.accounts import Accounts
from redpoll.control.commands import commands
from redpoll.control.commands.context import Context
from redpoll.control.nodes.leadership import introduce
from redpoll.control.plane import ControlPlane
from redpoll.control.records.records import RecordError, Records
from redpoll.control.webhooks.webhooks import Webhooks
from redpoll.ipc.child_pipe import ChildPipe
from redpoll.ipc.command_socket import socket_path
from redpoll.ipc.messages import (
    TO_CONTROL,
    AdminCreated,
    AppCreated,
    DirectoryVersion,
    Fatal,
    Ready,
    Start,
    Stop,
    ToControl,
)
from redpoll.store.charts import Charts
from redpoll.store.errors import StoreError, StoreUnavailable, reason_of
from redpoll.store.eventlog import EventLog
from redpoll.store.sqlite import restoring
from redpoll.store.store import Store, database_url
from redpoll.text import logs

__all__ = ["main"]

log = structlog.get_logger(__name__)

# While PostgreSQL is away at the start: the pause between two attempts, and how often the log says so.
_CONNECT_AGAIN_AFTER_S: Final = 0.5
_LOG_WAITING_EVERY_S: Final = 10.0


class _Inbox:
    """Messages of the supervisor that arrive before the control plane exists. It answers pings from the start on,
    because the record store may be away for long."""

    def __init__(self) -> None:
        self._messages: list[ToControl] = []
        self._receive: Callable[[ToControl], None] | None = None

    def __call__(self, message: ToControl) -> None:
        if self._receive is not None:
            self._receive(message)
        elif isinstance(message, Stop):
            # The server stops before it has started, and there is nothing to close.
            os._exit(0)
        else:
            self._messages.append(message)

    def pass_to(self, receive: Callable[[ToControl], None]) -> None:
        self._receive = receive
        for message in self._messages:
            receive(message)


async def _open_store(url: str) -> Store:
    """Opens the record store, and waits while PostgreSQL is away. Raises StoreError."""
    clock = asyncio.get_running_loop().time
    log_at = waiting_since = clock()
    while True:
        try:
            store = await Store.open(url)
        except StoreUnavailable as error:
            if clock() >= log_at:
                log.warning("record store not available, the start waits for it", reason=str(error))
                log_at = clock() + _LOG_WAITING_EVERY_S
            await asyncio.sleep(_CONNECT_AGAIN_AFTER_S)
        else:
            if log_at > waiting_since:
                log.info("record store available", waited_s=round(clock() - waiting_since, 1))
            return store


def _note_place(start: Start, database: str) -> None:
    """Has later commands without `database_url` leave the SQLite file alone."""
    if not start.settings.database_url:
        return
    try:
        data_files.note_postgres(Path(start.data_dir), database)
    except OSError as error:
        log.warning("not noted that the records are in PostgreSQL", reason=error.strerror, data_dir=start.data_dir)


async def _serve(start: Start, child_pipe: ChildPipe) -> None:
    inbox = _Inbox()
    # At end of file the supervisor is dead. All durable data is committed, so the process can exit at once.
    child_pipe.attach(asyncio.get_running_loop(), TO_CONTROL, inbox, lambda: os._exit(1))
    store = await _open_store(database_url(start.data_dir, start.settings.database_url))
    _note_place(start, store.name)
    event_log = await _open_event_log(start)
    charts = await _open_charts(start)
    try:
        records = Records(store, max_unsent_bytes=start.settings.max_unsent_bytes)
        await records.load()
        webhooks = Webhooks(store, records, start.settings)
        await webhooks.load()
        first_app = await records.first_app(start.settings)
        accounts = Accounts(store)
        first_password = await accounts.first_admin(start.settings.admin_password)
        # Redis may have app records of an earlier run. Workers must not admit clients by older ones: after a wrong
        # 4001 a client never reconnects.
        introduction = await introduce(store)
        child_pipe.send(introduction)
        child_pipe.send(DirectoryVersion(records.version))
        plane = ControlPlane(
            start,
            records,
            webhooks,
            socket.socket(fileno=start.listen_fd),
            child_pipe.send,
            shard_key=bytes.fromhex(introduction.shard_key),
            accounts=accounts,
            event_log=event_log,
            charts=charts,
        )
        inbox.pass_to(plane.receive)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, plane.stop)

        def restore(file: Path) -> None:
            os.replace(file, restoring(Path(start.data_dir) / data_files.RECORDS))
            # The supervisor starts the next process, which opens it.
            plane.stop()

        usage, reload = plane.observation.cluster_usage, plane.live_settings.reload
        context = Context(store, records, start.settings, webhooks, plane.cluster, usage, reload, restore)
        async with commands.serve_commands(context, socket_path(start.data_dir)):
            if first_password is not None:
                child_pipe.send(AdminCreated(first_password))
            if first_app is not None:
                child_pipe.send(AppCreated(commands.app_shape(first_app)))
            await _run(plane, child_pipe)
        await plane.finish()
        await records.finish()
    finally:
        await store.close()
        if event_log is not None:
            await event_log.close()
        if charts is not None:
            await charts.close()


async def _run(plane: ControlPlane, child_pipe: ChildPipe) -> None:
    await plane.start()
    child_pipe.send(Ready())
    # These objects live as long as the process. Otherwise each full collection would walk all of SQLAlchemy.
    gc.freeze()
    await plane.finished.wait()


def _warn_of_exposure(settings: Settings) -> None:
    control_host = settings.control_host
    try:
        private = ipaddress.ip_address(control_host).is_loopback
    except ValueError:
        private = control_host == "localhost"
    # With `tls_client_ca` the port has TLS, and takes clients with a certificate only.
    if not private and not settings.tls_client_ca:
        log.warning(
            "control port open to a network",
            control_host=control_host,
            what="dashboard passwords cross the network unencrypted and anyone can read /metrics; bind the port to "
            "127.0.0.1, set tls_client_ca, or put a TLS proxy in front of it",
        )


async def _open_event_log(start: Start) -> EventLog | None:
    settings = start.settings
    if not settings.event_log_calls:
        return None
    path = Path(start.data_dir) / "events.sqlite"
    try:
        return await EventLog.open(path, settings.event_log_calls, settings.event_log_keep_s)
    except (OSError, SQLAlchemyError) as error:
        raise StoreError(f"the event log {path} can't be opened: {error}") from error


async def _open_charts(start: Start) -> Charts | None:
    path = Path(start.data_dir) / "charts.sqlite"
    try:
        return await Charts.open(path)
    except (OSError, SQLAlchemyError) as error:
        log.warning("chart data and usage not kept", file=str(path), reason=reason_of(error))
        return None


def main(child_pipe: ChildPipe) -> None:
    """Run the process. Returns after a clean shutdown; if the records can't be used, logs why and exits with 1."""
    start = child_pipe.read_start()
    logs.configure(start.settings, "control")
    _warn_of_exposure(start.settings)
    try:
        uvloop.run(_serve(start, child_pipe))
    except (StoreError, RecordError, PairError) as error:
        log.error("control can't start", reason=str(error))
        child_pipe.send(Fatal(str(error)))
        raise SystemExit(1) from None
