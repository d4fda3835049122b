"""Runs the migrations that an older record store lacks, with Alembic, and says which these are (store/README.md
"Migrations").

Alembic takes a fifth of a second of processor time to import, so store.py imports this module only for a store that
isn't at the newest migration.
"""

from functools import cache
from typing import NamedTuple

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import Script, ScriptDirectory

from redpoll import __version__
from redpoll.store.errors import StoreError
from redpoll.store.schema import meta, state_facts

__all__ = ["Schema", "migrate", "scripts", "state_of", "unusable"]


class Schema(NamedTuple):
    """Which migrations a database has had. `revision` is the last one, None before the first; `missing` are those that
    this redpoll adds, as (revision, what it does), in order. `migrated_by` is the version of redpoll that ran the last
    one, "" if unknown. `usable`: false if a newer redpoll has changed the tables in a way that this one can't handle.
    """

    database: str
    revision: str | None
    missing: list[tuple[str, str]]
    migrated_by: str
    usable: bool


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", "redpoll:store/migrations")
    return config


@cache
def scripts() -> tuple[Script, ...]:
    """All migrations, from the newest to the oldest. Read once: call it before root acts as somebody who may not be
    able to read the installation."""
    return tuple(ScriptDirectory.from_config(_config()).walk_revisions())


def state_of(connection: sa.Connection | None, database: str) -> Schema:
    """The state of a database; `connection` None if there is none yet."""
    newer = scripts()
    revision = None if connection is None else MigrationContext.configure(connection).get_current_revision()
    known = [script.revision for script in newer]
    if connection is not None and revision is not None:
        stated = {row.name: row.value for row in connection.execute(sa.select(meta))}
        migrated_by = stated.get("migrated_by", "")
        if revision not in known:
            return Schema(database, revision, [], migrated_by, stated.get("compatible", revision) <= known[0])
        newer = newer[: known.index(revision)]
    else:
        migrated_by = ""
    missing = [(script.revision, " ".join(script.doc.split())) for script in reversed(newer)]
    return Schema(database, revision, missing, migrated_by, True)


def migrate(connection: sa.Connection, database: str) -> None:
    """Runs the migrations that the store lacks. Raises StoreError if a newer redpoll has migrated it, and this one
    doesn't understand it."""
    schema = state_of(connection, database)
    if not schema.usable:
        raise StoreError(unusable(schema))
    if not schema.missing:
        return
    config = _config()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
    shard_key = connection.execute(sa.select(meta.c.value).where(meta.c.name == "shard_key")).scalar_one()
    facts = state_facts(keyed=bool(shard_key))
    connection.execute(sa.delete(meta).where(meta.c.name.in_(facts)))
    connection.execute(sa.insert(meta), [{"name": name, "value": value} for name, value in facts.items()])


def unusable(schema: Schema) -> str:
    """Why this redpoll can't use a store that isn't `usable`."""
    newest = scripts()[0].revision
    return (
        f"the record store {schema.database} was migrated by redpoll {schema.migrated_by or '(unknown version)'} "
        f"(revision {schema.revision}), and this redpoll {__version__} (revision {newest}) doesn't understand it; "
        "install the newer one"
    )
