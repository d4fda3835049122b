"""The audit log in the record store: who changed what. Rows are only added; the oldest are removed, those of logins at
MAX_LOGINS and the others at MAX_ROWS. Anybody can make rows of logins, so these must not push out others.

The row of a change is added in the change's transaction, so the store has both or neither. Its action is the verb of
the command line for this change, also when the dashboard made it.
"""

import time
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.store.schema import audit

__all__ = ["COMMAND_LINE", "MAX_LOGINS", "MAX_ROWS", "Actor", "Entry", "add", "add_many", "find"]

# Years of what people do by hand; a week at 10 changes a minute.
MAX_ROWS: Final = 100_000
MAX_LOGINS: Final = 20_000
_LOGINS: Final = ("logged in", "login failed", "logged out")
# The oldest rows are removed each time this many rows were added.
_PRUNE_EVERY: Final = 100
# Columns of 64 characters (schema.py), and what is kept of the two texts.
_MAX_WORD_CHARS: Final = 64
_MAX_TEXT_CHARS: Final = 1_000


class Actor(NamedTuple):
    """Who makes a change: a dashboard user and the address of the browser, a management token and the address of its
    user, or COMMAND_LINE. `condition()` is called in the change's transaction before anything is written; it raises if
    the change must not be made."""

    who: str
    address: str = ""
    condition: Callable[[], None] | None = None


COMMAND_LINE: Final = Actor("command line")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One change. `action` is a few words ("token revoke"), `target` what was changed, `detail` anything else worth
    knowing, never a secret. `app_id` is "" if it concerns no app. `at` is in Unix seconds; `number` increases."""

    at: float
    who: str
    address: str
    action: str
    app_id: str = ""
    target: str = ""
    detail: str = ""
    number: int = 0


async def add(
    connection: AsyncConnection, by: Actor | None, action: str, app_id: str = "", target: str = "", detail: str = ""
) -> None:
    """Adds an entry in the transaction of the change; `by` None, for changes by the server itself, adds none."""
    if by is None:
        return
    done = await connection.execute(sa.insert(audit).values(_values(by, action, app_id, target, detail)))
    (number,) = done.inserted_primary_key or (0,)
    if number % _PRUNE_EVERY == 0:
        await _prune(connection)


async def _prune(connection: AsyncConnection) -> None:
    is_login = audit.c.action.in_(_LOGINS)
    for kind, kept in ((is_login, MAX_LOGINS), (~is_login, MAX_ROWS)):
        newest = sa.select(audit.c.number).where(kind).order_by(audit.c.number.desc())
        first_too_many = newest.limit(1).offset(kept).scalar_subquery()
        await connection.execute(sa.delete(audit).where(kind, audit.c.number <= first_too_many))


async def add_many(
    connection: AsyncConnection, by: Actor, action: str, changes: Iterable[tuple[str, str, str]]
) -> None:
    """Adds an entry for each `(app_id, target, detail)`, in one statement."""
    rows = [_values(by, action, *change) for change in changes]
    if rows:
        await connection.execute(sa.insert(audit), rows)
        await _prune(connection)


def _values(by: Actor, action: str, app_id: str, target: str, detail: str) -> dict[str, object]:
    return {
        "at": time.time(),
        "who": by.who[:_MAX_WORD_CHARS],
        "address": by.address[:_MAX_WORD_CHARS],
        "action": action,
        "app_id": app_id[:_MAX_WORD_CHARS],
        "target": target[:_MAX_TEXT_CHARS],
        "detail": detail[:_MAX_TEXT_CHARS],
    }


async def find(
    connection: AsyncConnection,
    *,
    app_id: str | None = None,
    who: str | None = None,
    text: str = "",
    before: int | None = None,
    limit: int = 50,
) -> list[Entry]:
    """The newest entries first, at most `limit`. Optional filters: one app, one user, `text` in action, target or
    detail, and a number below `before`."""
    statement = sa.select(audit).order_by(audit.c.number.desc()).limit(limit)
    if app_id is not None:
        statement = statement.where(audit.c.app_id == app_id)
    if who is not None:
        statement = statement.where(audit.c.who == who)
    if text:
        places = (audit.c.action, audit.c.target, audit.c.detail)
        statement = statement.where(sa.or_(*(place.icontains(text, autoescape=True) for place in places)))
    if before is not None:
        statement = statement.where(audit.c.number < before)
    return [Entry(**row._mapping) for row in await connection.execute(statement)]
