"""What a command of the operator works on: the records, and what there is beside them only while a server runs.

Which commands there are: commands.py, webhooks/commands.py, dashboard/commands.py. How they get here: commands.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from redpoll.cluster.history import History
from redpoll.cluster.keys import Keys
from redpoll.cluster.link import Link
from redpoll.control.records import Records
from redpoll.settings import Settings
from redpoll.store.store import Store

if TYPE_CHECKING:
    from redpoll.control.webhooks.webhooks import Webhooks

__all__ = ["Cluster", "CommandError", "Context"]


class CommandError(Exception):
    """The command could not be carried out. The text is a sentence for the operator."""


class Cluster(NamedTuple):
    """What a running server has of Redis."""

    link: Link
    keys: Keys
    history: History


class Context:
    """`store` is open and `records` are loaded. `cluster` is None where no server runs, and the command has opened
    the store itself; what waits in `webhooks` to be sent is sent by the next server then."""

    def __init__(
        self,
        store: Store,
        records: Records,
        settings: Settings,
        webhooks: Webhooks | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        self.store = store
        self.records = records
        self.settings = settings
        self.webhooks = webhooks
        self.cluster = cluster

    def running(self, what: str) -> Cluster:
        """The cluster. Raises CommandError where no server runs: `what` says what needs one, as the sentence's
        subject."""
        if self.cluster is None:
            raise CommandError(f"{what} needs a running server, and none runs on this data folder")
        return self.cluster
