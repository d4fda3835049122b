"""Apps and their keys in the record store. control/records/records.py decides which changes are allowed."""

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.protocol.apps import App, Key
from redpoll.store.schema import apps, keys

__all__ = [
    "add",
    "add_key",
    "add_many",
    "all_by_id",
    "enable_key",
    "find_by_id",
    "remove_given_keys",
    "remove_keys",
    "set_secret",
    "update",
]

# Fields that have their own column or table, or that are computed from other tables. All other fields are stored in the
# column `settings`.
_NOT_IN_SETTINGS = {"id", "name", "keys", "hooks"}


async def all_by_id(connection: AsyncConnection, since: int | None = None) -> dict[str, App]:
    """All apps by id, each with its keys, oldest first; with `since` only those that changed after that version."""
    chosen, found = sa.select(apps).order_by(apps.c.id), sa.select(keys).order_by(keys.c.number)
    if since is not None:
        chosen = chosen.where(apps.c.version > since)
        found = found.where(keys.c.app_id.in_(sa.select(apps.c.id).where(apps.c.version > since)))
    rows = (await connection.execute(chosen)).all()
    app_keys: dict[str, list[Key]] = {row.id: [] for row in rows}
    for key in await connection.execute(found):
        app_keys[key.app_id].append(Key(key=key.key, secret=key.secret, enabled=key.enabled))
    return {row.id: _app(row, app_keys[row.id]) for row in rows}


async def find_by_id(connection: AsyncConnection, app_id: str) -> App | None:
    """The app with this id, or None."""
    row = (await connection.execute(sa.select(apps).where(apps.c.id == app_id))).first()
    if row is None:
        return None
    found = await connection.execute(sa.select(keys).where(keys.c.app_id == app_id).order_by(keys.c.number))
    return _app(row, [Key(key=key.key, secret=key.secret, enabled=key.enabled) for key in found])


def _app(row: Any, app_keys: list[Key]) -> App:
    settings = msgspec.json.decode(row.settings)
    return msgspec.convert({**settings, "id": row.id, "name": row.name, "keys": app_keys}, App, from_attributes=True)


async def add(connection: AsyncConnection, app: App, *, given: bool = False) -> None:
    """Adds a new app with its keys. `given`: the keys came from the settings REDPOLL_APP_…."""
    values = {"id": app.id, "name": app.name, "settings": _settings_text(app)}
    await connection.execute(sa.insert(apps).values(values))
    for key in app.keys:
        await add_key(connection, app.id, key, given=given)


async def add_many(connection: AsyncConnection, added: Sequence[App]) -> None:
    """Adds new apps with their keys, in few statements."""
    rows = [{"id": app.id, "name": app.name, "settings": _settings_text(app)} for app in added]
    key_rows = [
        {"app_id": app.id, "key": key.key, "secret": key.secret, "enabled": key.enabled, "given": False}
        for app in added
        for key in app.keys
    ]
    for table, values in ((apps, rows), (keys, key_rows)):
        if values:
            await connection.execute(sa.insert(table), values)


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
