"""The tables of the record store in their newest version (store/README.md "Tables"). Times are Unix seconds unless a
name ends in `_ms`."""

import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Dialect,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    TypeDecorator,
    false,
    insert,
)

from redpoll import __version__

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql, sqlite

__all__ = [
    "COMPATIBLE",
    "NEWEST",
    "apps",
    "attempts",
    "audit",
    "changes",
    "create",
    "daily",
    "deliveries",
    "insert_of",
    "keys",
    "meta",
    "metadata",
    "revision",
    "revoked_grants",
    "sessions",
    "state_facts",
    "tokens",
    "users",
    "webhooks",
]

# The last migration, whose result are the tables below.
NEWEST: Final = "0014"
# The first migration whose redpoll may use a store that this redpoll has migrated. Raise it when a migration removes
# something, or adds what every writer must maintain (store/README.md "Migrations").
COMPATIBLE: Final = "0007"
# The first migration whose redpoll puts channels where the shard key says.
_KEYED: Final = "0009"

metadata = MetaData()

# Alembic's own table: one row with the last migration.
revision = Table(
    "alembic_version",
    MetaData(),
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)

# SQLite's integers have 64 bits, and only a column of the type INTEGER assigns numbers by itself.
_BIG = BigInteger().with_variant(Integer(), "sqlite")


class _Words(TypeDecorator[str]):
    """Text that others wrote. PostgreSQL can't store the character NUL; U+FFFD replaces it."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return value if value is None or "\0" not in value else value.replace("\0", "\ufffd")


def _version_of(table: str) -> tuple[Column[int], Index]:
    """The version of the store at the row's last change, and the index that finds what has changed since then."""
    return (
        Column("version", BigInteger, nullable=False, server_default="0"),
        Index(f"{table}_by_version", "version"),
    )


# Facts about the store itself, one per row. `version` increases with every change of what control planes keep in
# memory, `directory_version` with every change of what workers read; `version_id` and `directory_id` are random, new
# with each of these changes. `shard_key`: store/shard_key.py. `compatible` and `migrated_by`: store/README.md
# "Migrations".
meta = Table(
    "meta",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("value", Text, nullable=False),
)

# The random ids of the last versions. A database that lost changes, after a fail-over, uses their versions again. Then
# a control plane doesn't find the id that it knows (store/README.md "Changes").
changes = Table(
    "changes",
    metadata,
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("id", String(16), nullable=False),
)

# `settings` is a JSON object of the App fields that differ from their defaults, so a new field needs no migration. A
# change of a key changes the `version` of its app. A deleted app keeps its row, without keys, tokens and settings, so
# that the other control planes learn of it; `deleted_at` null: it isn't deleted.
apps = Table(
    "apps",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("name", _Words, nullable=False),
    Column("settings", Text, nullable=False),
    *_version_of("apps"),
    Column("deleted_at", Float, nullable=True),
)

