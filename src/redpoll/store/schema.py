"""The tables of the record store, as the newest migration leaves them. No queries, no connections."""

from sqlalchemy import Boolean, Column, ForeignKey, Integer, MetaData, String, Table, Text

__all__ = ["apps", "keys", "meta", "metadata"]

metadata = MetaData()

# Facts about the store itself, one row each. `directory_version`: how often what workers read has changed.
meta = Table(
    "meta",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("value", Text, nullable=False),
)

# `settings`: JSON object of the App fields that differ from their defaults; a new field needs no migration.
apps = Table(
    "apps",
    metadata,
    Column("id", String(18), primary_key=True),
    Column("name", Text, nullable=False),
    Column("settings", Text, nullable=False),
)

# `number` rises, so it tells which key of an app is the oldest. `given`: the key came with REDPOLL_APP_KEY
# and goes when another one comes that way.
keys = Table(
    "keys",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("key", String(128), nullable=False, unique=True),
    Column("secret", String(128), nullable=False),
    Column("app_id", String(18), ForeignKey("apps.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("enabled", Boolean, nullable=False),
    Column("given", Boolean, nullable=False),
)
