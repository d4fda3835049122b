"""App tokens in the record store. control/records/tokens.py decides which changes are allowed."""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Final

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.protocol.tokens import Token
from redpoll.store.schema import tokens
from redpoll.store.store import batched

__all__ = ["add", "all_by_hash", "remove_ended", "remove_expired", "revoke", "set_last_used", "used_since"]


_TOKEN: Final = tuple(tokens.c[name] for name in Token.__struct_fields__)


async def all_by_hash(connection: AsyncConnection, since: int | None = None) -> dict[str, Token]:
    """All tokens by hash, oldest first, including expired and revoked ones; with `since` only those that changed after
    that version."""
    query = sa.select(*_TOKEN).order_by(tokens.c.created_at, tokens.c.id)
    rows = await connection.execute(query if since is None else query.where(tokens.c.version > since))
    parsed = [Token(**{**row._mapping, "scopes": tuple(msgspec.json.decode(row.scopes))}) for row in rows]
    return {token.hash: token for token in parsed}


async def add(connection: AsyncConnection, *added: Token) -> None:
    rows = [msgspec.structs.asdict(token) | {"scopes": msgspec.json.encode(token.scopes).decode()} for token in added]
    if rows:
        await connection.execute(sa.insert(tokens), rows)


async def revoke(connection: AsyncConnection, ids: Collection[str], now_s: float) -> None:
    """Revokes tokens at `now_s`. Tokens that were revoked before keep their time."""
    for some in batched(ids):
        chosen = tokens.c.id.in_(some) & tokens.c.revoked_at.is_(None)
        await connection.execute(sa.update(tokens).where(chosen).values(revoked_at=now_s))


async def set_last_used(connection: AsyncConnection, times: Mapping[str, float]) -> None:
    """Writes the time of last use of tokens, by token id."""
    statement = sa.update(tokens).where(tokens.c.id == sa.bindparam("token_id")).values(last_used_at=sa.bindparam("at"))
    await connection.execute(statement, [{"token_id": token_id, "at": at} for token_id, at in times.items()])


async def used_since(
    connection: AsyncConnection, since_s: float, *, page: int = 1_000
) -> AsyncIterator[Sequence[tuple[str, float]]]:
    """Hash and time of last use of the tokens that were used after this time, in pages."""
    query = sa.select(tokens.c.hash, tokens.c.last_used_at).where(tokens.c.last_used_at > since_s)
    after = ""
    while True:
        rows = (await connection.execute(query.where(tokens.c.hash > after).order_by(tokens.c.hash).limit(page))).all()
        yield [(row.hash, row.last_used_at) for row in rows]
        if len(rows) < page:
            return
        after = rows[-1].hash


async def remove_ended(connection: AsyncConnection, before: float) -> None:
    """Removes tokens that were revoked or expired before this time. A request with one is then refused as unknown."""
    await connection.execute(sa.delete(tokens).where((tokens.c.revoked_at < before) | (tokens.c.expires_at < before)))


async def remove_expired(connection: AsyncConnection, app_id: str | None, before: float) -> None:
    """Removes the app's tokens that expired before this time."""
    await connection.execute(sa.delete(tokens).where((tokens.c.app_id == app_id) & (tokens.c.expires_at < before)))
