"""The app records: apps, keys, history rules and settings, in memory for reading, changed through the record store.

All changes are made here, one at a time, each in an `edit` (loaded_records.py). That writes the change, the directory's
version and the row of the audit log in one transaction, and calls `on_change` after the commit, so workers see all
changes in order. `by` is who made the change; None for the server itself. tokens.py has the part about tokens.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.config.app_names import (
    APP_ID_RULE,
    APP_KEY_RULE,
    APP_SECRET_RULE,
    valid_app_id,
    valid_app_key,
    valid_app_secret,
)
from redpoll.config.settings import Settings
from redpoll.control.records.checks import (
    RecordConflict,
    RecordError,
    check_name,
    check_roster,
    check_rules,
    check_size,
)
from redpoll.control.records.tokens import TokenRecords
from redpoll.protocol.apps import SETTINGS, App, HistoryRule, Key, Value, with_eras
from redpoll.store import apps as app_rows
from redpoll.store import daily
from redpoll.store.audit import Actor
from redpoll.store.store import Store

__all__ = ["RecordConflict", "RecordError", "Records", "newly_made", "rule_pattern", "setting_text"]

_FIRST_APP_NAME: Final = "first app"
# Disabled keys of an app beyond this number are removed, so that regular key rotations don't fill the record.
_KEEP_DISABLED_KEYS: Final = 10

_KEEP_DAYS: Final = 31


class Records(TokenRecords):
    """All apps by id and by key, all tokens by hash, and the directory's version.

    `max_unsent_bytes` is the setting of that name; the roster of a full presence channel must fit into half of it.
    """

    def __init__(
        self,
        store: Store,
        *,
        max_unsent_bytes: int = Settings().max_unsent_bytes,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(store, clock)
        self._max_roster_bytes = max_unsent_bytes // 2

    async def first_app(self, settings: Settings) -> App | None:
        """At the start: creates or updates the app of the settings (`REDPOLL_APP_…`), or adds an app to an empty store.

        Returns the added app, so that it can be printed for the operator; None if none was added. Raises RecordError if
        the key of the settings belongs to another app.
        """
        if settings.app_id:
            await self.upsert_app(settings.app_id, settings.app_key, settings.app_secret)
            return None
        if self.apps:
            return None
        return await self._create_app(_FIRST_APP_NAME, only_first=True)

    async def create_app(self, name: str, *, by: Actor | None = None) -> App:
        """Creates an app with a new id (7 digits), key (20 hex digits) and secret (40). Raises RecordError."""
        check_name("an app's", name)
        app = await self._create_app(name, by=by)
        assert app is not None
        return app

    async def _create_app(self, name: str, *, by: Actor | None = None, only_first: bool = False) -> App | None:
        async with self.edit(by) as edit:
            if only_first and (self.apps or await app_rows.deleted_since(edit.connection, 0)):
                # Another server has started at the same time, or somebody has deleted all apps.
                return None
            app_id = str(secrets.randbelow(9_000_000) + 1_000_000)
            while app_id in self.apps:
                app_id = str(secrets.randbelow(9_000_000) + 1_000_000)
            key = Key(key=secrets.token_hex(10), secret=secrets.token_hex(20))
            app = newly_made(App(id=app_id, name=name, keys=(key,)))
            await app_rows.add(edit.connection, app)
            edit.app = app
            await edit.note("app create", app_id, name)
        return app

    async def upsert_app(self, app_id: str, key: str, secret: str) -> App:
        """Makes sure that this app exists and has this key with this secret.

        A different key that was set this way before is removed; keys that were added by commands stay. Raises
        RecordError if the key belongs to another app.
        """
        async with self.edit(None) as edit:
            owner = self.by_key.get(key)
            if owner is not None and owner.id != app_id:
                raise RecordError(f"key {key} belongs to app {owner.id} and can't be given to app {app_id}")
            if await self._write_given(edit.connection, app_id, Key(key=key, secret=secret)):
                edit.app = await self._read(edit.connection, app_id)
        return self.apps[app_id]

    async def _read(self, connection: AsyncConnection, app_id: str) -> App:
        """The app from the store, with the field that is only in memory."""
        app = await app_rows.find_by_id(connection, app_id)
        assert app is not None
        known = self.apps.get(app_id, app)
        return msgspec.structs.replace(app, hooks=known.hooks)

    async def _write_given(self, connection: AsyncConnection, app_id: str, key: Key) -> bool:
        """The writes of `upsert_app` in its transaction. Returns whether anything was written."""
        known = self.apps.get(app_id)
        if known is None:
            app = newly_made(App(id=app_id, name=f"app {app_id}", keys=(key,)))
            await app_rows.add(connection, app, given=True)
            return True
        removed = await app_rows.remove_given_keys(connection, app_id, except_key=key.key)
        existing = _key_of(known, key.key)
        if existing is None:
            await app_rows.add_key(connection, app_id, key, given=True)
        elif existing != msgspec.structs.replace(existing, secret=key.secret):
            await app_rows.set_secret(connection, key.key, key.secret)
        else:
            return removed > 0
        return True

    def check_import(self, app: App) -> None:
        """Raises RecordError if `import_app` would refuse this app."""
        for valid, what, rule in (
            (valid_app_id(app.id), "an app's id", APP_ID_RULE),
            (all(valid_app_key(key.key) for key in app.keys), "a key", APP_KEY_RULE),
            (all(valid_app_secret(key.secret) for key in app.keys), "a secret", APP_SECRET_RULE),
        ):
            if not valid:
                raise RecordError(f"{what} must have {rule}")
        for key in app.keys:
            owner = self.by_key.get(key.key)
            if owner is not None and owner.id != app.id:
                raise RecordConflict(f"key {key.key} belongs to app {owner.id}")
        check_name("an app's", app.name)
        check_roster(app, self.apps.get(app.id), self._max_roster_bytes)
        check_size(app)

    async def import_app(self, app_id: str, imported: Callable[[App | None], App], *, by: Actor | None = None) -> None:
        """Creates an app, or changes its keys, name and settings. `imported` gets the existing app, None if there is
        none, and returns the app as it will be. Raises RecordError."""
        async with self.edit(by) as edit:
            known = self.apps.get(app_id)
            app = imported(known)
            self.check_import(app)
            if app == known:
                return
            if known is None:
                await app_rows.add(edit.connection, newly_made(app))
            else:
                await app_rows.update(edit.connection, app)
                for key in app.keys:
                    existing = _key_of(known, key.key)
                    if existing is None:
                        await app_rows.add_key(edit.connection, app.id, key, given=False)
                    elif existing != key:
                        await app_rows.set_secret(edit.connection, key.key, key.secret)
                        await app_rows.enable_key(edit.connection, key.key, key.enabled)
            edit.app = await self._read(edit.connection, app.id)
            before = known or App(id=app.id, name=app.name, keys=())
            await edit.note("app import", app.id, app.name, _differences(before, app))

    # -- settings of an app

    async def set_app(
        self, app_id: str, values: Mapping[str, Value], name: str | None = None, *, by: Actor | None = None
    ) -> App:
        """Changes settings of an app, and its name unless that is None: all or nothing. `values` come from
        `parse_setting`. Raises RecordError."""
        if name is not None:
            check_name("an app's", name)

        def changed(app: App) -> _Changed:
            after = msgspec.structs.replace(app, **values, name=app.name if name is None else name)
            renamed = f"was {app.name}" if after.name != app.name else ""
            return _Changed(after, "app set", after.name, ", ".join(filter(None, (renamed, _differences(app, after)))))

        return await self._replace(app_id, changed, by)

    async def rename_app(self, app_id: str, name: str, *, by: Actor | None = None) -> App:
        """Renames an app. Raises RecordError."""
        check_name("an app's", name)

        def renamed(app: App) -> _Changed:
            return _Changed(msgspec.structs.replace(app, name=name), "app rename", name, f"was {app.name}")

        return await self._replace(app_id, renamed, by)

    async def _replace(self, app_id: str, change: Callable[[App], _Changed], by: Actor | None = None) -> App:
        """Replaces an app with `change(app).app`. `change` may raise RecordError. Writes nothing if they are equal."""
        async with self.edit(by) as edit:
            before = self._app(app_id)
            app, action, target, detail = change(before)
            if app != before:
                check_roster(app, before, self._max_roster_bytes)
                check_size(app)
                await app_rows.update(edit.connection, app)
                edit.app = app
                await edit.note(action, app_id, target, detail)
        return app

    # -- rules of history

    async def add_history_rule(self, app_id: str, rule: HistoryRule, *, by: Actor | None = None) -> HistoryRule:
        """Adds a rule. Returns it with a new id; the id of `rule` is ignored. Raises RecordError."""

        def added(app: App) -> _Changed:
            taken = {existing.id for existing in app.history}
            while (rule_id := secrets.token_hex(3)) in taken:
                pass
            rules = (*app.history, msgspec.structs.replace(rule, id=rule_id))
            check_rules(app_id, rules)
            return _Changed(_with_rules(app, rules), "history rule add", rule_pattern(rule), f"keeps {rule.keep}")

        return (await self._replace(app_id, added, by)).history[-1]

    async def remove_history_rule(self, app_id: str, rule_id: str, *, by: Actor | None = None) -> HistoryRule:
        """Removes a rule. Messages that were stored by it stay until they expire. Raises RecordError."""
        removed: list[HistoryRule] = []

        def without(app: App) -> _Changed:
            removed.extend(rule for rule in app.history if rule.id == rule_id)
            if not removed:
                raise RecordError(f"app {app_id} has no history rule with the id {rule_id}")
            rules = [rule for rule in app.history if rule.id != rule_id]
            return _Changed(_with_rules(app, rules), "history rule remove", rule_pattern(removed[0]))

        await self._replace(app_id, without, by)
        return removed[0]

    async def change_history_rule(
        self, app_id: str, rule_id: str, values: Mapping[str, object], *, by: Actor | None = None
    ) -> HistoryRule:
        """Changes fields of a rule, which keeps its id. Raises RecordError."""
        matching: list[HistoryRule] = []

        def changed(app: App) -> _Changed:
            matching.extend(rule for rule in app.history if rule.id == rule_id)
            if not matching:
                raise RecordError(f"app {app_id} has no history rule with the id {rule_id}")
            rules = [msgspec.structs.replace(rule, **values) if rule.id == rule_id else rule for rule in app.history]
            check_rules(app_id, rules)
            return _Changed(_with_rules(app, rules), "history rule change", rule_pattern(matching[0]))

        app = await self._replace(app_id, changed, by)
        return next(rule for rule in app.history if rule.id == rule_id)

    # -- fields of an app that other modules determine

    def set_hooks(self, hooks: Mapping[str, str]) -> None:
        """Sets the hook masks (`App.hooks`) by app id, after endpoints were read or changed.

        The version stays as it is, because it was increased when the endpoints changed.
        """
        for app_id, mask in hooks.items():
            app = self.apps.get(app_id)
            if app is not None and app.hooks != mask:
                self._put(msgspec.structs.replace(app, hooks=mask))

    async def watch_console(self, app_id: str, until: float) -> Key:
        """Makes the workers send an app's events to its console until this Unix time.

        Returns the key for the console's channel, which is created on first use. Raises RecordError.
        """

        def watched(app: App) -> _Changed:
            key = app.console_key or Key(key=secrets.token_hex(10), secret=secrets.token_hex(20))
            return _Changed(msgspec.structs.replace(app, console_key=key, console_until=until))

        key = (await self._replace(app_id, watched)).console_key
        assert key is not None
        return key

    async def debug(self, app_id: str, until: float, socket_id: str, *, by: Actor | None = None) -> App:
        """Makes all processes log what concerns the app, or with `socket_id` one connection, until this Unix time; 0
        ends that. Raises RecordError."""

        def debugged(app: App) -> _Changed:
            after = msgspec.structs.replace(app, debug_until=until, debug_socket=socket_id)
            return _Changed(after, "debug start" if until else "debug stop", app.name, socket_id)

        return await self._replace(app_id, debugged, by)

    # -- keys of an app

    async def add_key(
        self, app_id: str, key: str | None = None, secret: str | None = None, *, by: Actor | None = None
    ) -> Key:
        """Adds a key to an app; by default a new one of 20 hex digits, with a new secret of 40. Raises RecordError.

        A disabled key of the app is enabled again with its old secret, which undoes a rotation. Of the keys that stay
        disabled, the newest ten are kept.
        """
        if key is not None and not valid_app_key(key):
            raise RecordError(f"a key must have {APP_KEY_RULE}")
        if secret is not None and not valid_app_secret(secret):
            raise RecordError(f"a secret must have {APP_SECRET_RULE}")
        async with self.edit(by) as edit:
            app = self._app(app_id)
            existing = _key_of(app, key) if key is not None else None
            if existing is not None and existing.enabled:
                raise RecordConflict(f"app {app_id} already has the key {key}")
            if existing is None and key in self.by_key:
                raise RecordConflict(f"key {key} belongs to app {self.by_key[key].id}")
            if existing is not None:
                secret = existing.secret
            elif secret is None:
                secret = secrets.token_hex(20)
            added = Key(key=key or secrets.token_hex(10), secret=secret)
            if existing is None:
                check_size(msgspec.structs.replace(app, keys=(*app.keys, added)))
            disabled = [other.key for other in app.keys if not other.enabled and other is not existing]
            await app_rows.remove_keys(edit.connection, disabled[:-_KEEP_DISABLED_KEYS])
            if existing is None:
                await app_rows.add_key(edit.connection, app_id, added, given=False)
            else:
                await app_rows.enable_key(edit.connection, added.key, True)
            edit.app = await self._read(edit.connection, app_id)
            await edit.note("key add" if existing is None else "key enable", app_id, added.key)
        return added

    async def enable_key(self, app_id: str, key: str, *, by: Actor | None = None) -> Key:
        """Enables a disabled key again. Raises RecordError."""
        return await self._set_enabled(app_id, key, True, by)

    async def disable_key(self, app_id: str, key: str, *, by: Actor | None = None) -> Key:
        """Disables a key for new connections and requests; its open connections stay. Raises RecordError.

        The last enabled key can't be disabled; to close an app, switch it off.
        """
        return await self._set_enabled(app_id, key, False, by)

    async def _set_enabled(self, app_id: str, key: str, enabled: bool, by: Actor | None) -> Key:
        async with self.edit(by) as edit:
            app = self._app(app_id)
            existing = _key_of(app, key)
            if existing is None:
                raise RecordError(f"app {app_id} has no key {key}")
            if existing.enabled == enabled:
                return existing
            if not enabled:
                _check_other_key(app, existing)
            await app_rows.enable_key(edit.connection, key, enabled)
            edit.app = await self._read(edit.connection, app_id)
            await edit.note("key enable" if enabled else "key disable", app_id, key)
        return msgspec.structs.replace(existing, enabled=enabled)

    async def delete_key(self, app_id: str, key: str, *, by: Actor | None = None) -> None:
        """Deletes a key with its secret; its open connections stay. Raises RecordError: the last enabled key can't be
        deleted."""
        async with self.edit(by) as edit:
            app = self._app(app_id)
            existing = _key_of(app, key)
            if existing is None:
                raise RecordError(f"app {app_id} has no key {key}")
            _check_other_key(app, existing)
            await app_rows.remove_keys(edit.connection, [key])
            edit.app = await self._read(edit.connection, app_id)
            await edit.note("key delete", app_id, key)

    # -- daily counters

    async def daily_used(self, day: str) -> dict[str, int]:
        """By app id: the messages counted on `day` (YYYYMMDD, UTC), from the copy in the record store."""
        async with self._store.reading() as connection:
            return await daily.read(connection, day)

    async def save_daily(self, day: str, used: Mapping[str, int]) -> None:
        """Writes the counters of `day`, unless the stored one is greater. Raises SQLAlchemyError."""
        oldest = (datetime.strptime(day, "%Y%m%d") - timedelta(days=_KEEP_DAYS)).strftime("%Y%m%d")
        async with self._changing, self._store.change() as connection:
            await daily.put(connection, day, {app: count for app, count in used.items() if app in self.apps})
            await daily.remove_before(connection, oldest)


def newly_made(app: App) -> App:
    """The record of a new app, with the word that tells it from a deleted one with this id."""
    return msgspec.structs.replace(app, made=secrets.token_hex(4))


class _Changed(NamedTuple):
    """An app as it will be, and the change's row in the audit log."""

    app: App
    action: str = ""
    target: str = ""
    detail: str = ""


