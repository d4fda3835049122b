"""App tokens in the store: rows in, `Token` out. Who may make or revoke one is control/records.py's."""

from collections.abc import Collection, Mapping

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.protocol.tokens import Token
from redpoll.store.schema import tokens

__all__ = ["add", "every", "forget", "revoke", "used"]


async def every(connection: AsyncConnection) -> dict[str, Token]:
    """All tokens by their hash, oldest first; those that ended are among them."""
    rows = await connection.execute(sa.select(tokens).order_by(tokens.c.created_at, tokens.c.id))
    found = [Token(**{**row._mapping, "scopes": tuple(msgspec.json.decode(row.scopes))}) for row in rows]
    return {token.hash: token for token in found}


async def add(connection: AsyncConnection, token: Token) -> None:
    values = msgspec.structs.asdict(token)
    values["scopes"] = msgspec.json.encode(token.scopes).decode()
    await connection.execute(sa.insert(tokens).values(values))


async def revoke(connection: AsyncConnection, ids: Collection[str], now_s: float) -> None:
    """From `now_s` on they open nothing; those that were revoked before keep their time."""
    chosen = tokens.c.id.in_(ids) & tokens.c.revoked_at.is_(None)
    await connection.execute(sa.update(tokens).where(chosen).values(revoked_at=now_s))


async def used(connection: AsyncConnection, times: Mapping[str, float]) -> None:
    """Writes when tokens, by id, were used last."""
    which = sa.update(tokens).where(tokens.c.id == sa.bindparam("which"))
    statement = which.values(last_used_at=sa.bindparam("at"))
    await connection.execute(statement, [{"which": each, "at": at} for each, at in times.items()])


async def forget(connection: AsyncConnection, ids: Collection[str]) -> None:
    """Removes them; who still calls with one is told that nobody made it."""
    await connection.execute(sa.delete(tokens).where(tokens.c.id.in_(ids)))
