"""The records as the control plane works with them: in memory to read, through the store to change.

The one place that writes records, so a version is raised with every change and nobody hears of changes out of
order. Knows nothing of Redis: `on_change` carries the news there. Tokens are a part of their own: tokens.py.
"""

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Final

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.control.record_checks import RecordError, check_name, check_roster, check_rules, check_size
from redpoll.control.tokens import TokenRecords
from redpoll.protocol.apps import App, HistoryRule, Key, Value, with_eras
from redpoll.settings import Settings
from redpoll.store import apps as app_rows
from redpoll.store import daily
from redpoll.store import tokens as token_rows
from redpoll.store.store import Store, directory_version, raise_directory_version

__all__ = ["HooksChange", "RecordError", "Records"]

_FIRST_APP_NAME: Final = "first app"
# What has a meaning in PUSHER_URL (`:` `/` `@`) or in a signature's `KEY:HEX` can't be in a key.
_KEY = re.compile(r"[A-Za-z0-9_-]{1,128}").fullmatch
# Somebody who changes keys every week must not come to the end of the record.
_KEEP_DISABLED_KEYS: Final = 10

_KEEP_DAYS: Final = 31


class HooksChange:
    """An open transaction, and the letters of the app's `hooks` as they are to be at its end."""

    def __init__(self, connection: AsyncConnection, hooks: str) -> None:
        self.connection = connection
        self.hooks = hooks


