"""How many messages of each app counted on a UTC day: a copy that outlives Redis' counters (cluster.md 3, key d).

Days are `YYYYMMDD`. Who counts, and what against: cluster/quota.py.
"""

from collections.abc import Mapping

import sqlalchemy as sa
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.store.schema import daily

__all__ = ["forget_before", "put", "read"]


async def read(connection: AsyncConnection, day: str) -> dict[str, int]:
    """What every app had used on `day`, by app id; an app that used nothing is missing."""
    rows = await connection.execute(sa.select(daily.c.app_id, daily.c.used).where(daily.c.day == day))
    return {row.app_id: row.used for row in rows}


async def put(connection: AsyncConnection, day: str, used: Mapping[str, int]) -> None:
    """Writes counters of `day`. One that is smaller than what stands there changes nothing: Redis lost it."""
    if not used:
        return
    row = insert(daily)
    statement = row.on_conflict_do_update(
        index_elements=[daily.c.app_id, daily.c.day],
        set_={"used": sa.func.max(daily.c.used, row.excluded.used)},
    )
    await connection.execute(statement, [{"app_id": app, "day": day, "used": count} for app, count in used.items()])


async def forget_before(connection: AsyncConnection, day: str) -> None:
    """Removes the counters of all days before `day`."""
    await connection.execute(sa.delete(daily).where(daily.c.day < day))
