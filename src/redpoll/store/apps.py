"""Apps and their keys in the record store. control/records/records.py decides which changes are allowed."""

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.protocol.apps import App, Key
from redpoll.store.schema import apps, changes, daily, keys, tokens, webhooks

__all__ = [
    "add",
    "add_key",
    "add_many",
    "all_by_id",
    "deleted_since",
    "enable_key",
    "find_by_id",
    "forget_deleted",
    "mark_deleted",
    "remove_given_keys",
    "remove_keys",
    "set_secret",
    "update",
]

# Fields that have their own column or table, or that are computed from other tables. All other fields are stored in the
# column `settings`.
_NOT_IN_SETTINGS = {"id", "name", "keys", "hooks"}
# Of a deleted app. A redpoll that doesn't know the column `deleted_at` refuses its clients.
_DELETED_SETTINGS = '{"enabled":false}'
_IDS_PER_STATEMENT = 500


async def all_by_id(connection: AsyncConnection, since: int | None = None) -> dict[str, App]:
    """All apps by id, each with its keys, oldest first; with `since` only those that changed after that version."""
    chosen = sa.select(apps).where(apps.c.deleted_at.is_(None)).order_by(apps.c.id)
    chosen_keys = sa.select(keys).order_by(keys.c.number)
    if since is not None:
        chosen = chosen.where(apps.c.version > since)
        chosen_keys = chosen_keys.where(keys.c.app_id.in_(sa.select(apps.c.id).where(apps.c.version > since)))
    rows = (await connection.execute(chosen)).all()
    app_keys: dict[str, list[Key]] = {row.id: [] for row in rows}
    for key in await connection.execute(chosen_keys):
        if key.app_id in app_keys:
            app_keys[key.app_id].append(Key(key=key.key, secret=key.secret, enabled=key.enabled))
    return {row.id: _app(row, app_keys[row.id]) for row in rows}


async def find_by_id(connection: AsyncConnection, app_id: str) -> App | None:
    """The app with this id, or None."""
    row = (await connection.execute(sa.select(apps).where(apps.c.id == app_id, apps.c.deleted_at.is_(None)))).first()
    if row is None:
        return None
    key_rows = await connection.execute(sa.select(keys).where(keys.c.app_id == app_id).order_by(keys.c.number))
    return _app(row, [Key(key=key.key, secret=key.secret, enabled=key.enabled) for key in key_rows])


def _app(row: Any, app_keys: list[Key]) -> App:
    settings = msgspec.json.decode(row.settings)
    return msgspec.convert({**settings, "id": row.id, "name": row.name, "keys": app_keys}, App, from_attributes=True)


async def add(connection: AsyncConnection, app: App, *, given: bool = False) -> None:
    """Adds a new app with its keys. `given`: the keys came from the settings REDPOLL_APP_…."""
    await _add_rows(connection, [app])
    for key in app.keys:
        await add_key(connection, app.id, key, given=given)


async def add_many(connection: AsyncConnection, added: Sequence[App]) -> None:
    """Adds new apps with their keys, in few statements."""
    await _add_rows(connection, added)
    key_rows = [
        {"app_id": app.id, "key": key.key, "secret": key.secret, "enabled": key.enabled, "given": False}
        for app in added
        for key in app.keys
    ]
    if key_rows:
        await connection.execute(sa.insert(keys), key_rows)


async def _add_rows(connection: AsyncConnection, added: Sequence[App]) -> None:
    """Adds rows without keys. An id that a deleted app had is used again: its row is still there, and its webhooks may
    be, with deliveries that the new app must not see. A control plane that hasn't read the deletion would take the new
    app for the old one, and keep what is gone: it reads all records (store.py `has_version`)."""
    ids = [app.id for app in added]
    known: set[str] = set()
    for at in range(0, len(ids), _IDS_PER_STATEMENT):
        some = apps.c.id.in_(ids[at : at + _IDS_PER_STATEMENT])
        deleted = sa.select(apps.c.id, apps.c.version).where(some, apps.c.deleted_at.is_not(None))
        reused = {row.id: row.version for row in await connection.execute(deleted)}
        if reused:
            await connection.execute(sa.delete(webhooks).where(webhooks.c.app_id.in_(reused)))
            await connection.execute(sa.delete(changes).where(changes.c.version < max(reused.values())))
        known |= reused.keys()
    for app in added:
        if app.id in known:
            values = {"name": app.name, "settings": _settings_text(app), "deleted_at": None}
            await connection.execute(sa.update(apps).where(apps.c.id == app.id).values(values))
    rows = [{"id": app.id, "name": app.name, "settings": _settings_text(app)} for app in added if app.id not in known]
    if rows:
        await connection.execute(sa.insert(apps), rows)


def _settings_text(app: App) -> str:
    settings = {name: value for name, value in msgspec.to_builtins(app).items() if name not in _NOT_IN_SETTINGS}
    return msgspec.json.encode(settings).decode()


async def update(connection: AsyncConnection, app: App) -> None:
    """Writes all fields of the app except its keys."""
    values = {"name": app.name, "settings": _settings_text(app)}
    await connection.execute(sa.update(apps).where(apps.c.id == app.id).values(values))


async def add_key(connection: AsyncConnection, app_id: str, key: Key, *, given: bool) -> None:
    """Adds a key to an app. `given`: it came from the settings REDPOLL_APP_…."""
    values = {"key": key.key, "secret": key.secret, "enabled": key.enabled}
    await connection.execute(sa.insert(keys).values(app_id=app_id, given=given, **values))


async def set_secret(connection: AsyncConnection, key: str, secret: str) -> None:
    await connection.execute(sa.update(keys).where(keys.c.key == key).values(secret=secret))


async def enable_key(connection: AsyncConnection, key: str, enabled: bool) -> None:
    await connection.execute(sa.update(keys).where(keys.c.key == key).values(enabled=enabled))


async def remove_keys(connection: AsyncConnection, names: Collection[str]) -> None:
    await connection.execute(sa.delete(keys).where(keys.c.key.in_(names)))


async def remove_given_keys(connection: AsyncConnection, app_id: str, except_key: str) -> int:
    """Removes the app's keys that came from the settings, except the key `except_key`. Returns the number removed."""
    stale = (keys.c.app_id == app_id) & keys.c.given & (keys.c.key != except_key)
    return (await connection.execute(sa.delete(keys).where(stale))).rowcount


async def deleted_since(connection: AsyncConnection, since: int) -> list[str]:
    """The ids of the apps that were deleted after that version."""
    chosen = sa.select(apps.c.id).where(apps.c.version > since, apps.c.deleted_at.is_not(None))
    return list((await connection.execute(chosen)).scalars())


async def mark_deleted(connection: AsyncConnection, app_id: str, now_s: float) -> None:
    """Deletes an app's keys, tokens, settings, history rules and daily counters. Its row stays until
    `forget_deleted`."""
    for table in (keys, tokens, daily):
        await connection.execute(sa.delete(table).where(table.c.app_id == app_id))
    values = {"settings": _DELETED_SETTINGS, "deleted_at": now_s}
    await connection.execute(sa.update(apps).where(apps.c.id == app_id).values(values))


async def forget_deleted(connection: AsyncConnection, until: int) -> None:
    """Removes the rows of apps that were deleted at or before that version and have no webhooks left."""
    has_webhooks = sa.exists().where(webhooks.c.app_id == apps.c.id)
    chosen = apps.c.deleted_at.is_not(None) & (apps.c.version <= until) & ~has_webhooks
    await connection.execute(sa.delete(apps).where(chosen))
