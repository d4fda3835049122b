"""The objects that an operator's command works on: the records and, while a server runs, its connection to Redis.

The commands are defined in commands.py, app_import.py, webhooks.py and users.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from redpoll.cluster.history import History
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.cluster.survey import Survey
from redpoll.config.settings import Settings
from redpoll.control.nodes.nodes import NodeList
from redpoll.control.observe.health import Health
from redpoll.control.records.grants import Grants
from redpoll.control.records.records import Records
from redpoll.control.records.spreading import Spreading
from redpoll.ipc.command_socket import CommandError
from redpoll.store.audit import COMMAND_LINE
from redpoll.store.store import Store

if TYPE_CHECKING:
    from redpoll.control.observe.cluster_usage import ClusterUsage
    from redpoll.control.webhooks.webhooks import Webhooks

__all__ = ["Cluster", "Context"]

log = structlog.get_logger(__name__)


class Cluster(NamedTuple):
    """A running server: its access to Redis, its health, and the nodes of its cluster. `survey` asks all workers."""

    link: Link
    keys: Keys
    history: History
    nodes: NodeList
    health: Health
    survey: Survey
    grants: Grants
    spreading: Spreading


class Context:
    """`store` is open and `records` are loaded. If no server runs, the command has opened the store itself, and
    `cluster`, `usage`, `reload` and `restore` are None; the next server then sends the waiting deliveries of
    `webhooks`."""

    def __init__(
        self,
        store: Store,
        records: Records,
        settings: Settings,
        webhooks: Webhooks | None = None,
        cluster: Cluster | None = None,
        usage: ClusterUsage | None = None,
        reload: Callable[[], Awaitable[dict[str, Any]]] | None = None,
        restore: Callable[[Path], None] | None = None,
    ) -> None:
        self.store = store
        self.records = records
        self.settings = settings
        self.webhooks = webhooks
        self.cluster = cluster
        self.usage = usage
        self.reload = reload
        self.restore = restore

    def running(self, what: str) -> Cluster:
        """The cluster. Raises CommandError if no server runs; `what` is the subject of its sentence."""
        if self.cluster is None:
            raise CommandError(
                f"{what} needs a running server, and none runs on this data folder: --data-dir names another"
            )
        return self.cluster

    async def note(self, action: str, app_id: str = "", target: str = "", detail: str = "") -> None:
        """Adds an entry to the audit log about something that changes no record, and is done already."""
        await self.store.note_done(COMMAND_LINE, action, app_id, target, detail)
