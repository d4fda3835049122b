"""The records that a control plane has in memory, and how they follow the record store.

Other control planes may share the store. Their changes are the rows with a greater version than ours; if the store
lost changes that we had read, all records are read again (store/README.md "Changes"). records.py makes changes.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import msgspec
import structlog
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.cluster.directory import DirectoryVersion
from redpoll.control.records.tokens import TokenRecords
from redpoll.protocol.apps import App
from redpoll.store import apps as app_rows
from redpoll.store import tokens as token_rows
from redpoll.store import webhooks as endpoint_rows
from redpoll.store.store import Store, Versions, has_version, versions
from redpoll.store.webhooks import Endpoint

__all__ = ["LoadedRecords"]

log = structlog.get_logger(__name__)


class LoadedRecords(TokenRecords):
    """Apps by id and by key, tokens by hash.

    `directory` is the version that the app directory in Redis should have. `on_change(app_id, app, before, after)` is
    awaited after each commit of this process, in order, with that version before and after; `app` is None after a
    deletion. It must not raise, because the change is committed already.
    """

    def __init__(self, store: Store, clock: Callable[[], float], changing: asyncio.Lock) -> None:
        super().__init__(store, clock, changing)
        self.by_key: dict[str, App] = {}
        self.directory = DirectoryVersion(0)
        # Takes the webhook endpoints that other control planes changed, or all of them (True).
        self.on_endpoints: Callable[[Mapping[str, Endpoint], bool], None] | None = None
        self.on_change: Callable[[str, App | None, DirectoryVersion, DirectoryVersion], Awaitable[None]] | None = None
        # Takes each app that was created or changed, by another control plane too.
        self.on_put: Callable[[str, App], None] | None = None
        # Takes the directory's version after the store lost changes, because it may be lower than before.
        self.on_rewound: Callable[[int], None] | None = None

    @property
    def version(self) -> int:
        """The number of the directory's version."""
        return self.directory.number

    async def load(self) -> None:
        """Reads all records. Call it once, before anything else."""
        async with self._store.reading() as connection:
            self.apps.update(await app_rows.all_by_id(connection))
            self.tokens.update(await token_rows.all_by_hash(connection))
            self._set_versions(await versions(connection))
        self.by_key.update({key.key: app for app in self.apps.values() for key in app.keys})

    async def sync(self) -> bool:
        """Takes what other control planes have changed. Returns whether there was anything. Raises SQLAlchemyError."""
        if not self._store.shared:
            return False
        async with self._changing, self._store.reading() as connection:
            return await self._catch_up(connection)

    def take_directory(self, version: DirectoryVersion, apps: Mapping[str, App]) -> None:
        """Takes newer app records from Redis, while the store doesn't answer. Everything is read from the store later,
        which may have lost them in a fail-over."""
        for app in apps.values():
            if app != self.apps.get(app.id):
                self._put(app)
        self.directory = version
        self._has_more = True

    async def _catch_up(self, connection: AsyncConnection) -> bool:
        stored = await versions(connection)
        if stored == self.known and not self._has_more:
            return False
        # An earlier redpoll stores no ids, so all is read after its changes.
        follows = not self._has_more and await has_version(connection, self.known)
        since = self.known.records if follows else None
        apps = await app_rows.all_by_id(connection, since)
        tokens = await token_rows.all_by_hash(connection, since)
        endpoints = await endpoint_rows.all_by_id(connection, since)
        is_older = stored.directory < self.version
        # All at once: readers of memory see one state.
        if since is None:
            for app_id in self.apps.keys() - apps.keys():
                self._remove(app_id)
            for token_hash in self.tokens.keys() - tokens.keys():
                del self.tokens[token_hash]
        for app in apps.values():
            known = self.apps.get(app.id, app)
            self._put(msgspec.structs.replace(app, hooks=known.hooks))
        revoked = [token.hash for token in tokens.values() if self._take_token(token)]
        if self.on_endpoints is not None:
            self.on_endpoints(endpoints, since is None)
        self._set_versions(stored)
        self._has_more = False
        if revoked:
            self.on_revoked(revoked)
        if since is None:
            log.warning("the record store was away or has lost changes: all records read", version=self.version)
        if is_older and self.on_rewound is not None:
            self.on_rewound(self.version)
        return True

    def _set_versions(self, stored: Versions) -> None:
        self.known = stored
        self.directory = DirectoryVersion(stored.directory, stored.directory_id)

    async def _changed(self, app: App, stored: Versions) -> None:
        before = self.directory
        self._put(app)
        self._set_versions(stored)
        if self.on_change is not None:
            await self.on_change(app.id, app, before, self.directory)

    def _put(self, app: App) -> None:
        before = self.apps.get(app.id)
        for key in before.keys if before is not None else ():
            del self.by_key[key.key]
        self.apps[app.id] = app
        self.by_key.update({key.key: app for key in app.keys})
        if self.on_put is not None:
            self.on_put(app.id, app)

    def _remove(self, app_id: str) -> None:
        for key in self.apps.pop(app_id).keys:
            del self.by_key[key.key]
