"""The records as the control plane works with them: in memory to read, through the store to change.

The one place that writes records, so a version is raised with every change and nobody hears of changes out of
order. Knows nothing of Redis: `on_change` carries the news there.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.config import Settings
from redpoll.protocol.apps import App, Key
from redpoll.store import apps as app_rows
from redpoll.store.store import Store, directory_version, raise_directory_version

__all__ = ["RecordError", "Records"]

_FIRST_APP_NAME = "first app"


class RecordError(Exception):
    """A change that can't be made. The text is a sentence for whoever asked for it."""


class Records:
    """Every app, by id and by key, and the version of the whole.

    `on_change(app_id, app or None where it is gone, version)` is awaited after each commit, one at a time, in
    order. It must not raise: the change is made already, and who can't be told now reads everything later.
    """

    def __init__(self, store: Store) -> None:
        self.apps: dict[str, App] = {}
        self.by_key: dict[str, App] = {}
        self.version = 0
        self.on_change: Callable[[str, App | None, int], Awaitable[None]] | None = None
        self._store = store
        self._changing = asyncio.Lock()

    async def load(self) -> None:
        """Reads everything; call it once before anything else."""
        async with self._store.reading() as connection:
            self.apps.update(await app_rows.every(connection))
            self.version = await directory_version(connection)
        self.by_key.update({key.key: app for app in self.apps.values() for key in app.keys})

    async def first_app(self, settings: Settings) -> App | None:
        """What a start does: brings the app of the settings up to date, or fills an empty store with one.

        Returns the app that was made up, for the operator to be told of; None where there was nothing to make
        up. Raises RecordError where the settings' key is another app's.
        """
        if settings.app_id:
            await self.upsert_app(settings.app_id, settings.app_key, settings.app_secret)
            return None
        if self.apps:
            return None
        return await self.create_app(_FIRST_APP_NAME)

    async def create_app(self, name: str) -> App:
        """A new app with a fresh id (7 digits), key (20 hex digits) and secret (40). Raises RecordError."""
        if not name.strip() or len(name) > 200 or not name.isprintable():
            raise RecordError("an app's name is 1 to 200 printable characters")
        async with self._changing:
            app_id = str(secrets.randbelow(9_000_000) + 1_000_000)
            while app_id in self.apps:
                app_id = str(secrets.randbelow(9_000_000) + 1_000_000)
            app = App(id=app_id, name=name, keys=(Key(key=secrets.token_hex(10), secret=secrets.token_hex(20)),))
            async with self._store.change() as connection:
                await app_rows.add(connection, app)
                version = await raise_directory_version(connection)
            await self._changed(app, version)
            return app

    async def upsert_app(self, app_id: str, key: str, secret: str) -> App:
        """Makes sure that this app has this key with this secret; nothing is written where it has.

        A key that came this way before and is another now is removed; keys made by command stay.
        Raises RecordError where the key is another app's.
        """
        async with self._changing:
            owner = self.by_key.get(key)
            if owner is not None and owner.id != app_id:
                raise RecordError(f"key {key} belongs to app {owner.id} and can't be given to app {app_id}")
            async with self._store.change() as connection:
                if not await self._write_given(connection, app_id, Key(key=key, secret=secret)):
                    return self.apps[app_id]
                version = await raise_directory_version(connection)
                app = await app_rows.one(connection, app_id)
            assert app is not None
            await self._changed(app, version)
            return app

    async def _write_given(self, connection: AsyncConnection, app_id: str, key: Key) -> bool:
        """The steps of `upsert_app` inside its transaction. Says whether anything was written."""
        known = self.apps.get(app_id)
        if known is None:
            await app_rows.add(connection, App(id=app_id, name=f"app {app_id}", keys=(key,)), given=True)
            return True
        removed = await app_rows.remove_given_keys(connection, app_id, but=key.key)
        held = next((each for each in known.keys if each.key == key.key), None)
        if held is None:
            await app_rows.add_key(connection, app_id, key, given=True)
        elif held != msgspec.structs.replace(held, secret=key.secret):
            await app_rows.set_secret(connection, key.key, key.secret)
        else:
            return removed > 0
        return True

    async def _changed(self, app: App, version: int) -> None:
        before = self.apps.get(app.id)
        for key in before.keys if before is not None else ():
            del self.by_key[key.key]
        self.apps[app.id] = app
        self.by_key.update({key.key: app for key in app.keys})
        self.version = version
        if self.on_change is not None:
            await self.on_change(app.id, app, version)