class Records(TokenRecords):
    """Every app, by id and by key, every token by the hash of its plain form, and the version of the apps.

    `max_owed_bytes` is the setting of that name: half of it must hold the roster of a full presence channel.
    `on_change(app_id, app or None where it is gone, version)` is awaited after each commit, one at a time, in
    order. It must not raise: the change is made already, and who can't be told now reads everything later.
    """

    def __init__(
        self,
        store: Store,
        *,
        max_owed_bytes: int = Settings().max_owed_bytes,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(store, clock, asyncio.Lock())
        self.by_key: dict[str, App] = {}
        self.version = 0
        self.on_change: Callable[[str, App | None, int], Awaitable[None]] | None = None
        self._max_roster_bytes = max_owed_bytes // 2

    async def load(self) -> None:
        """Reads everything; call it once before anything else."""
        async with self._store.reading() as connection:
            self.apps.update(await app_rows.every(connection))
            self.tokens.update(await token_rows.every(connection))
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
        check_name("an app's", name)
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
                app = await self._read(connection, app_id)
            await self._changed(app, version)
            return app

    async def _read(self, connection: AsyncConnection, app_id: str) -> App:
        """An app as the store has it now, with what the store doesn't keep of it."""
        app = await app_rows.one(connection, app_id)
        assert app is not None
        known = self.apps.get(app_id, app)
        return msgspec.structs.replace(app, hooks=known.hooks, console_until=known.console_until)

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

    # -- settings of an app

    async def set_app(self, app_id: str, values: Mapping[str, Value]) -> App:
        """Changes settings of an app, all or none; `values` are what `parse_setting` made. Raises RecordError."""
        return await self._replace(app_id, lambda app: msgspec.structs.replace(app, **values))

    async def rename_app(self, app_id: str, name: str) -> App:
        """Raises RecordError."""
        check_name("an app's", name)
        return await self._replace(app_id, lambda app: msgspec.structs.replace(app, name=name))

    async def _replace(self, app_id: str, changed: Callable[[App], App]) -> App:
        """Makes of an app what `changed` says, which may raise RecordError; writes nothing where it is the same."""
        async with self._changing:
            before = self._app(app_id)
            app = changed(before)
            if app == before:
                return app
            check_roster(app, self._max_roster_bytes)
            check_size(app)
            async with self._store.change() as connection:
                await app_rows.update(connection, app)
                version = await raise_directory_version(connection)
            await self._changed(app, version)
            return app

    # -- rules of history

    async def add_history_rule(self, app_id: str, rule: HistoryRule) -> HistoryRule:
        """One more rule; returned with the id that it is given, whatever stands there. Raises RecordError."""

        def added(app: App) -> App:
            nonlocal rule
            taken = {each.id for each in app.history}
            while (rule_id := secrets.token_hex(3)) in taken:
                pass
            rule = msgspec.structs.replace(rule, id=rule_id)
            check_rules(app_id, (*app.history, rule))
            return _with_rules(app, (*app.history, rule))

        return (await self._replace(app_id, added)).history[-1]

    async def remove_history_rule(self, app_id: str, rule_id: str) -> HistoryRule:
        """Takes a rule away; what was kept by it stays until its time is over. Raises RecordError."""
        removed: list[HistoryRule] = []

        def without(app: App) -> App:
            removed.extend(rule for rule in app.history if rule.id == rule_id)
            if not removed:
                raise RecordError(f"app {app_id} has no history rule with the id {rule_id}")
            return _with_rules(app, [rule for rule in app.history if rule.id != rule_id])

        await self._replace(app_id, without)
        return removed[0]

    # -- what others know of an app

    def set_hooks(self, hooks: Mapping[str, str]) -> None:
        """At the start, behind `load`: the letters (`App.hooks`) by app, as the endpoints in the store say. The
        version stays: it was raised when they changed."""
        for app_id, letters in hooks.items():
            if app_id in self.apps:
                self._put(msgspec.structs.replace(self.apps[app_id], hooks=letters))

    @asynccontextmanager
    async def change_hooks(self, app_id: str) -> AsyncIterator[HooksChange]:
        """A transaction in which webhook endpoints of an app are changed; set `hooks` of what is given. The change of
        the endpoints and of what workers hear of them are one. Raises RecordError."""
        async with self._changing:
            app = self._app(app_id)
            version = None
            async with self._store.change() as connection:
                change = HooksChange(connection, app.hooks)
                yield change
                if change.hooks != app.hooks:
                    version = await raise_directory_version(connection)
            if version is not None:
                await self._changed(msgspec.structs.replace(app, hooks=change.hooks), version)

    async def watch_console(self, app_id: str, until: float) -> Key:
        """Has the workers fill the console of an app until this Unix time. Returns the key that opens it, made when
        it is first asked for. Raises RecordError."""

        def watched(app: App) -> App:
            key = app.console_key or Key(key=secrets.token_hex(10), secret=secrets.token_hex(20))
            return msgspec.structs.replace(app, console_key=key, console_until=until)

        key = (await self._replace(app_id, watched)).console_key
        assert key is not None
        return key

    # -- keys of an app

    async def add_key(self, app_id: str, key: str | None = None) -> Key:
        """One more key beside those that the app has; 20 hex digits where none is given. Raises RecordError.

        A disabled key of the app is enabled again, with the secret it had: the way back from a rotation. Of those
        that stay disabled, the youngest ten are kept.
        """
        if key is not None and not _KEY(key):
            raise RecordError("a key holds letters, digits, `-` and `_` only, at most 128")
        async with self._changing:
            app = self._app(app_id)
            held = _key_of(app, key) if key is not None else None
            if held is not None and held.enabled:
                raise RecordError(f"app {app_id} has the key {key} already")
            if held is None and key in self.by_key:
                raise RecordError(f"key {key} belongs to app {self.by_key[key].id}")
            made = Key(key=key or secrets.token_hex(10), secret=held.secret if held else secrets.token_hex(20))
            if held is None:
                check_size(msgspec.structs.replace(app, keys=(*app.keys, made)))
            disabled = [each.key for each in app.keys if not each.enabled and each is not held]
            async with self._store.change() as connection:
                await app_rows.remove_keys(connection, disabled[:-_KEEP_DISABLED_KEYS])
                if held is None:
                    await app_rows.add_key(connection, app_id, made, given=False)
                else:
                    await app_rows.enable_key(connection, made.key, True)
                version = await raise_directory_version(connection)
                changed = await self._read(connection, app_id)
            await self._changed(changed, version)
            return made

    async def disable_key(self, app_id: str, key: str) -> Key:
        """From now on the key opens and signs nothing new; sockets that it opened stay. Raises RecordError.

        The last enabled key stays: an app that nobody can reach is one that is switched off, and says so.
        """
        async with self._changing:
            app = self._app(app_id)
            held = _key_of(app, key)
            if held is None:
                raise RecordError(f"app {app_id} has no key {key}")
            if not held.enabled:
                return held
            if not any(each.enabled for each in app.keys if each is not held):
                raise RecordError(
                    f"{key} is the last enabled key of app {app_id}: add another one first "
                    f"(redpoll key add {app_id}), or switch the app off (redpoll app set {app_id} enabled=false)"
                )
            async with self._store.change() as connection:
                await app_rows.enable_key(connection, key, False)
                version = await raise_directory_version(connection)
                changed = await self._read(connection, app_id)
            await self._changed(changed, version)
            return msgspec.structs.replace(held, enabled=False)

    # -- daily counters

    async def daily_used(self, day: str) -> dict[str, int]:
        """What each app had used on `day` (YYYYMMDD, UTC) by the copy kept here."""
        async with self._store.reading() as connection:
            return await daily.read(connection, day)

    async def save_daily(self, day: str, used: Mapping[str, int]) -> None:
        """Keeps counters of `day`, the greater of each and what stands there. Raises SQLAlchemyError."""
        oldest = (datetime.strptime(day, "%Y%m%d") - timedelta(days=_KEEP_DAYS)).strftime("%Y%m%d")
        async with self._changing, self._store.change() as connection:
            await daily.put(connection, day, {app: count for app, count in used.items() if app in self.apps})
            await daily.forget_before(connection, oldest)

    async def _changed(self, app: App, version: int) -> None:
        self._put(app)
        self.version = version
        if self.on_change is not None:
            await self.on_change(app.id, app, version)

    def _put(self, app: App) -> None:
        before = self.apps.get(app.id)
        for key in before.keys if before is not None else ():
            del self.by_key[key.key]
        self.apps[app.id] = app
        self.by_key.update({key.key: app for key in app.keys})


def _with_rules(app: App, rules: Sequence[HistoryRule]) -> App:
    return msgspec.structs.replace(app, history=with_eras(app.history, rules, secrets.token_hex(4)))


def _key_of(app: App, key: str) -> Key | None:
    return next((each for each in app.keys if each.key == key), None)