def _differences(before: App, after: App) -> str:
    """The settings that differ, for people: `max_batch 10 → 20, …`."""
    pairs = ((name, getattr(before, name), getattr(after, name)) for name in SETTINGS)
    return ", ".join(f"{name} {setting_text(old)} → {setting_text(new)}" for name, old, new in pairs if old != new)


def setting_text(value: Value) -> str:
    """A setting's value for people."""
    if isinstance(value, tuple):
        return ", ".join(value)
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def rule_pattern(rule: HistoryRule) -> str:
    """The channels of a rule for people: `news…` are those that begin with `news`."""
    return f"{rule.name}…" if rule.prefix else rule.name


def _with_rules(app: App, rules: Sequence[HistoryRule]) -> App:
    return msgspec.structs.replace(app, history=with_eras(app.history, rules, secrets.token_hex(4)))


def _check_other_key(app: App, key: Key) -> None:
    if key.enabled and not any(other.enabled for other in app.keys if other is not key):
        raise RecordConflict(
            f"{key.key} is the last enabled key of app {app.id}: add another one first "
            f"(redpoll key add {app.id}), or switch the app off (redpoll app set {app.id} enabled=false)"
        )


def _key_of(app: App, key: str) -> Key | None:
    return next((existing for existing in app.keys if existing.key == key), None)