# `number` increases, so the oldest key of an app has the lowest one. `given`: the key came from REDPOLL_APP_KEY and is
# removed when that setting changes.
keys = Table(
    "keys",
    metadata,
    Column("number", _BIG, primary_key=True, autoincrement=True),
    Column("key", String(128), nullable=False, unique=True),
    Column("secret", String(128), nullable=False),
    Column("app_id", String(64), ForeignKey("apps.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("enabled", Boolean, nullable=False),
    Column("given", Boolean, nullable=False),
)

# `hash` is the SHA-256 of the token in hex; the token itself is stored nowhere. `prefix` is its first characters.
# `scopes` is a JSON array. `app_id` null: a token for every app. A revoked token keeps its row, so that requests with
# it get the error `token_revoked`.
tokens = Table(
    "tokens",
    metadata,
    Column("id", String(12), primary_key=True),
    Column("app_id", String(64), ForeignKey("apps.id", ondelete="CASCADE"), nullable=True, index=True),
    Column("name", _Words, nullable=False),
    Column("hash", String(64), nullable=False, unique=True),
    Column("prefix", String(8), nullable=False),
    Column("scopes", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, nullable=True),
    Column("last_used_at", Float, nullable=True),
    Column("revoked_at", Float, nullable=True),
    *_version_of("tokens"),
)

# Revoked grants. `subject` is what was revoked (protocol/grants.py), `at` when, in whole seconds.
revoked_grants = Table(
    "revoked_grants",
    metadata,
    Column("app_id", String(64), ForeignKey("apps.id", ondelete="CASCADE"), primary_key=True),
    Column("subject", Text, primary_key=True),
    Column("at", BigInteger, nullable=False),
)

# The messages of an app on a UTC day (YYYYMMDD) that count against its daily limit: a copy of the counter in Redis, at
# most a minute old (cluster/README.md "Idempotency and quotas").
daily = Table(
    "daily",
    metadata,
    Column("app_id", String(64), ForeignKey("apps.id", ondelete="CASCADE"), primary_key=True),
    Column("day", String(8), primary_key=True),
    Column("used", _BIG, nullable=False),
)

# Webhook endpoints. `url` "": the back end pulls the deliveries. `events`, `channels` and `client_events` are JSON
# arrays. `disabled_at` null: enabled. `failing_since` is the time of the first failure after the last success. A
# deleted endpoint keeps its row while it has deliveries. `pin` is the SHA-256 of the only accepted certificate in hex;
# empty: any valid one. `batch`: the events of a second are sent in one request.
webhooks = Table(
    "webhooks",
    metadata,
    Column("id", String(12), primary_key=True),
    Column("app_id", String(64), ForeignKey("apps.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("url", _Words, nullable=False),
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
    *_version_of("webhooks"),
    Column("client_events", Text, nullable=False, server_default="[]"),
    Column("batch", Boolean, nullable=False, server_default=false()),
)

# One row per transition and endpoint. `id` is computed from both, so reading a transition twice adds no second row.
# `at` is the due time of a waiting delivery, and the time of the last change of state of any other. `attempts` counts
# all attempts, `cycle_from` those before the operator's last retry. The index serves all queries: due deliveries of an
# endpoint, its dead letters, old deliveries.
deliveries = Table(
    "deliveries",
    metadata,
    Column("number", _BIG, primary_key=True, autoincrement=True),
    Column("id", String(36), nullable=False, unique=True),
    Column("endpoint_id", String(12), ForeignKey("webhooks.id", ondelete="CASCADE"), nullable=False),
    Column("event", String(24), nullable=False),
    Column("channel", _Words, nullable=False),
    Column("user", _Words, nullable=True),
    Column("stamp", BigInteger, nullable=False),
    Column("time_ms", BigInteger, nullable=False),
    Column("trace", _Words, nullable=True),
    Column("body", LargeBinary, nullable=False),
    Column("state", String(9), nullable=False),
    Column("at", Float, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("cycle_from", Integer, nullable=False),
    Column("created_at", Float, nullable=False),
    Index("deliveries_by_state", "endpoint_id", "state", "at"),
)

# `n` counts the attempts of a delivery from 1. `response` is the first KiB of the answer's body.
attempts = Table(
    "attempts",
    metadata,
    Column("delivery", _BIG, ForeignKey("deliveries.number", ondelete="CASCADE"), primary_key=True),
    Column("n", Integer, primary_key=True),
    Column("at", Float, nullable=False),
    Column("status", Integer, nullable=True),
    Column("duration_ms", Integer, nullable=False),
    Column("outcome", String(12), nullable=False),
    Column("reason", _Words, nullable=False),
    Column("response", LargeBinary, nullable=False),
    sqlite_with_rowid=False,
)

# Dashboard users. `password_hash` is argon2's text form. `must_change`: the password is a one-time password, and the
# next login asks for a new one. `subject` is "ISSUER SUB" of a user who logs in at an OpenID Connect provider and has
# no password here; `apps` is a JSON list of the app ids that such a viewer may see, NULL for all.
users = Table(
    "users",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("password_hash", Text, nullable=False),
    Column("role", String(16), nullable=False),
    Column("must_change", Boolean, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("last_login_at", Float, nullable=True),
    Column("subject", Text, nullable=True),
    Column("apps", Text, nullable=True),
    Index("ix_users_subject", "subject", unique=True),
)

# `hash` is the SHA-256 of the session cookie's value in hex. `id_token` is that of the login at a provider, which the
# logout there wants to see.
sessions = Table(
    "sessions",
    metadata,
    Column("hash", String(64), primary_key=True),
    Column("user_name", String(64), ForeignKey("users.name", ondelete="CASCADE"), nullable=False, index=True),
    Column("created_at", Float, nullable=False),
    Column("used_at", Float, nullable=False),
    Column("id_token", Text, nullable=True),
)

# The audit log. `who` is a user's name, which stays when the user is removed. `app_id` is "" if no app is concerned.
audit = Table(
    "audit",
    metadata,
    Column("number", _BIG, primary_key=True, autoincrement=True),
    Column("at", Float, nullable=False),
    Column("who", String(64), nullable=False),
    Column("address", String(64), nullable=False),
    Column("action", String(64), nullable=False),
    Column("app_id", String(64), nullable=False, index=True),
    Column("target", _Words, nullable=False),
    Column("detail", _Words, nullable=False),
)


def create(connection: Connection) -> None:
    """Creates the tables in an empty database, as all migrations would (tests/store/test_migrating.py compares)."""
    metadata.create_all(connection, checkfirst=False)
    revision.create(connection, checkfirst=False)
    connection.execute(insert(revision).values(version_num=NEWEST))
    facts = {
        "store_id": secrets.token_hex(8),
        "shard_key": secrets.token_hex(16),
        **state_facts(keyed=True),
    }
    connection.execute(insert(meta), [{"name": name, "value": value} for name, value in facts.items()])


def state_facts(*, keyed: bool) -> dict[str, str]:
    """The rows of `meta` that a migration by this redpoll leaves. `keyed`: the store has a shard key."""
    return {"compatible": max(COMPATIBLE, _KEYED) if keyed else COMPATIBLE, "migrated_by": __version__}


def insert_of(dialect: str) -> "Callable[[Table], sqlite.Insert | postgresql.Insert]":
    """The `insert` of a dialect ("sqlite" or "postgresql"), which has ON CONFLICT."""
    # Each where it is used: PostgreSQL's types take a thirtieth of a start with SQLite.
    if dialect == "postgresql":
        from sqlalchemy.dialects import postgresql

        return postgresql.insert
    from sqlalchemy.dialects import sqlite

    return sqlite.insert
