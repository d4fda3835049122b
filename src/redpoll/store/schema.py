"""The tables of the record store, as the newest migration leaves them. No queries, no connections."""

from sqlalchemy import Boolean, Column, Float, ForeignKey, Integer, MetaData, String, Table, Text

__all__ = ["apps", "daily", "keys", "meta", "metadata", "tokens"]

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

# `hash`: SHA-256 of the plain form in hex; the plain form is kept nowhere. `scopes`: JSON array. `app_id` null: a
# token for every app. Times are Unix seconds; `revoked_at` keeps the row, so that its user can be told.
tokens = Table(
    "tokens",
    metadata,
    Column("id", String(12), primary_key=True),
    Column("app_id", String(18), ForeignKey("apps.id", ondelete="CASCADE"), nullable=True, index=True),
    Column("name", Text, nullable=False),
    Column("hash", String(64), nullable=False, unique=True),
    Column("prefix", String(8), nullable=False),
    Column("scopes", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, nullable=True),
    Column("last_used_at", Float, nullable=True),
    Column("revoked_at", Float, nullable=True),
)

# How many messages of an app counted against its plan on a UTC day (YYYYMMDD): the copy of a counter in Redis, at
# most a minute old (cluster.md 3, key d).
daily = Table(
    "daily",
    metadata,
    Column("app_id", String(18), ForeignKey("apps.id", ondelete="CASCADE"), primary_key=True),
    Column("day", String(8), primary_key=True),
    Column("used", Integer, nullable=False),
)
