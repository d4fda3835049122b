"""Revoked grants in the record store. control/records/grants.py keeps them in memory and in Redis too."""

from collections.abc import Iterable

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.store import schema
from redpoll.store.schema import revoked_grants

__all__ = ["add", "everything", "remove_before"]


async def everything(connection: AsyncConnection) -> list[tuple[str, str, int]]:
    """App id, subject, and the Unix seconds of the revocation."""
    rows = await connection.execute(sa.select(revoked_grants))
    return [(row.app_id, row.subject, row.at) for row in rows]


async def add(connection: AsyncConnection, revoked: Iterable[tuple[str, str, int]]) -> None:
    """Of two revocations of a subject the later one stays. Those of apps that are gone are left out."""
    for app_id, subject, at_s in revoked:
        if (await connection.execute(sa.select(schema.apps.c.id).where(schema.apps.c.id == app_id))).first() is None:
            continue
        same = (revoked_grants.c.app_id == app_id) & (revoked_grants.c.subject == subject)
        stored = (await connection.execute(sa.select(revoked_grants.c.at).where(same))).scalar_one_or_none()
        if stored is None:
            await connection.execute(sa.insert(revoked_grants).values(app_id=app_id, subject=subject, at=at_s))
        elif stored < at_s:
            await connection.execute(sa.update(revoked_grants).where(same).values(at=at_s))


async def remove_before(connection: AsyncConnection, at_s: int) -> None:
    """Removes what was revoked before this time."""
    await connection.execute(sa.delete(revoked_grants).where(revoked_grants.c.at < at_s))
