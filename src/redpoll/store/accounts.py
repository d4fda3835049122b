"""Dashboard users and their sessions in the record store.

Password rules, hashing and the lifetime of sessions are decided in control/accounts/accounts.py.
"""

from collections.abc import Collection

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.store.schema import sessions, users

__all__ = [
    "ROLES",
    "SessionRow",
    "User",
    "add",
    "add_session",
    "end_matching_sessions",
    "end_sessions",
    "find_id_token",
    "find_session",
    "find_subject",
    "find_user",
    "list_users",
    "remove",
    "replace_password",
    "set_login",
    "set_password",
    "set_rights",
    "set_role",
    "touch_session",
]

# An admin may change things, a viewer may only look.
ROLES = ("admin", "viewer")


class User(msgspec.Struct, frozen=True, kw_only=True):
    """A user's record. `must_change`: the password is a one-time password. Times are Unix seconds. `last_login_at` is
    None before the first login. `subject` and `apps` are those of a user of an OpenID Connect provider (schema.py)."""

    name: str
    password_hash: str
    role: str
    must_change: bool
    created_at: float
    last_login_at: float | None = None
    subject: str | None = None
    apps: str | None = None


class SessionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A session with its user. `hash` is the SHA-256 of the cookie's value in hex. Times are Unix seconds."""

    hash: str
    user: User
    created_at: float
    used_at: float


async def list_users(connection: AsyncConnection) -> list[User]:
    """All users, sorted by name."""
    rows = await connection.execute(sa.select(users).order_by(users.c.name))
    return [User(**row._mapping) for row in rows]


async def find_user(connection: AsyncConnection, name: str) -> User | None:
    row = (await connection.execute(sa.select(users).where(users.c.name == name))).first()
    return None if row is None else User(**row._mapping)


async def add(connection: AsyncConnection, user: User) -> None:
    """Raises IntegrityError if there is a user with that name."""
    await connection.execute(sa.insert(users).values(msgspec.structs.asdict(user)))


async def set_password(connection: AsyncConnection, name: str, password_hash: str, must_change: bool) -> None:
    values = {"password_hash": password_hash, "must_change": must_change}
    await connection.execute(sa.update(users).where(users.c.name == name).values(values))


async def replace_password(connection: AsyncConnection, user: User, password_hash: str) -> bool:
    """Sets the password if it is still that of `user`. Returns whether it was."""
    return await _change_same(connection, user, password_hash=password_hash, must_change=False)


async def _change_same(connection: AsyncConnection, user: User, **values: object) -> bool:
    is_same = (users.c.name == user.name) & (users.c.password_hash == user.password_hash)
    return (await connection.execute(sa.update(users).where(is_same).values(values))).rowcount == 1


async def set_role(connection: AsyncConnection, name: str, role: str) -> None:
    await connection.execute(sa.update(users).where(users.c.name == name).values(role=role))


async def find_subject(connection: AsyncConnection, subject: str) -> User | None:
    """The user of a provider with this subject."""
    row = (await connection.execute(sa.select(users).where(users.c.subject == subject))).first()
    return None if row is None else User(**row._mapping)


async def set_rights(connection: AsyncConnection, name: str, role: str, apps: str | None) -> None:
    await connection.execute(sa.update(users).where(users.c.name == name).values(role=role, apps=apps))


async def set_login(connection: AsyncConnection, user: User, now_s: float) -> bool:
    """Notes that a user logged in, if the password is still that of `user`. Returns whether it was."""
    return await _change_same(connection, user, last_login_at=now_s)


async def remove(connection: AsyncConnection, name: str) -> None:
    """Removes the user and the user's sessions."""
    await connection.execute(sa.delete(users).where(users.c.name == name))


# -- sessions


async def find_session(connection: AsyncConnection, hash: str) -> SessionRow | None:
    """The session with this hash, whatever its age, with its user; None if there is none."""
    joined = sa.join(sessions, users, sessions.c.user_name == users.c.name)
    statement = sa.select(sessions.c.created_at.label("begun_at"), sessions.c.used_at, users).select_from(joined)
    row = (await connection.execute(statement.where(sessions.c.hash == hash))).first()
    if row is None:
        return None
    values = dict(row._mapping)
    begun_at, used_at = values.pop("begun_at"), values.pop("used_at")
    return SessionRow(hash=hash, user=User(**values), created_at=begun_at, used_at=used_at)


async def find_id_token(connection: AsyncConnection, hash: str) -> str | None:
    """The ID token of a session that began at a provider."""
    id_token: str | None = await connection.scalar(sa.select(sessions.c.id_token).where(sessions.c.hash == hash))
    return id_token


async def add_session(
    connection: AsyncConnection, hash: str, user_name: str, now_s: float, id_token: str | None = None
) -> None:
    values = {"hash": hash, "user_name": user_name, "created_at": now_s, "used_at": now_s, "id_token": id_token}
    await connection.execute(sa.insert(sessions).values(values))


async def touch_session(connection: AsyncConnection, hash: str, now_s: float) -> None:
    await connection.execute(sa.update(sessions).where(sessions.c.hash == hash).values(used_at=now_s))


async def end_sessions(connection: AsyncConnection, hashes: Collection[str]) -> None:
    await connection.execute(sa.delete(sessions).where(sessions.c.hash.in_(hashes)))


async def end_matching_sessions(
    connection: AsyncConnection,
    *,
    user_name: str | None = None,
    used_before: float | None = None,
    begun_before: float | None = None,
) -> None:
    """Ends all sessions of a user, or all that were last used or created before a time. Several conditions are combined
    with OR."""
    conditions: list[sa.ColumnElement[bool]] = []
    if user_name is not None:
        conditions.append(sessions.c.user_name == user_name)
    if used_before is not None:
        conditions.append(sessions.c.used_at < used_before)
    if begun_before is not None:
        conditions.append(sessions.c.created_at < begun_before)
    if conditions:
        await connection.execute(sa.delete(sessions).where(sa.or_(*conditions)))
