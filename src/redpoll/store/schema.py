"""The tables of the record store, as the newest migration leaves them. No queries, no connections."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)

__all__ = [
    "apps",
    "attempts",
    "audit",
    "daily",
    "deliveries",
    "keys",
    "meta",
    "metadata",
    "sessions",
    "tokens",
    "users",
    "webhooks",
]

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

# A webhook endpoint. `events` and `channels`: JSON arrays. `disabled_at` null: enabled. `failing_since`: when the first
# of the attempts failed since which none has succeeded. `deleted_at` keeps the row for as long as there are deliveries
# to it. `pin`: SHA-256 of the only certificate that is taken, in hex; empty: any that is valid. Times are Unix seconds.
webhooks = Table(
    "webhooks",
    metadata,
    Column("id", String(12), primary_key=True),
    Column("app_id", String(18), ForeignKey("apps.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("url", Text, nullable=False),
    Column("secret", String(64), nullable=False),
    Column("previous_secret", String(64), nullable=False),
    Column("previous_until", Float, nullable=False),
    Column("events", Text, nullable=False),
    Column("channels", Text, nullable=False),
    Column("format", String(8), nullable=False),
    Column("pin", String(64), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("disabled_at", Float, nullable=True),
    Column("failing_since", Float, nullable=True),
    Column("deleted_at", Float, nullable=True),
)

# What one endpoint is to be told of one transition. `id` is made of both, so a transition that is read twice makes no
# second row. `at`: of a waiting one when it is due, of any other since when it has been in its state. `attempts`: how
# many were made; `cycle_from`: how many of them before the operator had it tried anew. The order in which rows are
# looked for is that of the index: the due ones of an endpoint, its dead letters, what is old.
deliveries = Table(
    "deliveries",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("id", String(36), nullable=False, unique=True),
    Column("endpoint_id", String(12), ForeignKey("webhooks.id", ondelete="CASCADE"), nullable=False),
    Column("event", String(24), nullable=False),
    Column("channel", Text, nullable=False),
    Column("user", Text, nullable=True),
    Column("stamp", BigInteger, nullable=False),
    Column("time_ms", BigInteger, nullable=False),
    Column("trace", Text, nullable=True),
    Column("body", LargeBinary, nullable=False),
    Column("state", String(9), nullable=False),
    Column("at", Float, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("cycle_from", Integer, nullable=False),
    Column("created_at", Float, nullable=False),
    Index("deliveries_by_state", "endpoint_id", "state", "at"),
)

# `n` counts the attempts at a delivery from 1. `response`: the first KiB of what was answered, as it came.
attempts = Table(
    "attempts",
    metadata,
    Column("delivery", Integer, ForeignKey("deliveries.number", ondelete="CASCADE"), primary_key=True),
    Column("n", Integer, primary_key=True),
    Column("at", Float, nullable=False),
    Column("status", Integer, nullable=True),
    Column("duration_ms", Integer, nullable=False),
    Column("outcome", String(12), nullable=False),
    Column("reason", Text, nullable=False),
    Column("response", LargeBinary, nullable=False),
    sqlite_with_rowid=False,
)

# Of the dashboard. `password_hash` is argon2's own text; `must_change`: the password was made up by us, and the next
# login asks for another. Times are Unix seconds.
users = Table(
    "users",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("password_hash", Text, nullable=False),
    Column("role", String(16), nullable=False),
    Column("must_change", Boolean, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("last_login_at", Float, nullable=True),
)

# `hash`: SHA-256 of what the browser's cookie holds, in hex.
sessions = Table(
    "sessions",
    metadata,
    Column("hash", String(64), primary_key=True),
    Column("user_name", String(64), ForeignKey("users.name", ondelete="CASCADE"), nullable=False, index=True),
    Column("created_at", Float, nullable=False),
    Column("used_at", Float, nullable=False),
)

# Who did what. `who` is a user's name, kept when the user is gone; `app_id` is "" where it was about no app.
audit = Table(
    "audit",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("at", Float, nullable=False),
    Column("who", String(64), nullable=False),
    Column("address", String(64), nullable=False),
    Column("action", String(64), nullable=False),
    Column("app_id", String(18), nullable=False, index=True),
    Column("target", Text, nullable=False),
    Column("detail", Text, nullable=False),
)
